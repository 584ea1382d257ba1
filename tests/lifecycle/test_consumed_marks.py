"""A skip needs proof: what a replay consumed is planned again, whatever owner, version and address say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, ConfigError, RouteError, StalePlanError, Step, StepPlan

from .world import BEFORE_REPLAY, IN_GRAPH, World, backend_with, both_styles, small_spec

LENS = [500, 3, 257, 64, 1, 0, 256, 12]


class Runner:
    """The object that a small engine hands over as owner of every step: it lives for ever."""


RUNNER = Runner()


def by_torch(world: World, values: torch.Tensor) -> None:
    with torch.inference_mode(world.lens.is_inference()):
        world.lens.copy_(values)


def by_a_replay(world: World, values: torch.Tensor) -> None:
    """A graph of the engine's writes them: no version moves."""
    if not hasattr(world, "writer"):
        world.new_lens = torch.zeros_like(world.lens)  # type: ignore[attr-defined]
        world.writer = world.new_graph()  # type: ignore[attr-defined]
        with world.record(world.writer):  # type: ignore[attr-defined]
            world.lens.copy_(world.new_lens)  # type: ignore[attr-defined]
    world.new_lens.copy_(values)  # type: ignore[attr-defined]
    world.writer.replay()  # type: ignore[attr-defined]


def by_numpy(world: World, values: torch.Tensor) -> None:
    """Through shared memory; a GPU has none with numpy."""
    if world.device == "cpu":
        world.lens.numpy()[:] = values.numpy()
    else:
        by_a_replay(world, values)


def write(world: World, how: Callable[..., None], lens: list[int]) -> None:
    """New pages for rows of these lengths, which are then written into the buffer in some way."""
    scratch = torch.zeros_like(world.lens)
    world.set_lens(lens, into=scratch)
    how(world, scratch)


def make_world(*, inference: bool = False, **options: Any) -> World:
    world = World(warm=True, **options)
    if inference:
        with torch.inference_mode():
            world.lens = world.lens_buffer()
    return world


KINDS = [
    pytest.param(True, by_torch, id="inference tensors"),
    pytest.param(False, by_numpy, id="numpy"),
    pytest.param(False, by_a_replay, id="a replay"),
]


@pytest.mark.parametrize("inference, how", KINDS)
@pytest.mark.parametrize("calls", ["plan_for, guard, g.replay", "replay", "plan_for, replay"])
def test_one_owner_for_ever_is_right_in_66_replays(calls: str, inference: bool, how: Any) -> None:
    """C87, C88."""
    world = make_world(inference=inference)
    manager = world.manager
    write(world, how, LENS)
    graph = world.capture(Step(world.lens, owner=RUNNER), BEFORE_REPLAY)
    for _ in range(66):
        write(world, how, world.random_lens(8))
        step = Step(world.lens, owner=RUNNER)
        world.output.fill_(torch.nan)
        if "plan_for" in calls:
            manager.plan_for(step)
        if "guard" in calls:
            manager.guard(graph, step)
            graph.replay()
        else:
            manager.replay(graph, step)
        world.assert_right(world.output, world.expected())


@pytest.mark.parametrize("inference, how", KINDS)
@pytest.mark.parametrize("style", [BEFORE_REPLAY, IN_GRAPH])
def test_eager_steps_and_replays_of_one_owner_in_turn_are_right(style: str, inference: bool, how: Any) -> None:
    """C88, C109: an eager step, then `replay` of the next one, in one class; the owner never changes."""
    world = make_world(inference=inference)
    write(world, how, LENS)
    graph = world.capture(Step(world.lens, owner=RUNNER), style)
    for number in range(20):
        write(world, how, world.random_lens(8))
        step = Step(world.lens, owner=RUNNER)
        world.output.fill_(torch.nan)
        if number % 2:
            world.decode(world.manager.plan_for(step))
        else:
            world.manager.replay(graph, step)
        world.assert_right(world.output, world.expected())


