"""What aiter's pa_decode refuses, in its order and with its exceptions; and what a call that passes is about."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ...planner import TILE_TOKENS
from .compile_keys import TileShape

FP8_DTYPES = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn, "gfx1250": torch.float8_e4m3fn}
PAGE_SIZES = (16, 64, 128)
FIRST_PARTITION_LIMIT = 256

_SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


@dataclass(frozen=True)
class Library:
    """Which text of pa_decode checks a call.

    device_type: the tensors that count as the GPU's. bf16_caches: where native BF16 caches are taken, "none", "cdna"
    (gfx942 and gfx950) or "gfx1250"; the text of "cdna" looks at the architecture before the shapes, the others behind
    them. infers_compute_type: None is the cache's. finite_numbers: softmax_scale and host-number scales must be finite
    and positive.
    """

    arch: str
    num_cu: int
    device_type: str
    generation: str
    requires_plan: bool
    caps_by_cu: bool
    bf16_caches: str
    infers_compute_type: bool
    takes_nhd: bool
    finite_numbers: bool

    @property
    def partition_limit(self) -> int:
        return self.num_cu if self.caps_by_cu else FIRST_PARTITION_LIMIT


@dataclass(frozen=True)
class CheckedCall:
    """A call that the host lets pass, up to the compiles and the scratch."""

    shape: TileShape
    is_nhd: bool
    scales: str
    sink_dtype: str | None


def require(ok: bool, error: type[Exception], message: str) -> None:
    if not ok:
        raise error(message)


def check_window_and_length(sliding_window: Any, query_length: Any) -> int:
    """The window, 0 for none."""
    require(isinstance(sliding_window, int), TypeError, "sliding_window must be an int")
    require(sliding_window >= -1, ValueError, "sliding_window must be -1, 0, or positive")
    require(isinstance(query_length, int), TypeError, "query_length must be an int")
    require(query_length >= 1, ValueError, f"query_length must be positive, got {query_length}")
    return int(max(sliding_window, 0))


def check_decode(lib: Library, call: SimpleNamespace, plan_class: type) -> CheckedCall:
    """Raises TypeError, ValueError, NotImplementedError. call: the arguments of pa_decode by name."""
    c = call
    if lib.requires_plan:
        require(isinstance(c.work_plan, plan_class), TypeError, "work_plan must be a PADecodePlan")
    require(
        c.context_partition_size == TILE_TOKENS,
        NotImplementedError,
        f"context_partition_size must be 256, got {c.context_partition_size}",
    )
    require(c.query_scale is None, NotImplementedError, "query_scale: quantized queries are not supported")
    require(c.alibi_slopes is None, NotImplementedError, "alibi_slopes: ALiBi is not supported")
    if lib.generation == "G0":
        window = 0
        _check_first_text(c)
    else:
        window = check_window_and_length(c.sliding_window, c.query_length)
    if lib.finite_numbers:
        ok = isinstance(c.softmax_scale, (int, float)) and 0 < c.softmax_scale < float("inf")
        require(ok, ValueError, f"softmax_scale must be finite and positive, got {c.softmax_scale}")
    if not lib.requires_plan:
        _check_plan_early(lib, c, window, plan_class)

    tensors = ("output", "query", "key_cache", "value_cache", "context_lengths", "block_tables")
    for name in tensors:
        require(isinstance(getattr(c, name), torch.Tensor), TypeError, f"{name} must be a torch.Tensor")
    is_nhd = lib.takes_nhd and c.key_cache.dim() == 4
    for name, ranks in zip(tensors, ((3,), (3,), (4,) if is_nhd else (5,), (4, 5), (1,), (2,)), strict=True):
        require(getattr(c, name).dim() in ranks, ValueError, f"{name} must have rank {ranks}")

    rows = c.context_lengths.shape[0]
    num_q_heads, head_dim = c.query.shape[1:]
    require(c.query.device.type == lib.device_type, ValueError, f"query must be on the GPU, got {c.query.device}")
    require(num_q_heads >= 1, ValueError, "query must have at least one head")
    require(
        c.query.shape[0] == rows * c.query_length,
        ValueError,
        "query.shape[0] must equal context_lengths * query_length",
    )
    require(c.output.shape == c.query.shape, ValueError, "output shape must match query shape")
    require(c.block_tables.shape[0] == rows, ValueError, "block_tables.shape[0] must match context_lengths.shape[0]")
    num_kv_heads = c.key_cache.shape[2 if is_nhd else 1]
    require(num_kv_heads >= 1, ValueError, "key_cache must have at least one KV head")

    compute_type = c.key_cache.dtype if c.compute_type is None and lib.infers_compute_type else c.compute_type
    on_cdna = lib.bf16_caches == "cdna"
    if on_cdna:
        cache_dtype = _check_arch(lib, c, compute_type)
    is_bf16_cache = (cache_dtype if on_cdna else compute_type) == torch.bfloat16 and lib.bf16_caches != "none"
    has_small_steps = is_bf16_cache and on_cdna
    require(
        64 <= head_dim <= 1024 and head_dim % 64 == 0 and (has_small_steps or head_dim == 64 or head_dim % 128 == 0),
        NotImplementedError,
        f"head_dim={head_dim} is not supported",
    )
    if is_nhd:
        page = c.key_cache.shape[1]
        _check_nhd(lib, c, num_kv_heads)
    else:
        page = _check_packed(c, 8 if is_bf16_cache else 16, needs_transposed_v=is_bf16_cache and on_cdna)
    require(num_q_heads % num_kv_heads == 0, ValueError, "query heads must be divisible by KV heads")
    if not on_cdna:
        cache_dtype = _check_arch(lib, c, compute_type)

    for name in ("block_tables", "context_lengths"):
        require(getattr(c, name).dtype == torch.int32, TypeError, f"{name} must be int32")
    require(c.query.dtype in (torch.bfloat16, torch.float16), TypeError, "query must be f16 or bf16")
    if is_bf16_cache and on_cdna:
        require(c.query.dtype == torch.bfloat16, NotImplementedError, "a BF16 cache requires bfloat16 queries")
    require(c.output.dtype == c.query.dtype, TypeError, "output dtype must be the query's")
    for name in ("key_cache", "value_cache"):
        require(getattr(c, name).dtype == cache_dtype, TypeError, f"{name} must be {cache_dtype} on {lib.arch}")
    for name in ("query", "output"):
        require(getattr(c, name).stride(2) == 1, ValueError, f"{name} must have a contiguous head_dim axis")

    device = c.query.device
    sink_dtype = _check_sinks(c.sinks, num_q_heads, device)
    for name in ("output", "key_cache", "value_cache", "block_tables", "context_lengths"):
        require(getattr(c, name).device == device, ValueError, f"{name} must be on {device}")
    contiguous = ("block_tables", "context_lengths")
    for name in contiguous if is_nhd else ("key_cache", "value_cache", *contiguous):
        require(getattr(c, name).is_contiguous(), ValueError, f"{name} must be contiguous")
    scales = _check_scales(lib, c, (c.key_cache.shape[0], num_kv_heads, page), is_bf16_cache)

    context_bound = table_tokens = c.block_tables.shape[1] * page
    given = getattr(c, "max_context_length", None)
    if given is not None:
        ok = isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= table_tokens
        require(ok, ValueError, f"max_context_length must be a host int in [0, {table_tokens}], got {given!r}")
        context_bound = -(-given // page) * page
    if not lib.requires_plan:
        require(isinstance(c.work_plan, plan_class), TypeError, "work_plan must be a PADecodePlan")
    c.work_plan.validate(rows, num_kv_heads, device)
    if not lib.requires_plan and c.max_context_partition_num is not None:
        _check_partition_number(c)
    if lib.generation != "G0":
        require(c.work_plan.sliding_window == window, ValueError, "sliding_window must match work_plan.sliding_window")
        if window > 0:
            require(
                c.work_plan.query_length == c.query_length, ValueError, "query_length must match work_plan.query_length"
            )

    caches = (c.key_cache, c.value_cache)
    shape = TileShape(
        arch=lib.arch,
        num_cu=lib.num_cu,
        rows=rows,
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        page=page,
        capacity=c.work_plan.capacity,
        max_partitions=c.work_plan.max_partitions,
        softmax_scale=c.softmax_scale,
        query_dtype=_SHORT_NAMES[c.query.dtype],
        kv_dtype="bf16" if is_bf16_cache else "fp8",
        per_token=scales == "per_token",
        query_length=c.query_length,
        is_transposed_v=c.value_cache.dim() == 5,
        cache_bytes=max(cache.numel() * cache.element_size() for cache in caches),
        context_bound=context_bound,
        window=window,
        stages_one_query_tile=lib.bf16_caches == "gfx1250",
    )
    return CheckedCall(shape, is_nhd, scales, sink_dtype)


def scratch_of(shape: TileShape, output_dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of the triple by name, in the order in which it is checked."""
    stats = (shape.num_kv_heads, shape.capacity, shape.query_length * shape.group)
    return {
        "max_logits": (stats, torch.float32),
        "exp_sums": (stats, torch.float32),
        "temporary_output": ((*stats, shape.head_dim), output_dtype),
    }


