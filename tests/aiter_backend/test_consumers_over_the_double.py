"""Call sites of engines that use aiter, end to end over the double, at reduced size.

Each engine's sites are planned, captured and replayed with changing lengths and row counts; every row of every layer is
compared with the dense answer of its own lengths.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, StalePlanError, Step, StepPlan
from planlife.testing import lay_out, reference_decode, row_errors
from planlife.testing.aiter_double import AiterDouble
from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.decode_table import make_scale

from ..lifecycle.world import BEFORE_REPLAY, IN_GRAPH, both_styles
from .double_call import SCALE_FORM

CLASSES = (2, 4)
NUM_REPLAYS = 66
#: Lengths at which a page, a tile or a row's work changes; most others are below USUAL_TOKENS.
EDGES = (6, 63, 64, 65, 255, 256, 257)
USUAL_TOKENS = 400


class Layers(NamedTuple):
    """A site, how many layers of the model it stands for, and the longest that its rows get."""

    spec: PlanSpec
    num_layers: int
    longest: int


Sites = dict[str, Layers]


def vllm_rocm_aiter_fa(fp8: str, layout: str = "packed") -> Sites:
    """FP8, head 256, 16 query heads on a KV head, pages of 64."""
    spec = PlanSpec(16, 1, 256, 64, max_context_tokens=768, kv_dtype=fp8, scales="per_tensor", kv_layout=layout)
    return {"attn": Layers(spec, 2, 768)}


def sglang_bf16(fp8: str) -> Sites:
    """compute_type bfloat16: caches without scales."""
    return {"attn": Layers(PlanSpec(8, 1, 128, 64, max_context_tokens=768, kv_layout="packed"), 2, 768)}


def minimax_m3(fp8: str) -> Sites:
    """3 dense layers, and 57 sparse ones with a cap of 8 partitions and lengths of their own, under two names."""
    dense = PlanSpec(8, 1, 64, 64, max_context_tokens=2560, kv_dtype=fp8, scales="per_tensor", kv_layout="packed")
    sparse = replace(dense, max_partitions=8)
    return {
        "dense": Layers(dense, 3, 2560),
        "sparse": Layers(sparse, 29, 2304),
        "sparse_late": Layers(replace(sparse, plan_of="sparse"), 28, 2304),
    }


def qwen35_mtp5(fp8: str) -> Sites:
    """A verify of 6 query tokens on 8 query heads per KV head: 48 query rows, FP8 with scales per token."""
    verify = PlanSpec(
        8, 1, 256, 16, max_context_tokens=640, kv_dtype=fp8, scales="per_token", kv_layout="packed", query_length=6
    )
    return {"verify": Layers(verify, 2, 640), "draft": Layers(replace(verify, query_length=1), 1, 640)}


FNUZ, FN = "float8_e4m3fnuz", "float8_e4m3fn"
MACHINES = (("gfx942", "G2", FNUZ), ("gfx950", "G3", FN), ("gfx942", "newer", FNUZ), ("gfx1250", "newer", FN))
BF16_ON_GFX1250 = ("gfx1250", "G4", "")
CONSUMERS = (vllm_rocm_aiter_fa, sglang_bf16, minimax_m3, qwen35_mtp5)


def runs() -> Iterator[Any]:
    for consumer in CONSUMERS:
        for number, machine in enumerate(MACHINES):
            if consumer is sglang_bf16 and machine[0] == "gfx1250":
                machine = BF16_ON_GFX1250
            for style in (BEFORE_REPLAY, IN_GRAPH):
                # Sixty layers take their time, and so do six query tokens: each machine in one style.
                is_slow = consumer in (minimax_m3, qwen35_mtp5)
                if not is_slow or (number in (0, 3)) == (style == BEFORE_REPLAY):
                    yield pytest.param(
                        consumer, machine, style, id=f"{consumer.__name__}, {' '.join(machine[:2])}, {style}"
                    )


@contextmanager
def over(machine: tuple[str, str, str]) -> Iterator[AiterDouble]:
    with aiter_machine(machine[0], generation=machine[1]) as double:
        yield double


class Owner:
    """A step's metadata."""


