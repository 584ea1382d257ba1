"""adopt(): a graph object is bound to the capture that it holds, or nothing is bound and the call says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, PlanlifeError, PlanManager, RouteError, StalePlanError

from .world import BEFORE_REPLAY, World, both_styles, new_device, small_spec

LENS = [500, 3, 257, 64, 1, 0, 256, 12]


def pins(manager: PlanManager) -> dict[str, int]:
    report = manager.report()
    return {
        **{f"{line.site}/{line.class_rows}/ub{line.ubatch}": line.num_pins for line in report.plans if line.num_pins},
        **{f"scratch/{line.lane}/ub{line.ubatch}": line.num_pins for line in report.arenas if line.num_pins},
    }


def capture_without_plans(world: World, adopted: bool = False) -> Any:
    graph = world.new_graph()
    with world.record(graph):
        if adopted:
            world.manager.adopt(graph)
        world.query.add_(0)
    return graph


def capture_with_plans(world: World, *, adopted: bool = False) -> Any:
    graph = world.new_graph()
    with world.record(graph):
        world.decode(world.manager.plan_for(world.step()))
        if adopted:
            world.manager.adopt(graph)
    return graph


@pytest.mark.parametrize("adopted", ["inside", "after", "inside and after"])
@pytest.mark.parametrize("before", ["nothing", "an adopted capture", "a capture that nobody adopted"])
def test_a_capture_that_touches_no_plan_never_gets_another_graphs_pins(before: str, adopted: str) -> None:
    """C85."""
    world = World(warm=True)
    manager = world.manager
    world.set_lens(LENS)
    reads = None if before == "nothing" else capture_with_plans(world, adopted=before == "an adopted capture")
    pinned = pins(manager)
    other = capture_without_plans(world, adopted="inside" in adopted)
    if "after" in adopted:
        manager.adopt(other)
    assert pins(manager) == pinned
    if "inside" in adopted:
        manager.replay(other)
    manager.release(other)
    manager.trim(0)
    assert pins(manager) == pinned
    if reads is not None:
        world.set_lens(world.random_lens(8))
        world.output.fill_(torch.nan)
        reads.replay()
        world.assert_right(world.output, world.expected())


def test_a_graph_is_never_bound_to_the_capture_that_came_after_it() -> None:
    """C111: adopt(the first) once the second was recorded; nothing tells that the second's pins are not the first's."""
    world = World(warm=True)
    world.set_lens(LENS)
    first = capture_without_plans(world)
    second = capture_with_plans(world)
    pinned = pins(world.manager)
    assert pinned
    with pytest.raises(RouteError, match=r"nothing tells whether .* inside the recording"):
        world.manager.adopt(first)
    with pytest.raises(RouteError, match="inside"):  # asking again does not change the answer
        world.manager.adopt(first)
    with pytest.raises(RouteError, match="inside"):
        world.manager.adopt(second)
    world.manager.release(first)
    world.manager.trim(0)
    assert pins(world.manager) == pinned
    world.set_lens(world.random_lens(8))
    second.replay()
    world.assert_right(world.output, world.expected())


def test_one_abandoned_capture_does_not_block_later_ones() -> None:
    world = World(warm=True)
    world.set_lens(LENS)
    abandoned = capture_with_plans(world)
    for _ in range(2):
        world.manager.adopt(capture_without_plans(world))
    graph = capture_with_plans(world, adopted=True)
    world.manager.adopt(graph)
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graph, world.step()), world.expected())
    del abandoned


def test_a_graph_that_is_captured_again_by_its_engine_is_bound_to_its_new_capture() -> None:
    world = World(warm=True)
    world.set_lens(LENS)
    graph = capture_with_plans(world, adopted=True)
    graph.reset()
    with world.record(graph):
        world.manager.adopt(graph)
        world.decode(world.manager.plan_for(world.step(5)))
    world.settle()
    assert pins(world.manager) == {"default/8/ub0": 1, "scratch/main/ub0": 1}
    with pytest.raises(StalePlanError, match="rows: found 8, wanted 5"):
        world.manager.guard(graph, world.step())
    world.set_lens(world.random_lens(5))
    world.output.fill_(torch.nan)
    world.manager.replay(graph, world.step(5))
    world.assert_right(world.output, world.expected())


@pytest.mark.parametrize("first", ["adopted inside", "by the manager", "adopted, and failed"])
@pytest.mark.parametrize("adopted_after", [False, True])
def test_a_binding_to_a_capture_without_plans_does_not_outlive_it(first: str, adopted_after: bool) -> None:
    """The graph object is recorded into again by its engine, with plans and without adopt."""
    world = World(warm=True)
    world.set_lens(LENS)
    graph = world.new_graph()
    if first == "by the manager":
        with world.manager.graph(graph):
            world.query.add_(0)
    elif first == "adopted inside":
        with world.record(graph):
            world.manager.adopt(graph)
            world.query.add_(0)
    else:
        with pytest.raises(ZeroDivisionError), world.record(graph):
            world.manager.adopt(graph)
            raise ZeroDivisionError
    graph.reset()
    world.settle()
    plan = world.manager.plan_for(world.step())
    with world.record(graph):
        world.decode(plan)
    if adopted_after:
        with pytest.raises(RouteError, match="inside the recording"):
            world.manager.adopt(graph)
    world.set_lens(world.random_lens(8))
    for call in (world.manager.guard, world.manager.replay):
        with pytest.raises(RouteError, match="holds no pins here"):
            call(graph, world.step())


def test_a_refused_decode_leaves_a_capture_that_touches_no_plan() -> None:
    world = World(warm=True)
    world.set_lens(LENS)
    abandoned = world.new_graph()
    plan = world.manager.plan_for(world.step())
    with world.record(abandoned), pytest.raises(PlanlifeError):
        world.decode(plan, query=world.query[:, :1])
    world.manager.adopt(capture_without_plans(world))


def test_a_graph_that_holds_another_capture_cannot_be_adopted_into_a_recording() -> None:
    world = World(warm=True)
    world.set_lens(LENS)
    graph = capture_with_plans(world, adopted=True)
    second = world.new_graph()
    with world.record(second):
        with pytest.raises(RouteError, match="holds a finished one"):
            world.manager.adopt(graph)
        world.manager.adopt(second)
        world.decode(world.manager.plan_for(world.step()))
    world.assert_right(world.replay(graph, world.step()), world.expected())
    world.assert_right(world.replay(second, world.step()), world.expected())


def test_adopting_an_empty_graph_is_refused() -> None:
    world = World(warm=True)
    with pytest.raises(RouteError, match="no finished capture"):
        world.manager.adopt(world.new_graph())
    world.set_lens(LENS)
    failed = world.new_graph()
    with pytest.raises(ZeroDivisionError), world.record(failed):
        world.manager.adopt(failed)
        world.decode(world.manager.plan_for(world.step()))
        raise ZeroDivisionError
    world.settle()
    assert pins(world.manager) == {}
    with pytest.raises(RouteError, match="no finished capture"):
        world.manager.adopt(failed)


def test_a_device_that_tells_captures_binds_afterwards_too() -> None:
    """An EmulatedGraph knows what it holds: then there is nothing to guess."""
    world = World(warm=True)
    if world.device != "cpu":
        pytest.skip("a CUDAGraph does not tell which capture it holds")
    world = World(warm=True, device_object=new_device(256))
    world.set_lens(LENS)
    first, second = capture_without_plans(world), capture_with_plans(world)
    world.manager.adopt(first)
    world.manager.release(first)
    world.manager.adopt(second)
    world.assert_right(world.replay(second, world.step()), world.expected())
    world.manager.release(second)
    assert not pins(world.manager)
    with pytest.raises(RouteError, match="its pins were released"):
        world.manager.adopt(second)


class TwoWorkers:
    """A capture that the main thread opens, and in which a worker thread for each ubatch records its half."""

    def __init__(self, style: str, *, adopt: str, first: World | None = None) -> None:
        self.world = first or World(
            sites={"default": small_spec()}, ubatches=2, ladder=CapacityLadder([4]), rows=8, warm=True
        )
        self.style, self.world_lens = style, self.world.lens
        self.world.set_lens(LENS)
        self.graph = self.world.new_graph()
        world = self.world
        plans = [world.manager.plan_for(self.step(ub)) for ub in (0, 1)] if style == BEFORE_REPLAY else [None, None]
        with world.record(self.graph):
            if adopt == "inside by the main thread":
                world.manager.adopt(self.graph)
            for ubatch in (0, 1):
                self.on_the_stream(lambda ub=ubatch: self.layer(ub, plans[ub], adopt))  # type: ignore[misc]

    def step(self, ubatch: int) -> Any:
        return self.world.step(lens=self.world.lens[4 * ubatch : 4 * ubatch + 4], ubatch=ubatch)

    def layer(self, ubatch: int, plan: Any, adopt: str) -> None:
        world, rows = self.world, slice(4 * ubatch, 4 * ubatch + 4)
        world.decode(
            plan or world.manager.plan_for(self.step(ubatch)),
            query=world.query[rows],
            output=world.output[rows],
            tables=world.tables[rows],
        )
        if adopt == "inside by a worker" and ubatch:
            world.manager.adopt(self.graph)

    def on_the_stream(self, work: Any) -> None:
        """`work` on a thread of its own that is in this thread's stream."""
        errors: list[BaseException] = []
        stream = self.world.current_stream()

        def run() -> None:
            try:
                with self.world.on(stream):
                    work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]


