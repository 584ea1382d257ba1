"""Captures that fail, and captures without a plan: loud, nothing left behind, and the manager goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from planlife import ConfigError, MintError, PlanManager, RouteError, StalePlanError
from planlife.events import Event

from .world import BEFORE_REPLAY, IN_GRAPH, Owner, World, backend_with, both_styles

LENS = [500, 3, 257, 64, 1, 0, 256, 17]


class BodyError(Exception):
    """What a model raises in the middle of its forward."""


class FailingBackend:
    """Fails one refresh or decode, after half of it was launched."""

    failing = ""

    def refresh(self, tables: Any, context_lens: Any, num_rows: int) -> None:
        if self.failing == "refresh":
            tables.work_info.fill_(0x7F7F7F7F)
            raise BodyError
        super().refresh(tables, context_lens, num_rows)  # type: ignore[misc]

    def decode(self, *args: Any) -> None:
        super().decode(*args)  # type: ignore[misc]
        if self.failing == "decode":
            raise BodyError


def assert_nothing_is_left(world: World) -> None:
    report = world.manager.report()
    assert (report.pinned_bytes, report.num_graphs) == (0, 0)


def assert_all_works(world: World) -> None:
    """Eager, both styles of capture, minting and trimming, as on a fresh manager."""
    for style in (BEFORE_REPLAY, IN_GRAPH):
        with world.manager.capture_phase():
            world.manager.warm()
        world.set_lens(LENS)
        graph = world.capture(world.step(), style)
        for _ in range(2):
            world.set_lens(world.random_lens(8))
            world.assert_right(world.replay(graph, world.step(), style), world.expected())
            world.assert_right(world.eager(world.step()), world.expected())
        del graph
        world.settle()
        assert world.manager.trim(0)


def test_a_refresh_that_fails_leaves_no_mark() -> None:
    """C73: eager; the tables are half-written, so the step that they held must refresh, as must the one that failed."""
    backend = backend_with(FailingBackend)
    world = World(warm=True, backend=backend)
    world.set_lens(LENS)
    failed, held = world.step(), world.step()
    earlier = world.manager.plan_for(failed)
    plan = world.manager.plan_for(held)
    for fail in (lambda: world.manager.plan_for(failed), lambda: world.decode(earlier)):
        backend.failing = "refresh"
        with pytest.raises(BodyError):
            fail()
        backend.failing = ""
        for step in (held, failed, held):
            before = world.counters()["refreshes"]
            plan = world.manager.plan_for(step)
            assert world.counters()["refreshes"] == before + 1
            world.output.fill_(torch.nan)
            world.assert_right(world.decode(plan), world.expected())
    assert_nothing_is_left(world)


@both_styles
@pytest.mark.parametrize("failing", ["refresh", "decode"])
def test_a_launch_that_fails_while_recording_leaves_nothing(style: str, failing: str) -> None:
    """C73: no mark, no pin, an empty graph; the same step is captured right afterwards."""
    backend = backend_with(FailingBackend)
    world = World(warm=True, backend=backend)
    world.set_lens(LENS)
    step = world.step()
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    graph = world.new_graph()
    backend.failing = failing
    if failing == "refresh" and style == BEFORE_REPLAY:
        world.manager.invalidate()
        with pytest.raises(StalePlanError, match="must not be recorded"), world.manager.graph(graph):
            world.decode(plan)
    else:
        with pytest.raises(BodyError), world.manager.graph(graph):
            world.decode(plan or world.manager.plan_for(step))
    backend.failing = ""
    assert_nothing_is_left(world)
    assert world.is_empty(graph)
    assert world.capture(step, style, g=graph) is graph
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graph, world.step(), style), world.expected())


@both_styles
@pytest.mark.parametrize("error", [BodyError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_a_capture_left_by_an_exception_leaves_nothing(style: str, error: type[BaseException]) -> None:
    """C73: the exception holds frames that hold the graph; the pins are gone all the same, at once."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    with pytest.raises(error) as caught, world.manager.graph() as graph:
        world.decode(plan or world.manager.plan_for(step))
        raise error
    assert_nothing_is_left(world)
    with pytest.raises(RuntimeError, match="empty|without a preceding successful capture"):
        graph.replay()
    with pytest.raises(RouteError, match="holds no pins here"):
        world.manager.guard(graph, step)
    assert caught.value is not None
    assert_all_works(world)


