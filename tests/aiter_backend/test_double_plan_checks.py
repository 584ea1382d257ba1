"""What the double's plan_pa_decode refuses, in the library's order, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planlife.testing.aiter_double import aiter_double

from ..planner_contract import VECTORS
from .double_call import INT32, copy_of, lens_of, plan_of
from .refused_calls import LENS, PLAN_FAULTS, VALIDATE_FAULTS


def _windowed() -> Any:
    return plan_of(lens_of(*LENS), sliding_window=128, query_length=2)


#: By the vectors' names of them: calls, each of which must raise.
INVALID_CALLS: dict[str, list[Callable[[], Any]]] = {
    "sliding_window=1.5": [lambda: plan_of(lens_of(*LENS), sliding_window=1.5)],
    "sliding_window=-2": [lambda: plan_of(lens_of(*LENS), sliding_window=-2)],
    "query_length=1.5": [lambda: plan_of(lens_of(*LENS), query_length=1.5)],
    "query_length=0": [lambda: plan_of(lens_of(*LENS), query_length=0)],
    "lengths int64 or on cpu": [
        lambda: plan_of(lens_of(*LENS).long()),
        lambda: plan_of(torch.empty(2, dtype=INT32, device="meta")),  # a CPU is this double's GPU
    ],
    "lengths 2-D or strided": [lambda: plan_of(lens_of(*LENS)[None]), lambda: plan_of(lens_of(1, 2, 3, 4)[::2])],
    "batch 0 or 4097": [lambda: plan_of(lens_of()), lambda: plan_of(torch.zeros(4097, dtype=INT32))],
    "num_kv_heads=0": [lambda: plan_of(lens_of(*LENS), 0)],
    "max_partitions=0 or CU+1": [
        lambda: plan_of(lens_of(*LENS), max_partitions=0),
        lambda: plan_of(lens_of(*LENS), max_partitions=9),
    ],
    "workgroup_budget=0 (new plan)": [lambda: plan_of(lens_of(*LENS), workgroup_budget=0)],
    "plan=p, workgroup_budget=anything not None": [
        lambda: plan_of(lens_of(*LENS), plan=plan_of(lens_of(*LENS), workgroup_budget=16), workgroup_budget=16)
    ],
    "plan=p, max_partitions != p.max_partitions": [
        lambda: plan_of(lens_of(*LENS), plan=plan_of(lens_of(*LENS)), max_partitions=7)
    ],
    "plan=p, max(sliding_window,0) != p.sliding_window": [
        lambda: plan_of(lens_of(*LENS), plan=plan_of(lens_of(*LENS)), sliding_window=1),
        lambda: plan_of(lens_of(*LENS), plan=_windowed(), query_length=2),
    ],
    "plan=windowed p, query_length != p.query_length": [
        lambda: plan_of(lens_of(*LENS), plan=_windowed(), sliding_window=128, query_length=1)
    ],
    "plan=dense p, query_length != p.query_length": [
        lambda: plan_of(lens_of(*LENS), plan=plan_of(lens_of(*LENS)), query_length=4)
    ],
    "plan=p, other num_kv_heads": [lambda: plan_of(lens_of(*LENS), 2, plan=plan_of(lens_of(*LENS)))],
    "plan=p, other batch": [lambda: plan_of(lens_of(1, 2, 3), plan=plan_of(lens_of(*LENS)))],
}


def test_every_published_invalid_call_has_a_test():
    assert INVALID_CALLS.keys() == {case["call"] for case in VECTORS["invalid_calls"]}


@pytest.mark.parametrize("case", VECTORS["invalid_calls"], ids=lambda case: case["call"])
def test_the_planner_refuses_a_published_invalid_call(double, case):
    for call in INVALID_CALLS[case["call"]]:
        if case["error"] is None:
            assert call().query_length == 1
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert type(caught.value).__name__ == case["error"]
        fixed = case["gist"].replace("CUDA int32 tensor", "CUDA int32").replace("[1, CU]", "[1, 8]")
        assert fixed.removeprefix("plan ") in str(caught.value)


@pytest.mark.parametrize(
    "valid",
    [
        {"sliding_window": -1},
        {"sliding_window": True},  # a bool is an int to the library
        {"max_partitions": 8},
        {"max_partitions": 1},
        {"workgroup_budget": 1},
        {"query_length": 9},
    ],
)
def test_the_planner_takes_what_is_just_inside_its_limits(double, valid):
    assert plan_of(lens_of(*LENS), **valid).reduce_info[:, 1].min() > 0


def test_4096_rows_are_a_plan(double):
    assert plan_of(torch.ones(4096, dtype=INT32)).capacity == 4096


@pytest.mark.parametrize("second", range(1, len(PLAN_FAULTS)))
def test_of_several_faults_the_planner_names_the_first(double, second):
    plan = plan_of(lens_of(*LENS))
    later, _ = PLAN_FAULTS[second]
    for earlier, message in PLAN_FAULTS[:second]:
        if earlier.keys() & later.keys():
            continue
        call = {"context_lengths": lens_of(*LENS), "num_kv_heads": 1, **later, **earlier}
        with pytest.raises((TypeError, ValueError), match=message):
            plan_of(call.pop("context_lengths"), call.pop("num_kv_heads"), plan=plan, **call)


def _plan_with(**changed: Any) -> Any:
    return copy_of(plan_of(lens_of(*LENS)), **changed)


def test_a_plan_is_validated_in_order(double):
    assert _plan_with().validate(2, 1, torch.device("cpu")) is None
    for changed, message in VALIDATE_FAULTS:
        with pytest.raises(ValueError, match=message):
            _plan_with(**changed).validate(2, 1, torch.device("cpu"))
    for at, (earlier, message) in enumerate(VALIDATE_FAULTS):
        for later, _ in VALIDATE_FAULTS[at + 1 :]:
            if not earlier.keys() & later.keys():
                with pytest.raises(ValueError, match=message):
                    _plan_with(**later, **earlier).validate(2, 1, torch.device("cpu"))


def test_the_first_generations_cap_partitions_at_256_on_every_device():
    with aiter_double(generation="G1a", num_cu=8):
        plan = plan_of(lens_of(1, 2), max_partitions=100)
        with pytest.raises(ValueError, match="must match the reused plan"):
            plan_of(lens_of(1, 2), plan=plan)  # left out, it means 256 there
        with pytest.raises(ValueError, match=r"\[1, 256\]"):
            plan_of(lens_of(1, 2), max_partitions=257)


def test_more_than_4096_rows_need_max_batch_size_and_gfx1250():
    lens = torch.ones(5000, dtype=INT32)
    with aiter_double(arch="gfx1250", optional=("max_batch_size",)):
        assert plan_of(lens, max_batch_size=5000).capacity == 5000
        with pytest.raises(ValueError, match="4096"):
            plan_of(lens)
        with pytest.raises(ValueError, match="81792"):
            plan_of(lens, max_batch_size=81_793)
    with aiter_double(arch="gfx950", optional=("max_batch_size",)):
        with pytest.raises(ValueError, match="gfx1250"):
            plan_of(lens, max_batch_size=5000)


def test_a_float_max_partitions_makes_no_plan_and_refreshes_one():
    with aiter_double(num_cu=8):
        for budget in (None, 1):
            with pytest.raises(TypeError):
                plan_of(lens_of(*LENS), max_partitions=8.0, workgroup_budget=budget)
        with pytest.raises(ValueError):  # noqa: PT011 - the bounds come first
            plan_of(lens_of(*LENS), max_partitions=9.0)
        plan = plan_of(lens_of(*LENS), max_partitions=8)
        assert plan_of(lens_of(*LENS), max_partitions=8.0, plan=plan) is plan
