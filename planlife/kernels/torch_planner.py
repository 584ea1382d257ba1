"""The planner in tensor ops: what `planner.plan_tables` computes, without a host read.

Every shape follows from the shapes of the arguments, so all of it can be recorded into a graph and replayed
with other lengths.
"""

from __future__ import annotations

import torch

from ..planner import TILE_TOKENS, planned_window
from ..spec import INT32_MAX


def plan_into(
    work_info: torch.Tensor,
    reduce_info: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_partitions: int,
    sliding_window: int,
    query_length: int,
    max_context_tokens: int = INT32_MAX,
) -> None:
    """Plan `context_lens` and overwrite every word of both tables.

    work_info: int32[capacity, 4], out.
    reduce_info: int32[rows, 2], out.
    context_lens: int32[rows], >= 0.
    max_context_tokens: longer rows get the tiles of rows of so many tokens; their length stays whole.

    Capture: yes. Syncs: no. Allocates: temporaries through torch.
    """
    capacity, rows = work_info.shape[0], context_lens.shape[0]
    lens = context_lens.to(torch.int64)  # running tile sums times slots do not fit int32
    held = lens.clamp_max(max_context_tokens)
    window = planned_window(sliding_window)
    if window:
        first_tiles = _floor_div((held - (query_length - 1 + window)).clamp_min(0), TILE_TOKENS)
    else:
        first_tiles = torch.zeros_like(held)
    num_tiles = _floor_div(held + (TILE_TOKENS - 1), TILE_TOKENS) - first_tiles
    active = (num_tiles > 0).to(torch.int64)

    tiles_after = num_tiles.cumsum(0)
    total_tiles = tiles_after[-1:].clamp_min(1)
    spare_slots = capacity - active.sum()
    shared = _floor_div(tiles_after * spare_slots, total_tiles) - _floor_div(
        (tiles_after - num_tiles) * spare_slots, total_tiles
    )
    tasks = torch.minimum(active + shared, num_tiles).clamp_max(max_partitions)
    end_slots = tasks.cumsum(0)
    first_slots = end_slots - tasks

    slots = torch.arange(capacity, device=lens.device)
    # A slot belongs to the first row that ends behind it; slots past the last task have no row and read row
    # 0's numbers until they are zeroed below.
    owners = torch.searchsorted(end_slots, slots, right=True)
    planned = owners < rows
    owners = torch.where(planned, owners, 0)
    parts = slots - first_slots[owners]
    row_tiles, row_tasks = num_tiles[owners], tasks[owners].clamp_min(1)
    begin = first_tiles[owners] + _floor_div(parts * row_tiles, row_tasks)
    end = first_tiles[owners] + _floor_div((parts + 1) * row_tiles, row_tasks)
    records = torch.stack((owners, begin, end, lens[owners]), dim=1)
    work_info.copy_(torch.where(planned[:, None], records, 0))
    reduce_info.copy_(torch.stack((first_slots, tasks), dim=1))


def _floor_div(numerator: torch.Tensor, denominator: torch.Tensor | int) -> torch.Tensor:
    return torch.div(numerator, denominator, rounding_mode="floor")
