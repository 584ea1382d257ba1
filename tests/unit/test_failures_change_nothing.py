"""A call that fails leaves everything as it was, whichever backend call or allocation fails inside it.

What is compared is what a user can see: the report, the device's bytes, what later decodes do, and who is evicted next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from planlife import BudgetError, CapacityLadder, StalePlanError, Step
from planlife.testing import FakeBackend, FakeTensor
from tests.unit.fake_world import Captured, FakeWorld, Owner, live_lens_fallback, spec


class Fault(Exception):
    """Injected."""


@dataclass
class Scene:
    """A world that was brought into a state, and the call to be tried in it."""

    world: FakeWorld
    act: Callable[[], object]
    plans: list[Any] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)


def small_world(**options: Any) -> FakeWorld:
    """One site, three classes whose pairs take the same block; the budget holds the arena and two of them."""
    sites = spec(max_partitions=1)
    ladder = CapacityLadder([2, 3, 4])
    free = FakeWorld(sites=sites, rows=4, ladder=ladder)
    pair = (free.manager.worst_case_bytes() - free.manager.min_budget_bytes()) // 2
    budget = free.manager.min_budget_bytes() + pair
    return FakeWorld(**{"sites": sites, "rows": 4, "ladder": ladder, "budget_bytes": budget, **options})


def own_step(rows: int, length: int = 5, **fields: Any) -> Step:
    """A step over a length buffer of its own."""
    owner = Owner()
    step = Step(FakeTensor(rows, values=[length] * rows), owner=owner, **fields)
    KEPT.append(owner)
    return step


KEPT: list[object] = []


def eager_scene(act: Callable[[FakeWorld], object], *rows: int, **options: Any) -> Scene:
    """Classes planned one after another; their StepPlans are decoded later."""
    world = small_world(**options)
    world.warm()
    plans = [world.manager.plan_for(own_step(count)) for count in rows]
    return Scene(world, lambda: act(world), plans)


def warm_a_class() -> Scene:
    world = small_world()
    phase = world.manager.capture_phase()
    phase.__enter__()
    world.manager.warm(2)
    scene = Scene(world, lambda: world.manager.warm(3), [world.manager.plan_for(own_step(2))])
    scene.keep.append(phase)
    return scene


def plan_for_a_miss_that_evicts() -> Scene:
    step = own_step(2, 7)
    return eager_scene(lambda world: world.manager.plan_for(step), 3, 4, on_miss="raise")


def plan_for_a_miss_that_evicts_around_what_it_keeps() -> Scene:
    """The victims are not the oldest items in a row: the arena of the newcomer's lane lies between them."""
    sites = {"big": spec(), "small": spec(lane="small")}
    ladders = {"big": CapacityLadder([2, 64]), "small": CapacityLadder([2])}
    free = FakeWorld(sites=sites, rows=64, ladder=ladders)
    free.warm()
    pair_bytes = {(line.site, line.class_rows): line.num_bytes for line in free.manager.report().plans}
    victims_bytes = pair_bytes["big", 2] + pair_bytes["small", 2]
    budget_bytes = free.manager.worst_case_bytes() - victims_bytes
    world = FakeWorld(sites=sites, rows=64, ladder=ladders, on_miss="raise", budget_bytes=budget_bytes)
    with world.manager.capture_phase():
        world.manager.plan_for(own_step(64, site="big"))
    world.manager.trim(0)
    world.warm(2)
    plans = [world.manager.plan_for(own_step(2, site=site)) for site in sites]
    assert world.device.live_bytes == free.manager.worst_case_bytes() - pair_bytes["big", 64]
    step = own_step(64, 7, site="big")
    return Scene(world, lambda: world.manager.plan_for(step), plans)


def plan_for_a_hit_that_refreshes() -> Scene:
    step = own_step(4, 7)
    return eager_scene(lambda world: world.manager.plan_for(step), 4, 3)


def plan_for_a_new_class_in_a_phase() -> Scene:
    world = small_world()
    phase = world.manager.capture_phase()
    phase.__enter__()
    plans = [world.manager.plan_for(own_step(count)) for count in (2, 4)]
    step = own_step(3, 7)
    return Scene(world, lambda: world.manager.plan_for(step), plans, [phase])


def decode_that_rematerialises() -> Scene:
    scene = eager_scene(lambda world: None, 2, 3, 4)  # 2 was evicted for 4
    scene.act = lambda: scene.world.decode(scene.plans[0])
    return scene


