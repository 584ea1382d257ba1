"""Both styles of capture: what a graph contains, what it pins, and that its replays decode the step at hand."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import planlife
from planlife import PlanManager, RouteError, StalePlanError, Step, StepPlan

from .world import BEFORE_REPLAY, IN_GRAPH, MAX_PAGES, Owner, World, both_styles, small_spec

CAPTURE_LENS = [64] * 8


def pins(manager: PlanManager) -> dict[str, int]:
    report = manager.report()
    plans = {f"{plan.site}/{plan.class_rows}/ub{plan.ubatch}": plan.num_pins for plan in report.plans if plan.num_pins}
    return plans | {
        f"scratch/{arena.lane}/ub{arena.ubatch}": arena.num_pins for arena in report.arenas if arena.num_pins
    }


@both_styles
def test_a_replay_decodes_the_lengths_of_now(style: str) -> None:
    """C01: as a fresh eager decode, and as the dense reference."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    graph = world.capture(world.step(), style)
    at_capture = world.expected()
    for lens in ([500, 3, 0, 257, 64, 1, 256, 17], [1] * 8, [0] * 7 + [640]):
        world.set_lens(lens)
        replayed = world.replay(graph, world.step(), style).clone()
        world.assert_right(replayed, world.expected())
        world.assert_wrong(replayed, at_capture)
        world.assert_same(replayed, world.eager(world.step()))


@both_styles
def test_a_warm_up_with_the_same_metadata_leaves_the_graph_its_refresh(style: str) -> None:
    """C07: owner, Step object, tensors and stream are those of the warm-up."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    for _ in range(2):
        world.eager(step)
    graph = world.capture(step, style)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())


@both_styles
def test_two_graphs_of_the_same_metadata_both_follow_their_lengths(style: str) -> None:
    """C08: replayed in turns, with other lengths in between."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    graphs = [world.capture(step, style), world.capture(step, style)]
    for index in range(8):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graphs[index % 3 % 2], world.step(), style), world.expected())


def test_an_in_graph_capture_costs_a_replay_no_host_work() -> None:
    """C08: g.replay() alone, without plan_for and guard, decodes the lengths of now."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    graphs = [world.capture(step, IN_GRAPH), world.capture(step, IN_GRAPH)]
    refreshes = world.counters()["refreshes"]
    for graph in graphs * 3:
        world.set_lens(world.random_lens(8))
        world.output.fill_(torch.nan)
        graph.replay()
        world.assert_right(world.output, world.expected())
    assert world.counters()["refreshes"] == refreshes


@both_styles
def test_a_replay_calls_no_python_of_planlife_or_of_the_model(style: str) -> None:
    """What a graph holds is launches: no planner, no backend and no layer runs as Python, whatever became of them."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    layer_calls = 0
    scale = world.spec.head_dim**-0.5

    def layer(plan: StepPlan) -> None:
        nonlocal layer_calls
        layer_calls += 1
        call = (world.output, world.query, world.key_cache, world.value_cache, world.tables, scale)
        world.manager.pa_decode(plan, *call, **world.scales)

    graph = world.capture(world.step(), style, layer)
    scale = 17.0  # a captured Python value: changing it afterwards changes nothing
    world.set_lens(world.random_lens(8))
    step = world.step()
    world.manager.plan_for(step)
    world.manager.guard(graph, step)
    world.output.fill_(torch.nan)
    called: set[str] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        graph.replay()
    finally:
        sys.setprofile(None)
    assert layer_calls == 1
    folders = [Path(planlife.__file__).parent, Path(__file__).parent]
    ours = {Path(name).name for name in called if any(Path(name).is_relative_to(folder) for folder in folders)}
    # The emulated graph itself shows that calls are seen; modes of the caller are what it asks about.
    assert ours == ({"emulated_graph.py", "ambient.py"} if world.device == "cpu" else set())
    world.assert_right(world.output, world.expected())


