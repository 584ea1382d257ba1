"""The graphs that read plans: what each pins and reads, from the first touch of its capture until it is gone."""

from __future__ import annotations

import weakref
from typing import Any

from .device import Device, Graph
from .errors import ConfigError, RouteError
from .events import Announcer, logger
from .graph_record import GraphRecord, Read
from .item import Item
from .plan import Arena, Mark, OffPlan, Plan, StepPlan
from .report import Counters
from .residency import Residency

_UNREAD = "its layers take another kernel or plan. Pass the StepPlan that was made while recording to pa_decode."


class GraphBook:
    """Owns: the records of all recorded graphs, and through them every pin. References no graph.

    The caller holds the manager's lock around every method but `of` and `eager_read_of`.
    """

    def __init__(
        self, device: Device, residency: Residency, counters: Counters, announcer: Announcer, always_read: list[Any]
    ) -> None:
        """always_read: buffers that every graph reads, whatever it plans."""
        self._device = device
        self._residency = residency
        self._counters = counters
        self._announcer = announcer
        self._always_read = always_read
        self._by_capture: dict[int, GraphRecord] = {}
        self._by_graph: weakref.WeakKeyDictionary[Graph, GraphRecord] = weakref.WeakKeyDictionary()
        self.gone = device.release_queue()  #: capture ids of graphs that are gone, for `release_gone`

    def __len__(self) -> int:
        return len(self._by_capture)

    def all(self) -> list[GraphRecord]:
        return list(self._by_capture.values())

    def of(self, g: Graph) -> GraphRecord | None:
        """What is known of a graph object; ConfigError if it is none."""
        try:
            if callable(g.replay):
                return self._by_graph.get(g)
        except (AttributeError, TypeError):  # TypeError: takes no weak reference
            pass
        raise ConfigError(f"a graph object is needed, got {g!r}.")

    def end_recording(self, g: Graph) -> None:
        """The capture that `g` was bound to has ended."""
        self.report_unread(self._by_graph[g])

    def report_unread(self, record: GraphRecord) -> None:
        """Tell once what the graph of a capture that has ended refreshes for no decode."""
        if record.is_reported:
            return
        record.is_reported = True
        for read in record.reads.values():
            if read.refreshes and not read.is_decoded:
                self._counters.stale_detected += 1
                reason = f"{record} refreshes it and no decode in the graph reads it: {_UNREAD}"
                self._announcer.note("stale", read, reason)
                logger.warning("%s: %s", str(read), reason)  # a log record must not hold a plan

    def unbind(self, g: Graph) -> None:
        """`g` was emptied and stands for no capture; the pins of the one it held go when the device is done."""
        self._by_graph.pop(g, None)

    def of_plan(self, plan: StepPlan) -> GraphRecord:
        """The record of the one live graph that was recorded with this StepPlan; RouteError unless there is one."""
        records = [
            record for record in self._by_capture.values() if any(read.is_of(plan) for read in record.reads.values())
        ]
        if len(records) == 1:
            return records[0]
        if records:
            found = f"was recorded by {len(records)} live graphs, {', '.join(map(str, records))}: pass the graph object"
        else:
            found = "was recorded by no live graph: record its pa_decode, and pass that very StepPlan"
        raise self._announcer.refuse(RouteError(f"{plan!r} stands for no graph: it {found}."))

    def adopt(self, g: Graph) -> None:
        """Bind `g` to its capture: inside the recording by the stream's capture id, which is exact.

        After it nothing but a graph object that tells its capture links the two, so that what is bound is confirmed,
        and a capture that may be the one in `g`, reads plans and is bound to no graph is refused.

        Raises RouteError, ConfigError for what is no graph. The caller holds the manager's lock.
        """
        bound = self.of(g)
        current_id = self._device.capture_id()
        held_id = self._device.capture_of(g)
        if current_id:
            if held_id not in (0, current_id):
                raise self._refuse_adoption(
                    f"this stream records capture {current_id}, and that graph object holds a finished one",
                    "Pass the graph object that is being recorded into",
                )
            record = self.record_for(current_id)
            record.bind(g)
            self._by_graph[g] = record  # an earlier capture's pins go when the driver tells
            return
        if held_id == 0:
            raise self._refuse_adoption("it holds no finished capture", "Call adopt(g) inside the recording")
        if held_id is not None:
            known = self._by_capture.get(held_id)
            if known is None and bound is not None and bound.capture_id == held_id:
                known = bound  # released, or nothing is known of it
            record = known or GraphRecord(held_id, is_sanitized=False)
            if record.released:
                raise self._refuse_adoption("its pins were released", "Capture again")
            self.report_unread(record)
            record.bind(g)
            self._by_graph[g] = record
            return
        if bound is not None and not bound.released:
            self.report_unread(bound)
            return
        unbound = [
            record
            for record in self._by_capture.values()
            if record.graph is None and record.reads and self._device.may_be_last_capture(record.capture_id)
        ]
        if unbound:
            raise self._refuse_adoption(
                f"capture {unbound[-1].capture_id} has ended and reads plans, and nothing tells whether this graph "
                "object holds it",
                "Call adopt(g) inside the recording, on any thread whose stream is in it",
            )

    def _refuse_adoption(self, why: str, way_out: str) -> RouteError:
        return self._announcer.refuse(
            RouteError(f"adopt() cannot bind this graph object: {why}. {way_out}, or capture through manager.graph().")
        )

    def record_for(self, capture_id: int) -> GraphRecord:
        """The record of the capture this thread's stream is in; the first call attaches its end to the graph."""
        record = self._by_capture.get(capture_id)
        if record is None:
            record = GraphRecord(capture_id, is_sanitized=bool(self._always_read))
            record.holds.extend(self._always_read)
            self._device.watch_capture(self.gone, record.holds)
            self._by_capture[capture_id] = record
        return record

    def eager_read_of(self, capture_id: int, plan: Plan) -> Read | None:
        """How the graph being recorded reads this plan's eager tables already, for whichever site."""
        record = self._by_capture.get(capture_id)
        reads = () if record is None else tuple(record.reads.values())  # other threads may record into it
        return next((read for read in reads if read.plan is plan and not read.captured), None)

    def pin(self, capture_id: int, plan: Plan, arena: Arena) -> list[Item]:
        """The graph being recorded needs this plan and its scratch to stay where they are.

        Before their addresses are taken: until then another thread may evict them and bring them back elsewhere.
        Returns those of them that the graph did not pin before. Raises MintError if they are not resident.
        """
        self._residency.require_resident(plan, arena)
        record = self.record_for(capture_id)
        self._residency.num_pinning_graphs += not record.pinned
        new: list[Item] = [item for item in (plan, arena) if item not in record.pinned]
        for item in new:
            self._residency.store.pin(item)
            record.pinned.append(item)
            record.holds.append(item.buffer)
            self._announcer.note("pin", item, str(record))
        return new

    def unpin(self, capture_id: int, items: list[Item]) -> None:
        """The call that `pin` was for was refused: the graph reads none of what that returned."""
        record = self._by_capture[capture_id]
        for item in items:
            self._residency.store.unpin(item)
            record.pinned.remove(item)
            record.holds[:] = [held for held in record.holds if held is not item.buffer]
            self._announcer.note("release", item, f"{record}: the call was refused")
        if items and not record.pinned:
            self._residency.num_pinning_graphs -= 1

    def note_read(self, capture_id: int, plan: StepPlan, *, refreshed: bool, decoded_tokens: int | None = None) -> None:
        """The graph being recorded reads this plan: remember what it must find at replay.

        decoded_tokens: what the block tables of a decode have columns for; None where only a refresh was recorded.
        """
        item, mark = plan.item, plan.mark
        assert item is not None
        record = self.record_for(capture_id)
        key = _read_key(plan)
        read = record.reads.get(key)
        if read is None:
            whole = plan.whole or mark
            read = Read(plan.site, plan.ubatch, plan.route, whole.rows, whole, item, plan.captured)
            record.reads[key] = read
            record.holds.append(whole.lens)
        read.marks.append(mark if plan.whole is None else plan.whole)
        read.refreshes += refreshed
        if decoded_tokens is not None:
            read.note_decode(decoded_tokens)
            if plan.captured and mark.capture_id != capture_id:
                read.foreign_mark = mark

    def note_fallback(self, capture_id: int, plan: StepPlan | OffPlan, mark: Mark, decoded_tokens: int) -> None:
        """The graph being recorded runs the fallback over this length buffer."""
        record = self.record_for(capture_id)
        key = (plan.site, plan.ubatch, plan.route, mark.address, mark.rows)
        if key not in record.reads:
            record.reads[key] = Read(plan.site, plan.ubatch, plan.route, mark.rows, mark, None, plan.captured)
            record.holds.append(mark.lens)
        record.reads[key].marks.append(mark)
        record.reads[key].note_decode(decoded_tokens)

    def release(self, record: GraphRecord, reason: str) -> bool:
        """Drop the pins of a graph; False if they were dropped before."""
        if record.released:
            return False
        record.released = True
        self._residency.num_pinning_graphs -= bool(record.pinned)
        record.forget_capture()
        for item in record.pinned:
            self._residency.store.unpin(item)
        record.pinned.clear()
        record.holds.clear()
        record.reads.clear()
        self._by_capture.pop(record.capture_id, None)
        self._counters.releases += 1
        self._announcer.note("release", record, reason)
        return True

    def release_gone(self) -> bool:
        """Release what belonged to graphs that are gone; destructors only queued their ids. False if nothing was."""
        any_released = False
        while self.gone:
            try:
                capture_id = self.gone.popleft()
            except IndexError:  # another thread was faster
                break
            record = self._by_capture.get(capture_id)
            if record is not None:
                any_released |= self.release(record, "its graph is gone")
        return any_released


def _read_key(plan: StepPlan) -> tuple[Any, ...]:
    """Each site needs a step of its own. Eager tables are read for one step only; in-graph tables may be refreshed from
    several length buffers."""
    assert plan.item is not None
    if not plan.captured:
        return (plan.item.key, plan.site, "eager")
    whole = plan.whole or plan.mark
    return (plan.item.key, plan.site, "in-graph", whole.address, whole.rows)