@pytest.mark.parametrize("inference, how", KINDS)
def test_a_draft_that_plans_alone_after_its_targets_replay_is_right(inference: bool, how: Any) -> None:
    """C109, on shared tables and on tables of its own."""
    for plan_of in ("target", None):
        sites = {"target": small_spec(), "draft": small_spec(plan_of=plan_of)}
        world = make_world(inference=inference, sites=sites)
        write(world, how, LENS)
        graph = world.capture(Step(world.lens, site="target", owner=RUNNER), BEFORE_REPLAY)
        for _ in range(6):
            for site in ("target", "draft"):
                write(world, how, world.random_lens(8))
                step = Step(world.lens, site=site, owner=RUNNER)
                world.output.fill_(torch.nan)
                if site == "target":
                    world.manager.replay(graph, step)
                else:
                    world.decode(world.manager.plan_for(step))
                world.assert_right(world.output, world.expected())


def piecewise(world: World, num_pieces: int = 3) -> list[Any]:
    """Graphs of one layer each, all before replay, over one StepPlan."""
    plan = world.manager.plan_for(Step(world.lens, owner="capture"))
    graphs = []
    for _ in range(num_pieces):
        with world.manager.graph() as graph:
            world.decode(plan)
        graphs.append(graph)
    return graphs


@pytest.mark.parametrize("inference", [False, True], ids=["tensors with a version", "inference tensors"])
@pytest.mark.parametrize("by", ["guard", "replay"])
@pytest.mark.parametrize("owner", ["new", "one for ever"])
def test_a_piecewise_step_refreshes_once(by: str, owner: str, inference: bool) -> None:
    """C110: plan, replay a piece, an eager layer, the next piece, with one StepPlan."""
    world = make_world(inference=inference)
    world.set_lens(LENS)
    graphs = piecewise(world)
    for number in range(5):
        world.set_lens(world.random_lens(8))
        step = Step(world.lens, owner=RUNNER if owner == "one for ever" else number)
        before = world.counters()["refreshes"]
        plan = world.manager.plan_for(step)
        for graph in graphs:
            world.output.fill_(torch.nan)
            if by == "guard":
                world.manager.guard(graph, step)
                graph.replay()
            else:
                world.manager.replay(graph, step)
            world.assert_right(world.output, world.expected())
            world.output.fill_(torch.nan)
            world.assert_right(world.decode(plan), world.expected())
        assert world.counters()["refreshes"] == before + 1


def test_an_eager_step_of_32_layers_refreshes_once() -> None:
    world = make_world()
    for number in range(3):
        world.set_lens(world.random_lens(8))
        before = world.counters()["refreshes"]
        for _ in range(32):
            world.decode(world.manager.plan_for(Step(world.lens, owner=number)))
        assert world.counters()["refreshes"] == before + 1


def test_a_guard_accepts_a_step_once_for_a_graph() -> None:
    world = make_world()
    world.set_lens(LENS)
    first, second, _ = piecewise(world)
    step = world.step()
    world.manager.plan_for(step)
    world.manager.guard(first, step)
    with pytest.raises(StalePlanError, match="guard has already accepted this step for this graph.* call it once per"):
        world.manager.guard(first, step)
    world.manager.guard(second, step)
    world.manager.plan_for(step)
    world.manager.guard(first, step)


def test_a_graph_that_was_captured_again_is_another_graph() -> None:
    world = make_world()
    world.set_lens(LENS)
    step = world.step()
    plan = world.manager.plan_for(step)
    graph = world.capture(step, BEFORE_REPLAY)
    world.manager.guard(graph, step)
    with world.manager.graph(graph):
        world.decode(plan)
    world.manager.guard(graph, step)


def test_a_refused_guard_consumes_nothing() -> None:
    world = make_world(sites={"a": small_spec(), "b": small_spec()})
    world.set_lens(LENS)
    steps = [world.step(site=site) for site in ("a", "b")]
    plans = [world.manager.plan_for(step) for step in steps]
    with world.manager.graph() as graph:
        for plan in plans:
            world.decode(plan)
    for step in steps:
        world.manager.plan_for(step)
    with pytest.raises(StalePlanError, match="no step for it"):
        world.manager.guard(graph, steps[0])
    skipped = world.counters()["refreshes_skipped"]
    for step in steps:
        world.manager.plan_for(step)
    assert world.counters()["refreshes_skipped"] == skipped + 2
    world.manager.guard(graph, *steps)


