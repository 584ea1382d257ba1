"""What the scenarios of tests/lifecycle do over other kinds of cache, over those that aiter reads on each architecture;
and what cannot hold there, refused or seen by the double.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planlife import CapacityLadder, ConfigError, RouteError
from planlife.backends.aiter_backend import AiterBackend

from ..lifecycle import test_cache_kinds, test_values
from ..lifecycle.test_segments import *  # noqa: F403
from ..lifecycle.world import PAGE, World, both_styles, small_spec
from .machines import *  # noqa: F403
from .machines import Machine, Watched, _over_aiter, double_on, kind_of  # noqa: F401

ON_PURPOSE = {"test_a_v_that_is_not_finite_behind_a_rows_last_token_is_seen": "V is not finite in the unwritten tail"}

NOT_HERE = {
    f"test_more_rows_than_a_backend_plans_at_once_are_served_in_segments[{one}]": "one architecture is enough of it"
    for one in ("gfx950-G2", "gfx1250-newer")
}

SCALES = [("packed", "per_tensor"), ("packed", "per_token"), ("packed, plain V", "per_tensor")]


@pytest.fixture(scope="module", params=[("gfx942", "G3"), ("gfx950", "G2"), ("gfx1250", "newer")], ids="-".join)
def machine(request: pytest.FixtureRequest) -> Machine:
    """FP8 on each architecture, with the generation that the modules beside this one have on another."""
    arch, generation = request.param
    return Machine(arch, generation, kind_of(arch))


@both_styles
@pytest.mark.parametrize(("layout", "scales"), SCALES)
def test_replays_decode_the_lengths_scales_and_sinks_of_their_own_step(layout: str, scales: str, style: str) -> None:
    test_cache_kinds.test_replays_decode_the_lengths_scales_and_sinks_of_their_own_step(
        layout, World.kind.fp8, scales, style
    )


@pytest.mark.parametrize("how", ["segments", "parts", "fallback"])
def test_scales_and_sinks_reach_every_way_that_a_step_can_take(how: str) -> None:
    test_cache_kinds.test_scales_and_sinks_reach_every_way_that_a_step_can_take(World.kind.fp8, how)


def test_more_rows_than_a_backend_plans_at_once_are_served_in_segments(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C41, R23: without the warm-up, which runs each of 4096 row counts."""
    monkeypatch.setattr(AiterBackend, "compile", lambda *call: 1)
    test_values.test_more_rows_than_a_backend_plans_at_once_are_served_in_segments(4097)
    assert {fault.partition(":")[0] for fault in watched.faults()} == {"compiled outside of a mint"}
    watched.start()


def test_each_row_count_of_a_class_was_run_when_it_was_minted(watched: Watched) -> None:
    """A call of one row in a class of two has more slots per row than its reducer packs."""
    kind = replace(World.kind, head_dim=128)
    world = World(kind=kind, sites={"default": kind.spec(workgroup_budget=128)}, ladder=CapacityLadder([2]), warm=True)
    for rows in (1, 2):
        world.set_lens([300, 17][:rows])
        world.eager(world.step(rows), query=world.query[:rows], output=world.output[:rows])
        world.assert_right(world.output[:rows], world.expected(world.query[:rows], world.lens[:rows]))
    assert not watched.faults()
    reducers = {key for key in watched.double.compiled if key[0] == "reduce" and 128 in key}
    assert {key[-1] for key in reducers} == {True, False}  # control: the row counts do have kernels of their own


def test_log_sum_exps_are_refused_before_anything_is_launched(watched: Watched) -> None:
    world = World(warm=True)
    world.set_lens([300, 17])
    plan = world.manager.plan_for(world.step())
    lse = torch.zeros(8, world.spec.num_q_heads)
    before = watched.double.decodes
    with pytest.raises(RouteError, match="gives no log-sum-exps"):
        world.decode(plan, lse=lse)
    assert watched.double.decodes == before and world.output.isnan().all()
    world.assert_right(world.decode(plan), world.expected())


@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
def test_a_cache_that_is_a_view_of_a_larger_one_is_refused_before_anything_is_launched(
    watched: Watched, cache: str
) -> None:
    world = World(warm=True)
    world.set_lens([300, 17])
    plan = world.manager.plan_for(world.step())
    whole = getattr(world, cache)
    setattr(world, cache, torch.cat([whole, whole], dim=1)[:, : whole.shape[1]])
    before = watched.double.decodes
    with pytest.raises(ConfigError, match=f"aiter's pa_decode refuses this call: {cache} must be contiguous"):
        world.decode(plan)
    assert watched.double.decodes == before and world.output.isnan().all()
    setattr(world, cache, whole)
    world.assert_right(world.decode(plan), world.expected())


def world_of_own_pages() -> World:
    """Four rows that share no page."""
    world = World(warm=True)
    world.set_lens([3, 17, 300, 255])
    world.tables[:4, :20] = torch.arange(1, 81).view(4, 20)
    return world


def poison_tail(world: World, cache: torch.Tensor, row: int, what: float) -> None:
    """Behind the last token of a row whose last page is not full."""
    length = int(world.lens[row])
    page = int(world.tables[row, length // PAGE])
    tail = cache.new_full((), what)
    for token in range(length % PAGE, PAGE):
        if cache is world.key_cache:  # [pages, kv_heads, head_dim / x, page, x]
            cache[page, :, :, token] = tail
        else:  # [pages, kv_heads, page / x, head_dim, x]
            cache[page, :, token // cache.shape[-1], :, token % cache.shape[-1]] = tail


def test_what_is_finite_behind_a_rows_last_token_reaches_no_output() -> None:
    """C35, as far as aiter goes."""
    world = world_of_own_pages()
    expected = world.expected(world.query[:4], world.lens[:4])
    for row in range(4):
        for cache in (world.key_cache, world.value_cache):
            poison_tail(world, cache, row, 200.0)
    world.assert_right(world.eager(world.step(4))[:4], expected)


def test_a_v_that_is_not_finite_behind_a_rows_last_token_is_seen() -> None:
    """The kernel multiplies it by 0: the engine's pages must be written once before they are handed out."""
    world = world_of_own_pages()
    poison_tail(world, world.value_cache, 2, torch.nan)
    world.eager(world.step(4))


@pytest.mark.parametrize("dtype", ["q_dtype", "kv_dtype"])
def test_float32_is_refused_by_name(dtype: str) -> None:
    spec = small_spec(**{"kv_dtype": "bfloat16", "scales": "none", dtype: "float32"})
    said = {"q_dtype": "aiter takes no float32 query", "kv_dtype": "aiter reads no float32 cache"}
    with pytest.raises(ConfigError, match=said[dtype]):
        World(sites={"default": spec})
