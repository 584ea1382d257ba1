"""lse on every route and in both styles of capture, and what it is for: partial results that are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, ConfigError, RouteError, StepPlan, merge
from planlife.testing import reference_decode

from .test_cache_kinds import FP8, KindWorld
from .world import (
    BEFORE_REPLAY,
    IN_GRAPH,
    MAX_PAGES,
    PAGE,
    World,
    both_styles,
    fallback_name,
    limited_backend,
    small_spec,
)

NOTHING = -torch.inf


def poisoned_lse(rows: int, world: World) -> torch.Tensor:
    return torch.full((rows * world.spec.query_length, world.spec.num_q_heads), torch.nan, device=world.device)


def assert_lse(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Rows beyond `wanted` have attended nothing."""
    found, wanted = found.cpu(), wanted.cpu()
    behind = wanted.new_full((found.shape[0] - wanted.shape[0], found.shape[1]), NOTHING)
    torch.testing.assert_close(found, torch.cat([wanted, behind]), rtol=1e-5, atol=2e-5)


ROUTES: dict[str, Callable[[], dict[str, Any]]] = {
    "one table set": dict,
    "segments": lambda: {"backend": limited_backend(3), "ladder": CapacityLadder([8])},
    "parts": lambda: {"ladder": CapacityLadder([4])},
    "fallback": lambda: {"fallback": fallback_name()},
    "off": lambda: {"enabled": False, "fallback": fallback_name()},
}


@pytest.mark.parametrize("how", ROUTES)
@pytest.mark.parametrize(
    ("kv_dtype", "scales"), [("bfloat16", "none"), (FP8[0], "per_tensor"), (FP8[1], "per_token")], ids=str
)
def test_every_route_fills_lse_with_key_scales_and_sinks_in_it(how: str, kv_dtype: str, scales: str) -> None:
    world = KindWorld("packed", kv_dtype, scales, warm=how not in ("fallback", "off"), **ROUTES[how]())
    lens = [300, 0, 17, 256, 1, 40]
    world.set_lens(lens)
    plan = world.manager.plan_for(world.step(len(lens)))
    assert plan.route == ("fallback" if how in ("fallback", "off") else "planned")
    rows = len(lens) if how in ("parts", "off") else 8
    lse, wanted = poisoned_lse(rows, world), poisoned_lse(len(lens), world)
    output = world.decode(plan, world.query[:rows], world.output[:rows], lse=lse)
    dense = world.dense(len(lens), lse=wanted)
    world.assert_right(output, dense)
    assert_lse(lse, wanted)
    assert (lse[1] == NOTHING).all()


ROUTES_IN_A_GRAPH = [(style, how) for style in (BEFORE_REPLAY, IN_GRAPH) for how in ("one table set", "segments")]


@pytest.mark.parametrize(("style", "how"), [*ROUTES_IN_A_GRAPH, (IN_GRAPH, "parts"), (IN_GRAPH, "off")])
@pytest.mark.parametrize("query_length", [1, 3])
def test_a_replay_fills_the_captured_lse_for_its_own_lengths(style: str, how: str, query_length: int) -> None:
    world = World(sites={"default": small_spec(query_length=query_length)}, warm=how != "off", **ROUTES[how]())
    lse = poisoned_lse(8, world)

    def layer(plan: StepPlan) -> None:
        world.decode(plan, world.query, world.output, lse=lse)

    g = world.capture(world.step(), style, layer)
    assert lse.isnan().all()
    before = None
    for lens in ([300, 0, 17, 256, 1, 40, 2, 500], [1, 2, 0, 0, 500, 0, 0, 257], [0] * 8):
        world.set_lens(lens)
        lse.fill_(torch.nan)
        world.replay(g, world.step(), style)
        wanted = poisoned_lse(8, world)
        dense = reference_decode(
            world.query,
            world.key_cache,
            world.value_cache,
            world.tables,
            world.lens,
            world.spec.head_dim**-0.5,
            query_length=query_length,
            lse=wanted,
        )
        world.assert_right(world.output, dense, query_length)
        assert_lse(lse, wanted)
        if before is not None:  # positive control
            with pytest.raises(AssertionError):
                assert_lse(lse, before)
        before = wanted


@both_styles
def test_a_graph_that_is_replayed_for_a_dummy_says_that_nothing_was_attended(style: str) -> None:
    world = World(warm=True)
    world.set_lens([300] * 8)
    lse = poisoned_lse(8, world)
    g = world.capture(world.step(), style, lambda plan: world.decode(plan, lse=lse))
    world.replay(g, world.step(), style)
    assert lse.isfinite().all()  # positive control
    world.lens.zero_()  # an in-graph graph plans from the engine's buffer, which the engine zeroes
    world.manager.replay(g, world.step(dummy=True))
    assert (world.output == 0).all()
    assert (lse == NOTHING).all()


