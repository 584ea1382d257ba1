"""The double of aiter refuses what the library refuses, computes what it computes, and sees what that does not."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planlife.testing import EmulatedGraph, launch, record, reference_decode, row_errors
from planlife.testing.aiter_double import (
    GENERATIONS,
    OPTIONAL,
    STRANGERS,
    AiterDouble,
    DoubleViolation,
    aiter_double,
    device_side,
)
from planlife.testing.aiter_double.host_checks import check_decode
from tests.aiter_backend.double_call import fp8_of, pa_decode, plan_of, scratch_of, valid_call

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "planner_vectors.json").read_text())
MODULE = "aiter.ops.flydsl.pa_decode"
INT32 = torch.int32
ALL_DECODE_ARGUMENTS = dict.fromkeys(("query_scale", "alibi_slopes", "sinks")) | {"context_partition_size": 256}
BOUND = 2**-8 + 3e-6  # rounding of a bfloat16 output


def lens_of(*lens: int) -> torch.Tensor:
    return torch.tensor(lens, dtype=INT32)


@pytest.fixture
def double() -> Iterator[AiterDouble]:
    with aiter_double(arch="gfx942", num_cu=8) as double:
        yield double


# The planner


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


def _windowed() -> Any:
    return plan_of(lens_of(300, 17), sliding_window=128, query_length=2)


LENS = (300, 17)
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


#: Faults of a refresh of a dense plan for two rows, in the library's order: arguments, and what the message says.
PLAN_FAULTS = [
    ({"sliding_window": 1.5}, "sliding_window must be an int"),
    ({"sliding_window": -2}, "sliding_window must be -1"),
    ({"query_length": "1"}, "query_length must be an int"),
    ({"query_length": 0}, "query_length must be positive"),
    ({"context_lengths": torch.zeros(3, 2, dtype=torch.int64)}, "CUDA int32"),
    ({"context_lengths": torch.zeros(3, 2, dtype=INT32)}, "contiguous vector"),
    ({"context_lengths": torch.zeros(4097, dtype=INT32)}, "4096"),
    ({"num_kv_heads": 0}, "num_kv_heads"),
    ({"max_partitions": 9}, r"max_partitions must be in \[1, 8\]"),
    ({"workgroup_budget": 16}, "workgroup_budget is fixed"),
    ({"max_partitions": 7}, "max_partitions must match"),
    ({"sliding_window": 5}, "sliding_window must match"),
    ({"context_lengths": torch.zeros(3, dtype=INT32)}, r"reduce_info must have shape"),
]


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
    plan = plan_of(lens_of(*LENS))
    names = ("work_info", "reduce_info", "num_kv_heads", "max_partitions", "sliding_window", "query_length")
    return type(plan)(**{name: getattr(plan, name) for name in names} | changed)


#: Faults of a plan in validate's order.
VALIDATE_FAULTS = [
    ({"num_kv_heads": 2}, "KV head count"),
    ({"max_partitions": 9}, "max_partitions"),
    ({"sliding_window": -1}, "invalid plan sliding_window or query_length"),
    ({"query_length": 0}, "invalid plan sliding_window or query_length"),
    ({"reduce_info": torch.zeros(3, 2, dtype=INT32)}, "reduce_info must have shape"),
    ({"work_info": torch.zeros(16, 3, dtype=INT32)}, "work_info must have shape"),
    ({"work_info": torch.zeros(1, 4, dtype=INT32)}, "capacity"),
    ({"work_info": torch.zeros(17, 4, dtype=INT32)}, "capacity"),
    ({"work_info": torch.zeros(16, 4, dtype=torch.int64)}, "int32 on the query device"),
    ({"work_info": torch.zeros(16, 4, dtype=INT32, device="meta")}, "int32 on the query device"),
    ({"work_info": torch.zeros(16, 8, dtype=INT32)[:, ::2]}, "contiguous"),
    ({"reduce_info": torch.zeros(2, 2, dtype=torch.int64)}, "int32 on the query device"),
    ({"reduce_info": torch.zeros(2, 4, dtype=INT32)[:, ::2]}, "contiguous"),
]


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


def test_a_plan_cannot_be_rebound_and_is_told_by_identity(double):
    plan = plan_of(lens_of(*LENS))
    with pytest.raises(AttributeError):
        plan.work_info = None
    assert hash(plan) == hash(plan)


# Decode: what the host refuses


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Equal, with gaps in the last dimension."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    wide[..., ::2] = tensor
    return wide[..., ::2]


Spoil = Callable[[dict[str, Any]], dict[str, Any]]


def _cast(name: str, dtype: torch.dtype) -> Spoil:
    return lambda c: {name: c[name].to(dtype)}


def _meta(name: str) -> Spoil:
    return lambda c: {name: torch.empty_like(c[name], device="meta")}


def _gap(name: str) -> Spoil:
    return lambda c: {name: _strided(c[name])}


def _per_token(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(c: dict[str, Any]) -> dict[str, Any]:
        scale = torch.ones(c["key_cache"].shape[0], 1, 16)
        return {"key_scale": change(scale), "value_scale": scale}

    return spoil


N, T, V = NotImplementedError, TypeError, ValueError
#: (row of the contract, what is wrong, exception, what the message names), in the library's order. FP8 on gfx942, head
#: dim 64, page 16, one KV head, a group of 2.
DECODE_FAULTS: list[tuple[int, Spoil, type[Exception], str]] = [
    (1, lambda c: {"work_plan": object()}, T, "work_plan"),
    (2, lambda c: {"context_partition_size": 128}, N, "context_partition_size"),
    (3, lambda c: {"query_scale": torch.ones(1)}, N, "query_scale"),
    (4, lambda c: {"alibi_slopes": torch.ones(2)}, N, "alibi_slopes"),
    (5, lambda c: {"sliding_window": 1.5}, T, "sliding_window must be an int"),
    (5, lambda c: {"sliding_window": -2}, V, "sliding_window must be -1"),
    (6, lambda c: {"query_length": 1.0}, T, "query_length must be an int"),
    (6, lambda c: {"query_length": 0}, V, "query_length must be positive"),
    (7, lambda c: {"output": None}, T, "output must be a torch.Tensor"),
    (7, lambda c: {"query": [1.0]}, T, "query must be a torch.Tensor"),
    (7, lambda c: {"key_cache": None}, T, "key_cache must be a torch.Tensor"),
    (7, lambda c: {"value_cache": None}, T, "value_cache must be a torch.Tensor"),
    (7, lambda c: {"context_lengths": [300, 0, 17]}, T, "context_lengths must be a torch.Tensor"),
    (7, lambda c: {"block_tables": None}, T, "block_tables must be a torch.Tensor"),
    (8, lambda c: {"output": c["output"][0]}, V, "output must have rank"),
    (8, lambda c: {"query": c["query"][0]}, V, "query must have rank"),
    (8, lambda c: {"key_cache": c["key_cache"][0]}, V, "key_cache must have rank"),
    (8, lambda c: {"value_cache": c["value_cache"][0, 0]}, V, "value_cache must have rank"),
    (8, lambda c: {"context_lengths": c["context_lengths"][None]}, V, "context_lengths must have rank"),
    (8, lambda c: {"block_tables": c["block_tables"][0]}, V, "block_tables must have rank"),
    (9, _meta("query"), V, "query must be on the GPU"),
    (10, lambda c: {"query": c["query"][:, :0]}, V, "at least one head"),
    (11, lambda c: {"query": c["query"][:2], "output": c["output"][:2]}, V, "query.shape"),
    (12, lambda c: {"output": c["output"][:, :1]}, V, "output shape"),
    (13, lambda c: {"block_tables": c["block_tables"][:2]}, V, "block_tables.shape"),
    (14, lambda c: {"key_cache": c["key_cache"][:, :0]}, V, "at least one KV head"),
    (16, lambda c: {"compute_type": torch.bfloat16}, N, "compute_type"),
    (16, lambda c: {"compute_type": _other_fp8(c)}, N, "compute_type"),
    (17, lambda c: {"query": c["query"][..., :32], "output": c["output"][..., :32]}, N, "head_dim=32"),
    (17, lambda c: {"query": c["query"].repeat(1, 1, 3), "output": c["output"].repeat(1, 1, 3)}, N, "head_dim=192"),
    (17, lambda c: {"query": c["query"][..., :0], "output": c["output"][..., :0]}, N, "head_dim=0"),
    (17, lambda c: {"query": c["query"].repeat(1, 1, 18), "output": c["output"].repeat(1, 1, 18)}, N, "head_dim=1152"),
    (18, lambda c: {"key_cache": c["key_cache"].view(-1, 1, 8, 16, 8)}, V, r"key_cache must be \[blocks"),
    (18, lambda c: {"key_cache": c["key_cache"][:, :, :3]}, V, r"key_cache must be \[blocks"),
    (18, lambda c: {"key_cache": c["key_cache"][..., :8]}, V, r"key_cache must be \[blocks"),
    (19, lambda c: {"key_cache": torch.cat([c["key_cache"]] * 2, 3)}, V, "block_size"),
    (21, lambda c: {"value_cache": c["value_cache"].view(-1, 1, 2, 64, 8)}, V, "value_cache must be"),
    (21, lambda c: {"value_cache": c["value_cache"][:, :, 0, :, :8]}, V, "value_cache must be"),
    (22, lambda c: {"key_cache": c["key_cache"][1:]}, V, "more blocks"),
    (23, lambda c: {"value_cache": torch.cat([c["value_cache"]] * 2, 1)}, V, "same KV heads"),
    (24, lambda c: _with_kv_heads(c, 3), V, "divisible"),
    (25, _cast("block_tables", torch.int64), T, "block_tables must be int32"),
    (26, _cast("context_lengths", torch.int64), T, "context_lengths must be int32"),
    (27, _cast("query", torch.float32), T, "query must be f16 or bf16"),
    (29, _cast("output", torch.float16), T, "output dtype"),
    (30, lambda c: {"key_cache": c["key_cache"].to(_other_fp8(c))}, T, "key_cache must be"),
    (30, lambda c: {"value_cache": c["value_cache"].to(_other_fp8(c))}, T, "value_cache must be"),
    (31, _gap("query"), V, "query must have a contiguous"),
    (31, _gap("output"), V, "output must have a contiguous"),
    (32, lambda c: {"sinks": [0.0, 0.0]}, T, "sinks must be a torch.Tensor"),
    (32, lambda c: {"sinks": torch.zeros(3)}, V, "sinks must have shape"),
    (32, lambda c: {"sinks": torch.zeros(2, dtype=torch.float64)}, T, "sinks must be bfloat16"),
    (32, lambda c: {"sinks": torch.zeros(2, device="meta")}, V, "sinks must be on"),
    (32, lambda c: {"sinks": torch.zeros(4)[::2]}, V, "sinks must be contiguous"),
    (33, _meta("output"), V, "output must be on"),
    (33, _meta("key_cache"), V, "key_cache must be on"),
    (33, _meta("value_cache"), V, "value_cache must be on"),
    (33, _meta("block_tables"), V, "block_tables must be on"),
    (33, _meta("context_lengths"), V, "context_lengths must be on"),
    (34, _gap("key_cache"), V, "key_cache must be contiguous"),
    (34, _gap("value_cache"), V, "value_cache must be contiguous"),
    (34, _gap("block_tables"), V, "block_tables must be contiguous"),
    (34, _gap("context_lengths"), V, "context_lengths must be contiguous"),
    (35, lambda c: {"key_scale": None}, V, "go together"),
    (35, _per_token(lambda s: s[..., None].repeat(1, 1, 1, 2)), V, "dimension of 1"),
    (35, _per_token(lambda s: s[:, 0]), V, "scalar or"),
    (35, _per_token(lambda s: s[0, 0, 0]), V, "per tensor or per token"),
    (35, _per_token(lambda s: s[1:]), V, "blocks, kv, page"),
    (35, _per_token(_strided), V, "contiguous token axis"),
    (35, _per_token(lambda s: torch.cat([s, s], 1)[:, :1]), V, "equal strides"),
    (35, _per_token(lambda s: s.double()), T, "key_scale must be float32"),
    (35, _meta("key_scale"), V, "key_scale must be on"),
    (35, lambda c: {"value_scale": c["value_scale"].double()}, T, "value_scale must be float32"),
    (36, lambda c: {"max_context_length": True}, V, "max_context_length"),
    (36, lambda c: {"max_context_length": 300.0}, V, "max_context_length"),
    (36, lambda c: {"max_context_length": -1}, V, "max_context_length"),
    (36, lambda c: {"max_context_length": 16 * c["block_tables"].shape[1] + 1}, V, "max_context_length"),
    (37, lambda c: {"work_plan": plan_of(lens_of(1, 2))}, V, "reduce_info must have shape"),
    (37, lambda c: {"work_plan": plan_of(lens_of(300, 0, 17), 2)}, V, "KV head count"),
    (38, lambda c: {"sliding_window": 128}, V, "sliding_window must match work_plan"),
    (39, lambda c: _windowed_with_other_length(c, 1), V, "query_length must match work_plan"),
    (39, lambda c: _windowed_with_other_length(c), V, "query_length must match work_plan"),
    (41, lambda c: {"max_logits": [0.0]}, T, "max_logits must be a torch.Tensor"),
    (41, lambda c: {"max_logits": c["max_logits"][:, 1:]}, V, "max_logits must have shape"),
    (41, lambda c: {"exp_sums": c["exp_sums"][..., :1]}, V, "exp_sums must have shape"),
    (41, lambda c: {"temporary_output": c["temporary_output"][..., :32]}, V, "temporary_output must have shape"),
    (41, _cast("max_logits", torch.float16), T, "max_logits must be"),
    (41, _cast("exp_sums", torch.float16), T, "exp_sums must be"),
    (41, _cast("temporary_output", torch.float32), T, "temporary_output must be"),
    (41, _meta("max_logits"), V, "max_logits must be on"),
    (41, _gap("exp_sums"), V, "exp_sums must be contiguous"),
    (41, _meta("temporary_output"), V, "temporary_output must be on"),
]


def _other_fp8(c: dict[str, Any]) -> torch.dtype:
    return torch.float8_e4m3fn if c["compute_type"] == torch.float8_e4m3fnuz else torch.float8_e4m3fnuz


def _with_kv_heads(c: dict[str, Any], heads: int) -> dict[str, Any]:
    return {name: torch.cat([c[name]] * heads, 1) for name in ("key_cache", "value_cache")}


def _windowed_with_other_length(c: dict[str, Any], window: int = 128) -> dict[str, Any]:
    plan = plan_of(c["context_lengths"], 1, sliding_window=window, query_length=2)
    return {"sliding_window": window, "work_plan": plan}


FAULT_IDS = [f"{row} {message}" for row, _, _, message in DECODE_FAULTS]


@pytest.mark.parametrize(("row", "spoil", "error", "message"), DECODE_FAULTS, ids=FAULT_IDS)
def test_decode_refuses_what_the_library_refuses(double, row, spoil, error, message):
    call = valid_call(double)
    before = call["output"].clone()
    with pytest.raises(error, match=message) as caught:
        pa_decode(**{**call, **spoil(call)})
    assert type(caught.value) is error
    assert torch.equal(call["output"].isnan(), before.isnan())
    assert any(key[0] == "tile" for key in double.compiled) == (row >= 41)  # the scratch is looked at after the compile
    pa_decode(**call)  # the control: nothing else is wrong with this call
    assert not call["output"].isnan().any()


def test_every_row_of_the_contract_that_can_be_reached_on_this_machine_is_in_the_table():
    elsewhere = {15, 20, 28, 40, 42}  # other machines and caches below; 42 cannot be reached after 37
    assert {row for row, *_ in DECODE_FAULTS} | elsewhere == set(range(1, 43))


def test_of_several_faults_decode_names_the_first(double):
    call = valid_call(double)
    checked = 0
    for at, (_, first, error, message) in enumerate(DECODE_FAULTS):
        earlier = first(call)
        for _, second, _, _ in DECODE_FAULTS[at + 1 :]:
            later = second(call)
            if earlier.keys() & later.keys() or is_another_call(earlier) or is_another_call(later):
                continue
            with pytest.raises(error, match=message):
                pa_decode(**{**call, **later, **earlier})
            checked += 1
    assert checked > 1500


def is_another_call(change: dict[str, Any]) -> bool:
    """Whether shapes of other arguments follow from this change."""
    return len(change) > 1 or bool(change.keys() & {"query_length", "query", "key_cache"})


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100", "gfx90a:sramecc+:xnack-"])
def test_other_architectures_are_refused_with_rows_before_them_first(arch):
    with aiter_double(arch=arch, num_cu=8) as double:
        call = valid_call(double)
        with pytest.raises(NotImplementedError, match="does not support"):
            pa_decode(**call)
        with pytest.raises(ValueError, match="output shape"):
            pa_decode(**call | {"output": call["output"][:, :1]})


@pytest.mark.parametrize("native_bf16", [True, False])
def test_decode_takes_what_is_just_inside_its_limits(native_bf16):
    with aiter_double(arch="gfx950", num_cu=8, native_bf16=native_bf16) as double:
        for shape in ({"group": 1}, {"head_dim": 1024}, {"lens": (0,), "columns": 1}, {"query_length": 2}):
            call = valid_call(double, **shape)
            pa_decode(**call, max_context_length=int(call["context_lengths"].max()))
            pa_decode(**call, max_context_length=16 * call["block_tables"].shape[1])
            # A dense plan does not know the query length.
            pa_decode(**call | {"work_plan": plan_of(call["context_lengths"], query_length=9)})


def test_scales_per_token_may_end_in_a_dimension_of_1(double):
    call = valid_call(double, scales="per_token")
    pa_decode(**call | {name: call[name][..., None] for name in ("key_scale", "value_scale")})
    assert_right(call)
    two = torch.ones(1, 1, 2)
    with pytest.raises(ValueError, match="blocks, kv, page"):
        pa_decode(**call | {"key_scale": two, "value_scale": two})


def test_head_dims_of_bf16_caches_are_multiples_of_64(double):
    call = valid_call(double, kv="bf16")
    with pytest.raises(NotImplementedError, match="head_dim=96"):
        pa_decode(**call | {name: call[name].repeat(1, 1, 2)[..., :96] for name in ("query", "output")})


def test_early_generations_decode_windows_with_a_plan():
    with aiter_double(generation="G1c", num_cu=8) as double:
        call = valid_call(double, sliding_window=100)
        pa_decode(**call)
        assert_right(call)


def test_an_fp8_and_a_bf16_cache_have_tiles_of_their_own(double):
    for kv in ("fp8", "bf16"):
        pa_decode(**valid_call(double, kv=kv))
    assert tiles(double) == 2


@pytest.mark.parametrize("native_bf16", [True, False])
def test_features_of_an_architecture_do_not_matter(native_bf16):
    with aiter_double(arch="gfx950:sramecc+:xnack-", num_cu=8, native_bf16=native_bf16) as double:
        pa_decode(**valid_call(double))
        assert importlib.import_module("aiter.jit.utils.chip_info").get_gfx_runtime() == "gfx950"
        assert {key[1] for key in double.compiled if key[0] != "plan"} == {"gfx950"}


def test_bf16_caches_are_taken_as_the_library_takes_them(double):
    call = valid_call(double, kv="bf16", head_dim=192)
    pa_decode(**call)
    for change, error, message in (
        ({"value_cache": call["value_cache"].permute(0, 1, 3, 2, 4).flatten(3)}, ValueError, "5-D value_cache"),
        ({"query": call["query"].half(), "output": call["output"].half()}, NotImplementedError, "bfloat16 queries"),
        ({"key_scale": torch.ones(1)}, ValueError, "takes no key or value scale"),
        ({"compute_type": fp8_of(double)}, NotImplementedError, "compute_type"),
    ):
        with pytest.raises(error, match=message):
            pa_decode(**call | change)


@pytest.mark.parametrize("settings", [{"native_bf16": False}, {"arch": "gfx1250"}, {"generation": "G1c"}], ids=str)
def test_texts_without_bf16_caches_look_at_the_architecture_after_the_shapes(settings):
    with aiter_double(**{"num_cu": 8, **settings}) as double:
        pa_decode(**valid_call(double))
        with pytest.raises(ValueError, match="key_cache must be"):
            pa_decode(**valid_call(double, kv="bf16"))
        call = valid_call(double)
        with pytest.raises(NotImplementedError, match="head_dim"):
            narrow = {name: call[name][..., :32] for name in ("query", "output")}
            pa_decode(**call | {"compute_type": torch.bfloat16} | narrow)
        with pytest.raises(NotImplementedError, match="compute_type"):
            pa_decode(**call | {"compute_type": torch.bfloat16})


def test_texts_without_bf16_caches_refuse_bf16_in_whatever_shape():
    with aiter_double(arch="gfx950", num_cu=8, native_bf16=False) as double:
        call = valid_call(double, scales="per_tensor")
        bf16 = {name: call[name].to(torch.bfloat16) for name in ("key_cache", "value_cache")}
        with pytest.raises(NotImplementedError, match="compute_type"):
            pa_decode(**call | bf16 | {"compute_type": torch.bfloat16})
        with pytest.raises(TypeError, match="key_cache must be"):
            pa_decode(**call | bf16)


def test_gfx1250_came_with_mandatory_plans():
    with aiter_double(arch="gfx1250", num_cu=8, generation="G1d") as double:
        with pytest.raises(NotImplementedError, match="does not support gfx1250"):
            pa_decode(**valid_call(double))


def test_the_larger_cache_decides_about_wide_addresses():
    with aiter_double(num_cu=8, device_type="meta") as double:
        for kv, num_pages, is_wide in (
            *(("fp8", 2**21, True), ("fp8", 2**21 - 1, False)),  # of 1024 bytes
            *(("bf16", 2**20, True), ("bf16", 2**20 - 1, False)),
        ):
            call = valid_call(double, (17,), kv=kv, device="meta")
            for name, pages in (("key_cache", num_pages), ("value_cache", 1)):
                shape = (pages, *call[name].shape[1:])
                call[name] = torch.empty(shape, dtype=call[name].dtype, device="meta")
            checked = check_decode(double.library, SimpleNamespace(**ALL_DECODE_ARGUMENTS | call), double.plan_class)
            assert (checked.shape.cache_bytes >= 2**31) is is_wide


def test_gfx1250_refuses_a_query_that_its_lds_does_not_hold():
    with aiter_double(arch="gfx1250", num_cu=8) as double:
        wide = {"head_dim": 1024, "page": 64, "lens": (300,), "group": 16}
        pa_decode(**valid_call(double, query_length=10, **wide))
        with pytest.raises(NotImplementedError, match="LDS"):
            pa_decode(**valid_call(double, query_length=11, **wide))


def test_nothing_unknown_is_taken(double):
    call = valid_call(double)
    with pytest.raises(TypeError, match="lse"):
        pa_decode(**call, lse=None)
    with pytest.raises(TypeError, match="num_rows"):
        plan_of(call["context_lengths"], num_rows=3)
    with pytest.raises(TypeError, match="work_plan"):
        del call["work_plan"]
        pa_decode(**call)
    with pytest.raises(TypeError, match="positional"):
        importlib.import_module(MODULE).plan_pa_decode(call["context_lengths"], 1, 8)


# Decode: what it computes

CASES: dict[str, dict[str, Any]] = {
    "fp8 per tensor": {},
    "fp8 per token": {"scales": "per_token", "num_kv_heads": 2},
    "plain V": {"layout": "packed, plain V", "page": 64},
    "bf16": {"kv": "bf16", "head_dim": 192},
    "several queries": {"query_length": 4, "lens": (300, 2, 0, 1000)},
    "a window": {"sliding_window": 100, "query_length": 2, "lens": (300, 2, 0, 1000)},
    "one partition": {"max_partitions": 1, "lens": (1000, 300)},
    "many partitions": {"workgroup_budget": 64, "lens": (2000, 300)},
}


def exact(call: dict[str, Any], lens: torch.Tensor | None = None) -> torch.Tensor:
    one = torch.ones(1)
    scales = {name: one if call[name] is None else call[name] for name in ("key_scale", "value_scale")}
    return reference_decode(
        call["query"],
        call["key_cache"].float(),
        call["value_cache"].float(),
        call["block_tables"],
        call["context_lengths"] if lens is None else lens,
        call["softmax_scale"],
        query_length=call["query_length"],
        sliding_window=max(call["sliding_window"], 0),
        kv_layout="packed" if call["key_cache"].dim() == 5 else "nhd",
        sinks=call.get("sinks"),
        **scales,
    )


def assert_right(call: dict[str, Any], lens: torch.Tensor | None = None) -> None:
    assert row_errors(call["output"], exact(call, lens), call["query_length"]).max() < BOUND


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
def test_results_are_attention(arch, options):
    if arch == "gfx1250" and options.get("kv") == "bf16":
        pytest.skip("the gfx1250 text takes FP8 caches only")
    with aiter_double(arch=arch, num_cu=8) as double:
        call = valid_call(double, **options)
        call["sinks"] = torch.linspace(-1, 1, call["query"].shape[1])
        pa_decode(**call)
        assert_right(call)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_gpu_attends_as_a_cpu_does(options, monkeypatch):
    with aiter_double(arch="gfx950", num_cu=8) as double:
        call = valid_call(double, **options)
        call["sinks"] = torch.linspace(-1, 1, call["query"].shape[1])
        monkeypatch.setattr(device_side, "attend_on_host", device_side.attend_on_device)
        pa_decode(**call)
        assert_right(call)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_decodes(generation):
    with aiter_double(generation=generation, num_cu=8) as double:
        call = valid_call(double)
        pa_decode(**call)
        assert_right(call)
        assert double.violations == []


@pytest.mark.parametrize("arch", ["gfx942", "gfx1250"])
def test_softmax_scale_may_be_left_out(arch):
    with aiter_double(arch=arch, num_cu=8) as double:
        call = valid_call(double)
        pa_decode(**call | {"softmax_scale": None})
        assert_right(call)
        pa_decode(**call)
        # It stands for head_dim ** -0.5, which gfx1250's cache knows and the others' does not.
        assert tiles(double) == (1 if arch == "gfx1250" else 2)


def test_scales_may_be_left_out_or_numbers_outside_a_capture(double):
    call = valid_call(double)
    pa_decode(**call | {"key_scale": None, "value_scale": None})
    assert_right(call | {"key_scale": None, "value_scale": None})
    pa_decode(**call | {"key_scale": 2.0, "value_scale": 0.5})
    assert_right(call | {"key_scale": torch.tensor([2.0]), "value_scale": torch.tensor([0.5])})


def test_empty_rows_are_zeros_and_unused_scratch_stays_as_it_was(double):
    call = valid_call(double, (0, 0, 0), columns=1)
    pa_decode(**call | {"sinks": torch.zeros(2)})
    assert torch.equal(call["output"], torch.zeros_like(call["output"]))
    assert call["temporary_output"].isnan().all()
    call = valid_call(double, (600,))
    pa_decode(**call)
    used = int(call["work_plan"].reduce_info.sum())
    for name in ("exp_sums", "max_logits", "temporary_output"):
        assert not call[name][:, :used].isnan().any()
        assert call[name][:, used:].isnan().all()


def test_a_view_of_a_plan_decodes_its_first_rows(double):
    call = valid_call(double, (300, 17, 0, 0))
    plan = call["work_plan"]
    view = type(plan)(plan.work_info[: min(plan.capacity, 2 * 8)], plan.reduce_info[:2], 1, 8)
    rows = {name: call[name][:2] for name in ("output", "query", "context_lengths", "block_tables")}
    small = call | rows | {"work_plan": view}
    pa_decode(**small | scratch_of(small))
    assert_right(small)


# What the library does not look at


def test_a_stale_plan_is_a_violation_even_where_no_tile_changed(double):
    call = valid_call(double, (300, 17))
    pa_decode(**call)
    call["context_lengths"].copy_(lens_of(301, 17))
    with pytest.raises(DoubleViolation, match="not refreshed from these lengths"):
        pa_decode(**call)
    plan_of(call["context_lengths"], plan=call["work_plan"])
    pa_decode(**call)
    assert_right(call)


def test_a_stale_plan_answers_for_its_old_lengths():
    with aiter_double(num_cu=8, on_violation="record") as double:
        call = valid_call(double, (290, 17))
        call["context_lengths"].copy_(lens_of(300, 0))
        pa_decode(**call)
        assert_right(call, lens_of(290, 17))
        assert len(double.violations) == 1
        assert double.violations[0].startswith("the plan was not refreshed")


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        *(("work_info", (0, column), value) for column, value in ((0, 1), (1, 1), (2, 0), (3, 299))),
        ("work_info", (1, 1), 0),
        ("work_info", (0, 2), 2),
        ("work_info", (1, 2), 1),
        ("work_info", (8, 2), 3),
        ("reduce_info", (0, 0), 1),
        ("reduce_info", (0, 1), 1),
        ("reduce_info", (1, 1), 0),
        ("reduce_info", (2, 1), 1),
        ("reduce_info", (0, 1), -1),
    ],
)
def test_every_word_of_the_tables_is_compared_with_the_lengths(name, at, value):
    with aiter_double(num_cu=8, on_violation="record") as double:
        call = valid_call(double, (300, 17, 0))
        assert getattr(call["work_plan"], name)[at] != value
        pa_decode(**call)
        assert double.violations == []
        getattr(call["work_plan"], name)[at] = value
        pa_decode(**call)
        assert any("not refreshed" in text for text in double.violations)


def test_a_row_that_is_missing_from_both_tables_is_a_violation(double):
    call = valid_call(double, (300, 17))
    plan = call["work_plan"]
    plan.work_info[2] = plan.reduce_info[1, 1] = 0
    with pytest.raises(DoubleViolation, match="not refreshed"):
        pa_decode(**call)


def test_what_the_kernel_skips_may_be_anything(double):
    call = valid_call(double, (300, 17))
    call["work_plan"].work_info[3:, 0] = 7
    pa_decode(**call)
    assert_right(call)


def test_a_task_of_a_row_that_the_call_does_not_have_is_a_violation(double):
    call = valid_call(double, (300, 17))
    plan = call["work_plan"]
    view = type(plan)(plan.work_info[:8], plan.reduce_info[:1], 1, 8)
    rows = {name: call[name][:1] for name in ("output", "query", "context_lengths", "block_tables")}
    small = call | rows | {"work_plan": view}
    with pytest.raises(DoubleViolation, match="past the query"):
        pa_decode(**small | scratch_of(small))
    plan.work_info[2, 0] = -1
    with pytest.raises(DoubleViolation, match="past the query"):
        pa_decode(**call)


def test_lengths_beyond_the_promised_bound_and_pages_outside_the_cache_are_violations(double):
    call = valid_call(double, (300, 17))
    pa_decode(**call, max_context_length=300)
    with pytest.raises(DoubleViolation, match="max_context_length"):
        pa_decode(**call, max_context_length=288)
    for page in (-1, call["key_cache"].shape[0]):
        spoilt = call | {"block_tables": call["block_tables"].clone()}
        spoilt["block_tables"][1, 2:] = page  # entries past the row's own pages may be anything
        pa_decode(**spoilt)
        spoilt["block_tables"][1, 1] = page
        with pytest.raises(DoubleViolation, match="no page of the cache"):
            pa_decode(**spoilt)


def test_pages_before_the_window_may_be_anything(double):
    call = valid_call(double, (600,), sliding_window=20)
    call["block_tables"][0, :32] = -1  # tiles of 256 tokens are read from their beginning
    pa_decode(**call)
    assert double.violations == []
    call["block_tables"][0, 32] = -1
    with pytest.raises(DoubleViolation, match="no page"):
        pa_decode(**call)


@pytest.mark.parametrize("options", [{}, {"layout": "packed, plain V"}, {"kv": "bf16"}], ids=str)
def test_v_must_be_finite_to_the_end_of_a_rows_last_page(double, options):
    call = valid_call(double, (300, 17), **options)
    last = int(call["block_tables"][1, 1])
    unowned = int(call["block_tables"][1, 5])
    values = call["value_cache"]
    values[unowned] = float("nan")
    pa_decode(**call)
    assert not call["output"].isnan().any()
    own = valid_call(double, (300, 0), **options)
    own["value_cache"][int(own["block_tables"][1, 0])] = float("nan")  # an empty row has no page
    pa_decode(**own)
    own["value_cache"][int(own["block_tables"][0, 18])].view(-1)[0] = float("nan")  # a token of its own: its answer
    pa_decode(**own)
    assert own["output"].isnan().any()
    where = (last, 0, 0, 0, 5) if values.dim() == 5 else (last, 0, 0, 5)
    values[where] = float("nan")
    with pytest.raises(DoubleViolation, match="not finite"):
        pa_decode(**call)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_nan_of_an_fp8_tail_is_found_and_no_number(arch):
    with aiter_double(arch=arch, num_cu=8, on_violation="record") as double:
        call = valid_call(double, (17,))
        last = call["value_cache"][int(call["block_tables"][0, 1]), 0, 0, 0].view(torch.uint8)
        stands_for = torch.arange(256, dtype=torch.uint8).view(fp8_of(double)).float()
        assert stands_for.isnan().any()
        for byte in range(256):
            last[5] = byte
            pa_decode(**call)
            assert bool(double.violations) == bool(stands_for[byte].isnan()), byte
            double.violations.clear()


def test_tails_may_be_poisoned_where_that_is_said():
    with aiter_double(num_cu=8, finite_tails=False) as double:
        call = valid_call(double, (300, 17), kv="bf16")
        call["value_cache"][int(call["block_tables"][1, 1]), 0, 0, 0, 5] = float("nan")
        pa_decode(**call)
        assert not call["output"].isnan().any()


def test_queries_must_start_on_four_bytes_except_on_gfx1250():
    for arch in ("gfx942", "gfx1250"):
        with aiter_double(arch=arch, num_cu=8, on_violation="record") as double:
            call = valid_call(double)
            wide = torch.zeros(*call["query"].shape[:2], 65, dtype=torch.bfloat16)
            wide[..., :64] = call["query"]
            pa_decode(**call | {"query": wide[..., :64]})
            assert bool(double.violations) == (arch == "gfx942")
            assert_right(call)


def test_scratch_that_overlaps_within_a_call_is_a_violation(double):
    call = valid_call(double)
    with pytest.raises(DoubleViolation, match="overlap"):
        pa_decode(**call | {"exp_sums": call["max_logits"]})
    pa_decode(**call | {"exp_sums": call["max_logits"], "max_logits": call["exp_sums"]})  # nobody can tell


def test_live_plans_share_scratch_one_after_another_only_where_that_is_allowed():
    for is_private in (False, True):
        with aiter_double(num_cu=8, private_scratch=is_private, on_violation="record") as double:
            call, other = valid_call(double), valid_call(double)
            triple = {name: call[name] for name in ("exp_sums", "max_logits", "temporary_output")}
            pa_decode(**call)
            pa_decode(**call)
            assert double.violations == []
            pa_decode(**other | triple)
            assert bool(double.violations) == is_private
            del double.violations[:], call
            pa_decode(**other | triple)
            assert double.violations == []


def test_scratch_that_another_call_writes_meanwhile_is_a_violation(double, monkeypatch):
    call = valid_call(double)
    attend = device_side.attend_on_host

    def with_another_call_in_flight(*args: Any) -> None:
        attend(*args)
        call["exp_sums"].fill_(0)

    pa_decode(**call)
    monkeypatch.setattr(device_side, "attend_on_host", with_another_call_in_flight)
    with pytest.raises(DoubleViolation, match="overwritten"):
        pa_decode(**call)


def test_what_is_launched_bumps_no_version_and_serves_engines_in_and_out_of_inference_mode(double):
    call = valid_call(double, (300, 17))
    tables = (call["work_plan"].work_info, call["work_plan"].reduce_info, call["output"], call["exp_sums"])
    before = [table._version for table in tables]
    plan_of(call["context_lengths"], plan=call["work_plan"])
    pa_decode(**call)
    assert [table._version for table in tables] == before
    with torch.inference_mode():
        plan = plan_of(call["context_lengths"])
    plan_of(call["context_lengths"], plan=plan)
    pa_decode(**call | {"work_plan": plan})
    assert_right(call)


# Recording


@pytest.mark.parametrize("generation", ["G1a", "G2", "G3"])
def test_a_recorded_step_follows_its_lengths(generation):
    with aiter_double(generation=generation, num_cu=8) as double:
        call = valid_call(double, (300, 17))
        pa_decode(**call)
        compiles = double.compiles
        with record(EmulatedGraph()) as graph:
            plan_of(call["context_lengths"], plan=call["work_plan"], **_omitted_cap(double))
            pa_decode(**call)
        for lens in ((301, 64), (0, 0), (1, 304)):
            call["context_lengths"].copy_(lens_of(*lens))
            call["output"].fill_(float("nan"))
            graph.replay()
            assert_right(call)
        assert double.compiles == compiles


def _omitted_cap(double: AiterDouble) -> dict[str, Any]:
    """The first generations take a cap left out as 256, whatever the plan's is."""
    return {} if double.generation not in ("G0", "G1a") else {"max_partitions": 256}