def check_scratch(call: SimpleNamespace, shape: TileShape) -> None:
    """What is given of the triple; comes after the tile's compile."""
    c, wanted = call, scratch_of(shape, call.output.dtype)
    given = {name: getattr(c, name) for name in wanted if getattr(c, name) is not None}
    for name, tensor in given.items():
        require(isinstance(tensor, torch.Tensor), TypeError, f"{name} must be a torch.Tensor")
    for name, tensor in given.items():
        require(tuple(tensor.shape) == wanted[name][0], ValueError, f"{name} must have shape {wanted[name][0]}")
    for name, tensor in given.items():
        require(tensor.dtype == wanted[name][1], TypeError, f"{name} must be {wanted[name][1]}")
    for name, tensor in given.items():
        require(tensor.device == c.query.device, ValueError, f"{name} must be on {c.query.device}")
        require(tensor.is_contiguous(), ValueError, f"{name} must be contiguous")


def _check_first_text(c: SimpleNamespace) -> None:
    """What G0 has in place of windows, and what it has besides."""
    require(c.sinks is None, NotImplementedError, "sinks are not supported")
    require(c.sliding_window in (0, -1), NotImplementedError, "sliding windows are not supported")
    require(isinstance(c.ps, bool), TypeError, "ps must be a bool")
    require(c.ps, NotImplementedError, "ps=False is not supported")
    require(c.query_length >= 1, ValueError, f"query_length must be positive, got {c.query_length}")
    ok = 1 <= c.max_context_partition_num <= FIRST_PARTITION_LIMIT
    require(ok, ValueError, f"max_context_partition_num must be in [1, 256], got {c.max_context_partition_num}")