def test_two_ubatches_are_consumed_apart() -> None:
    world = make_world(ubatches=2, ladder=CapacityLadder([4]))
    world.set_lens(LENS)
    halves = [world.lens[:4], world.lens[4:]]
    rows = [slice(0, 4), slice(4, 8)]

    def layer(plan: StepPlan, ub: int) -> None:
        world.decode(plan, query=world.query[rows[ub]], output=world.output[rows[ub]], tables=world.tables[rows[ub]])

    graphs = []
    for ub in (0, 1):
        plan = world.manager.plan_for(Step(halves[ub], owner="capture", ubatch=ub))
        with world.manager.graph() as graph:
            layer(plan, ub)
        graphs.append(graph)
    for _ in range(4):
        world.set_lens(world.random_lens(8))
        steps = [Step(half, owner=RUNNER, ubatch=ub) for ub, half in enumerate(halves)]
        for step in steps:
            world.manager.plan_for(step)
        world.output.fill_(torch.nan)
        for graph, step in zip(graphs, steps, strict=True):
            world.manager.guard(graph, step)
            graph.replay()
        world.assert_right(world.output, world.expected())


def test_a_launch_that_fails_leaves_no_mark_on_what_the_graph_reads() -> None:
    """Eager tables too: the next plan_for refreshes, and a guard before it refuses."""
    world = make_world()
    world.set_lens(LENS)
    graph = world.capture(world.step(), BEFORE_REPLAY)
    step = world.step()
    plan = world.manager.plan_for(step)
    graph.reset()  # what a broken graph does at its launch
    broken = world.capture(step, BEFORE_REPLAY)
    device = world.manager._device
    replay, device.replay = device.replay, fail  # type: ignore[method-assign]
    try:
        with pytest.raises(ZeroDivisionError):
            world.manager.replay(broken, step)
    finally:
        device.replay = replay  # type: ignore[method-assign]
    assert plan.tables.mark is None  # type: ignore[union-attr]
    with pytest.raises(StalePlanError, match="no known lengths"):
        world.manager.guard(broken, step)
    world.output.fill_(torch.nan)
    world.manager.replay(broken, step)
    world.assert_right(world.output, world.expected())


def fail(graph: object) -> None:
    raise ZeroDivisionError


def test_tables_that_another_graph_refreshes_are_read_once_for_each_of_its_replays() -> None:
    """The one to replay first is named; one owner for ever is right here too."""
    world = make_world(inference=True)
    world.set_lens(LENS)
    step = Step(world.lens, owner=RUNNER)
    other_output = torch.full_like(world.output, torch.nan)
    with world.manager.graph() as first:
        plan = world.manager.plan_for(step)
        world.decode(plan)
    with world.manager.graph() as second:
        world.decode(plan, output=other_output)
    for _ in range(3):
        for call in (world.manager.guard, world.manager.replay):
            with pytest.raises(StalePlanError, match=r"Replay graph of capture \d+ for this step first"):
                call(second, step)
        world.set_lens(world.random_lens(8))
        world.manager.replay(first, step)
        other_output.fill_(torch.nan)
        world.manager.replay(second, step)
        world.assert_right(other_output, world.expected())


def test_replay_plans_each_table_set_once_and_nothing_that_the_graph_refreshes() -> None:
    sites = {"target": small_spec(), "draft": small_spec(plan_of="target"), "windowed": small_spec(sliding_window=100)}
    world = make_world(sites=sites)
    world.set_lens(LENS)
    owner = object()
    steps = [Step(world.lens, site=site, owner=owner) for site in sites]
    plans = [world.manager.plan_for(step) for step in steps[:2]]
    with world.manager.graph() as graph:
        for plan in plans:
            world.decode(plan)
        world.decode(world.manager.plan_for(steps[2]))
    for number in range(3):
        world.set_lens(world.random_lens(8))
        steps = [Step(world.lens, site=site, owner=number) for site in sites]
        before = world.counters()["refreshes"]
        world.manager.replay(graph, *steps)
        assert world.counters()["refreshes"] == before + 1
    other = Step(world.lens, site="draft", owner="another")
    before = world.counters()
    with pytest.raises(StalePlanError, match="two steps of this replay need different lengths in one table set"):
        world.manager.replay(graph, steps[0], other, steps[2])
    assert world.counters()["refreshes"] == before["refreshes"]