def test_100_steps_planned_before_their_replay_equal_eager_ones() -> None:
    """C51: the graph reads the plan and contains no refresh; pa_decode is what pins it."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    plan = world.manager.plan_for(world.step())
    assert pins(world.manager) == {}
    with world.manager.graph() as graph:
        world.decode(plan)
        assert pins(world.manager) == {"default/8/ub0": 1, "scratch/main/ub0": 1}
    for index in range(100):
        world.set_lens(world.random_lens(8))
        replayed = world.replay(graph, world.step(), BEFORE_REPLAY).clone()
        world.assert_same(replayed, world.eager(world.step()))
        if index % 10 == 0:
            world.assert_right(replayed, world.expected())
    # The positive control: without its plan_for a replay still decodes the last planned lengths.
    last = world.expected()
    world.lens.copy_(torch.full_like(world.lens, 5))
    world.output.fill_(torch.nan)
    graph.replay()
    world.assert_right(world.output, last)
    world.assert_wrong(world.output, world.expected())


def test_100_in_graph_steps_equal_eager_ones() -> None:
    """C51, the other style: lengths unlike the capture's, more steps than anything counts to."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    graph = world.capture(world.step(), IN_GRAPH)
    for index in range(100):
        world.set_lens(world.random_lens(8))
        replayed = world.replay(graph, world.step()).clone()
        world.assert_same(replayed, world.eager(world.step()))
        if index % 10 == 0:
            world.assert_right(replayed, world.expected())


@both_styles
def test_one_graph_reads_several_sites(style: str) -> None:
    """Full and windowed layers in turns, in one capture; each plan follows its own window."""
    sites = {"full": small_spec(), "windowed": small_spec(sliding_window=100)}
    world = World(sites=sites, warm=True)
    outputs = {site: torch.full_like(world.output, torch.nan) for site in sites}
    world.set_lens(CAPTURE_LENS)

    def steps() -> list[Step]:
        owner = Owner()
        return [world.step(site=site, owner=owner) for site in sites]

    def plans(step_list: Sequence[Step]) -> list[object]:
        return [world.manager.plan_for(step) for step in step_list]

    captured = steps()
    ready = plans(captured) if style == BEFORE_REPLAY else None
    with world.manager.graph() as graph:
        for _layer in range(2):
            for plan, output in zip(ready or plans(captured), outputs.values(), strict=True):
                world.decode(plan, output=output)
    assert pins(world.manager) == {"full/8/ub0": 1, "windowed/8/ub0": 1, "scratch/main/ub0": 1}
    for index in range(6):
        world.set_lens(world.random_lens(8))
        now = steps()
        if style == BEFORE_REPLAY:
            plans(now)
        for output in outputs.values():
            output.fill_(torch.nan)
        world.manager.replay(graph, *(now if index % 2 else reversed(now)))
        for site, output in outputs.items():
            world.assert_right(output, world.expected(spec=sites[site]))
    world.set_lens([500] * 8)
    world.assert_wrong(world.expected(spec=sites["windowed"]), world.expected(spec=sites["full"]))


@both_styles
def test_one_graph_reads_two_ubatches_of_equal_rows(style: str) -> None:
    """Equal row counts, different lengths, both planned before either is decoded."""
    world = World(ubatches=2, warm=True)
    halves = [slice(0, 4), slice(4, 8)]
    lens = [world.lens_buffer(4), world.lens_buffer(4)]

    def steps() -> list[Step]:
        owner = Owner()
        return [world.step(lens=lens[index], ubatch=index, owner=owner) for index in range(2)]

    def set_lens(values: list[int]) -> None:
        world.set_lens(values)
        for half, buffer in zip(halves, lens, strict=True):
            buffer.copy_(world.lens[half])

    set_lens(CAPTURE_LENS)
    captured = steps()
    ready = [world.manager.plan_for(step) for step in captured] if style == BEFORE_REPLAY else None
    with world.manager.graph() as graph:
        plans = ready or [world.manager.plan_for(step) for step in captured]
        for _layer in range(2):
            for plan, half in zip(plans, halves, strict=True):
                world.decode(plan, query=world.query[half], output=world.output[half], tables=world.tables[half])
    assert pins(world.manager) == {
        "default/4/ub0": 1, "default/4/ub1": 1, "scratch/main/ub0": 1, "scratch/main/ub1": 1,
    }  # fmt: skip
    for _ in range(6):
        set_lens(world.random_lens(8))
        now = steps()
        if style == BEFORE_REPLAY:
            for step in now:
                world.manager.plan_for(step)
        world.output.fill_(torch.nan)
        world.manager.replay(graph, *now)
        world.assert_right(world.output, world.expected())


