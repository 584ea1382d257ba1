"""R48: a draft of another query length uses the dense plans of its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, StalePlanError, Step
from planlife.errors import SecondStepError
from planlife.testing import FakeBackend, FakeDevice, FakeTensor
from tests.unit.fake_world import POISON, Captured, FakeWorld, Owner, live_lens_fallback, spec

LENS = [300, 5, 0, 900]


def sharing_sites(**changes: Any) -> dict[str, PlanSpec]:
    """The draft comes first: the order of sites does not matter."""
    return {
        "draft": replace(spec(), num_q_heads=2, plan_of="target", lane="draft", **changes),
        "target": spec(query_length=3),
    }


def sharing_world(**options: Any) -> FakeWorld:
    world = FakeWorld(sites=sharing_sites(), **options)
    world.warm()
    return world


def step_of(step: Step, site: str, **fields: Any) -> Step:
    """The same lengths and owner, for another site."""
    return Step(step.context_lens, owner=step.owner, site=site, **fields)


def per_query_row(lens: list[int], query_length: int) -> list[int]:
    return [length for length in lens for _ in range(query_length)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads is 2 here and 1 there"),
        ({"max_context_tokens": 64}, "max_context_tokens is 64 here and 4096 there"),
        ({"sliding_window": 7}, "sliding_window is 7 here and 0 there"),
        ({"shared_lengths": False}, "shared_lengths is False here and True there"),
        ({"max_partitions": 4}, "max_partitions is 4 here and None there; leave it None"),
        ({"workgroup_budget": 9}, "workgroup_budget is 9 here and None there; leave it None"),
    ],
)
def test_what_the_tables_depend_on_must_be_the_same_and_is_named_with_both_values(
    change: dict[str, Any], message: str
) -> None:
    for enabled in (True, False):
        with pytest.raises(ConfigError, match=f"site 'draft' cannot use the plans of 'target': {message}"):
            FakeWorld(sites=sharing_sites(**change), enabled=enabled)
    FakeWorld(sites=sharing_sites())  # positive control


def test_ladders_must_be_the_same() -> None:
    ladders = {"draft": CapacityLadder([2, 8]), "target": CapacityLadder([4, 8])}
    with pytest.raises(ConfigError, match=r"ladder is \(2, 8\) here and \(4, 8\) there"):
        FakeWorld(sites=sharing_sites(), ladder=ladders)
    FakeWorld(sites=sharing_sites(), ladder=dict.fromkeys(ladders, CapacityLadder([4, 8])))


def test_windowed_plans_are_not_shared() -> None:
    sites = {site: replace(one, sliding_window=256) for site, one in sharing_sites().items()}
    with pytest.raises(ConfigError, match="a windowed plan is bound to its window and query_length"):
        FakeWorld(sites=sites)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ({"a": spec(plan_of="b")}, r"must name another site \(here: none\), got 'b'"),
        ({"a": spec(plan_of="a"), "b": spec()}, r"must name another site \(here: 'b'\), got 'a'"),
        ({"a": spec(plan_of="b"), "b": spec(plan_of="c"), "c": spec()}, "'b', which uses those of 'c': name that"),
        ({"a": spec(plan_of="b"), "b": spec(plan_of="a")}, "which uses those of"),
    ],
)
def test_plan_of_names_another_site_that_has_plans_of_its_own(sites: dict[str, PlanSpec], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FakeWorld(sites=sites)


@pytest.mark.parametrize("value", ["", 3, b"target", True])
def test_plan_of_is_a_name_or_none(value: object) -> None:
    with pytest.raises(ConfigError, match="plan_of must be the name of a site, or None"):
        spec(plan_of=value)


@pytest.mark.parametrize("ubatches", [1, 2])
def test_tables_are_counted_once_and_scratch_is_separate(ubatches: int) -> None:
    world = sharing_world(ubatches=ubatches)
    report = world.assert_bytes_add_up()
    assert report.resident_bytes == report.worst_case_bytes
    assert {line.site for line in report.plans} == {"target"}
    assert len(report.plans) == 4 * ubatches
    assert {line.lane for line in report.arenas} == {"main", "draft"}
    assert [(line.site, line.plan_of) for line in report.sites] == [("draft", "target"), ("target", None)]
    assert "site draft: plans for 16 tasks, 8 per row, shared with target" in str(report)
    options = {"ladder": world.options["ladder"], "ubatches": ubatches}
    backend = {"backend": FakeBackend(), "num_compute_units": 8}
    assert PlanManager.estimate_bytes(world.sites, **options, **backend) == report.worst_case_bytes
    apart = {site: replace(one, plan_of=None) for site, one in world.sites.items()}
    difference = PlanManager.estimate_bytes(apart, **options, **backend) - report.worst_case_bytes
    assert difference == sum(line.num_bytes for line in report.plans)


def test_sites_of_one_lane_share_the_arena_too() -> None:
    sites = {site: replace(one, lane="main") for site, one in sharing_sites().items()}
    world = FakeWorld(sites=sites)
    world.warm()
    assert [line.lane for line in world.assert_bytes_add_up().arenas] == ["main"]
    step = world.step(LENS, site="target")
    assert world.decode(world.manager.plan_for(step)) == per_query_row(LENS, 3)
    assert world.decode(world.manager.plan_for(step_of(step, "draft"))) == LENS


def test_minting_a_class_compiles_it_for_every_site_that_uses_it() -> None:
    for first in ("draft", "target"):
        world = FakeWorld(sites=sharing_sites())
        with world.manager.capture_phase():
            world.run([7], site=first)
        assert {one.query_length for one, _ in world.backend.compiled} == {1, 3}
        world.run([7], site="draft" if first == "target" else "target")
        assert (world.counters["mints"], world.counters["compiles_after_seal"]) == (1, 0)


def test_a_step_with_the_targets_lengths_owner_and_revision_costs_no_refresh() -> None:
    world = sharing_world()
    step = world.step(LENS, site="target")
    target = world.manager.plan_for(step)
    draft = world.manager.plan_for(step_of(step, "draft"))
    assert (world.counters["refreshes"], world.counters["refreshes_skipped"]) == (1, 1)
    for _layer in range(2):
        assert world.decode(target) == per_query_row(LENS, 3)
        assert world.decode(draft) == LENS
    assert world.counters["refreshes"] == 1
    world.manager.plan_for(step_of(step, "draft", revision=1))
    world.manager.plan_for(Step(step.context_lens, owner=Owner(), site="draft"))
    assert world.counters["refreshes"] == 3  # positive control


@pytest.mark.parametrize("num_sites_first", ["target", "draft"])
def test_a_later_layer_never_decodes_the_other_sites_work(num_sites_first: str) -> None:
    """C09 across the sites: over lengths of its own the older plan is refreshed, over moved ones it is refused."""
    world = sharing_world()
    first, second = num_sites_first, "draft" if num_sites_first == "target" else "target"
    lens = {site: FakeTensor(4, values=values) for site, values in ((first, LENS), (second, [1, 2, 3, 4]))}
    plans = {site: world.manager.plan_for(Step(lens[site], owner=1, site=site)) for site in (first, second)}
    for site in (first, second, first):
        length = world.sites[site].query_length
        assert world.decode(plans[site]) == per_query_row(lens[site].values, length)
    refreshes = world.counters["refreshes"]
    assert refreshes == 5
    lens[first].write([9, 9, 9, 9])
    assert world.decode(plans[first]) == per_query_row(LENS, world.sites[first].query_length)  # still in the tables
    world.decode(plans[second])
    with pytest.raises(StalePlanError, match="was written since plan_for"):
        world.decode(plans[first])


def test_drafts_that_advance_the_targets_lengths_leave_it_refused() -> None:
    world = sharing_world()
    step = world.step(LENS, site="target")
    target = world.manager.plan_for(step)
    step.context_lens.write([301, 6, 1, 901])
    draft = world.manager.plan_for(step_of(step, "draft", revision=1))
    assert world.decode(draft) == [301, 6, 1, 901]
    with pytest.raises(StalePlanError, match="was written since plan_for"):
        world.decode(target)


@pytest.mark.parametrize("site", ["draft", "target"])
def test_a_graph_of_either_site_pins_the_one_plan_and_its_own_scratch(site: str) -> None:
    world = sharing_world()
    other = "target" if site == "draft" else "draft"
    captured = Captured(world, world.step(LENS, site=site))
    world.manager.trim(0)
    states = world.states()
    lane = {"draft": "draft", "target": "main"}
    assert states["target/4/ub0"] == states[f"scratch/{lane[site]}/ub0"] == "pinned"
    assert states["target/2/ub0"] == states[f"scratch/{lane[other]}/ub0"] == "evicted"
    step = world.step([4, 3, 2, 1], site=site)
    world.manager.plan_for(step)
    world.manager.replay(captured.g, step)
    assert captured.output == per_query_row([4, 3, 2, 1], world.sites[site].query_length)
    del captured
    world.manager.trim(0)
    assert world.assert_bytes_add_up().resident_bytes == 0


class BothCaptured:
    """One graph that decodes the target and the draft."""

    def __init__(self, world: FakeWorld, step: Step, *, in_graph: bool = False, revision: int = 0) -> None:
        self.world = world
        self.calls = {site: world.call(step.context_lens.shape[0], site) for site in ("target", "draft")}
        self.steps = {"target": step, "draft": step_of(step, "draft", revision=revision)}
        manager = world.manager
        plans = {} if in_graph else {site: manager.plan_for(one) for site, one in self.steps.items()}
        with manager.graph() as self.g:
            for site, one in self.steps.items():
                manager.pa_decode(manager.plan_for(one) if in_graph else plans[site], **self.calls[site])

    def assert_decoded(self, lens: list[int]) -> None:
        for site, call in self.calls.items():
            assert call["output"].values == per_query_row(lens, self.world.sites[site].query_length)
            call["output"].write([POISON] * len(call["output"]))


def test_one_before_replay_graph_may_read_the_plan_for_both_sites_of_one_step() -> None:
    world = sharing_world()
    both = BothCaptured(world, world.step(LENS, site="target"))
    for lens in ([5, 6, 7, 8], [900, 1, 0, 257]):
        target = world.step(lens, site="target")
        draft = step_of(target, "draft")
        refreshes = world.counters["refreshes"]
        world.manager.plan_for(target)
        world.manager.plan_for(draft)
        assert world.counters["refreshes"] == refreshes + 1
        with pytest.raises(StalePlanError, match="was given no step for it"):
            world.manager.replay(both.g, target)
        with pytest.raises(StalePlanError, match="was given no step for it"):
            world.manager.replay(both.g, draft)
        world.manager.replay(both.g, draft, target)
        both.assert_decoded(lens)
    world.manager.plan_for(step_of(target, "draft", revision=1))
    with pytest.raises(StalePlanError, match="revision: found 0 .* wanted 1 "):
        world.manager.guard(both.g, draft, target)
    with pytest.raises(StalePlanError, match="two steps of this replay need different lengths .* revision: found 1"):
        world.manager.replay(both.g, target, step_of(target, "draft", revision=1))


def test_one_before_replay_graph_may_not_read_the_plan_for_two_steps() -> None:
    """C69 across the sites, also where the tables hold the second step by then."""
    world = sharing_world()
    with pytest.raises(SecondStepError, match=r"right before the recording|for a second step"):
        BothCaptured(world, world.step(LENS, site="target"), revision=1)

    step = world.step(LENS, site="target")
    target = world.manager.plan_for(step)
    calls = {site: world.call(4, site) for site in world.sites}
    with pytest.raises(SecondStepError, match="for a second step"), world.manager.graph():
        world.manager.pa_decode(target, **calls["target"])
        recording, world.device._recording = world.device._recording, type(world.device._recording)()
        draft = world.manager.plan_for(step_of(step, "draft", revision=1))  # what another thread does meanwhile
        world.device._recording = recording
        world.manager.pa_decode(draft, **calls["draft"])


def test_one_in_graph_refresh_serves_both_sites_of_one_step() -> None:
    world = sharing_world()
    before = world.counters["refreshes"]
    both = BothCaptured(world, world.step(LENS, site="target"), in_graph=True)
    assert world.counters["refreshes"] == before + 1
    for lens in ([5, 6, 7, 8], [900, 1, 0, 257]):
        target = world.step(lens, site="target")
        with pytest.raises(StalePlanError, match="was given no step for it"):
            world.manager.replay(both.g, target)
        world.manager.replay(both.g, target, step_of(target, "draft"))
        both.assert_decoded(lens)


def test_a_draft_graph_may_read_what_the_targets_graph_refreshed_until_another_does() -> None:
    """C71 across the sites: piecewise graphs over the in-graph tables."""
    world = sharing_world()
    target = world.step(LENS, site="target")
    draft = step_of(target, "draft")
    with world.manager.graph() as first:
        world.manager.plan_for(target)
        plan = world.manager.plan_for(draft)
    call = world.call(4, "draft")
    with world.manager.graph() as second:
        world.manager.pa_decode(plan, **call)
    alone = Captured(world, world.step(LENS, site="draft"), in_graph=True)
    for lens in ([5, 6, 7, 8], [900, 1, 0, 257]):
        target = world.step(lens, site="target")
        draft = step_of(target, "draft")
        world.manager.replay(first, target, draft)
        world.manager.replay(second, draft)
        assert call["output"].values == lens
        world.manager.replay(alone.g, draft)
        with pytest.raises(StalePlanError, match="refreshing capture: found"):
            world.manager.replay(second, draft)


def test_a_dummy_for_one_site_beside_a_real_step_of_the_other_is_refused() -> None:
    """Emptying the shared tables for the dummy would empty them for the real step too."""
    world = sharing_world()
    both = BothCaptured(world, world.step(LENS, site="target"))
    target = world.step([5, 6, 7, 8], site="target")
    world.manager.plan_for(target)
    dummy = step_of(target, "draft", dummy=True)
    with pytest.raises(StalePlanError, match="step: found a dummy of site 'draft', wanted a real one"):
        world.manager.replay(both.g, target, dummy)
    world.manager.replay(both.g, target, step_of(target, "draft"))
    both.assert_decoded([5, 6, 7, 8])
    world.manager.replay(both.g, step_of(target, "target", dummy=True), dummy)
    both.assert_decoded([0, 0, 0, 0])


def test_the_sanitizer_finds_the_others_work_in_the_tables() -> None:
    world = sharing_world(sanitize="count")
    draft = Captured(world, world.step(LENS, site="draft"))
    assert world.counters["stale_detected"] == 0
    target = world.step([1, 2, 3, 4], site="target")
    world.manager.plan_for(target)
    draft.g.replay()  # nobody asked the guard
    assert world.counters["stale_detected"] == 0  # the lengths in the one buffer are those that were planned
    world.manager.plan_for(Step(FakeTensor(4, values=[9, 9, 9, 9]), owner=2, site="target"))
    draft.g.replay()
    assert world.counters["stale_detected"] == 1


class RefusesSome(FakeBackend):
    """Cannot serve one query length."""

    def __init__(self, query_length: int) -> None:
        super().__init__()
        self.query_length = query_length

    def refuse_spec(self, spec: PlanSpec, device: Any) -> list[str]:
        return ["no such query length"] if spec.query_length == self.query_length else []


@pytest.mark.parametrize("refused", ["draft", "target"])
def test_where_the_backend_refuses_one_of_them_the_other_has_plans_of_its_own(refused: str) -> None:
    backend = RefusesSome(1 if refused == "draft" else 3)
    world = FakeWorld(sites=sharing_sites(), backend=backend, fallback=live_lens_fallback)
    world.warm()
    served = "draft" if refused == "target" else "target"
    assert {line.site for line in world.assert_bytes_add_up().plans} == {served}
    assert world.manager.worst_case_bytes() == world.device.live_bytes
    assert {one.query_length for one, _ in backend.compiled} == {world.sites[served].query_length}
    step = world.step(LENS, site=served)
    assert world.decode(world.manager.plan_for(step)) == per_query_row(LENS, world.sites[served].query_length)
    assert world.manager.plan_for(step_of(step, refused)).route == "fallback"


def test_segments_and_parts_of_a_shared_plan_decode_by_their_own_query_length() -> None:
    world = FakeWorld(sites=sharing_sites(), backend=FakeBackend(max_plan_rows=3))
    world.warm()
    lens = [300, 5, 0, 900, 1, 2, 3, 4, 5, 6, 7]
    world.lens = [FakeTensor(len(lens))]
    for rows in (8, 11):
        step = world.step(lens[:rows], site="target")
        target, draft = world.manager.plan_for(step), world.manager.plan_for(step_of(step, "draft"))
        assert bool(target.parts) == bool(draft.parts) == (rows == 11)
        for _layer in range(2):
            assert world.decode(target) == per_query_row(lens[:rows], 3)
            assert world.decode(draft) == lens[:rows]


def test_planlife_off_ignores_what_sites_would_share() -> None:
    manager = PlanManager(
        sharing_sites(), ladder=CapacityLadder([4]), device=FakeDevice(), backend=FakeBackend(), enabled=False
    )
    assert manager.plan_for(Step(FakeTensor(4), site="draft")).route == "fallback"


def test_the_targets_numbers_are_the_drafts_too() -> None:
    asked = []

    def default_budget(one: PlanSpec, device: Any) -> int:
        asked.append(one.query_length)
        return 11

    for setting, numbers in (({"max_partitions": 2, "workgroup_budget": 9}, (2, 9)), ({}, (8, 11))):
        sites = sharing_sites()
        sites["target"] = replace(sites["target"], **setting)
        world = FakeWorld(sites=sites, backend=FakeBackend(default_budget=default_budget))
        assert {(line.max_partitions, line.workgroup_budget) for line in world.manager.report().sites} == {numbers}
    assert set(asked) == {3}  # for the target's shape, whoever asks


@pytest.mark.parametrize("what", ["another plan", "the other flavour", "another buffer"])
def test_what_a_graph_refreshes_besides_does_not_pass_for_what_it_reads(what: str) -> None:
    """A read that the graph does not refresh needs its mark, whatever else is refreshed from the same lengths."""
    world = FakeWorld(sites={"target": spec(), "windowed": spec(sliding_window=300)})
    world.warm()
    lens = [FakeTensor(4, values=LENS), FakeTensor(4, values=LENS)]
    read, refreshed = (Step(buffer, owner=1, site="target") for buffer in lens)
    if what == "another plan":
        refreshed = step_of(read, "windowed")
    elif what == "the other flavour":
        refreshed = read
    call, call_besides = world.call(4, "target"), world.call(4, refreshed.site)
    if what == "the other flavour":
        first, plan = None, world.manager.plan_for(read)
    else:
        with world.manager.graph() as first:
            plan = world.manager.plan_for(read)
    with world.manager.graph() as second:
        world.manager.pa_decode(plan, **call)
        world.manager.pa_decode(world.manager.plan_for(refreshed), **call_besides)

    later = [Step(buffer, owner=2, site=one.site) for buffer, one in zip(lens, (read, refreshed), strict=True)]
    if refreshed.context_lens is read.context_lens:
        later[1] = step_of(later[0], refreshed.site)
    steps = list(dict.fromkeys(later))
    with pytest.raises(StalePlanError, match="mark|owner|refreshing capture"):
        world.manager.guard(second, *steps)
    if first is None:
        world.manager.plan_for(later[0])
    else:
        world.manager.replay(first, later[0])
    world.manager.replay(second, *steps)
    assert call["output"].values == LENS


def test_a_dummy_beside_a_real_step_of_another_site_that_falls_back_too_needs_lengths_of_its_own() -> None:
    """They share no plan; zeros for the one would be the other's lengths."""
    world = FakeWorld(sites={"a": spec(), "b": spec()}, fallback=live_lens_fallback)
    steps = {site: world.step(LENS, site=site) for site in world.sites}
    calls = {site: world.call(4, site) for site in world.sites}
    plans = {site: world.manager.plan_for(step) for site, step in steps.items()}
    with world.manager.graph() as g:
        for site, plan in plans.items():
            world.manager.pa_decode(plan, **calls[site])
    with pytest.raises(StalePlanError, match="whose lengths lie in the same buffer"):
        world.manager.guard(g, steps["a"], step_of(steps["b"], "b", dummy=True))
    world.manager.guard(g, *(step_of(steps[site], site, dummy=True) for site in world.sites))
