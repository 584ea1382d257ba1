"""A call that the backend refuses changes nothing: neither what is resident, nor what a graph pins and reads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from planlife import BudgetError, CapacityLadder, ConfigError, MintError, StalePlanError
from planlife.testing import FakeBackend, FakeDevice
from tests.unit.fake_world import FakeWorld, spec

SITES = {"a": spec(), "b": spec(lane="other")}


def refuse_by_check(backend: FakeBackend) -> None:
    backend.call_reasons = ["another scale"]


def refuse_by_decode(backend: FakeBackend) -> None:
    backend.inject(method="decode", error=ConfigError("another scale"))


refusals = pytest.mark.parametrize("refuse", [refuse_by_check, refuse_by_decode])


def state(world: FakeWorld) -> tuple[Any, ...]:
    """What a user sees, and what was launched."""
    return world.manager.report().to_dict(), world.backend.calls["refresh"], world.device.executed[:]


def test_a_refused_call_of_an_evicted_plan_refreshes_evicts_and_brings_back_nothing() -> None:
    ladder = CapacityLadder([2])
    budget = FakeWorld(sites=SITES, rows=2, ladder=ladder).manager.min_budget_bytes()
    world = FakeWorld(sites=SITES, rows=2, ladder=ladder, budget_bytes=budget)
    world.warm()
    plan = world.manager.plan_for(world.step([3, 4], site="a"))
    owner = world.owner
    world.run([3, 4], site="b")
    plan = world.manager.plan_for(world.step([3, 4], site="a", owner=owner))
    other = world.manager.plan_for(world.step([3, 4], site="b"))
    assert plan.native is None and other.native is not None
    before = state(world)
    world.backend.call_reasons = ["another scale"]
    with pytest.raises(ConfigError, match="another scale"):
        world.decode(plan)
    assert state(world) == before
    world.backend.call_reasons = []
    world.run([3, 4], site="a")
    assert state(world) != before


def test_a_call_by_tables_that_hold_its_lengths_is_not_checked_twice() -> None:
    world = FakeWorld()
    world.warm()
    plan = world.manager.plan_for(world.step([3, 4]))
    world.decode(plan)
    assert world.backend.calls["check_call"] == 0
    world.manager.invalidate()
    world.decode(plan)
    assert world.backend.calls["check_call"] == 1


@refusals
@pytest.mark.parametrize("sanitize", ["off", "count"])
def test_a_refused_call_of_a_recording_pins_nothing_and_the_graph_reads_nothing_of_it(
    refuse: Any, sanitize: str
) -> None:
    world = FakeWorld(sites=SITES, sanitize=sanitize)
    world.warm()
    step, other = world.step([3, 4], site="a"), world.step([3, 4], site="b", owner=7)
    kept = world.call(2, "b")
    plan, other_plan = world.manager.plan_for(step), world.manager.plan_for(other)
    with world.manager.graph() as g:
        refuse(world.backend)
        with pytest.raises(ConfigError, match="another scale"):
            world.decode(plan)
        assert world.manager.report().pinned_bytes == 0
        world.backend.call_reasons = []
        world.manager.pa_decode(other_plan, **kept)
    pinned = {name for name, found in world.states().items() if found == "pinned"}
    assert pinned == {"b/2/ub0", "scratch/other/ub0"}
    world.manager.replay(g, other)
    world.manager.release(g)
    assert world.assert_bytes_add_up().pinned_bytes == 0


@refusals
def test_a_refused_call_leaves_what_its_graph_read_before(refuse: Any) -> None:
    world = FakeWorld()
    world.warm()
    step = world.step([3, 4])
    plan, kept = world.manager.plan_for(step), world.call(2)
    with world.manager.graph() as g:
        world.manager.pa_decode(plan, **kept)
        refuse(world.backend)
        with pytest.raises(ConfigError, match="another scale"):
            world.decode(plan)
    assert world.states()["default/2/ub0"] == "pinned"
    world.manager.replay(g, step)


@refusals
def test_a_refused_call_is_no_decode_of_an_in_graph_refresh(refuse: Any) -> None:
    world = FakeWorld()
    world.warm()
    events: list[Any] = []
    world.manager.add_hook(events.append)
    step = world.step([3, 4])
    with world.manager.graph() as g:
        plan = world.manager.plan_for(step)
        refuse(world.backend)
        with pytest.raises(ConfigError, match="another scale"):
            world.decode(plan)
    assert world.states()["default/2/ub0"] == "pinned"  # the refresh is in the graph
    assert [event.kind for event in events].count("stale") == 1
    world.manager.release(g)


def test_a_decode_that_failed_half_way_stays_read_by_its_graph() -> None:
    world = FakeWorld(backend=FakeBackend(max_plan_rows=1))
    world.warm()
    step = world.step([3, 4])
    plan, kept = world.manager.plan_for(step), world.call(2)
    with world.manager.graph() as g:
        world.backend.inject(2, method="decode", error=ConfigError("the second segment"))
        with pytest.raises(ConfigError, match="the second segment"):
            world.manager.pa_decode(plan, **kept)
    assert world.states()["default/2/ub0"] == "pinned"
    world.manager.replay(g, step)


def test_a_decode_that_failed_otherwise_may_have_recorded_something_and_stays_read_by_its_graph() -> None:
    world = FakeWorld()
    world.warm()
    step = world.step([3, 4])
    plan, kept = world.manager.plan_for(step), world.call(2)
    with world.manager.graph() as g:
        world.backend.inject(method="decode", error=OSError("a launch"))
        with pytest.raises(OSError, match="a launch"):
            world.manager.pa_decode(plan, **kept)
    assert world.states()["default/2/ub0"] == "pinned"
    with pytest.raises(StalePlanError, match="was given no step for it"):
        world.manager.guard(g)
    world.manager.guard(g, step)


def test_the_graph_of_a_refused_call_is_none_that_pins_and_keeps_no_buffer() -> None:
    ladder = CapacityLadder([2])
    buffers: list[weakref.ref[Any]] = []
    device = FakeDevice()
    allocate = device.allocate

    def watched(num_bytes: int) -> Any:
        buffer = allocate(num_bytes)
        buffers.append(weakref.ref(buffer))
        return buffer

    device.allocate = watched  # type: ignore[method-assign]
    budget_bytes = FakeWorld(sites=SITES, rows=2, ladder=ladder).manager.min_budget_bytes()
    world = FakeWorld(sites=SITES, rows=2, ladder=ladder, device=device, budget_bytes=budget_bytes)
    world.warm()
    with world.manager.capture_phase():
        plan = world.manager.plan_for(world.step([3, 4], site="a"))
    refuse_by_decode(world.backend)  # behind the pin, and not before it as by its check
    with world.manager.graph() as g, pytest.raises(ConfigError, match="another scale"):
        world.decode(plan)
    world.manager.trim(0)
    gc.collect()
    assert [one for one in buffers if one() is not None] == []

    with world.manager.capture_phase():
        kept, layer = world.manager.plan_for(world.step([3, 4], site="a")), world.call(2, "a")
        with world.manager.graph() as other:
            world.manager.pa_decode(kept, **layer)
        with pytest.raises(BudgetError, match=r"pinned by 1 graph\."):
            world.manager.plan_for(world.step([3, 4], site="b"))
    world.manager.release(g)
    world.manager.release(other)


def test_a_fallback_that_refuses_is_not_read_by_the_graph() -> None:
    def refuse(*call: Any, **extras: Any) -> None:
        raise MintError("not compiled")

    world = FakeWorld(fallback=refuse)
    with world.manager.graph() as g:
        plan = world.manager.plan_for(world.step([3, 4]))
        assert plan.route == "fallback"
        with pytest.raises(MintError, match="not compiled"):
            world.decode(plan)
    world.manager.guard(g)  # and takes no step for it
