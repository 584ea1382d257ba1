"""Valid calls of the double, as dicts to spoil, and their exact answers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from planlife.aiter_library import DEFINING_MODULE, PLAN_FIELDS
from planlife.testing import DecodeInputs, lay_out, reference_decode, row_errors
from planlife.testing.aiter_double import AiterDouble, TileCompileError
from planlife.testing.decode_table import ROW_BOUNDS

INT32 = torch.int32
FP8 = {"gfx942": torch.float8_e4m3fnuz}
#: A form of SCALE_FORMS for each kind of scales.
SCALE_FORM = {"none": "none", "per_tensor": "device [1]", "per_token": "per token"}
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


def lens_of(*lens: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(lens, dtype=INT32, device=device)


def defining_module() -> ModuleType:
    """The one that an aiter, or the double in its place, defines its functions in."""
    return import_module(DEFINING_MODULE)


def plan_of(lens: torch.Tensor, num_kv_heads: int = 1, **options: Any) -> Any:
    return defining_module().plan_pa_decode(lens, num_kv_heads, **options)


def pa_decode(**call: Any) -> None:
    decode_by(defining_module().pa_decode, call)


def decode_by(function: Callable[..., Any], call: dict[str, Any]) -> None:
    """function: any library's pa_decode."""
    keywords = {name: value for name, value in call.items() if name not in REQUIRED}
    function(*(call[name] for name in REQUIRED), **keywords)


def num_compiled(double: AiterDouble, kind: str) -> int:
    """kind: "plan", "tile" or "reduce"."""
    return sum(key[0] == kind for key in double.compiled)


def copy_of(plan: Any, plan_class: Any = None, **changed: Any) -> Any:
    """The same tables in another plan. plan_class: None = the plan's own."""
    fields = {name: getattr(plan, name) for name in PLAN_FIELDS} | changed
    return (plan_class or type(plan))(**fields)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Equal, with gaps in the last dimension."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    wide[..., ::2] = tensor
    return wide[..., ::2]


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
    """Everything pa_decode wants, its plan refreshed from these lengths."""
    generator = torch.Generator().manual_seed(sum(lens) + head_dim)
    columns = columns or max(-(-max(lens) // page), 1)
    num_pages = len(lens) * columns
    dtype = torch.bfloat16 if kv == "bf16" else fp8_of(double)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys, values = (random(num_pages, page, num_kv_heads, head_dim).to(dtype) for _ in range(2))
    key_cache, value_cache = lay_out(keys, values, layout)
    query = random(len(lens) * query_length, num_kv_heads * group, head_dim).to(torch.bfloat16)
    tables = torch.randperm(num_pages, generator=generator).view(len(lens), columns).to(INT32)
    shape = (1,) if scales == "per_tensor" else (num_pages, num_kv_heads, page)
    scale_pair = [None, None] if kv == "bf16" else [(random(*shape).abs() + 0.5).to(device) for _ in range(2)]
    lengths = lens_of(*lens, device=device)
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


def front_of(call: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """The first rows of a call, by views of the fronts of its plan's tables."""
    plan = call["work_plan"]
    capacity = min(plan.capacity, num_rows * plan.max_partitions)
    rows = {name: call[name][:num_rows] for name in ("output", "query", "context_lengths", "block_tables")}
    view = copy_of(plan, work_info=plan.work_info[:capacity], reduce_info=plan.reduce_info[:num_rows])
    front = call | rows | {"work_plan": view}
    return front | scratch_of(front)


def exact(call: dict[str, Any], lens: torch.Tensor | None = None) -> torch.Tensor:
    """What a call has to give. lens: other than its own."""
    one = torch.ones(1, device="cpu")
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
    errors = row_errors(call["output"], exact(call, lens), call["query_length"])
    assert (errors < ROW_BOUNDS["bfloat16"]).all(), errors.tolist()


def refusal_by_the_double(inputs: DecodeInputs) -> str:
    """What the library's host checks say to this call, past the wrapper; empty if it decodes.

    The inputs poison what no row owns, tails too: it needs a double with finite_tails=False.
    """
    spec, rows = inputs.spec, inputs.num_rows
    query = inputs.query[: rows * spec.query_length]
    options = {"sliding_window": spec.sliding_window, "query_length": spec.query_length}
    try:
        pa_decode(
            output=torch.full_like(query, torch.nan),
            query=query,
            key_cache=inputs.key_cache,
            value_cache=inputs.value_cache,
            context_lengths=inputs.context_lens,
            block_tables=inputs.block_tables[:rows],
            softmax_scale=inputs.softmax_scale,
            compute_type=getattr(torch, spec.kv_dtype),
            key_scale=inputs.key_scale,
            value_scale=inputs.value_scale,
            sinks=inputs.sinks,
            work_plan=plan_of(inputs.context_lens, spec.num_kv_heads, max_partitions=spec.max_partitions, **options),
            max_context_length=spec.max_context_tokens,
            **options,
        )
    except (TypeError, ValueError, NotImplementedError, TileCompileError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
