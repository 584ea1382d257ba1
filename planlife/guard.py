"""Whether a replay decodes the steps at hand: what a graph reads, held against steps and against what tables hold.

In every message "found" is what the step has that was handed in, and "wanted" what the graph or its tables have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .errors import ConfigError, StalePlanError
from .graph_record import GraphRecord, Read
from .plan import EMPTY, Mark, Plan, Tables, describe_owner
from .route import Decision
from .slot import Slot
from .spec import Step

_PLAN_FIRST = "Call plan_for(step) right before guard(), or let manager.replay(g, step) plan what is stale."
_ANOTHER_ROUTE = "Decode this step without the graph, or capture it again for steps of this route."
_ALL_OR_NONE = "Give the graph dummies for both, or give each a length buffer of its own."
_PASS_THE_STEP = "Pass the step that was planned for this replay, over the captured rows and length buffer."


class Given:
    """A step handed to guard, with what its length tensor says."""

    __slots__ = ("address", "is_dummy", "rows", "slot", "step", "version")

    def __init__(self, step: Step, slot: Slot, lens: tuple[int, int, int | None]) -> None:
        self.step = step
        self.slot = slot
        self.rows, self.address, self.version = lens
        self.is_dummy = step.dummy or self.rows == 0

    def difference(self, mark: Mark) -> tuple[str, object, object] | None:
        """First field in which a mark is not this step's: (field, the mark's, the step's)."""
        return mark.difference(self.step, self.rows, self.address, self.version)

    def mark(self, capture_id: int, epoch: int) -> Mark:
        """A new mark of this step."""
        step = self.step
        return Mark(step, step.context_lens, self.rows, self.address, self.version, capture_id, epoch)


class Match(NamedTuple):
    """A read of the graph, and a step that it decodes."""

    read: Read
    given: Given

    @property
    def tables(self) -> Tables:
        """What the graph reads; only where it reads a plan."""
        plan = self.read.plan
        assert plan is not None and plan.pair is not None, "a pinned plan lost its buffer"
        return plan.pair.in_graph if self.read.captured else plan.pair.eager


def match(record: GraphRecord, given: Sequence[Given], route_of: Callable[[Given, Read], Decision]) -> list[Match]:
    """Every read of the graph with its step, or with its steps; all of a read's fields but the mark agree.

    Raises StalePlanError, and ConfigError for a step that is longer than the recorded block tables.
    """
    matches: list[Match] = []
    unmatched: list[Read] = []
    used: set[int] = set()
    # Those that are told by their length buffer come first: their steps are not meant for a read that fits any buffer.
    for read in sorted(record.reads.values(), key=lambda read: not record.reads_lens(read)):
        fitting = [one for one in given if _difference(record, read, one) is None]
        if not record.reads_lens(read):
            fitting = [one for one in fitting if id(one) not in used] or fitting
        # All steps that fit must be the right one, in whatever order they came. A dummy beside a real step of the
        # same plan has nothing to empty.
        fitting = [one for one in fitting if not one.is_dummy] or fitting
        if fitting:
            matches.extend(Match(read, one) for one in fitting)
            if record.reads_lens(read):
                used.update(map(id, fitting))
        else:
            unmatched.append(read)
    used.update(id(one) for _, one in matches)
    for read in unmatched:
        spare = [one for one in given if id(one) not in used]
        if not spare:
            raise StalePlanError(
                f"{record} reads {read} ({read.rows} rows, lengths at {read.mark.address:#x}) and was given no "
                "step for it. Pass a step for every plan the graph reads."
            )
        differences = [_difference(record, read, one) or (0, "", "", "") for one in spare]
        _, field, found, wanted = max(differences, key=lambda difference: difference[0])
        raise _stale(record, read, field, found, wanted, way_out=_PASS_THE_STEP)
    planned = {(read.plan, read.captured) for read, one in matches if read.plan is not None and not one.is_dummy}
    for read, one in matches:
        if one.is_dummy:
            if not record.refreshes_itself(read) and (read.plan, read.captured) in planned:
                wanted = "a real one, as the site it shares the plan with has"
                raise _stale(record, read, "step", f"a dummy of site {read.site!r}", wanted, way_out=_PASS_THE_STEP)
            for other, real in matches:
                if not real.is_dummy and empties_lens(record, read) and _share_lens(read, real):
                    wanted = f"a real one, as {other} has, whose lengths lie in the same buffer"
                    raise _stale(record, read, "step", f"a dummy of site {read.site!r}", wanted, way_out=_ALL_OR_NONE)
            continue
        decision = route_of(one, read)
        if decision.route != read.route:
            raise _stale(record, read, "route", decision, read.route, way_out=_ANOTHER_ROUTE)
        max_tokens = one.step.max_tokens
        if max_tokens is not None and read.table_tokens is not None and max_tokens > read.table_tokens:
            raise ConfigError(
                f"Step.max_tokens is {max_tokens:,}, and the block tables that {record} decodes {read} through have "
                f"columns for {read.table_tokens:,} tokens. Capture with wider tables, or serve this step eagerly."
            )
    return matches


def empties_lens(record: GraphRecord, read: Read) -> bool:
    """Whether a dummy of this read is one by zeros in the length buffer: the graph plans, or decodes, from that."""
    return read.plan is None or record.refreshes_itself(read)