def test_an_eager_dummy_says_that_nothing_was_attended() -> None:
    world = World(warm=True)
    lse = poisoned_lse(8, world)
    assert (world.decode(world.manager.plan_for(world.step(dummy=True)), lse=lse) == 0).all()
    assert (lse == NOTHING).all()


def test_a_strided_lse_is_refused_before_anything_is_decoded() -> None:
    world = World(warm=True)
    world.set_lens([300] * 8)
    plan = world.manager.plan_for(world.step())
    with pytest.raises(ConfigError, match="lse's contiguity is False"):
        world.decode(plan, lse=torch.zeros(world.spec.num_q_heads, 8, device=world.device).T)
    assert world.output.isnan().all()


def test_a_graph_records_no_fallback_that_cannot_fill_lse() -> None:
    def dense(output: torch.Tensor, *call: Any, spec: Any, key_scale: Any, value_scale: Any, sinks: Any) -> None:
        output.zero_()

    world = World(enabled=False, fallback=dense)
    with pytest.raises(RouteError, match="'test_a_graph_.*dense', which does not take it"), world.manager.graph() as g:
        world.decode(world.manager.plan_for(world.step()), lse=poisoned_lse(8, world))
    with world.manager.graph(g):  # positive control: nothing is left of the refused recording
        world.decode(world.manager.plan_for(world.step()))


# --- what it is for


class SplitWorld(World):
    """A context over two sites, as two ranks have it: the first `FIRST` tokens of a row, and those behind them."""

    FIRST = 8 * PAGE

    def __init__(self, **spec: Any) -> None:
        both = small_spec(**spec)
        super().__init__(sites={"first": both, "rest": both}, warm=True)
        self.sinks = torch.randn(both.num_q_heads, generator=self.generator).to(self.device)
        self.parts_lens = {site: self.lens_buffer() for site in self.sites}
        self.parts_tables = {site: torch.full_like(self.tables, -1) for site in self.sites}
        self.parts_output = {site: torch.full_like(self.output, torch.nan) for site in self.sites}
        self.parts_lse = {site: poisoned_lse(8, self) for site in self.sites}
        self.lse = poisoned_lse(8, self)

    def set_lens(self, lens: list[int], *args: Any, **kwargs: Any) -> None:
        """Also split over the two sites."""
        super().set_lens(lens, *args, **kwargs)
        self.parts_lens["first"].copy_(self.lens.clamp_max(self.FIRST))
        self.parts_lens["rest"].copy_((self.lens - self.FIRST).clamp_min(0))
        columns = self.FIRST // PAGE
        for tables in self.parts_tables.values():
            tables.fill_(-1)
        self.parts_tables["first"][:, :columns] = self.tables[:, :columns]
        self.parts_tables["rest"][:, : MAX_PAGES - columns] = self.tables[:, columns:]

    def part_step(self, site: str) -> Any:
        return self.step(lens=self.parts_lens[site], site=site)

    def decode_part(self, site: str, plan: StepPlan, **extras: Any) -> None:
        output, lse = self.parts_output[site], self.parts_lse[site]
        self.decode(plan, self.query, output, self.parts_tables[site], lse=lse, **extras)

    def merged(self) -> None:
        """The merge of both parts, into the world's own buffers."""
        pairs = [(self.parts_output[site], self.parts_lse[site]) for site in self.sites]
        merge(*pairs[0], *pairs[1], out=self.output, out_lse=self.lse)

    def assert_whole(self, **extras: Any) -> None:
        wanted = poisoned_lse(8, self)
        dense = reference_decode(
            self.query,
            self.key_cache,
            self.value_cache,
            self.tables,
            self.lens,
            self.spec.head_dim**-0.5,
            lse=wanted,
            **extras,
        )
        self.assert_right(self.output, dense)
        assert_lse(self.lse, wanted)


LENS = ([500, 128, 129, 0, 1, 300, 127, 640], [1, 600, 0, 256, 257, 128, 2, 400])


@pytest.mark.parametrize("sinks", [None, "first", "rest"])
def test_a_context_decoded_in_two_halves_of_its_pages_equals_the_whole(sinks: str | None) -> None:
    """Context parallelism. Only one of the two may carry the sinks, and a row that it sees nothing of has none."""
    world = SplitWorld()
    lens = [max(length, 129) if length and sinks == "rest" else length for length in LENS[0]]
    world.set_lens(lens)
    for site in world.sites:
        world.decode_part(
            site, world.manager.plan_for(world.part_step(site)), sinks=world.sinks if site == sinks else None
        )
    world.merged()
    world.assert_whole(sinks=world.sinks if sinks else None)
    for site in world.sites:  # positive control: neither part is the whole
        world.output.copy_(world.parts_output[site])
        world.lse.copy_(world.parts_lse[site])
        with pytest.raises(AssertionError):
            world.assert_whole(sinks=world.sinks if sinks else None)