def second_reads(world: World, owner: Owner) -> dict[str, Step]:
    return {
        "drafts in place": world.step(owner=owner, revision=1),
        "another buffer": world.step(lens=world.lens.clone(), owner=owner),
        "another owner": world.step(),
    }


@pytest.mark.parametrize("second", ["drafts in place", "another buffer", "another owner"])
def test_a_before_replay_capture_reads_one_plan_for_one_step_only(second: str) -> None:
    """C69: both refreshes would precede the replay. As many layers of one step as there are may read it."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    owner = Owner()
    target = world.manager.plan_for(world.step(owner=owner))
    graph = world.manager.graph()
    with pytest.raises(RouteError, match="for a second step"), graph:
        world.decode(target)
        world.decode(target)
        draft = world.elsewhere(lambda: world.manager.plan_for(second_reads(world, owner)[second]))
        world.decode(draft)
    assert pins(world.manager) == {}

    draft = world.manager.plan_for(second_reads(world, owner)[second])
    for error in (StalePlanError, RouteError):  # all were planned first: the tables hold the last one's lengths
        with pytest.raises(error, match="must not be recorded"), world.manager.graph():
            world.decode(target)
            world.decode(draft)
    with world.manager.graph() as graph:
        world.decode(draft)
        world.decode(draft)
    graph.replay()
    world.assert_right(world.output, world.expected())


def test_sites_whose_layers_differ_are_refused_before_replay_and_served_in_graph() -> None:
    """C69: shared_lengths=False; a plan made outside would give all layers one layer's lengths."""
    world = World(warm=True, sites={"default": small_spec(shared_lengths=False)})
    lens = [world.lens, world.lens_buffer()]
    outputs = [world.output, torch.full_like(world.output, torch.nan)]
    world.set_lens(CAPTURE_LENS)
    owner = Owner()
    plan = world.manager.plan_for(world.step(owner=owner))
    with pytest.raises(RouteError, match="shared_lengths=False"), world.manager.graph():
        world.decode(plan)
    with world.manager.graph() as graph:
        for buffer, output in zip(lens, outputs, strict=True):
            world.decode(world.manager.plan_for(world.step(lens=buffer, owner=owner)), output=output)
    for _ in range(3):
        world.set_lens([length // 2 for length in world.random_lens(8)])
        lens[1].copy_(world.lens * 2)
        world.tables[:] = torch.randperm(MAX_PAGES, generator=world.generator) + 1
        for output in outputs:
            output.fill_(torch.nan)
        world.manager.replay(graph, *(world.step(lens=buffer) for buffer in lens))
        for buffer, output in zip(lens, outputs, strict=True):
            world.assert_right(output, world.expected(lens=buffer))


@pytest.mark.parametrize("buffers", [1, 2])
def test_an_in_graph_capture_reads_one_plan_for_as_many_steps_as_it_plans(buffers: int) -> None:
    """C69, the other style: target and draft in one graph, in place or from two buffers."""
    world = World(warm=True)
    lens = [world.lens, world.lens if buffers == 1 else world.lens_buffer()]
    outputs = [world.output, torch.full_like(world.output, torch.nan)]
    owner = Owner()
    with world.manager.graph() as graph:
        for revision in range(2):
            if buffers == 1 and revision:
                lens[0].add_(1)
            plan = world.manager.plan_for(world.step(lens=lens[revision], owner=owner, revision=revision))
            world.decode(plan, output=outputs[revision])
    for _ in range(4):
        world.set_lens([min(length, 500) for length in world.random_lens(8)])
        world.tables[:] = torch.randperm(MAX_PAGES, generator=world.generator) + 1
        if buffers == 2:
            lens[1].copy_(world.lens.flip(0))
        first = world.expected()
        steps = [world.step(lens=one, owner=owner, revision=index) for index, one in enumerate(lens)]
        for output in outputs:
            output.fill_(torch.nan)
        world.manager.replay(graph, *steps)
        world.assert_right(outputs[0], first)
        world.assert_right(outputs[1], world.expected(lens=lens[1]))


def test_a_step_of_more_rows_than_the_ladder_is_captured_in_parts() -> None:
    """Twenty rows over a ladder of eight, without a fallback: guard takes the one step that was planned."""
    world = World(rows=8, warm=True)
    lens = world.lens_buffer(20)
    tables = torch.full((20, MAX_PAGES), -1, dtype=torch.int32, device=world.device)
    query, output = world.buffers(20)
    with world.manager.graph() as graph:
        world.decode(world.manager.plan_for(world.step(lens=lens)), query=query, output=output, tables=tables)
    for _ in range(4):
        world.set_lens(world.random_lens(20), into=lens, tables=tables)
        output.fill_(torch.nan)
        world.manager.replay(graph, world.step(lens=lens))
        world.assert_right(output, world.expected(query=query, lens=lens, tables=tables))
    with pytest.raises(StalePlanError, match="length buffer address"):
        world.manager.guard(graph, world.step(lens=lens.clone()))
    with pytest.raises(StalePlanError, match="rows"):
        world.manager.guard(graph, world.step(lens=lens[:8]))
    made_before = world.manager.plan_for(world.step(lens=lens))
    with pytest.raises(RouteError, match="in parts"), world.manager.graph():
        world.decode(made_before, query=query, output=output, tables=tables)


def test_a_plan_made_while_recording_is_refused_in_eager_code() -> None:
    """Eager code never sees in-graph tables: replays change them unseen."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    with world.manager.graph() as graph:
        captured = world.manager.plan_for(step)
        world.decode(captured)
    world.output.fill_(torch.nan)
    with pytest.raises(RouteError, match="Call plan_for again for an eager step"):
        world.decode(captured)
    assert world.output.isnan().all()
    eager = world.manager.plan_for(step)
    assert captured.captured and not eager.captured
    world.assert_right(world.decode(eager), world.expected())
    graph.replay()
    world.assert_right(world.output, world.expected())


def test_one_capture_may_read_an_eager_plan_and_an_in_graph_plan_of_the_same_tables() -> None:
    """Target planned before the replay, draft planned in the graph: each has its own tables."""
    world = World(warm=True)
    draft_lens, draft_output = world.lens_buffer(), torch.full_like(world.output, torch.nan)
    world.set_lens(CAPTURE_LENS)
    target = world.manager.plan_for(world.step())
    with world.manager.graph() as graph:
        world.decode(target)
        world.decode(world.manager.plan_for(world.step(lens=draft_lens)), output=draft_output)
        world.decode(target)
    for _ in range(4):
        world.set_lens(world.random_lens(8))
        draft_lens.copy_((world.lens - 1).clamp_min(0))
        step = world.step()
        world.manager.plan_for(step)
        world.output.fill_(torch.nan)
        draft_output.fill_(torch.nan)
        world.manager.replay(graph, world.step(lens=draft_lens), step)
        world.assert_right(world.output, world.expected())
        world.assert_right(draft_output, world.expected(lens=draft_lens))
    with pytest.raises(StalePlanError, match="owner"):
        world.manager.guard(graph, world.step(lens=draft_lens), world.step())


def test_piecewise_graphs_refuse_tables_that_another_graph_refreshed_in_between() -> None:
    """C71: graph 2 reads what graph 1 refreshed; graph 3 refreshes the same tables."""
    world = World(warm=True)
    second_output, other_lens = torch.full_like(world.output, torch.nan), world.lens_buffer()
    world.set_lens(CAPTURE_LENS)
    with world.manager.graph() as first:
        plan = world.manager.plan_for(world.step())
        world.decode(plan)
    with world.manager.graph() as second:
        world.decode(plan, output=second_output)
    with world.manager.graph() as third:
        world.manager.plan_for(world.step(lens=other_lens))

    with pytest.raises(StalePlanError):
        world.manager.guard(second, world.step())
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        step = world.step()
        world.replay(first, step)
        second_output.fill_(torch.nan)
        world.manager.replay(second, step)
        world.assert_right(second_output, world.expected())

        world.manager.replay(third, world.step(lens=other_lens))
        with pytest.raises(StalePlanError, match="refreshing capture"):
            world.manager.guard(second, step)
        world.replay(first, step)
        world.manager.guard(second, step)
        with pytest.raises(StalePlanError, match="owner"):
            world.manager.guard(second, world.step())


def test_a_captured_refresh_counts_only_once_its_graph_was_replayed() -> None:
    """C71: after its capture alone the in-graph tables still hold nothing of the step."""
    world = World(warm=True)
    second_output = torch.full_like(world.output, torch.nan)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    with world.manager.graph() as first:
        plan = world.manager.plan_for(step)
        world.decode(plan)
    with world.manager.graph() as second:
        world.decode(plan, output=second_output)
    with pytest.raises(StalePlanError, match="graph of capture"):
        world.manager.guard(second, step)
    world.replay(first, step)
    world.manager.replay(second, step)
    world.assert_right(second_output, world.expected())


def test_piecewise_graphs_that_each_plan_work_in_any_order() -> None:
    """C71, the way out: plan_for in every graph."""
    world = World(warm=True)
    lens = [world.lens_buffer() for _ in range(3)]
    graphs = [world.capture(world.step(lens=buffer), IN_GRAPH) for buffer in lens]
    for order in itertools.permutations(range(3)):
        for index in order:
            world.set_lens(world.random_lens(8), into=lens[index])
            world.replay(graphs[index], world.step(lens=lens[index]))
            world.assert_right(world.output, world.expected(lens=lens[index]))


@both_styles
def test_a_graph_keeps_its_captured_length_buffer(style: str) -> None:
    """C54: the engine drops it after the capture; it goes with the graph's pins."""
    world = World(warm=True)
    lens = world.lens_buffer()
    world.set_lens([500, 3, 257, 64, 1], into=lens)
    expected = world.expected(lens=lens)
    graph = world.capture(Step(lens, owner=Owner()), style)
    # Other steps take over every mark, so that nothing but the graph's pins can hold the buffer.
    world.lens.copy_(lens)
    world.capture(world.step(), style)
    world.eager(world.step())
    alive = weakref.ref(lens)
    del lens
    world.settle()
    assert alive() is not None
    if style == IN_GRAPH:
        world.output.fill_(torch.nan)
        graph.replay()
        world.assert_right(world.output, expected)
    world.manager.release(graph)
    world.settle()
    assert alive() is None


@both_styles
def test_a_graph_keeps_what_it_reads_when_its_manager_is_dropped(style: str) -> None:
    """C54: nobody closed the manager; tables, scratch and lengths go with the graph."""
    world = World(warm=True)
    lens = world.lens_buffer()
    world.set_lens([500, 3, 257, 64, 1], into=lens)
    expected = world.expected(lens=lens)
    graph = world.capture(Step(lens, owner=Owner()), style)
    if style == BEFORE_REPLAY:
        world.manager.plan_for(world.step(lens=lens))
    alive = weakref.ref(lens)
    del lens, world.manager
    world.settle()
    for _ in range(2):
        world.output.fill_(torch.nan)
        graph.replay()
        world.assert_right(world.output, expected)
    assert alive() is not None
    del graph
    world.settle()
    assert alive() is None


@both_styles
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_graphs_may_go_in_any_order_and_the_rest_replay_right(style: str, order: tuple[int, ...]) -> None:
    """Three graphs of one lane, two of one class; released, reset and collected."""
    world = World(warm=True)
    rows = [8, 7, 4]
    graphs = {index: world.capture(world.step(rows[index]), style) for index in range(3)}
    for number, gone in enumerate(order):
        if number == 0:
            world.manager.release(graphs.pop(gone))
        elif number == 1:
            graphs.pop(gone).reset()
        else:
            del graphs[gone]
        world.settle()
        world.manager.trim(0)
        num_left = len(graphs)
        assert pins(world.manager).get("scratch/main/ub0", 0) == num_left
        assert bool(world.manager.report().resident_bytes) == bool(num_left)
        for index in graphs:
            world.set_lens(world.random_lens(rows[index]))
            output = world.replay(graphs[index], world.step(rows[index]), style)
            world.assert_right(output[: rows[index]], world.expected()[: rows[index]])
    world.set_lens(world.random_lens(8))
    world.assert_right(world.eager(world.step()), world.expected())


@both_styles
def test_a_graph_that_was_released_or_reset_is_refused(style: str) -> None:
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    for end in (world.manager.release, lambda graph: graph.reset()):
        graph = world.capture(step, style)
        world.replay(graph, step, style)
        end(graph)
        world.settle()
        with pytest.raises(RouteError, match="holds no pins here"):
            world.manager.guard(graph, step)
        assert pins(world.manager) == {}


@both_styles
def test_a_pinned_plan_survives_trim_and_a_replay_after_invalidate_is_right_or_refused(style: str) -> None:
    world = World(warm=True)
    world.set_lens([500, 3, 257, 64, 1])
    step = world.step()
    graph = world.capture(step, style)
    world.manager.trim(0)
    world.assert_right(world.replay(graph, step, style), world.expected())
    world.manager.invalidate()
    if style == BEFORE_REPLAY:
        with pytest.raises(StalePlanError, match="no known lengths"):
            world.manager.guard(graph, step)
    world.assert_right(world.replay(graph, step, style), world.expected())


@both_styles
def test_a_graph_may_be_captured_again_on_the_same_object(style: str) -> None:
    """C78: its old pins go first, and what it held of the old capture with them."""
    world = World(warm=True)
    small = world.lens_buffer(4)
    world.set_lens([500, 3, 257, 64], into=small)
    graph = world.capture(Step(small, owner=Owner()), style)
    assert set(pins(world.manager)) == {"default/4/ub0", "scratch/main/ub0"}
    for _ in range(2):
        world.set_lens(CAPTURE_LENS)
        assert world.capture(world.step(), style, g=graph) is graph
        assert pins(world.manager) == {"default/8/ub0": 1, "scratch/main/ub0": 1}
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())
    with pytest.raises(StalePlanError, match="rows"):
        world.manager.guard(graph, world.step(lens=small))


@both_styles
def test_a_phase_may_be_opened_again_in_service_after_evictions(style: str) -> None:
    """C78: nothing compiles twice, and captures of evicted classes work again."""
    world = World(warm=True)
    world.set_lens([500, 3, 257, 64, 1])
    graph = world.capture(world.step(), style)
    compiles = world.counters()["compiles"]
    del graph
    world.settle()
    world.manager.trim(0)
    assert world.manager.report().resident_bytes == 0
    with world.manager.capture_phase():
        plan_step = world.step()
        world.manager.plan_for(plan_step)
        graph = world.capture(plan_step, style)
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graph, world.step(), style), world.expected())
    assert world.counters()["compiles"] == compiles
    assert world.counters()["compiles_after_seal"] == 0