def test_a_before_replay_graph_takes_lengths_from_any_buffer() -> None:
    """C93: a fresh length tensor for each step; no recorded op reads the captured one."""
    world = make_world()
    world.set_lens(LENS)
    graph = world.capture(world.step(), BEFORE_REPLAY)
    kept = []
    for number in range(6):
        world.set_lens(world.random_lens(8))
        kept.append(world.lens.clone())
        step = Step(kept[-1], owner=number)
        world.output.fill_(torch.nan)
        if number % 2:
            world.manager.plan_for(step)
            world.manager.guard(graph, step)
            graph.replay()
        else:
            world.manager.replay(graph, step)
        world.assert_right(world.output, world.expected())


@pytest.mark.parametrize("reader", ["in-graph refresh", "fallback", "sanitizer"])
def test_a_length_buffer_that_a_recorded_op_reads_must_be_the_steps(reader: str) -> None:
    """C93, the other side; whose address is whose is said."""
    options: dict[str, Any] = {"sanitize": "count"} if reader == "sanitizer" else {}
    world = make_world(**options) if reader != "fallback" else World(fallback="torch")
    world.set_lens(LENS)
    graph = world.capture(world.step(), IN_GRAPH if reader == "in-graph refresh" else BEFORE_REPLAY)
    step = Step(world.lens.clone(), owner=1)
    world.manager.plan_for(step)
    own, captured = hex(step.context_lens.data_ptr()), hex(world.lens.data_ptr())
    with pytest.raises(
        StalePlanError, match=rf"found {own} \(the step's\), wanted {captured} \(of the tensor that was"
    ):
        world.manager.guard(graph, step)


@both_styles
def test_guard_takes_the_step_plan_that_was_recorded_in_place_of_a_graph(style: str) -> None:
    world = make_world()
    world.set_lens(LENS)
    step = world.step()
    graph = world.new_graph()
    plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
    with world.record(graph):
        plan = plan or world.manager.plan_for(step)
        world.decode(plan)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        step = world.step()
        world.manager.plan_for(step)
        world.manager.guard(plan, step)
        world.output.fill_(torch.nan)
        graph.replay()
        world.assert_right(world.output, world.expected())
    with pytest.raises(StalePlanError, match="rows"):
        world.manager.guard(plan, world.step(5))
    with pytest.raises(RouteError, match="recorded by no live graph"):
        world.manager.guard(world.manager.plan_for(world.step()), world.step())
    second = world.new_graph()
    if style == BEFORE_REPLAY:
        plan = world.manager.plan_for(world.step())
        first = world.new_graph()
        for one in (first, second):
            with world.record(one):
                world.decode(plan)
        with pytest.raises(RouteError, match=r"2 live graphs, graph of capture \d+, graph of capture \d+"):
            world.manager.guard(plan, world.step(dummy=True))
        del one, first
        world.settle()
        world.manager.guard(plan, world.step(dummy=True))


@both_styles
@pytest.mark.parametrize("reason", ["never minted", "never minted, raise", "never minted, mint", "no room", "compile"])
def test_a_graph_that_recorded_the_fallback_is_replayed_for_new_steps(reason: str, style: str) -> None:
    """C92: the same decision as plan_for's, whatever kept the class from being planned."""
    options: dict[str, Any] = {"fallback": "torch"}
    if "," in reason:
        options["on_miss"] = reason.split(", ")[1]
        if style == BEFORE_REPLAY:
            pytest.skip("outside a recording plan_for does not answer the fallback there")
    if reason == "compile":
        options["backend"] = backend_with(NothingCompiles)
    if reason == "no room":
        budget = World().manager.min_budget_bytes()
        world = World(ubatches=2, budget_bytes=budget, **options)
        with world.manager.capture_phase():
            world.manager.warm()
        world.set_lens(LENS)
        held = world.capture(world.step(ubatch=1), IN_GRAPH)
    else:
        world = World(**options)
        held = None
        if reason == "compile":
            with world.manager.capture_phase():
                world.manager.warm()
    world.set_lens(LENS)
    graph = world.capture(world.step(), style)
    for _ in range(4):
        world.set_lens(world.random_lens(8))
        step = world.step()
        world.output.fill_(torch.nan)
        world.manager.replay(graph, step)
        world.assert_right(world.output, world.expected())
    assert world.counters()["mints"] == (0 if reason != "no room" else world.counters()["mints"])
    del held


