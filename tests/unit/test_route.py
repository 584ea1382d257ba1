"""One decision: what decide() answers is what plan_for then does, and what guard holds a graph's route against."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest

from planlife import ConfigError, PlanlifeError, StalePlanError
from planlife.testing import FakeBackend

from .fake_world import Captured, FakeWorld, live_lens_fallback

STATES = (
    "never minted",
    "resident",
    "evicted",
    "no room",
    "refused class",
    "refused step",
    "refused site",
    "beyond the ladder",
    "dummy",
    "no rows",
)


def world_in(state: str, **options: Any) -> tuple[FakeWorld, Any]:
    """A world in that state, and a step that meets it."""
    backend = FakeBackend()
    if state == "no room":
        options |= {"ubatches": 2, "budget_bytes": FakeWorld(rows=4, **options).manager.min_budget_bytes()}
    if state == "refused site":
        backend.spec_reasons = ["not this one"]
    world = FakeWorld(rows=4, backend=backend, **options)
    if state in ("resident", "evicted", "no room", "beyond the ladder"):
        world.warm()
    if state == "evicted":
        world.manager.trim(0)
    if state == "no room":
        world.manager.plan_for(world.step([5] * 4, ubatch=1))
        world.held = Captured(world, world.step([5] * 4, ubatch=1))  # type: ignore[attr-defined]
    if state == "refused class":
        backend.inject(method="compile", error=ConfigError("too large"))
        with world.manager.capture_phase():
            try:
                world.manager.warm(4)
            except ConfigError:
                backend.inject(at=10**9)
    if state == "refused step":
        backend.step_reasons = ["not today"]
    world.lens = [type(world.lens[0])(8) for _ in world.lens]
    rows = {"beyond the ladder": 6, "no rows": 0}.get(state, 4)
    return world, world.step([7] * rows, dummy=state == "dummy")


@pytest.mark.parametrize("recording", [False, True], ids=["eager", "recording"])
@pytest.mark.parametrize("state", STATES)
def test_plan_for_does_what_was_decided_and_deciding_changes_nothing(state: str, recording: bool) -> None:
    for on_miss, fallback in product(("fallback", "raise", "mint"), (None, live_lens_fallback)):
        try:
            world, step = world_in(state, on_miss=on_miss, fallback=fallback)
        except ConfigError:
            assert state == "refused site" and fallback is None
            continue
        manager = world.manager
        slot, (rows, *_) = manager._inspect(step)
        before, calls = manager.report().to_dict(), world.backend.calls.copy()
        decision = manager._decide(slot, step, rows, recording=recording)
        assert {name for name, times in (world.backend.calls - calls).items() if times} <= {"refuse_step"}
        assert manager.report().to_dict() == before

        graph = world.device.new_graph()
        found: object
        with world.device.record(graph) if recording else nullcontext():
            try:
                found = manager.plan_for(step).route
            except PlanlifeError as error:
                found = type(error)
        wanted = decision.route if decision.error is None else type(decision.error())
        assert found == wanted, (state, on_miss, fallback)


@pytest.mark.parametrize("in_graph", [False, True], ids=["before replay", "in graph"])
@pytest.mark.parametrize("state", ["never minted", "evicted", "no room", "refused class", "refused step"])
@pytest.mark.parametrize("on_miss", ["fallback", "raise", "mint"])
def test_a_graph_of_the_fallback_is_replayed_for_a_new_step_where_nothing_changed(
    on_miss: str, state: str, in_graph: bool
) -> None:
    """C92."""
    world, step = world_in(state, on_miss=on_miss, fallback=live_lens_fallback)
    if not in_graph:
        try:
            if world.manager.plan_for(step).route != "fallback":
                pytest.skip("outside a recording this step is planned")
        except PlanlifeError:
            pytest.skip("outside a recording this step is refused")
    captured = Captured(world, step, in_graph=in_graph)
    for lens in ([1, 2, 3, 4], [9, 9, 9, 9]):
        world.manager.guard(captured.g, world.step(lens))
        world.manager.replay(captured.g, world.step(lens))


def test_guard_holds_a_graphs_route_against_the_decision_of_now() -> None:
    """The positive control: where the decision is another one by now, so is the answer."""
    world, step = world_in("evicted", fallback=live_lens_fallback)
    captured = Captured(world, step, in_graph=True)
    world.manager.guard(captured.g, world.step([1, 2, 3, 4]))
    world.run([7] * 4)  # brings the class back
    with pytest.raises(StalePlanError, match="route: found planned, wanted fallback"):
        world.manager.guard(captured.g, world.step([1, 2, 3, 4]))