def decode_that_refreshes() -> Scene:
    scene = eager_scene(lambda world: None, 4, 4)
    scene.act = lambda: scene.world.decode(scene.plans[0])
    return scene


def decode() -> Scene:
    scene = eager_scene(lambda world: None, 4)
    scene.act = lambda: scene.world.decode(scene.plans[0])
    return scene


def decode_with_the_sanitizer() -> Scene:
    scene = eager_scene(lambda world: None, 4, sanitize="count")
    scene.act = lambda: scene.world.decode(scene.plans[0])
    return scene


def decode_in_segments() -> Scene:
    world = FakeWorld(rows=5, ladder=CapacityLadder([5]), backend=FakeBackend(max_plan_rows=2))
    world.warm()
    plans = [world.manager.plan_for(own_step(5)) for _ in range(2)]
    return Scene(world, lambda: world.decode(plans[0]), plans)


def decode_in_parts() -> Scene:
    world = FakeWorld(rows=8, ladder=CapacityLadder([2]))
    world.warm()
    plan = world.manager.plan_for(own_step(5))
    return Scene(world, lambda: world.decode(plan), [world.manager.plan_for(own_step(2))])


def capture(in_graph: bool) -> Scene:
    world = small_world()
    world.warm()
    step = own_step(4)
    call = world.call(4)

    def act() -> object:
        plan = None if in_graph else world.manager.plan_for(step)
        with world.manager.graph() as g:
            world.manager.pa_decode(world.manager.plan_for(step) if plan is None else plan, **call)
        return g

    return Scene(world, act, [world.manager.plan_for(own_step(3)), world.manager.plan_for(step)])


def capture_before_replay() -> Scene:
    return capture(in_graph=False)


def capture_in_graph() -> Scene:
    return capture(in_graph=True)


def guard_with_a_dummy() -> Scene:
    """Emptying the tables of a before-replay graph is a refresh."""
    world = small_world()
    world.warm()
    step = world.step([5] * 4)
    captured = Captured(world, step)
    dummy = Step(step.context_lens, dummy=True)
    return Scene(world, lambda: world.manager.guard(captured.g, dummy), keep=[captured])


def replay_with_a_dummy() -> Scene:
    scene = guard_with_a_dummy()
    captured = scene.keep[0]
    dummy = Step(scene.world.lens[0][:4], dummy=True)
    scene.act = lambda: scene.world.manager.replay(captured.g, dummy)
    return scene


SCENES = [
    warm_a_class,
    plan_for_a_miss_that_evicts,
    plan_for_a_miss_that_evicts_around_what_it_keeps,
    plan_for_a_hit_that_refreshes,
    plan_for_a_new_class_in_a_phase,
    decode_that_rematerialises,
    decode_that_refreshes,
    decode,
    decode_with_the_sanitizer,
    decode_in_segments,
    decode_in_parts,
    capture_before_replay,
    capture_in_graph,
    guard_with_a_dummy,
    replay_with_a_dummy,
]


def visible(world: FakeWorld) -> dict[str, Any]:
    report = world.manager.report().to_dict()
    report.pop("peak_bytes")
    return {**report, "live bytes": world.device.live_bytes}


def aftermath(scene: Scene) -> list[Any]:
    """What later calls do: decodes by the plans that exist, then evictions one at a time. Uses the world up."""
    world = scene.world
    seen: list[Any] = [world.decode(plan) for plan in scene.plans]
    if not scene.plans:
        seen.append(world.run([6] * 4))
    world.manager.add_hook(lambda event: seen.append(event.subject) if event.kind == "evict" else None)
    world.manager.trim(0)
    return seen


def eviction_order(scene: Scene) -> list[str]:
    """Who goes first when nothing is used any more. Uses the world up."""
    order: list[str] = []
    scene.world.manager.add_hook(lambda event: order.append(event.subject) if event.kind == "evict" else None)
    scene.world.manager.trim(0)
    return order


def count_points(make_scene: Callable[[], Scene]) -> tuple[int, int]:
    """(backend calls, allocations) that the act makes when nothing fails."""
    scene = make_scene()
    calls, allocations = scene.world.backend.calls.total(), scene.world.device.num_allocations
    scene.act()
    return scene.world.backend.calls.total() - calls, scene.world.device.num_allocations - allocations


