"""What the double launches: torch ops without a host read on a GPU, so that every kind of graph records them.

In inference mode and through aliases: a kernel that writes through pointers bumps no `_version`, and asks no tensor how
it was made.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch

from ...kernels.torch_decode import decode_into
from ...kernels.torch_planner import plan_into
from ...planner import TILE_TOKENS
from ...spec import PlanSpec, dtype_name
from .host_checks import CheckedCall

#: What a decode finds wrong on the device, in the order of `faults`.
FAULTS = (
    "the plan was not refreshed from these lengths: its tables say other tiles or lengths",
    "the plan has tasks of rows that this call does not have: the kernel would read past the query",
    "a length is beyond the block table, or beyond max_context_length",
    "a block table entry of a row's own pages is no page of the cache",
    "V is not finite in the unwritten tail of a row's last page: the kernel multiplies it by 0, which gives NaN",
    "the scratch was overwritten while this call used it: another call in flight shares it",
)


@torch.inference_mode()
def refresh(
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    lengths: torch.Tensor,
    max_partitions: int,
    window: int,
    query_length: int,
    delay_cycles: int,
) -> None:
    work_info, reduce_info = _by_pointer(work_info), _by_pointer(reduce_info)
    if delay_cycles and lengths.is_cuda:
        # Who reads without an order behind this refresh finds tables that no lengths make.
        work_info.fill_(-1)
        reduce_info.fill_(-1)
        torch.cuda._sleep(delay_cycles)  # type: ignore[no-untyped-call]
    plan_into(
        work_info,
        reduce_info,
        lengths.clamp_min(0),
        max_partitions=max_partitions,
        sliding_window=window,
        query_length=query_length,
    )


@torch.inference_mode()
def decode(
    call: CheckedCall,
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    softmax_scale: float,
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    key_scale: Any,
    value_scale: Any,
    sinks: torch.Tensor | None,
    token: int,
    finite_tails: bool,
) -> torch.Tensor:
    """Decode what the tables say, and return which of FAULTS there are: bool[len(FAULTS)].

    token: of this call, written into the scratch slots that it uses. finite_tails: whether to look at V's.
    """
    found = faults(call, value_cache, lengths, block_tables, work_info, reduce_info, finite_tails)
    is_used = (work_info[:, 1] < work_info[:, 2])[None, :, None]
    output = _by_pointer(output)
    *stats, partials = map(_by_pointer, scratch)
    for stat in stats:
        stat.masked_fill_(is_used, token)
    partials.masked_fill_(is_used[..., None], token % 128)
    key_scale, value_scale = (
        1.0 if scale is None and call.scales != "none" else scale for scale in (key_scale, value_scale)
    )
    pages = block_tables.clamp(0, value_cache.shape[0] - 1)  # who has other entries is told by `found`
    attend = attend_on_device if output.is_cuda else attend_on_host
    attend(
        *(call, output, query, key_cache, value_cache, pages, softmax_scale, work_info, reduce_info),
        *(key_scale, value_scale, sinks),
    )
    lost = torch.stack([(is_used & (stat != token)).any() for stat in stats]).any()
    return torch.cat((found, lost[None]))


def faults(
    call: CheckedCall,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    finite_tails: bool,
) -> torch.Tensor:
    """All FAULTS but the last, from the tables and the lengths of this call."""
    shape, rows = call.shape, lengths.shape[0]
    lens = lengths.clamp_min(0).to(torch.int64)
    first = torch.zeros_like(lens)
    if shape.window:
        first = _floor_div((lens - (shape.query_length - 1 + shape.window)).clamp_min(0), TILE_TOKENS)
    tiles = _floor_div(lens + (TILE_TOKENS - 1), TILE_TOKENS) - first
    start, tasks = reduce_info.to(torch.int64).unbind(1)
    row, begin, end, length = work_info.to(torch.int64).unbind(1)

    is_task = begin < end
    is_foreign = is_task & ((row < 0) | (row >= rows))
    is_own = is_task & ~is_foreign
    of_rows = torch.stack((start, tasks, lens, first, tiles), 1)
    slot_start, slot_tasks, slot_length, slot_first, slot_tiles = of_rows[row.clamp(0, rows - 1)].unbind(1)
    part = torch.arange(row.shape[0], device=row.device) - slot_start
    parts = slot_tasks.clamp_min(1)
    is_right = (
        (part >= 0)
        & (part < slot_tasks)
        & (length == slot_length)
        & (begin == slot_first + _floor_div(part * slot_tiles, parts))
        & (end == slot_first + _floor_div((part + 1) * slot_tiles, parts))
    )
    is_stale = (is_own & ~is_right).any() | ((tasks > 0) != (tiles > 0)).any() | (is_own.sum() != tasks.sum())

    columns = block_tables.shape[1]
    is_long = lens > min(shape.context_bound, columns * shape.page)
    if not columns:
        zero = is_stale.new_zeros(())
        return torch.stack((is_stale, is_foreign.any(), is_long.any(), zero, zero))
    column = torch.arange(columns, device=lens.device)
    is_owned = (column * shape.page < lens[:, None]) & ((column + 1) * shape.page > (first * TILE_TOKENS)[:, None])
    is_page = (block_tables >= 0) & (block_tables < value_cache.shape[0])
    return torch.stack(
        (
            is_stale,
            is_foreign.any(),
            is_long.any(),
            (is_owned & ~is_page).any(),
            _has_bad_tail(call, value_cache, lens, block_tables) if finite_tails else is_stale.new_zeros(()),
        )
    )


def _has_bad_tail(
    call: CheckedCall, value_cache: torch.Tensor, lens: torch.Tensor, block_tables: torch.Tensor
) -> torch.Tensor:
    page = call.shape.page
    last = _floor_div((lens - 1).clamp_min(0), page).clamp_max(block_tables.shape[1] - 1)
    pages = block_tables.gather(1, last[:, None])[:, 0].clamp(0, value_cache.shape[0] - 1)
    # FP8 as bytes: it has no infinity, and some builds of torch cannot index or compare 8-bit floats.
    if value_cache.element_size() == 1:
        values = value_cache.view(torch.uint8)[pages.to(torch.int64)]
        is_bad = values == 0x80 if value_cache.dtype == torch.float8_e4m3fnuz else values.bitwise_and(0x7F) == 0x7F
    else:
        is_bad = ~value_cache[pages.to(torch.int64)].isfinite()
    if call.is_nhd:  # [rows, page, kv_heads, head_dim]
        is_bad = is_bad.flatten(2).any(2)
    elif is_bad.dim() == 4:  # [rows, kv_heads, head_dim, page]
        is_bad = is_bad.flatten(1, 2).any(1)
    else:  # [rows, kv_heads, page / x, head_dim, x]
        is_bad = is_bad.any(3).any(1).flatten(1)
    positions = last[:, None] * page + torch.arange(page, device=lens.device)
    is_tail = (positions >= lens[:, None]) & (lens > 0)[:, None]
    return (is_tail & is_bad).any()


def attend_on_device(
    call: CheckedCall,
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pages: torch.Tensor,
    softmax_scale: float,
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    key_scale: torch.Tensor | float | None,
    value_scale: torch.Tensor | float | None,
    sinks: torch.Tensor | None,
) -> None:
    """The torch backend's kernel, which reads nothing back."""
    columns = pages.shape[1]
    if not columns:
        output.zero_()
        return
    decode_into(
        *(output, query, key_cache, value_cache, pages, softmax_scale),
        spec=_spec(call, query.shape[1], str(query.dtype), str(key_cache.dtype), columns),
        work_info=work_info,
        reduce_info=reduce_info,
        scratch=torch.empty(_partials_bytes(call), dtype=torch.uint8, device=query.device),
        key_scale=key_scale,
        value_scale=value_scale,
        sinks=sinks,
    )


