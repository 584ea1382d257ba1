"""While one thread records: collections, eager steps, evictions and hooks elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planlife import MintError, StalePlanError, Step
from planlife.events import Event
from tests.eventually import EVENTUALLY_S

from .world import BEFORE_REPLAY, IN_GRAPH, Owner, World, backend_with, both_styles

LENS = [500, 3, 257, 64, 1, 0, 256, 17]
MODES = ["global", "thread_local", "relaxed"]


def collect(world: World, graphs: list[Any]) -> None:
    graphs.clear()
    world.settle()


@both_styles
@pytest.mark.parametrize("where", ["the same thread", "another thread"])
def test_a_graph_collected_while_a_thread_records_kills_no_capture(style: str, where: str) -> None:
    """C67: it is released at the next entry point, and the capture goes on."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    old = [world.capture(step, style)]
    events: list[Event] = []
    world.manager.add_hook(events.append)
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    with world.manager.graph() as graph:
        plan = plan or world.manager.plan_for(step)
        world.decode(plan)
        events.clear()
        if where == "the same thread":
            collect(world, old)
        else:
            world.elsewhere(lambda: collect(world, old))
        assert events == []  # the finaliser only queued
        world.decode(plan)
        assert [event.kind for event in events] == ["release"]
    report = world.manager.report()
    assert report.num_graphs == 1
    assert {plan.num_pins for plan in report.plans} == {0, 1}
    for _ in range(2):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())


class SlowBackend:
    """Compiles until it is told to stop, with the manager's lock held."""

    def __init__(self) -> None:
        super().__init__()
        self.compiling, self.done = threading.Event(), threading.Event()
        self.done.set()

    def compile(self, *args: Any) -> int:
        self.compiling.set()
        assert self.done.wait(timeout=EVENTUALLY_S)
        return super().compile(*args)  # type: ignore[misc,no-any-return]


def test_a_finaliser_takes_no_lock() -> None:
    """C67: a graph is collected while another thread mints."""
    backend = backend_with(SlowBackend)
    world = World(backend=backend)
    world.set_lens(LENS)
    with world.manager.capture_phase():
        world.manager.warm(8)
        graphs = [world.capture(world.step(), IN_GRAPH)]
        backend.compiling.clear()
        backend.done.clear()
        with ThreadPoolExecutor(2) as threads:
            minting = threads.submit(world.manager.warm)
            assert backend.compiling.wait(timeout=EVENTUALLY_S)
            threads.submit(collect, world, graphs).result(timeout=EVENTUALLY_S)
            assert not minting.done()
            backend.done.set()
            minting.result(timeout=EVENTUALLY_S)
    assert world.manager.report().num_graphs == 0