def test_a_replay_over_a_stale_plan_is_a_violation(double):
    call = valid_call(double, (300, 17))
    pa_decode(**call)
    with record(EmulatedGraph()) as graph:
        pa_decode(**call)
    graph.replay()
    call["context_lengths"].copy_(lens_of(300, 18))
    with pytest.raises(DoubleViolation, match="not refreshed"):
        graph.replay()


def test_a_capture_may_use_a_compile_key_only_again(double):
    call = valid_call(double, (300, 17))
    wrong = call | {"softmax_scale": 0.5}
    with pytest.raises(DoubleViolation, match=r"first use.*'tile'"):
        with record(EmulatedGraph()):
            pa_decode(**call)
    pa_decode(**call)
    with record(EmulatedGraph()):
        pa_decode(**call)
    with pytest.raises(DoubleViolation, match=r"first use.*'tile'"):
        with record(EmulatedGraph()):
            pa_decode(**wrong)
    with pytest.raises(DoubleViolation, match=r"first use.*'reduce'"):
        sinks = torch.zeros(2)
        with record(EmulatedGraph()):
            pa_decode(**call, sinks=sinks)
    other = plan_of(lens_of(1, 2, 3), max_partitions=3)
    lens = lens_of(1, 2)
    small = type(other)(other.work_info[:6], other.reduce_info[:2], 1, 3)
    with pytest.raises(DoubleViolation, match=r"first use.*'plan'"):
        with record(EmulatedGraph()):
            plan_of(lens, plan=small)