def fail_at(scene: Scene, what: str, point: int) -> tuple[str, Exception]:
    """(backend method that failed, or "allocate"; the error) of the act with a fault at that point."""
    failed = ["allocate"]
    if what == "backend":
        real_count = scene.world.backend._count

        def count(method: str) -> None:
            try:
                real_count(method)
            except Fault:
                failed[0] = method
                raise

        scene.world.backend._count = count  # type: ignore[method-assign]
        scene.world.backend.inject(point, error=Fault("injected"))
    else:
        scene.world.device.fail_at = point
    with pytest.raises(Fault if what == "backend" else BudgetError) as caught:
        scene.act()
    return failed[0], caught.value


@pytest.mark.parametrize("what", ["backend", "allocation"])
@pytest.mark.parametrize("make_scene", SCENES, ids=lambda make_scene: make_scene.__name__)
def test_a_call_that_fails_changes_nothing_and_the_next_one_works(make_scene: Callable[[], Scene], what: str) -> None:
    """C24: with the fault at each point in turn."""
    num_calls, num_allocations = count_points(make_scene)
    points = num_calls if what == "backend" else num_allocations
    fine = make_scene()
    before = visible(fine.world)
    fine.act()
    fine_after, fine_states, fine_aftermath = visible(fine.world), fine.world.states(), aftermath(fine)
    untouched_order = eviction_order(make_scene())
    untouched_aftermath = aftermath(make_scene())
    assert what == "allocation" or points > 0
    for point in range(1, points + 1):
        scene = make_scene()
        assert visible(scene.world) == before
        failed, _ = fail_at(scene, what, point)
        after = visible(scene.world)
        if failed == "refresh":
            # The tables are half written and the plan that was brought in for them is there; nothing else moved.
            expected = {
                **before,
                **{key: fine_after[key] for key in ("plans", "arenas", "resident_bytes", "live bytes")},
            }
            if "graph" not in make_scene.__name__ and "replay" not in make_scene.__name__:
                assert {**after, "counters": 0} == {**expected, "counters": 0}
            if make_scene is not decode_in_parts:  # its parts before the one that failed did refresh
                assert after["counters"]["refreshes"] == before["counters"]["refreshes"]
        elif failed in ("check_call", "decode", "sanitize"):
            # Planning was done and stands; the decode is what failed.
            assert after["pinned_bytes"] == before["pinned_bytes"]
        else:
            after["counters"]["releases"] = before["counters"]["releases"]  # a capture that failed is one
            assert after == before
            assert eviction_order(refail(make_scene, what, point)) == untouched_order
            assert aftermath(refail(make_scene, what, point)) == untouched_aftermath
        scene.world.assert_bytes_add_up()
        scene.act()  # the next call works
        assert scene.world.states() == fine_states
        assert scene.world.device.live_bytes == fine_after["live bytes"]
        assert scene.world.manager.report().pinned_bytes == fine_after["pinned_bytes"]
        assert aftermath(scene) == fine_aftermath
        scene.world.assert_bytes_add_up()
    KEPT.clear()
    gc.collect()


def refail(make_scene: Callable[[], Scene], what: str, point: int) -> Scene:
    scene = make_scene()
    fail_at(scene, what, point)
    return scene


def test_serving_falls_back_when_the_allocator_has_no_memory() -> None:
    """C24: the reason says so, the state is as before, and memory that comes back is used again."""
    world = small_world(fallback=live_lens_fallback)
    world.warm()
    for rows in (3, 4):
        world.run([1] * rows)
    for point in (1, 2):
        world.manager.trim(0)
        world.device.fail_at = point
        step = own_step(2, 7)
        plan = world.manager.plan_for(step)
        assert plan.route == "fallback"
        assert plan.reason.startswith("out of memory")
        assert "injected" in plan.reason and "Take worst_case_bytes() off the KV pool" in plan.reason
        assert world.decode(plan) == [7, 7]
        assert world.device.live_bytes == 0
        again = world.manager.plan_for(step)  # memory came back: the same step need not go on without a plan
        assert again.route == "planned"
        assert world.decode(again) == world.decode(plan) == [7, 7]


