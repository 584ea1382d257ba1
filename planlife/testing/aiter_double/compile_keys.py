"""What aiter compiles per what: the keys of its planner, its decode tile and its reducer.

The rules are the library's, not a wrapper's: a wrapper is right when none of these is new after its warm-up.
Source: the schedule selection and the caches of ROCm/aiter's aiter/ops/flydsl/kernels, as they are with mandatory plans
(G2, G3). Of native BF16 caches the schedule was not found: their tiles are keyed by what is known of it. Earlier
generations made more tiles, one per dtype of sinks for a start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...planner import TILE_TOKENS, planned_window

#: LDS of one gfx1250 workgroup, bytes.
GFX1250_LDS_BYTES = 327_680

_INT32_SPAN = 2**31


@dataclass(frozen=True)
class TileShape:
    """What the schedule of the decode tile is selected from."""

    arch: str
    num_cu: int
    rows: int
    num_kv_heads: int
    group: int
    head_dim: int
    page: int
    capacity: int
    max_partitions: int
    softmax_scale: float | None
    query_dtype: str
    kv_dtype: str
    per_token: bool
    query_length: int
    is_transposed_v: bool
    cache_bytes: int
    context_bound: int
    window: int


def plan_key(
    planner: str,
    rows: int,
    capacity: int,
    max_partitions: int,
    window: int,
    query_length: int,
    pointers: tuple[int, ...],
) -> tuple[Any, ...]:
    """pointers: of lengths, work_info and reduce_info; Triton makes another kernel for one that 16 does not divide."""
    key = ("plan", rows, capacity, max_partitions, planned_window(window), query_length if window > 0 else 1)
    return key if planner == "flydsl" else (*key, *(pointer % 16 == 0 for pointer in pointers))


def window_tiles(window: int, query_length: int) -> int:
    """Most tiles that the union of a row's query windows can touch."""
    return (window + query_length - 2 + TILE_TOKENS - 1) // TILE_TOKENS + 1


def tile_key(shape: TileShape) -> tuple[Any, ...]:
    """Raises NotImplementedError, AssertionError as the schedule does."""
    s = shape
    if s.arch == "gfx1250":
        return _gfx1250_key(s)
    # What follows is selected on gfx950 only; elsewhere every flag is off.
    is_tuned_shape = s.arch == "gfx950" and s.head_dim == 128 and s.page in (16, 128) and s.kv_dtype == "fp8"
    is_tuned_per_token = is_tuned_shape and s.query_dtype == "bf16" and s.per_token
    is_tuned_scalar = is_tuned_shape and s.is_transposed_v and not s.per_token

    workgroups = s.capacity * s.num_kv_heads
    tiles = window_tiles(s.window, s.query_length) if s.window else -(-s.context_bound // TILE_TOKENS)
    is_single_tile = s.window > 0 and s.max_partitions >= tiles and s.capacity >= s.rows * tiles
    workgroups = min(workgroups, s.rows * s.num_kv_heads * tiles)

    splits = 1
    may_weigh_one = is_single_tile and s.query_length == 4 and s.page == 128 and s.is_transposed_v
    weight = 1 if may_weigh_one else s.query_length
    if is_tuned_per_token and s.query_length in (2, 4) and s.group == 16:
        if (s.num_kv_heads == 1 or not s.window) and weight * workgroups <= 2 * s.num_cu:
            splits = s.query_length
    elif (
        is_tuned_per_token
        and not s.window
        and (s.query_length, s.group, s.page) == (4, 8, 128)
        and s.is_transposed_v
        and 2 * workgroups <= s.num_cu
    ):
        splits = 2

    is_wide_cache = s.cache_bytes >= _INT32_SPAN
    uses_buffer_kv = (
        is_wide_cache
        and s.cache_bytes < 2 * _INT32_SPAN
        and is_tuned_per_token
        and (s.query_length, splits, s.group, s.page) == (4, 1, 16, 128)
    )
    prefetches_v = (is_tuned_per_token and s.query_length == splits and 8 <= s.group <= 16) or (
        is_tuned_scalar and s.page == 128 and s.query_length * s.group <= 16
    )
    is_one_query_tile = (
        prefetches_v
        and s.per_token
        and (
            splits > 1
            or s.page == 16
            or not s.is_transposed_v
            or s.rows * s.num_kv_heads * s.max_partitions <= s.num_cu
            or (is_single_tile and workgroups <= 2 * s.num_cu)
        )
    )
    # Where a windowed call splits four queries there is one KV head, and the grid is at most twice the compute units.
    is_batch_first = (
        is_single_tile
        and s.query_length == splits == 4
        and s.page == 128
        and 4096 <= s.window <= 8192
        and 4 <= s.rows <= 24
        and s.max_partitions <= 64
        and s.capacity == s.rows * tiles
        and not (s.rows > 8 and s.rows % 8 in (2, 4, 6) and tiles % 2 == 0)
    )
    return (
        "tile",
        *(s.arch, s.head_dim, s.group, s.page, s.max_partitions, s.softmax_scale, s.query_dtype, s.kv_dtype),
        *(s.per_token, s.query_length, s.is_transposed_v, s.window),
        *(is_wide_cache, uses_buffer_kv, prefetches_v, is_one_query_tile, splits, is_single_tile, is_batch_first),
    )


def _gfx1250_key(s: TileShape) -> tuple[Any, ...]:
    """No flag of the grid and no cap of partitions: one kernel per query and cache shape."""
    stride = s.head_dim + 16
    query_bytes = -(-s.query_length * s.group // 16) * 16 * stride
    kv_bytes = 64 * stride + s.head_dim * 80 + 512
    if query_bytes + kv_bytes + 16 * 80 + 576 > GFX1250_LDS_BYTES:
        raise NotImplementedError("gfx1250: the query and KV tiles do not fit into LDS")
    softmax_scale = s.head_dim**-0.5 if s.softmax_scale is None else s.softmax_scale
    return (
        "tile",
        *(s.arch, s.head_dim, s.group, s.page, softmax_scale, s.query_dtype, s.kv_dtype),
        *(s.per_token, s.query_length, s.is_transposed_v, s.window),
    )


def reduce_key(
    shape: TileShape, output_dtype: str, sink_dtype: str | None, pointer: int, strides: tuple[int, ...]
) -> tuple[Any, ...]:
    """pointer, strides: of temporary_output, whose dtype is the output's.

    A dimension of size 1 may have any stride in a contiguous tensor, and the library looks at it all the same.
    """
    s = shape
    partitions = s.max_partitions
    if s.window:
        partitions = min(partitions, window_tiles(s.window, s.query_length))
    slot_items = s.query_length * s.group * s.head_dim
    head_stride, *slot_strides = strides[:3]
    is_bounded = (
        partitions <= 64
        and slot_strides == [slot_items, s.head_dim]
        and head_stride < _INT32_SPAN
        and partitions * slot_items * 2 < _INT32_SPAN
    )
    is_vectorized = is_bounded and s.head_dim == 128 and pointer % 4 == 0 and head_stride % 2 == 0
    is_compact = s.head_dim == 128 and partitions > 64 and s.capacity <= 32 * s.rows
    return (
        "reduce",
        *(s.arch, partitions, s.head_dim, output_dtype, sink_dtype or output_dtype, sink_dtype is not None, s.group),
        *(is_bounded, is_vectorized, is_compact),
    )
