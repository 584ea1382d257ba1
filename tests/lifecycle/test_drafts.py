"""Draft passes advance the lengths in place: each pass must see its own token."""

from __future__ import annotations

import pytest
import torch

from planlife import StalePlanError

from .world import BEFORE_REPLAY, IN_GRAPH, MAX_PAGES, Owner, World, both_styles, small_spec

NUM_PASSES = 3


class DraftWorld(World):
    """Block tables with room for every pass; lengths that cross a tile boundary within the passes."""

    def set_draft_lens(self, lens: list[int]) -> None:
        self.set_lens(lens)
        order = torch.randperm(MAX_PAGES, generator=self.generator) + 1
        self.tables[:] = order.to(self.device, torch.int32)

    def random_draft_lens(self) -> list[int]:
        return [length + 1 for length in self.random_lens(8, longest=400)]


def test_each_revision_refreshes_once_and_sees_its_own_token() -> None:
    """C10: same owner, lengths += 1 in place; as many layers as there are share the refresh."""
    world = DraftWorld(warm=True)
    for _ in range(25):
        world.set_draft_lens(world.random_draft_lens())
        owner = Owner()
        before = world.counters()
        for revision in range(NUM_PASSES + 1):
            if revision:
                world.lens += 1
            for _layer in range(2):
                output = world.eager(world.step(owner=owner, revision=revision))
            world.assert_right(output, world.expected())
        after = world.counters()
        assert after["refreshes"] - before["refreshes"] == NUM_PASSES + 1
        assert after["refreshes_skipped"] - before["refreshes_skipped"] == NUM_PASSES + 1


def test_a_revision_refreshes_where_no_version_can_be_read() -> None:
    """C10: inference tensors; the negative is one pass that forgets its revision."""
    world = DraftWorld(warm=True)
    with torch.inference_mode():
        lens = world.lens_buffer()
        owner = Owner()
        world.set_draft_lens(world.random_draft_lens())
        lens.copy_(world.lens)
        for revision in range(NUM_PASSES):
            output = world.eager(world.step(lens=lens, owner=owner, revision=revision))
            world.assert_right(output, world.expected(lens=lens))
            lens += 1
        forgotten = world.eager(world.step(lens=lens, owner=owner, revision=NUM_PASSES - 1))
        world.assert_wrong(forgotten, world.expected(lens=lens))


def test_the_plan_of_an_earlier_pass_is_refused_once_the_lengths_moved_on() -> None:
    """C10: the earlier pass's lengths are gone from the buffer."""
    world = DraftWorld(warm=True)
    world.set_draft_lens(world.random_draft_lens())
    owner = Owner()
    target = world.manager.plan_for(world.step(owner=owner))
    world.lens += 1
    draft = world.manager.plan_for(world.step(owner=owner, revision=1))
    with pytest.raises(StalePlanError):
        world.decode(target)
    world.output.fill_(torch.nan)
    world.assert_right(world.decode(draft), world.expected())


@both_styles
def test_one_graph_replayed_for_every_pass_follows_the_passes(style: str) -> None:
    """C10: SGLang and ATOM replay one draft graph per pass."""
    world = DraftWorld(warm=True)
    world.set_draft_lens([64] * 8)
    graph = world.capture(world.step(), style)
    for _ in range(8):
        world.set_draft_lens(world.random_draft_lens())
        owner = Owner()
        for revision in range(NUM_PASSES):
            world.assert_right(world.replay(graph, world.step(owner=owner, revision=revision), style), world.expected())
            world.lens += 1
        if style == BEFORE_REPLAY:
            with pytest.raises(StalePlanError):
                world.manager.guard(graph, world.step(owner=owner, revision=NUM_PASSES))


