"""One layer over packed caches, as aiter reads them, and the dense answer to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, Step, StepPlan
from planlife.testing import lay_out, reference_decode, row_errors

NUM_PAGES = 40
ROW_BOUND = 1e-2  # BF16


class PackedWorld:
    """A manager with every class warm, over random packed caches; page 0 belongs to nobody and holds NaN."""

    def __init__(
        self, spec: PlanSpec, backend: Any, *, rows: int = 4, plain_values: bool = False, **options: Any
    ) -> None:
        self.spec = spec
        self.rows = rows
        self.generator = torch.Generator().manual_seed(0)
        options.setdefault("ladder", CapacityLadder.powers_of_two(rows))
        self.manager = PlanManager(spec, device="cpu", backend=backend, **options)
        heads, page, dim = spec.num_kv_heads, spec.page_size, spec.head_dim
        keys, values = (self._random(NUM_PAGES, page, heads, dim).to(getattr(torch, spec.kv_dtype)) for _ in range(2))
        keys[0], values[0] = torch.nan, torch.nan
        self.key_cache, self.value_cache = lay_out(keys, values, "packed, plain V" if plain_values else "packed")
        self.scales: dict[str, Any] = {}
        if spec.scales == "per_tensor":
            self.scales = {"key_scale": torch.tensor([0.5]), "value_scale": torch.tensor([2.0])}
        elif spec.scales == "per_token":
            self.scales = {
                name: torch.rand(NUM_PAGES, heads, page, generator=self.generator) + 0.5
                for name in ("key_scale", "value_scale")
            }
        self.lens = torch.zeros(rows, dtype=torch.int32)
        self.tables = torch.full((rows, -(-spec.max_context_tokens // page)), -1, dtype=torch.int32)
        self.query = self._random(rows * spec.query_length, spec.num_q_heads, dim).to(getattr(torch, spec.q_dtype))
        self.output = torch.full_like(self.query, torch.nan)
        with self.manager.capture_phase():
            self.manager.warm()

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def set_lens(self, lens: Sequence[int]) -> None:
        self.lens.zero_()
        self.lens[: len(lens)] = torch.tensor(lens, dtype=torch.int32)
        self.tables.fill_(-1)
        for row, length in enumerate(lens):
            num_pages = -(-length // self.spec.page_size)
            pages = torch.randperm(NUM_PAGES - 1, generator=self.generator)[:num_pages] + 1
            self.tables[row, :num_pages] = pages.to(torch.int32)

    def plan(self, lens: Sequence[int]) -> StepPlan:
        self.set_lens(lens)
        plan = self.manager.plan_for(Step(self.lens[: len(lens)]))
        assert isinstance(plan, StepPlan)
        return plan

    def decode(self, plan: StepPlan, *, rows: int | None = None, table_rows: int | None = None, **extras: Any) -> Any:
        """One layer; rows: of the query, by default the plan's."""
        end = (plan.rows if rows is None else rows) * self.spec.query_length
        self.output.fill_(torch.nan)
        arguments = {**self.scales, **extras}
        scale = arguments.pop("softmax_scale", self.spec.head_dim**-0.5)
        return self.manager.pa_decode(
            plan, self.output[:end], self.query[:end], self.key_cache, self.value_cache,
            self.tables[:table_rows], scale, **arguments,
        )  # fmt: skip

    def expected(self, num_rows: int, **extras: Any) -> torch.Tensor:
        """The dense answer, as the query's dtype holds it."""
        spec = self.spec
        expected = reference_decode(
            self.query[: num_rows * spec.query_length], self.key_cache, self.value_cache, self.tables[:num_rows],
            self.lens[:num_rows], spec.head_dim**-0.5, query_length=spec.query_length,
            sliding_window=spec.sliding_window, kv_layout="packed", **{**self.scales, **extras},
        )  # fmt: skip
        return expected.to(self.query.dtype)

    def assert_right(self, output: torch.Tensor, **extras: Any) -> None:
        length = self.spec.query_length
        errors = row_errors(output, self.expected(output.shape[0] // length, **extras).double(), length)
        assert (errors <= ROW_BOUND).all(), errors.tolist()
