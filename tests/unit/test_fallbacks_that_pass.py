"""C101: a step that fell back for something that has passed since is planned, by whoever asks again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from planlife import CapacityLadder, StalePlanError, Step
from planlife.device import block_bytes
from planlife.testing import FakeDevice
from planlife.testing.fakes import FakeBuffer
from tests.unit.fake_world import Captured, FakeWorld, Owner, live_lens_fallback, spec

LENS = [9, 5]


class SmallDevice(FakeDevice):
    """Has memory for `limit_bytes` only, whatever the budget says: others hold the rest."""

    limit_bytes = 1 << 40

    def allocate(self, num_bytes: int) -> FakeBuffer:
        if self.live_bytes + block_bytes(num_bytes) > self.limit_bytes:
            raise MemoryError(f"no {num_bytes} bytes")
        return super().allocate(num_bytes)


class Case:
    """A step of two rows that has just fallen back, and graphs of other classes."""

    def __init__(self, device: FakeDevice | None = None, **options: Any) -> None:
        self.world = FakeWorld(
            sites=spec(max_partitions=1),
            rows=4,
            ladder=CapacityLadder([2, 3, 4]),
            fallback=live_lens_fallback,
            device=device,
            **options,
        )
        self.graphs: list[Captured] = []

    def fall_back(self, reason: str) -> Case:
        self.step = self.world.step(LENS)
        plan = self.world.manager.plan_for(self.step)
        assert plan.route == "fallback" and reason in plan.reason
        return self


def pinned_full() -> Case:
    """The budget holds two pairs, and graphs pin both."""
    free = Case().world
    free.warm()
    pair_bytes = free.manager.report().plans[0].num_bytes
    case = Case(budget_bytes=free.manager.min_budget_bytes() + pair_bytes)
    case.world.warm()
    case.graphs = [Captured(case.world, case.world.step([1] * rows)) for rows in (3, 4)]
    return case.fall_back("no room in the budget")


def out_of_memory() -> Case:
    """The budget has room, the allocator has not; nothing is pinned."""
    device = SmallDevice()
    case = Case(device)
    case.world.warm()
    case.world.manager.trim(0)
    case.world.run([1] * 3)
    case.world.run([1] * 4)
    device.limit_bytes = device.live_bytes
    return case.fall_back("out of memory")


def never_minted() -> Case:
    case = Case()
    case.world.warm([3, 4])
    return case.fall_back("never minted")


def release(case: Case) -> None:
    case.world.manager.release(case.graphs[0].g)


def reset(case: Case) -> None:
    case.graphs[0].g.reset()


def collect(case: Case) -> None:
    case.graphs.pop()
    gc.collect()


def trim(case: Case) -> None:
    assert case.world.manager.trim(0) > 0


def others_give_back(case: Case) -> None:
    """Nobody tells the manager of that."""
    case.world.device.limit_bytes = 1 << 40  # type: ignore[attr-defined]


def invalidate(case: Case) -> None:
    others_give_back(case)
    case.world.manager.invalidate()


def warm(case: Case) -> None:
    case.world.warm(2)


PASSES = [
    (pinned_full, release),
    (pinned_full, reset),
    (pinned_full, collect),
    (out_of_memory, trim),
    (out_of_memory, others_give_back),
    (out_of_memory, invalidate),
    (never_minted, warm),
]
passes = pytest.mark.parametrize(
    ("make", "pass_by"), PASSES, ids=[f"{make.__name__}, {pass_by.__name__}" for make, pass_by in PASSES]
)


@passes
def test_the_step_is_planned_when_it_is_asked_for_again(
    make: Callable[[], Case], pass_by: Callable[[Case], None]
) -> None:
    case = make()
    assert case.world.manager.plan_for(case.step).route == "fallback"  # positive control: asking alone changes nothing
    pass_by(case)
    plan = case.world.manager.plan_for(case.step)
    assert plan.route == "planned"
    assert case.world.decode(plan) == LENS


@pytest.mark.parametrize(
    ("make", "pass_by"),
    [(make, pass_by) for make, pass_by in PASSES if pass_by is not others_give_back],
    ids=[pass_by.__name__ for _, pass_by in PASSES if pass_by is not others_give_back],
)
def test_a_guard_does_not_hold_an_old_fallback_against_the_step(
    make: Callable[[], Case], pass_by: Callable[[Case], None]
) -> None:
    """What a graph is refused for is that the step was not planned, which plan_for puts right."""
    case = make()
    pass_by(case)
    world = case.world
    captured = Captured(world, Step(case.step.context_lens, owner=Owner()))
    with pytest.raises(StalePlanError) as refusal:
        world.manager.guard(captured.g, case.step)
    assert "fallback" not in str(refusal.value)
    assert world.manager.plan_for(case.step).route == "planned"
    world.manager.replay(captured.g, case.step)
    assert captured.output == LENS


def test_a_closed_manager_lets_go_of_what_a_step_that_fell_back_was_owned_by() -> None:
    """A tuple cannot be held weakly, so it is held until the next answer, or the end."""
    world = FakeWorld(fallback=live_lens_fallback)
    inside = Owner()
    watched = weakref.ref(inside)
    world.manager.plan_for(world.step(LENS, owner=(inside,)))
    del inside, world.owner
    gc.collect()
    assert watched() is not None  # positive control
    world.manager.close()
    gc.collect()
    assert watched() is None
