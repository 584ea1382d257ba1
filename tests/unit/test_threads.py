"""Two ubatches on two threads, and a third that evicts: the same outputs and refreshes as one after the other."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planlife import Step
from planlife.testing import FakeDevice, FakeTensor
from tests.eventually import EVENTUALLY_S
from tests.unit.fake_world import FakeWorld, Owner, spec

NUM_STEPS = 10_000


class LastReferenceDevice(FakeDevice):
    """Frees as torch's allocator does: a block goes with its last reference, and a decode elsewhere may hold one."""

    def free(self, buffer: Any, stream: int) -> None:
        self._account("free", -buffer.num_bytes)


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_threads(*targets: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(EVENTUALLY_S)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if errors:
        raise errors[0]


def test_a_hook_that_one_thread_removes_takes_no_hook_of_another_along() -> None:
    world = FakeWorld()
    heard: list[str] = []

    def add() -> None:
        for _ in range(1000):
            world.manager.add_hook(lambda event: heard.append(event.kind))

    def come_and_go() -> None:
        for _ in range(1000):
            world.manager.add_hook(lambda event: heard.append("removed"))()

    run_threads(add, come_and_go)
    with world.manager.capture_phase():
        pass
    assert heard == ["seal"] * 1000


def serve(world: FakeWorld, ubatch: int, num_steps: int, outputs: list[Any]) -> None:
    """Steps of a few layers; every layer asks for the plan, as engines without a metadata builder do."""
    pick = random.Random(ubatch)
    lens = world.lens[ubatch]
    calls = {rows: world.call(rows) for rows in (1, 2)}
    for number in range(num_steps):
        rows = pick.randint(1, 2)
        one = lens[:rows]
        one.write([pick.randint(0, 4096) for _ in range(rows)])
        step = Step(one, owner=Owner(), ubatch=ubatch)
        owner = step.owner
        for _layer in range(2):
            call = calls[rows]
            world.manager.pa_decode(world.manager.plan_for(step), **call)
            assert call["output"].values == one.values, (ubatch, number)
        outputs.append(call["output"].values)
        del owner


def two_ubatches(num_rows: int = 2) -> FakeWorld:
    device = LastReferenceDevice(num_compute_units=2)
    world = FakeWorld(sites=spec(max_partitions=1), rows=num_rows, ubatches=2, device=device)
    world.warm()
    return world


def test_two_threads_with_an_ubatch_each_do_what_they_would_do_one_after_the_other() -> None:
    """C26: no refresh is lost or done twice."""
    serial, parallel = two_ubatches(), two_ubatches()
    expected: tuple[list[Any], list[Any]] = ([], [])
    found: tuple[list[Any], list[Any]] = ([], [])
    for ubatch in (0, 1):
        serve(serial, ubatch, NUM_STEPS // 2, expected[ubatch])
    run_threads(*(lambda ub=ub: serve(parallel, ub, NUM_STEPS // 2, found[ub]) for ub in (0, 1)))  # type: ignore[misc]
    assert found == expected
    assert parallel.counters == serial.counters
    assert parallel.counters["refreshes"] == NUM_STEPS
    assert parallel.counters["refreshes_skipped"] == NUM_STEPS


def test_a_third_thread_may_evict_at_any_time() -> None:
    """C26, C68: a plan that is gone comes back and is refreshed; no decode uses another step's tables."""
    world = two_ubatches()
    outputs: tuple[list[Any], list[Any]] = ([], [])
    done = threading.Event()

    def trim() -> None:
        is_last = False
        while not is_last:
            is_last = done.is_set()  # once more after that: there is something to evict then
            world.manager.trim(0)

    def serve_both() -> None:
        try:
            run_threads(*(lambda ub=ub: serve(world, ub, 400, outputs[ub]) for ub in (0, 1)))  # type: ignore[misc]
        finally:
            done.set()

    run_threads(trim, serve_both)
    serial = two_ubatches()
    expected: tuple[list[Any], list[Any]] = ([], [])
    for ubatch in (0, 1):
        serve(serial, ubatch, 400, expected[ubatch])
    assert outputs == expected
    counters = world.counters
    assert counters["compiles"] == serial.counters["compiles"]
    assert counters["evictions"] > 0  # positive control: there was something to survive
    assert counters["refreshes"] >= serial.counters["refreshes"] == 800
    world.assert_bytes_add_up()


def test_a_refresh_waits_for_a_decode_of_the_same_plan_to_be_launched() -> None:
    """What a decode compared the mark of is what it launches with."""
    world = FakeWorld(rows=2)
    world.warm()
    first, second = (FakeTensor(2, values=[length] * 2) for length in (3, 4))
    plan = world.manager.plan_for(Step(first, owner=first))
    other = threading.Thread(target=lambda: world.manager.plan_for(Step(second, owner=second)), daemon=True)
    real_decode = world.backend.decode

    def decode(*call: Any) -> None:
        other.start()
        other.join(0.2)
        real_decode(*call)

    world.backend.decode = decode  # type: ignore[method-assign]
    assert world.decode(plan) == [3, 3]
    other.join(EVENTUALLY_S)
    world.backend.decode = real_decode  # type: ignore[method-assign]
    assert world.counters["refreshes"] == 2  # positive control: the other one did come through
    assert world.decode(plan) == [3, 3]


def test_a_mark_is_set_by_the_thread_whose_refresh_was_last() -> None:
    world = FakeWorld(rows=2)
    world.warm()
    first, second = (FakeTensor(2, values=[length] * 2) for length in (3, 4))
    plans: dict[int, Any] = {}
    other = threading.Thread(
        target=lambda: plans.update({4: world.manager.plan_for(Step(second, owner=second))}), daemon=True
    )
    real_refresh = world.backend.refresh

    def refresh(*call: Any) -> None:
        real_refresh(*call)
        if not other.ident:
            other.start()
            other.join(0.2)

    world.backend.refresh = refresh  # type: ignore[method-assign]
    plans[3] = world.manager.plan_for(Step(first, owner=first))
    other.join(EVENTUALLY_S)
    for length, plan in sorted(plans.items()):
        assert world.decode(plan) == [length] * 2


def test_a_thread_that_mints_leaves_its_plans_to_the_others() -> None:
    """No thread-local ownership."""
    world = FakeWorld(ubatches=2)
    run_threads(world.warm)
    assert world.run([3, 4], ubatch=1) == [3, 4]
    assert world.counters["compiles_after_seal"] == 0


def test_threads_that_mint_the_same_class_mint_it_once() -> None:
    world = FakeWorld()
    gate = threading.Barrier(4)

    def mint() -> None:
        gate.wait(EVENTUALLY_S)
        lens = FakeTensor(8, values=[3] * 8)
        world.manager.plan_for(Step(lens, owner=lens))

    with world.manager.capture_phase():
        run_threads(*[mint] * 4)
    assert world.counters["mints"] == 1
    assert world.backend.calls["compile"] == 1
    assert world.counters["misses"] + world.counters["hits"] == 4
    world.assert_bytes_add_up()


def test_recording_on_one_thread_pins_nothing_of_what_another_does() -> None:
    world = FakeWorld(ubatches=2, device=LastReferenceDevice())
    world.warm()
    step, call = world.step([5] * 4), world.call(4)
    with world.manager.graph() as g:
        world.manager.pa_decode(world.manager.plan_for(step), **call)
        run_threads(lambda: serve(world, 1, 5, []), lambda: world.manager.trim(0))
    assert [name for name, state in world.states().items() if state == "pinned"] == [
        "default/4/ub0",
        "scratch/main/ub0",
    ]
    world.manager.replay(g, world.step([6] * 4))
    assert call["output"].values == [6] * 4
