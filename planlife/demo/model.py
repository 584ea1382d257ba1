"""The toy model: the step's buffers, and attention layers that call planlife."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..manager import PlanManager
from ..plan import OffPlan, StepPlan
from ..spec import Step
from .config import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE, DemoConfig
from .kv_pool import KVPool, KVTokens
from .upload import upload

SOFTMAX_SCALE = HEAD_DIM**-0.5
_GARBAGE_PAGE = 0x7F7F7F7F


@dataclass(frozen=True)
class Batch:
    """What one forward is to compute, before it is in any buffer.

    A call is a layer of the target or a pass of the draft.

    context_lens: per row, the new tokens included. pages: per row.
    cache_rows: per row, where the comparison keeps its history.
    positions: int64[calls, rows * query_length], on the host.
    query: q_dtype[calls, rows * query_length, q_heads, D]. new: the tokens' keys and values. Both on the device.
    """

    context_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    cache_rows: tuple[int, ...]
    positions: torch.Tensor
    query: torch.Tensor
    new: KVTokens

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def query_length(self) -> int:
        return self.query.shape[1] // self.num_rows

    @property
    def slots(self) -> torch.Tensor:
        """int64[calls, rows * query_length], on the host: where the KV pool keeps `positions`."""
        pages = torch.zeros(self.num_rows, max(map(len, self.pages)), dtype=torch.int64)
        for row, owned in enumerate(self.pages):
            pages[row, : len(owned)] = torch.tensor(owned)
        row_of_token = torch.arange(self.num_rows).repeat_interleave(self.query_length)
        return pages[row_of_token, self.positions // PAGE_SIZE] * PAGE_SIZE + self.positions % PAGE_SIZE

    def rows(self, begin: int, end: int) -> Batch:
        """Rows begin..end as a batch of their own: a ubatch."""
        tokens = slice(begin * self.query_length, end * self.query_length)
        return Batch(
            context_lens=self.context_lens[begin:end],
            pages=self.pages[begin:end],
            cache_rows=self.cache_rows[begin:end],
            positions=self.positions[:, tokens],
            query=self.query[:, tokens],
            new=self.new.tokens(tokens),
        )

    def ahead(self, num_tokens: int) -> Batch:
        """The same rows, `num_tokens` longer: a later draft pass."""
        return replace(self, context_lens=tuple(tokens + num_tokens for tokens in self.context_lens))


class StepBuffers:
    """Inputs and outputs of one forward, at fixed addresses.

    Owns: context_lens, active int32[rows], block_tables int32[rows, max_pages], slots int64[calls, tokens],
    query, output q_dtype and key, value kv_dtype[calls, tokens, heads, D], and where scales are per token key_scale,
    value_scale float32[calls, tokens, kv_heads]. Address-stable: graphs are captured on them.
    Rows behind the batch have length 0, NaN inputs, and block tables that an earlier step left.
    """

    def __init__(self, config: DemoConfig, *, num_rows: int, query_length: int, num_calls: int) -> None:
        self.num_rows = num_rows
        self.query_length = query_length
        tokens, device = num_rows * query_length, config.device

        def numbers(dtype: str, *shape: int) -> torch.Tensor:
            return torch.full((num_calls, tokens, *shape), torch.nan, dtype=getattr(torch, dtype), device=device)

        self.context_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.active = torch.zeros(num_rows, dtype=torch.int32, device=device)
        #: What block_tables holds: rows are extended here, and no step waits to read them back.
        self._host_tables = torch.full((num_rows, config.max_pages_per_row), -1, dtype=torch.int32)
        self._host_tables[1::2] = _GARBAGE_PAGE
        self.block_tables = upload(self._host_tables.clone(), device)
        self.slots = torch.zeros(num_calls, tokens, dtype=torch.int64, device=device)
        self.query = numbers(config.q_dtype, NUM_Q_HEADS, HEAD_DIM)
        self.output = numbers(config.q_dtype, NUM_Q_HEADS, HEAD_DIM)
        self.key = numbers(config.kv_dtype, NUM_KV_HEADS, HEAD_DIM)
        self.value = numbers(config.kv_dtype, NUM_KV_HEADS, HEAD_DIM)
        self.key_scale: torch.Tensor | None = None
        self.value_scale: torch.Tensor | None = None
        if config.kv_scales == "per_token":
            self.key_scale, self.value_scale = (numbers("float32", NUM_KV_HEADS) for _ in range(2))

    def load(self, batch: Batch | None) -> None:
        """Copy a batch in; None: no row is real (a ubatch that got none)."""
        rows = batch.num_rows if batch else 0
        tokens = rows * self.query_length
        self.context_lens[rows:] = 0
        self.active[:rows] = 1
        self.active[rows:] = 0
        self.slots[:, tokens:] = 0
        for buffer in (self.query, self.key, self.value, self.key_scale, self.value_scale):
            if buffer is not None:
                buffer[:, tokens:] = torch.nan
        self.output.fill_(torch.nan)
        if batch is None:
            return
        device = self.query.device
        self.context_lens[:rows] = upload(torch.tensor(batch.context_lens, dtype=torch.int32), device)
        for row, pages in enumerate(batch.pages):
            self._host_tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.block_tables[:rows] = upload(self._host_tables[:rows], device)
        self.slots[:, :tokens] = upload(batch.slots, device)
        self.query[:, :tokens] = batch.query
        self.key[:, :tokens] = batch.new.key
        self.value[:, :tokens] = batch.new.value
        for buffer, new in ((self.key_scale, batch.new.key_scale), (self.value_scale, batch.new.value_scale)):
            if buffer is not None and new is not None:
                buffer[:, :tokens] = new

    def new_tokens(self, call: int) -> tuple[torch.Tensor, ...]:
        """What a call writes into the cache: key, value, and their scales where those are per token."""
        buffers = (self.key, self.value, self.key_scale, self.value_scale)
        return tuple(buffer[call] for buffer in buffers if buffer is not None)

    def advance(self) -> None:
        """One more token in every real row, in place, as between draft passes."""
        self.context_lens.add_(self.active)

    def load_capture(self) -> None:
        """What engines capture with: one token per row, in the page that nobody owns."""
        self.load(None)
        self.context_lens.fill_(1)
        self.active.fill_(1)
        self._fill_tables(0)

    def load_dummy(self, context_tokens: int) -> None:
        """An idle rank's inputs: every table entry is -1, whatever the lengths say."""
        self.load(None)
        self.context_lens.fill_(context_tokens)
        self._fill_tables(-1)

    def _fill_tables(self, page: int) -> None:
        for tables in (self._host_tables, self.block_tables):
            tables.fill_(page)


