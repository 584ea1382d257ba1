"""guard() before a replay: the graph decodes the step at hand, or an error says which field of which plan differs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from planlife import ClosedError, ConfigError, RouteError, StalePlanError, Step

from .world import BEFORE_REPLAY, IN_GRAPH, MAX_PAGES, Owner, World, backend_with, both_styles, small_spec

LENS = [500, 3, 257, 64, 1, 0, 256]


class Captured:
    """A world with two sites and two ubatches, and one graph of site "full", ubatch 0, seven rows."""

    def __init__(self, style: str, **world_options: Any) -> None:
        sites = {"full": small_spec(), "windowed": small_spec(sliding_window=100)}
        self.world = World(sites=sites, ubatches=2, warm=True, **world_options)
        self.world.set_lens(LENS)
        self.style = style
        self.owner = Owner()
        self.graph = self.world.capture(self.step(), style)

    @property
    def manager(self) -> Any:
        return self.world.manager

    def step(self, rows: int = 7, **fields: Any) -> Step:
        return self.world.step(rows, **{"site": "full", "owner": self.owner, **fields})

    def refuses(self, field: str, found: str, wanted: str, *steps: Step) -> None:
        """The step of the capture passes, these do not; the message says where and why, and nothing changed."""
        right = self.step()
        self.manager.plan_for(right)
        self.manager.guard(self.graph, right)
        for step in steps:
            self.manager.plan_for(step)
        self.check_refusal(field, found, wanted, *steps)

    def check_refusal(self, field: str, found: str, wanted: str, *steps: Step) -> None:
        counters = self.world.counters()
        self.world.output.fill_(torch.nan)
        with pytest.raises(StalePlanError) as refusal:
            self.manager.guard(self.graph, *steps)
        message = str(refusal.value)
        assert message.startswith("graph of capture ")
        assert re.search(rf"plan full/8/ub0 has {field}: found {found}\b.*, wanted {wanted}\b", message), message
        assert self.world.output.isnan().all()
        assert self.world.counters() == counters | {"stale_detected": counters["stale_detected"] + 1}


@both_styles
def test_guard_refuses_a_step_of_another_site(style: str) -> None:
    """C02."""
    captured = Captured(style)
    captured.refuses("site", "windowed", "full", captured.step(site="windowed"))


@both_styles
def test_guard_refuses_a_step_of_another_ubatch(style: str) -> None:
    """C02."""
    captured = Captured(style)
    captured.refuses("ubatch", "1", "0", captured.step(ubatch=1))


@both_styles
@pytest.mark.parametrize("rows", [6, 8], ids=["fewer", "more"])
def test_guard_refuses_another_row_count_of_the_same_class(style: str, rows: int) -> None:
    """C02: the graph's query and block tables have the captured rows."""
    captured = Captured(style)
    captured.refuses("rows", str(rows), "7", captured.step(rows))


@both_styles
def test_guard_refuses_another_length_buffer(style: str) -> None:
    """C02."""
    captured = Captured(style)
    other = captured.world.lens.clone()
    step = captured.step(lens=other)
    if style == IN_GRAPH:
        captured.refuses("length buffer address", hex(other.data_ptr()), hex(captured.world.lens.data_ptr()), step)
    else:  # no recorded op reads the captured buffer: that the tables hold the step's lengths is enough
        captured.manager.plan_for(step)
        captured.manager.guard(captured.graph, step)


class RefusingBackend:
    """Takes every step until it is told not to."""

    reasons: tuple[str, ...] = ()

    def refuse_step(self, spec: Any, context_lens: Any) -> tuple[str, ...]:
        return self.reasons


@both_styles
def test_guard_refuses_a_step_that_would_take_another_route(style: str) -> None:
    """C02, C31: captured "planned", and the backend would not take the later step."""
    backend = backend_with(RefusingBackend)
    captured = Captured(style, backend=backend, fallback="torch")
    right = captured.step()
    captured.manager.plan_for(right)
    captured.manager.guard(captured.graph, right)
    backend.reasons = ("too long for this kernel",)
    later = captured.step(owner=Owner())
    assert captured.manager.plan_for(later).route == "fallback"
    captured.check_refusal("route", "fallback", "planned", later)
    never_planned = captured.step(owner=Owner())
    captured.check_refusal("route", "fallback", "planned", never_planned)


@both_styles
def test_guard_refuses_a_planned_step_for_a_graph_that_runs_the_fallback(style: str) -> None:
    """C02, C31, the other way round."""
    backend = backend_with(RefusingBackend)
    backend.reasons = ("too long for this kernel",)
    world = World(backend=backend, fallback="torch", warm=True)
    world.set_lens(LENS)
    step = world.step()
    graph = world.capture(step, style)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())
    backend.reasons = ()
    step = world.step()
    assert world.manager.plan_for(step).route == "planned"
    with pytest.raises(StalePlanError, match="default/fallback/ub0 has route: found planned, wanted fallback"):
        world.manager.guard(graph, step)


