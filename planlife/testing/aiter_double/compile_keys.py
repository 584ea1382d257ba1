"""What aiter compiles per what: the keys of its planner, its decode tile and its reducer.

The rules are the library's, not a wrapper's: a wrapper is right when none of these is new after its warm-up.
Source: the schedule selection, the layouts of LDS and the caches of ROCm/aiter's aiter/ops/flydsl/kernels, as they are
with mandatory plans (G2, G3, G4). Earlier generations made more tiles, one per dtype of sinks for a start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...planner import TILE_TOKENS, planned_window

#: LDS of one gfx1250 workgroup, bytes.
GFX1250_LDS_BYTES = 327_680

_INT32_SPAN = 2**31
#: LDS of one workgroup, bytes, which nothing checks before a tile is compiled.
_CDNA_LDS_BYTES = {"gfx942": 65_536, "gfx950": 163_840}
#: What the schedule gives a tile of a BF16 cache of it, on both.
_BF16_LDS_BYTES = 65_536
#: Query rows that are multiplied at once.
_ROWS_PER_TILE = 16


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
    stages_one_query_tile: bool = False  # on gfx1250, where LDS is short; else all of them


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


class Schedule(NamedTuple):
    """The flags of a tile on gfx942 and gfx950; what the key holds of the rows, the capacity and the lengths."""

    is_wide_cache: bool
    uses_buffer_kv: bool
    prefetches_v: bool
    is_one_query_tile: bool
    splits: int
    is_single_tile: bool
    is_batch_first: bool


class TileCompileError(RuntimeError):
    """What the compiler finds and no host check. Nobody has seen what FlyDSL raises there: a type that nobody knows."""


def tile_key(shape: TileShape) -> tuple[Any, ...]:
    """Raises NotImplementedError, ValueError, AssertionError as the schedule does."""
    s = shape
    if s.arch == "gfx1250":
        return _gfx1250_key(s)
    return (
        "tile",
        *(s.arch, s.head_dim, s.group, s.page, s.max_partitions, s.softmax_scale, s.query_dtype, s.kv_dtype),
        *(s.per_token, s.query_length, s.is_transposed_v, s.window),
        *_schedule(s),
    )


def check_tile(shape: TileShape) -> None:
    """Raises TileCompileError where a tile takes more LDS than a workgroup has, which the schedule does not look at."""
    s = shape
    if s.arch not in _CDNA_LDS_BYTES:
        return
    schedule = _schedule(s)
    num_bytes, most = _cdna_lds_bytes(s, schedule), _CDNA_LDS_BYTES[s.arch]
    if num_bytes > most:
        raise TileCompileError(f"local memory: the tile takes {num_bytes} bytes of LDS, and {s.arch} has {most}")


def _is_tuned_shape(s: TileShape) -> bool:
    """Elsewhere every flag is off, but for the splits of a BF16 cache."""
    return s.arch == "gfx950" and s.head_dim == 128 and s.page in (16, 128) and s.kv_dtype == "fp8"


def _is_tuned_per_token(s: TileShape) -> bool:
    return _is_tuned_shape(s) and s.query_dtype == "bf16" and s.per_token


def _is_tuned_scalar(s: TileShape) -> bool:
    return _is_tuned_shape(s) and s.is_transposed_v and not s.per_token


def _schedule(s: TileShape) -> Schedule:
    is_tuned_per_token, is_tuned_scalar = _is_tuned_per_token(s), _is_tuned_scalar(s)

    workgroups = s.capacity * s.num_kv_heads
    tiles = window_tiles(s.window, s.query_length) if s.window else -(-s.context_bound // TILE_TOKENS)
    is_single_tile = s.window > 0 and s.max_partitions >= tiles and s.capacity >= s.rows * tiles
    workgroups = min(workgroups, s.rows * s.num_kv_heads * tiles)

    splits = 1
    may_weigh_one = is_single_tile and s.query_length == 4 and s.page == 128 and s.is_transposed_v
    weight = 1 if may_weigh_one else s.query_length
    if s.kv_dtype == "bf16":
        splits = _bf16_splits(s)
    elif is_tuned_per_token and s.query_length in (2, 4) and s.group == 16:
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
        is_tuned_per_token
        and is_single_tile
        and s.query_length == splits == 4
        and s.page == 128
        and 4096 <= s.window <= 8192
        and 4 <= s.rows <= 24
        and s.max_partitions <= 64
        and s.capacity == s.rows * tiles
        and not (s.rows > 8 and s.rows % 8 in (2, 4, 6) and tiles % 2 == 0)
    )
    return Schedule(
        is_wide_cache, uses_buffer_kv, prefetches_v, is_one_query_tile, splits, is_single_tile, is_batch_first
    )


def _bf16_splits(s: TileShape) -> int:
    """The fewest workgroups that a row's queries are split over so that each holds its own."""
    for splits in range(1, s.query_length + 1):
        if s.query_length % splits == 0 and _bf16_lds_bytes(s, s.query_length // splits) <= _BF16_LDS_BYTES:
            return splits
    raise ValueError(f"BF16: the query heads of one token do not fit into {_BF16_LDS_BYTES} bytes of LDS")


def _bf16_lds_bytes(s: TileShape, num_queries: int) -> int:
    query_rows = _padded(num_queries * s.group)
    query_bytes = max(query_rows * s.head_dim * 2, _ROWS_PER_TILE * (2 * TILE_TOKENS + 16))
    return query_bytes + (query_rows + _ROWS_PER_TILE) * 5 * 4 + _page_bytes(s)


def _cdna_lds_bytes(s: TileShape, schedule: Schedule) -> int:
    """Queries, which give their place to probabilities; their scales; each warp's maxima and sums; pages; scales."""
    num_queries = s.query_length // schedule.splits
    if s.kv_dtype == "bf16":
        return _bf16_lds_bytes(s, num_queries)
    query_rows = _padded(num_queries * s.group)
    query_tiles = query_rows // _ROWS_PER_TILE
    is_fused = _is_tuned_per_token(s) and s.query_length in (3, 4) and s.group == 16 and query_tiles == 4
    is_tuned_page = s.page == 128 and (schedule.is_one_query_tile or _is_tuned_scalar(s))
    probability_tiles = query_tiles if is_fused else 2 if is_tuned_page and query_tiles == 3 else 1
    probability_rows = probability_tiles * _ROWS_PER_TILE
    words_of_warps = 4 if is_fused or is_tuned_page or schedule.is_one_query_tile else 5
    num_bytes = max(query_rows * s.head_dim, probability_rows * (TILE_TOKENS + 16)) + query_rows * 4
    num_bytes += (query_rows + probability_rows) * words_of_warps * 4 + _page_bytes(s)
    if s.per_token:
        num_bytes += (1 if schedule.is_single_tile else 2) * 2 * TILE_TOKENS * 4 + words_of_warps * 4
    return num_bytes


def _padded(query_rows: int) -> int:
    return -(-query_rows // _ROWS_PER_TILE) * _ROWS_PER_TILE


def _page_bytes(s: TileShape) -> int:
    """Numbers of the pages that each of four warps reads of a tile."""
    return 4 * -(-64 // s.page) * 4


def _gfx1250_key(s: TileShape) -> tuple[Any, ...]:
    """No flag of the grid and no cap of partitions: one kernel per query and cache shape."""
    elem = 2 if s.kv_dtype == "bf16" else 1
    stride, value_stride = s.head_dim * elem + 16, 64 * elem + 16
    other_bytes = 64 * stride + s.head_dim * value_stride + 512 + _ROWS_PER_TILE * value_stride + 576
    # What of the queries is there at a time.
    least_rows = _ROWS_PER_TILE if s.stages_one_query_tile else _padded(s.query_length * s.group)
    if least_rows * stride + other_bytes > GFX1250_LDS_BYTES:
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