@both_styles
@pytest.mark.parametrize("mode", MODES)
def test_eager_work_of_another_thread_is_neither_recorded_nor_refused(style: str, mode: str) -> None:
    """C72: it plans, materialises, decodes, trims and collects while this one records."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    undisturbed = world.capture(step, style)
    other = World.__new__(World)
    other.__dict__.update(world.__dict__)
    other.lens, other.tables = world.lens_buffer(), world.tables.clone()
    other.query, other.output = world.buffers(8)

    def eager_work() -> None:
        freed_bytes = 0
        for rows in (8, 3, 8, 3):
            other.set_lens(other.random_lens(rows))
            expected = other.expected()
            output = other.eager(other.step(rows))
            other.assert_right(output[:rows], expected[:rows])
            freed_bytes += other.manager.trim(0)
        assert freed_bytes > 0

    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    with world.manager.graph(capture_error_mode=mode) as graph:
        plan = plan or world.manager.plan_for(step)
        world.decode(plan)
        world.elsewhere(eager_work)
        if style == IN_GRAPH:
            world.decode(plan)
    if world.device == "cpu":  # a CUDA graph does not tell its launches; what they do, the replays show
        decode_ops = undisturbed.num_ops - refresh_ops(world)
        assert graph.num_ops == undisturbed.num_ops + decode_ops * (style == IN_GRAPH)
    for one in (graph, undisturbed):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(one, world.step(), style), world.expected())


def refresh_ops(world: World) -> int:
    """Kernels of one recorded refresh."""
    with world.manager.graph() as graph:
        world.manager.plan_for(world.step())
    return int(graph.num_ops)


@pytest.mark.parametrize("mode", MODES)
def test_tables_that_another_thread_takes_before_they_are_pinned_are_refused_not_recorded(mode: str) -> None:
    """C72, before-replay style: between plan_for and the first pa_decode nothing pins the plan yet."""
    world = World(warm=True)
    world.set_lens(LENS)
    other_lens = world.lens.clone()
    disturbances = [
        (MintError, "trimmed", lambda: world.manager.trim(0)),
        (StalePlanError, "right before", lambda: world.manager.plan_for(world.step(lens=other_lens))),
    ]
    for error, message, disturb in disturbances:
        plan = world.manager.plan_for(world.step())
        with pytest.raises(error, match=message), world.manager.graph(capture_error_mode=mode):
            world.elsewhere(disturb)
            world.decode(plan)
        assert world.manager.report().pinned_bytes == 0
    graph = world.capture(world.step(), BEFORE_REPLAY)
    world.assert_right(world.replay(graph, world.step(), BEFORE_REPLAY), world.expected())


def test_another_threads_refresh_during_a_recording_is_recorded_again_not_trusted() -> None:
    """C72, in-graph style: a replay elsewhere moves the in-graph tables between two layers."""
    world = World(warm=True)
    other_lens = world.lens_buffer()
    world.set_lens(LENS, into=other_lens)
    elsewhere = world.capture(world.step(lens=other_lens), IN_GRAPH)
    world.set_lens(LENS)
    second_output = torch.full_like(world.output, torch.nan)
    with world.manager.graph() as graph:
        plan = world.manager.plan_for(world.step())
        world.decode(plan)
        world.elsewhere(lambda: world.manager.replay(elsewhere, world.step(lens=other_lens)))
        world.decode(plan, output=second_output)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        second_output.fill_(torch.nan)
        world.assert_right(world.replay(graph, world.step()), world.expected())
        world.assert_right(second_output, world.expected())


def test_two_threads_capture_at_the_same_time() -> None:
    """C72: of one class; each graph contains its own refresh and nothing of the other."""
    world = World(warm=True)
    buffers = [world.lens_buffer() for _ in range(2)]
    outputs = [torch.full_like(world.output, torch.nan) for _ in range(2)]
    barrier = threading.Barrier(2, timeout=EVENTUALLY_S)

    def capture(index: int) -> Any:
        with world.manager.graph(capture_error_mode="thread_local") as graph:
            barrier.wait()
            for _layer in range(4):
                plan = world.manager.plan_for(Step(buffers[index], owner=world.owners[index]))
                barrier.wait()
                world.decode(plan, output=outputs[index])
        return graph

    world.owners = [Owner(), Owner()]
    world.capture(world.step(), IN_GRAPH)
    with ThreadPoolExecutor(2) as threads:
        graphs = list(threads.map(capture, range(2)))
    for index in (0, 1, 1, 0):
        world.set_lens(world.random_lens(8), into=buffers[index])
        outputs[index].fill_(torch.nan)
        world.manager.replay(graphs[index], world.step(lens=buffers[index]))
        world.assert_right(outputs[index], world.expected(lens=buffers[index]))


def test_a_plan_evicted_between_plan_for_and_pa_decode_is_refreshed_or_refused() -> None:
    """C68: refreshed while its lengths stand, refused once they moved; never silent."""
    world = World(warm=True)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        plan = world.manager.plan_for(world.step())
        assert world.manager.trim(0) > 0
        assert (plan.native, plan.segments, plan.tables) == (None, None, None)
        before = world.counters()
        world.output.fill_(torch.nan)
        world.assert_right(world.decode(plan), world.expected())
        after = world.counters()
        assert after["refreshes"] == before["refreshes"] + 1
        assert after["rematerialised"] == before["rematerialised"] + 2

        world.manager.trim(0)
        world.lens.add_(1)
        world.output.fill_(torch.nan)
        with pytest.raises(StalePlanError, match="written since plan_for"):
            world.decode(plan)
        assert world.output.isnan().all()


@contextmanager
def trimming(world: World) -> Iterator[SimpleNamespace]:
    """Another thread that evicts whatever it may, all the time; `pause_s` of what this yields may be changed."""
    stop = threading.Event()
    pace = SimpleNamespace(pause_s=0.0005)

    def trim() -> None:
        while not stop.is_set():
            world.manager.trim(0)
            stop.wait(pace.pause_s)

    with ThreadPoolExecutor(1) as thread:
        trimmer = thread.submit(trim)
        try:
            yield pace
        finally:
            stop.set()
        trimmer.result(timeout=EVENTUALLY_S)


def test_trim_from_another_thread_during_80_eager_steps_is_never_silent() -> None:
    """C68: every step is right; nothing is refused, because no lengths move within a step."""
    world = World(warm=True)
    with trimming(world):
        for number in range(10_000):
            if number >= 80 and world.counters()["evictions"] > 10:
                break
            world.set_lens(world.random_lens(8))
            plan = world.manager.plan_for(world.step())
            for _layer in range(2):
                world.output.fill_(torch.nan)
                world.assert_right(world.decode(plan), world.expected())
    assert world.counters()["evictions"] > 10


class MeddlingBackend:
    """Lets something happen elsewhere in the middle of the next refresh."""

    meddle: Callable[[], object] | None = None

    def refresh(self, *args: Any) -> None:
        meddle, self.meddle = self.meddle, None
        if meddle is not None:
            meddle()
        super().refresh(*args)  # type: ignore[misc]


def test_a_plan_is_pinned_before_its_refresh_is_recorded() -> None:
    """C68 with C72: what another thread evicts or brings back meanwhile has no address in the graph."""
    backend = backend_with(MeddlingBackend)
    world = World(warm=True, backend=backend)
    world.set_lens(LENS)

    def evict_and_bring_back() -> None:
        world.manager.trim(0)
        world.manager.plan_for(world.step(3))

    with world.manager.graph() as graph:
        backend.meddle = lambda: world.elsewhere(evict_and_bring_back)
        world.decode(world.manager.plan_for(world.step()))
    world.settle()
    for _ in range(2):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step()), world.expected())


@both_styles
def test_trim_from_another_thread_during_captures_gives_right_graphs_or_refusals(style: str) -> None:
    """C68 with C72: what a graph reads is pinned before its address is taken."""
    world = World(warm=True)
    num_captured = 0
    world.set_lens(LENS)
    world.capture(world.step(), style)
    world.settle()
    with trimming(world) as pace:
        for _ in range(200):
            if num_captured == 8:
                break
            world.set_lens(LENS)
            step = world.step()
            world.manager.plan_for(step)
            try:
                graph = world.capture(step, style)
            except MintError:
                assert world.manager.report().pinned_bytes == 0
                pace.pause_s *= 1.5  # some captures must get through, on any machine
                continue
            num_captured += 1
            for _ in range(2):
                world.set_lens(world.random_lens(8))
                world.assert_right(world.replay(graph, world.step(), style), world.expected())
            del graph
            world.settle()
    assert num_captured == 8


@both_styles
def test_hooks_are_called_without_a_lock_while_recording_too(style: str) -> None:
    """Every hook waits for another thread that needs the manager; some call the manager themselves."""
    world = World(warm=False, fallback="torch")
    kinds: list[str] = []

    def hook(event: Event) -> None:
        kinds.append(event.kind)
        world.elsewhere(lambda: world.manager.plan_for(Step(world.lens[:0])))
        world.manager.report()

    remove = world.manager.add_hook(hook)
    world.manager.plan_for(world.step())
    with world.manager.capture_phase():
        world.manager.warm(8)
        graphs = [world.capture(world.step(), style)]
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graphs[0], world.step(), style), world.expected())
    if style == BEFORE_REPLAY:
        with pytest.raises(StalePlanError):
            world.manager.guard(graphs[0], world.step())
    collect(world, graphs)
    world.manager.trim(0)
    world.eager(world.step())
    assert {"mint", "seal", "pin", "release", "evict", "rematerialise", "fallback"} <= set(kinds)
    remove()


@both_styles
def test_threads_on_the_stream_of_a_capture_record_a_ubatch_each(style: str) -> None:
    """C86: what they touch is pinned to that capture, and a replay without one ubatch's step is refused."""
    world = World(ubatches=2, warm=True)
    halves = [slice(0, 4), slice(4, 8)]
    lens = [world.lens_buffer(4), world.lens_buffer(4)]

    def steps() -> list[Step]:
        """Of fresh lengths."""
        world.set_lens(world.random_lens(8))
        for half, buffer in zip(halves, lens, strict=True):
            buffer.copy_(world.lens[half])
        owner = Owner()
        return [world.step(lens=lens[index], ubatch=index, owner=owner) for index in range(2)]

    captured = steps()
    ready = [world.manager.plan_for(step) for step in captured] if style == BEFORE_REPLAY else None
    stream = world.new_stream()

    def record(index: int) -> bool:
        with world.on(stream):
            plan = ready[index] if ready else world.manager.plan_for(captured[index])
            half = halves[index]
            world.decode(plan, query=world.query[half], output=world.output[half], tables=world.tables[half])
        return plan.captured

    with world.manager.graph(stream=stream) as graph:
        for index in range(2):
            assert world.elsewhere(lambda index=index: record(index)) is (style == IN_GRAPH)  # type: ignore[misc]
    pinned = {plan.ubatch: plan.num_pins for plan in world.manager.report().plans if plan.class_rows == 4}
    assert pinned == {0: 1, 1: 1}
    for _ in range(3):
        now = steps()
        for step in now if style == BEFORE_REPLAY else ():
            world.manager.plan_for(step)
        world.output.fill_(torch.nan)
        world.manager.replay(graph, *now)
        world.assert_right(world.output, world.expected())
    with pytest.raises(StalePlanError, match="ub1"):
        world.manager.guard(graph, steps()[0])