def test_guard_refuses_another_owner() -> None:
    """C02: the mark."""
    captured = Captured(BEFORE_REPLAY)
    other = Owner()
    step = captured.step(owner=other)
    found, wanted = (f"Owner at {id(owner):#x}" for owner in (other, captured.owner))
    captured.manager.plan_for(captured.step())
    captured.check_refusal("owner", found, wanted, step)
    captured.manager.plan_for(step)
    captured.manager.guard(captured.graph, step)


def test_guard_refuses_another_revision() -> None:
    """C02: the mark."""
    captured = Captured(BEFORE_REPLAY)
    captured.manager.plan_for(captured.step())
    captured.check_refusal("revision", "1", "0", captured.step(revision=1))
    captured.manager.plan_for(captured.step(revision=1))
    captured.manager.guard(captured.graph, captured.step(revision=1))


def test_guard_refuses_lengths_written_after_they_were_planned() -> None:
    """C02: the mark's `_version`; same owner, same revision."""
    captured = Captured(BEFORE_REPLAY)
    captured.manager.plan_for(captured.step())
    version = captured.world.lens._version
    captured.world.lens.add_(1)
    captured.check_refusal("length buffer version", str(version + 1), str(version), captured.step())
    captured.manager.plan_for(captured.step())
    captured.manager.guard(captured.graph, captured.step())


def test_guard_refuses_tables_that_hold_another_row_count() -> None:
    """C02: the mark; the step has the captured rows, an eager one with fewer came after it."""
    captured = Captured(BEFORE_REPLAY)
    captured.manager.plan_for(captured.step())
    captured.manager.plan_for(captured.step(5))
    captured.check_refusal("rows", "7", "5", captured.step())


def test_guard_refuses_tables_that_hold_another_buffers_lengths() -> None:
    """C02: the mark; an eager step of the same owner from another buffer came after it."""
    captured = Captured(BEFORE_REPLAY)
    other = captured.world.lens.clone()
    captured.manager.plan_for(captured.step())
    captured.manager.plan_for(captured.step(lens=other))
    addresses = hex(captured.world.lens.data_ptr()), hex(other.data_ptr())
    captured.check_refusal("length buffer address", *addresses, captured.step())


