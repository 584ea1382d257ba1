"""One table set as aiter takes it: its tables and scratch as views of the manager's bytes, whole and by row count."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..aiter_library import AiterLibrary
from ..planner import spec_capacity
from ..sizing import align
from ..spec import DTYPE_BYTES, PlanSpec
from .torch_backend import TorchPlan, table_ends

_WORD_BYTES = 4


class AiterPlan(TorchPlan):
    """One table set as views of the manager's bytes: TorchPlan's, a word that says they were emptied, two for scales.

    plan: aiter's PADecodePlan over the whole tables, which refreshes write in place.
    last_views: the last call's, whose row count and arena most calls share with the one before.

    Borrows: the buffer, whose views these are. Address-stable: refreshes write in place.
    """

    __slots__ = (
        "compute_type",
        "emptied",
        "has_scales",
        "is_unsafe_with_plain_v",
        "key_word",
        "last_views",
        "lens_and_emptied",
        "max_columns",
        "max_tokens",
        "page_size",
        "plan",
        "plan_type",
        "q_dtype",
        "query_length",
        "reads_query_by_words",
        "sliding_window",
        "softmax_scales",
        "value_word",
    )

    def __init__(
        self,
        library: AiterLibrary,
        spec: PlanSpec,
        plan_rows: int,
        num_compute_units: int,
        buffer: torch.Tensor,
        softmax_scales: Iterable[float],
        architecture: str,
    ) -> None:
        super().__init__(spec, plan_rows, num_compute_units, buffer)
        self.plan_type = library.plan_type
        self.q_dtype = getattr(torch, spec.q_dtype)
        self.compute_type = getattr(torch, spec.kv_dtype)  # aiter's default is bfloat16, for every cache
        self.query_length, self.sliding_window = spec.query_length, spec.sliding_window
        self.has_scales = spec.scales != "none"
        self.reads_query_by_words = reads_query_by_words(architecture)
        self.is_unsafe_with_plain_v = is_unsafe_with_plain_v(spec, architecture)
        self.max_tokens, self.page_size = spec.max_context_tokens, spec.page_size
        self.max_columns = -(-spec.max_context_tokens // spec.page_size)
        self.softmax_scales = {scale: scale for scale in softmax_scales}
        _, lens_start, lens_end = table_ends(self.capacity, plan_rows)
        with torch.inference_mode(False):
            self.lens_and_emptied = buffer[lens_start : lens_end + _WORD_BYTES].view(torch.int32)
            self.emptied = self.lens_and_emptied[plan_rows:]
            words = buffer[lens_end + _WORD_BYTES : lens_end + 3 * _WORD_BYTES].view(torch.float32)
            self.key_word, self.value_word = words[:1], words[1:]
        self.plan = self.plan_of(self.work_info, self.reduce_info)
        self.last_views: RowCountViews | None = None

    def capacity_of(self, num_rows: int) -> int:
        """Slots of tables of that many rows. A row has at most max_partitions tasks and they are packed, so the tables
        of fewer rows are the fronts of all."""
        return min(self.capacity, num_rows * self.max_partitions)

    def plan_of(self, work_info: torch.Tensor, reduce_info: torch.Tensor) -> Any:
        """aiter's plan over these tables."""
        spec = self.spec
        return self.plan_type(
            work_info=work_info,
            reduce_info=reduce_info,
            num_kv_heads=spec.num_kv_heads,
            max_partitions=self.max_partitions,
            sliding_window=spec.sliding_window,
            query_length=spec.query_length,
        )


def reads_query_by_words(architecture: str) -> bool:
    """Whether its kernel loads rows of the query by 4-byte words. All write the output number by number."""
    return architecture in ("gfx942", "gfx950")


def is_unsafe_with_plain_v(spec: PlanSpec, architecture: str) -> bool:
    """Whether a 4-D V is reported to end in a page fault, which ends the process: on gfx1250, with FlyDSL 0.3.4.1."""
    return architecture == "gfx1250" and spec.page_size == 16 and spec.q_dtype == "float16"


class RowCountViews:
    """A plan, its lengths and an arena as calls of one row count pass them: aiter's checks want exact shapes.

    partials: exp_sums, max_logits and temporary_output, in the arena.

    Borrows: the tables, and the arena, whose views go the moment it does, so that an eviction frees it.
    """

    __slots__ = ("num_rows", "partials", "plan", "scratch", "staged_lens")

    def __init__(self, tables: AiterPlan, scratch: torch.Tensor, num_rows: int) -> None:
        spec = tables.spec
        heads, rows, dim = spec.num_kv_heads, spec.query_rows_per_kv_head, spec.head_dim
        self.num_rows = num_rows
        capacity = tables.capacity_of(num_rows)
        end = heads * capacity * rows
        with torch.inference_mode(False):
            self.plan = tables.plan_of(tables.work_info[:capacity], tables.reduce_info[:num_rows])
            self.staged_lens = tables.staged_lens[:num_rows]
            # A view of `scratch` itself has it as its base, which on some torch keeps it: its end would not be seen.
            alias = scratch.data
            exp_sums, max_logits, output = (
                alias[start:stop] for start, stop in _scratch_parts(spec, tables.capacity, capacity)
            )
            stats = (one.view(torch.float32)[:end].view(heads, capacity, rows) for one in (exp_sums, max_logits))
            outputs = output.view(tables.q_dtype)[: end * dim].view(heads, capacity, rows, dim)
            self.partials: list[torch.Tensor] = [*stats, outputs]
        self.scratch = weakref.ref(scratch, _clear(self.partials))


def _clear(views: list[torch.Tensor]) -> Callable[[object], None]:
    # No method of RowCountViews: its own reference would hold it, in a cycle that only the collector ends.
    return lambda _: views.clear()


def table_bytes(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
    """Of one AiterPlan's buffer."""
    return table_ends(spec_capacity(spec, plan_rows, num_compute_units), plan_rows)[2] + 3 * _WORD_BYTES


def scratch_bytes(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
    """Of the partial results of one call by the whole tables."""
    capacity = spec_capacity(spec, plan_rows, num_compute_units)
    return _scratch_parts(spec, capacity, capacity)[-1][1]


def compile_bytes(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
    """What minting tables of that many rows takes beside the budget while it compiles: a table set and its scratch, and
    query, output, block tables and lengths of one call. A few pages of KV and their scales come on top."""
    query_bytes = spec.query_length * spec.num_q_heads * spec.head_dim * DTYPE_BYTES[spec.q_dtype]
    columns = -(-spec.max_context_tokens // spec.page_size)
    row_bytes = 2 * query_bytes + (columns + 1) * 4
    return (
        table_bytes(spec, plan_rows, num_compute_units)
        + scratch_bytes(spec, plan_rows, num_compute_units)
        + plan_rows * row_bytes
    )


def _scratch_parts(spec: PlanSpec, full_capacity: int, capacity: int) -> list[tuple[int, int]]:
    """(start, end) in bytes of exp_sums, max_logits and temporary_output. Starts, and so alignment, are the class's."""
    slots = spec.num_kv_heads * spec.query_rows_per_kv_head
    parts = []
    start = 0
    for slot_bytes in (4, 4, spec.head_dim * DTYPE_BYTES[spec.q_dtype]):
        parts.append((start, start + slots * capacity * slot_bytes))
        start = align(start + slots * full_capacity * slot_bytes)
    return parts
