"""Uses of one buffer are in one order, whatever the streams they are launched on (C29).

The fake device raises at a launch that another stream's use of the same block may overlap, and when a block is freed
behind another stream than the one that used it last.
"""

from __future__ import annotations

import threading

import pytest

from planlife.item import State
from planlife.testing import FakeDevice
from planlife.testing.fakes import FakeBuffer

from .fake_world import Captured, FakeWorld


class CountingDevice(FakeDevice):
    """Counts the waits."""

    num_waits = 0

    def order_after(self, stream: int) -> None:
        self.num_waits += 1
        super().order_after(stream)


def two_stream_world(**options: object) -> tuple[FakeWorld, CountingDevice]:
    device = CountingDevice()
    world = FakeWorld(device=device, **options)  # type: ignore[arg-type]
    world.warm()
    return world, device


def test_a_decode_on_another_stream_waits_for_the_refresh() -> None:
    world, device = two_stream_world()
    device.stream = 1
    plan = world.manager.plan_for(world.step([3, 5]))
    device.stream = 2
    assert world.decode(plan) == [3, 5]


def test_a_refresh_on_another_stream_waits_for_the_decode_before_it() -> None:
    world, device = two_stream_world()
    for stream in (1, 2, 1, 2):
        device.stream = stream
        plan = world.manager.plan_for(world.step([stream, 5]))
        device.stream = 3 - stream
        assert world.decode(plan) == [stream, 5]


def test_one_stream_never_waits() -> None:
    world, device = two_stream_world()
    graph = Captured(world, world.step([1, 1]))
    for _ in range(3):
        step = world.step([4, 2])
        world.manager.plan_for(step)
        world.manager.replay(graph.g, step)
        world.run([3, 5])
    world.manager.trim(0)
    world.run([3, 5])
    assert device.num_waits == 0


def test_layers_on_one_stream_wait_once() -> None:
    world, device = two_stream_world()
    device.stream = 1
    plan = world.manager.plan_for(world.step([3, 5]))
    device.stream = 2
    waits = []
    for _layer in range(5):
        world.decode(plan)
        waits.append(device.num_waits)
    assert waits[0] > 0 and len(set(waits)) == 1


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("how", ["replay", "guard"])
def test_a_replay_waits_for_what_other_streams_did_with_its_plans(in_graph: bool, how: str) -> None:
    world, device = two_stream_world()
    device.stream = 1
    graph = Captured(world, world.step([1, 1]), in_graph=in_graph)
    for stream in (2, 3, 1):
        device.stream = 1
        step = world.step([4, stream])
        world.manager.plan_for(step)
        device.stream = stream
        if how == "replay":
            world.manager.replay(graph.g, step)
        else:
            world.manager.guard(graph.g, step)
            graph.g.replay()
        assert graph.output == [4, stream]


def test_scratch_that_another_class_used_on_another_stream_is_waited_for() -> None:
    """One arena for all classes of a lane."""
    world, device = two_stream_world()
    device.stream = 1
    world.run([3, 5])
    device.stream = 2
    assert world.run([3, 5, 7]) == [3, 5, 7]


def test_an_evicted_block_is_freed_behind_the_stream_that_used_it_last() -> None:
    world, device = two_stream_world()
    device.stream = 1
    plan = world.manager.plan_for(world.step([3, 5]))
    device.stream = 2
    world.decode(plan)
    device.stream = 3
    assert world.manager.trim(0) > 0
    assert device.live_bytes == 0
    assert world.run([3, 5]) == [3, 5]


def test_a_recording_waits_for_nothing_outside_its_graph() -> None:
    """A wait would pull the other stream into the capture; its replays are ordered instead."""
    world, device = two_stream_world()
    device.stream = 1
    step = world.step([3, 5])
    world.run([3, 5])
    world.manager.plan_for(step)
    device.stream = 2
    num_waits = device.num_waits
    call = world.call(2)
    with world.manager.graph() as g:
        world.manager.pa_decode(world.manager.plan_for(step), **call)
    assert device.num_waits == num_waits
    world.manager.replay(g, step)
    assert call["output"].values == [3, 5]


def test_the_double_does_see_a_use_that_was_not_ordered() -> None:
    """The positive control of all of them."""

    class Unordered(FakeDevice):
        def order_after(self, stream: int) -> None:
            pass

    world = FakeWorld(device=Unordered())
    world.warm()
    world.device.stream = 1
    with pytest.raises(AssertionError, match="stream 1 uses a block while stream 0 may still be using it"):
        world.run([3, 5])
    world.device.stream = 0


def test_a_block_that_another_thread_evicts_while_it_is_planned_is_freed_behind_that_plan() -> None:
    """plan_for takes the tables on stream 2, where they were last used on stream 1; in that moment they are evicted."""

    class Evicting(CountingDevice):
        """Where the manager orders the streams, another thread trims; what it frees stays usable for work in flight."""

        freed_behind: list[int]
        trimming: threading.Thread | None = None

        def order_after(self, stream: int) -> None:
            super().order_after(stream)
            if self.trimming is None:
                self.trimming = threading.Thread(target=world.manager.trim, args=(0,))
                self.trimming.start()
                self.trimming.join(0.2)  # unless it has to wait for this thread

        def free(self, buffer: FakeBuffer, stream: int) -> None:
            self.freed_behind.append(stream)

    device = Evicting()
    device.freed_behind = []
    world = FakeWorld(device=device)
    world.warm(2)
    device.stream = 2
    planned = world.manager.plan_for(world.step([3, 5]))
    assert device.trimming is not None
    device.trimming.join()
    assert planned.item.state is State.EVICTED  # type: ignore[union-attr]
    assert device.freed_behind == [2, 0]  # the plan, and the arena that no decode took yet