def test_a_replay_without_its_plan_for_is_refused_by_plan_graph_and_owner() -> None:
    """C52."""
    captured = Captured(BEFORE_REPLAY)
    world, manager = captured.world, captured.manager
    for index in range(6):
        world.set_lens([length // (index + 1) for length in LENS])
        owner = Owner()
        step = captured.step(owner=owner)
        if index % 2:
            found, wanted = f"Owner at {id(owner):#x}", f"Owner at {id(captured.owner):#x}"
            captured.check_refusal("owner", found, wanted, step)
        else:
            manager.plan_for(step)
            captured.owner = owner
            world.output.fill_(torch.nan)
            manager.replay(captured.graph, step)
            world.assert_right(world.output, world.expected())


def test_a_replay_after_the_plan_for_of_another_owner_is_refused() -> None:
    """C52."""
    captured = Captured(BEFORE_REPLAY)
    first, second = Owner(), Owner()
    captured.manager.plan_for(captured.step(owner=first))
    captured.manager.plan_for(captured.step(owner=second))
    found, wanted = f"Owner at {id(first):#x}", f"Owner at {id(second):#x}"
    captured.check_refusal("owner", found, wanted, captured.step(owner=first))
    captured.manager.guard(captured.graph, captured.step(owner=second))
    prefill, decode = "prefill of step 7", "decode of step 7"
    captured.manager.plan_for(captured.step(owner=prefill))
    found, wanted = f"{decode!r} at {id(decode):#x}", f"{prefill!r} at {id(prefill):#x}"
    captured.check_refusal("owner", found, wanted, captured.step(owner=decode))


def test_an_owner_that_died_between_plan_for_and_guard_is_not_mistaken_for_the_next() -> None:
    captured = Captured(BEFORE_REPLAY)
    owner = Owner()
    captured.manager.plan_for(Step(captured.world.lens[:7], site="full", owner=owner))
    del owner
    for _ in range(3):
        owner = Owner()
        with pytest.raises(StalePlanError, match="has owner: found "):
            captured.manager.guard(captured.graph, Step(captured.world.lens[:7], site="full", owner=owner))


@pytest.mark.parametrize("sanitize", ["off", "count", "raise"])
def test_the_sanitizer_sees_a_stale_replay_that_no_guard_was_asked_about(sanitize: str) -> None:
    """C52: it is in the graph. A right replay is not reported."""
    world = World(warm=True, sanitize=sanitize)
    world.set_lens(LENS)
    step = world.step()
    graph = world.capture(step, BEFORE_REPLAY)
    for number in range(1, 4):
        world.set_lens(world.random_lens(8))
        world.manager.plan_for(world.step())
        graph.replay()
        assert world.counters()["stale_detected"] == (number - 1 if sanitize != "off" else 0)
        world.set_lens([length + number for length in LENS])
        world.tables[:] = torch.arange(1, MAX_PAGES + 1)  # what is read for the old lengths exists
        world.output.fill_(torch.nan)
        if sanitize == "raise":
            with world.raises_soon(StalePlanError, "sanitizer saw 1 decode"):
                graph.replay()
                world.manager.plan_for(world.step(dummy=True))
        else:
            graph.replay()
        world.assert_wrong(world.output, world.expected())
        assert world.counters()["stale_detected"] == (number if sanitize != "off" else 0)


def test_an_eager_step_of_the_same_class_between_plan_for_and_replay_is_noticed() -> None:
    """C53: and the next plan_for refreshes."""
    captured = Captured(BEFORE_REPLAY)
    world, manager = captured.world, captured.manager
    other_lens, other_tables = world.lens_buffer(), world.tables.clone()
    for _ in range(3):
        world.set_lens(world.random_lens(7))
        step = captured.step()
        manager.plan_for(step)
        world.set_lens(world.random_lens(8), into=other_lens, tables=other_tables)
        output = torch.full_like(world.output, torch.nan)
        world.eager(world.step(lens=other_lens, site="full"), output=output, tables=other_tables)
        world.assert_right(output, world.expected(lens=other_lens, tables=other_tables))
        with pytest.raises(StalePlanError, match="full/8/ub0 has owner"):
            manager.guard(captured.graph, step)
        refreshes = world.counters()["refreshes"]
        world.assert_right(world.replay(captured.graph, step, BEFORE_REPLAY), world.expected())
        assert world.counters()["refreshes"] == refreshes + 1


def test_eager_steps_of_other_classes_sites_and_ubatches_disturb_no_replay() -> None:
    """C53, the positive control."""
    captured = Captured(BEFORE_REPLAY)
    world, manager = captured.world, captured.manager
    world.set_lens(world.random_lens(7))
    step = captured.step()
    manager.plan_for(step)
    manager.plan_for(world.step(3, site="full"))
    manager.plan_for(world.step(7, site="windowed"))
    manager.plan_for(world.step(7, site="full", ubatch=1))
    world.output.fill_(torch.nan)
    manager.replay(captured.graph, step)
    world.assert_right(world.output, world.expected())


def test_guard_names_the_site_that_was_not_refreshed() -> None:
    """C04: full and windowed layers in one graph, one of them planned."""
    sites = {"full": small_spec(), "windowed": small_spec(sliding_window=100)}
    world = World(sites=sites, warm=True)
    world.set_lens(LENS)
    owner = Owner()
    plans = [world.manager.plan_for(world.step(site=site, owner=owner)) for site in sites]
    with world.manager.graph() as graph:
        for plan in plans:
            world.decode(plan)
    for forgotten, planned in (("full", "windowed"), ("windowed", "full")):
        world.set_lens(world.random_lens(8))
        owner = Owner()
        steps = [world.step(site=site, owner=owner) for site in sites]
        world.manager.plan_for(world.step(site=planned, owner=owner))
        with pytest.raises(StalePlanError, match=f"its plan {forgotten}/8/ub0 has owner"):
            world.manager.guard(graph, *steps)
        world.manager.plan_for(world.step(site=forgotten, owner=owner))
        world.manager.guard(graph, *steps)


@both_styles
def test_guard_names_a_plan_that_was_given_no_step(style: str) -> None:
    captured = Captured(style)
    with pytest.raises(StalePlanError, match=r"reads full/8/ub0 \(7 rows, .* was given no step"):
        captured.manager.guard(captured.graph)


@both_styles
def test_guard_takes_steps_in_any_order_and_more_than_it_needs(style: str) -> None:
    """Extra steps are of plans that the graph does not read; duplicates say the same twice."""
    captured = Captured(style)
    world, manager = captured.world, captured.manager
    world.set_lens(world.random_lens(7))
    extras = [captured.step(site="windowed"), captured.step(ubatch=1), world.step(3, site="full")]
    right = captured.step()
    for step in (*extras, right):
        manager.plan_for(step)
    for steps in itertools.permutations([right, right, *extras]):
        manager.guard(captured.graph, *steps)
        manager.plan_for(right)
    world.output.fill_(torch.nan)
    manager.replay(captured.graph, *extras, right, right)
    world.assert_right(world.output, world.expected())


def test_guard_judges_a_right_and_a_stale_step_of_one_plan_alike_in_either_order() -> None:
    """Two steps for one read: one of them would be decoded with the other's work."""
    captured = Captured(BEFORE_REPLAY)
    stale, right = captured.step(owner=Owner()), captured.step(owner=Owner())
    captured.manager.plan_for(stale)
    captured.manager.plan_for(right)
    for steps in ((right, stale), (stale, right)):
        for call in (captured.manager.guard, captured.manager.replay):
            with pytest.raises(StalePlanError, match="has owner"):
                call(captured.graph, *steps)
    captured.manager.guard(captured.graph, right)


@both_styles
def test_a_dummy_beside_the_real_step_of_a_plan_empties_nothing(style: str) -> None:
    captured = Captured(style)
    world = captured.world
    world.set_lens(world.random_lens(7))
    step, dummy = captured.step(), world.step(site="full", dummy=True)
    captured.manager.plan_for(step)
    for steps in ((step, dummy), (dummy, step)):
        world.output.fill_(torch.nan)
        captured.manager.replay(captured.graph, *steps)
        world.assert_right(world.output, world.expected())


def test_guard_accepts_the_same_step_object_without_an_owner() -> None:
    """C74: identity of the Step is all there is; another Step of the same lengths is refused."""
    captured = Captured(BEFORE_REPLAY)
    world = captured.world
    for _ in range(3):
        world.set_lens(world.random_lens(7))
        step = captured.step(owner=None)
        captured.manager.plan_for(step)
        world.output.fill_(torch.nan)
        captured.manager.replay(captured.graph, step)
        world.assert_right(world.output, world.expected())
        with pytest.raises(StalePlanError, match="found this one: without an owner .* wanted another Step object"):
            captured.manager.guard(captured.graph, captured.step(owner=None))


@pytest.mark.parametrize(("owner", "other"), [(1, True), (1, 1.0), (True, 1), (7, 8)], ids=str)
def test_guard_does_not_confuse_owners_that_compare_equal(owner: object, other: object) -> None:
    """C74."""
    captured = Captured(BEFORE_REPLAY)
    captured.manager.plan_for(captured.step(owner=owner))
    captured.manager.guard(captured.graph, captured.step(owner=owner))
    with pytest.raises(StalePlanError, match="has owner"):
        captured.manager.guard(captured.graph, captured.step(owner=other))


def test_guard_refuses_what_is_no_step_before_it_changes_anything() -> None:
    captured = Captured(BEFORE_REPLAY)
    world, step, dummy = captured.world, captured.step(), captured.step(dummy=True)
    captured.manager.plan_for(step)
    bad: list[tuple[type[Exception], Any]] = [
        (ConfigError, world.lens),
        (ConfigError, captured.step(site="nowhere")),
        (ConfigError, captured.step(ubatch=2)),
        (ConfigError, captured.step(revision=True)),
        (ConfigError, Step(world.lens.long(), site="full")),
    ]
    for error, thing in bad:
        with pytest.raises(error):
            captured.manager.guard(captured.graph, dummy, thing)
    captured.manager.guard(captured.graph, step)


def test_guard_and_replay_of_a_foreign_graph_are_refused() -> None:
    captured, other = Captured(BEFORE_REPLAY), World(warm=True)
    for graph in (other.new_graph(), captured.world.new_graph()):
        with pytest.raises(RouteError, match="holds no pins here"):
            captured.manager.replay(graph, captured.step())
    with pytest.raises(RouteError, match="holds no pins here"):
        other.manager.guard(captured.graph, other.step())
    with pytest.raises(ConfigError, match="graph object"):
        captured.manager.guard(3, captured.step())


@both_styles
def test_guard_while_recording_is_refused_and_the_capture_goes_on(style: str) -> None:
    """A dummy would record the emptying of the tables into the other graph."""
    captured = Captured(style)
    world, manager = captured.world, captured.manager
    step = captured.step()
    with manager.graph() as second:
        with pytest.raises(RouteError, match="while this stream records"):
            manager.guard(captured.graph, captured.step(dummy=True))
        world.decode(manager.plan_for(step))
    world.set_lens(world.random_lens(7))
    world.assert_right(world.replay(captured.graph, captured.step(), style), world.expected())
    world.assert_right(world.replay(second, captured.step()), world.expected())


def test_replay_after_close_is_refused() -> None:
    captured = Captured(IN_GRAPH)
    step = captured.step()
    captured.manager.close()
    for call in (captured.manager.guard, captured.manager.replay):
        with pytest.raises(ClosedError):
            call(captured.graph, step)


def test_the_reference_of_these_tests_tells_lengths_apart() -> None:
    """A positive control of all of them: one token less, through the same tables, looks wrong."""
    world = World(warm=True)
    world.set_lens(LENS)
    world.assert_wrong(world.expected(lens=(world.lens - 1).clamp_min(0)), world.expected())
