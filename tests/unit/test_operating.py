"""Switched off it costs nothing; what it does is told once; hooks and a second close do no harm."""

from __future__ import annotations

import json
import logging
import os
import threading
from itertools import pairwise
from typing import Any

import pytest

from planlife import CapacityLadder, ClosedError, MintError, PlanManager, RouteError, StalePlanError, Step
from planlife.events import KINDS
from planlife.testing import FakeBackend, FakeDevice, FakeTensor
from tests.eventually import EVENTUALLY_S
from tests.unit.fake_world import POISON, Captured, FakeWorld, live_lens_fallback, spec


def test_off_allocates_nothing_reads_no_environment_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """C46."""
    world = FakeWorld(enabled=False, fallback=live_lens_fallback, sanitize="raise", ubatches=2)
    built = dict(world.backend.calls)

    def refuse(*args: object, **kwargs: object) -> Any:
        raise AssertionError("the environment was read")

    monkeypatch.setattr(os, "getenv", refuse)
    monkeypatch.setattr(type(os.environ), "__getitem__", refuse)
    monkeypatch.setattr(type(os.environ), "get", refuse)
    world.warm()
    for number in range(20):
        lens = [number + 1] * (number % 8 + 1)
        plan = world.manager.plan_for(world.step(lens, ubatch=number % 2))
        assert (plan.route, plan.captured, plan.native, plan.class_rows) == ("fallback", False, None, None)
        assert "enabled=False" in plan.reason
        assert (plan.rows, plan.site, plan.ubatch) == (len(lens), "default", number % 2)
        assert world.decode(plan) == lens
    monkeypatch.undo()
    assert dict(world.backend.calls) == built
    assert (world.device.num_allocations, world.device.executed) == (0, [])
    assert (world.manager.worst_case_bytes(), world.manager.min_budget_bytes()) == (0, 0)
    assert world.manager.report().resident_bytes == 0
    on = FakeWorld(fallback=live_lens_fallback)  # positive control
    on.warm()
    assert on.device.num_allocations > 0


def test_a_dummy_is_a_dummy_when_off_too() -> None:
    """R15: a fallback that went by its lengths would read anything."""
    calls: list[object] = []
    world = FakeWorld(enabled=False, fallback=lambda *arguments, **keywords: calls.append(arguments))
    plan = world.manager.plan_for(world.step([400, 9], dummy=True))
    assert plan.route == "dummy"
    world.decode(plan)
    assert not calls
    real = world.manager.plan_for(world.step([4, 9]))
    world.decode(real)
    assert real.route == "fallback" and len(calls) == 1  # positive control


@pytest.mark.parametrize("fallback", [None, live_lens_fallback], ids=["no fallback", "a fallback"])
def test_an_idle_rank_gets_zeros_for_an_output_of_any_rows_whether_on_or_off(fallback: Any) -> None:
    """R42: no rows are a dummy step, and ranks in lockstep pass the padded output of the others."""
    for enabled in (True, False):
        world = FakeWorld(enabled=enabled, fallback=fallback)
        world.warm() if enabled else None
        plan = world.manager.plan_for(world.step([]))
        for num_rows in (1, 4, 9):
            assert world.decode(plan, num_rows) == [0] * num_rows


def test_off_without_a_fallback_is_refused_at_the_decode() -> None:
    world = FakeWorld(enabled=False)
    plan = world.manager.plan_for(world.step([3]))
    with pytest.raises(RouteError, match="planlife is off"):
        world.decode(plan)


def test_a_backend_that_can_never_serve_is_no_obstacle_when_off() -> None:
    from planlife.testing import FakeBackend

    world = FakeWorld(enabled=False, backend=FakeBackend(spec_reasons=["no"]))
    assert world.manager.plan_for(world.step([3])).route == "fallback"


