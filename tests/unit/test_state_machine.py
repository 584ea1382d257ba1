"""Random lives of a manager on fakes: whatever is accepted decodes its own step, and bytes always add up."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planlife import CapacityLadder, MintError, PlanlifeError, RouteError, StalePlanError, Step
from planlife.testing import FakeBackend, FakeDevice
from tests.unit.fake_world import FakeWorld, Owner, live_lens_fallback, spec

SITES = {
    "full": spec(max_partitions=1),
    "windowed": spec(max_partitions=1, sliding_window=300),
    "draft": spec(lane="draft"),
    "per layer": spec(shared_lengths=False),
    "shared": spec(plan_of="full", lane="draft"),
}
OWNERS = {site: one.plan_of or site for site, one in SITES.items()}  # whose plans a site uses
ROWS = (1, 2, 3, 4, 6)  # 6 is beyond the ladder
UBATCHES = 2


OFTEN, RARELY = st.sampled_from([True, True, True, False]), st.sampled_from([False, False, False, True])


class Fault(Exception):
    """Injected."""


class WatchingBackend(FakeBackend):
    """Knows whose work is being planned, and refuses to plan the same work twice into the same tables."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.work: object = None  #: (owner, revision, buffer, version, capture); None where each call must refresh
        self.done: dict[int, object] = {}  #: by the address of the tables

    def refresh(self, tables: Any, context_lens: Any, num_rows: int) -> None:
        address = tables.buffer.address
        work = None if self.work is None or context_lens is None else (self.work, context_lens.data_ptr(), num_rows)
        before = self.done.pop(address, None)
        assert work is None or work != before, f"planned twice: {work}"
        super().refresh(tables, context_lens, num_rows)
        self.done[address] = work


class Planned:
    """A StepPlan, the lengths it was made for, and its step."""

    def __init__(self, step: Step, plan: Any, lens: list[int], work: object) -> None:
        self.step, self.plan, self.lens, self.work = step, plan, lens, work


class LiveGraph:
    """A graph, what it reads, and its style."""

    def __init__(self, g: Any, step: Step, call: dict[str, Any], in_graph: bool, plan: Any) -> None:
        self.g, self.call, self.in_graph, self.plan = g, call, in_graph, plan
        self.site, self.ubatch, self.rows = step.site, step.ubatch, step.context_lens.shape[0]
        self.lens = step.context_lens


