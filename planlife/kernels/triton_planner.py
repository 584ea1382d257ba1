"""The planner and the sanitizer as Triton kernels: what `planner.plan_tables` computes, on the device.

Row counts, capacities, caps and windows are numbers, so that a handful of compiled kernels plans every class. Three
structures, by the rows of the class: one launch in which each block plans one row and reads all others for it; one
launch in which each block does so for a run of rows and slots; and three launches over tiles of rows (sums, tasks,
records), which read each length a fixed number of times.

Numbers are exact while rows x tiles of a row x capacity < 2^63.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from ..backends.base import FLAG_CLAMPED, FLAG_STALE
from ..planner import planned_window
from ..spec import PlanSpec
from .triton_launch import Kernel

_MAX_INT32 = 2**31 - 1

#: Most rows of a class that is planned with a block per row, and with a block per run of rows and slots.
MAX_ROW_BLOCKS = 256
MAX_RUN_BLOCKS = 1024  # above, the tiled planner is faster on an H200
_FEW_ROWS = 64  # one warp plans them without a barrier
_TILE_ROWS = 512
_FILL_SLOTS = 256
_SANITIZE_ROWS = 1024


@triton.jit
def _row_tiles(length, max_tokens, tokens_behind):
    """(first tile, tiles) of rows of `length` >= 0 tokens, as far as max_tokens; nothing overflows int32."""
    length = tl.minimum(length, max_tokens)
    first = tl.maximum(length - tokens_behind, 0) >> 8
    return first, (length >> 8) + ((length & 255) > 0).to(tl.int32) - first


@triton.jit
def _row_tasks(tiles, tiles_after, total_tiles, spare_slots, max_partitions):
    """Tasks of rows: one each, and a share of the spare slots by running sums of tiles.

    tiles_after, total_tiles, spare_slots: int64, for which a division costs several times as much as for int32.
    """
    if total_tiles * spare_slots < 2147483648:
        total, spare, after = total_tiles.to(tl.int32), spare_slots.to(tl.int32), tiles_after.to(tl.int32)
        shared = after * spare // total - (after - tiles) * spare // total
    else:
        before = tiles_after - tiles
        shared = (tiles_after * spare_slots // total_tiles - before * spare_slots // total_tiles).to(tl.int32)
    return tl.minimum(tl.minimum((tiles > 0).to(tl.int32) + shared, tiles), max_partitions)


@triton.jit
def _part_tiles(part, tiles, tasks):
    """Where a row's part of that number begins, in tiles of the row."""
    return (part.to(tl.int64) * tiles // tasks).to(tl.int32)


@triton.jit
def _store_records(work_info, slots, mask, row, begin, end, length):
    """Whole records at once, so that a warp writes whole lines."""
    column = tl.arange(0, 4)[None, :]
    edges = tl.where(column == 1, begin[:, None], end[:, None])
    record = tl.where(column == 0, row[:, None], tl.where(column == 3, length[:, None], edges))
    tl.store(work_info + slots[:, None] * 4 + column, record, mask[:, None])


@triton.jit
def _read_lens(lens, rows, num_rows):
    return tl.maximum(tl.load(lens + rows, rows < num_rows, other=0), 0)


@Kernel
def _plan_rows(
    lens,
    work_info,
    reduce_info,
    staged_lens,
    ticket,
    num_rows: tl.int32,
    max_tokens: tl.int32,
    empty: tl.int32,
    capacity: tl.int32,
    max_partitions: tl.int32,
    tokens_behind: tl.int32,
    ROWS: tl.constexpr,
):
    """Block i plans row i, and clears its share of the slots behind the last task."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    length = _read_lens(lens, rows, num_rows)
    first, tiles = _row_tiles(length, max_tokens, tokens_behind)
    tiles_after = tl.cumsum(tiles.to(tl.int64), 0)
    total_tiles = tl.maximum(tl.sum(tiles.to(tl.int64), 0), 1)
    spare_slots = (capacity - tl.sum((tiles > 0).to(tl.int32), 0)).to(tl.int64)
    tasks = _row_tasks(tiles, tiles_after, total_tiles, spare_slots, max_partitions)

    first_slot = tl.sum(tl.where(rows < row, tasks, 0), 0)
    end_slot = tl.sum(tasks, 0)
    tasks = tl.sum(tl.where(rows == row, tasks, 0), 0)
    length = _read_lens(lens, row, num_rows)  # again: cheaper than to pick it out of a block
    first, tiles = _row_tiles(length, max_tokens, tokens_behind)
    tl.store(reduce_info + row * 2, first_slot)
    tl.store(reduce_info + row * 2 + 1, tasks)
    tl.store(staged_lens + row, tl.where(empty != 0, -1, length))
    tl.store(ticket, 0, row == 0)

    for from_part in range(0, tasks, ROWS):
        part = from_part + rows
        begin = first + _part_tiles(part, tiles, tasks)
        end = first + _part_tiles(part + 1, tiles, tasks)
        _store_records(work_info, first_slot + part, part < tasks, row + rows * 0, begin, end, length + rows * 0)
    zeros = rows * 0
    for from_slot in range(end_slot + row * ROWS, capacity, tl.num_programs(0) * ROWS):
        slots = from_slot + rows
        _store_records(work_info, slots, slots < capacity, zeros, zeros, zeros, zeros)


@Kernel
def _plan_slots(
    lens,
    work_info,
    reduce_info,
    staged_lens,
    ticket,
    num_rows: tl.int32,
    max_tokens: tl.int32,
    empty: tl.int32,
    plan_rows: tl.int32,
    capacity: tl.int32,
    max_partitions: tl.int32,
    tokens_behind: tl.int32,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Block i plans slots and rows [i * SLOTS, (i + 1) * SLOTS), after reading all lengths twice."""
    block = tl.program_id(0)
    total_tiles = tl.full((), 0, tl.int64)
    spare_slots = capacity
    for from_row in range(0, plan_rows, ROWS):
        length = _read_lens(lens, from_row + tl.arange(0, ROWS), num_rows)
        _, tiles = _row_tiles(length, max_tokens, tokens_behind)
        total_tiles += tl.sum(tiles.to(tl.int64), 0)
        spare_slots -= tl.sum((tiles > 0).to(tl.int32), 0)
    total_tiles = tl.maximum(total_tiles, 1)

    first_slot = block * SLOTS
    slots = first_slot + tl.arange(0, SLOTS)
    owner = tl.full((SLOTS,), 0, tl.int32)
    begin_slots = tl.full((SLOTS,), 0, tl.int32)  # of the owner
    end_slots = tl.full((SLOTS,), 2147483647, tl.int32)
    tiles_before = tl.full((), 0, tl.int64)
    slots_before = tl.full((), 0, tl.int32)
    for from_row in range(0, plan_rows, ROWS):
        rows = from_row + tl.arange(0, ROWS)
        length = _read_lens(lens, rows, num_rows)
        _, tiles = _row_tiles(length, max_tokens, tokens_behind)
        tiles_after = tiles_before + tl.cumsum(tiles.to(tl.int64), 0)
        tasks = _row_tasks(tiles, tiles_after, total_tiles, spare_slots.to(tl.int64), max_partitions)
        ends = slots_before + tl.cumsum(tasks, 0)
        own = (rows // SLOTS == block) & (rows < plan_rows)
        tl.store(reduce_info + rows * 2, ends - tasks, own)
        tl.store(reduce_info + rows * 2 + 1, tasks, own)
        tl.store(staged_lens + rows, tl.where(empty != 0, -1, length), own)
        tiles_before += tl.sum(tiles.to(tl.int64), 0)
        slots_after = slots_before + tl.sum(tasks, 0)
        if slots_after <= first_slot:
            owner += ROWS
            begin_slots = tl.maximum(begin_slots, slots_after)
        elif slots_before < first_slot + SLOTS:
            passed = ends[None, :] <= slots[:, None]
            owner += tl.sum(passed.to(tl.int32), 1)
            begin_slots = tl.maximum(begin_slots, tl.max(tl.where(passed, ends[None, :], 0), 1))
            end_slots = tl.minimum(end_slots, tl.min(tl.where(passed, 2147483647, ends[None, :]), 1))
        slots_before = slots_after
    tl.store(ticket, 0, block == 0)

    planned = slots < slots_before
    owner = tl.where(planned, owner, 0)
    length = tl.where(planned, _read_lens(lens, owner, num_rows), 0)
    first, tiles = _row_tiles(length, max_tokens, tokens_behind)
    tasks = tl.where(planned, end_slots - begin_slots, 1)
    part = tl.where(planned, slots - begin_slots, 0)
    begin = first + _part_tiles(part, tiles, tasks)
    end = first + _part_tiles(part + 1, tiles, tasks)
    _store_records(work_info, slots, slots < capacity, owner, begin, end, length)


@Kernel
def _sum_tiles(
    lens,
    staged_lens,
    ticket,
    tile_sums,
    tile_active,
    num_rows: tl.int32,
    max_tokens: tl.int32,
    empty: tl.int32,
    plan_rows: tl.int32,
    tokens_behind: tl.int32,
    ROWS: tl.constexpr,
):
    """Stage the lengths, and sum each block's rows."""
    block = tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    length = _read_lens(lens, rows, num_rows)
    _, tiles = _row_tiles(length, max_tokens, tokens_behind)
    tl.store(staged_lens + rows, tl.where(empty != 0, -1, length), rows < plan_rows)
    tl.store(tile_sums + block, tl.sum(tiles.to(tl.int64), 0))
    tl.store(tile_active + block, tl.sum((tiles > 0).to(tl.int32), 0))
    tl.store(ticket, 0, block == 0)


@Kernel
def _share_slots(
    staged_lens,
    reduce_info,
    tile_sums,
    tile_active,
    tile_tasks,
    tile_ends,
    plan_rows: tl.int32,
    capacity: tl.int32,
    max_partitions: tl.int32,
    max_tokens: tl.int32,
    tokens_behind: tl.int32,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Tasks of each row, and where they end among those of its block."""
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    total_tiles = tl.zeros((), tl.int64)
    tiles_before = tl.zeros((), tl.int64)
    spare_slots = capacity
    for from_block in range(0, num_blocks, BLOCKS):
        blocks = from_block + tl.arange(0, BLOCKS)
        sums = tl.load(tile_sums + blocks, blocks < num_blocks, other=0)
        total_tiles += tl.sum(sums, 0)
        tiles_before += tl.sum(tl.where(blocks < block, sums, 0), 0)
        spare_slots -= tl.sum(tl.load(tile_active + blocks, blocks < num_blocks, other=0), 0)

    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < plan_rows
    length = tl.maximum(tl.load(staged_lens + rows, inside, other=0), 0)
    _, tiles = _row_tiles(length, max_tokens, tokens_behind)
    tiles_after = tiles_before + tl.cumsum(tiles.to(tl.int64), 0)
    tasks = _row_tasks(tiles, tiles_after, tl.maximum(total_tiles, 1), spare_slots.to(tl.int64), max_partitions)
    tl.store(reduce_info + rows * 2 + 1, tasks, inside)
    tl.store(tile_ends + rows, tl.cumsum(tasks, 0), inside)
    tl.store(tile_tasks + block, tl.sum(tasks, 0))


@Kernel
def _fill_records(
    staged_lens,
    work_info,
    reduce_info,
    tile_tasks,
    tile_ends,
    plan_rows: tl.int32,
    capacity: tl.int32,
    max_tokens: tl.int32,
    tokens_behind: tl.int32,
    num_blocks: tl.int32,
    ROWS: tl.constexpr,
    LOG_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Each program writes SLOTS records and, while there are any, the first slots of ROWS rows."""
    program = tl.program_id(0)
    first_slot = program * SLOTS
    first_block = tl.full((), 0, tl.int32)  # of rows that have one of these slots
    last_block = tl.full((), 0, tl.int32)
    slots_before_block = tl.full((), 0, tl.int32)
    slots_before_rows = tl.full((), 0, tl.int32)
    end_slot = tl.full((), 0, tl.int32)
    for from_block in range(0, num_blocks, ALL_BLOCKS):
        blocks = from_block + tl.arange(0, ALL_BLOCKS)
        tasks = tl.load(tile_tasks + blocks, blocks < num_blocks, other=0)
        ends = end_slot + tl.cumsum(tasks, 0)
        passed = (ends <= first_slot) & (blocks < num_blocks)
        first_block += tl.sum(passed.to(tl.int32), 0)
        slots_before_block += tl.sum(tl.where(passed, tasks, 0), 0)
        last_block += tl.sum(((ends < first_slot + SLOTS) & (blocks < num_blocks)).to(tl.int32), 0)
        slots_before_rows += tl.sum(tl.where(blocks < program, tasks, 0), 0)
        end_slot += tl.sum(tasks, 0)

    slots = first_slot + tl.arange(0, SLOTS)
    owner_block = tl.full((SLOTS,), 0, tl.int32) + first_block
    slots_before = tl.full((SLOTS,), 0, tl.int32) + slots_before_block
    for from_block in range(first_block, tl.minimum(last_block + 1, num_blocks), BLOCKS):
        blocks = from_block + tl.arange(0, BLOCKS)
        tasks = tl.load(tile_tasks + blocks, blocks < num_blocks, other=0)
        ends = slots_before_block + tl.cumsum(tasks, 0)
        passed = (ends[None, :] <= slots[:, None]) & (blocks < num_blocks)[None, :]
        owner_block += tl.sum(passed.to(tl.int32), 1)
        slots_before += tl.sum(tl.where(passed, tasks[None, :], 0), 1)
        slots_before_block += tl.sum(tasks, 0)

    planned = slots < end_slot
    local_slots = slots - slots_before
    row = owner_block * ROWS
    for bit in tl.static_range(LOG_ROWS):
        step = ROWS >> (bit + 1)
        probe = row + step - 1
        ends = tl.load(tile_ends + probe, planned & (probe < plan_rows), other=2147483647)
        row += tl.where(ends <= local_slots, step, 0)
    row = tl.where(planned, row, 0)
    length = tl.where(planned, tl.load(staged_lens + row, planned, other=0), 0)
    tasks = tl.load(reduce_info + row * 2 + 1, planned, other=1)
    part = local_slots - (tl.load(tile_ends + row, planned, other=0) - tasks)
    part = tl.where(planned, part, 0)
    first, tiles = _row_tiles(length, max_tokens, tokens_behind)
    begin = first + _part_tiles(part, tiles, tasks)
    end = first + _part_tiles(part + 1, tiles, tasks)
    _store_records(work_info, slots, slots < capacity, row, begin, end, length)

    rows = program * ROWS + tl.arange(0, ROWS)
    inside = rows < plan_rows
    tasks = tl.load(reduce_info + rows * 2 + 1, inside, other=0)
    ends = tl.load(tile_ends + rows, inside, other=0)
    tl.store(reduce_info + rows * 2, slots_before_rows + ends - tasks, inside)


@Kernel
def _compare_lens(
    lens,
    work_info,
    reduce_info,
    staged_lens,
    ticket,
    flags,
    num_rows: tl.int32,
    max_tokens: tl.int32,
    plan_rows: tl.int32,
    capacity: tl.int32,
    STALE: tl.constexpr,
    CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Blocks add themselves, and 2^32 if they saw a stale row, to the ticket; the last one to come counts it once."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < plan_rows
    length = tl.load(lens + rows, rows < num_rows, other=0)
    wanted = tl.maximum(length, 0)
    slots = tl.load(reduce_info + rows * 2, inside, other=0)
    tasks = tl.load(reduce_info + rows * 2 + 1, inside, other=0)
    # Not the staged lengths: the tables are what a decode reads. What they say may be anything by now.
    slots = tl.minimum(tl.maximum(slots, 0), capacity - 1)
    planned = tl.load(work_info + slots * 4 + 3, inside & (tasks > 0), other=0)
    is_stale = tl.max(((planned != wanted) & inside).to(tl.int64), 0)
    num_clamped = tl.sum((length > max_tokens).to(tl.int64), 0)
    if num_clamped > 0:
        tl.atomic_add(flags + CLAMPED, num_clamped)

    found = tl.atomic_add(ticket, 1 + is_stale * 4294967296)
    if (found & 4294967295) + 1 == tl.num_programs(0):
        tl.store(ticket, 0)
        is_emptied = tl.load(staged_lens) == -1
        if ((found >> 32) + is_stale > 0) & (is_emptied == 0):
            tl.atomic_add(flags + STALE, 1)


_INT32, _INT64 = torch.int32, torch.int64


#: TRITON_INTERPRET was set when Triton was imported: kernels take CPU tensors, and no others.
IS_INTERPRETED: bool = _plan_rows.is_interpreted
#: It was set or unset between the import of Triton and ours: our kernels cannot call Triton's functions.
IS_MIXED: bool = isinstance(tl.sum, triton.JITFunction) == IS_INTERPRETED


class PlanNumbers(NamedTuple):
    """What all plans of a table set have in common. tokens_behind: how far behind a row's end its tokens are read."""

    plan_rows: int
    capacity: int
    max_partitions: int
    max_tokens: int
    tokens_behind: int


def plan_numbers(spec: PlanSpec, plan_rows: int, capacity: int, max_partitions: int) -> PlanNumbers:
    """PlanNumbers of a spec."""
    window = planned_window(spec.sliding_window)
    # Without a window no length is longer than what is read.
    tokens_behind = min(spec.query_length - 1 + window, _MAX_INT32) if window else _MAX_INT32
    return PlanNumbers(plan_rows, capacity, max_partitions, spec.max_context_tokens, tokens_behind)


class Tables(NamedTuple):
    """The tensors of one table set: work_info int32[capacity, 4], reduce_info int32[plan_rows, 2], staged_lens
    int32[plan_rows], ticket int64[1] (the sanitizer's, zero between its launches), workspace uint8[workspace_bytes]."""

    work_info: torch.Tensor
    reduce_info: torch.Tensor
    staged_lens: torch.Tensor
    ticket: torch.Tensor
    workspace: torch.Tensor


class Planner(Protocol):
    """Overwrites every word of a table set by the lengths of now. Capture: plan. Syncs: no. Allocates: no."""

    @staticmethod
    def workspace_bytes(plan_rows: int) -> int:
        """Bytes, a multiple of 8, that a plan of so many rows needs besides its tables."""
        ...

    def __init__(self, device: str, numbers: PlanNumbers, tables: Tables) -> None: ...

    def plan(self, lens: torch.Tensor, num_rows: int, *, is_emptied: bool) -> None:
        """Plan lens[:num_rows], other rows as 0; staged lengths are -1 if all is to be empty on purpose.

        Raises MintError if `prepare_planners` was not called for the device.
        """
        ...


class RowPlanner:
    """Planner of classes with up to MAX_ROW_BLOCKS rows: each block reads all lengths and plans one row."""

    DTYPES = (_INT32, _INT32, _INT32, _INT32, _INT64)

    def __init__(self, device: str, numbers: PlanNumbers, tables: Tables) -> None:
        self._numbers = numbers
        self._written = tables[:4]
        self._launch = _plan_rows.pending(device, *self.DTYPES, **self._constants(numbers.plan_rows))

    @staticmethod
    def workspace_bytes(plan_rows: int) -> int:
        return 0

    @classmethod
    def prepare(cls, device: str) -> None:
        """Compile what is not compiled yet."""
        for plan_rows in (_FEW_ROWS, MAX_ROW_BLOCKS):
            _plan_rows.prepare(device, *cls.DTYPES, **cls._constants(plan_rows))

    @staticmethod
    def _constants(plan_rows: int) -> dict[str, int]:
        if plan_rows <= _FEW_ROWS:
            return {"ROWS": _FEW_ROWS, "num_warps": 1}
        return {"ROWS": MAX_ROW_BLOCKS, "num_warps": 4}

    def plan(self, lens: torch.Tensor, num_rows: int, *, is_emptied: bool) -> None:
        plan_rows, capacity, max_partitions, max_tokens, tokens_behind = self._numbers
        self._launch(
            (plan_rows, 1, 1), lens, *self._written, num_rows, max_tokens, int(is_emptied), capacity, max_partitions,
            tokens_behind,
        )  # fmt: skip


class RunPlanner:
    """Planner of classes with up to MAX_RUN_BLOCKS rows: each block reads all lengths and plans a run of them."""

    _CONSTANTS: ClassVar = {"ROWS": 512, "SLOTS": 64, "num_warps": 4}

    def __init__(self, device: str, numbers: PlanNumbers, tables: Tables) -> None:
        self._numbers = numbers
        self._written = tables[:4]
        self._launch = _plan_slots.pending(device, *RowPlanner.DTYPES, **self._CONSTANTS)

    @staticmethod
    def workspace_bytes(plan_rows: int) -> int:
        return 0

    @classmethod
    def prepare(cls, device: str) -> None:
        """Compile what is not compiled yet."""
        _plan_slots.prepare(device, *RowPlanner.DTYPES, **cls._CONSTANTS)

    def plan(self, lens: torch.Tensor, num_rows: int, *, is_emptied: bool) -> None:
        plan_rows, capacity, max_partitions, max_tokens, tokens_behind = self._numbers
        self._launch(
            (-(-capacity // self._CONSTANTS["SLOTS"]), 1, 1), lens, *self._written, num_rows, max_tokens,
            int(is_emptied), plan_rows, capacity, max_partitions, tokens_behind,
        )  # fmt: skip


class TiledPlanner:
    """Planner of any number of rows in three launches over tiles of rows."""

    _SUM = (_sum_tiles, (_INT32, _INT32, _INT64, _INT64, _INT32), {"ROWS": _TILE_ROWS, "num_warps": 4})
    _SHARE = (
        _share_slots,
        (_INT32, _INT32, _INT64, _INT32, _INT32, _INT32),
        {"ROWS": _TILE_ROWS, "BLOCKS": 256, "num_warps": 4},
    )
    _FILL = (
        _fill_records,
        (_INT32,) * 5,
        {
            "ROWS": _TILE_ROWS,
            "LOG_ROWS": _TILE_ROWS.bit_length() - 1,
            "SLOTS": _FILL_SLOTS,
            "ALL_BLOCKS": 256,
            "BLOCKS": 8,
            "num_warps": 4,
        },
    )

    def __init__(self, device: str, numbers: PlanNumbers, tables: Tables) -> None:
        self._numbers = numbers
        self._tables = tables
        self._num_blocks = _num_blocks(numbers.plan_rows)
        words = tables.workspace.view(torch.int32)
        sums_end = 2 * self._num_blocks
        self._sums = words[:sums_end].view(torch.int64)
        self._active, self._tasks, self._ends = words[sums_end:].split_with_sizes(
            (self._num_blocks, self._num_blocks, words.numel() - 2 * sums_end)
        )
        self._sum, self._share, self._fill = (
            kernel.pending(device, *dtypes, **constants) for kernel, dtypes, constants in self._kernels()
        )

    @staticmethod
    def workspace_bytes(plan_rows: int) -> int:
        return 16 * _num_blocks(plan_rows) + -(-plan_rows * 4 // 8) * 8

    @classmethod
    def _kernels(cls) -> tuple[tuple[Kernel, tuple[torch.dtype, ...], dict[str, int]], ...]:
        return (cls._SUM, cls._SHARE, cls._FILL)

    @classmethod
    def prepare(cls, device: str) -> None:
        """Compile what is not compiled yet."""
        for kernel, dtypes, constants in cls._kernels():
            kernel.prepare(device, *dtypes, **constants)

    def plan(self, lens: torch.Tensor, num_rows: int, *, is_emptied: bool) -> None:
        plan_rows, capacity, max_partitions, max_tokens, tokens_behind = self._numbers
        work_info, reduce_info, staged_lens, ticket, _ = self._tables
        num_blocks = self._num_blocks
        self._sum(
            (num_blocks, 1, 1), lens, staged_lens, ticket, self._sums, self._active, num_rows, max_tokens,
            int(is_emptied), plan_rows, tokens_behind,
        )  # fmt: skip
        self._share(
            (num_blocks, 1, 1), staged_lens, reduce_info, self._sums, self._active, self._tasks, self._ends, plan_rows,
            capacity, max_partitions, max_tokens, tokens_behind,
        )  # fmt: skip
        num_programs = max(num_blocks, -(-capacity // _FILL_SLOTS))
        self._fill(
            (num_programs, 1, 1), staged_lens, work_info, reduce_info, self._tasks, self._ends, plan_rows, capacity,
            max_tokens, tokens_behind, num_blocks,
        )  # fmt: skip


def _num_blocks(plan_rows: int) -> int:
    return -(-plan_rows // _TILE_ROWS)


def prepare_planners(device: str) -> None:
    """Compile all planners and the sanitizer for `device`: they serve every class, and are few."""
    for part in (RowPlanner, RunPlanner, TiledPlanner, Sanitizer):
        part.prepare(device)


def planner_for(plan_rows: int) -> type[Planner]:
    """The Planner for table sets of so many rows."""
    if plan_rows <= MAX_ROW_BLOCKS:
        return RowPlanner
    return RunPlanner if plan_rows <= MAX_RUN_BLOCKS else TiledPlanner


class Sanitizer:
    """Counts, on the device, tables that were not made from the lengths of now."""

    _DTYPES = (_INT32, _INT32, _INT32, _INT32, _INT64, _INT64)
    _CONSTANTS: ClassVar = {"STALE": FLAG_STALE, "CLAMPED": FLAG_CLAMPED, "ROWS": _SANITIZE_ROWS, "num_warps": 4}

    def __init__(self, device: str, numbers: PlanNumbers, tables: Tables) -> None:
        self._numbers = numbers
        self._tables = tables[:4]
        self._launch = _compare_lens.pending(device, *self._DTYPES, **self._CONSTANTS)

    @classmethod
    def prepare(cls, device: str) -> None:
        """Compile what is not compiled yet."""
        _compare_lens.prepare(device, *cls._DTYPES, **cls._CONSTANTS)

    def compare(self, lens: torch.Tensor, num_rows: int, flags: torch.Tensor, max_tokens: int) -> None:
        """Backend.sanitize; lengths above max_tokens are counted. Capture: yes. Syncs: no. Allocates: no."""
        numbers = self._numbers
        self._launch(
            (-(-numbers.plan_rows // _SANITIZE_ROWS), 1, 1), lens, *self._tables, flags, num_rows, max_tokens,
            numbers.plan_rows, numbers.capacity,
        )  # fmt: skip
