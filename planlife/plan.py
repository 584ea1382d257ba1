"""A plan and what is known of its content: tables, marks, and the StepPlan that layers hold."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .identity import Shared, Singular
from .item import Item
from .spec import PlanSpec, Step


class _Held:
    """A strong reference to an owner that takes no weak one (dict, tuple, slots object); dropped by `let_go`."""

    __slots__ = ("_owner",)

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __call__(self) -> object:
        return self._owner

    def let_go(self) -> None:
        self._owner = None


def _hold(owner: object) -> int | Callable[[], object] | None:
    """An int by value, everything else by identity: weakly where possible."""
    if owner is None or type(owner) is int:
        return owner
    try:
        return weakref.ref(owner)
    except TypeError:
        return _Held(owner)


class Mark(Singular):
    """Whose lengths are in a table set. Two marks are the same only if they are one object.

    owner: how the step's owner is held. step: the Step itself, weakly, for steps without an owner.
    revision, rows, address, version: of the step and its length tensor.
    capture_id: the capture whose replay writes the tables, 0 for eager tables.
    lens: the length tensor itself, held, so that its address stays taken while the mark speaks of it.

    Those are its identity, which never changes. Beside it stands what became of it. epoch: how many ends of steps the
    manager had seen when it was made. consumers: captures whose graph was let replay on it. is_used_eagerly: an eager
    decode went by it.
    """

    __slots__ = (
        "address",
        "capture_id",
        "consumers",
        "epoch",
        "is_used_eagerly",
        "lens",
        "owner",
        "revision",
        "rows",
        "step",
        "version",
    )

    _ONE_ONLY = "a Mark cannot be copied or pickled: it counts by identity. Copy the StepPlan."

    def __init__(
        self, step: Step, lens: Any, rows: int, address: int, version: int | None, capture_id: int, epoch: int = 0
    ) -> None:
        self.owner = _hold(step.owner)
        self.step = weakref.ref(step)
        self.revision = step.revision
        self.lens = lens
        self.rows = rows
        self.address = address
        self.version = version
        self.capture_id = capture_id
        self.epoch = epoch
        self.consumers: tuple[int, ...] = ()
        self.is_used_eagerly = False

    def is_owned_by(self, owner: object) -> bool:
        """Same owner: an int by value, everything else by identity, None never."""
        held = self.owner
        if held is None or owner is None:
            return False
        if type(held) is int:
            return type(owner) is int and held == owner
        return held() is owner  # type: ignore[operator]

    def difference(self, step: Step, rows: int, address: int, version: int | None) -> tuple[str, object, object] | None:
        """First field in which the lengths marked here are not those of `step`, as (field, the mark's, the step's).

        A step without an owner is only ever the same as itself, as the same Step object.
        """
        if not self.is_owned_by(step.owner) and self.step() is not step:
            if self.owner is None and step.owner is None:
                return "step", "another Step object", "this one: without an owner only the very Step counts"
            return "owner", describe_owner(self.held_owner()), describe_owner(step.owner)
        for field, found, wanted in (
            ("revision", self.revision, step.revision),
            ("rows", self.rows, rows),
            ("length buffer address", hex(self.address), hex(address)),
            ("length buffer version", self.version, version),
        ):
            if found != wanted:
                return field, found, wanted
        return None

    def held_owner(self) -> object:
        """The owner, None if there was none or it is gone."""
        held = self.owner
        return held if held is None or isinstance(held, int) else held()

    def is_same_step(self, other: Mark) -> bool:
        """Whether another mark speaks of the same lengths: of one owner, revision, buffer, rows and version."""
        owner = other.held_owner()
        return (
            self.is_owned_by(owner)
            and self.capture_id == other.capture_id
            and (self.revision, self.rows, self.address, self.version)
            == (other.revision, other.rows, other.address, other.version)
        )

    def allows_skip(self, epoch: int) -> bool:
        """Whether a plan_for of the same step may skip its refresh, by the ends of steps seen so far.

        A step ends with its replay, or with its recording: lengths may be written behind it in ways that nothing shows,
        and an owner that lives for ever looks like the same step. What a capture refreshes is a step of its own.
        """
        return bool(self.capture_id) or self.epoch == epoch

    def retire(self) -> None:
        """The tables hold other lengths now: an owner that had to be held strongly is let go."""
        if type(self.owner) is _Held:
            self.owner.let_go()


#: Dummy steps empty the tables that a graph does not refresh itself; this mark says so. It is nobody's step.
EMPTY = Mark(Step(None), None, 0, 0, None, 0)


def describe_owner(owner: object) -> str:
    """An owner for a message."""
    if owner is None:
        return "no owner"
    if type(owner) is int:
        return str(owner)
    # The address too: two owners that are equal are still two.
    return f"{repr(owner) if type(owner) is str else type(owner).__name__} at {id(owner):#x}"


class Segment(NamedTuple):
    """Rows [first_row, end_row) of a class, as one table set of the backend."""

    first_row: int
    end_row: int
    native: Any


class Tables:
    """All segments of a class in one flavour (eager or in-graph), and the mark that says whose lengths they hold.

    views: the segments as each site reads them that uses this plan; first those of the plan's own site. All are views
    of the same bytes, so one refresh, through the first, is everybody's, and there is one mark.
    """

    __slots__ = ("mark", "views")

    def __init__(self, views: tuple[tuple[Segment, ...], ...]) -> None:
        self.views = views
        self.mark: Mark | None = None

    def set_mark(self, mark: Mark | None) -> None:
        """Publish what was just launched, or that nothing is known any more."""
        old, self.mark = self.mark, mark
        if old is not None and old is not mark:
            old.retire()


class Pair:
    """Eager code only ever sees `eager`; replays change `in_graph` unseen."""

    __slots__ = ("eager", "in_graph")  # each call reads one: half the time of a NamedTuple's

    def __init__(self, eager: Tables, in_graph: Tables) -> None:
        self.eager = eager
        self.in_graph = in_graph

    def __iter__(self) -> Iterator[Tables]:
        return iter((self.eager, self.in_graph))


class Plan(Item, Singular):
    """Owns: one block with the table sets of one (site, class rows, ubatch), eager and in-graph.

    specs: of the site, then of the sites that use its plans (`PlanSpec.plan_of`).

    Address-stable: from mint or rematerialisation until eviction; never moved while a graph pins it.
    `lock` makes checking a mark, launching, and setting a mark one step.
    """

    __slots__ = ("_make_pair", "class_rows", "lock", "pair", "site", "specs", "ubatch")

    _ONE_ONLY = "a Plan cannot be copied or pickled: it owns tables that graphs read. Copy the StepPlan."

    def __init__(
        self,
        site: str,
        class_rows: int,
        ubatch: int,
        specs: tuple[PlanSpec, ...],
        num_bytes: int,
        make_pair: Callable[[Any], Pair],
    ) -> None:
        super().__init__((site, class_rows, f"ub{ubatch}"), num_bytes)
        self.site = site
        self.class_rows = class_rows
        self.ubatch = ubatch
        self.specs = specs
        self.lock = threading.RLock()
        self.pair: Pair | None = None
        self._make_pair = make_pair

    def build(self, buffer: Any) -> Pair:
        return self._make_pair(buffer)

    def attach(self, buffer: Any, content: Any, stream: int) -> None:
        super().attach(buffer, content, stream)
        self.pair = content

    def forget_capture(self, capture_id: int) -> None:
        """The graph of that capture is gone, or never came to be: nothing will bring these tables to its mark."""
        in_graph = self.pair.in_graph if self.pair is not None else None
        if in_graph is not None and in_graph.mark is not None and in_graph.mark.capture_id == capture_id:
            in_graph.set_mark(None)

    def detach(self) -> Any:
        pair, self.pair = self.pair, None
        if pair is not None:
            for tables in pair:
                tables.set_mark(None)
        return super().detach()


class Arena(Item):
    """Owns: the scratch of one (lane, ubatch), sized for the lane's largest call. Its loss touches no mark."""

    __slots__ = ()

    def __init__(self, lane: str, ubatch: int, num_bytes: int) -> None:
        super().__init__(("scratch", lane, f"ub{ubatch}"), num_bytes)