def test_each_route_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """C47: on records, not on time."""
    world = FakeWorld(fallback=live_lens_fallback)
    world.warm(4)
    with caplog.at_level(logging.INFO, "planlife"):
        for number in range(1000):
            world.manager.plan_for(world.step([number + 1] * 3))
        assert [record.getMessage() for record in caplog.records] == ["site default: 3 rows planned in class 4"]
        for number in range(1000):
            world.manager.plan_for(world.step([number + 1] * 8))
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 2
        assert "8 rows go to the fallback" in messages[1] and "never minted" in messages[1]
        world.backend.step_reasons = ["the moon is full"]
        for number in range(1000):
            world.manager.plan_for(world.step([number + 1] * 3))
        assert len(caplog.records) == 3
        assert "the moon is full" in caplog.records[2].getMessage()
        assert caplog.records[2].levelno == logging.WARNING


def test_a_recorded_fallback_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """R3: a graph without a plan must be loud."""
    world = FakeWorld(fallback=live_lens_fallback)
    events: list[Any] = []
    world.manager.add_hook(events.append)
    step = world.step([3] * 4)
    call = world.call(4)
    with caplog.at_level(logging.WARNING, "planlife"), world.manager.graph():
        world.manager.pa_decode(world.manager.plan_for(step), **call)
    assert "recorded into a graph" in caplog.records[0].getMessage()
    assert [event.details["recorded"] for event in events if event.kind == "fallback"] == [True]


def test_a_hook_that_raises_is_logged_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """C48."""
    world = FakeWorld()
    seen: list[str] = []

    def raises(event: Any) -> None:
        raise ValueError("a broken hook")

    world.manager.add_hook(raises)
    world.manager.add_hook(lambda event: seen.append(event.kind))
    world.warm()
    assert world.run([3, 4]) == [3, 4]
    assert seen == ["mint"] * 4 + ["seal"]  # the next hook is called all the same
    assert any("hook raised" in record.getMessage() for record in caplog.records)


def test_a_hook_may_call_the_manager_from_its_own_and_from_another_thread() -> None:
    """C48: no lock is held while a hook runs."""
    world = FakeWorld(rows=4, budget_bytes=FakeWorld(rows=4).manager.min_budget_bytes())
    kinds = set()
    stuck: list[str] = []

    def hook(event: Any) -> None:
        kinds.add(event.kind)
        assert event.kind in KINDS

        def use_it() -> None:
            world.manager.report()
            world.manager.invalidate()
            world.manager.trim(1 << 40)

        use_it()
        other = threading.Thread(target=use_it, daemon=True)
        other.start()
        other.join(EVENTUALLY_S)
        if other.is_alive():
            stuck.append(event.kind)

    world.manager.add_hook(hook)
    world.warm()
    for rows in (4, 1, 2, 3):
        world.run([1] * rows)
    captured = Captured(world, world.step([5] * 4), in_graph=True)
    world.manager.replay(captured.g, world.step([6] * 4))
    with pytest.raises(StalePlanError):
        world.manager.replay(captured.g, world.step([6] * 3))
    with pytest.raises(RouteError):
        world.decode(world.manager.plan_for(world.step([1] * 2)))  # no room, no fallback
    captured.g.reset()
    world.manager.trim(0)
    world.run([1] * 4)
    world.manager.close()
    assert stuck == []
    assert kinds == set(KINDS)


def test_hooks_hear_of_a_refusal_before_its_exception_is_seen() -> None:
    """It may be the last thing that the process does."""
    world = FakeWorld(sanitize="raise")
    world.warm()
    captured = Captured(world, world.step([5] * 4))
    heard: list[str] = []
    world.manager.add_hook(lambda event: heard.append(event.kind))
    with pytest.raises(MintError):
        world.manager.warm()
    assert heard == ["refuse"]
    with world.manager.graph() as other:
        with pytest.raises(MintError):
            world.manager.warm()
        with pytest.raises(RouteError), world.manager.graph():
            raise AssertionError("the body ran")
        assert heard == ["refuse"] * 3
    step = world.step([6] * 4)
    captured.g.replay()  # without plan_for
    with pytest.raises(StalePlanError):
        world.manager.plan_for(step)
    assert heard == ["refuse"] * 3 + ["stale"]
    assert other.captured


def test_a_removed_hook_is_not_called() -> None:
    world = FakeWorld()
    seen: list[Any] = []
    remove, remove_other = world.manager.add_hook(seen.append), world.manager.add_hook(seen.append)
    remove()
    remove()
    with world.manager.capture_phase():
        pass
    assert len(seen) == 1
    remove_other()
    with world.manager.capture_phase():
        pass
    assert len(seen) == 1


