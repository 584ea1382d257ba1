"""The planner's contract through AiterBackend.refresh over the double, in every generation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planlife import PlanSpec
from planlife.backends.aiter_backend import AiterBackend
from planlife.planner import plan_tables
from planlife.testing.aiter_double import AiterDouble
from planlife.testing.aiter_machine import aiter_machine
from tests.planner_contract import POISON, PlannerContract

#: Above every vector's: the double bounds caps by its own, and each vector has another number.
MOST_CU = 512


@pytest.fixture(params=["G2", "G3", "newer"])
def double(request: pytest.FixtureRequest) -> Iterator[AiterDouble]:
    with aiter_machine("gfx942", generation=request.param, num_cu=MOST_CU) as double:
        yield double
    assert double.refreshes > 0 and double.violations == []


class TestPlanner(PlannerContract):
    keeps_lengths = False

    @pytest.fixture
    def backend(self, double: AiterDouble) -> AiterBackend:
        return AiterBackend()

    def compile(self, backend: Any, spec: PlanSpec, rows: int, device: Any) -> None:
        """Only the planner, once: vectors have thousands of rows, and heads that aiter does not decode."""
        tables = tables_of(backend, spec, rows, device.num_compute_units)
        backend.refresh(tables, torch.zeros(rows, dtype=torch.int32), rows)


def tables_of(backend: AiterBackend, spec: PlanSpec, rows: int, num_cu: int) -> Any:
    buffer = torch.full((backend.table_bytes(spec, rows, num_cu),), 0x7F, dtype=torch.uint8)
    return backend.make_tables(spec, rows, num_cu, buffer)


def random_spec(rng: random.Random, num_cu: int) -> PlanSpec:
    heads = rng.choice([1, 2, 3, 8])
    return PlanSpec(
        heads,
        heads,
        64,
        16,
        max_context_tokens=2**31 - 1,
        max_partitions=rng.choice([num_cu, 1, rng.randint(1, num_cu)]),
        workgroup_budget=rng.choice([2 * num_cu, rng.randint(1, 400)]),
        sliding_window=rng.choice([0, 0, 1, 255, 256, 257, 9000]),
        query_length=rng.randint(1, 6),
    )


@pytest.mark.parametrize("double", ["G3"], indirect=True)  # of every generation: the vectors
def test_ten_thousand_random_refreshes_equal_the_host_planner(double: AiterDouble) -> None:
    """Each plan is refreshed in turn for lengths that have nothing to do with the last ones, and for fewer rows."""
    rng, backend = random.Random(7), AiterBackend()
    for _ in range(1000):
        num_cu = rng.choice([1, 3, 8, 80, 132])
        spec, rows = random_spec(rng, num_cu), rng.randint(1, 17)
        tables = tables_of(backend, spec, rows, num_cu)
        assert tables.work_info[0, 0] == POISON
        plan = tables.plan
        for _ in range(10):
            longest = rng.choice([1, 300, 5000, 300_000, 2**31 - 1])
            lens = [rng.choice([0, rng.randint(0, longest)]) for _ in range(rng.randint(0, rows))]
            backend.refresh(tables, torch.tensor(lens, dtype=torch.int32), len(lens))
            expected = plan_tables(
                [*lens, *[0] * (rows - len(lens))],
                num_kv_heads=spec.num_kv_heads,
                num_cu=num_cu,
                max_partitions=spec.max_partitions,
                workgroup_budget=spec.workgroup_budget,
                sliding_window=spec.sliding_window,
                query_length=spec.query_length,
            )
            assert (tables.work_info.tolist(), tables.reduce_info.tolist()) == expected, (lens, spec)
        assert tables.plan is plan
    assert double.refreshes == 10_000
    assert double.plans_made == 0


def test_a_cap_that_does_not_reach_the_refresh_is_refused_by_the_double(double: AiterDouble) -> None:
    """Positive control: the library takes the plan's cap where none is given, and refuses another one."""
    backend = AiterBackend()
    tables = tables_of(backend, PlanSpec(2, 2, 64, 16, max_context_tokens=512, max_partitions=3), 2, 8)
    backend.refresh(tables, torch.tensor([300, 512], dtype=torch.int32), 2)
    tables.max_partitions = 4
    with pytest.raises(ValueError, match="max_partitions must match the reused plan"):
        backend.refresh(tables, torch.tensor([300, 512], dtype=torch.int32), 2)
