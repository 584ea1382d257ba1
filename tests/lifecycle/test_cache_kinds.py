"""Every kind of cache through a manager: captured once, replayed for steps with lengths and scales of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, ConfigError, StepPlan
from planlife.testing import LAYOUTS, reference_decode

from .world import World, both_styles, fallback_name, limited_backend, small_spec

FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
KINDS = [
    (layout, kv_dtype, scales)
    for layout in LAYOUTS
    for kv_dtype, scales in (
        ("bfloat16", "none"),
        *((name, kind) for name in FP8 for kind in ("per_tensor", "per_token")),
    )
]


class KindWorld(World):
    """A World whose caches are of any kind, with sinks in a persistent device buffer."""

    def __init__(self, layout: str, kv_dtype: str, scales: str, **options: Any) -> None:
        kind = replace(World.kind, layout=layout, kv_dtype=kv_dtype, scales=scales)
        super().__init__(kind=kind, **options)
        self.sinks = torch.randn(self.spec.num_q_heads, generator=self.generator).to(self.device)

    def decode(
        self,
        plan: StepPlan,
        query: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        tables: torch.Tensor | None = None,
        **extras: Any,
    ) -> torch.Tensor:
        rows = max(plan.rows, plan.class_rows or 0)
        query = self.query[:rows] if query is None else query
        output = self.output[:rows] if output is None else output
        return super().decode(plan, query, output, tables, sinks=self.sinks, **extras)

    def dense(self, rows: int, **extras: Any) -> torch.Tensor:
        """float64: the dense answer for what is in the buffers now."""
        return reference_decode(
            self.query[:rows].cpu(),
            self.key_cache.cpu(),
            self.value_cache.cpu(),
            self.tables.cpu(),
            self.lens[:rows].cpu(),
            self.spec.head_dim**-0.5,
            kv_layout=self.spec.kv_layout,
            sinks=self.sinks.cpu(),
            **{name: scale.cpu() for name, scale in self.scales.items()},
            **extras,
        )


@pytest.mark.parametrize(("layout", "kv_dtype", "scales"), KINDS)
@both_styles
def test_replays_decode_the_lengths_scales_and_sinks_of_their_own_step(
    layout: str, kv_dtype: str, scales: str, style: str
) -> None:
    world = KindWorld(layout, kv_dtype, scales, warm=True)
    world.set_lens(world.random_lens(4))
    g = world.capture(world.step(4), style)
    before = None
    for _step in range(3):
        world.set_lens([300, *world.random_lens(3)])
        world.sinks.copy_(torch.randn(world.sinks.shape, generator=world.generator))
        for scale in world.scales.values():
            scale.mul_(1.5)
        output = world.replay(g, world.step(4), style)[:4]
        world.assert_right(output, world.dense(4))
        if before is not None:  # positive control
            world.assert_wrong(output, before)
        before = world.dense(4)


def put_into_one_pool(world: World, pages_per_block: int) -> None:
    """Block by block the pages of K, and behind them those of V: V's view starts as many pages behind K's."""
    caches, device = (world.key_cache, world.value_cache), world.key_cache.device
    num_pages = 2 * len(world.key_cache)
    of_key = torch.arange(len(world.key_cache), device=device)
    of_key += of_key // pages_per_block * pages_per_block
    pool = torch.zeros(num_pages, world.key_cache[0].nbytes, dtype=torch.uint8, device=device)
    for at, cache in zip((of_key, of_key + pages_per_block), caches, strict=True):
        pool[at] = cache.view(torch.uint8).flatten(1)
    keys, values = (pool.view(cache.dtype).view(num_pages, *cache.shape[1:]) for cache in caches)
    world.key_cache, world.value_cache = keys, values[pages_per_block:]
    for name, scale in world.scales.items():
        if scale.numel() > 1:
            world.scales[name] = scale.new_full((num_pages, *scale.shape[1:]), torch.nan)
            world.scales[name][of_key] = scale


@both_styles
@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_packed_v_of_fewer_pages_which_lies_behind_k_in_one_pool_is_read_in_place(is_fp8: bool, style: str) -> None:
    """As engines hand out a cache that a layer has K and V in, block by block."""
    kind = (World.kind.fp8, "per_token") if is_fp8 else (World.kind.kv_dtype, World.kind.scales)
    world = KindWorld("packed", *kind, warm=True, sanitize="raise")
    world.set_lens([300, 0, 17, 257])
    expected, tables = world.dense(4), world.tables.clone()
    put_into_one_pool(world, 8)
    assert len(world.value_cache) == len(world.key_cache) - 8
    world.tables += tables // 8 * 8
    world.assert_right(world.eager(world.step(4))[:4], expected)
    g = world.capture(world.step(4), style)
    world.assert_right(world.replay(g, world.step(4), style)[:4], expected)
    world.tables.copy_(tables)  # control: these are other pages
    world.assert_wrong(world.replay(g, world.step(4), style)[:4], expected)


@both_styles
def test_an_fp8_cache_of_scales_per_tensor_that_is_called_without_any_has_ones(style: str) -> None:
    world = World(kind=replace(World.kind, kv_dtype=World.kind.fp8, scales="per_tensor"), rows=4, warm=True)
    world.set_lens([300, 0, 17, 257])
    scaled, world.scales = world.scales, {name: torch.ones_like(one) for name, one in world.scales.items()}
    expected, world.scales = world.expected(), {}
    world.assert_right(world.eager(world.step(4)), expected)
    world.assert_right(world.eager(world.step(4), key_scale=None, value_scale=None), expected)
    g = world.capture(world.step(4), style)
    world.assert_right(world.replay(g, world.step(4), style), expected)
    world.assert_wrong(world.eager(world.step(4), **scaled), expected)  # control
    for name in scaled:  # one alone is a mistake
        with pytest.raises(ConfigError, match="is None, wanted a per_tensor scale"):
            world.eager(world.step(4), **{name: scaled[name]})


@both_styles
def test_a_site_with_a_softmax_scale_of_its_own_is_decoded_by_it(style: str) -> None:
    """As a Gemma's layers have, whatever their head_dim is."""
    world = World(sites={"default": small_spec(softmax_scale=0.5)}, rows=4, warm=True)
    world.set_lens([300, 0, 17, 257])
    world.assert_right(world.eager(world.step(4)), world.expected())
    g = world.capture(world.step(4), style)
    world.assert_right(world.replay(g, world.step(4), style), world.expected())
    usual = world.expected(spec=replace(world.spec, softmax_scale=None))
    world.assert_wrong(world.output, usual)  # control


