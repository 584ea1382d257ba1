"""What every backend's planner and sanitizer must do, whoever computes it. Subclasses say which backend, and where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planlife.backends.base import Backend
from planlife.planner import plan_tables
from planlife.spec import PlanSpec
from planlife.testing import EmulatedGraph, record

VECTORS = json.loads((Path(__file__).parent / "data" / "planner_vectors.json").read_text("utf-8"))
POISON = 0x7F7F7F7F
NUM_CU = 8


@contextmanager
def recorded(device: str) -> Iterator[Any]:
    """A graph of that device that records the body."""
    if device == "cpu":
        with record(EmulatedGraph()) as graph:
            yield graph
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph


def expected_tables(lens: list[int], **options: Any) -> tuple[list[Any], list[Any]]:
    return plan_tables(lens, num_kv_heads=2, num_cu=NUM_CU, **options)


def tables_of(plan: Any) -> tuple[list[Any], list[Any]]:
    return plan.work_info.tolist(), plan.reduce_info.tolist()


def spec_of_vector(case: dict[str, Any]) -> PlanSpec:
    return PlanSpec(
        case["num_kv_heads"],
        case["num_kv_heads"],
        16,
        16,
        max_context_tokens=2**31 - 1,
        max_partitions=case["max_partitions"],
        workgroup_budget=case["workgroup_budget"],
        sliding_window=max(case["sliding_window"], 0),
        query_length=case["query_length"],
    )


class PlannerContract:
    """Contract of refresh and sanitize.

    keeps_lengths: whether records have the whole length of a row past the bound, or the bound.
    """

    keeps_lengths = True

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError

    @pytest.fixture
    def device(self) -> str:
        return "cpu"

    @pytest.fixture
    def lens_of(self, device):
        return lambda values: torch.tensor(values, dtype=torch.int32, device=device)

    def compile(self, backend: Backend, spec: PlanSpec, rows: int, device: Any) -> None:
        """What refresh and sanitize need."""
        backend.compile(spec, rows, device)

    @pytest.fixture
    def make(self, backend, device):
        """A table set of `rows` rows, full of poison."""

        def make(spec: PlanSpec, rows: int, num_cu: int = NUM_CU) -> Any:
            self.compile(backend, spec, rows, SimpleNamespace(name=device, num_compute_units=num_cu))
            buffer = torch.full((backend.table_bytes(spec, rows, num_cu),), 0x7F, dtype=torch.uint8, device=device)
            return backend.make_tables(spec, rows, num_cu, buffer)

        return make

    @pytest.fixture
    def make_plan(self, make):
        return lambda rows=8, **options: make(PlanSpec(4, 2, 16, 16, **{"max_context_tokens": 2000, **options}), rows)

    @pytest.fixture
    def flags(self, device):
        return torch.zeros(2, dtype=torch.int64, device=device)

    @pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["id"])
    def test_a_plan_equals_its_vector(self, backend, make, lens_of, case):
        plan = make(spec_of_vector(case), len(case["context_lengths"]), case["num_cu"])
        backend.refresh(plan, lens_of(case["context_lengths"]), len(case["context_lengths"]))
        assert tables_of(plan) == (case["work_info"], case["reduce_info"])

    @pytest.mark.parametrize("case", VECTORS["refresh_cases"], ids=lambda case: case["id"])
    def test_every_refresh_in_place_equals_its_vector(self, backend, make, lens_of, case):
        rows = len(case["steps"][0]["context_lengths"])
        plan = make(spec_of_vector(case), rows, case["num_cu"])
        for step in case["steps"]:
            backend.refresh(plan, lens_of(step["context_lengths"]), rows)
            assert tables_of(plan) == (step["work_info"], step["reduce_info"])

    def test_a_refresh_plans_the_whole_class_and_overwrites_every_word(self, backend, make_plan, lens_of):
        plan = make_plan(rows=8)
        backend.refresh(plan, lens_of([700, 0, 5]), 3)
        assert tables_of(plan) == expected_tables([700, 0, 5, 0, 0, 0, 0, 0])

    def test_fewer_rows_leave_nothing_of_an_earlier_step(self, backend, make_plan, lens_of):
        plan = make_plan(rows=8)
        backend.refresh(plan, lens_of([1500] * 8), 8)
        backend.refresh(plan, lens_of([300, 301, 302]), 3)
        assert plan.staged_lens.tolist() == [300, 301, 302, 0, 0, 0, 0, 0]
        assert tables_of(plan) == expected_tables([300, 301, 302, 0, 0, 0, 0, 0])

    def test_only_the_stated_rows_of_a_longer_length_buffer_are_planned(self, backend, make_plan, lens_of):
        plan = make_plan(rows=8)
        backend.refresh(plan, lens_of([300, 301, 999, 999]), 2)
        assert tables_of(plan) == expected_tables([300, 301, 0, 0, 0, 0, 0, 0])

    def test_no_lengths_means_that_all_rows_are_empty(self, backend, make_plan, lens_of):
        plan = make_plan(rows=4)
        backend.refresh(plan, lens_of([1500] * 4), 4)
        backend.refresh(plan, None, 4)
        assert tables_of(plan) == expected_tables([0, 0, 0, 0])

    def test_no_rows_of_a_step_are_a_plan_without_tasks(self, backend, make_plan, lens_of):
        plan = make_plan(rows=4)
        backend.refresh(plan, lens_of([]), 0)
        assert tables_of(plan) == expected_tables([0, 0, 0, 0])
        assert plan.staged_lens.tolist() == [0, 0, 0, 0]

    @pytest.mark.parametrize("options", [{}, {"sliding_window": 300, "query_length": 4}], ids=str)
    def test_rows_have_tiles_from_zero_to_the_longest_context_whatever_their_lengths(
        self, backend, make_plan, lens_of, options
    ):
        plan = make_plan(rows=6, max_context_tokens=600, **options)
        lens = [-7, 600, 601, 6000, -(2**31), 2**31 - 1]
        given = lens_of(lens)
        backend.refresh(plan, given, 6)
        assert given.tolist() == lens
        work_info, reduce_info = expected_tables([0, 600, 600, 600, 0, 600], **options)
        assert [record[:3] for record in plan.work_info.tolist()] == [record[:3] for record in work_info]
        assert plan.reduce_info.tolist() == reduce_info
        if self.keeps_lengths:
            work_info = expected_tables(lens, max_context_tokens=600, **options)[0]
        assert plan.work_info.tolist() == work_info

    def test_the_specs_window_query_length_cap_and_budget_reach_the_plan(self, backend, make_plan, lens_of):
        options = {"sliding_window": 300, "query_length": 3, "max_partitions": 2, "workgroup_budget": 9}
        plan = make_plan(rows=3, **options)
        backend.refresh(plan, lens_of([1999, 1000, 1]), 3)
        assert tables_of(plan) == expected_tables([1999, 1000, 1], **options)

    def test_the_tables_lie_in_their_bytes_without_overlap(self, backend, make_plan):
        for rows in (1, 2, 3, 8):
            plan = make_plan(rows=rows)
            spans = sorted(
                (t.data_ptr(), t.data_ptr() + t.numel() * 4)
                for t in (plan.work_info, plan.reduce_info, plan.staged_lens)
            )
            assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
            assert all(begin % 16 == 0 for begin, _ in spans)
            assert spans[-1][1] - spans[0][0] <= backend.table_bytes(plan.spec, rows, NUM_CU)

    def test_a_refresh_writes_nothing_outside_its_bytes(self, backend, device, lens_of, make_plan):
        for rows in (1, 5):
            spec = make_plan(rows=rows).spec
            num_bytes = backend.table_bytes(spec, rows, NUM_CU)
            buffer = torch.full((num_bytes + 256,), 0x7F, dtype=torch.uint8, device=device)
            plan = backend.make_tables(spec, rows, NUM_CU, buffer[:num_bytes])
            backend.refresh(plan, lens_of([2000] * rows), rows)
            assert plan.reduce_info[0, 1] > 0
            assert (buffer[num_bytes:] == 0x7F).all()

    def test_a_recorded_refresh_plans_the_lengths_of_its_replay(self, backend, device, make_plan, lens_of):
        plan = make_plan(rows=4)
        lens = lens_of([1, 2, 3])
        with recorded(device) as graph:
            backend.refresh(plan, lens, 3)
        assert plan.reduce_info[0, 0] == POISON  # recording runs nothing
        for values in ([1000, 0, 257], [0, 0, 0], [5, 1999, 256]):
            lens.copy_(torch.tensor(values))
            graph.replay()
            assert tables_of(plan) == expected_tables([*values, 0])

    @pytest.mark.parametrize(
        ("lens", "found"),
        [
            ([700, 0, 5], (0, 0)),
            ([701, 0, 5], (1, 0)),
            ([700, 1, 5], (1, 0)),
            ([0, 0, 0], (1, 0)),
            ([2001, 0, 3000], (1, 2)),
        ],
    )
    def test_the_sanitizer_tells_stale_tables_and_counts_clamped_lengths(
        self, backend, make_plan, lens_of, flags, lens, found
    ):
        plan = make_plan(rows=5)
        backend.refresh(plan, lens_of([700, 0, 5]), 3)
        backend.sanitize(plan, lens_of(lens), 3, flags, 2000)
        assert tuple(flags.tolist()) == found

    def test_the_sanitizer_counts_lengths_that_the_block_tables_do_not_hold(self, backend, make_plan, lens_of, flags):
        plan = make_plan(rows=5)
        lens = lens_of([700, 640, 641])
        backend.refresh(plan, lens, 3)
        for max_tokens, num_clamped in ((640, 2), (699, 1), (700, 0)):
            flags.zero_()
            backend.sanitize(plan, lens, 3, flags, max_tokens)
            assert flags.tolist() == [0, num_clamped]

    def test_the_sanitizer_tells_lengths_past_the_bound_apart_where_the_edges_do(
        self, backend, make_plan, lens_of, flags
    ):
        plan = make_plan(rows=5, max_context_tokens=600)
        backend.refresh(plan, lens_of([601, 2**31 - 1, 600]), 3)
        backend.sanitize(plan, lens_of([601, 2**31 - 1, 600]), 3, flags, 600)
        assert flags.tolist() == [0, 2]
        backend.sanitize(plan, lens_of([602, 2**31 - 1, 600]), 3, flags, 600)
        assert flags.tolist() == [int(self.keeps_lengths), 4]

    def test_the_sanitizer_reads_the_tables_not_the_staged_lengths(self, backend, make_plan, lens_of, flags):
        plan = make_plan(rows=2)
        lens = lens_of([700, 5])
        backend.refresh(plan, lens, 2)
        plan.work_info[0, 3] = 699
        backend.sanitize(plan, lens, 2, flags, 2000)
        assert flags.tolist() == [1, 0]

    def test_the_sanitizer_sees_rows_that_the_step_no_longer_has(self, backend, make_plan, lens_of, flags):
        plan = make_plan(rows=3)
        lens = lens_of([700, 5, 9])
        backend.refresh(plan, lens, 3)
        backend.sanitize(plan, lens, 2, flags, 2000)
        backend.sanitize(plan, lens[:0], 0, flags, 2000)
        assert flags.tolist() == [2, 0]

    def test_tables_that_were_emptied_on_purpose_are_never_stale(self, backend, make_plan, lens_of, flags):
        plan = make_plan(rows=3)
        backend.refresh(plan, None, 0)
        backend.sanitize(plan, lens_of([700, 5, 9000]), 3, flags, 2000)
        assert flags.tolist() == [0, 1]
        backend.refresh(plan, lens_of([]), 0)
        backend.sanitize(plan, lens_of([700, 5, 9000]), 3, flags, 2000)
        assert flags.tolist() == [1, 2]

    def test_the_sanitizer_survives_tables_full_of_garbage(self, backend, make_plan, lens_of, flags):
        plan = make_plan(rows=3)
        lens = lens_of([700, 5, 9])
        backend.refresh(plan, lens, 3)
        plan.reduce_info.fill_(POISON)
        backend.sanitize(plan, lens, 3, flags, 2000)
        assert flags.tolist() == [1, 0]

    def test_a_recorded_sanitizer_counts_per_replay(self, backend, device, make_plan, lens_of, flags):
        plan = make_plan(rows=2)
        lens = lens_of([700, 5])
        backend.refresh(plan, lens, 2)
        with recorded(device) as graph:
            backend.sanitize(plan, lens, 2, flags, 2000)
        graph.replay()
        assert flags.tolist() == [0, 0]
        lens.add_(1)
        graph.replay()
        graph.replay()
        assert flags.tolist() == [2, 0]
