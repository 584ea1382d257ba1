"""A layer and a refresh allocate nothing, in a recording or not: every tensor that they make is a view."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planlife import PlanSpec, Step
from planlife.aiter_library import AiterLibrary
from planlife.backends.aiter_backend import AiterBackend
from planlife.bench_aiter import IdlePlan, decode_nothing, plan_nothing
from tests.aiter_backend.packed_world import PackedWorld

BF16 = PlanSpec(8, 1, 64, 16, max_context_tokens=600, kv_layout="packed")
FP8 = replace(BF16, kv_dtype="float8_e4m3fnuz", scales="per_tensor")


class Allocations(TorchDispatchMode):
    """Names of the ops that gave a tensor in a storage which none of their arguments has; and of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.all: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = {storage_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        self.all.append(str(func))
        if made - given:
            self.names.append(str(func))
        return result


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def library(decode: Any = decode_nothing) -> AiterLibrary:
    """One without kernels, so that what is counted is the wrapper's."""
    return AiterLibrary(plan_nothing, decode, IdlePlan)


@pytest.mark.parametrize(
    ("spec", "numbers"), [(BF16, False), (FP8, False), (FP8, True)], ids=["bf16", "fp8", "numbers"]
)
@pytest.mark.parametrize("query_rows", [3, 4])
@pytest.mark.parametrize("recording", [False, True], ids=["eager", "recorded"])
def test_a_layer_and_a_refresh_allocate_nothing(
    spec: PlanSpec, numbers: bool, query_rows: int, recording: bool
) -> None:
    backend = AiterBackend(library=library(), architecture_of=lambda device: "gfx942")
    world = PackedWorld(spec, backend)
    world.set_lens([300, 0, 17])
    scales = {"key_scale": 0.5, "value_scale": 2.0} if numbers else {}
    with world.manager as manager:
        manager.plan_for(Step(world.lens[:3]))
        counted = Allocations()
        with manager.graph() if recording else nullcontext() as graph, counted:
            plan = manager.plan_for(Step(world.lens[:3]))
            world.decode(plan, rows=query_rows, table_rows=3, **scales)
            world.decode(plan, rows=query_rows, table_rows=3, **scales)
        if graph is not None:
            manager.release(graph)
    assert counted.names == []
    assert any("clamp" in name for name in counted.all)  # positive control: the refresh was seen
    # In two calls: the poison of each output, the rows behind those that have tables, both words.
    of_outputs, of_rows_behind, of_words = 2, 2 if query_rows > 3 else 0, 4 if numbers else 0
    assert sum("fill_" in name for name in counted.all) == of_outputs + of_rows_behind + of_words


def test_such_a_count_sees_what_a_library_allocates() -> None:
    """Positive control."""

    def allocating(*args: Any, **kwargs: Any) -> None:
        torch.zeros(1)

    world = PackedWorld(
        BF16, AiterBackend(library=library(allocating), architecture_of=lambda device: "gfx942"), rows=1
    )
    with world.manager:
        plan = world.plan([5])
        with Allocations() as counted:
            world.decode(plan)
    assert len(counted.names) == 1