class NothingCompiles:
    def compile(self, spec: Any, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        raise ConfigError("this class is more than the compiler takes. Lower the ladder's top class.")


@both_styles
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_a_dummy_replay_after_a_sleep_reads_nothing(style: str, byte: int) -> None:
    """C96: our buffers were overwritten, and nobody called invalidate()."""
    for inference in (False, True):
        world = make_world(inference=inference)
        world.set_lens(LENS)
        graph = world.capture(world.step(), style)
        world.set_lens(world.random_lens(8, longest=300))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())
        dummy = world.step(dummy=True)
        world.output.fill_(torch.nan)
        world.manager.replay(graph, dummy)
        assert (world.output == 0).all()
        for item in world.manager._residency.store:
            item.buffer.fill_(byte)
        world.tables.fill_(-1)
        world.key_cache.view(torch.uint8).fill_(0xFF)
        if style == IN_GRAPH:
            assert (world.lens == 0).all()
            write(world, by_torch, [300] * 8)
            world.tables.fill_(-1)
        world.output.fill_(torch.nan)
        if byte:
            world.manager.replay(graph, dummy)
        else:
            world.manager.guard(graph, dummy)
            graph.replay()
        assert (world.output == 0).all()


@pytest.mark.parametrize("second", ["in graph", "fallback"])
def test_a_dummy_beside_a_real_step_over_the_same_lengths_is_refused(second: str) -> None:
    """Its zeros would be the real step's lengths. Over lengths of its own it is let through."""
    sites = {"a": small_spec(), "b": small_spec()}
    world = World(sites=sites, fallback="torch")
    with world.manager.capture_phase():
        world.manager.warm(8)
    if second == "fallback":
        world.manager.trim(0)
        world.manager.plan_for(world.step(site="a"))  # brings a back, and not b
    own_lens = world.lens_buffer()
    for lens in (world.lens, own_lens):
        world.set_lens(LENS)
        steps = [world.step(site="a"), world.step(site="b", lens=lens)]
        other = torch.full_like(world.output, torch.nan)
        with world.manager.graph() as graph:
            world.decode(world.manager.plan_for(steps[0]))
            world.decode(world.manager.plan_for(steps[1]), output=other)
        replayed = world.step(site="a"), world.step(site="b", dummy=True)
        if lens is world.lens:
            for call in (world.manager.guard, world.manager.replay):
                with pytest.raises(StalePlanError, match="a dummy of site 'b', wanted a real one, as a/8/ub0 has"):
                    call(graph, *replayed)
            assert world.lens.tolist() == LENS
        else:
            world.manager.replay(graph, *replayed)
            world.assert_right(world.output, world.expected())
            assert (other == 0).all()


def test_the_zeros_of_an_idle_ubatch_move_nothing_of_the_other() -> None:
    """Both have halves of one buffer, whose version they share."""
    world = make_world(ubatches=2, ladder=CapacityLadder([4]))
    world.set_lens(LENS)
    halves, rows = [world.lens[:4], world.lens[4:]], [slice(0, 4), slice(4, 8)]
    with world.manager.graph() as first:
        plans = [world.manager.plan_for(Step(half, owner=1, ubatch=ub)) for ub, half in enumerate(halves)]
        for ub, plan in enumerate(plans):
            world.decode(
                plan, query=world.query[rows[ub]], output=world.output[rows[ub]], tables=world.tables[rows[ub]]
            )
    with world.manager.graph() as second:
        world.decode(plans[0], query=world.query[:4], output=world.output[:4])
    world.set_lens(world.random_lens(8))
    steps = [Step(halves[0], owner=2), Step(halves[1], owner=2, ubatch=1, dummy=True)]
    expected = world.expected()
    world.manager.replay(first, *steps)
    assert world.lens[4:].tolist() == [0] * 4
    world.output.fill_(torch.nan)
    world.manager.replay(second, steps[0])
    world.assert_right(world.output[:4], expected[:4])


