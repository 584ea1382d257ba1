"""Lengths beyond max_context_tokens, or beyond what the block tables have columns for, are never taken in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife import ConfigError, PlanlifeError, StalePlanError, Step

from .world import BEFORE_REPLAY, IN_GRAPH, MAX_PAGES, PAGE, World, both_styles

LENS = [500, 3, 257, 64, 1, 0, 256, 12]


def narrow_tables(world: World, pages: int = 8) -> torch.Tensor:
    """Block tables of so many columns; what a length beyond them would read is not there."""
    return torch.arange(1, pages + 1, dtype=torch.int32, device=world.device).repeat(world.rows, 1)


@pytest.mark.parametrize("sanitize", ["count", "raise"])
@pytest.mark.parametrize("how", ["eager", BEFORE_REPLAY, IN_GRAPH])
@pytest.mark.parametrize("over", ["block tables", "max_context_tokens"])
def test_the_sanitizer_raises_where_it_was_told_to(over: str, how: str, sanitize: str) -> None:
    """C89."""
    world = World(warm=True, sanitize=sanitize)
    tables = narrow_tables(world) if over == "block tables" else None
    within = [100] * 8
    world.set_lens(within)
    graph = None
    if how != "eager":
        graph = world.capture(world.step(), how, lambda plan: world.decode(plan, tables=tables))

    def run(length: int) -> None:
        world.lens.fill_(length)
        step = world.step()
        if graph is None:
            world.decode(world.manager.plan_for(step), tables=tables)
        else:
            world.manager.replay(graph, step)

    run(100)
    assert world.counters()["lengths_clamped"] == 0
    length = 8 * PAGE + 1 if over == "block tables" else MAX_PAGES * PAGE + 1
    if sanitize == "raise":
        with world.raises_soon(StalePlanError, "saw 8 length.* above max_context_tokens, or above what the block"):
            run(length)
            world.manager.plan_for(world.step(dummy=True))
    else:
        run(length)
    assert world.counters()["lengths_clamped"] == 8


def test_a_step_that_is_longer_than_the_bound_is_refused_before_anything_is_launched() -> None:
    """C90: at plan_for and at a replay."""
    world = World(warm=True)
    bound = world.spec.max_context_tokens
    world.set_lens(LENS)
    graph = world.capture(world.step(), BEFORE_REPLAY)
    world.manager.plan_for(world.step(max_tokens=bound))
    refreshes = world.counters()["refreshes"]
    step = world.step(max_tokens=bound + 2)
    for call in (
        lambda: world.manager.plan_for(step),
        lambda: world.manager.guard(graph, step),
        lambda: world.manager.replay(graph, step),
    ):
        with pytest.raises(ConfigError, match=rf"max_tokens is {bound + 2:,}, .*max_context_tokens={bound:,}"):
            call()
    assert world.counters()["refreshes"] == refreshes
    world.manager.plan_for(world.step(max_tokens=bound + 2, dummy=True))  # a dummy's lengths mean nothing


@both_styles
def test_a_step_that_is_longer_than_the_block_tables_is_refused(style: str) -> None:
    world = World(warm=True)
    world.set_lens([100] * 8)
    tables = narrow_tables(world)
    columns = 8 * PAGE
    plan = world.manager.plan_for(world.step(max_tokens=columns))
    world.decode(plan, tables=tables)
    refused = world.manager.plan_for(world.step(max_tokens=columns + 1))
    with pytest.raises(ConfigError, match=f"block_tables' columns .*{columns} in all.*max_tokens, {columns + 1}"):
        world.decode(refused, tables=tables)
    world.decode(refused)

    graph = world.capture(world.step(), style, lambda plan: (world.decode(plan), world.decode(plan, tables=tables)))
    world.manager.replay(graph, world.step(max_tokens=columns))
    for call in (world.manager.guard, world.manager.replay):
        step = world.step(max_tokens=columns + 1)
        world.manager.plan_for(step)
        with pytest.raises(ConfigError, match=rf"max_tokens is {columns + 1}, and the block tables .* {columns} tok"):
            call(graph, step)


def test_another_max_tokens_never_reuses_a_step_plan() -> None:
    world = World(warm=True)
    world.set_lens([100] * 8)
    tables, owner = narrow_tables(world), object()
    first = world.manager.plan_for(Step(world.lens, owner=owner, max_tokens=100))
    assert world.manager.plan_for(Step(world.lens, owner=owner, max_tokens=100)) is first
    for max_tokens in (None, 8 * PAGE + 1):
        other = world.manager.plan_for(Step(world.lens, owner=owner, max_tokens=max_tokens))
        assert other is not first
    with pytest.raises(ConfigError, match="columns"):
        world.decode(other, tables=tables)
    world.decode(first, tables=tables)
    assert world.counters()["refreshes"] == 1


def test_the_fallback_is_given_no_longer_step_either() -> None:
    world = World(fallback="torch")
    world.set_lens([100] * 8)
    plan = world.manager.plan_for(world.step(max_tokens=8 * PAGE + 1))
    assert plan.route == "fallback"
    with pytest.raises(ConfigError, match="columns"):
        world.decode(plan, tables=narrow_tables(world))


@pytest.mark.parametrize("max_tokens", [-1, True, 1.0, "5"])
def test_what_is_no_number_of_tokens_is_refused(max_tokens: Any) -> None:
    world = World(warm=True)
    world.set_lens(LENS)
    with pytest.raises(PlanlifeError, match="max_tokens must be"):
        world.manager.plan_for(Step(world.lens, max_tokens=max_tokens))
