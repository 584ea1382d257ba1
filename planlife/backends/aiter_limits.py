"""What is known of aiter's limits, each said with its way out. The library's own answer decides; these explain it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from ..aiter_library import AiterLibrary, ask_count
from ..errors import ConfigError
from ..planner import spec_capacity
from ..spec import DTYPE_BYTES, FP8_DTYPES, INT32_MAX, PlanSpec
from .aiter_plan import compile_bytes
from .aiter_scales import SCALES_OF_FLOAT32, own_softmax_scale
from .aiter_tile import refuse_tile, window_tiles

# As aiter's host code has them since ROCm/aiter#5809.
#: plan_pa_decode: sequences of one plan.
MAX_PLAN_ROWS = 4096
#: pa_decode: the architectures that any text of it serves, and the only FP8 cache of each.
FP8_OF_ARCHITECTURE = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn", "gfx1250": "float8_e4m3fn"}
#: pa_decode: tokens of a page.
PAGE_SIZES = (16, 64, 128)
#: pa_decode: head dims are multiples of these by the cache's dtype, up to the largest; FP8 has 64 besides. Texts with
#: BF16 caches on gfx1250 treat them as FP8 ones, and take float16 queries with them too.
HEAD_DIM_STEP_BF16, HEAD_DIM_STEP_FP8, SMALL_HEAD_DIM_FP8, MAX_HEAD_DIM = 64, 128, 64, 1024
#: pa_decode: bytes of a cache from which its code has wider addresses, or none of a buffer's.
WIDE_CACHE_BYTES = (2**31, 2**32)


def refuse_compile(library: AiterLibrary, spec: PlanSpec, architecture: str, num_compute_units: int) -> list[str]:
    """What aiter's host checks let pass, and its compiler does not."""
    has_text = library.has_text_of_gfx1250
    return refuse_tile(spec, architecture, has_text_of_gfx1250=has_text, num_compute_units=num_compute_units)


def explain_refusal(library: AiterLibrary, spec: PlanSpec, architecture: str, device: torch.device) -> list[str]:
    """What aiter's host checks have against a site, as far as we know them, each with its way out."""
    reasons = []
    if architecture not in FP8_OF_ARCHITECTURE:
        served = ", ".join(FP8_OF_ARCHITECTURE)
        reasons.append(f"aiter's work plans are for {served}, and this GPU is {architecture}; pass 'triton'")
    is_fp8 = spec.kv_dtype in FP8_DTYPES
    fp8 = FP8_OF_ARCHITECTURE.get(architecture)
    if is_fp8 and fp8 not in (None, spec.kv_dtype):
        reasons.append(f"the FP8 cache of {architecture} is {fp8}, not {spec.kv_dtype}; make the cache {fp8}")
    if not is_fp8 and spec.kv_dtype != "bfloat16":
        reasons.append(f"aiter reads no {spec.kv_dtype} cache; make it bfloat16 or {fp8 or 'FP8'}")
    as_fp8 = is_fp8 or architecture == "gfx1250"
    if spec.q_dtype == "float32" or (not as_fp8 and spec.q_dtype != "bfloat16"):
        allowed = "bfloat16 or float16" if as_fp8 else "bfloat16, as the cache"
        reasons.append(f"aiter takes no {spec.q_dtype} query with a {spec.kv_dtype} cache; make it {allowed}")
    step = HEAD_DIM_STEP_FP8 if as_fp8 else HEAD_DIM_STEP_BF16
    is_small = as_fp8 and spec.head_dim == SMALL_HEAD_DIM_FP8
    if (spec.head_dim % step and not is_small) or spec.head_dim > MAX_HEAD_DIM:
        also = f"{SMALL_HEAD_DIM_FP8} and " if as_fp8 else ""
        reasons.append(
            f"aiter has no head_dim {spec.head_dim} for a {spec.kv_dtype} cache: it has {also}multiples of {step} up "
            f"to {MAX_HEAD_DIM}; pass 'triton'"
        )
    if spec.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        reasons.append(f"aiter reads pages of {sizes} tokens, not of {spec.page_size}; choose one of them")
    if spec.kv_layout == "hnd":
        reasons.append("aiter reads no kv_layout='hnd'; use 'packed', or pass 'triton'")
    elif spec.kv_layout == "nhd":
        reasons.extend(_explain_nhd(library, spec, architecture, device))
    return reasons


def _explain_nhd(library: AiterLibrary, spec: PlanSpec, architecture: str, device: torch.device) -> list[str]:
    if library.nhd_max_query_length is None:
        return [
            "this aiter reads no kv_layout='nhd' (it has no pa_decode_nhd_max_query_length); use 'packed', upgrade "
            "aiter, or pass 'triton'"
        ]
    longest = ask_count(
        library.nhd_max_query_length,
        device,
        kv_dtype=getattr(torch, spec.kv_dtype),
        head_dim=spec.head_dim,
        block_size=spec.page_size,
        query_group_size=spec.group_size,
    )
    if not longest:
        return [
            f"aiter reads no kv_layout='nhd' of {spec.kv_dtype}, head_dim {spec.head_dim}, page_size {spec.page_size} "
            f"and {spec.group_size} query heads per KV head on {architecture}; use 'packed', or pass 'triton'"
        ]
    if spec.query_length > longest:
        return [
            f"aiter reads this kv_layout='nhd' for query_length up to {longest}, not {spec.query_length}; use "
            "'packed', or pass 'triton'"
        ]
    return []