_NOT_SENT = (
    "{} cannot be pickled: it speaks of tables and lengths in this process's memory. Leave it out of what is sent, and "
    "call plan_for where it is to be used."
)


class StepPlan(Shared):
    """One step's decision for one site: class, route, reason.

    route: "planned", "fallback" or "dummy"; reason: why not planned, else "". rows: the step's. class_rows: the class
    that serves them (the top one where more rows are decoded in parts), None off the planned route. captured: made
    while a stream recorded (its tables are in-graph). Read it and hand it to pa_decode; fields that are not named here
    are the manager's.

    Borrows: the plan's tables, which an eviction takes away, and the owner, weakly where that is possible. It keeps the
    step's length tensor alive, and never the Step.

    A copy, also a deep one, is the StepPlan itself: it never changes, and decodes the lengths that were planned, which
    are in the manager's tables and in the step's own buffer, wherever the metadata that holds it is copied to. It
    cannot be pickled (TypeError).
    """

    __slots__ = (
        "captured",
        "class_rows",
        "item",
        "mark",
        "max_tokens",
        "parts",
        "reason",
        "route",
        "rows",
        "site",
        "slot",
        "ubatch",
        "whole",
    )

    _ONE_ONLY = _NOT_SENT.format("a StepPlan")

    def __init__(
        self,
        slot: Any,
        route: str,
        reason: str,
        rows: int,
        mark: Mark,
        item: Plan | None,
        captured: bool,
        parts: tuple[StepPlan, ...] = (),
        whole: Mark | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.slot = slot
        self.site: str = slot.site
        self.ubatch: int = slot.ubatch
        self.route = route
        self.reason = reason
        self.rows = rows
        self.mark = mark
        self.item = item
        self.parts = parts  #: rows beyond the ladder: one StepPlan of the top class per chunk
        self.max_tokens = max_tokens  #: the step's; block tables must have the columns for it
        self.whole = whole  #: of a part: the mark of the step that it is a part of, which is what guard is given
        self.class_rows: int | None = parts[0].class_rows if parts else item.class_rows if item is not None else None
        self.captured = captured

    @property
    def context_lens(self) -> Any:
        """int32[rows]: the step's length tensor."""
        return self.mark.lens

    @property
    def tables(self) -> Tables | None:
        """The table sets this plan reads, None off the planned route and after an eviction."""
        pair = self.item.pair if self.item is not None else None
        if pair is None:
            return None
        return pair.in_graph if self.captured else pair.eager

    @property
    def native(self) -> Any:
        """The backend's plan; None off the planned route, after an eviction, and where there are several segments."""
        natives = self.segments
        return natives[0] if natives is not None and len(natives) == 1 else None

    @property
    def segments(self) -> list[Any] | None:
        """The backend's plans, one per segment; None off the planned route and after an eviction."""
        if self.parts:
            chunks = [part.segments for part in self.parts]
            return None if None in chunks else [native for chunk in chunks for native in chunk or ()]
        tables = self.tables
        return None if tables is None else [segment.native for segment in tables.views[self.slot.view]]

    def __repr__(self) -> str:
        why = f", reason={self.reason!r}" if self.reason else ""
        return (
            f"StepPlan({self.route}, site={self.site!r}, ubatch={self.ubatch}, rows={self.rows}, "
            f"class_rows={self.class_rows}, captured={self.captured}{why})"
        )


class OffPlan(Shared):
    """What plan_for answers with enabled=False: the fallback route, and nothing that would cost anything."""

    __slots__ = ("context_lens", "slot")

    _ONE_ONLY = _NOT_SENT.format("an OffPlan")

    route = "fallback"
    reason = "planlife is off (enabled=False)"
    class_rows = None
    native = None
    segments = None
    item = None
    tables = None
    mark = None
    captured = False
    parts = ()
    max_tokens = None

    def __init__(self, slot: Any, context_lens: Any) -> None:
        self.slot = slot
        self.context_lens = context_lens

    @property
    def rows(self) -> int:
        return int(self.context_lens.shape[0])

    @property
    def site(self) -> str:
        return str(self.slot.site)

    @property
    def ubatch(self) -> int:
        return int(self.slot.ubatch)

    def __repr__(self) -> str:
        return f"OffPlan(site={self.site!r}, ubatch={self.ubatch}, rows={self.rows})"