class ManagerLife(RuleBasedStateMachine):
    @initialize(
        share=st.floats(0, 1),
        on_miss=st.sampled_from(["fallback", "raise", "mint"]),
        fallback=st.booleans(),
        sanitize=st.sampled_from(["off", "count", "raise"]),
        max_plan_rows=st.sampled_from([None, 1]),
        warm=OFTEN,
    )
    def start(
        self, share: float, on_miss: str, fallback: bool, sanitize: str, max_plan_rows: int | None, warm: bool
    ) -> None:
        self.has_fallback = fallback
        self.on_miss = on_miss
        self.sanitize = sanitize
        options = {
            "sites": SITES,
            "rows": max(ROWS),
            "ladder": CapacityLadder([1, 2, 4]),
            "ubatches": UBATCHES,
            "fallback": live_lens_fallback if fallback else None,
            "on_miss": on_miss,
            "sanitize": sanitize,
        }
        plain = FakeWorld(**options, device=FakeDevice(num_compute_units=2), backend=FakeBackend(max_plan_rows))
        least, worst = plain.manager.min_budget_bytes(), plain.manager.worst_case_bytes()
        self.budget_bytes = least + int((worst - least) * share)
        self.backend = WatchingBackend(max_plan_rows=max_plan_rows)
        self.world = FakeWorld(
            **options, device=FakeDevice(num_compute_units=2), backend=self.backend, budget_bytes=self.budget_bytes
        )
        self.owners: list[Any] = []
        self.plans: list[Planned] = []
        self.graphs: list[LiveGraph] = []
        if warm:
            self.mint(None)

    # --- what an engine does

    def set_lens(self, data: st.DataObject, rows: int, ubatch: int) -> Any:
        lens = self.world.lens[ubatch][:rows]
        known = [0, 1, 255, 256, 257, 4096, *([5000] if self.sanitize != "raise" else [])]  # 5000 is past the bound
        lens.write(data.draw(st.lists(st.sampled_from(known), min_size=rows, max_size=rows)))
        return lens

    def new_step(self, data: st.DataObject, *, rows: int | None = None, **fields: Any) -> Step:
        site = fields.pop("site", None) or data.draw(st.sampled_from(sorted(SITES)))
        ubatch = fields.pop("ubatch", None)
        ubatch = data.draw(st.integers(0, UBATCHES - 1)) if ubatch is None else ubatch
        rows = data.draw(st.sampled_from(ROWS)) if rows is None else rows
        lens = self.set_lens(data, rows, ubatch) if data.draw(st.booleans()) else self.world.lens[ubatch][:rows]
        kind = data.draw(st.sampled_from(["new", "old", "int", "dict", "none"]))
        owner: Any = {"new": Owner(), "int": 3, "dict": {}, "none": None, "old": None}[kind]
        if kind == "old" and self.owners:
            owner = data.draw(st.sampled_from(self.owners))
        self.owners.append(owner)
        revision = data.draw(st.integers(0, 1))
        return Step(lens, site=site, ubatch=ubatch, owner=owner, revision=revision, **fields)

    def work_of(self, step: Step, capture: object = None) -> object:
        if step.owner is None or step.site == "per layer":
            return None
        owner = step.owner if type(step.owner) is int else ("id", id(step.owner))
        return (OWNERS[step.site], owner, step.revision, step.context_lens._version, capture)

    def planned(self, step: Step) -> Planned | None:
        """plan_for, which may be refused; None then."""
        self.backend.work = self.work_of(step)
        manager = self.world.manager
        try:
            plan = manager.plan_for(step)
        except (PlanlifeError, Fault) as error:
            self.allow(error)
            return None
        finally:
            self.backend.work = None
        rows = step.context_lens.shape[0]
        assert plan.rows == rows
        if plan.route == "planned":
            assert plan.native is not None or plan.segments is not None
        return Planned(step, plan, list(step.context_lens.values), self.work_of(step))

    def allow(self, error: BaseException) -> None:
        """Refusals that a call may end in; anything else is a bug."""
        if isinstance(error, Fault):
            self.backend.done.clear()
        else:
            assert isinstance(error, (MintError, RouteError, StalePlanError, MemoryError)), error
            assert str(error)

    def expected(self, planned: Planned) -> list[int]:
        if planned.plan.route == "dummy":
            return [0] * len(planned.lens)
        if planned.plan.route == "fallback":
            return list(planned.step.context_lens.values)
        return planned.lens

    def decode(self, planned: Planned) -> bool:
        """True if the decode was accepted; then it decoded the lengths of its step."""
        call = self.world.call(planned.plan.rows, planned.step.site)
        expected = self.expected(planned)
        self.backend.work = planned.work
        try:
            self.world.manager.pa_decode(planned.plan, **call)
        except (PlanlifeError, Fault) as error:
            self.allow(error)
            return False
        finally:
            self.backend.work = None
        assert call["output"].values == expected
        return True

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        one = self.planned(self.new_step(data))
        if one is not None:
            self.plans = [*self.plans, one][-8:]

    @rule(data=st.data())
    def plan_again(self, data: st.DataObject) -> None:
        """57 layers may all ask; only the first refreshes (WatchingBackend)."""
        step = self.new_step(data)
        first, second = self.planned(step), self.planned(step)
        if first is not None and second is not None and first.plan.route == "planned":
            assert second.plan.route == "planned"
            assert self.decode(second)

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def decode_any(self, data: st.DataObject) -> None:
        self.decode(data.draw(st.sampled_from(self.plans)))

    @rule(data=st.data())
    def a_fresh_step_is_served_at_once(self, data: st.DataObject) -> None:
        step = self.new_step(data)
        one = self.planned(step)
        if one is None:
            assert not self.has_fallback or self.on_miss == "raise"
        elif one.plan.route == "planned":
            assert self.decode(one)
        else:
            assert self.decode(one) is self.has_fallback

    @rule(data=st.data(), ubatch=st.integers(0, UBATCHES - 1))
    def lengths_advance_in_place(self, data: st.DataObject, ubatch: int) -> None:
        self.set_lens(data, data.draw(st.sampled_from(ROWS)), ubatch)

    @rule(data=st.data())
    def dummy(self, data: st.DataObject) -> None:
        refreshes = self.backend.calls["refresh"]
        one = self.planned(self.new_step(data, dummy=True))
        assert one is not None and one.plan.route == "dummy"
        assert self.decode(one)
        assert self.backend.calls["refresh"] == refreshes

    @rule(rows=st.sampled_from([None, 1, [2, 3], 4]))
    def mint(self, rows: Any) -> None:
        with self.world.manager.capture_phase():
            self.world.manager.warm(rows)

    # --- graphs

    @rule(
        data=st.data(),
        in_graph=st.booleans(),
        opened_by=st.sampled_from(["manager", "engine"]),
        fails=RARELY,
        again=RARELY,
    )
    def capture(self, data: st.DataObject, in_graph: bool, opened_by: str, fails: bool, again: bool) -> None:
        manager, device = self.world.manager, self.world.device
        step = self.new_step(data, rows=data.draw(st.integers(1, 4)))
        call = self.world.call(step.context_lens.shape[0], step.site)
        g: Any = None
        if again and self.graphs and opened_by == "manager":
            g = self.graphs.pop(data.draw(st.integers(0, len(self.graphs) - 1))).g
        elif opened_by == "engine":
            g = device.new_graph()
        before = self.planned(step)  # as engines do: also an in-graph capture has its warm-up forward
        if before is None:
            return
        try:
            with manager.graph(g) if opened_by == "manager" else device.record(g) as recording:
                self.backend.work = self.work_of(step, object())
                plan = manager.plan_for(step) if in_graph else before.plan
                manager.pa_decode(plan, **call)
                if fails:
                    raise Fault
        except (PlanlifeError, Fault) as error:
            self.allow(error)
            self.backend.done.clear()  # a part of it may have been recorded
            return
        finally:
            self.backend.work = None
        if opened_by == "engine":
            manager.adopt(g)
        self.backend.done.clear()  # a recording ends its step: the next plan_for refreshes, whosever it is
        self.graphs.append(LiveGraph(recording, step, call, in_graph, plan))
        del recording, g

    @precondition(lambda self: self.graphs)
    @rule(data=st.data(), planned_first=OFTEN, fits=OFTEN, dummy=RARELY)
    def replay(self, data: st.DataObject, planned_first: bool, fits: bool, dummy: bool) -> None:
        live = self.graphs[data.draw(st.integers(0, len(self.graphs) - 1))]  # a strategy would keep what it drew alive
        fields: dict[str, Any] = {"dummy": dummy}
        if fits:
            fields.update(site=live.site, ubatch=live.ubatch, rows=live.rows)
        step = self.new_step(data, **fields)
        one = self.planned(step) if planned_first and not dummy else None
        try:
            self.world.manager.replay(live.g, step)
        except (PlanlifeError, Fault) as error:
            self.allow(error)
            if fits and not dummy and one is not None and one.plan.route == live.plan.route:
                raise AssertionError("a replay right after its plan_for was refused") from error
            return
        self.note_replay(live)
        assert (step.site, step.ubatch) == (live.site, live.ubatch)
        found = live.call["output"].values
        lens = list(step.context_lens.values)
        if live.plan.route == "fallback":
            return  # the fake fallback runs at capture, as no kernel of ours
        if dummy and not live.in_graph:
            assert found == [0] * live.rows
        elif dummy:
            assert found == live.lens.values  # an engine zeroes its buffer
        else:
            assert found == lens

    def note_replay(self, live: LiveGraph) -> None:
        """Tables changed unseen: what was noted of their work is void."""
        self.backend.done.clear()

    @precondition(lambda self: self.graphs)
    @rule(data=st.data(), how=st.sampled_from(["release", "reset", "drop", "busy"]))
    def destroy(self, data: st.DataObject, how: str) -> None:
        live = self.graphs.pop(data.draw(st.integers(0, len(self.graphs) - 1)))
        if how == "release":
            self.world.manager.release(live.g)
        elif how == "reset":
            live.g.reset()
        elif how == "busy":
            with self.world.device.busy():
                live.g.reset()
                self.world.manager.trim(0)

    # --- memory and life

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        before = self.world.device.live_bytes
        target = int(before * share)
        freed = self.world.manager.trim(target)
        report = self.world.manager.report()
        assert freed == before - self.world.device.live_bytes
        assert report.resident_bytes <= max(target, report.pinned_bytes)

    @rule()
    def invalidate(self) -> None:
        self.world.manager.invalidate()
        self.backend.done.clear()

    @rule(data=st.data(), at=st.integers(1, 6), what=st.sampled_from(["backend", "allocation"]))
    def fault(self, data: st.DataObject, at: int, what: str) -> None:
        """A backend call or an allocation fails somewhere in one step; the next step is served as ever."""
        step = self.new_step(data)
        if what == "backend":
            self.backend.inject(at, error=Fault("injected"))
        else:
            self.world.device.fail_at = at
        one = self.planned(step)
        if one is not None:
            self.decode(one)
        self.backend.inject(1 << 40)
        self.world.device.fail_at = None
        self.backend.done.clear()

    @rule()
    def close_and_reopen(self) -> None:
        self.world.manager.close()
        assert self.world.device.live_bytes == 0
        self.world.manager = self.world.new_manager()
        self.plans, self.graphs = [], []
        self.backend.done.clear()

    # --- always

    @invariant()
    def bytes_add_up_and_exactly_what_live_graphs_read_is_pinned(self) -> None:
        if not hasattr(self, "world"):
            return
        report = self.world.assert_bytes_add_up()
        assert report.budget_bytes == self.budget_bytes
        pins: Counter[tuple[Any, ...]] = Counter()
        for live in self.graphs:
            if live.plan.route == "planned":
                pins[OWNERS[live.site], live.plan.class_rows, live.ubatch] += 1
                pins[SITES[live.site].lane, live.ubatch] += 1
        found = Counter({(line.site, line.class_rows, line.ubatch): line.num_pins for line in report.plans})
        found.update({(line.lane, line.ubatch): line.num_pins for line in report.arenas})
        assert +found == pins
        assert report.num_graphs == len(self.graphs)
        if self.on_miss != "mint":
            assert report.counters["compiles_after_seal"] == 0

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.graphs.clear()
            self.world.manager.close()
            assert self.world.device.live_bytes == 0


TestManagerLife = ManagerLife.TestCase
TestManagerLife.settings = settings(
    max_examples=32,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