@both_styles
@pytest.mark.parametrize("adopt", ["inside by the main thread", "inside by a worker"])
def test_a_capture_that_worker_threads_record_is_bound_to_its_graph(style: str, adopt: str) -> None:
    """C86: an older capture of the main thread, which nobody adopted, must not be taken for it."""
    workers = TwoWorkers(style, adopt=adopt)
    world = workers.world
    old = capture_with_plans_of_four(world)
    again = TwoWorkers(style, adopt=adopt, first=world)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        for graph in (workers.graph, again.graph):
            world.output.fill_(torch.nan)
            world.manager.replay(graph, again.step(0), again.step(1))
            world.assert_right(world.output, world.expected())
    with pytest.raises(StalePlanError, match=r"default/4/ub1 .*no step for it"):
        world.manager.replay(workers.graph, workers.step(0))
    if style == BEFORE_REPLAY:
        steps = [workers.step(ubatch) for ubatch in (0, 1)]
        world.manager.plan_for(steps[0])
        with pytest.raises(StalePlanError, match="plan_for was not called for this step: its plan default/4/ub1"):
            world.manager.guard(workers.graph, *steps)
    del old


def capture_with_plans_of_four(world: World) -> Any:
    graph = world.new_graph()
    with world.record(graph):
        world.decode(world.manager.plan_for(world.step(4)), query=world.query[:4], output=world.output[:4])
    return graph


@both_styles
def test_a_capture_of_workers_that_is_adopted_too_late_is_refused(style: str) -> None:
    """C86."""
    workers = TwoWorkers(style, adopt="not at all")
    with pytest.raises(RouteError, match="inside the recording, on any thread whose stream is in it"):
        workers.world.manager.adopt(workers.graph)
