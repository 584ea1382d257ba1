"""The aiter backend over the strict double, which was written from the library's contract and not from the backend."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, Step
from planlife.testing import reference_decode, row_errors
from planlife.testing.aiter_double import AiterDouble
from planlife.testing.aiter_machine import aiter_machine

HEAD_DIM, PAGE, PAGES, MAX_TOKENS, MAX_ROWS = 128, 16, 300, 2048, 8
SCALE = HEAD_DIM**-0.5


@pytest.fixture(params=["G2", "G3", "newer"])
def double(request: pytest.FixtureRequest) -> Iterator[AiterDouble]:
    with aiter_machine("gfx942", generation=request.param) as double:
        yield double


class Site:
    """FP8 packed caches, and steps of random rows and lengths over them."""

    def __init__(self, **options: object) -> None:
        self.spec = PlanSpec(
            8, 1, HEAD_DIM, PAGE, max_context_tokens=MAX_TOKENS, kv_layout="packed", kv_dtype="float8_e4m3fnuz",
            scales="per_tensor", **options,
        )  # fmt: skip
        draw = torch.Generator().manual_seed(7)
        keys = torch.randn(PAGES, 1, HEAD_DIM // 16, PAGE, 16, generator=draw)
        self.keys = keys.to(torch.float8_e4m3fnuz)
        self.values = torch.randn(PAGES, 1, PAGE // 16, HEAD_DIM, 16, generator=draw).to(torch.float8_e4m3fnuz)
        self.scales = {"key_scale": torch.tensor([0.5]), "value_scale": torch.tensor([0.75])}
        self.pick = random.Random(3)

    def manager(self) -> PlanManager:
        return PlanManager(self.spec, ladder=CapacityLadder([1, 2, 4, MAX_ROWS]), device="cpu", backend="aiter")

    def lens(self, rows: int) -> list[int]:
        return [self.pick.choice((0, self.pick.randint(1, MAX_TOKENS), self.pick.randint(1, 40))) for _ in range(rows)]

    def query(self, rows: int) -> torch.Tensor:
        return torch.randn(rows * self.spec.query_length, 8, HEAD_DIM).to(torch.bfloat16)

    def tables(self, rows: int) -> torch.Tensor:
        return torch.stack([torch.randperm(PAGES)[: MAX_TOKENS // PAGE] for _ in range(rows)]).to(torch.int32)

    def check(self, output: torch.Tensor, query: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor) -> None:
        length = self.spec.query_length
        expected = reference_decode(
            query, self.keys, self.values, tables, lens, SCALE, query_length=length, kv_layout="packed", **self.scales
        )
        errors = row_errors(output, expected, length)
        assert (errors <= 1e-2).all(), errors


@pytest.mark.parametrize("query_length", [1, 3])
def test_random_steps_are_right_and_compile_nothing_after_the_seal(double: AiterDouble, query_length: int) -> None:
    site = Site(query_length=query_length)
    with site.manager() as manager:
        with manager.capture_phase():
            manager.warm()
        compiles = double.compiles
        assert compiles  # positive control: the double counts
        for _ in range(80):
            rows = site.pick.randint(1, MAX_ROWS)
            lens = torch.tensor(site.lens(rows), dtype=torch.int32)
            query, tables = site.query(rows), site.tables(rows)
            output = torch.full_like(query, torch.nan)
            plan = manager.plan_for(Step(lens, owner=object()))
            assert plan.route == "planned"
            manager.pa_decode(plan, output, query, site.keys, site.values, tables, SCALE, **site.scales)
            site.check(output, query, tables, lens)
        assert double.compiles == compiles
        assert not double.violations


@pytest.mark.parametrize("style", ["before replay", "in graph"])
def test_replays_follow_their_lengths(double: AiterDouble, style: str) -> None:
    site = Site()
    lens = torch.tensor(site.lens(MAX_ROWS), dtype=torch.int32)
    query, tables = site.query(MAX_ROWS), site.tables(MAX_ROWS)
    output = torch.full_like(query, torch.nan)
    with site.manager() as manager:
        step = Step(lens, owner=object())
        with manager.capture_phase():
            manager.warm()
            compiles = double.compiles
            plan = manager.plan_for(step) if style == "before replay" else None
            with manager.graph() as graph:
                plan = plan or manager.plan_for(step)
                manager.pa_decode(plan, output, query, site.keys, site.values, tables, SCALE, **site.scales)
        for _ in range(70):
            lens.copy_(torch.tensor(site.lens(MAX_ROWS), dtype=torch.int32))
            step = Step(lens, owner=object())
            if style == "before replay":
                manager.plan_for(step)
            output.fill_(torch.nan)
            manager.replay(graph, step)
            site.check(output, query, tables, lens)
        assert double.compiles == compiles
        assert not double.violations