@pytest.mark.parametrize("with_revision", [True, False], ids=["revision", "version only"])
def test_a_fused_draft_loop_in_one_graph_sees_each_passes_lengths(with_revision: bool) -> None:
    """C70: lengths advanced, planned and decoded three times in one recording."""
    world = DraftWorld(warm=True)
    outputs = [torch.full_like(world.output, torch.nan) for _ in range(NUM_PASSES)]
    world.set_draft_lens([64] * 8)
    owner = Owner()
    world.eager(world.step(owner=owner))
    with world.manager.graph() as graph:
        for index, output in enumerate(outputs):
            world.lens.add_(1)
            plan = world.manager.plan_for(world.step(owner=owner, revision=(index + 1) * with_revision))
            for _layer in range(2):
                world.decode(plan, output=output)
    before = world.counters()["refreshes"]
    for _ in range(22):
        world.set_draft_lens(world.random_draft_lens())
        first = world.lens.clone()
        for output in outputs:
            output.fill_(torch.nan)
        world.manager.replay(graph, world.step(owner=owner, revision=1))
        for index, output in enumerate(outputs):
            world.assert_right(output, world.expected(lens=first + index + 1))
        world.assert_wrong(outputs[0], world.expected(lens=first + 2))
    assert world.counters()["refreshes"] == before


def test_a_fused_loop_leaves_tables_that_no_piecewise_graph_takes_for_its_own() -> None:
    """C70 with C71: after several refreshes in one graph the last lengths are nobody's step."""
    world = DraftWorld(warm=True)
    world.set_draft_lens([64] * 8)
    owner = Owner()
    with world.manager.graph() as loop:
        for revision in range(2):
            world.lens.add_(1)
            plan = world.manager.plan_for(world.step(owner=owner, revision=revision))
            world.decode(plan)
    with world.manager.graph() as piece:
        world.decode(plan)
    steps = [world.step(owner=owner, revision=revision) for revision in range(2)]
    world.manager.replay(loop, *steps)
    for step in steps:
        with pytest.raises(StalePlanError, match="no known lengths"):
            world.manager.guard(piece, step)


@both_styles
def test_verify_steps_of_several_query_tokens_follow_their_lengths(style: str) -> None:
    """C70's companion: the target's verify step, query_length 3, and its padded rows."""
    world = DraftWorld(warm=True, sites={"default": small_spec(query_length=3)})
    world.set_draft_lens([64] * 8)
    graph = world.capture(world.step(5), style)
    for _ in range(8):
        world.set_draft_lens(world.random_draft_lens()[:5])
        output = world.replay(graph, world.step(5), style)
        world.assert_right(output, world.expected(), query_length=3)
        assert (output[15:] == 0).all()


def test_target_and_draft_sites_of_one_model_share_a_graph() -> None:
    """C70: a windowed draft site's five passes after a full target, each refreshed from its own pass's lengths."""
    sites = {"target": small_spec(), "draft": small_spec(sliding_window=130, lane="draft")}
    world = DraftWorld(warm=True, sites=sites)
    draft_outputs = [torch.full_like(world.output, torch.nan) for _ in range(5)]
    world.set_draft_lens([64] * 8)

    owner = Owner()
    with world.manager.graph() as graph:
        world.decode(world.manager.plan_for(world.step(site="target", owner=owner)))
        for revision, output in enumerate(draft_outputs, start=1):
            world.lens.add_(1)
            world.decode(
                world.manager.plan_for(world.step(site="draft", owner=owner, revision=revision)), output=output
            )
    for _ in range(8):
        world.set_draft_lens(world.random_draft_lens())
        first = world.lens.clone()
        for output in (world.output, *draft_outputs):
            output.fill_(torch.nan)
        step = world.step(site="draft", owner=owner, revision=1)
        world.manager.replay(graph, step, world.step(site="target", owner=owner))
        world.assert_right(world.output, world.expected(lens=first))
        for revision, output in enumerate(draft_outputs, start=1):
            world.assert_right(output, world.expected(lens=first + revision, spec=sites["draft"]))


def test_the_style_that_the_world_replays_by_default_needs_no_plan_for() -> None:
    """A control of these tests themselves: World.replay(IN_GRAPH) calls no plan_for."""
    world = DraftWorld(warm=True)
    world.set_draft_lens([64] * 8)
    step = world.step()
    graph = world.capture(step, IN_GRAPH)
    before = world.counters()
    world.replay(graph, step)
    assert world.counters() == before