def test_nothing_is_allocated_in_a_capture(double):
    call = valid_call(double)
    pa_decode(**call)
    with pytest.raises(DoubleViolation, match="plan was made while recording"):
        with record(EmulatedGraph()):
            plan_of(call["context_lengths"])
    for change in (
        *({name: None} for name in ("exp_sums", "max_logits", "temporary_output")),
        {"key_scale": None, "value_scale": None},
        {"key_scale": 1.0},
    ):
        pa_decode(**call | change)
        with pytest.raises(DoubleViolation, match=f"allocation while recording: {next(iter(change))}"):
            with record(EmulatedGraph()):
                pa_decode(**call | change)


def test_the_planner_is_compiled_per_batch_capacity_cap_and_window():
    for generation, by_alignment in (("G2", 2), ("G3", 1)):
        with aiter_double(generation=generation, num_cu=8) as double:
            buffer = torch.zeros(16, dtype=INT32)
            plan = plan_of(buffer[:4])
            for query_length in (1, 2, 4):  # a dense plan does not know it
                plan_of(buffer[4:8], plan=plan, query_length=query_length)
            assert double.compiles == 1
            plan_of(buffer[1:5], plan=plan)
            assert double.compiles == by_alignment
            before = double.compiles
            for options in ({"max_partitions": 3}, {"workgroup_budget": 9}, {"sliding_window": 5}):
                plan_of(buffer[:4], **options)
            plan_of(buffer[:4], sliding_window=5, query_length=2)
            plan_of(buffer[:5])
            assert double.compiles == before + 5