def test_sinks_in_both_halves_are_counted_twice() -> None:
    """Why only one of the two may carry them."""
    world = SplitWorld()
    world.set_lens([500] * 8)
    for site in world.sites:
        world.decode_part(site, world.manager.plan_for(world.part_step(site)), sinks=world.sinks)
    world.merged()
    with pytest.raises(AssertionError):
        world.assert_whole(sinks=world.sinks)


def test_a_row_that_the_half_with_the_sinks_sees_nothing_of_has_no_sink() -> None:
    """Why the half that carries them must be the one that every row begins in."""
    world = SplitWorld()
    world.set_lens([100] * 8)
    for site in world.sites:
        extras = {"sinks": world.sinks} if site == "rest" else {}
        world.decode_part(site, world.manager.plan_for(world.part_step(site)), **extras)
    world.merged()
    world.assert_whole()
    with pytest.raises(AssertionError):
        world.assert_whole(sinks=world.sinks)


@both_styles
def test_both_halves_and_their_merge_are_one_graph(style: str) -> None:
    world = SplitWorld()
    world.set_lens(LENS[0])
    plans = {site: world.manager.plan_for(world.part_step(site)) for site in world.sites}
    with world.manager.graph() as g:
        for site in world.sites:
            plan = plans[site] if style == BEFORE_REPLAY else world.manager.plan_for(world.part_step(site))
            world.decode_part(site, plan)
        world.merged()
    for lens in (*LENS, [0] * 8, [300] * 8):
        world.set_lens(list(lens))
        steps = [world.part_step(site) for site in world.sites]
        if style == BEFORE_REPLAY:
            for step in steps:
                world.manager.plan_for(step)
        for poisoned in (world.output, world.lse, *world.parts_output.values(), *world.parts_lse.values()):
            poisoned.fill_(torch.nan)
        world.manager.replay(g, *steps)
        world.assert_whole()


def test_a_cascade_over_a_shared_prefix_equals_the_whole() -> None:
    """All rows begin with the same pages; their tails differ, and some have none."""
    world = SplitWorld()
    world.set_lens([500, 128, 129, 400, 300, 640, 200, 128])
    world.tables[:, : world.FIRST // PAGE] = world.tables[0, : world.FIRST // PAGE]
    world.parts_tables["first"][:, : world.FIRST // PAGE] = world.tables[0, : world.FIRST // PAGE]
    for site in world.sites:
        world.decode_part(site, world.manager.plan_for(world.part_step(site)))
    world.merged()
    world.assert_whole()


def test_tokens_of_a_draft_share_a_prefix_as_rows_of_their_own() -> None:
    """Of query_length 3, a token's causal edge is in its row's end: the prefix is decoded with a row per token."""
    length, rows, prefix = 3, 4, 8 * PAGE
    site = small_spec(query_length=length)
    world = World(rows=12, sites={"rest": site, "prefix": small_spec()}, warm=True, ladder=CapacityLadder([12]))
    world.set_lens([prefix + tail for tail in (3, 40, 128, 300)])
    whole_lens, columns = world.lens[:rows].clone(), prefix // PAGE
    tails, tail_tables = whole_lens - prefix, world.tables[:rows, columns:].contiguous()
    flat_lens = torch.full((rows * length,), prefix, dtype=torch.int32, device=world.device)
    flat_tables = world.tables[:rows, :columns].repeat_interleave(length, 0)
    query = world.query[: rows * length]
    pairs = []
    for name, lens, tables in (("rest", tails, tail_tables), ("prefix", flat_lens, flat_tables)):
        output, lse = torch.full_like(query, torch.nan), torch.full((rows * length, 4), torch.nan, device=world.device)
        plan = world.manager.plan_for(world.step(lens=lens, site=name))
        world.decode(plan, query, output, tables, lse=lse)
        pairs.append((output, lse))
    output, lse = merge(*pairs[0], *pairs[1])
    wanted = torch.full_like(lse, torch.nan)
    dense = reference_decode(
        query,
        world.key_cache,
        world.value_cache,
        world.tables[:rows],
        whole_lens,
        world.spec.head_dim**-0.5,
        query_length=length,
        lse=wanted,
    )
    world.assert_right(output, dense, length)
    assert_lse(lse, wanted)