def test_a_hook_that_plans_and_evicts_does_not_run_forever() -> None:
    world = FakeWorld(fallback=live_lens_fallback)
    depth: list[int] = []

    def hook(event: Any) -> None:
        if len(depth) < 50:
            depth.append(1)
            world.manager.plan_for(Step(FakeTensor(8), owner=None))

    world.manager.add_hook(hook)
    assert world.run([3] * 8) == [3] * 8
    assert len(depth) == 50


METHODS_AFTER_CLOSE = {
    "plan_for": lambda world, held: world.manager.plan_for(world.step([1])),
    "pa_decode": lambda world, held: world.decode(held["plan"]),
    "pa_decode of a plan made while recording": lambda world, held: world.decode(held["recorded"]),
    "pa_decode of a dummy": lambda world, held: world.decode(held["dummy"]),
    "warm": lambda world, held: world.manager.warm(),
    "capture_phase": lambda world, held: world.manager.capture_phase().__enter__(),
    "graph": lambda world, held: world.manager.graph().__enter__(),
    "adopt": lambda world, held: world.manager.adopt(held["captured"].g),
    "guard": lambda world, held: world.manager.guard(held["captured"].g),
    "replay": lambda world, held: world.manager.replay(held["captured"].g),
    "trim": lambda world, held: world.manager.trim(0),
    "invalidate": lambda world, held: world.manager.invalidate(),
    "add_hook": lambda world, held: world.manager.add_hook(print),
    "with": lambda world, held: world.manager.__enter__(),
}


@pytest.mark.parametrize("enabled", [True, False])
def test_use_after_close_is_refused_and_a_second_close_is_not(enabled: bool) -> None:
    """C49."""
    world = FakeWorld(enabled=enabled, fallback=live_lens_fallback)
    world.warm()
    step = world.step([1, 2])
    with world.manager.graph():
        recorded = world.manager.plan_for(step)
    held = {
        "captured": Captured(world, step),
        "recorded": recorded,
        "plan": world.manager.plan_for(step),
        "dummy": world.manager.plan_for(Step(step.context_lens, dummy=True)),
    }
    world.manager.close()
    world.manager.close()
    for name, method in METHODS_AFTER_CLOSE.items():
        with pytest.raises(ClosedError, match=name.split()[0]):
            method(world, held)
    report = world.manager.report()
    assert report.closed and report.resident_bytes == 0
    assert json.loads(report.to_json())["closed"] is True
    assert ", closed" in str(report)
    assert (world.manager.worst_case_bytes() > 0) is enabled
    world.manager.release(held["captured"].g)  # promises nothing new


def test_a_warm_up_whose_hook_closes_the_manager_allocates_nothing_more() -> None:
    world = FakeWorld()
    with world.manager.capture_phase():
        world.manager.warm(1)
        captured = Captured(world, world.step([5]))
        world.manager.add_hook(lambda event: world.manager.close() if event.kind == "release" else None)
        captured.g.reset()
        with pytest.raises(ClosedError):
            world.manager.warm()  # delivers the release first, and found the manager open before that
    assert world.assert_bytes_add_up().resident_bytes == 0