@both_styles
@pytest.mark.parametrize("swallowed", [True, False], ids=["swallowed", "raised"])
def test_an_invalidated_capture_leaves_nothing(style: str, swallowed: bool) -> None:
    """C73: a host read inside; also where the model swallows its error, so that the end of the capture raises."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    with pytest.raises(RuntimeError), world.manager.graph() as graph:
        world.decode(plan or world.manager.plan_for(step))
        try:
            world.output.sum().item()
        except RuntimeError:
            if not swallowed:
                raise
    assert_nothing_is_left(world)
    assert world.is_empty(graph)
    assert_all_works(world)


@both_styles
def test_pins_of_an_engines_own_capture_go_when_it_fails(style: str) -> None:
    """C73: past the manager; nobody tells it but the graph."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    graph = world.new_graph()
    with pytest.raises(BodyError), world.record(graph):
        world.decode(plan or world.manager.plan_for(step))
        assert world.manager.report().pinned_bytes
        raise BodyError
    assert_nothing_is_left(world)
    assert_all_works(world)


@both_styles
def test_a_failed_capture_on_a_graph_that_was_captured_before_leaves_neither(style: str) -> None:
    """C73 with C78: the old capture was given up when the new one began."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    graph = world.capture(step, style)
    with pytest.raises(BodyError), world.manager.graph(graph):
        raise BodyError
    assert_nothing_is_left(world)
    with pytest.raises(RouteError, match="holds no pins here"):
        world.manager.replay(graph, step)
    graph = world.capture(step, style, g=graph)
    world.assert_right(world.replay(graph, step, style), world.expected())


@both_styles
def test_an_option_that_does_not_exist_does_not_cost_the_graph(style: str) -> None:
    world = World(warm=True)
    world.set_lens(LENS)
    graph = world.capture(world.step(), style)
    with pytest.raises(TypeError, match="strem"), world.manager.graph(graph, strem=None):
        raise AssertionError("the body ran")
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graph, world.step(), style), world.expected())


def test_a_plan_of_a_failed_capture_is_refused_in_a_later_one() -> None:
    """C73: its tables were never refreshed, and no replay ever will."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    with pytest.raises(BodyError), world.manager.graph():
        plan = world.manager.plan_for(step)
        world.decode(plan)
        raise BodyError
    with pytest.raises(StalePlanError, match="Call plan_for inside this recording"), world.manager.graph():
        world.decode(plan)
    with world.manager.graph() as graph:
        world.decode(world.manager.plan_for(step))
    world.assert_right(world.replay(graph, step), world.expected())


