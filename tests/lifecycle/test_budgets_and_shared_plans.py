"""Budgets per site, and dense plans that a target and its draft share, with real tables and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, PlanManager, StalePlanError, Step
from planlife.planner import plan_tables

from .world import BEFORE_REPLAY, PAGE, Owner, World, both_styles, limited_backend, new_device, small_spec

LENS = [640, 257, 0, 1, 256, 30, 511, 400]


def test_sites_of_one_manager_each_get_the_integers_of_their_own_setting() -> None:
    """R38, R39: on a device of 16 compute units, so that the defaults bind too."""
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "capped": {"max_partitions": 2},
        "budget": {"workgroup_budget": 40},
        "both": {"max_partitions": 1, "workgroup_budget": 60},
        "windowed": {"sliding_window": 300, "max_partitions": 2, "query_length": 2},
    }
    sites = {site: small_spec(**{"workgroup_budget": None, **setting}) for site, setting in settings.items()}
    world = World(sites=sites)
    with PlanManager(sites, ladder=CapacityLadder([8]), device=new_device(16), backend=world.backend) as manager:
        with manager.capture_phase():
            manager.warm()
        world.set_lens(LENS)
        seen = []
        for site, setting in settings.items():
            plan = manager.plan_for(world.step(site=site))
            found = [plan.native.work_info.tolist(), plan.native.reduce_info.tolist()]
            default = limited_backend(None).default_workgroup_budget(sites[site], new_device(16))
            wanted = plan_tables(LENS, num_kv_heads=2, num_cu=16, **{"workgroup_budget": default, **setting})
            assert found == list(wanted)
            seen.append(found)
        assert all(one != other for index, one in enumerate(seen) for other in seen[:index])


@pytest.mark.parametrize("dtypes", [{"q_dtype": "float32", "kv_dtype": "float32"}, {}], ids=["float32", "of the world"])
def test_outputs_of_one_and_of_two_tasks_per_compute_unit_agree(dtypes: dict[str, str]) -> None:
    """R44: the same call, split otherwise."""
    num_cu, device = 32, new_device(32)
    spec = small_spec(num_q_heads=8, max_context_tokens=4096, **dtypes)
    kind = replace(World.kind, kv_dtype=spec.kv_dtype)
    sites = {"one": replace(spec, workgroup_budget=num_cu), "two": replace(spec, workgroup_budget=2 * num_cu)}
    generator = torch.Generator().manual_seed(44)
    numbers = torch.randn(2, 1024, PAGE, 2, spec.head_dim, generator=generator)
    caches = [cache.to(device.name) for cache in kind.caches(*numbers)]
    scales = kind.make_scales(spec, generator, device.name)
    tables = torch.randperm(1024, generator=generator, dtype=torch.int32).view(4, 256).to(device.name)
    lens = torch.tensor([4096, 1, 257, 3000], dtype=torch.int32, device=device.name)
    query = torch.randn(4, 8, spec.head_dim, generator=generator).to(device.name, getattr(torch, spec.q_dtype))
    with PlanManager(sites, ladder=CapacityLadder([4]), device=device, backend=World.backend) as manager:
        with manager.capture_phase():
            manager.warm()
        plans = {site: manager.plan_for(Step(lens, owner=1, site=site)) for site in sites}
        assert plans["one"].native.work_info.shape[0] * 2 == plans["two"].native.work_info.shape[0]
        one, two = (
            manager.pa_decode(
                plan, torch.empty_like(query), query, *caches, tables, spec.head_dim**-0.5, **scales
            ).double()
            for plan in plans.values()
        )
    assert (one - two).abs().max() <= 8e-4
    assert one.abs().max() > 0.1  # control: there is something to differ in


class DraftedWorld(World):
    """A target of three query tokens, and a draft of one with half the query heads that uses its plans."""

    def __init__(self, *, lane: str = "draft", **options: Any) -> None:
        target = small_spec(query_length=3)
        draft = replace(small_spec(), num_q_heads=2, plan_of="target", lane=lane)
        super().__init__(sites={"target": target, "draft": draft}, warm=True, **options)
        shape = {site: (8 * spec.query_length, spec.num_q_heads, spec.head_dim) for site, spec in self.sites.items()}
        self.queries = {
            site: torch.randn(shape[site], generator=self.generator).to(self.device, torch.bfloat16)
            for site in self.sites
        }
        self.outputs = {site: torch.full_like(query, torch.nan) for site, query in self.queries.items()}

    def set_roomy_lens(self, lens: list[int]) -> None:
        """Lengths that drafts advance: every row has pages for two tokens more."""
        self.set_lens([length + 2 for length in lens])
        self.lens[: len(lens)] = torch.tensor(lens, dtype=torch.int32, device=self.device)

    def layer(self, plan: Any) -> torch.Tensor:
        query, output = self.queries[plan.site], self.outputs[plan.site]
        output.fill_(torch.nan)
        return self.decode(plan, query, output)

    def assert_site_right(self, site: str) -> None:
        spec = self.sites[site]
        self.assert_right(self.outputs[site], self.expected(self.queries[site], spec=spec), spec.query_length)


@pytest.mark.parametrize("lane", ["main", "draft"])
def test_target_and_draft_decode_right_through_views_of_the_same_bytes(lane: str) -> None:
    """R48."""
    world = DraftedWorld(lane=lane)
    for lens in (LENS, [3, 600, 0, 255, 257, 12, 0, 1]):
        world.set_lens([max(length - 2, 0) for length in lens])
        step = world.step(site="target")
        refreshes = world.counters()["refreshes"]
        target = world.manager.plan_for(step)
        draft = world.manager.plan_for(world.step(site="draft", owner=step.owner))
        for _layer in range(2):
            for plan in (target, draft):
                world.layer(plan)
                world.assert_site_right(plan.site)
        assert world.counters()["refreshes"] == refreshes + 1
        assert target.native.work_info.data_ptr() == draft.native.work_info.data_ptr()
        assert (target.native.spec.query_length, draft.native.spec.query_length) == (3, 1)
        assert (target.slot.arena is draft.slot.arena) == (lane == "main")


@both_styles
def test_target_and_draft_graphs_replay_their_own_lengths(style: str) -> None:
    """R48: verify, then two drafts that advance the lengths in place, each in a graph of its site."""
    world = DraftedWorld()
    world.set_roomy_lens([5] * 8)
    graphs = {}
    for site in world.sites:
        step = world.step(site=site)
        plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
        with world.manager.graph() as graphs[site]:
            world.layer(plan or world.manager.plan_for(step))
    for _ in range(10):
        world.set_roomy_lens([length + 1 for length in world.random_lens(8)])
        owner = Owner()
        for revision, site in enumerate(("target", "draft", "draft")):
            if revision:
                world.lens += 1
            step = world.step(site=site, owner=owner, revision=revision)
            if style == BEFORE_REPLAY:
                world.manager.plan_for(step)
            world.manager.replay(graphs[site], step)
            world.assert_site_right(site)
    if style == BEFORE_REPLAY:
        with pytest.raises(StalePlanError, match="revision: found 0 .* wanted 2 "):
            world.manager.guard(graphs["target"], world.step(site="target", owner=owner))


def test_one_graph_of_verify_and_fused_drafts_replays_each_passes_lengths() -> None:
    """R48, C70: every pass is refreshed in the graph, into the one set of in-graph tables."""
    world = DraftedWorld()
    world.set_roomy_lens([5] * 8)
    owner = Owner()
    kept = {}
    with world.manager.graph() as g:
        for revision, site in enumerate(("target", "draft", "draft")):
            if revision:
                world.lens += 1
            world.layer(world.manager.plan_for(world.step(site=site, owner=owner, revision=revision)))
            kept[revision] = world.outputs[site].clone()
    for _ in range(5):
        world.set_roomy_lens([length + 1 for length in world.random_lens(8)])
        owner = Owner()
        world.manager.replay(g, *(world.step(site=site, owner=owner) for site in world.sites))
        world.lens -= 2
        for revision, site in enumerate(("target", "draft", "draft")):
            world.lens += bool(revision)
            world.outputs[site].copy_(kept[revision])
            world.assert_site_right(site)


def test_a_later_layer_of_the_target_never_decodes_the_drafts_work() -> None:
    """C09 across the sites."""
    world = DraftedWorld()
    world.set_roomy_lens(LENS[:7])
    owner = Owner()
    target = world.manager.plan_for(world.step(site="target", owner=owner))
    drafts = world.lens_buffer()
    drafts.copy_(world.lens + (world.lens > 0))
    draft = world.manager.plan_for(world.step(lens=drafts, site="draft", owner=owner))
    world.layer(draft)
    world.layer(target)
    world.assert_site_right("target")
    world.lens += 1
    world.layer(draft)
    with pytest.raises(StalePlanError, match="was written since plan_for"):
        world.layer(target)