def test_a_graph_that_decodes_anothers_tables_before_its_own_refresh_needs_the_others_replay() -> None:
    """A target layer by the first graph's plan, and a draft's refresh of the same tables behind it."""
    world = make_world()
    world.set_lens(LENS)
    owner = object()
    with world.manager.graph() as first:
        plan = world.manager.plan_for(Step(world.lens, owner=owner))
        world.decode(plan)
    outputs = [torch.full_like(world.output, torch.nan) for _ in range(2)]
    with world.manager.graph() as second:
        world.decode(plan, output=outputs[0])
        world.decode(world.manager.plan_for(Step(world.lens, owner=owner, revision=1)), output=outputs[1])
    for number in range(3):
        world.set_lens(world.random_lens(8))
        step = Step(world.lens, owner=number)
        for call in (world.manager.guard, world.manager.replay):
            with pytest.raises(StalePlanError, match=r"Replay graph of capture \d+ for this step first"):
                call(second, step)
        world.manager.replay(first, step)
        world.manager.replay(second, step)
        for output in outputs:
            world.assert_right(output, world.expected())


@pytest.mark.parametrize("inference", [False, True], ids=["tensors with a version", "inference tensors"])
def test_one_step_plan_serves_a_step_that_begins_with_an_eager_layer(inference: bool) -> None:
    world = make_world(inference=inference)
    world.set_lens(LENS)
    graphs = piecewise(world)
    for number in range(3):
        world.set_lens(world.random_lens(8))
        step = Step(world.lens, owner=number)
        before = world.counters()["refreshes"]
        plan = world.manager.plan_for(step)
        for graph in graphs:
            world.output.fill_(torch.nan)
            world.assert_right(world.decode(plan), world.expected())
            world.output.fill_(torch.nan)
            world.manager.replay(graph, step)
            world.assert_right(world.output, world.expected())
        assert world.counters()["refreshes"] <= before + 2  # the first replay cannot know that it is the same step


@pytest.mark.parametrize("inference", [False, True], ids=["tensors with a version", "inference tensors"])
def test_a_graph_of_the_fallback_is_replayed_under_one_owner_for_ever(inference: bool) -> None:
    """C92: what was planned under that owner before is no answer of now."""
    world = make_world(inference=inference, fallback="torch")
    world.set_lens(LENS)
    world.eager(Step(world.lens, owner=RUNNER))
    world.manager.trim(0)
    graph = world.capture(Step(world.lens, owner=RUNNER), IN_GRAPH)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        world.output.fill_(torch.nan)
        world.manager.replay(graph, Step(world.lens, owner=RUNNER))
        world.assert_right(world.output, world.expected())


def test_guard_knows_every_step_plan_that_a_read_was_recorded_with() -> None:
    world = make_world()
    world.set_lens(LENS)
    owner = object()
    with world.manager.graph() as graph:
        plans = []
        for number in range(2):
            plans.append(world.manager.plan_for(Step(world.lens, owner=owner, revision=number)))
            world.decode(plans[-1])
    for plan in plans:
        world.manager.guard(plan, Step(world.lens, owner=owner))
    assert graph is not None


def test_an_engine_that_hands_guard_its_step_plans_may_switch_planlife_off() -> None:
    world = World(enabled=False, fallback="torch")
    world.set_lens(LENS)
    plan = world.manager.plan_for(world.step())
    graph = world.new_graph()
    with world.record(graph):
        world.decode(plan)
    world.manager.guard(plan, world.step())
    graph.replay()
    world.assert_right(world.output, world.expected())
    with pytest.raises(ConfigError):
        world.manager.guard(plan, world.step(site="nowhere"))
