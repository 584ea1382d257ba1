"""What the manager knows of one recorded graph: what it pins, what it reads, and what it must find at replay."""

from __future__ import annotations

import weakref
from typing import Any

from .device import Graph
from .item import Item
from .plan import Mark, Plan, StepPlan


class Read:
    """One plan that a graph reads, or the fallback that it runs.

    mark: as captured; its rows and address are frozen in the graph. refreshes: how many different refreshes of these
    tables the graph itself contains; 0 means that somebody else must have refreshed them before each replay.
    is_decoded: the graph has a decode that reads them, and not only a refresh.
    table_tokens: what the narrowest block tables of its decodes have columns for; None without a decode.
    marks: of all StepPlans that it was recorded with. foreign_mark: of one whose tables another graph refreshes.
    """

    __slots__ = (
        "captured",
        "foreign_mark",
        "is_decoded",
        "mark",
        "marks",
        "plan",
        "refreshes",
        "route",
        "rows",
        "site",
        "table_tokens",
        "ubatch",
    )

    def __init__(self, site: str, ubatch: int, route: str, rows: int, mark: Mark, plan: Plan | None, captured: bool):
        self.site = site
        self.ubatch = ubatch
        self.route = route
        self.rows = rows
        self.mark = mark
        self.plan = plan
        self.captured = captured
        self.refreshes = 0
        self.is_decoded = False
        self.table_tokens: int | None = None
        self.marks: list[Mark] = []
        self.foreign_mark: Mark | None = None

    def note_decode(self, table_tokens: int) -> None:
        """A decode of it, through block tables that have columns for so many tokens, was recorded."""
        self.is_decoded = True
        self.table_tokens = table_tokens if self.table_tokens is None else min(self.table_tokens, table_tokens)

    def is_of(self, plan: StepPlan) -> bool:
        """Whether it was recorded by this StepPlan."""
        return any(mark is plan.mark for mark in self.marks) and (self.site, self.ubatch) == (plan.site, plan.ubatch)

    def __str__(self) -> str:
        return str(self.plan) if self.plan is not None else f"{self.site}/fallback/ub{self.ubatch}"


class GraphRecord:
    """Holds pins for a graph without keeping it alive: a graph that is dropped must be free to go.

    graph: the graph object, weakly; None until `bind`. released: its pins went; it is known no longer.
    is_sanitized: its decodes are compared with the lengths in the captured buffers.

    Borrows: `holds`, everything the graph reads on our account, kept alive until the graph is gone.
    """

    __slots__ = (
        "__weakref__",
        "capture_id",
        "graph",
        "holds",
        "is_reported",
        "is_sanitized",
        "pinned",
        "reads",
        "released",
    )

    def __init__(self, capture_id: int, *, is_sanitized: bool) -> None:
        self.capture_id = capture_id
        self.is_sanitized = is_sanitized
        self.is_reported = False  #: whether it was told what the graph refreshes for no decode
        self.graph: weakref.ref[Graph] | None = None
        self.pinned: list[Item] = []
        self.holds: list[Any] = []
        self.reads: dict[tuple[Any, ...], Read] = {}
        self.released = False

    def bind(self, graph: Graph) -> None:
        """This record is that of `graph`."""
        self.graph = weakref.ref(graph)

    def num_refreshes(self, read: Read) -> int:
        """How often the graph itself refreshes what this read finds, for whichever site of the plan."""
        return sum(
            other.refreshes
            for other in self.reads.values()
            if other.plan is read.plan
            and other.captured == read.captured
            and (other.rows, other.mark.address) == (read.rows, read.mark.address)
        )

    def refreshes_itself(self, read: Read) -> bool:
        """Whether the graph refreshes what this read finds, so that nobody else has to before a replay."""
        return self.num_refreshes(read) > 0

    def reads_lens(self, read: Read) -> bool:
        """Whether an op of the graph reads the captured length buffer; else only the tables need be right."""
        return read.plan is None or self.refreshes_itself(read) or self.is_sanitized

    def forget_content(self) -> None:
        """A replay did not happen, or never will: nothing is known any more of the tables that the graph reads."""
        for read in self.reads.values():
            pair = None if read.plan is None else read.plan.pair
            if pair is not None:
                (pair.in_graph if read.captured else pair.eager).set_mark(None)

    def forget_capture(self) -> None:
        """Nothing is known any more of the tables that this graph refreshes."""
        for item in self.pinned:
            if isinstance(item, Plan):
                item.forget_capture(self.capture_id)

    def __str__(self) -> str:
        return f"graph of capture {self.capture_id}"
