"""Random cases for the Triton planner: PlanSpecs with lengths, and what the tensor planner makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from planlife.kernels.torch_planner import plan_into
from planlife.planner import spec_capacity
from planlife.spec import PlanSpec

NUM_CUS = (1, 3, 8, 132, 256, 304)


class Case(NamedTuple):
    spec: PlanSpec
    num_cu: int
    plan_rows: int
    lens: list[int]  # of the step, at most plan_rows


def random_cases(seed: int, count: int, max_rows: int) -> Iterator[Case]:
    rng = random.Random(seed)
    for _ in range(count):
        num_cu = rng.choice(NUM_CUS)
        longest = rng.choice([1, 300, 5000, 300_000, 2**31 - 1])
        plan_rows = rng.choice([1, rng.randint(1, max_rows), max_rows])
        heads = rng.choice([1, 2, 3, 8])
        spec = PlanSpec(
            heads,
            heads,
            16,
            16,
            max_context_tokens=rng.choice([2**31 - 1, max(longest // 2, 6)]),
            max_partitions=rng.choice([None, 1, rng.randint(1, num_cu)]),
            workgroup_budget=rng.choice([None, rng.randint(1, 400), rng.randint(1, 40_000)]),
            sliding_window=rng.choice([0, 0, 1, 255, 256, 257, 9000, 2**31 - 1, 2**40, 2**63 - 1]),
            query_length=rng.randint(1, 6),
        )
        empty = rng.choice([0.0, 0.5, 0.95])
        lens = [0 if rng.random() < empty else rng.randint(-3, longest) for _ in range(rng.randint(1, plan_rows))]
        yield Case(spec, num_cu, plan_rows, lens)


def tensor_plan(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(work_info, reduce_info) by the tensor planner."""
    spec = case.spec
    work_info = torch.empty((spec_capacity(spec, case.plan_rows, case.num_cu), 4), dtype=torch.int32, device=device)
    reduce_info = torch.empty((case.plan_rows, 2), dtype=torch.int32, device=device)
    lens = torch.zeros(case.plan_rows, dtype=torch.int32, device=device)
    lens[: len(case.lens)] = torch.tensor(case.lens, dtype=torch.int32).clamp_min(0)
    plan_into(
        work_info,
        reduce_info,
        lens,
        max_partitions=spec.max_partitions or case.num_cu,
        sliding_window=spec.sliding_window,
        query_length=spec.query_length,
        max_context_tokens=spec.max_context_tokens,
    )
    return work_info, reduce_info


def assert_case(backend: Any, make: Any, case: Case, device: str) -> None:
    """The backend's plan of a case, over poisoned tables, is the tensor planner's."""
    plan = make(case.spec, case.plan_rows, case.num_cu)
    backend.refresh(plan, torch.tensor(case.lens, dtype=torch.int32, device=device), len(case.lens))
    work_info, reduce_info = tensor_plan(case, device)
    assert torch.equal(plan.reduce_info, reduce_info), case
    assert torch.equal(plan.work_info, work_info), case