@both_styles
@pytest.mark.parametrize("adopted", ["before it touches a plan", "after it touched one"])
def test_an_engines_own_capture_pins_at_once_and_is_guarded_once_adopted(style: str, adopted: str) -> None:
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    graph = world.new_graph()
    with world.record(graph):
        if adopted == "before it touches a plan":
            world.manager.adopt(graph)
        world.decode(plan or world.manager.plan_for(step))
        if adopted == "after it touched one":
            world.manager.adopt(graph)
    assert pins(world.manager) == {"default/8/ub0": 1, "scratch/main/ub0": 1}
    world.manager.adopt(graph)  # again: nothing changes
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())
    with pytest.raises(StalePlanError, match="rows"):
        world.manager.guard(graph, world.step(7))


@both_styles
@pytest.mark.parametrize("end", ["reset", "collected"])
def test_pins_of_an_engines_own_capture_go_with_its_graph(style: str, end: str) -> None:
    """Without adopt(): the graph's own end is what tells."""
    world = World(warm=True)
    world.set_lens(CAPTURE_LENS)
    step = world.step()
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    graph = world.new_graph()
    with world.record(graph):
        world.decode(plan or world.manager.plan_for(step))
    assert pins(world.manager)
    if end == "reset":
        graph.reset()
    else:
        del graph
    world.settle()
    assert pins(world.manager) == {}


