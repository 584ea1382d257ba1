"""The local memory that aiter's decode needs for a site: no host check counts it, and its compiler runs out of it.

From the layouts of local memory that are published beside its schedule. What no schedule of a site can hold is refused
when a manager is made; what only some row counts cannot hold is refused when their class is minted.
"""

from __future__ import annotations

from ..planner import TILE_TOKENS, default_workgroup_budget, plan_capacity
from ..spec import FP8_DTYPES, PlanSpec

#: Bytes of local memory of one workgroup.
LDS_BYTES = {"gfx942": 65_536, "gfx950": 163_840, "gfx1250": 327_680}
#: What the schedule of gfx942 and gfx950 gives the tile of a BF16 cache of it.
_BF16_BYTES = 65_536
#: Query rows that are multiplied at once, keys that gfx1250 loads at once, and warps of a workgroup.
_ROWS_AT_ONCE, _KEYS_AT_ONCE, _WARPS = 16, 64, 4


def refuse_tile(spec: PlanSpec, architecture: str, *, has_text_of_gfx1250: bool, num_compute_units: int) -> list[str]:
    """Why no tile of this site can be compiled; empty: one can, or nothing is known of this architecture.

    has_text_of_gfx1250: whether the library decodes BF16 caches on gfx1250, with a kernel that is never too large.
    """
    if architecture not in LDS_BYTES or (architecture == "gfx1250" and has_text_of_gfx1250):
        return []
    is_fp8 = spec.kv_dtype in FP8_DTYPES
    rows, most, what = spec.query_rows_per_kv_head, LDS_BYTES[architecture], "query rows per KV head"
    if architecture == "gfx1250":
        num_bytes = _gfx1250_bytes(spec)
    elif is_fp8:
        num_bytes = _fp8_bytes(spec, architecture, num_compute_units)
    else:  # queries are split over workgroups until those of one token are left
        rows, most, what = spec.group_size, _BF16_BYTES, "query heads per KV head"
        num_bytes = _bf16_bytes(spec)
    if num_bytes <= most:
        return []
    shorter = ", shorten query_length" if is_fp8 and spec.query_length > 1 else ""
    return [
        f"aiter's kernel for {rows} {what} with head_dim {spec.head_dim} and a {spec.kv_dtype} cache takes "
        f"{num_bytes:,} bytes of local memory (LDS), and has {most:,} on {architecture}; split the heads over more "
        f"ranks{shorter}, or pass 'triton'"
    ]


def _padded(query_rows: int) -> int:
    return -(-query_rows // _ROWS_AT_ONCE) * _ROWS_AT_ONCE


def _page_bytes(spec: PlanSpec) -> int:
    return 4 * _WARPS * -(-_KEYS_AT_ONCE // spec.page_size)


def _bf16_bytes(spec: PlanSpec) -> int:
    rows = _padded(spec.group_size)
    tile = max(rows * spec.head_dim * 2, _ROWS_AT_ONCE * (2 * TILE_TOKENS + 16))
    return tile + (rows + _ROWS_AT_ONCE) * 5 * 4 + _page_bytes(spec)


def _fp8_bytes(spec: PlanSpec, architecture: str, num_compute_units: int) -> int:
    """Of the smallest schedule. Those that are tuned differ more where there are few rows, which always fit."""
    rows, is_per_token = _padded(spec.query_rows_per_kv_head), spec.scales == "per_token"
    is_tuned = (architecture, spec.head_dim, spec.page_size, is_per_token) == ("gfx950", 128, 128, False)
    words = 4 if is_tuned else 5
    num_bytes = max(rows * spec.head_dim, _ROWS_AT_ONCE * (TILE_TOKENS + 16))
    num_bytes += rows * 4 + (rows + _ROWS_AT_ONCE) * words * 4 + _page_bytes(spec)
    if is_per_token:
        buffers = 1 if _has_one_tile_each(spec, num_compute_units) else 2
        num_bytes += buffers * 2 * TILE_TOKENS * 4 + words * 4
    return num_bytes


def window_tiles(spec: PlanSpec) -> int:
    """The most tiles that the windows of a row's query tokens touch."""
    window: int = spec.sliding_window
    return -(-(window + spec.query_length - 2) // TILE_TOKENS) + 1


def _has_one_tile_each(spec: PlanSpec, num_compute_units: int) -> bool:
    """Whether a call of one row is sure to have a task for each tile of its window: others may not."""
    if not spec.sliding_window:
        return False
    partitions = num_compute_units if spec.max_partitions is None else spec.max_partitions
    capacity = plan_capacity(
        1,
        num_kv_heads=spec.num_kv_heads,
        num_cu=num_compute_units,
        max_partitions=partitions,
        workgroup_budget=spec.workgroup_budget or default_workgroup_budget(num_compute_units),
    )
    return min(partitions, capacity) >= window_tiles(spec)


def _gfx1250_bytes(spec: PlanSpec) -> int:
    stride, value_stride = spec.head_dim + 16, _KEYS_AT_ONCE + 16
    keys_and_values = _KEYS_AT_ONCE * stride + spec.head_dim * value_stride + 2 * _KEYS_AT_ONCE * 4
    return _padded(spec.query_rows_per_kv_head) * stride + keys_and_values + _ROWS_AT_ONCE * value_stride + 576