def tiles(double: AiterDouble) -> int:
    return sum(key[0] == "tile" for key in double.compiled)


def test_the_tile_is_compiled_per_shape_and_not_per_batch(double):
    for lens in ((300,), (300, 17), (300, 17, 2)):
        pa_decode(**valid_call(double, lens))
    assert tiles(double) == 1
    for options in ({"max_partitions": 3}, {"query_length": 2}, {"page": 64}, {"group": 4}, {"scales": "per_token"}):
        before = tiles(double)
        pa_decode(**valid_call(double, **options))
        assert tiles(double) == before + 1, options


def test_crossing_a_threshold_of_the_schedule_compiles_another_tile():
    shape = {"head_dim": 128, "page": 128, "scales": "per_token", "group": 16, "columns": 20}
    with aiter_double(arch="gfx950", num_cu=8) as double:
        # Four queries: split while 4 x rows x tiles of the bound fit twice the compute units.
        for bound, expected in ((256, 1), (1024, 1), (1025, 2), (2560, 2)):
            pa_decode(**valid_call(double, (200,), query_length=4, **shape), max_context_length=bound)
            assert tiles(double) == expected, bound
    with aiter_double(arch="gfx950", num_cu=8) as double:
        # One query: another page loop where rows x cap is above the compute units.
        for rows, expected in ((1, 1), (2, 1), (3, 2), (4, 2)):
            pa_decode(**valid_call(double, (200,) * rows, max_partitions=4, **shape))
            assert tiles(double) == expected, rows
    with aiter_double(arch="gfx942", num_cu=8) as double:
        for rows in (1, 2, 3, 4):
            pa_decode(**valid_call(double, (200,) * rows, max_partitions=4, **shape))
        assert tiles(double) == 1


