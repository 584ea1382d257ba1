"""The tensor planner makes the integers of the host planner, in place."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from planlife.backends.torch_backend import TorchBackend, TorchPlan
from planlife.kernels.torch_planner import plan_into
from planlife.planner import plan_capacity, plan_tables
from planlife.spec import PlanSpec
from planlife.testing import EmulatedGraph, record

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "planner_vectors.json").read_text())
POISON = 0x7F7F7F7F
NUM_CU = 8


def poisoned_tables(rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.full((capacity, 4), POISON, dtype=torch.int32), torch.full((rows, 2), POISON, dtype=torch.int32))


def vector_plan(case, work_info, reduce_info, lens):
    plan_into(
        work_info,
        reduce_info,
        torch.tensor(lens, dtype=torch.int32).clamp_min(0),
        max_partitions=case["resolved_max_partitions"],
        sliding_window=case["sliding_window"],
        query_length=case["query_length"],
    )
    return work_info.tolist(), reduce_info.tolist()


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["id"])
def test_a_plan_equals_its_vector(case):
    tables = poisoned_tables(len(case["context_lengths"]), case["capacity"])
    assert vector_plan(case, *tables, case["context_lengths"]) == (case["work_info"], case["reduce_info"])


@pytest.mark.parametrize("case", VECTORS["refresh_cases"], ids=lambda case: case["id"])
def test_every_refresh_in_place_equals_its_vector(case):
    tables = poisoned_tables(len(case["steps"][0]["context_lengths"]), case["capacity"])
    for step in case["steps"]:
        assert vector_plan(case, *tables, step["context_lengths"]) == (step["work_info"], step["reduce_info"])


def test_two_thousand_random_plans_equal_the_host_planner():
    rng = random.Random(7)
    for _ in range(2000):
        num_cu = rng.choice([1, 3, 8, 132, 256])
        options = {
            "num_kv_heads": rng.choice([1, 2, 3, 8]),
            "num_cu": num_cu,
            "max_partitions": rng.choice([None, 1, rng.randint(1, num_cu)]),
            "workgroup_budget": rng.choice([None, rng.randint(1, 400)]),
        }
        window, query_length = rng.choice([0, 0, 1, 255, 256, 257, 9000]), rng.randint(1, 6)
        longest = rng.choice([1, 300, 5000, 300_000, 2**31 - 1])
        lens = [rng.choice([0, rng.randint(0, longest)]) for _ in range(rng.randint(1, 33))]
        work_info, reduce_info = poisoned_tables(len(lens), plan_capacity(len(lens), **options))
        plan_into(
            work_info,
            reduce_info,
            torch.tensor(lens, dtype=torch.int32),
            max_partitions=options["max_partitions"] or num_cu,
            sliding_window=window,
            query_length=query_length,
        )
        expected = plan_tables(lens, sliding_window=window, query_length=query_length, **options)
        assert (work_info.tolist(), reduce_info.tolist()) == expected, (lens, options, window, query_length)


def make_plan(rows: int = 8, **options) -> tuple[TorchBackend, TorchPlan]:
    spec = PlanSpec(4, 2, 16, 16, **{"max_context_tokens": 2000, **options})
    backend = TorchBackend()
    buffer = torch.full((backend.table_bytes(spec, rows, NUM_CU),), 0x7F, dtype=torch.uint8)
    return backend, backend.make_tables(spec, rows, NUM_CU, buffer)


def tables_of(plan: TorchPlan) -> tuple[list, list]:
    return plan.work_info.tolist(), plan.reduce_info.tolist()


def expected_tables(lens: list[int], **options) -> tuple[list, list]:
    return plan_tables(lens, num_kv_heads=2, num_cu=NUM_CU, **options)


def test_a_refresh_plans_the_whole_class_and_overwrites_every_word():
    backend, plan = make_plan(rows=8)
    backend.refresh(plan, torch.tensor([700, 0, 5], dtype=torch.int32), 3)
    assert tables_of(plan) == expected_tables([700, 0, 5, 0, 0, 0, 0, 0])


def test_fewer_rows_leave_nothing_of_an_earlier_step():
    backend, plan = make_plan(rows=8)
    backend.refresh(plan, torch.full((8,), 1500, dtype=torch.int32), 8)
    backend.refresh(plan, torch.tensor([300, 301, 302], dtype=torch.int32), 3)
    assert plan.staged_lens.tolist() == [300, 301, 302, 0, 0, 0, 0, 0]
    assert tables_of(plan) == expected_tables([300, 301, 302, 0, 0, 0, 0, 0])


def test_only_the_stated_rows_of_a_longer_length_buffer_are_planned():
    backend, plan = make_plan(rows=8)
    backend.refresh(plan, torch.tensor([300, 301, 999, 999], dtype=torch.int32), 2)
    assert tables_of(plan) == expected_tables([300, 301, 0, 0, 0, 0, 0, 0])


def test_no_lengths_means_that_all_rows_are_empty():
    backend, plan = make_plan(rows=4)
    backend.refresh(plan, torch.full((4,), 1500, dtype=torch.int32), 4)
    backend.refresh(plan, None, 4)
    assert tables_of(plan) == expected_tables([0, 0, 0, 0])


def test_lengths_are_clamped_to_zero_and_to_the_longest_context():
    backend, plan = make_plan(rows=4, max_context_tokens=600)
    lens = torch.tensor([-7, 600, 601, 2**31 - 1], dtype=torch.int32)
    backend.refresh(plan, lens, 4)
    assert tables_of(plan) == expected_tables([0, 600, 600, 600])
    assert lens.tolist() == [-7, 600, 601, 2**31 - 1]


def test_the_specs_window_query_length_cap_and_budget_reach_the_plan():
    options = {"sliding_window": 300, "query_length": 3, "max_partitions": 2, "workgroup_budget": 9}
    backend, plan = make_plan(rows=3, **options)
    backend.refresh(plan, torch.tensor([1999, 1000, 1], dtype=torch.int32), 3)
    assert tables_of(plan) == expected_tables([1999, 1000, 1], **options)


def test_the_three_tables_fill_their_bytes_without_overlap():
    for rows in range(1, 9):
        backend, plan = make_plan(rows=rows)
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.numel() * 4) for t in (plan.work_info, plan.reduce_info, plan.staged_lens)
        )
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % 16 == 0 for begin, _ in spans)
        assert spans[-1][1] - spans[0][0] == backend.table_bytes(plan.spec, rows, NUM_CU)


def test_a_recorded_refresh_plans_the_lengths_of_its_replay():
    backend, plan = make_plan(rows=4)
    lens = torch.tensor([1, 2, 3], dtype=torch.int32)
    graph = EmulatedGraph()
    with record(graph):
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
def test_the_sanitizer_tells_stale_tables_and_counts_clamped_lengths(lens, found):
    backend, plan = make_plan(rows=5)
    backend.refresh(plan, torch.tensor([700, 0, 5], dtype=torch.int32), 3)
    flags = torch.zeros(2, dtype=torch.int64)
    backend.sanitize(plan, torch.tensor(lens, dtype=torch.int32), 3, flags, 2000)
    assert tuple(flags.tolist()) == found


def test_the_sanitizer_counts_lengths_that_the_block_tables_do_not_hold():
    backend, plan = make_plan(rows=5)
    lens = torch.tensor([700, 640, 641], dtype=torch.int32)
    backend.refresh(plan, lens, 3)
    for max_tokens, num_clamped in ((640, 2), (699, 1), (700, 0)):
        flags = torch.zeros(2, dtype=torch.int64)
        backend.sanitize(plan, lens, 3, flags, max_tokens)
        assert flags.tolist() == [0, num_clamped]


def test_the_sanitizer_reads_the_tables_not_the_staged_lengths():
    backend, plan = make_plan(rows=2)
    lens = torch.tensor([700, 5], dtype=torch.int32)
    backend.refresh(plan, lens, 2)
    plan.work_info[0, 3] = 699
    flags = torch.zeros(2, dtype=torch.int64)
    backend.sanitize(plan, lens, 2, flags, 2000)
    assert flags.tolist() == [1, 0]


def test_the_sanitizer_sees_rows_that_the_step_no_longer_has():
    backend, plan = make_plan(rows=3)
    lens = torch.tensor([700, 5, 9], dtype=torch.int32)
    backend.refresh(plan, lens, 3)
    flags = torch.zeros(2, dtype=torch.int64)
    backend.sanitize(plan, lens, 2, flags, 2000)
    assert flags.tolist() == [1, 0]


def test_a_recorded_sanitizer_counts_per_replay():
    backend, plan = make_plan(rows=2)
    lens = torch.tensor([700, 5], dtype=torch.int32)
    backend.refresh(plan, lens, 2)
    flags = torch.zeros(2, dtype=torch.int64)
    graph = EmulatedGraph()
    with record(graph):
        backend.sanitize(plan, lens, 2, flags, 2000)
    graph.replay()
    assert flags.tolist() == [0, 0]
    lens.add_(1)
    graph.replay()
    graph.replay()
    assert flags.tolist() == [2, 0]