class Metadata:
    """What an engine builds per forward: the owner of its steps. Engines let it go after the forward.

    Borrows: one StepBuffers per ubatch.
    """

    def __init__(
        self,
        manager: PlanManager,
        buffers: Sequence[StepBuffers],
        sites: Sequence[str],
        *,
        plan_in_layers: bool,
        dummy: bool = False,
    ) -> None:
        self._manager = manager
        self.buffers = tuple(buffers)
        self.sites = tuple(sites)
        self._plan_in_layers = plan_in_layers
        self._dummy = dummy
        self.plans: dict[tuple[str, int, int], StepPlan | OffPlan] = {}

    def step(self, site: str, ubatch: int, revision: int = 0) -> Step:
        """The step that the layers of `site` take in this forward."""
        lens = self.buffers[ubatch].context_lens
        return Step(lens, site=site, owner=self, revision=revision, ubatch=ubatch, dummy=self._dummy)

    def steps(self, revision: int = 0) -> list[Step]:
        """One per plan that this forward reads, all sites of ubatch 0 first."""
        sites = dict.fromkeys(self.sites)
        return [self.step(site, ubatch, revision) for ubatch in range(len(self.buffers)) for site in sites]

    def build(self, revision: int = 0) -> None:
        """The builder's part: all ubatches are planned before any layer runs, unless the layers do it."""
        if self._plan_in_layers:
            return
        for step in self.steps(revision):
            self._plan(step)

    def plan(self, site: str, ubatch: int, revision: int = 0) -> StepPlan | OffPlan:
        """The layer's part."""
        if self._plan_in_layers:
            return self._plan(self.step(site, ubatch, revision))
        return self.plans[site, ubatch, revision]

    def _plan(self, step: Step) -> StepPlan | OffPlan:
        plan = self._manager.plan_for(step)
        self.plans[step.site, step.ubatch, step.revision] = plan
        return plan

    @property
    def fell_back(self) -> bool:
        """Whether any call of this forward took another kernel."""
        return any(plan.route == "fallback" for plan in self.plans.values())


class ToyModel:
    """Attention layers of a target and of a draft model, over one KV pool; the draft's layer comes last.

    Every method is what a graph records: it allocates nothing and reads nothing back.
    """

    def __init__(self, manager: PlanManager, pool: KVPool, *, num_layers: int) -> None:
        self._manager = manager
        self._pool = pool
        self.draft_layer = num_layers

    def target(self, metadata: Metadata) -> None:
        """All layers over all ubatches, layer by layer: ubatches run interleaved on one stream."""
        for layer, site in enumerate(metadata.sites):
            for ubatch, buffers in enumerate(metadata.buffers):
                self._attention(layer, layer, buffers, metadata.plan(site, ubatch))

    def draft(self, metadata: Metadata, revision: int) -> None:
        """One draft pass, one token per row; a revision of its step, because the lengths move in place."""
        (site,), (buffers,) = metadata.sites, metadata.buffers
        self._attention(self.draft_layer, revision, buffers, metadata.plan(site, 0, revision))

    def _attention(self, layer: int, call: int, buffers: StepBuffers, plan: StepPlan | OffPlan) -> None:
        pool = self._pool
        pool.write(layer, buffers.slots[call], *buffers.new_tokens(call))
        self._manager.pa_decode(
            plan,
            buffers.output[call],
            buffers.query[call],
            pool.key[layer],
            pool.value[layer],
            buffers.block_tables,
            SOFTMAX_SCALE,
            **dict(zip(("key_scale", "value_scale"), pool.scales_of(layer), strict=False)),
        )