def refuse_always(spec: PlanSpec, device: Any) -> list[str]:
    """What no call's arguments tell aiter's predicate."""
    reasons = []
    if spec.max_partitions is not None and spec.max_partitions > device.num_compute_units:
        reasons.append(
            f"max_partitions={spec.max_partitions} is above the {device.num_compute_units} compute units "
            f"of {device.name}; pass at most that, or None"
        )
    if not most_reducer_rows(spec, device.num_compute_units, 1):
        reasons.append(
            f"aiter's reducer cannot index one row: {_of_the_reducer(spec, 1, device.num_compute_units)}; pass a "
            "smaller workgroup_budget or max_partitions, or split the heads over more ranks"
        )
    if spec.softmax_scale is not None and not SCALES_OF_FLOAT32[0] <= spec.softmax_scale <= SCALES_OF_FLOAT32[1]:
        reasons.append(
            f"softmax_scale={spec.softmax_scale} is not finite and > 0 in float32, as which aiter compiles it in; pass "
            "'triton'"
        )
    return reasons


def most_reducer_rows(spec: PlanSpec, num_compute_units: int, at_most: int = MAX_PLAN_ROWS) -> int:
    """The largest class, up to `at_most` rows, whose partials and output aiter's reducer can index (R47); 0: none."""
    is_held = range(1, at_most + 1)
    return bisect_left(is_held, True, key=lambda rows: _reducer_indices(spec, rows, num_compute_units) > INT32_MAX)


def _reducer_indices(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
    """The largest number that the planned reducer has in an int32: an offset, or a stride that it is given.

    Up to 64 partitions it finds a row's partial outputs by 64-bit addresses; the stride of a head has 32 bits all the
    same, and so has the size of a row's.
    """
    heads, rows, dim = spec.num_kv_heads, spec.query_rows_per_kv_head, spec.head_dim
    partitions = num_compute_units if spec.max_partitions is None else spec.max_partitions
    capacity = spec_capacity(spec, plan_rows, num_compute_units)
    if spec.sliding_window:
        partitions = min(partitions, window_tiles(spec))
    of_a_head = capacity * rows * dim
    row_bytes = partitions * rows * dim * DTYPE_BYTES[spec.q_dtype]
    has_wide_addresses = partitions <= 64 and row_bytes <= INT32_MAX
    statistics, outputs = heads * capacity * rows - 1, max(heads * of_a_head - 1, of_a_head)
    written = plan_rows * heads * rows * dim - 1
    return max(statistics, of_a_head if has_wide_addresses else outputs, written)


def check_reducer(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> None:
    most = most_reducer_rows(spec, num_compute_units, plan_rows)
    if plan_rows > most:
        raise ConfigError(
            f"a class of {plan_rows} rows is too large for aiter's reducer: "
            f"{_of_the_reducer(spec, plan_rows, num_compute_units)}. Pass backend=AiterBackend(max_plan_rows={most}), "
            "which makes segments, a smaller workgroup_budget or max_partitions, or lower the ladder's top class."
        )


def _of_the_reducer(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> str:
    return (
        f"its offsets are of 32 bits, and {spec.num_kv_heads} KV heads x "
        f"{spec_capacity(spec, plan_rows, num_compute_units)} slots x {spec.query_rows_per_kv_head} query rows x "
        f"head_dim {spec.head_dim} are too many"
    )


def conditions(spec: PlanSpec, classes: Sequence[int], num_compute_units: int) -> tuple[str, ...]:
    """What holds for calls of a site that aiter serves, by a backend that was given nothing else, in sentences.

    spec: as it was given; its plans have the default budget and all partitions where it names none.
    """
    found = []
    segments = [f"{rows} in {-(-rows // MAX_PLAN_ROWS)}" for rows in classes if rows > MAX_PLAN_ROWS]
    if segments:
        found.append(f"classes above {MAX_PLAN_ROWS} rows are decoded in segments: {', '.join(segments)}")
    most = most_reducer_rows(spec, num_compute_units)
    too_large = [str(rows) for rows in classes if min(rows, MAX_PLAN_ROWS) > most]
    if too_large:
        found.append(
            f"warming the classes {', '.join(too_large)} is refused: aiter's reducer takes {most} rows of this shape; "
            f"pass backend=AiterBackend(max_plan_rows={most}), which makes segments"
        )
    origin = "1/sqrt(head_dim)" if spec.softmax_scale is None else "the site's"
    found.append(
        f"softmax_scale is compiled in as {own_softmax_scale(spec)} ({origin}), and calls with another one are "
        "refused: pass PlanSpec(softmax_scale=...) where the model has another, and "
        "backend=AiterBackend(softmax_scales=[...]) where one site has several"
    )
    rows = min(max(classes), MAX_PLAN_ROWS, most)
    num_bytes = compile_bytes(spec, rows, num_compute_units)
    found.append(
        f"minting takes up to {num_bytes:,} bytes beside the budget while it compiles; leave them free until then"
    )
    found.append("calls with lse= are refused: aiter gives no log-sum-exps, backend='triton' does")
    return tuple(found)
