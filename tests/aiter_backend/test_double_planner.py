"""The planner of the double makes the published integers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from planlife.testing.aiter_double import aiter_double

from ..planner_contract import VECTORS
from .double_call import INT32, copy_of, lens_of, plan_of
from .refused_calls import LENS


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("max_partitions", "workgroup_budget", "sliding_window", "query_length")}


@pytest.mark.parametrize("generation", ["G2", "G3"])
def test_the_double_plans_the_published_integers(generation):
    for case in VECTORS["cases"]:
        with aiter_double(num_cu=case["num_cu"], generation=generation):
            plan = plan_of(lens_of(*case["context_lengths"]), case["num_kv_heads"], **options_of(case))
        assert plan.capacity == case["capacity"], case["id"]
        assert plan.max_partitions == case["resolved_max_partitions"], case["id"]
        assert plan.sliding_window == case["stored_sliding_window"], case["id"]
        assert plan.reduce_info.tolist() == case["reduce_info"], case["id"]
        assert plan.work_info.tolist() == case["work_info"], case["id"]


def test_a_refresh_writes_the_same_object_in_place():
    for case in VECTORS["refresh_cases"]:
        with aiter_double(num_cu=case["num_cu"]):
            lens = lens_of(*case["steps"][0]["context_lengths"])
            options = {"sliding_window": case["sliding_window"], "query_length": case["query_length"]}
            new = {"max_partitions": case["max_partitions"], "workgroup_budget": case["workgroup_budget"]}
            plan = plan_of(lens, case["num_kv_heads"], **new, **options)
            tables, addresses = (
                (plan.work_info, plan.reduce_info),
                (plan.work_info.data_ptr(), plan.reduce_info.data_ptr()),
            )
            for step in case["steps"]:
                lens.copy_(lens_of(*step["context_lengths"]))
                for table in tables:
                    table.fill_(0x7F7F7F7F)
                assert plan_of(lens, case["num_kv_heads"], plan=plan, **options) is plan
                assert [table.tolist() for table in tables] == [step["work_info"], step["reduce_info"]], case["id"]
            assert (plan.work_info.data_ptr(), plan.reduce_info.data_ptr()) == addresses


def test_capacities_are_the_published_ones():
    cases = sorted(VECTORS["capacity_cases"], key=lambda case: case["num_cu"])
    for num_cu, same_machine in itertools.groupby(cases, key=lambda case: case["num_cu"]):
        with aiter_double(num_cu=num_cu):
            for case in same_machine:
                new = {"max_partitions": case["max_partitions"], "workgroup_budget": case["workgroup_budget"]}
                plan = plan_of(torch.zeros(case["batch"], dtype=INT32), case["num_kv_heads"], **new)
                assert plan.capacity == case["capacity"], case


def test_negative_lengths_are_empty_rows(double):
    plan = plan_of(lens_of(-5, 300, -(2**31)))
    assert plan.reduce_info[:, 1].tolist() == [0, 2, 0]
    assert plan.work_info[plan.work_info[:, 1] < plan.work_info[:, 2], 3].tolist() == [300, 300]


def test_only_the_generation_with_total_lengths_sizes_its_budget_by_them():
    with aiter_double(num_cu=256, generation="G1b"):
        lens = torch.full((200,), 200_000, dtype=INT32)
        assert plan_of(lens, 1, query_length=4, total_context_length=200 * 200_000).capacity == 3200
        plan = plan_of(lens, 1)
        assert plan.capacity == 512
        assert plan.num_partitions.tolist() == plan.reduce_info[:, 1].tolist()
        with pytest.raises(ValueError, match="non-negative"):
            plan_of(lens, 1, total_context_length=-1)
        with pytest.raises(ValueError, match="only used when creating"):
            plan_of(lens, 1, plan=plan, total_context_length=1)
        with pytest.raises(TypeError, match="PADecodePlan"):
            plan_of(lens, 1, plan=object())


def test_a_plan_cannot_be_rebound_and_is_told_by_identity(double):
    plan = plan_of(lens_of(*LENS))
    with pytest.raises(AttributeError):
        plan.work_info = None
    assert hash(copy_of(plan)) == hash(plan)  # of the same tensors
    assert hash(copy_of(plan, work_info=plan.work_info.clone())) != hash(plan)
