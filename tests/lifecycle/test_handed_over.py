"""What engines hand over as they have it: the same mathematics is served, the rest is refused with a way out."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from planlife import ConfigError, StalePlanError, StepPlan

from .world import BEFORE_REPLAY, Owner, World, both_styles, row_errors, small_spec


@dataclass
class Metadata:
    """Of a step, as a builder makes it."""

    lens: torch.Tensor
    plan: StepPlan | None = None


# Attention that is not causal, of one query token.


@pytest.mark.parametrize(
    "asked", [{"causal": False}, {"attn_type": "encoder_decoder"}, {"attn_type": "encoder_only"}], ids=str
)
def test_one_query_token_of_cross_attention_sees_all_keys_of_its_row(asked: dict[str, Any]) -> None:
    world = World(sites={"default": small_spec(**asked, sliding_window=(-1, -1))}, warm=True)
    world.set_lens([17, 300, 1, 0, 256, 499, 33, 64])
    output = world.eager(world.step(), **asked, sliding_window=-1, logits_soft_cap=0.0, alibi_slopes=None)
    assert row_errors(output, world.expected()).max() < world.kind.row_bound


@pytest.mark.parametrize("sites_window", [(99, 0), 0], ids=["windowed site", "site without"])
def test_a_layers_window_is_checked_against_its_sites(sites_window: Any) -> None:
    """A plan of another window leaves keys out, or has too many: fluent, wrong text."""
    world = World(sites={"default": small_spec(sliding_window=sites_window)}, warm=True)
    world.set_lens([300] * 8)
    own, others = ((100, (99, 0), (99, -1)), (0, -1, (-1, -1), 99, 101))
    if not sites_window:
        own, others = (0, -1, (-1, -1), (-1, 0)), (100, (99, 0), 1)
    plan = world.manager.plan_for(world.step())
    for window in (None, *own):
        world.output.fill_(torch.nan)
        output = world.decode(plan, sliding_window=window)
        assert row_errors(output, world.expected()).max() < world.kind.row_bound
    world.output.fill_(torch.nan)
    for window in others:
        with pytest.raises(ConfigError, match=r"sliding_window is .*, wanted .*Make a site per window"):
            world.decode(plan, sliding_window=window)
    assert world.output.isnan().all()


# Metadata that is copied.


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, dataclasses.replace, dataclasses.asdict])
def test_a_copy_of_metadata_decodes_the_step_that_was_planned(duplicate: Any) -> None:
    world = World(warm=True)
    world.set_lens(world.random_lens(8))
    metadata = Metadata(world.lens)
    step = world.step(owner=metadata)
    metadata.plan = world.manager.plan_for(step)
    copied = duplicate(metadata)
    plan = copied["plan"] if isinstance(copied, dict) else copied.plan
    world.output.fill_(torch.nan)
    assert row_errors(world.decode(plan), world.expected()).max() < world.kind.row_bound
    assert world.manager.plan_for(copy.deepcopy(step)) is plan
    assert world.counters()["refreshes"] == 1


@both_styles
def test_a_graph_captured_with_a_copy_of_metadata_follows_the_steps_own_lengths(style: str) -> None:
    world = World(warm=True)
    world.set_lens([5] * 8)
    g = world.capture(world.step(), style, lambda plan: world.decode(copy.deepcopy(plan)))
    world.set_lens(world.random_lens(8))
    output = world.replay(g, copy.deepcopy(world.step()), style)
    assert row_errors(output, world.expected()).max() < world.kind.row_bound


# Dtypes of the engine's own buffers.


def test_an_fp8_cache_that_is_kept_as_bytes_is_refused_with_the_view_to_take() -> None:
    kind = dataclasses.replace(World.kind, kv_dtype=World.kind.fp8, scales="per_tensor")
    world = World(kind=kind, warm=True)
    world.set_lens(world.random_lens(8))
    plan = world.manager.plan_for(world.step())
    typed = world.key_cache, world.value_cache
    for name in ("key_cache", "value_cache"):
        for dtype in (torch.uint8, torch.int8):
            setattr(world, name, getattr(world, name).view(dtype))
            message = rf"{name}'s dtype is torch.{str(dtype)[6:]}, .*take {name}.view\(torch.{kind.kv_dtype}\)"
            with pytest.raises(ConfigError, match=message):
                world.decode(plan)
            world.key_cache, world.value_cache = typed
    world.key_cache, world.value_cache = (cache.view(torch.uint8).view(cache.dtype) for cache in typed)
    world.output.fill_(torch.nan)
    assert row_errors(world.decode(plan), world.expected()).max() < kind.row_bound
    with pytest.raises(ConfigError, match=r"kv_dtype must be one of .*, got 'uint8'.*\.view\(torch\.float8_e4m3fn\)"):
        small_spec(kv_dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_lengths_of_another_dtype_are_refused_with_the_casts_to_make(dtype: torch.dtype) -> None:
    world = World(warm=True)
    with pytest.raises(
        ConfigError, match=r"dtype torch\.int\d\d, wanted torch\.int32.* lens\.to\(torch\.int32\).*guard"
    ):
        world.manager.plan_for(world.step(lens=world.lens.to(dtype)))


def test_a_graph_that_casts_its_lengths_is_replayed_for_the_tensor_that_the_cast_gave() -> None:
    world = World(warm=True)
    lens64 = world.lens.to(torch.int64)
    kept: list[torch.Tensor] = []
    with world.manager.graph() as g:
        kept.append(lens64.to(torch.int32))
        world.decode(world.manager.plan_for(world.step(lens=kept[0])))
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        lens64.copy_(world.lens)
        step = world.step(lens=kept[0])
        world.manager.guard(g, step)
        world.output.fill_(torch.nan)
        g.replay()
        assert row_errors(world.output, world.expected()).max() < world.kind.row_bound
        output = world.replay(g, world.step(lens=kept[0], owner=Owner()))
        assert row_errors(output, world.expected()).max() < world.kind.row_bound
    address = f"{kept[0].data_ptr():#x}"
    for wrong in (lens64.to(torch.int32), world.lens):
        with pytest.raises(StalePlanError, match=address):
            world.manager.guard(g, world.step(lens=wrong))
    with pytest.raises(ConfigError, match=r"lens\.to\(torch\.int32\)"):
        world.manager.guard(g, world.step(lens=lens64))


def test_a_cast_before_each_replay_goes_into_one_buffer() -> None:
    world = World(warm=True)
    lens64 = world.lens.to(torch.int64)
    g = world.capture(world.step(), BEFORE_REPLAY)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        lens64.copy_(world.lens)
        world.lens.zero_()
        world.lens.copy_(lens64)
        output = world.replay(g, world.step(), BEFORE_REPLAY)
        assert row_errors(output, world.expected()).max() < world.kind.row_bound