def test_gfx1250_compiles_a_tile_whatever_the_cap():
    with aiter_double(arch="gfx1250", num_cu=8) as double:
        for cap in (1, 3, None):
            pa_decode(**valid_call(double, max_partitions=cap))
        assert tiles(double) == 1


def test_the_reducer_is_compiled_per_partitions_sinks_and_compactness():
    def reducers() -> int:
        return sum(key[0] == "reduce" for key in double.compiled)

    with aiter_double(num_cu=256) as double:
        for rows in (1, 15, 16, 32):  # 512 slots are compact from 16 rows
            pa_decode(**valid_call(double, (17,) * rows, head_dim=128))
            assert reducers() == (1 if rows < 16 else 2)
        call = valid_call(double, (17,), head_dim=128)
        for dtype in (torch.float32, torch.bfloat16):
            pa_decode(**call, sinks=torch.zeros(2, dtype=dtype))
        assert reducers() == 4


@pytest.mark.parametrize(
    ("dimension", "stride", "is_another"),
    [(0, 7, True), (0, 2**31, True), (0, 2**31 - 2, False), (1, 8, True), (0, 6, False)],
)
def test_the_reducer_is_compiled_for_the_strides_of_scratch_even_where_a_size_is_1(dimension, stride, is_another):
    with aiter_double(num_cu=256) as double:
        call = valid_call(double, (17,), head_dim=128, max_partitions=1)
        pa_decode(**call)
        partials = call["temporary_output"]
        strides = list(partials.stride())
        assert partials.shape[dimension] == 1
        assert strides[dimension] != stride
        strides[dimension] = stride
        before = double.compiles
        call["temporary_output"] = partials.as_strided(partials.shape, strides)
        assert call["temporary_output"].is_contiguous()
        pa_decode(**call)
        assert double.compiles == before + is_another