def _share_lens(read: Read, real: Given) -> bool:
    """Whether zeros in the buffer of `read` would be lengths of a real step."""
    return read.mark.address < real.address + 4 * real.rows and real.address < read.mark.address + 4 * read.rows


def _difference(record: GraphRecord, read: Read, one: Given) -> tuple[int, str, object, object] | None:
    """(how many fields agree, first field that does not, found, wanted), or None if this is the read's step."""
    if one.slot.site != read.site:
        return 0, "site", one.slot.site, read.site
    if one.slot.ubatch != read.ubatch:
        return 1, "ubatch", one.slot.ubatch, read.ubatch
    if one.is_dummy:
        return None
    if one.rows != read.rows:
        return 2, "rows", one.rows, read.rows
    if record.reads_lens(read) and one.address != read.mark.address:
        wanted = f"{read.mark.address:#x} (of the tensor that was planned while recording)"
        return 3, "length buffer address", f"{one.address:#x} (the step's)", wanted
    return None


def check_foreign(record: GraphRecord, matches: Iterable[Match]) -> None:
    """What the graph reads and others refresh in their replays holds the work of these steps, once.

    Raises StalePlanError that names the graph that must replay first.
    """
    for one in matches:
        read = one.read
        recorded = read.foreign_mark
        if recorded is None or one.given.is_dummy:
            continue
        held = one.tables.mark
        difference: tuple[str, object, object] | None
        if held is not None and held is not EMPTY and held.capture_id != recorded.capture_id:
            difference = "refreshing capture", recorded.capture_id, held.capture_id
        else:
            difference = _mark_difference(one, held)
            if difference is None and held is not None and record.capture_id in held.consumers:
                difference = "mark", "another replay's", "lengths that this graph was replayed for already"
        if difference is not None:
            way_out = (
                f"Replay graph of capture {recorded.capture_id} for this step first, which refreshes them; if that is "
                "gone, or refreshes them several times, capture this graph with a plan_for of its own."
            )
            raise _stale(record, read, *difference, way_out=way_out)


def check_planned(record: GraphRecord, matches: Iterable[Match]) -> None:
    """The eager tables that the graph reads hold these steps, for a replay that was not accepted yet.

    Raises StalePlanError.
    """
    for one in matches:
        read = one.read
        if read.plan is None or read.captured or one.given.is_dummy:
            continue
        held = one.tables.mark
        difference = _mark_difference(one, held)
        if difference is not None:
            because = "plan_for was not called for this step"
            if difference[0] == "length buffer version":
                because = "the lengths were written after plan_for was called for this step"
            raise _stale(record, read, *difference, because=because)
        if held is not None and record.capture_id in held.consumers:
            raise StalePlanError(
                f"{record} may not be replayed: guard has already accepted this step for this graph, by its plan "
                f"{read}: call it once per replay, or plan_for again."
            )


def _mark_difference(one: Match, held: Mark | None) -> tuple[str, object, object] | None:
    """First field in which a match's tables do not hold its step: (field, found, wanted)."""
    owner = f"{describe_owner(one.given.step.owner)} (the step's)"
    if held is None:
        return "mark", owner, "no known lengths (the tables')"
    if held is EMPTY:
        return "mark", owner, "emptied for a dummy step (the tables')"
    if held is one.read.foreign_mark:
        return "mark", owner, "a refresh that was recorded and never replayed (the tables')"
    difference = one.given.difference(held)
    if difference is None:
        return None
    field, tables, step = difference
    return field, f"{step} (the step's)", f"{tables} (the tables')"


def stale_eager(record: GraphRecord, matches: Iterable[Match]) -> list[tuple[Plan, Given]]:
    """The eager tables that have to be refreshed before the replay, each once, and the step that each is for.

    Raises StalePlanError where two steps need different lengths in one table set.
    """
    steps: dict[Plan, Given] = {}
    stale: dict[Plan, Given] = {}
    for one in matches:
        read, given = one.read, one.given
        plan = read.plan
        if plan is None or read.captured or given.is_dummy:
            continue
        first = steps.setdefault(plan, given)
        if first is not given:
            difference = given.difference(first.mark(0, 0))
            if difference is not None:
                field, other, own = difference
                raise _stale(
                    record,
                    read,
                    field,
                    f"{own} (the step's)",
                    f"{other} (another step's)",
                    because="two steps of this replay need different lengths in one table set",
                    way_out="Pass the same owner, revision and length buffer for all sites that share the plan.",
                )
        found_mark = one.tables.mark
        if (
            found_mark is None
            or found_mark is EMPTY
            or given.difference(found_mark) is not None
            or record.capture_id in found_mark.consumers
            or found_mark is read.mark  # of the step that was recorded, which ended with that
            # An eager decode had it before any graph: the step may have ended with that, whatever the owner says.
            or (found_mark.is_used_eagerly and not found_mark.consumers)
        ):
            stale[plan] = given
    return list(stale.items())


def _stale(
    record: GraphRecord,
    read: Read,
    field: str,
    found: object,
    wanted: object,
    *,
    because: str = "",
    way_out: str = _PLAN_FIRST,
) -> StalePlanError:
    why = f"{because}: " if because else ""
    return StalePlanError(
        f"{record} may not be replayed: {why}its plan {read} has {field}: found {found}, wanted {wanted}. {way_out}"
    )