def _check_plan_early(lib: Library, c: SimpleNamespace, window: int, plan_class: type) -> None:
    """Before a plan was mandatory. Calls without one are static, which is not the double's subject."""
    if lib.generation == "G1b":
        require(isinstance(c.ps, bool), TypeError, "ps must be a bool")
        require(c.ps, NotImplementedError, "ps=False is not supported")
    require(window == 0 or c.work_plan is not None, ValueError, "positive sliding_window requires work_plan")
    partitions = c.max_context_partition_num
    if c.work_plan is None:
        ok = isinstance(partitions, int) and 1 <= partitions <= FIRST_PARTITION_LIMIT
        require(ok, ValueError, "max_context_partition_num is required without work_plan, in [1, 256]")
        raise NotImplementedError("the double has no static path: pass work_plan")
    if lib.generation == "G1b":
        require(isinstance(c.work_plan, plan_class), TypeError, "work_plan must be a PADecodePlan")
        if partitions is not None:
            _check_partition_number(c)


def _check_partition_number(c: SimpleNamespace) -> None:
    require(
        c.max_context_partition_num == c.work_plan.max_partitions,
        ValueError,
        "max_context_partition_num must match work_plan.max_partitions",
    )


def _check_arch(lib: Library, c: SimpleNamespace, compute_type: Any) -> torch.dtype:
    """The cache dtype that this architecture, cache and compute_type make necessary."""
    known = lib.arch in FP8_DTYPES and (lib.arch != "gfx1250" or lib.requires_plan)
    require(known, NotImplementedError, f"pa_decode does not support {lib.arch}")
    dtype = FP8_DTYPES[lib.arch]
    if lib.bf16_caches == "cdna" and c.key_cache.dtype == torch.bfloat16:
        dtype = torch.bfloat16
    if lib.bf16_caches == lib.arch and compute_type == torch.bfloat16:
        dtype = torch.bfloat16
    require(
        compute_type == dtype, NotImplementedError, f"compute_type must be {dtype} on {lib.arch}, got {compute_type}"
    )
    return dtype


