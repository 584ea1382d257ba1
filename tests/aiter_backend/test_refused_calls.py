"""A call that the aiter backend refuses changes nothing: no table, no buffer, nothing that a graph keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, RouteError, Step
from planlife.testing.aiter_machine import aiter_machine

FP8 = PlanSpec(
    8, 1, 128, 16, max_context_tokens=64, kv_layout="packed", kv_dtype="float8_e4m3fnuz", scales="per_tensor"
)
SITES = {"a": FP8, "b": replace(FP8, lane="other")}


def call(**changes: Any) -> dict[str, Any]:
    """A layer of two rows; changes: arguments of pa_decode."""
    cache = torch.zeros(4, 1, 8, 16, 16).to(torch.float8_e4m3fnuz)
    tensors = {
        "output": torch.full((2, 8, 128), torch.nan, dtype=torch.bfloat16),
        "query": torch.zeros(2, 8, 128, dtype=torch.bfloat16),
        "key_cache": cache,
        "value_cache": cache.clone().view(4, 1, 1, 128, 16),
        "block_tables": torch.zeros(2, 4, dtype=torch.int32),
        "softmax_scale": 128**-0.5,
        "key_scale": torch.ones(1),
        "value_scale": torch.ones(1),
    }
    return {**tensors, **changes}


#: Whose rows, or heads, start at odd elements.
ODD = torch.zeros(2, 8 * 128 + 1, dtype=torch.bfloat16)[:, : 8 * 128].view(2, 8, 128)

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another softmax scale": ({"softmax_scale": 0.5}, ConfigError, "compiled in"),
    "lse": ({"lse": torch.zeros(2, 8)}, RouteError, "no log-sum-exps"),
    "a scale beyond float32": ({"key_scale": 1e39, "value_scale": 1.0}, ConfigError, "takes float32"),
    "odd strides of the query": ({"query": ODD}, ConfigError, "query's strides"),
    "strided tables": ({"block_tables": torch.zeros(2, 8, dtype=torch.int32)[:, ::2]}, ConfigError, "block_tables'"),
}
each_refusal = pytest.mark.parametrize(("changes", "error", "said"), REFUSED.values(), ids=REFUSED)


def state(manager: PlanManager) -> dict[str, Any]:
    return manager.report().to_dict()


@each_refusal
def test_of_a_plan_that_was_evicted_since_nothing_comes_back_and_nobody_goes(changes, error, said) -> None:
    options: dict[str, Any] = {"ladder": CapacityLadder([2]), "device": "cpu", "backend": "aiter"}
    lens = torch.tensor([20, 3], dtype=torch.int32)
    with aiter_machine("gfx942") as double:
        with PlanManager(SITES, **options) as sized:
            budget_bytes = sized.min_budget_bytes()
        with PlanManager(SITES, budget_bytes=budget_bytes, **options) as manager:
            with manager.capture_phase():
                manager.warm()
            plan = manager.plan_for(Step(lens, owner=1, site="a"))
            manager.plan_for(Step(lens, owner=1, site="b"))
            assert plan.native is None  # evicted for b
            before, refreshes = state(manager), double.refreshes
            with pytest.raises(error, match=said):
                manager.pa_decode(plan, **call(**changes))
            assert (state(manager), double.refreshes) == (before, refreshes)
            manager.pa_decode(plan, **call())  # positive control
            assert double.refreshes == refreshes + 1


@each_refusal
def test_a_graph_that_records_it_pins_nothing_for_it_and_is_replayed_without_its_step(changes, error, said) -> None:
    lens = torch.tensor([20, 3], dtype=torch.int32)
    options: dict[str, Any] = {"ladder": CapacityLadder([2]), "device": "cpu", "backend": "aiter"}
    with aiter_machine("gfx942"), PlanManager(SITES, **options) as manager:
        with manager.capture_phase():
            manager.warm()
        of_a, of_b = Step(lens, owner=1, site="a"), Step(lens, owner=1, site="b")
        plan, kept = manager.plan_for(of_a), manager.plan_for(of_b)
        layer = call()
        with manager.graph() as graph:
            with pytest.raises(error, match=said):
                manager.pa_decode(plan, **call(**changes))
            assert manager.report().pinned_bytes == 0
            manager.pa_decode(kept, **layer)
        manager.replay(graph, of_b)
        assert not layer["output"].isnan().any()
        manager.release(graph)


def test_of_more_rows_than_the_ladder_has_no_part_is_decoded_before_all_are_checked() -> None:
    lens = torch.tensor([20, 3, 17], dtype=torch.int32)
    rows = {
        "output": torch.full((3, 8, 128), torch.nan, dtype=torch.bfloat16),
        "query": torch.zeros(3, 8, 128, dtype=torch.bfloat16),
        "block_tables": torch.zeros(3, 4, dtype=torch.int32),
    }
    options: dict[str, Any] = {"ladder": CapacityLadder([2]), "device": "cpu", "backend": "aiter"}
    with aiter_machine("gfx942") as double, PlanManager(FP8, **options) as manager:
        with manager.capture_phase():
            manager.warm()
        plan = manager.plan_for(Step(lens, owner=1))
        before = double.decodes, double.refreshes, state(manager)
        with pytest.raises(ConfigError, match="compiled in"):
            manager.pa_decode(plan, **call(**rows, softmax_scale=0.5))
        assert (double.decodes, double.refreshes, state(manager)) == before
        assert rows["output"].isnan().all()
        manager.pa_decode(plan, **call(**rows))  # positive control
        assert not rows["output"].isnan().any() and double.decodes == before[0] + 2