@both_styles
def test_a_nested_capture_is_refused_and_harms_neither_graph(style: str) -> None:
    """Refused before the graph that was to be captured again is given up."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    old = world.capture(step, style)
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    with world.manager.graph() as outer:
        with pytest.raises(RouteError, match="captures do not nest"), world.manager.graph(old):
            pass
        world.decode(plan or world.manager.plan_for(step))
    for graph in (old, outer):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())


def test_a_graph_that_the_engine_captured_is_not_lost_to_a_refused_capture() -> None:
    world = World(warm=True)
    total = torch.zeros(3, device=world.device)
    graph = world.new_graph()
    with world.record(graph):
        total.add_(1)
    with pytest.raises(RuntimeError, match="already owns"), world.manager.graph(graph):
        pass
    graph.replay()
    assert total.tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match="graph object"), world.manager.graph(3):
        pass


@pytest.mark.parametrize(
    "call",
    [
        lambda manager: manager.capture_phase().__enter__(),
        lambda manager: manager.warm(),
        lambda manager: manager.close(),
    ],
    ids=["capture_phase", "warm", "close"],
)
def test_what_cannot_be_recorded_is_refused_and_the_capture_goes_on(call: Callable[[PlanManager], object]) -> None:
    world = World(warm=True)
    world.set_lens(LENS)
    with world.manager.capture_phase(), world.manager.graph() as graph:
        with pytest.raises((MintError, RouteError)):
            call(world.manager)
        world.decode(world.manager.plan_for(world.step()))
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graph, world.step()), world.expected())


def test_what_drops_marks_while_recording_leaves_a_right_graph() -> None:
    """invalidate() and trim(0) between two layers of one recording: planned again, pinned already."""
    world = World(warm=True)
    world.set_lens(LENS)
    step = world.step()
    with world.manager.graph() as graph:
        plan = world.manager.plan_for(step)
        world.decode(plan)
        world.manager.invalidate()
        world.manager.trim(0)
        world.decode(plan)
        world.decode(world.manager.plan_for(step))
    for _ in range(2):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step()), world.expected())


def evicted(world: World) -> None:
    world.manager.trim(0)


def nothing(world: World) -> None:
    pass


without_a_plan = pytest.mark.parametrize(
    ("warm", "before", "reason"),
    [(False, nothing, "never minted"), (True, evicted, "not resident: trimmed to 0 bytes")],
    ids=["never minted", "evicted"],
)


@without_a_plan
def test_capture_without_a_plan_is_refused_where_nothing_may_replace_it(
    warm: bool, before: Callable[[World], None], reason: str
) -> None:
    """C77, C14: before any device work; the manager is usable after the failed capture."""
    world = World(warm=warm)
    before(world)
    world.set_lens(LENS)
    step = world.step()
    with pytest.raises(MintError, match=reason), world.manager.graph() as graph:
        world.manager.plan_for(step)
    assert world.is_empty(graph)
    assert_nothing_is_left(world)
    assert world.manager.report().resident_bytes == 0
    with pytest.raises(MintError), world.manager.capture_phase(), world.manager.graph():
        world.manager.plan_for(step)
    assert_all_works(world)


@without_a_plan
def test_capture_of_the_fallback_is_loud_and_its_route_is_kept_for_the_guard(
    warm: bool, before: Callable[[World], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C77: with a fallback it is recorded; every capture tells, not only the first."""
    world = World(warm=warm, fallback="torch")
    before(world)
    world.set_lens(LENS)
    events: list[Event] = []
    world.manager.add_hook(lambda event: events.append(event) if event.kind == "fallback" else None)
    step = world.step()
    graphs = []
    with caplog.at_level(logging.WARNING, logger="planlife"):
        for number in range(1, 4):
            with world.manager.graph() as graph:
                for _layer in range(3):
                    plan = world.manager.plan_for(step)
                    assert (plan.route, plan.captured) == ("fallback", True)
                    assert reason in plan.reason
                    world.decode(plan)
            graphs.append(graph)
            assert len(events) == number
            assert events[-1].details["recorded"] is True
    assert any("recorded into a graph" in record.getMessage() for record in caplog.records)

    for graph in graphs:
        world.set_lens(world.random_lens(8))
        world.output.fill_(torch.nan)
        graph.replay()
        world.assert_right(world.output, world.expected())
    with world.manager.capture_phase():
        world.manager.warm()
    step = world.step()
    assert world.manager.plan_for(step).route == "planned"
    for graph in graphs:
        with pytest.raises(StalePlanError, match="has route: found planned, wanted fallback"):
            world.manager.guard(graph, step)


def test_a_fallback_made_before_the_recording_is_recorded_and_guarded_too() -> None:
    """C77, before-replay style: rows beyond the ladder."""
    world = World(rows=8, warm=True, fallback="torch")
    lens, tables = world.lens_buffer(12), world.tables.repeat(2, 1)[:12]
    query, output = world.buffers(12)
    plan = world.manager.plan_for(world.step(lens=lens))
    assert (plan.route, plan.captured) == ("fallback", False)
    with world.manager.graph() as graph:
        world.decode(plan, query=query, output=output, tables=tables)
    for _ in range(3):
        world.set_lens(world.random_lens(12), into=lens, tables=tables)
        output.fill_(torch.nan)
        world.manager.replay(graph, world.step(lens=lens))
        world.assert_right(output, world.expected(query=query, lens=lens, tables=tables))
    with pytest.raises(StalePlanError, match="rows"):
        world.manager.guard(graph, world.step(lens=lens[:11]))


def test_a_step_that_fell_back_in_warm_up_is_planned_once_its_class_is_minted() -> None:
    """C77 with C07: the same Step object before the phase, in it, and while recording."""
    world = World(fallback="torch")
    world.set_lens(LENS)
    step = world.step()
    assert world.manager.plan_for(step).route == "fallback"
    with world.manager.capture_phase():
        assert world.manager.plan_for(step).route == "planned"
        with world.manager.graph() as graph:
            plan = world.manager.plan_for(step)
            assert plan.route == "planned"
            world.decode(plan)
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graph, world.step()), world.expected())


def test_with_planlife_off_captures_run_the_fallback_and_guard_lets_them_pass() -> None:
    """C77: enabled=False; the lengths are read in the graph."""
    world = World(enabled=False, fallback="torch")
    world.set_lens(LENS)
    step = world.step(owner=Owner())
    with world.manager.graph() as graph:
        world.decode(world.manager.plan_for(step))
    for _ in range(2):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step()), world.expected())
