"""The host planner against the vectors, and the properties that every plan has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planlife.errors import ConfigError
from planlife.planner import TILE_TOKENS, plan_capacity, plan_tables

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "planner_vectors.json").read_text("utf-8"))
PLAN_KEYS = ("num_kv_heads", "num_cu", "max_partitions", "workgroup_budget", "sliding_window", "query_length")


def plan_of(case: dict[str, Any], lens: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    return plan_tables(lens, **{key: case[key] for key in PLAN_KEYS})


def test_all_vectors_are_here():
    assert (len(VECTORS["cases"]), len(VECTORS["refresh_cases"]), len(VECTORS["capacity_cases"])) == (59, 4, 936)


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["id"])
def test_a_plan_equals_its_vector(case):
    assert plan_of(case, case["context_lengths"]) == (case["work_info"], case["reduce_info"])


@pytest.mark.parametrize("case", VECTORS["refresh_cases"], ids=lambda case: case["id"])
def test_every_step_of_a_refresh_sequence_equals_its_vector(case):
    for step in case["steps"]:
        assert plan_of(case, step["context_lengths"]) == (step["work_info"], step["reduce_info"])


def test_every_capacity_equals_its_vector():
    for case in VECTORS["capacity_cases"]:
        arguments = {key: case[key] for key in PLAN_KEYS[:4]}
        assert plan_capacity(case["batch"], **arguments) == case["capacity"], case


@st.composite
def plan_arguments(draw):
    num_cu = draw(st.integers(1, 40))
    return draw(st.lists(st.integers(-3, 30_000), min_size=1, max_size=40)), {
        "num_kv_heads": draw(st.integers(1, 9)),
        "num_cu": num_cu,
        "max_partitions": draw(st.none() | st.integers(1, num_cu)),
        "workgroup_budget": draw(st.none() | st.integers(1, 300)),
        "sliding_window": draw(st.sampled_from([-1, 0, 1, 255, 256, 257, 5000, 2**40])),
        "query_length": draw(st.integers(1, 6)),
    }


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan_arguments())
def test_every_tile_that_a_query_sees_is_in_exactly_one_record_of_its_row(arguments):
    lens, options = arguments
    work_info, reduce_info = plan_tables(lens, **options)
    window = max(options["sliding_window"], 0)
    for row, (length, (slot, tasks)) in enumerate(zip(lens, reduce_info, strict=True)):
        oldest = max(length - options["query_length"] + 1 - window, 0) if window else 0
        wanted = list(range(oldest // TILE_TOKENS, -(-max(length, 0) // TILE_TOKENS)))
        records = work_info[slot : slot + tasks]
        assert [tile for _, begin, end, _ in records for tile in range(begin, end)] == wanted
        assert all(end > begin for _, begin, end, _ in records)
        assert all(record[0] == row and record[3] == length for record in records)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan_arguments())
def test_slots_are_packed_by_row_and_zero_behind_the_last_task(arguments):
    lens, options = arguments
    work_info, reduce_info = plan_tables(lens, **options)
    capacity = plan_capacity(
        len(lens), **{key: options[key] for key in ("num_kv_heads", "num_cu", "max_partitions", "workgroup_budget")}
    )
    next_slot = 0
    for length, (slot, tasks) in zip(lens, reduce_info, strict=True):
        assert slot == next_slot
        assert (tasks > 0) == (length > 0)
        assert tasks <= (options["max_partitions"] or options["num_cu"])
        next_slot += tasks
    assert next_slot <= capacity == len(work_info)
    assert work_info[next_slot:] == [[0, 0, 0, 0]] * (capacity - next_slot)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan_arguments(), st.integers(1, 6))
def test_without_a_window_the_query_length_changes_nothing(arguments, query_length):
    lens, options = arguments
    dense = {**options, "sliding_window": 0}
    assert plan_tables(lens, **dense) == plan_tables(lens, **{**dense, "query_length": query_length})


def test_with_a_window_the_query_length_matters():
    options = {"num_kv_heads": 1, "num_cu": 8, "sliding_window": 256}
    assert plan_tables([512], **options) != plan_tables([512], **options, query_length=2)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lens=st.lists(st.integers(0, 3000) | st.integers(0, 2**31 - 1), min_size=1, max_size=8),
    bound=st.integers(1, 2000),
    query_length=st.integers(1, 6),
    window=st.sampled_from([0, 1, 255, 256, 257, 5000]),
)
def test_the_tiles_of_a_row_past_the_bound_hold_all_that_its_query_tokens_see_within_it(
    lens, bound, query_length, window
):
    options = {"num_kv_heads": 1, "num_cu": 8, "sliding_window": window, "query_length": query_length}
    work_info, reduce_info = plan_tables(lens, max_context_tokens=bound, **options)
    clamped, of_clamped = plan_tables([min(length, bound) for length in lens], **options)
    assert reduce_info == of_clamped  # so that no table grows
    assert [record[:3] for record in work_info] == [record[:3] for record in clamped]
    for row, (length, (slot, tasks)) in enumerate(zip(lens, reduce_info, strict=True)):
        records = work_info[slot : slot + tasks]
        assert {(record[0], record[3]) for record in records} == ({(row, length)} if length else set())
        for end in range(length - query_length + 1, length + 1):
            begin, end = max(end - window, 0) if window else 0, min(end, bound)
            if begin < end:
                assert records[0][1] * 256 <= begin and end <= records[-1][2] * 256


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=20), st.integers(1, 20))
def test_empty_rows_behind_change_no_integer_of_the_real_rows(lens, num_empty):
    options = {"num_kv_heads": 1, "num_cu": 50, "workgroup_budget": 50}  # the same capacity with and without them
    work_info, reduce_info = plan_tables(lens + [0] * num_empty, **options)
    assert (work_info, reduce_info[: len(lens)]) == plan_tables(lens, **options)
    assert all(tasks == 0 for _, tasks in reduce_info[len(lens) :])


@pytest.mark.parametrize(
    ("lens", "options", "named"),
    [
        ([], {}, "at least one row"),
        ([1.5], {}, r"context_lens\[0\] must be an int, got 1.5"),
        ([7, True], {}, r"context_lens\[1\] must be an int, got True"),
        ([2**31], {}, "must fit int32, got 2147483648"),
        ([1], {"num_kv_heads": 0}, "num_kv_heads must be >= 1, got 0"),
        ([1], {"num_cu": 0}, "num_cu must be >= 1, got 0"),
        ([1], {"max_partitions": 0}, "max_partitions"),
        ([1], {"max_partitions": 9}, r"max_partitions.*in \[1, 8\], got 9"),
        ([1], {"workgroup_budget": 0}, "workgroup_budget must be >= 1, got 0"),
        ([1], {"sliding_window": -2}, "sliding_window must be >= -1, got -2"),
        ([1], {"sliding_window": 1.5}, "sliding_window must be an int, got 1.5"),
        ([1], {"query_length": 0}, "query_length must be >= 1, got 0"),
        ([1], {"max_context_tokens": 0}, "max_context_tokens must be >= 1, got 0"),
        ([1], {"query_length": True}, "query_length must be an int, got True"),
    ],
)
def test_a_value_that_no_plan_can_have_is_named(lens, options, named):
    with pytest.raises(ConfigError, match=named):
        plan_tables(lens, **{"num_kv_heads": 1, "num_cu": 8, **options})


def test_the_values_beside_those_are_taken():
    plan_tables(
        [2**31 - 1, -(2**31)], num_kv_heads=1, num_cu=8, max_partitions=8, workgroup_budget=1, sliding_window=-1
    )
