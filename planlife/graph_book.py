"""The graphs that read plans: what each pins and reads, from the first touch of its capture until it is gone."""

from __future__ import annotations

import threading
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

    The caller holds the manager's lock around `pin`, `unpin`, `note_*`, `bind`, `unbind`, `release`, `release_gone` and
    `record_for`.
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
        self._this_thread = threading.local()
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

    def bind(self, g: Graph, record: GraphRecord) -> None:
        """From now on `g` stands for this capture, which has ended; what it refreshes for no decode is reported."""
        if self._by_graph.get(g) is not record:
            for read in record.reads.values():
                if read.refreshes and not read.is_decoded:
                    self._counters.stale_detected += 1
                    reason = f"{record} refreshes it and no decode in the graph reads it: {_UNREAD}"
                    self._announcer.note("stale", read, reason)
                    logger.warning("%s: %s", str(read), reason)  # a log record must not hold a plan
        record.bind(g)
        self._by_graph[g] = record

    def unbind(self, g: Graph) -> None:
        """`g` was emptied and stands for no capture; the pins of the one it held go when the device is done."""
        self._by_graph.pop(g, None)

    def adopted(self, g: Graph) -> GraphRecord:
        """The record of the finished capture that `g` holds; empty if that capture touched no plan.

        Where a graph object does not tell its capture, it is the one it was bound to, or else this thread's last one
        that touched a plan and has no graph yet. RouteError if there is none, or if its pins were released.
        """
        record: GraphRecord | None = None
        if not self._device.capture_id():
            bound = self.of(g)
            capture_id = self._device.capture_of(g)
            if capture_id is None:
                last: GraphRecord | None = getattr(self._this_thread, "last_record", None)
                if bound is not None and not bound.released:
                    record = bound
                elif last is not None and last.graph is None:
                    record = last
            elif bound is not None and bound.capture_id == capture_id:
                record = bound
            elif capture_id:
                record = self._by_capture.get(capture_id) or GraphRecord(capture_id)
        if record is None or record.released:
            raise self._announcer.refuse(
                RouteError(
                    "adopt() found no finished capture for this graph: it is empty, its pins were released, or nothing "
                    "on this thread touched a plan since. Call it on the thread that captured, right after the "
                    "capture has ended."
                )
            )
        return record

    def record_for(self, capture_id: int) -> GraphRecord:
        """The record of the capture this thread is in; the first call attaches its end to the graph."""
        record = self._by_capture.get(capture_id)
        if record is None:
            record = GraphRecord(capture_id)
            record.holds.extend(self._always_read)
            self._device.watch_capture(self.gone, record.holds)
            self._by_capture[capture_id] = record
        self._this_thread.last_record = record
        return record

    def eager_read_of(self, capture_id: int, plan: Plan) -> Read | None:
        """How the graph being recorded reads this plan's eager tables already, for whichever site."""
        record = self._by_capture.get(capture_id)
        reads = () if record is None else record.reads.values()
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

    def note_read(self, capture_id: int, plan: StepPlan, *, refreshed: bool, decoded: bool) -> None:
        """The graph being recorded reads this plan: remember what it must find at replay."""
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
        read.refreshes += refreshed
        read.is_decoded |= decoded

    def note_fallback(self, capture_id: int, plan: StepPlan | OffPlan, mark: Mark) -> None:
        """The graph being recorded runs the fallback over this length buffer."""
        record = self.record_for(capture_id)
        key = (plan.site, plan.ubatch, plan.route, mark.address, mark.rows)
        if key not in record.reads:
            record.reads[key] = Read(plan.site, plan.ubatch, plan.route, mark.rows, mark, None, plan.captured)
            record.holds.append(mark.lens)

    def release(self, record: GraphRecord, reason: str) -> bool:
        """Drop the pins of a graph; False if they were dropped before."""
        if record.released:
            return False
        record.released = True
        self._residency.num_pinning_graphs -= bool(record.pinned)
        record.forget_content()
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