class Site:
    """One site's caches, at fixed addresses: every row has pages of its own for its longest context."""

    def __init__(self, layers: Layers, draw: torch.Generator) -> None:
        self.spec = spec = layers.spec
        rows = CLASSES[-1]
        columns = -(-spec.max_context_tokens // spec.page_size)
        pages = rows * columns
        self.tables = torch.randperm(pages, generator=draw).view(rows, columns).to(torch.int32)
        shape = pages, spec.page_size, spec.num_kv_heads, spec.head_dim
        keys, values = (torch.randn(shape, generator=draw).to(getattr(torch, spec.kv_dtype)) for _ in range(2))
        self.caches = lay_out(keys, values, spec.kv_layout)
        form = SCALE_FORM[spec.scales]
        owned = torch.ones(shape[:2], dtype=torch.bool)
        scales = [make_scale(form, owned, spec.num_kv_heads, draw) for _ in range(2)]
        self.scales = {} if form == "none" else dict(zip(("key_scale", "value_scale"), scales, strict=True))
        query_shape = rows * spec.query_length, spec.num_q_heads, spec.head_dim
        self.query = torch.randn(query_shape, generator=draw).to(torch.bfloat16)
        self.outputs = [torch.full_like(self.query, torch.nan) for _ in range(layers.num_layers)]

    def expected(self, lens: torch.Tensor) -> torch.Tensor:
        spec, rows = self.spec, lens.shape[0]
        return reference_decode(
            self.query[: rows * spec.query_length], *self.caches, self.tables[:rows], lens, spec.head_dim**-0.5,
            query_length=spec.query_length, kv_layout=spec.kv_layout, **self.scales,
        )  # fmt: skip


class Model:
    """The engine: a length buffer for each plan, graphs of both row counts, and steps through them."""

    def __init__(self, sites: Sites, double: AiterDouble, style: str) -> None:
        self.layers, self.double, self.style = sites, double, style
        draw = torch.Generator().manual_seed(5)
        self.sites = {name: Site(layers, draw) for name, layers in sites.items()}
        self.pick = random.Random(11)
        self.manager = PlanManager(
            {name: layers.spec for name, layers in sites.items()},
            ladder=CapacityLadder(CLASSES), device="cpu", backend="aiter",
        )  # fmt: skip
        #: By the site whose plans they are of.
        self.lens = {self.owner_of(name): torch.zeros(CLASSES[-1], dtype=torch.int32) for name in sites}

    def owner_of(self, name: str) -> str:
        return self.layers[name].spec.plan_of or name

    def steps(self, rows: int) -> dict[str, Step]:
        owner = Owner()
        return {name: Step(self.lens[self.owner_of(name)][:rows], site=name, owner=owner) for name in self.sites}

    def forward(self, steps: dict[str, Step], plans: dict[str, Any], rows: int) -> None:
        """Every layer asks for its plan, as layers do that plan while recording; before-replay ones find it."""
        for name, site in self.sites.items():
            end = rows * site.spec.query_length
            for output in site.outputs:
                plan = plans[name] if plans else self.manager.plan_for(steps[name])
                assert isinstance(plan, StepPlan) and plan.route == "planned", plan.reason
                self.manager.pa_decode(
                    plan, output[:end], site.query[:end], *site.caches, site.tables[:rows],
                    site.spec.head_dim**-0.5, **site.scales,
                )  # fmt: skip

    def plans(self, steps: dict[str, Step]) -> dict[str, Any]:
        return {} if self.style == IN_GRAPH else {name: self.manager.plan_for(step) for name, step in steps.items()}

    def capture(self) -> dict[int, Any]:
        graphs = {}
        with self.manager.capture_phase():
            self.manager.warm()
            for rows in reversed(CLASSES):
                for lens in self.lens.values():
                    lens.fill_(1)
                steps = self.steps(rows)
                plans = self.plans(steps)
                before = self.double.refreshes
                with self.manager.graph() as graph:
                    self.forward(steps, plans, rows)
                #: One for each set of plans, however many layers there are.
                wanted = len(self.lens) if self.style == IN_GRAPH else 0
                assert self.double.refreshes - before == wanted
                graphs[rows] = graph
        return graphs

    def set_lens(self, rows: int) -> None:
        """Uneven, a few empty, at an edge, or as long as they get."""
        for owner, lens in self.lens.items():
            least, longest = self.layers[owner].spec.query_length, self.layers[owner].longest
            lens.zero_()
            for row in range(rows):
                some = self.pick.randint(least, min(longest, USUAL_TOKENS))
                lens[row] = self.pick.choice((some, some, some, some, some, 0, self.pick.choice(EDGES), longest))

    def step(self, graphs: dict[int, Any]) -> None:
        rows = self.pick.randint(2, CLASSES[-1])
        class_rows = next(size for size in CLASSES if size >= rows)
        self.set_lens(rows)
        for site in self.sites.values():
            site.query.copy_(torch.randn(site.query.shape).to(torch.bfloat16))
            for output in site.outputs:
                output.fill_(torch.nan)
        before = self.manager.report().counters["refreshes"]
        steps = self.steps(class_rows)
        self.plans(steps)
        refreshes = self.manager.report().counters["refreshes"] - before
        assert refreshes == (0 if self.style == IN_GRAPH else len(self.lens))
        self.manager.replay(graphs[class_rows], *steps.values())
        self.check(class_rows)

    def check(self, class_rows: int) -> None:
        for name, site in self.sites.items():
            lens, length = self.lens[self.owner_of(name)][:class_rows], site.spec.query_length
            first, *others = (output[: class_rows * length] for output in site.outputs)
            errors = row_errors(first, site.expected(lens), length)
            assert (errors <= 1e-2).all(), (name, lens.tolist(), errors.tolist())
            assert all(torch.equal(first, other) for other in others), name  # the same caches and queries
            assert all(output[class_rows * length :].isnan().all() for output in site.outputs)


def replay(model: Model) -> None:
    """Each step is compared; and replays compile nothing, nor does the double object to them."""
    graphs = model.capture()
    keys = model.double.compiled
    for _ in range(NUM_REPLAYS):
        model.step(graphs)
    assert model.double.compiled == keys != ()
    assert model.double.violations == []


@pytest.mark.parametrize(("consumer", "machine", "style"), list(runs()))
def test_replays_of_an_engines_sites_are_right_row_by_row(
    consumer: Callable[..., Sites], machine: tuple[str, str, str], style: str
) -> None:
    with over(machine) as double:
        model = Model(consumer(machine[2]), double, style)
        with model.manager as manager:
            replay(model)
            assert manager.report().counters["compiles_after_seal"] == 0
            assert manager.report().counters["fallbacks"] == 0
            if consumer is minimax_m3:
                assert manager.report().counters["refreshes_skipped"] > 0  # the later sparse layers take the step's


@pytest.mark.parametrize("machine", [("gfx942", "G2", FNUZ), ("gfx1250", "G4", FN)], ids=" ".join)
@both_styles
def test_minimax_m3s_cache_as_atom_sees_it_in_vllms_is_read_in_place(machine: tuple[str, str, str], style: str) -> None:
    """Pages of 16 in a pool that has K and V of each block in turn: V's view has one block's pages fewer than K's."""
    per_block = 4
    with over(machine) as double:
        spec = replace(minimax_m3(machine[2])["dense"].spec, page_size=16, max_context_tokens=768)
        model = Model({"dense": Layers(spec, 3, 768)}, double, style)
        (site,) = model.sites.values()
        keys, values = site.caches
        pool = torch.stack([cache.flatten(1).view(-1, per_block, keys[0].numel()) for cache in (keys, values)], 1)
        pool = pool.flatten(0, 2)
        site.caches = pool.view(-1, *keys.shape[1:]), pool.view(-1, *values.shape[1:])[per_block:]
        site.tables += site.tables // per_block * per_block
        assert [len(cache) for cache in site.caches] == [2 * len(keys), 2 * len(keys) - per_block]
        with model.manager:
            replay(model)


@both_styles
def test_vllms_cache_as_it_is_stored_is_read_where_aiter_reads_it(style: str) -> None:
    """ "nhd" pages of 64, without a copy into another layout."""
    with over(("gfx950", "newer", FN)) as double:
        model = Model(vllm_rocm_aiter_fa(FN, "nhd"), double, style)
        with model.manager:
            replay(model)


@pytest.mark.parametrize(
    ("consumer", "changes", "machine", "why"),
    [
        (vllm_rocm_aiter_fa, {"kv_layout": "nhd"}, ("gfx942", "newer", FNUZ), "reads no kv_layout='nhd' of"),
        (vllm_rocm_aiter_fa, {"kv_layout": "nhd"}, ("gfx950", "G3", FN), "this aiter reads no kv_layout='nhd'"),
        (
            vllm_rocm_aiter_fa,
            {"kv_layout": "nhd", "num_q_heads": 33},
            ("gfx950", "newer", FN),
            "page_size 64 and 33 query heads per KV head",
        ),
        (vllm_rocm_aiter_fa, {"page_size": 32}, ("gfx950", "G3", FN), "reads pages of 16, 64, 128 tokens, not of 32"),
        (vllm_rocm_aiter_fa, {}, ("gfx942", "G3", FN), "the FP8 cache of gfx942 is float8_e4m3fnuz"),
        (sglang_bf16, {"q_dtype": "float16"}, ("gfx942", "G3", FNUZ), "takes no float16 query with a bfloat16 cache"),
        (minimax_m3, {"max_partitions": 257}, ("gfx942", "G3", FNUZ), "max_partitions=257 is above the 256 compute"),
    ],
)
def test_a_site_that_aiter_does_not_serve_is_refused_at_construction(
    consumer: Callable[..., Sites], changes: dict[str, Any], machine: tuple[str, str, str], why: str
) -> None:
    name, layers = next(iter(consumer(machine[2]).items()))
    ladder = CapacityLadder(CLASSES)
    with over(machine):
        with pytest.raises(ConfigError, match=f"backend aiter cannot serve site {name!r} on cpu: .*{why}"):
            PlanManager({name: replace(layers.spec, **changes)}, ladder=ladder, device="cpu", backend="aiter")


@pytest.fixture
def minimax() -> Iterator[Model]:
    with over(("gfx942", "G3", FNUZ)) as double:
        model = Model(minimax_m3(FNUZ), double, IN_GRAPH)
        with model.manager:
            yield model


def test_steps_without_an_owner_would_refresh_for_each_layer(minimax: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: the double counts what a step that is shared by 57 layers saves."""

    def steps_of_nobody(rows: int) -> dict[str, Step]:
        return {name: Step(minimax.lens[minimax.owner_of(name)][:rows], site=name) for name in minimax.sites}

    monkeypatch.setattr(minimax, "steps", steps_of_nobody)
    before = minimax.double.refreshes
    with pytest.raises(AssertionError, match="refreshes"):
        minimax.capture()
    assert minimax.double.refreshes - before > 3 + 57


def test_a_replay_whose_lengths_nobody_planned_is_refused_and_would_be_wrong() -> None:
    with over(("gfx942", "G3", FNUZ)) as double:
        model = Model(vllm_rocm_aiter_fa(FNUZ), double, BEFORE_REPLAY)
        with model.manager as manager:
            graphs = model.capture()
            model.step(graphs)
            graph = graphs[4]
            model.lens["attn"].copy_(torch.tensor([300, 301, 302, 303]))
            with pytest.raises(StalePlanError):
                manager.guard(graph, *model.steps(4).values())
            graph.replay()
            with pytest.raises(AssertionError, match="attn"):
                model.check(4)


def test_scales_per_token_are_no_scales_per_tensor() -> None:
    with over(("gfx942", "G3", FNUZ)) as double:
        model = Model(qwen35_mtp5(FNUZ), double, IN_GRAPH)
        with model.manager as manager:
            with manager.capture_phase():
                manager.warm()
            for site in model.sites.values():
                site.scales = {name: scale.mean().view(1) for name, scale in site.scales.items()}
            steps = model.steps(4)
            with pytest.raises(ConfigError, match="key_scale"):
                model.forward(steps, {}, 4)