def test_the_reducer_is_compiled_for_scratch_that_starts_on_four_bytes():
    with aiter_double(num_cu=256) as double:
        call = valid_call(double, (17,), head_dim=128, max_partitions=64)
        shape, num_items = call["temporary_output"].shape, call["temporary_output"].numel()
        buffer = torch.zeros(num_items + 4, dtype=torch.bfloat16)
        for offset, expected in ((0, 1), (2, 1), (4, 1), (1, 2), (3, 2)):
            pa_decode(**call | {"temporary_output": buffer[offset : offset + num_items].view(shape)})
            assert sum(key[0] == "reduce" for key in double.compiled) == expected, offset


# Generations


def generation_of(module: Any) -> str:
    """As the contract tells them apart, by signature."""
    if not hasattr(module, "plan_pa_decode"):
        return "no planner"
    plan = inspect.signature(module.plan_pa_decode).parameters
    decode = inspect.signature(module.pa_decode).parameters
    kind, default = decode["work_plan"].kind, decode["work_plan"].default
    if kind is inspect.Parameter.KEYWORD_ONLY and default is inspect.Parameter.empty:
        if set(plan) - {"context_lengths", "num_kv_heads", "max_batch_size"} - set(GENERATIONS["G3"].plan_defaults):
            return "newer"
        planner = sys.modules[module.plan_pa_decode.__module__]
        return "G3" if hasattr(planner, "compile_pa_decode_plan") else "G2"
    if "tuned_file" in decode:
        return "G1d"
    if "total_context_length" in plan:
        return "G1b"
    if "sliding_window" not in plan:
        return "G0"
    return "G1c" if plan["max_partitions"].default is None else "G1a"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_generation_is_told_by_its_signatures(generation):
    with aiter_double(generation=generation):
        assert generation_of(importlib.import_module(MODULE)) == generation