def attend_on_host(
    call: CheckedCall,
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pages: torch.Tensor,
    softmax_scale: float,
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    key_scale: torch.Tensor | float | None,
    value_scale: torch.Tensor | float | None,
    sinks: torch.Tensor | None,
) -> None:
    """The same where the tables may be read: row by row, and no token but a row's own. Shares no code with it."""
    output.zero_()
    shape, work = call.shape, work_info.tolist()
    num_queries, heads, page = shape.query_length, shape.num_kv_heads, shape.page
    queries = (query.float() * softmax_scale).view(-1, num_queries, heads, shape.group, shape.head_dim)
    outputs = output.view(queries.shape)
    sink = None if sinks is None else sinks.float().view(heads, shape.group)
    for row, (slot, count) in enumerate(reduce_info.tolist()):
        tasks = work[slot : slot + count]
        if not tasks:
            continue
        begin, length = tasks[0][1] * TILE_TOKENS, tasks[-1][3]
        stop = min(tasks[-1][2] * TILE_TOKENS, length, pages.shape[1] * page)
        own = pages[row, begin // page : -(-stop // page)]
        keys = _tokens(call, key_cache, own, key_scale, is_key=True)
        values = _tokens(call, value_cache, own, value_scale, is_key=False)
        for token in range(num_queries):
            end = length - num_queries + 1 + token
            first = max(end - shape.window, begin, 0) if shape.window else begin
            seen = slice(first - begin, min(end, stop) - begin)
            if seen.start >= seen.stop:
                continue
            logits = queries[row, token] @ keys[:, seen].mT
            result = logits.softmax(-1) @ values[:, seen]
            if sink is not None:
                result *= (logits.logsumexp(-1) - sink).sigmoid()[..., None]
            outputs[row, token] = result


def _tokens(
    call: CheckedCall, cache: torch.Tensor, pages: torch.Tensor, scale: torch.Tensor | float | None, *, is_key: bool
) -> torch.Tensor:
    """What the pages hold, scaled: float32[kv_heads, tokens, head_dim]."""
    if cache.element_size() == 1:
        # Torch converts 8-bit floats one by one: a look-up of what each byte stands for is several times as fast.
        indices = cache.view(torch.uint8)[pages].to(torch.int32)
        held = _values_of(cache.dtype).index_select(0, indices.flatten()).view(indices.shape)
    else:
        held = cache[pages].float()
    if call.is_nhd:  # [pages, page, kv_heads, head_dim]
        tokens = held.permute(2, 0, 1, 3)
    elif is_key:  # [pages, kv_heads, head_dim / x, page, x]
        tokens = held.permute(1, 0, 3, 2, 4).flatten(3)
    elif held.dim() == 4:  # [pages, kv_heads, head_dim, page]
        tokens = held.permute(1, 0, 3, 2)
    else:  # [pages, kv_heads, page / x, head_dim, x]
        tokens = held.permute(1, 0, 2, 4, 3).flatten(2, 3)
    if isinstance(scale, torch.Tensor) and scale.numel() > 1:
        scale = scale.view(scale.shape[:3])[pages].transpose(0, 1)[..., None]
    return (tokens if scale is None else tokens * scale).flatten(1, 2)


@cache
def _values_of(dtype: torch.dtype) -> torch.Tensor:
    """float32[256], by byte."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


def _by_pointer(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, without a version."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _floor_div(numerator: torch.Tensor, denominator: torch.Tensor | int) -> torch.Tensor:
    return torch.div(numerator, denominator, rounding_mode="floor")


def _partials_bytes(call: CheckedCall) -> int:
    shape = call.shape
    return shape.num_kv_heads * shape.capacity * shape.query_length * shape.group * (2 + shape.head_dim) * 4


@lru_cache(maxsize=256)
def _spec(call: CheckedCall, num_q_heads: int, q_dtype: str, kv_dtype: str, columns: int) -> PlanSpec:
    shape = call.shape
    return PlanSpec(
        num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page,
        max_context_tokens=max(columns * shape.page, shape.query_length),
        q_dtype=dtype_name(q_dtype),
        kv_dtype=dtype_name(kv_dtype),
        kv_layout="nhd" if call.is_nhd else "packed",
        scales=call.scales,
        query_length=shape.query_length,
        sliding_window=shape.window,
    )