def _check_packed(c: SimpleNamespace, x: int, *, needs_transposed_v: bool) -> int:
    """Page size of vectorised caches."""
    num_blocks, num_kv_heads, groups, page, width = c.key_cache.shape
    head_dim = c.query.shape[2]
    require(
        groups == head_dim // x and width == x,
        ValueError,
        f"key_cache must be [blocks, kv, {head_dim // x}, page, {x}]",
    )
    require(page in PAGE_SIZES, ValueError, f"block_size must be in {PAGE_SIZES}, got {page}")
    is_transposed = c.value_cache.dim() == 5
    require(is_transposed or not needs_transposed_v, ValueError, "a BF16 cache requires a 5-D value_cache")
    tail = (page // x, head_dim, x) if is_transposed else (head_dim, page)
    require(tuple(c.value_cache.shape[2:]) == tail, ValueError, f"value_cache must be [blocks, kv, *{tail}]")
    require(c.value_cache.shape[0] <= num_blocks, ValueError, "value_cache must not have more blocks than key_cache")
    require(c.value_cache.shape[1] == num_kv_heads, ValueError, "key_cache and value_cache must have the same KV heads")
    return int(page)


def _check_nhd(lib: Library, c: SimpleNamespace, num_kv_heads: int) -> None:
    """As announced (aiter #5949), not read: gfx950, FP8, head_dim 256, page 64, 16-byte alignment."""
    _, page, _, width = c.key_cache.shape
    group = c.query.shape[1] // num_kv_heads
    ok = lib.arch == "gfx950" and c.key_cache.dtype == FP8_DTYPES["gfx950"] and (page, width) == (64, 256)
    ok = ok and c.query.shape[2] == 256 and c.query_length * group <= 32 and max(c.sliding_window, 0) == 0
    require(ok, NotImplementedError, "this NHD cache is not supported")
    require(c.value_cache.shape[1:] == c.key_cache.shape[1:], ValueError, "key_cache and value_cache must match")
    for name in ("key_cache", "value_cache"):
        cache = getattr(c, name)
        ok = cache.data_ptr() % 16 == 0 and cache.stride(3) == 1 and all(s % 16 == 0 for s in cache.stride()[:3])
        require(ok, ValueError, f"{name} must be 16-byte aligned in address and strides")


def _check_sinks(sinks: Any, num_q_heads: int, device: torch.device) -> str | None:
    if sinks is None:
        return None
    require(isinstance(sinks, torch.Tensor), TypeError, "sinks must be a torch.Tensor")
    require(sinks.shape == (num_q_heads,), ValueError, "sinks must have shape [query heads]")
    require(sinks.dtype in _SHORT_NAMES, TypeError, "sinks must be bfloat16, float16 or float32")
    require(sinks.device == device, ValueError, f"sinks must be on {device}")
    require(sinks.is_contiguous(), ValueError, "sinks must be contiguous")
    return _SHORT_NAMES[sinks.dtype]


def _check_scales(lib: Library, c: SimpleNamespace, shape: tuple[int, int, int], is_bf16_cache: bool) -> str:
    """ "none", "per_tensor" or "per_token"."""
    pair = {"key_scale": c.key_scale, "value_scale": c.value_scale}
    if is_bf16_cache:
        require(all(scale is None for scale in pair.values()), ValueError, "a BF16 cache takes no key or value scale")
        return "none"
    require((c.key_scale is None) == (c.value_scale is None), ValueError, "key_scale and value_scale go together")
    normal = {}
    for name, scale in pair.items():
        if isinstance(scale, torch.Tensor) and scale.numel() != 1:
            if scale.dim() == 4:
                require(scale.shape[-1] == 1, ValueError, f"{name} must end in a dimension of 1")
                scale = scale.squeeze(-1)
            require(scale.dim() == 3, ValueError, f"{name} must be a scalar or [blocks, kv, page, 1]")
        elif not isinstance(scale, torch.Tensor) and scale is not None:
            number = float(scale)
            if lib.finite_numbers:
                require(0 < number < float("inf"), ValueError, f"{name} must be finite and positive, got {number}")
        normal[name] = scale
    is_per_token = {name: isinstance(scale, torch.Tensor) and scale.numel() > 1 for name, scale in normal.items()}
    require(len(set(is_per_token.values())) == 1, ValueError, "key_scale and value_scale: both per tensor or per token")
    if is_per_token["key_scale"]:
        key, value = normal["key_scale"], normal["value_scale"]
        require(key.shape == value.shape == shape, ValueError, "per-token scales must be [blocks, kv, page]")
        require(key.stride(2) == 1, ValueError, "per-token scales must have a contiguous token axis")
        require(key.stride() == value.stride(), ValueError, "per-token scales must have equal strides")
    for name, scale in normal.items():
        if isinstance(scale, torch.Tensor):
            require(scale.dtype == torch.float32, TypeError, f"{name} must be float32")
            require(scale.device == c.query.device, ValueError, f"{name} must be on {c.query.device}")
    return "per_token" if is_per_token["key_scale"] else "per_tensor"
