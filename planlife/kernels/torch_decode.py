"""Split-KV paged decode in tensor ops: tokens and lengths come from work_info, the reduce from reduce_info.

It is the semantic reference of all decode kernels: FP32 inside for every dtype, and nothing outside a row's
own tokens can reach its output, not even as 0 x NaN. All shapes are static, so a graph may record it; the
price is that it walks the tiles of the longest context the block tables allow, whatever the lengths are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ambient import plain
from ..planner import TILE_TOKENS, planned_window
from ..spec import PlanSpec
from .torch_write import overwrite

#: Most bytes of gathered K and V and of their scores that exist at a time (one tile of one row at the least).
_CHUNK_BYTES = 32 << 20

#: The smallest positive float32. An attended token's weight never becomes 0, lest an infinite V turn to NaN.
TINY = 2.0**-149

_ROW_KEY = 1 << 32  # above any tile number


class _Cache:
    """K or V of the pool, read token by token in any layout and dtype. Never copied whole.

    Borrows: the cache and its scale, whose views these are.
    """

    def __init__(
        self, cache: torch.Tensor, scale: torch.Tensor | float | None, spec: PlanSpec, *, is_key: bool
    ) -> None:
        self._pack = 0  # tokens that lie together in a transposed V; 0: the page is one axis
        if spec.kv_layout == "hnd":
            cache = cache.transpose(1, 2)
        elif spec.kv_layout == "packed":
            if is_key:
                cache = cache.permute(0, 3, 1, 2, 4)
            elif cache.dim() == 4:
                cache = cache.permute(0, 3, 1, 2)
            else:
                self._pack = cache.shape[4]
                cache = cache.permute(0, 2, 4, 1, 3)
        self._tokens = cache
        self._per_token = spec.scales == "per_token"
        if isinstance(scale, torch.Tensor):
            if not self._per_token:
                scale = scale.view(1, 1, 1)
            else:
                scale = (scale[..., 0] if scale.dim() == 4 else scale).transpose(1, 2)
        self._scale = scale

    def gather(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """As stored, without the scale: float32[rows, tokens, kv_heads, head_dim]. pages: [rows, tokens]."""
        if self._pack:
            outer = torch.div(offsets, self._pack, rounding_mode="floor")
            tokens = self._tokens[pages, outer, offsets % self._pack]
        else:
            tokens = self._tokens[pages, offsets]
        return tokens.float().flatten(3)

    def scale_of(self, pages: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | float | None:
        """[rows, tokens, kv_heads], or what broadcasts to it, or one number for all; None without scales."""
        if isinstance(self._scale, torch.Tensor) and self._per_token:
            return self._scale[pages, offsets]
        return self._scale


class _Partials:
    """Per-slot softmax state as FP32 views of the scratch arena, merged into chunk by chunk.

    Borrows: the arena.
    """

    def __init__(self, scratch: torch.Tensor, num_kv_heads: int, capacity: int, rows: int, head_dim: int) -> None:
        words = num_kv_heads * capacity * rows
        arena = scratch[: words * (2 + head_dim) * 4].view(torch.float32)
        shape = (num_kv_heads, capacity, rows)
        self.max_logits = arena[:words].view(shape).fill_(-torch.inf)
        self.exp_sums = arena[words : 2 * words].view(shape).zero_()
        self.output = arena[2 * words :].view(*shape, head_dim).zero_()

    def raise_max(self, slots: torch.Tensor, tile_max: torch.Tensor) -> torch.Tensor:
        """Take `tile_max` [kv_heads, tiles, rows] into `slots` [tiles]; returns those per tile."""
        before = self.max_logits.clone()
        self.max_logits.scatter_reduce_(1, slots[None, :, None].expand_as(tile_max), tile_max, "amax")
        factor = _weight(before, self.max_logits)
        self.exp_sums.mul_(factor)
        self.output.mul_(factor[..., None])
        return self.max_logits[:, slots]

    def add(self, slots: torch.Tensor, exp_sums: torch.Tensor, output: torch.Tensor) -> None:
        """Add what each tile contributes to its slot."""
        self.exp_sums.index_add_(1, slots, exp_sums)
        self.output.index_add_(1, slots, output)


@plain
@torch.no_grad()  # a query fresh from a trainable layer must not tie the arena to its graph
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

    output, query: [R * query_length, q_heads, head_dim], R at most the plan's rows.
    key_cache, value_cache: in the spec's layout, any strides.
    block_tables: int32[>= rows with tasks, columns]; entries outside a row's planned tokens are never used.
    work_info: int32[capacity, 4]. reduce_info: int32[rows, 2]. scratch: uint8, contents undefined.
    key_scale, value_scale: per_tensor a number or float32 of one element, per_token float32[pages, kv_heads, page] or
        [..., 1]; what tokens outside a row's have is never used. K's multiplies logits, V's the values.
    sinks: float[q_heads]: a logit with value 0 that every query token sees which sees anything.
    lse: float32[R * query_length, q_heads], written whole: the log of the softmax's denominator, sinks included; -inf
        where a query token sees nothing.

    Capture: yes. Syncs: no. Allocates: temporaries through torch, bounded whatever the context.
    """
    length, heads, group = spec.query_length, spec.num_kv_heads, spec.group_size
    # Rows beyond the tables' have no page to read, so they cannot have tasks either.
    rows = min(query.shape[0] // length, reduce_info.shape[0], block_tables.shape[0])
    overwrite(output[rows * length :], 0.0)
    if lse is not None:
        overwrite(lse[rows * length :], -torch.inf)
    if not rows:
        return
    plan = _ReadPlan(work_info, reduce_info)
    keys = _Cache(key_cache, key_scale, spec, is_key=True)
    values = _Cache(value_cache, value_scale, spec, is_key=False)
    partials = _Partials(scratch, heads, work_info.shape[0], length * group, spec.head_dim)
    scaled = query[: rows * length].float() * softmax_scale
    scaled = scaled.reshape(rows, length, heads, group, spec.head_dim).transpose(1, 2)
    table_tokens = min(block_tables.shape[1] * spec.page_size, spec.max_context_tokens)
    for row_range, tile_range in _chunks(rows, -(-table_tokens // TILE_TOKENS), spec):
        _attend(partials, plan, scaled, keys, values, block_tables, row_range, tile_range, spec)
    if sinks is not None:
        sinks = sinks.float().view(heads, group).repeat(1, length)
    merged, row_max, sums = plan.reduce(partials, rows, sinks)
    merged = merged.view(heads, rows, length, group, spec.head_dim).permute(1, 2, 0, 3, 4)
    overwrite(output[: rows * length], merged.reshape(rows * length, spec.num_q_heads, spec.head_dim))
    if lse is not None:
        by_head = torch.where(row_max == -torch.inf, -torch.inf, row_max + sums.log())
        by_token = by_head.view(heads, rows, length, group).permute(1, 2, 0, 3)
        overwrite(lse[: rows * length], by_token.reshape(rows * length, spec.num_q_heads))


class _ReadPlan:
    """A plan's two tables, prepared for look-ups in both directions."""

    def __init__(self, work_info: torch.Tensor, reduce_info: torch.Tensor) -> None:
        capacity, rows = work_info.shape[0], reduce_info.shape[0]
        work, reduce = work_info.to(torch.int64), reduce_info.to(torch.int64)
        slots = torch.arange(capacity, device=work.device)
        first_slots = reduce[:, 0].contiguous()
        end_slots = first_slots + reduce[:, 1]
        owners = torch.searchsorted(end_slots, slots, right=True).clamp_max(rows - 1)
        #: Slots that reduce_info gives to a row, and that row (0 for the others).
        self.owned = (first_slots[owners] <= slots) & (slots < end_slots[owners])
        self.owners = torch.where(self.owned, owners, 0)
        self.work = work
        # Owned slots are packed by row, then by tile, so the last one that starts at or before a (row, tile) is
        # the only one that can cover it. The others take the key of the next owned one: never found before it.
        starts = torch.where(self.owned, work[:, 0] * _ROW_KEY + work[:, 1], torch.iinfo(torch.int64).max)
        self._starts = starts.flip(0).cummin(0).values.flip(0)

    def cover(self, rows: range, tiles: range) -> tuple[torch.Tensor, torch.Tensor]:
        """(slot, length), each [rows, tiles]: which slot holds each tile of each row, and the row's length.

        Where nothing covers a tile its length is 0.
        """
        device = self.work.device
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        tile = torch.arange(tiles.start, tiles.stop, device=device)[None, :]
        slot = (torch.searchsorted(self._starts, row * _ROW_KEY + tile, right=True) - 1).clamp_min(0)
        task = self.work[slot]
        covered = self.owned[slot] & (task[..., 0] == row) & (task[..., 1] <= tile) & (tile < task[..., 2])
        return slot, torch.where(covered, task[..., 3], 0)

    def reduce(
        self, partials: _Partials, rows: int, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Merge the partials of each row's slots: (output [kv_heads, rows, query rows, head_dim], 0 without any;
        largest logit and sum of exp(logit - largest), each [kv_heads, rows, query rows]).

        sinks: [kv_heads, query rows].
        """
        num_kv_heads, _, query_rows, head_dim = partials.output.shape
        # Slots of no row, or of a row that nobody asked for, hold empty partials: row 0 may take them.
        owners = torch.where(self.owners < rows, self.owners, 0)
        row_max = partials.max_logits.new_full((num_kv_heads, rows, query_rows), -torch.inf)
        row_max.scatter_reduce_(1, owners[None, :, None].expand_as(partials.max_logits), partials.max_logits, "amax")
        if sinks is not None:
            # A row that sees nothing stays at -inf, and so at zero.
            row_max = torch.where(row_max == -torch.inf, row_max, torch.maximum(row_max, sinks[:, None]))
        weight = _weight(partials.max_logits, row_max[:, owners])
        sums = row_max.new_zeros(num_kv_heads, rows, query_rows)
        sums.index_add_(1, owners, weight * partials.exp_sums)
        if sinks is not None:
            sums += torch.exp(sinks[:, None] - row_max)
        merged = row_max.new_zeros(num_kv_heads, rows, query_rows, head_dim)
        merged.index_add_(1, owners, weight[..., None] * partials.output)
        return torch.where((row_max == -torch.inf)[..., None], 0.0, merged / sums[..., None]), row_max, sums


def _attend(
    partials: _Partials,
    plan: _ReadPlan,
    scaled_query: torch.Tensor,
    keys: _Cache,
    values: _Cache,
    block_tables: torch.Tensor,
    rows: range,
    tiles: range,
    spec: PlanSpec,
) -> None:
    """Merge the tokens of `tiles` of `rows` into the partials of the slots that cover them."""
    num_rows, num_tiles, device = len(rows), len(tiles), scaled_query.device
    slot, row_length = plan.cover(rows, tiles)
    slots = slot.flatten()
    lengths = row_length[..., None].expand(-1, -1, TILE_TOKENS).flatten(1)
    positions = torch.arange(tiles.start * TILE_TOKENS, tiles.stop * TILE_TOKENS, device=device)
    columns = torch.div(positions, spec.page_size, rounding_mode="floor")
    # A length may be past what the row holds: query tokens see the keys up to that.
    most_held = min(block_tables.shape[1] * spec.page_size, spec.max_context_tokens)
    held = positions < lengths.clamp_max(most_held)
    pages = block_tables[rows.start : rows.stop].index_select(1, columns.clamp_max(block_tables.shape[1] - 1))
    # Masked before it is used as an index: an entry past the row's pages may be anything.
    pages = torch.where(held, pages, 0).to(torch.int64)
    offsets = positions - columns * spec.page_size
    k = keys.gather(pages, offsets).permute(0, 2, 3, 1)  # [rows, kv_heads, head_dim, tokens]
    v = values.gather(pages, offsets).transpose(1, 2)  # [rows, kv_heads, tokens, head_dim]
    query = scaled_query[rows.start : rows.stop].flatten(2, 3)  # [rows, kv_heads, query rows, head_dim]
    scores = torch.matmul(query, k)
    k_scale, v_scale = keys.scale_of(pages, offsets), values.scale_of(pages, offsets)
    if k_scale is not None:
        scores = scores * (k_scale.transpose(1, 2)[:, :, None] if isinstance(k_scale, torch.Tensor) else k_scale)
    if v_scale is not None:
        v = v * (v_scale.transpose(1, 2)[..., None] if isinstance(v_scale, torch.Tensor) else v_scale)
    scores = scores.view(num_rows, spec.num_kv_heads, spec.query_length, spec.group_size, -1)

    tokens = torch.arange(spec.query_length, device=device)[:, None]
    ends = lengths[:, None, :] - spec.query_length + 1 + tokens
    attended = held[:, None, :] & (positions < ends)  # [rows, query_length, tokens]
    if spec.sliding_window:
        attended &= positions >= ends - planned_window(spec.sliding_window)
    attended = attended[:, None, :, None, :]
    scores = torch.where(attended, scores, -torch.inf).flatten(2, 3)
    scores = scores.view(num_rows, spec.num_kv_heads, -1, num_tiles, TILE_TOKENS)

    def by_tile(per_row: torch.Tensor) -> torch.Tensor:
        """[rows, kv_heads, query rows, tiles] -> [kv_heads, rows * tiles, query rows]."""
        return per_row.permute(1, 0, 3, 2).flatten(1, 2)

    slot_max = partials.raise_max(slots, by_tile(scores.amax(-1)))
    slot_max = slot_max.view(spec.num_kv_heads, num_rows, num_tiles, -1).permute(1, 0, 3, 2)
    weights = torch.where(scores == -torch.inf, 0.0, _weight(scores, slot_max[..., None]))
    parts = []
    for token in range(spec.query_length):
        # V is masked for each query token: what only a later one may see must not reach an earlier one.
        seen = torch.where(attended[:, :, token, 0, :, None], v, 0.0)
        seen = seen.reshape(num_rows, spec.num_kv_heads, num_tiles, TILE_TOKENS, spec.head_dim)
        own = weights[:, :, token * spec.group_size : (token + 1) * spec.group_size]
        parts.append(torch.matmul(own.transpose(2, 3), seen))  # [rows, kv_heads, tiles, group, head_dim]
    output = torch.cat(parts, dim=3).transpose(0, 1).flatten(1, 2)
    partials.add(slots, by_tile(weights.sum(-1)), output)


def _weight(logits: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """exp(logits - maximum), never 0; 1 where nothing was seen yet."""
    return torch.where(maximum == -torch.inf, 1.0, torch.exp(logits - maximum).clamp_min(TINY))


def _chunks(num_rows: int, num_tiles: int, spec: PlanSpec) -> Iterator[tuple[range, range]]:
    """Row and tile ranges whose K, V and scores stay within _CHUNK_BYTES."""
    floats_per_token = spec.num_kv_heads * (3 * spec.head_dim + 3 * spec.query_rows_per_kv_head)
    chunk_tiles = max(_CHUNK_BYTES // (4 * TILE_TOKENS * floats_per_token), 1)
    chunk_rows = max(chunk_tiles // num_tiles, 1)
    for row in range(0, num_rows, chunk_rows):
        for tile in range(0, num_tiles, chunk_tiles):
            yield (range(row, min(row + chunk_rows, num_rows)), range(tile, min(tile + chunk_tiles, num_tiles)))