@pytest.mark.parametrize("second", ["allocation", "make_tables"])
def test_a_victim_that_cannot_be_brought_back_is_evicted_and_leaks_nothing(second: str) -> None:
    """C24, twice: the allocator fails for the newcomer, and then something fails for the victim."""
    world = small_world(on_miss="raise")
    world.warm()
    plans = [world.manager.plan_for(own_step(rows)) for rows in (3, 4)]
    real_allocate = world.device.allocate
    world.device.allocate = failing_twice(world, second)  # type: ignore[method-assign]
    with pytest.raises(BudgetError):
        world.manager.plan_for(own_step(2))
    world.device.allocate = real_allocate  # type: ignore[method-assign]
    assert world.states()["default/3/ub0"] == "evicted"
    assert "could not be brought back" in next(
        line.note for line in world.manager.report().plans if line.class_rows == 3
    )
    world.assert_bytes_add_up()
    assert [world.decode(plan) for plan in plans] == [[5] * 3, [5] * 4]
    assert world.run([7] * 2) == [7] * 2


def failing_twice(world: FakeWorld, second: str) -> Callable[[int], Any]:
    real_allocate = world.device.allocate
    left = [2 if second == "allocation" else 1]

    def allocate(num_bytes: int) -> Any:
        if left[0]:
            left[0] -= 1
            if second == "make_tables":
                world.backend.inject(1, method="make_tables", error=Fault("injected"))
            raise MemoryError("injected")
        return real_allocate(num_bytes)

    return allocate


def test_a_graph_that_cannot_start_to_record_is_left_as_it_was() -> None:
    """An engine's own capture must not be lost to a mistaken call."""
    world = FakeWorld()
    world.warm()
    captured = Captured(world, world.step([5] * 4), in_graph=True)
    engines_own = world.device.new_graph()
    with world.device.record(engines_own):
        pass

    def record_into_both() -> None:
        with world.manager.graph(engines_own):
            raise AssertionError("the body ran")

    with pytest.raises(RuntimeError, match="holds a capture"):
        record_into_both()
    assert engines_own.captured
    world.manager.replay(captured.g, world.step([6] * 4))
    assert captured.output == [6] * 4


@pytest.mark.parametrize("dummy_first", [False, True])
def test_a_guard_that_fails_half_way_foresees_nothing(dummy_first: bool) -> None:
    """The replay does not happen, so no mark may say that it did."""
    world = FakeWorld(sites={"inside": spec(), "before": spec()}, ubatches=2)
    world.warm()
    inside, before = world.step([5] * 4, site="inside"), world.step([6] * 4, site="before", ubatch=1)
    calls = world.call(4), world.call(4)
    eager = world.manager.plan_for(before)
    with world.manager.graph() as both:
        if dummy_first:
            world.manager.pa_decode(eager, **calls[1])
        plan = world.manager.plan_for(inside)
        world.manager.pa_decode(plan, **calls[0])
        if not dummy_first:
            world.manager.pa_decode(eager, **calls[1])
    reader_call = world.call(4)
    with world.manager.graph() as reader:  # reads what the other graph refreshes
        world.manager.pa_decode(plan, **reader_call)
    world.manager.replay(both, inside, before)
    assert calls[0]["output"].values == [5] * 4
    later = world.step([7] * 4, site="inside")
    dummy = Step(before.context_lens, site="before", ubatch=1, dummy=True)
    world.backend.inject(1, method="refresh", error=Fault("injected"))
    with pytest.raises(Fault):
        world.manager.guard(both, later, dummy)
    with pytest.raises(StalePlanError):
        world.manager.replay(reader, later)
    world.manager.replay(both, later, dummy)  # positive control
    assert calls[1]["output"].values == [0] * 4
    world.manager.replay(reader, later)
    assert reader_call["output"].values == [7] * 4


def test_a_replay_that_fails_leaves_no_mark_of_what_it_would_have_done() -> None:
    world = FakeWorld()
    world.warm()
    step = world.step([5] * 4)
    calls = world.call(4), world.call(4)
    with world.manager.graph() as writer:
        plan = world.manager.plan_for(step)
        world.manager.pa_decode(plan, **calls[0])
    with world.manager.graph() as reader:  # reads what the other graph refreshes
        world.manager.pa_decode(plan, **calls[1])
    world.manager.replay(writer, step)
    later = world.step([7] * 4)
    real_replay = world.device.replay

    def fails(graph: Any) -> None:
        raise Fault("injected")

    world.device.replay = fails  # type: ignore[method-assign]
    with pytest.raises(Fault):
        world.manager.replay(writer, later)
    world.device.replay = real_replay  # type: ignore[method-assign]
    with pytest.raises(StalePlanError):
        world.manager.replay(reader, later)
    world.manager.replay(writer, later)
    world.manager.replay(reader, later)
    assert calls[1]["output"].values == [7] * 4
