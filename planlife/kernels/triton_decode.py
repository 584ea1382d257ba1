"""Split-KV paged decode in Triton: one kernel over a plan's tasks, with FP32 partials, and one that merges them.

The semantics are those of `torch_decode`: nothing outside a row's own tokens reaches its output, not even as 0 x NaN,
and an attended token keeps some weight, so that an infinite V comes out infinite. What is specialised belongs to the
spec alone; rows, capacity, strides and scales are run-time numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..ambient import plain
from ..errors import MintError
from ..planner import TILE_TOKENS, planned_window
from ..spec import DTYPE_BYTES, FP8_DTYPES, PlanSpec
from .triton_launch import Kernel, Launch

_LOG2_E = math.log2(math.e)
_ALIGN_BYTES = 16  # what one load instruction can take

_TILE = tl.constexpr(TILE_TOKENS)
_LN_2 = tl.constexpr(math.log(2))
_TO_LOG2 = tl.constexpr(_LOG2_E)
#: The smallest positive float32: what is merged never loses all its weight, lest an infinity turn to NaN.
_TINY = tl.constexpr(2.0**-149)
_LEAST_NORMAL = tl.constexpr(2.0**-126)
_MOST = tl.constexpr(torch.finfo(torch.float32).max)
#: How the kernels are told of the type of sinks, which may be any; 0 = there are none.
_SINK_KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


@triton.jit
def _stored(tile, FP8_BIAS: tl.constexpr):
    """What the cache holds, as numbers. FP8_BIAS: 0 = the compiler knows the type; else e4m3 bits of that bias."""
    if FP8_BIAS == 0:
        return tile
    else:
        # The bits as a float16, whose exponent has another bias: a power of two too small, subnormals included.
        bits = tile.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = half.to(tl.float32) * (2.0 ** (15 - FP8_BIAS))
        is_nan = (bits & 0x7F) == 0x7F if FP8_BIAS == 7 else bits == 0x80
        return tl.where(is_nan, float("nan"), numbers)


@triton.jit
def _rounded(numbers, DTYPE: tl.constexpr, BFLOAT16_BY_HAND: tl.constexpr):
    """float32 as DTYPE, to nearest even. BFLOAT16_BY_HAND: for Triton's interpreter, which only cuts bits off."""
    if BFLOAT16_BY_HAND:
        bits = numbers.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
        numbers = tl.where(numbers == numbers, nearest, numbers)
    return numbers.to(DTYPE)


