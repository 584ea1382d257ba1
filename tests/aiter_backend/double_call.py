"""A valid call of the double, as a dict to spoil."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from planlife.testing import lay_out
from planlife.testing.aiter_double import AiterDouble

FP8 = {"gfx942": torch.float8_e4m3fnuz}
REQUIRED = (
    "output",
    "query",
    "key_cache",
    "value_cache",
    "context_lengths",
    "block_tables",
    "softmax_scale",
    "query_length",
)


def fp8_of(double: AiterDouble) -> torch.dtype:
    return FP8.get(double.arch, torch.float8_e4m3fn)


def plan_of(lens: torch.Tensor, num_kv_heads: int = 1, **options: Any) -> Any:
    return import_module("aiter.ops.flydsl.pa_decode").plan_pa_decode(lens, num_kv_heads, **options)


def pa_decode(**call: Any) -> None:
    function = import_module("aiter.ops.flydsl.pa_decode").pa_decode
    required = [call.pop(name) for name in REQUIRED]
    function(*required, **call)


def scratch_of(call: dict[str, Any], fill: float = float("nan")) -> dict[str, torch.Tensor]:
    plan, query = call["work_plan"], call["query"]
    heads = plan.num_kv_heads
    shape = (heads, plan.capacity, call["query_length"] * query.shape[1] // heads)
    options = {"device": query.device}
    return {
        "exp_sums": torch.full(shape, fill, dtype=torch.float32, **options),
        "max_logits": torch.full(shape, fill, dtype=torch.float32, **options),
        "temporary_output": torch.full((*shape, query.shape[2]), fill, dtype=query.dtype, **options),
    }


def valid_call(
    double: AiterDouble,
    lens: tuple[int, ...] = (300, 0, 17),
    *,
    kv: str = "fp8",
    scales: str = "per_tensor",
    layout: str = "packed",
    num_kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 64,
    page: int = 16,
    query_length: int = 1,
    sliding_window: int = 0,
    columns: int | None = None,
    device: str = "cpu",
    **plan_options: Any,
) -> dict[str, Any]:
    """Everything pa_decode wants, its plan refreshed from these lengths, and "keys" and "values" as nhd beside it."""
    generator = torch.Generator().manual_seed(sum(lens) + head_dim)
    columns = columns or max(-(-max(lens) // page), 1)
    num_pages = len(lens) * columns
    dtype = torch.bfloat16 if kv == "bf16" else fp8_of(double)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = (random(num_pages, page, num_kv_heads, head_dim).to(dtype) for _ in range(2))
    if layout != "nhd":
        key_cache, value_cache = lay_out(keys, values, layout)
    else:
        key_cache, value_cache = keys.clone(), values.clone()
    query = random(len(lens) * query_length, num_kv_heads * group, head_dim).to(torch.bfloat16)
    tables = torch.randperm(num_pages, generator=generator).view(len(lens), columns).to(torch.int32)
    shape = (1,) if scales == "per_tensor" else (num_pages, num_kv_heads, page)
    scale_pair = [None, None] if kv == "bf16" else [(random(*shape).abs() + 0.5).to(device) for _ in range(2)]
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    if double.generation != "G0":
        plan_options |= {"sliding_window": sliding_window, "query_length": query_length}
    call: dict[str, Any] = {
        "output": torch.full_like(query, float("nan")).to(device),
        "query": query.to(device),
        "key_cache": key_cache.to(device),
        "value_cache": value_cache.to(device),
        "context_lengths": lengths,
        "block_tables": tables.to(device),
        "softmax_scale": head_dim**-0.5,
        "query_length": query_length,
        "compute_type": dtype,
        "key_scale": scale_pair[0],
        "value_scale": scale_pair[1],
        "sliding_window": sliding_window,
        "work_plan": plan_of(lengths, num_kv_heads, **plan_options),
    }
    if double.generation in ("G0", "G1a", "G1c"):
        call["max_context_partition_num"] = call["work_plan"].max_partitions
    return call | scratch_of(call)