@both_styles
def test_two_managers_may_share_a_device_and_a_capture(style: str) -> None:
    """One opens the capture, the other adopts it; each pins and guards its own."""
    worlds = [World(warm=True, seed=seed) for seed in range(2)]
    for world in worlds:
        world.set_lens(CAPTURE_LENS)
    steps = [world.step() for world in worlds]
    plans = [world.manager.plan_for(step) for world, step in zip(worlds, steps, strict=True)]
    first, second = (world.manager for world in worlds)
    with pytest.raises(RouteError, match="another PlanManager"):
        worlds[0].decode(plans[1])
    with first.graph() as graph:
        for world, step, plan in zip(worlds, steps, plans, strict=True):
            world.decode(plan if style == BEFORE_REPLAY else world.manager.plan_for(step))
        second.adopt(graph)
    for world in worlds:
        assert pins(world.manager) == {"default/8/ub0": 1, "scratch/main/ub0": 1}
    for _ in range(3):
        for world in worlds:
            world.set_lens(world.random_lens(8))
            step = world.step()
            if style == BEFORE_REPLAY:
                world.manager.plan_for(step)
            world.manager.guard(graph, step)
            world.output.fill_(torch.nan)
        graph.replay()
        for world in worlds:
            world.assert_right(world.output, world.expected())
    with second.graph(graph):
        pass
    worlds[0].settle()
    for world in worlds:
        assert pins(world.manager) == {}


