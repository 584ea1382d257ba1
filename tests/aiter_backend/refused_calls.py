"""Calls that aiter refuses, in the order in which it looks: what is wrong with each, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .double_call import INT32, lens_of, plan_of, strided

#: Of the rows of a plan that is refreshed.
LENS = (300, 17)

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

Spoil = Callable[[dict[str, Any]], dict[str, Any]]


def _cast(name: str, dtype: torch.dtype) -> Spoil:
    return lambda c: {name: c[name].to(dtype)}


def _meta(name: str) -> Spoil:
    return lambda c: {name: torch.empty_like(c[name], device="meta")}


def _gap(name: str) -> Spoil:
    return lambda c: {name: strided(c[name])}


def _per_token(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(c: dict[str, Any]) -> dict[str, Any]:
        scale = torch.ones(c["key_cache"].shape[0], 1, 16)
        return {"key_scale": change(scale), "value_scale": scale}

    return spoil


N, T, V = NotImplementedError, TypeError, ValueError
#: (row, what is wrong, exception, what the message names). Rows count the checks that the library's pa_decode makes
#: before it launches, 42 in their order; some can fail in several ways. What is spoilt is a `valid_call` of gfx942:
#: FP8, head dim 64, pages of 16, a group of 2 on one KV head.
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
    (35, _per_token(strided), V, "contiguous token axis"),
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


def is_another_call(change: dict[str, Any]) -> bool:
    """Whether shapes of other arguments follow from this change."""
    return len(change) > 1 or bool(change.keys() & {"query_length", "query", "key_cache"})
