"""The tensor planner makes the integers of the host planner, in place."""

from __future__ import annotations

import random

import pytest
import torch

from planlife.backends.torch_backend import TorchBackend
from planlife.kernels.torch_planner import plan_into
from planlife.planner import plan_capacity, plan_tables
from tests.planner_contract import POISON, PlannerContract


class TestTorchPlanner(PlannerContract):
    @pytest.fixture
    def backend(self) -> TorchBackend:
        return TorchBackend()


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
        bound = rng.choice([None, 1, 256, rng.randint(1, longest)])
        work_info = torch.full((plan_capacity(len(lens), **options), 4), POISON, dtype=torch.int32)
        reduce_info = torch.full((len(lens), 2), POISON, dtype=torch.int32)
        plan_into(
            work_info,
            reduce_info,
            torch.tensor(lens, dtype=torch.int32),
            max_partitions=options["max_partitions"] or num_cu,
            sliding_window=window,
            query_length=query_length,
            **({} if bound is None else {"max_context_tokens": bound}),
        )
        expected = plan_tables(
            lens, sliding_window=window, query_length=query_length, max_context_tokens=bound, **options
        )
        assert (work_info.tolist(), reduce_info.tolist()) == expected, (lens, options, window, query_length, bound)