def test_adopting_nothing_is_refused() -> None:
    world = World(warm=True)
    with pytest.raises(RouteError, match="no finished capture"):
        world.manager.adopt(world.new_graph())
    world.set_lens(CAPTURE_LENS)
    failed = world.new_graph()
    with pytest.raises(ZeroDivisionError), world.record(failed):
        world.decode(world.manager.plan_for(world.step()))
        raise ZeroDivisionError
    with pytest.raises(RouteError, match="no finished capture"):
        world.manager.adopt(failed)


@pytest.mark.parametrize("recorded_by", ["manager", "engine"])
def test_a_recorded_refresh_that_no_recorded_decode_reads_is_reported_once(recorded_by: str) -> None:
    """C32: the graph looks planned, and its layers run something else."""
    world = World(warm=True)
    events: list[Any] = []
    world.manager.add_hook(events.append)

    def capture(body: Any) -> Any:
        if recorded_by == "manager":
            with world.manager.graph() as g:
                body()
        else:
            g = world.new_graph()
            with world.record(g):
                world.manager.adopt(g)
                body()
        world.manager.adopt(g)
        return g

    world.set_lens([300, 17])
    step = world.step()
    decoded = capture(lambda: world.decode(world.manager.plan_for(step)))
    assert [event for event in events if event.kind == "stale"] == []  # positive control
    unread = capture(lambda: world.manager.plan_for(step))
    (event,) = [event for event in events if event.kind == "stale"]
    assert event.subject == "default/8/ub0" and "no decode in the graph reads it" in event.reason
    assert world.counters()["stale_detected"] == 1
    del decoded, unread