def test_sites_that_share_plans_may_differ_in_their_softmax_scales() -> None:
    sites = {"target": small_spec(softmax_scale=0.5), "draft": small_spec(plan_of="target", softmax_scale=0.25)}
    world = World(sites=sites, rows=4, warm=True)
    world.set_lens([300, 0, 17, 257])
    for site, spec in sites.items():
        world.spec = spec
        world.assert_right(world.eager(world.step(4, site=site)), world.expected())


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("how", ["segments", "parts", "fallback"])
def test_scales_and_sinks_reach_every_way_that_a_step_can_take(kv_dtype: str, how: str) -> None:
    options: dict[str, Any] = {
        "segments": {"backend": limited_backend(3)},
        "parts": {"ladder": CapacityLadder([4])},
        "fallback": {"enabled": False, "fallback": fallback_name()},
    }[how]
    world = KindWorld("packed", kv_dtype, "per_token", warm=how != "fallback", **options)
    world.set_lens([300, 0, 17, 256, 1, 40, 0, 500])
    plan = world.manager.plan_for(world.step(8))
    output = world.decode(plan)
    assert plan.route == ("fallback" if how == "fallback" else "planned")
    assert (len(plan.segments or ()) > 1) == (how != "fallback")
    assert bool(plan.parts) == (how == "parts")
    world.assert_right(output, world.dense(8))


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        (
            "key_scale",
            torch.ones(160, 2, 8),
            r"key_scale's shape is \[160, 2, 8\], wanted \[160, 2, 16\] or \[160, 2, 16, 1\]",
        ),
        ("value_scale", torch.ones(160, 16, 2).transpose(1, 2), "value_scale's stride over tokens is 2, wanted 1"),
        ("value_scale", torch.ones(1), r"value_scale's shape is \[1\], wanted .* one scale per token"),
    ],
)
def test_scales_that_do_not_fit_the_cache_are_refused_before_any_launch(
    name: str, scale: torch.Tensor, message: str
) -> None:
    world = KindWorld("packed", World.kind.fp8, "per_token", warm=True)
    world.set_lens([300, 17])
    plan = world.manager.plan_for(world.step(2))
    world.scales = {key: value[..., None] for key, value in world.scales.items()}
    world.assert_right(world.decode(plan)[:2], world.dense(2))  # positive control
    world.scales[name] = scale.to(world.device)
    world.output.fill_(torch.nan)
    with pytest.raises(ConfigError, match=message):
        world.decode(plan)
    assert world.output.isnan().all()