@pytest.mark.parametrize("generation", STRANGERS)
def test_a_library_that_is_not_it_has_no_planner(generation):
    with aiter_double(generation=generation):
        try:
            assert generation_of(importlib.import_module(MODULE)) == "no planner"
        except ImportError as error:
            assert generation in ("pypi", "old flydsl"), error  # noqa: PT017
        assert importlib.util.find_spec("aiter") is not None
        assert importlib.util.find_spec("aiter.nothing") is None


def test_a_fork_with_host_plans_has_a_plan_class_all_the_same():
    with aiter_double(generation="fork with host plans"):
        module = importlib.import_module(MODULE)
        assert hasattr(module, "PADecodePlan")
        assert hasattr(module, "make_pa_decode_plan")


def test_the_packages_lazy_name_is_what_was_imported_first():
    with aiter_double():
        package = importlib.import_module("aiter.ops.flydsl")
        assert callable(package.pa_decode)
        from aiter.ops.flydsl.pa_decode import plan_pa_decode

        assert plan_pa_decode.__module__ == "aiter.ops.flydsl.kernels.pa_decode_plan"
        assert not hasattr(package, "plan_pa_decode")
    with aiter_double():
        importlib.import_module(MODULE)
        assert inspect.ismodule(importlib.import_module("aiter.ops.flydsl").pa_decode)


def test_the_double_leaves_imports_as_they_were():
    before = {name for name in sys.modules if name.split(".")[0] == "aiter"}
    with pytest.raises(KeyError), aiter_double(arch="gfx950", num_cu=304):
        chip = importlib.import_module("aiter.jit.utils.chip_info")
        assert (chip.get_gfx_runtime(), chip.get_cu_num()) == ("gfx950", 304)
        raise KeyError
    assert {name for name in sys.modules if name.split(".")[0] == "aiter"} == before


def test_a_plan_of_another_installation_is_no_plan(double):
    call = valid_call(double)
    with aiter_double(num_cu=8):
        with pytest.raises(TypeError, match="work_plan must be a PADecodePlan"):
            pa_decode(**call)


@pytest.mark.parametrize(
    ("generation", "change", "message"),
    [
        ("G1a", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1b", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1b", {"ps": False}, "ps=False"),
        ("G1b", {"ps": 1}, "ps must be a bool"),
        ("G1c", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1d", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1c", {"work_plan": object()}, "must be a PADecodePlan"),
        # Only one text looks at the plan before everything else.
        *(
            (generation, {"work_plan": object(), "query": None}, "query must be")
            for generation in ("G1a", "G1c", "G1d")
        ),
        ("G1b", {"work_plan": object(), "query": None}, "must be a PADecodePlan"),
        ("G1c", {"max_context_partition_num": 3, "query": None}, "query must be"),
        ("G1d", {"max_context_partition_num": 3, "query": None}, "query must be"),
        ("G1b", {"max_context_partition_num": 3, "query": None}, "must match work_plan.max_partitions"),
        ("G1c", {"work_plan": None, "sliding_window": 5}, "requires work_plan"),
        *(
            ("G1c", {"work_plan": None, "max_context_partition_num": number}, "in .1, 256.")
            for number in (257, 0, 1.0, None)
        ),
        *(("G1c", {"work_plan": None, "max_context_partition_num": number}, "no static path") for number in (1, 256)),
    ],
)
def test_earlier_generations_check_partitions_and_plan_in_their_own_way(generation, change, message):
    with aiter_double(generation=generation, num_cu=8) as double:
        call = valid_call(double)
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
            pa_decode(**call | change)
        pa_decode(**call)