@pytest.mark.parametrize("rows", [4, 9], ids=["in a class", "in parts"])
def test_a_step_that_another_threads_close_overtakes_allocates_nothing(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FakeWorld(rows=9, ladder=CapacityLadder([4]))
    world.warm()
    step, inspect_lens = world.step([5] * rows), world.device.inspect_lens

    def overtaken(context_lens: Any) -> Any:
        world.manager.close()
        return inspect_lens(context_lens)

    monkeypatch.setattr(world.device, "inspect_lens", overtaken)
    with pytest.raises(ClosedError):
        world.manager.plan_for(step)
    assert world.assert_bytes_add_up().resident_bytes == 0


def test_close_is_refused_while_recording_and_changes_nothing() -> None:
    """C49."""
    world = FakeWorld()
    world.warm()
    step = world.step([5] * 4)
    call = world.call(4)
    with world.manager.graph() as g:
        with pytest.raises(RouteError, match="records"):
            world.manager.close()
        world.manager.pa_decode(world.manager.plan_for(step), **call)
    world.manager.replay(g, world.step([6] * 4))
    assert call["output"].values == [6] * 4


def test_the_manager_is_a_context_manager_that_closes_itself() -> None:
    world = FakeWorld()
    with world.manager as manager:
        world.warm()
        assert manager is world.manager
    assert world.device.live_bytes == 0
    with pytest.raises(ClosedError):
        world.manager.trim(0)


def test_a_phase_that_is_open_when_the_manager_closes_may_end() -> None:
    world = FakeWorld()
    with world.manager.capture_phase():
        world.manager.warm()
        world.manager.close()
    assert world.device.live_bytes == 0


def test_a_graph_captured_on_one_route_is_refused_for_a_step_that_would_take_another() -> None:
    """C31."""
    world = FakeWorld(fallback=live_lens_fallback)
    world.warm()
    captured = Captured(world, world.step([5] * 4), in_graph=True)
    world.manager.replay(captured.g, world.step([6] * 4))  # positive control
    world.backend.step_reasons = ["not today"]
    step = world.step([7] * 4)
    for planned_first in (False, True):
        if planned_first:
            assert world.manager.plan_for(step).route == "fallback"
        with pytest.raises(StalePlanError, match=r"has route: found fallback .*not today.*, wanted planned"):
            world.manager.replay(captured.g, step)
    assert captured.output == [6] * 4
    world.backend.step_reasons = []
    world.manager.replay(captured.g, world.step([8] * 4))
    assert captured.output == [8] * 4


def test_a_graph_captured_on_the_fallback_is_refused_for_a_planned_step() -> None:
    """C31, the other way round."""
    world = FakeWorld(fallback=live_lens_fallback)
    step = world.step([5] * 4)
    call = world.call(4)
    with world.manager.graph() as g:
        world.manager.pa_decode(world.manager.plan_for(step), **call)
    world.manager.guard(g, world.step([6] * 4))  # positive control
    world.warm()
    with pytest.raises(StalePlanError, match=r"route: found planned, wanted fallback"):
        world.manager.guard(g, world.step([6] * 4))


def test_dummy_steps_touch_no_table_and_decode_to_zeros() -> None:
    """C13: their lengths are far past the block table."""
    world = FakeWorld()
    world.warm()
    real = world.step([5, 6, 7])
    plan = world.manager.plan_for(real)
    native, refreshes = plan.native, world.backend.calls["refresh"]
    tables = (native.work_info, native.reduce_info)
    for lens, dummy in ((FakeTensor(3, values=[1 << 30] * 3), True), (FakeTensor(0), False), (FakeTensor(0), True)):
        dummy_plan = world.manager.plan_for(Step(lens, owner=world, dummy=dummy))
        assert (dummy_plan.route, dummy_plan.native, dummy_plan.class_rows) == ("dummy", None, None)
        for rows in (0, 1, 3, 8, 11):
            assert world.decode(dummy_plan, rows) == [0] * rows
    assert world.backend.calls["refresh"] == refreshes
    assert world.backend.calls["decode"] == 0
    assert (native.work_info, native.reduce_info) == tables
    assert world.manager.plan_for(real) is plan  # the next real step finds its tables
    assert world.decode(plan) == [5, 6, 7]
    assert world.counters["refreshes"] == 1


def test_rows_behind_the_plan_are_zeros_of_no_earlier_step() -> None:
    """C13, C33: three rows in class 8, after a step of eight."""
    world = FakeWorld()
    world.warm()
    assert world.run([9] * 8) == [9] * 8
    plan = world.manager.plan_for(world.step([3] * 5))
    assert world.decode(plan, 8) == [3] * 5 + [0] * 3
    assert POISON not in world.decode(plan, 6)
    assert world.run([0] * 8) == [0] * 8  # all rows empty
    assert world.run([0, 4096, 0, 1]) == [0, 4096, 0, 1]  # mixed


def test_lengths_beyond_the_bound_get_the_tiles_of_the_bound_and_are_counted() -> None:
    """C55: so that no kernel reads out of bounds; C90: records have the whole length."""
    world = FakeWorld(sanitize="count")
    world.warm()
    plan = world.manager.plan_for(world.step([4095, 4096, 4097, 1 << 30, -5, 0]))
    assert world.decode(plan) == [4095, 4096, 4097, 1 << 30, 0, 0]
    assert max(end for _, _, end, _ in plan.native.work_info) == 4096 // 256
    assert world.counters["lengths_clamped"] == 2
    assert world.counters["stale_detected"] == 0


def test_ubatches_of_equal_rows_never_see_each_others_lengths() -> None:
    """C25: plan 0, plan 1, decode 0, decode 1, with tables and scratch of their own."""
    world = FakeWorld(ubatches=2)
    world.warm()
    for number in range(5):
        plans = [world.manager.plan_for(world.step([10 * ub + number + 1] * 4, ubatch=ub)) for ub in (0, 1)]
        for _layer in range(3):
            for ub in (0, 1):
                assert world.decode(plans[ub]) == [10 * ub + number + 1] * 4
    assert world.counters["refreshes"] == 10
    buffers = {plans[ub].native.buffer.root.address for ub in (0, 1)}
    assert len(buffers) == 2
    assert len([line for line in world.manager.report().arenas if line.state == "resident"]) == 2


def test_scratch_of_ubatches_and_lanes_is_disjoint() -> None:
    """C25: seen in what the kernels get."""
    seen: dict[tuple[str, int], tuple[int, int]] = {}
    world = FakeWorld(sites={"target": spec(), "draft": spec(lane="draft")}, ubatches=2, ladder=CapacityLadder([8]))
    world.warm()
    real_decode = world.backend.decode

    def decode(tables: Any, scratch: Any, *call: Any) -> None:
        seen[key] = (scratch.address, scratch.address + len(scratch))
        real_decode(tables, scratch, *call)

    world.backend.decode = decode  # type: ignore[method-assign]
    for site in ("target", "draft"):
        for ub in (0, 1):
            key = (site, ub)
            world.run([3] * 8, site=site, ubatch=ub)
    ranges = sorted(seen.values())
    assert len(ranges) == 4
    assert all(first[1] <= second[0] for first, second in pairwise(ranges))


def test_hooks_hear_of_refusals_at_every_entry_point() -> None:
    world, other = FakeWorld(), FakeWorld()
    world.warm()
    other.warm()
    heard: list[str] = []
    world.manager.add_hook(lambda event: heard.append(event.reason) if event.kind == "refuse" else None)
    with pytest.raises(RouteError, match="another PlanManager"):
        world.decode(other.manager.plan_for(other.step([1, 2])))
    with pytest.raises(RouteError, match="no finished capture"):
        world.manager.adopt(world.device.new_graph())
    with world.device.record(world.device.new_graph()):
        with pytest.raises(MintError, match="capture_phase"), world.manager.capture_phase():
            pass
        with pytest.raises(RouteError, match="close"):
            world.manager.close()
    wanted = ("another PlanManager", "no finished capture", "capture_phase", "close")
    assert len(heard) == len(wanted)
    assert all(text in reason for text, reason in zip(wanted, heard, strict=True))


def test_a_step_in_parts_counts_as_a_lookup_of_its_class() -> None:
    world = FakeWorld(ladder=CapacityLadder([4]))
    world.warm()
    assert world.run([7] * 6) == [7] * 6
    world.run([7] * 6)
    assert (world.counters["hits"], world.counters["misses"]) == (2, 0)
    world.manager.trim(0)
    world.run([7] * 6)
    assert (world.counters["hits"], world.counters["misses"]) == (2, 1)


def test_what_a_backend_makes_the_process_hold_is_told_to_be_outside_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend()
    monkeypatch.setattr(backend, "excluded", lambda device: {"its library": f"a workspace on {device.name}"})
    with PlanManager(spec(), ladder=CapacityLadder([2]), device=FakeDevice(), backend=backend) as manager:
        report = manager.report()
    assert report.excluded["its library"] == f"a workspace on {FakeDevice().name}"
    assert "a workspace on" in str(report)
    assert "compiled code" in report.excluded