def _decode_tasks(
    query,
    keys,
    values,
    block_tables,
    work_info,
    scratch,
    key_scales,
    value_scales,
    softmax_scale: tl.float32,  # times log2(e)
    key_scale: tl.float32,
    value_scale: tl.float32,
    key_scale_on_device: tl.int32,
    value_scale_on_device: tl.int32,
    num_rows: tl.int32,
    num_slots: tl.int32,
    max_tokens: tl.int32,  # that the block tables and the spec allow
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    key_page_stride: tl.int64,
    key_head_stride: tl.int64,
    key_token_stride: tl.int64,
    key_pack_stride: tl.int64,
    value_page_stride: tl.int64,
    value_head_stride: tl.int64,
    value_token_stride: tl.int64,  # of packed ones: from PACK tokens to the next
    value_dim_stride: tl.int64,
    table_row_stride: tl.int64,
    table_column_stride: tl.int64,
    key_scale_page_stride: tl.int64,
    key_scale_head_stride: tl.int64,
    key_scale_token_stride: tl.int64,
    value_scale_page_stride: tl.int64,
    value_scale_head_stride: tl.int64,
    value_scale_token_stride: tl.int64,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LENGTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PACK: tl.constexpr,  # elements of one token that lie together in a packed cache; 0 = not packed
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    FP8_BIAS: tl.constexpr,
    LOGITS_DTYPE: tl.constexpr,  # of Q and K in their product
    OUTPUT_DTYPE: tl.constexpr,  # of P and V in theirs
    LEAST_WEIGHT: tl.constexpr,  # that OUTPUT_DTYPE holds
    SHIFT: tl.constexpr,  # weights are 2^SHIFT times as large, so that OUTPUT_DTYPE holds small ones
    PEAK: tl.constexpr,  # what the largest of a row's scaled weights becomes in each block; 0 = they stay as they are
    BFLOAT16_BY_HAND: tl.constexpr,  # of P
    ALIGNED: tl.constexpr,  # query, keys and values lie in pieces of 16 bytes that are aligned to that
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One task, one KV head, BLOCK_M of its query rows: running maximum (log2), sum and output into the scratch."""
    NUM_ROWS: tl.constexpr = QUERY_LENGTH * GROUP
    ROW_BLOCKS: tl.constexpr = (NUM_ROWS + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    row_block = program % ROW_BLOCKS
    head = ((program // ROW_BLOCKS) % HEADS).to(tl.int64)
    slot = program // (ROW_BLOCKS * HEADS)
    task = work_info + slot.to(tl.int64) * 4
    row = tl.load(task)
    begin_tile = tl.load(task + 1)
    end_tile = tl.load(task + 2)
    length = tl.load(task + 3)

    query_row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = query_row < NUM_ROWS
    token = query_row // GROUP
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    part = (head * num_slots + slot) * NUM_ROWS + query_row
    outputs = scratch.to(tl.pointer_type(tl.float32))
    num_parts = num_slots.to(tl.int64) * (HEADS * NUM_ROWS)
    maxima = outputs + num_parts * HEAD_DIM
    sums = maxima + num_parts

    start = begin_tile * _TILE
    stop = tl.minimum(tl.minimum(length, max_tokens).to(tl.int64), end_tile.to(tl.int64) * _TILE).to(tl.int32)
    if WINDOW:
        first_seen = tl.maximum(length - WINDOW, QUERY_LENGTH - 1) - (QUERY_LENGTH - 1)
        start = tl.maximum(start, first_seen // BLOCK_N * BLOCK_N)
    if (row >= num_rows) | (stop <= start):
        # Slots behind the last task too: their rows of the scratch are undefined, and this says so.
        tl.store(maxima + part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row)
        return

    if FP8_BIAS:
        keys = keys.to(tl.pointer_type(tl.uint8))
        values = values.to(tl.pointer_type(tl.uint8))

    query_token = (row.to(tl.int64) * QUERY_LENGTH + token) * query_token_stride
    query_head = (head * GROUP + query_row % GROUP) * query_head_stride
    query_pointers = query + (query_token + query_head)[:, None] + dims[None, :]
    if ALIGNED:
        query_pointers = tl.multiple_of(query_pointers, (1, 16))
    q = tl.load(query_pointers, mask=is_row[:, None] & is_dim[None, :], other=0.0).to(LOGITS_DTYPE)

    logit_scale = softmax_scale
    output_scale = 1.0
    if SCALED and not PER_TOKEN:
        if key_scale_on_device != 0:
            key_scale = tl.load(key_scales)
        if value_scale_on_device != 0:
            value_scale = tl.load(value_scales)
        logit_scale = softmax_scale * key_scale
        output_scale = value_scale

    row_table = block_tables + row.to(tl.int64) * table_row_stride
    offsets = tl.arange(0, BLOCK_N)
    ends = length - tl.maximum(QUERY_LENGTH - 1 - token, 0)  # padding has no token; it must not overflow
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Blocks that all query tokens see whole come first. In the others V has to be masked for each query token: what
    # only some of them see must not reach the rest.
    num_blocks = (stop - start - 1) // BLOCK_N + 1
    head_blocks = 0
    inner_blocks = num_blocks
    if QUERY_LENGTH > 1:
        if WINDOW:
            head_blocks = tl.minimum((tl.maximum(length - WINDOW - start, 0) + BLOCK_N - 1) // BLOCK_N, num_blocks)
        seen_by_all = tl.minimum(stop, length - (QUERY_LENGTH - 1)) - start
        inner_blocks = tl.maximum(tl.maximum(seen_by_all, 0) // BLOCK_N - head_blocks, 0)
    for OUTER in tl.static_range(2 if QUERY_LENGTH > 1 else 1):
        steps = num_blocks - inner_blocks if OUTER else inner_blocks
        for step in range(0, steps):
            block = tl.where(step < head_blocks, step, step + inner_blocks) if OUTER else head_blocks + step
            position = tl.multiple_of(start + block * BLOCK_N, BLOCK_N)
            held = offsets < stop - position
            tokens = position + offsets
            if WINDOW and QUERY_LENGTH == 1:
                held = held & (length - tokens <= WINDOW)
            # An entry past the row's pages may be anything, and is not read.
            page = tl.load(row_table + (tokens // PAGE) * table_column_stride, mask=held, other=0).to(tl.int64)
            slot_in_page = tokens % PAGE
            tile_mask = held[:, None] & is_dim[None, :]
            key_token = page * key_page_stride + head * key_head_stride + slot_in_page * key_token_stride
            value_token = page * value_page_stride + head * value_head_stride
            if PACK:
                key_dim = (dims // PACK) * key_pack_stride + dims % PACK
                value_token += (slot_in_page // PACK) * value_token_stride + slot_in_page % PACK
                value_dim = dims * value_dim_stride
            else:
                key_dim = dims
                value_token += slot_in_page * value_token_stride
                value_dim = dims
            key_pointers = keys + (key_token[:, None] + key_dim[None, :])
            value_pointers = values + (value_token[:, None] + value_dim[None, :])
            if ALIGNED:
                key_pointers = tl.multiple_of(key_pointers, (1, 16))
                value_pointers = tl.multiple_of(value_pointers, (16, 1) if PACK else (1, 16))
                if PACK:
                    key_pointers = tl.max_contiguous(key_pointers, (1, PACK))
                    value_pointers = tl.max_contiguous(value_pointers, (PACK, 1))
            k = _stored(tl.load(key_pointers, mask=tile_mask, other=0.0), FP8_BIAS).to(LOGITS_DTYPE)
            v = _stored(tl.load(value_pointers, mask=tile_mask, other=0.0), FP8_BIAS).to(OUTPUT_DTYPE)

            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * logit_scale
            if PER_TOKEN:
                scale_offsets = page * key_scale_page_stride + head * key_scale_head_stride
                scale_offsets += slot_in_page * key_scale_token_stride
                logits *= tl.load(key_scales + scale_offsets, mask=held, other=0.0)[None, :]
            attended = held[None, :]
            if QUERY_LENGTH > 1:
                attended = attended & (tokens[None, :] < ends[:, None])
                if WINDOW:
                    attended = attended & (ends[:, None] - tokens[None, :] <= WINDOW)
            logits = tl.where(attended, logits, float("-inf"))

            raised = tl.maximum(maximum, tl.max(logits, 1))
            finite = tl.where(raised == float("-inf"), 0.0, raised)
            # Comparisons, where a maximum would swallow the NaN of an attended token.
            kept = tl.exp2(maximum - finite)
            kept = tl.where(kept < _TINY, _TINY, kept)
            weights = tl.exp2(logits - (finite - SHIFT)[:, None])
            weights = tl.where(weights < LEAST_WEIGHT, LEAST_WEIGHT, weights)
            weights = tl.where(logits == float("-inf"), 0.0, weights)
            total = total * kept + tl.sum(weights, 1)
            output = output * kept[:, None]
            maximum = raised
            if PER_TOKEN:
                scale_offsets = page * value_scale_page_stride + head * value_scale_head_stride
                scale_offsets += slot_in_page * value_scale_token_stride
                weights *= tl.load(value_scales + scale_offsets, mask=held, other=0.0)[None, :]
                weights = tl.where(logits == float("-inf"), 0.0, weights)
            if PEAK:
                # Bounded, so that zeros are not 0 / 0 and an infinity is not inf / inf.
                largest = tl.minimum(tl.maximum(tl.max(tl.abs(weights), 1), _LEAST_NORMAL), _MOST)[:, None]
                weights = weights / largest * PEAK
            weights = _rounded(weights, OUTPUT_DTYPE, BFLOAT16_BY_HAND)
            if OUTER:
                for query_token_index in range(0, QUERY_LENGTH):
                    end = length - (QUERY_LENGTH - 1) + query_token_index
                    seen = held & (tokens < end)
                    if WINDOW:
                        seen = seen & (end - tokens <= WINDOW)
                    added = tl.dot(weights, tl.where(seen[:, None], v, 0.0).to(OUTPUT_DTYPE), input_precision="ieee")
                    if PEAK:
                        added = added * (1 / PEAK) * largest
                    output = tl.where((token == query_token_index)[:, None], output + added, output)
            elif PEAK:
                output += tl.dot(weights, v, input_precision="ieee") * (1 / PEAK) * largest
            else:
                output = tl.dot(weights, v, output, input_precision="ieee")

    # A part whose logits are all NaN is not empty, though no maximum saw it.
    maximum = tl.where(total == total, maximum, 0.0)
    tl.store(maxima + part, tl.where(maximum == float("-inf"), maximum, maximum - SHIFT), mask=is_row)
    tl.store(sums + part, total, mask=is_row)
    tl.store(
        outputs + part[:, None] * HEAD_DIM + dims[None, :],
        output * output_scale,
        mask=is_row[:, None] & is_dim[None, :],
    )


def _merge_parts(
    output,
    lse,
    reduce_info,
    scratch,
    sinks,
    num_rows: tl.int32,
    num_slots: tl.int32,
    num_tokens: tl.int32,
    has_lse: tl.int32,
    sink_kind: tl.int32,
    output_token_stride: tl.int64,
    output_head_stride: tl.int64,
    lse_token_stride: tl.int64,
    lse_head_stride: tl.int64,
    sink_stride: tl.int64,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LENGTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OUTPUT_DTYPE: tl.constexpr,
    BFLOAT16_BY_HAND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_R query rows of one row and KV head: merge the partials of the row's slots; zeros where there are none."""
    NUM_ROWS: tl.constexpr = QUERY_LENGTH * GROUP
    ROW_BLOCKS: tl.constexpr = (NUM_ROWS + BLOCK_R - 1) // BLOCK_R
    program = tl.program_id(0)
    row_block = program % ROW_BLOCKS
    head = (program // ROW_BLOCKS) % HEADS
    row = (program // (ROW_BLOCKS * HEADS)).to(tl.int64)
    is_planned = row < num_rows
    first_slot = tl.load(reduce_info + row * 2, mask=is_planned, other=0)
    num_parts = tl.load(reduce_info + row * 2 + 1, mask=is_planned, other=0)

    query_row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    query_token = row * QUERY_LENGTH + query_row // GROUP
    query_head = head * GROUP + query_row % GROUP
    is_row = (query_row < NUM_ROWS) & (query_token < num_tokens)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    parts = tl.arange(0, BLOCK_P)
    outputs = scratch.to(tl.pointer_type(tl.float32))
    all_parts = num_slots.to(tl.int64) * (HEADS * NUM_ROWS)
    maxima = outputs + all_parts * HEAD_DIM
    sums = maxima + all_parts
    first_part = (head.to(tl.int64) * num_slots + first_slot) * NUM_ROWS

    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        index = first_part + (start + parts)[:, None] * NUM_ROWS + query_row[None, :]
        is_part = (start + parts < num_parts)[:, None] & is_row[None, :]
        top = tl.maximum(top, tl.max(tl.load(maxima + index, mask=is_part, other=float("-inf")), 0))
    # A query token that sees nothing stays at -inf, and so at zero, whatever its sink.
    sees_nothing = top == float("-inf")
    total = tl.zeros([BLOCK_R], tl.float32)
    if sink_kind != 0:
        offset = query_head * sink_stride
        sink = tl.zeros([BLOCK_R], tl.float32)
        if sink_kind == 1:
            sink = tl.load(sinks.to(tl.pointer_type(tl.float32)) + offset, mask=is_row, other=0.0)
        if sink_kind == 2:
            sink = tl.load(sinks.to(tl.pointer_type(tl.bfloat16)) + offset, mask=is_row, other=0.0).to(tl.float32)
        if sink_kind == 3:
            sink = tl.load(sinks.to(tl.pointer_type(tl.float16)) + offset, mask=is_row, other=0.0).to(tl.float32)
        sink *= _TO_LOG2
        top = tl.where(sees_nothing, 0.0, tl.maximum(top, sink))
        total = tl.exp2(sink - top)
    else:
        top = tl.where(sees_nothing, 0.0, top)

    # Summed over the parts at the end: until then each thread adds to its own.
    part_sums = tl.zeros([BLOCK_P, BLOCK_R], tl.float32)
    part_outputs = tl.zeros([BLOCK_P, BLOCK_R, BLOCK_D], tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        index = first_part + (start + parts)[:, None] * NUM_ROWS + query_row[None, :]
        is_part = (start + parts < num_parts)[:, None] & is_row[None, :]
        maximum = tl.load(maxima + index, mask=is_part, other=float("-inf"))
        part_sum = tl.load(sums + index, mask=is_part, other=0.0)
        part_output = tl.load(
            outputs + (index * HEAD_DIM)[:, :, None] + dims[None, None, :],
            mask=is_part[:, :, None] & is_dim[None, None, :],
            other=0.0,
        )
        # What belongs to an empty part is undefined: chosen away, not multiplied by zero.
        is_empty = maximum == float("-inf")
        weight = tl.exp2(maximum - top[None, :])
        weight = tl.where(weight < _TINY, _TINY, weight)
        part_sums += tl.where(is_empty, 0.0, weight * part_sum)
        part_outputs += tl.where(is_empty[:, :, None], 0.0, weight[:, :, None] * part_output)
    total = tl.where(sees_nothing, 1.0, total + tl.sum(part_sums, 0))
    merged = tl.sum(part_outputs, 0) / total[:, None]
    tl.store(
        output + (query_token * output_token_stride + query_head * output_head_stride)[:, None] + dims[None, :],
        _rounded(merged, OUTPUT_DTYPE, BFLOAT16_BY_HAND),
        mask=is_row[:, None] & is_dim[None, :],
    )
    if has_lse != 0:
        logarithm = tl.where(sees_nothing, float("-inf"), (top + tl.log2(total)) * _LN_2)
        tl.store(lse + query_token * lse_token_stride + query_head * lse_head_stride, logarithm, mask=is_row)


_DECODE_TASKS = Kernel(_decode_tasks)
_MERGE_PARTS = Kernel(_merge_parts)


@dataclass(frozen=True)
class _Tiles:
    """How one spec's work is cut: what tuning changes, and nothing else does.

    block_rows, block_tokens: query rows and KV tokens of one step of a decode block. merge_rows, merge_parts: query
    rows and partials that a merge block takes at a time.
    """

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    merge_rows: int
    merge_parts: int
    merge_warps: int = 4


_LEAST_TOKENS = 16  # that a matrix product takes
#: Bytes of one K or V tile, and floats of one accumulator and of one step of a merge.
_TILE_BYTES, _TILE_FLOATS, _MERGE_FLOATS = 16 << 10, 8 << 10, 8 << 10


def _choose_tiles(spec: PlanSpec) -> list[_Tiles]:
    """Best first; the others need less of the device, for those that have less."""
    dim, rows = _padded(spec.head_dim), triton.next_power_of_2(spec.query_rows_per_kv_head)
    exact = "float32" in (spec.q_dtype, spec.kv_dtype)
    block_rows = 16 if exact else max(16, min(rows, _TILE_FLOATS // dim))
    wanted_tokens = _TILE_BYTES // (dim * (4 if exact else DTYPE_BYTES[spec.kv_dtype]))
    # The interpreter's time goes with the number of steps.
    block_tokens = 64 if _DECODE_TASKS.is_interpreted else max(_LEAST_TOKENS, min(64, wanted_tokens))
    merge_rows = max(1, min(rows, _MERGE_FLOATS // (8 * dim)))
    merge_parts = max(1, min(32, _MERGE_FLOATS // (merge_rows * dim)))
    num_warps = 8 if block_rows * dim > _TILE_FLOATS // 2 else 4
    return [
        _Tiles(block_rows, tokens, num_warps, num_stages, merge_rows, merge_parts)
        for tokens, num_stages in ((block_tokens, 5), (block_tokens, 3), (block_tokens, 1), (_LEAST_TOKENS, 1))
    ]


def _padded(head_dim: int) -> int:
    """The width of a tile: a power of two that a matrix product takes."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def _product_dtypes(spec: PlanSpec) -> tuple[str, str]:
    """Of Q x K and of P x V: what holds both factors, and float32 where either side is float32."""
    q_dtype, kv_dtype = spec.q_dtype, spec.kv_dtype
    if "float32" in (q_dtype, kv_dtype):
        return "float32", "float32"
    if kv_dtype in FP8_DTYPES:  # exact in both
        return q_dtype, q_dtype
    return q_dtype if q_dtype == kv_dtype else "float32", kv_dtype


_TRITON_DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
#: The smallest weight that P x V may be given, and the power of two that weights are scaled by, so that it is small:
#: float16 has few exponents.
_LEAST_WEIGHTS = {"float32": (2.0**-149, 0), "float16": (2.0**-24, 15), "bfloat16": (2.0**-126, 0)}
_FP8_BIASES = {"float8_e4m3fn": 7, "float8_e4m3fnuz": 8}
_FP8_NAMES = {"float8_e4m3fn": "fp8e4nv", "float8_e4m3fnuz": "fp8e4b8"}


def _takes_natively(kv_dtype: str, device: str) -> bool:
    """Whether the compiler for that device knows this FP8 type: GPUs of one process may differ."""
    with torch.cuda.device(device):
        target = triton.runtime.driver.active.get_current_target()
    options = triton.compiler.make_backend(target).parse_options({})
    return _FP8_NAMES[kv_dtype] in options.supported_fp8_dtypes


class _PreparedDecode:
    """The kernels of one spec on one device, compiled.

    Raises MintError if none of the spec's tiles fits the device. Syncs: may. Allocates: code on the device.
    """

    def __init__(self, spec: PlanSpec, device: torch.device) -> None:
        self._spec = spec
        self.num_compiled = 0
        for tiles in _choose_tiles(spec):
            try:
                self._prepare(spec, str(device), tiles)
                return
            except triton.runtime.errors.OutOfResources as error:
                too_large = error
        raise MintError(
            f"no tile of the Triton decode of head_dim {spec.head_dim} and {spec.kv_dtype} fits {device}: {too_large}. "
            "Pass backend='torch'."
        ) from too_large

    def _prepare(self, spec: PlanSpec, device: str, tiles: _Tiles) -> None:
        is_interpreted = _DECODE_TASKS.is_interpreted
        q_dtype, kv_dtype = getattr(torch, spec.q_dtype), getattr(torch, spec.kv_dtype)
        is_fp8 = spec.kv_dtype in FP8_DTYPES
        fp8_bias = (
            _FP8_BIASES[spec.kv_dtype]
            if is_fp8 and (is_interpreted or not _takes_natively(spec.kv_dtype, device))
            else 0
        )
        if fp8_bias:
            kv_dtype = torch.uint8
        logits_dtype, output_dtype = _product_dtypes(spec)
        # A weight times a token's scale has any exponent; float16, which has few, is given it over the row's largest.
        is_relative = spec.scales == "per_token" and output_dtype == "float16"
        least_weight, shift = _LEAST_WEIGHTS["float32" if is_relative else output_dtype]
        bfloat16_by_hand = is_interpreted and output_dtype == "bfloat16"
        if is_interpreted:  # whose matrix product takes the bits of a bfloat16 for an integer
            logits_dtype, output_dtype = (
                "float32" if dtype == "bfloat16" else dtype for dtype in (logits_dtype, output_dtype)
            )
        shape = {
            "HEADS": spec.num_kv_heads,
            "GROUP": spec.group_size,
            "QUERY_LENGTH": spec.query_length,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_D": _padded(spec.head_dim),
        }
        pack = _ALIGN_BYTES // DTYPE_BYTES[spec.kv_dtype]
        decode: dict[str, Any] = {
            **shape,
            "PAGE": spec.page_size,
            "PACK": pack if spec.kv_layout == "packed" else 0,
            "WINDOW": planned_window(spec.sliding_window),
            "SCALED": is_fp8,
            "PER_TOKEN": spec.scales == "per_token",
            "FP8_BIAS": fp8_bias,
            "LOGITS_DTYPE": _TRITON_DTYPES[logits_dtype],
            "OUTPUT_DTYPE": _TRITON_DTYPES[output_dtype],
            "LEAST_WEIGHT": least_weight,
            "SHIFT": shift,
            "PEAK": 2 ** _LEAST_WEIGHTS["float16"][1] if is_relative else 0,
            "BFLOAT16_BY_HAND": bfloat16_by_hand,
            "BLOCK_M": tiles.block_rows,
            "BLOCK_N": tiles.block_tokens,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            # A logit fused into its own distance from the maximum is not 0 away from it. (A float32 product is made of
            # fused steps; there the fault only shows beyond logits of 2^24.)
            "enable_fp_fusion": logits_dtype == "float32",
        }
        merge = {
            **shape,
            "OUTPUT_DTYPE": _TRITON_DTYPES[spec.q_dtype],
            "BFLOAT16_BY_HAND": is_interpreted and spec.q_dtype == "bfloat16",
            "BLOCK_R": tiles.merge_rows,
            "BLOCK_P": tiles.merge_parts,
            "num_warps": tiles.merge_warps,
            "enable_fp_fusion": False,
        }
        int32, uint8, float32 = torch.int32, torch.uint8, torch.float32
        pointers = (q_dtype, kv_dtype, kv_dtype, int32, int32, uint8, float32, float32)

        def prepared(kernel: Kernel, *dtypes: torch.dtype, **constants: Any) -> Launch:
            self.num_compiled += kernel.prepare(device, *dtypes, **constants)
            return kernel.prepared(device, *dtypes, **constants)

        self._decode_aligned = prepared(_DECODE_TASKS, *pointers, **decode, ALIGNED=True)
        # Loads element by element: small steps, lest it takes seconds to compile.
        decode.update(BLOCK_N=_LEAST_TOKENS, num_stages=1)
        self._decode_any = prepared(_DECODE_TASKS, *pointers, **decode, ALIGNED=False)
        self._merge = prepared(_MERGE_PARTS, q_dtype, float32, int32, uint8, uint8, **merge)
        self._pack, self._query_pack = pack, _ALIGN_BYTES // DTYPE_BYTES[spec.q_dtype]
        self._blocks_per_slot = spec.num_kv_heads * -(-spec.query_rows_per_kv_head // tiles.block_rows)
        self._blocks_per_row = spec.num_kv_heads * -(-spec.query_rows_per_kv_head // tiles.merge_rows)

    def __call__(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        softmax_scale: float,
        work_info: torch.Tensor,
        reduce_info: torch.Tensor,
        scratch: torch.Tensor,
        key_scale: torch.Tensor | float | None,
        value_scale: torch.Tensor | float | None,
        sinks: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> None:
        spec = self._spec
        num_tokens, num_slots = query.shape[0], work_info.shape[0]
        if not num_tokens:
            return
        table_rows, columns = block_tables.shape
        # Rows beyond the tables' have no page to read, so they cannot have tasks either.
        num_rows = min(num_tokens // spec.query_length, reduce_info.shape[0], table_rows)
        table_tokens = columns * spec.page_size
        query_token_stride, query_head_stride, _ = query.stride()
        strides = (*_key_strides(key_cache, spec.kv_layout), *_value_strides(value_cache, spec.kv_layout, self._pack))
        pack, query_pack = self._pack, self._query_pack
        is_aligned = not (
            (key_cache.data_ptr() | value_cache.data_ptr() | query.data_ptr()) % _ALIGN_BYTES
            or any(stride % pack for stride in strides)
            or query_token_stride % query_pack
            or query_head_stride % query_pack
        )
        # A number needs no tensor, and a tensor is not read here; the pointer beside a number is not followed.
        key_tensor, key_number, key_scale_strides = _scale_arguments(key_scale, work_info)
        value_tensor, value_number, value_scale_strides = _scale_arguments(value_scale, work_info)
        (self._decode_aligned if is_aligned else self._decode_any)(
            (num_slots * self._blocks_per_slot, 1, 1),
            query,
            key_cache,
            value_cache,
            block_tables,
            work_info,
            scratch,
            key_tensor,
            value_tensor,
            softmax_scale * _LOG2_E,
            key_number,
            value_number,
            int(key_tensor is not work_info),
            int(value_tensor is not work_info),
            num_rows,
            num_slots,
            min(table_tokens, spec.max_context_tokens),
            query_token_stride,
            query_head_stride,
            *strides,
            *block_tables.stride(),
            *key_scale_strides,
            *value_scale_strides,
        )
        self._merge(
            (-(-num_tokens // spec.query_length) * self._blocks_per_row, 1, 1),
            output,
            reduce_info if lse is None else lse,
            reduce_info,
            scratch,
            reduce_info if sinks is None else sinks,
            num_rows,
            num_slots,
            num_tokens,
            int(lse is not None),
            0 if sinks is None else _SINK_KINDS[sinks.dtype],
            *output.stride()[:2],
            *((0, 0) if lse is None else lse.stride()),
            0 if sinks is None else sinks.stride()[0],
        )


def _key_strides(cache: torch.Tensor, kv_layout: str) -> tuple[int, int, int, int]:
    """Of pages, heads, tokens, and packs of a head's elements."""
    stride = cache.stride()
    if kv_layout == "nhd":
        return stride[0], stride[2], stride[1], 0
    if kv_layout == "hnd":
        return stride[0], stride[1], stride[2], 0
    return stride[0], stride[1], stride[3], stride[2]


def _value_strides(cache: torch.Tensor, kv_layout: str, pack: int) -> tuple[int, int, int, int]:
    """Of pages, heads, tokens (of packs of them, if packed), and a head's elements."""
    stride = cache.stride()
    if kv_layout == "nhd":
        return stride[0], stride[2], stride[1], 0
    if kv_layout == "hnd":
        return stride[0], stride[1], stride[2], 0
    if len(stride) == 4:  # a plain one: its packs lie side by side
        return stride[0], stride[1], pack, stride[2]
    return stride[0], stride[1], stride[2], stride[3]


def _scale_arguments(
    scale: torch.Tensor | float | None, unread: torch.Tensor
) -> tuple[torch.Tensor, float, tuple[int, int, int]]:
    """The tensor (or `unread`), the number, and the strides of pages, heads and tokens."""
    if not isinstance(scale, torch.Tensor):
        return unread, 1.0 if scale is None else scale, (0, 0, 0)
    if scale.dim() < 3:
        return scale, 1.0, (0, 0, 0)
    pages, heads, tokens, *_ = scale.stride()
    return scale, 1.0, (pages, heads, tokens)


_PREPARED: dict[tuple[PlanSpec, torch.device], _PreparedDecode] = {}


def compile_decode(spec: PlanSpec, device: str) -> int:
    """Compile all that `decode_into` launches for `spec` on `device`; returns how many specialisations were new.

    device: "cpu" under TRITON_INTERPRET=1, else "cuda:0" and so on, with its index.

    Raises MintError where the device is too small for it, and what Triton raises. Capture: no. Syncs: may. Allocates:
    code on the device.
    """
    key = spec, torch.device(device)
    if key in _PREPARED:
        return 0
    prepared = _PREPARED[key] = _PreparedDecode(spec, key[1])
    return prepared.num_compiled


@plain
def decode_into(
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    softmax_scale: float,
    *,
    spec: PlanSpec,
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    scratch: torch.Tensor,
    key_scale: torch.Tensor | float | None = None,
    value_scale: torch.Tensor | float | None = None,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Decode the tasks of a plan; rows without tasks become exact zeros.

    output, query: [R * query_length, q_heads, head_dim], last axis contiguous, R at most the plan's rows.
    key_cache, value_cache: in the spec's layout, last axis contiguous, any other strides.
    block_tables: int32[>= rows with tasks, columns]; entries outside a row's planned tokens are never used.
    work_info: int32[capacity, 4]. reduce_info: int32[rows, 2]. scratch: uint8, aligned to 4 bytes, contents undefined.
    key_scale, value_scale: per_tensor a number or float32 of one element, per_token float32[pages, kv_heads, page] or
        [..., 1]; what tokens outside a row's have is never used. K's multiplies logits, V's the values.
    sinks: float[q_heads]: a logit with value 0 that every query token sees which sees anything.
    lse: float32[R * query_length, q_heads], out: log of the sum of exp(logits), sinks included; -inf where nothing is
        seen.

    Raises MintError if `compile_decode` was not called for the spec. Capture: yes. Syncs: no. Allocates: no.
    """
    prepared = _PREPARED.get((spec, query.device))
    if prepared is None:
        raise MintError(
            f"the Triton decode was not compiled for {spec} on {query.device}, and a launch never compiles. Mint the "
            "class in a capture phase: Backend.compile prepares its kernels."
        )
    prepared(
        output,
        query,
        key_cache,
        value_cache,
        block_tables,
        softmax_scale,
        work_info,
        reduce_info,
        scratch,
        key_scale,
        value_scale,
        sinks,
        lse,
    )