def test_the_first_generations_cap_partitions_at_256_on_every_device():
    with aiter_double(generation="G1a", num_cu=8):
        plan = plan_of(lens_of(1, 2), max_partitions=100)
        with pytest.raises(ValueError, match="must match the reused plan"):
            plan_of(lens_of(1, 2), plan=plan)  # left out, it means 256 there
        with pytest.raises(ValueError, match=r"\[1, 256\]"):
            plan_of(lens_of(1, 2), max_partitions=257)


# Optional functions


def test_optional_functions_are_there_when_they_are_asked_for():
    functions = [name for name in OPTIONAL if name != "max_batch_size"]
    with aiter_double():
        assert not any(hasattr(importlib.import_module(MODULE), name) for name in functions)
    with aiter_double(optional=OPTIONAL):
        module = importlib.import_module(MODULE)
        assert all(hasattr(module, name) for name in functions)
        assert "max_batch_size" in inspect.signature(module.plan_pa_decode).parameters


def test_the_predicate_answers_as_decode_would_and_compiles_nothing():
    with aiter_double(num_cu=8, optional=("can_use_flydsl_pa_decode",)) as double:
        can_use = importlib.import_module(MODULE).can_use_flydsl_pa_decode
        call = valid_call(double)
        before = double.compiled
        assert can_use(**call) is True
        assert can_use(**call | {"work_plan": None}) is True
        for row, spoil, _, message in DECODE_FAULTS:
            if row < 41:
                assert can_use(**call | spoil(call)) is False, message
        assert [key for key in double.compiled if key[0] != "plan"] == [key for key in before if key[0] != "plan"]


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


def test_nhd_caches_are_taken_where_the_library_says_so():
    optional = ("pa_decode_nhd_max_query_length", "pa_decode_default_workgroup_budget")
    shape = {"head_dim": 256, "page": 64, "group": 16, "layout": "nhd", "num_kv_heads": 2}
    with aiter_double(arch="gfx950", num_cu=8, optional=optional) as double:
        module = importlib.import_module(MODULE)
        cache = {"kv_dtype": torch.float8_e4m3fn, "head_dim": 256, "block_size": 64}
        assert module.pa_decode_nhd_max_query_length("cuda", **cache, query_group_size=16) == 2
        assert module.pa_decode_nhd_max_query_length("cuda", **cache | {"block_size": 16}, query_group_size=16) == 0
        budget = module.pa_decode_default_workgroup_budget
        assert budget("cuda", **cache, query_length=2, query_group_size=16) == 8
        assert budget("cuda", **cache, query_length=4, query_group_size=16) == 16
        assert budget("cuda", **cache, query_length=2, query_group_size=16, sliding_window=5) == 16
        call = valid_call(double, query_length=2, **shape)
        pa_decode(**call)
        assert_right(call)
        pages = torch.stack((call["key_cache"].view(torch.uint8), call["value_cache"].view(torch.uint8)), 1)
        for at, name in enumerate(("key_cache", "value_cache")):  # one allocation for both
            call[name] = pages[:, at].view(call[name].dtype)
            assert not call[name].is_contiguous()
        pa_decode(**call)
        assert_right(call)
        pa_decode(**valid_call(double))  # packed caches as ever
        with pytest.raises(ValueError, match="must match"):
            pa_decode(**call | {"value_cache": call["value_cache"][..., :128]})
        for other in (
            {"query_length": 4},
            {"query_length": 3, "group": 11},
            {"query_length": 2, "kv": "bf16"},
            {"query_length": 2, "sliding_window": 1},
            {"query_length": 2, "page": 16},
            {"query_length": 2, "head_dim": 128},
        ):
            with pytest.raises(NotImplementedError, match="NHD"):
                pa_decode(**valid_call(double, **shape | other))
        for scale in (float("inf"), float("nan"), 0, -1.0, "1"):
            with pytest.raises(ValueError, match="finite and positive"):
                pa_decode(**call | {"softmax_scale": scale})
        pa_decode(**call | {"softmax_scale": 1, "sliding_window": -1})
        wide = torch.zeros(*call["key_cache"].shape[:3], 512, dtype=torch.uint8).view(call["key_cache"].dtype)
        odd = torch.zeros(call["key_cache"].numel() + 16, dtype=torch.uint8).view(wide.dtype)
        shape_of = call["key_cache"].shape
        for cache in (
            wide[..., ::2],
            odd[1 : 1 + call["key_cache"].numel()].view(shape_of),
            torch.zeros(*shape_of[:3], 264, dtype=torch.uint8).view(wide.dtype)[..., :256],
        ):
            for name in ("key_cache", "value_cache"):
                with pytest.raises(ValueError, match=f"{name} must be 16-byte aligned"):
                    pa_decode(**call | {name: cache})
        with pytest.raises(ValueError, match="finite and positive"):
            pa_decode(**call | {"key_scale": 0.0, "value_scale": 1.0})
        with pytest.raises(ValueError, match="finite and positive"):
            pa_decode(**call | {"key_scale": 1.0, "value_scale": float("inf")})
        with pytest.raises(NotImplementedError, match="NHD"):
            pa_decode(**call | {name: call[name][..., :128] for name in ("query", "output")})
    with aiter_double(arch="gfx1250", num_cu=8, optional=optional) as double:
        with pytest.raises(NotImplementedError, match="NHD"):
            pa_decode(**valid_call(double, query_length=2, **shape))
    with aiter_double(arch="gfx950", num_cu=8) as double:
        with pytest.raises(ValueError, match="key_cache must have rank"):
            pa_decode(**valid_call(double, query_length=2, **shape))


def test_a_prepared_plan_is_the_default_one_and_is_not_made_in_a_capture():
    with aiter_double(num_cu=8, optional=("prepare_pa_decode_plan",)) as double:
        prepare = importlib.import_module(MODULE).prepare_pa_decode_plan
        call = valid_call(double)
        names = (
            "query",
            "key_cache",
            "value_cache",
            "context_lengths",
            "block_tables",
            "softmax_scale",
            "query_length",
        )
        arguments = [call[name] for name in names]
        plan = prepare(*arguments, compute_type=call["compute_type"])
        assert plan.capacity == call["work_plan"].capacity
        with pytest.raises(RuntimeError, match="before graph capture"):
            with record(EmulatedGraph()):
                prepare(*arguments)


def test_a_newer_library_has_parameters_that_nobody_knows_and_takes_calls_without_them():
    with aiter_double(generation="newer", num_cu=8) as double:
        call = valid_call(double)
        pa_decode(**call)
        assert_right(call)
        with pytest.raises(ValueError, match="nobody"):
            pa_decode(**call, task_order="long first")
        with pytest.raises(ValueError, match="nobody"):
            plan_of(call["context_lengths"], task_order="long first")


@pytest.mark.parametrize(
    "setting", [{"generation": "G9"}, {"optional": ("magic",)}, {"on_violation": "ignore"}], ids=str
)
def test_a_setting_that_is_none_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        AiterDouble(**setting)


def test_the_launches_go_through_the_seam_of_emulated_graphs(double):
    call = valid_call(double)
    pa_decode(**call)
    with record(EmulatedGraph()) as graph:
        launch(lambda: None)
        plan_of(call["context_lengths"], plan=call["work_plan"])
        pa_decode(**call)
    assert graph.num_ops == 3
