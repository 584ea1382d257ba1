"""The toy model: paged KV cache, the step's buffers, and attention layers that call planlife."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..manager import PlanManager
from ..plan import OffPlan, StepPlan
from ..spec import Step
from .config import HEAD_DIM, MAX_PAGES_PER_ROW, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE

SOFTMAX_SCALE = HEAD_DIM**-0.5
_GARBAGE_PAGE = 0x7F7F7F7F


def page_bytes(num_layers: int) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    return 2 * num_layers * PAGE_SIZE * NUM_KV_HEADS * HEAD_DIM * torch.bfloat16.itemsize


class KVPool:
    """Paged BF16 keys and values of all layers, and who owns which page.

    Owns: key, value bfloat16[layers, pages, page, kv_heads, D]. Address-stable. Page 0 belongs to nobody: the
    keys of padded rows go there. A page without an owner holds NaN: a read through a wrong table shows.
    """

    def __init__(self, *, num_layers: int, num_pages: int, device: str) -> None:
        shape = (num_layers, num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.key = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        self.value = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        self.num_pages = num_pages
        self._free = deque(range(1, num_pages))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.key.nbytes + self.value.nbytes

    @property
    def num_usable_pages(self) -> int:
        """Pages that requests can own."""
        return self.num_pages - 1

    def allocate(self, num_pages: int) -> list[int]:
        """The pages that were free the longest. Raises RuntimeError if there are too few."""
        if num_pages > len(self._free):
            raise RuntimeError(
                f"{num_pages} KV pages asked for, {len(self._free)} of {self.num_pages} free: "
                "admission let too many requests in."
            )
        return [self._free.popleft() for _ in range(num_pages)]

    def release(self, pages: Sequence[int]) -> None:
        """Take `pages` back and fill them with NaN."""
        index = torch.tensor(pages, device=self.key.device)
        self.key[:, index] = torch.nan
        self.value[:, index] = torch.nan
        self._free.extend(pages)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put key, value bfloat16[tokens, kv_heads, D] at slots int64[tokens] (page * page_size + offset)."""
        self.key[layer].view(-1, NUM_KV_HEADS, HEAD_DIM).index_copy_(0, slots, key)
        self.value[layer].view(-1, NUM_KV_HEADS, HEAD_DIM).index_copy_(0, slots, value)


@dataclass(frozen=True)
class Batch:
    """What one forward is to compute, before it is in any buffer.

    A call is a layer of the target or a pass of the draft.

    context_lens: per row, the new tokens included. pages: per row.
    cache_rows: per row, where the comparison keeps its history.
    positions: int64[calls, rows * query_length]
    query, key, value: bfloat16[calls, rows * query_length, heads, D]
    """

    context_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    cache_rows: tuple[int, ...]
    positions: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)

    @property
    def query_length(self) -> int:
        return self.query.shape[1] // self.num_rows

    @property
    def slots(self) -> torch.Tensor:
        """int64[calls, rows * query_length]: where the KV pool keeps `positions`."""
        pages = torch.zeros(self.num_rows, MAX_PAGES_PER_ROW, dtype=torch.int64)
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
            key=self.key[:, tokens],
            value=self.value[:, tokens],
        )

    def ahead(self, num_tokens: int) -> Batch:
        """The same rows, `num_tokens` longer: a later draft pass."""
        return replace(self, context_lens=tuple(tokens + num_tokens for tokens in self.context_lens))


class StepBuffers:
    """Inputs and outputs of one forward, at fixed addresses.

    Owns: context_lens, active int32[rows], block_tables int32[rows, max_pages], slots int64[calls, tokens],
    query, key, value, output bfloat16[calls, tokens, heads, D]. Address-stable: graphs are captured on them.
    Rows behind the batch have length 0, NaN inputs, and block tables that an earlier step left.
    """

    def __init__(self, *, num_rows: int, query_length: int, num_calls: int, device: str) -> None:
        self.num_rows = num_rows
        self.query_length = query_length
        tokens = num_rows * query_length

        def floats(num_heads: int) -> torch.Tensor:
            shape = (num_calls, tokens, num_heads, HEAD_DIM)
            return torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)

        self.context_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.active = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.block_tables = torch.full((num_rows, MAX_PAGES_PER_ROW), -1, dtype=torch.int32, device=device)
        self.block_tables[1::2] = _GARBAGE_PAGE
        self.slots = torch.zeros(num_calls, tokens, dtype=torch.int64, device=device)
        self.query = floats(NUM_Q_HEADS)
        self.key = floats(NUM_KV_HEADS)
        self.value = floats(NUM_KV_HEADS)
        self.output = floats(NUM_Q_HEADS)

    def load(self, batch: Batch | None) -> None:
        """Copy a batch in; None: no row is real (a ubatch that got none)."""
        rows = batch.num_rows if batch else 0
        tokens = rows * self.query_length
        self.context_lens[rows:] = 0
        self.active[:rows] = 1
        self.active[rows:] = 0
        self.slots[:, tokens:] = 0
        for buffer in (self.query, self.key, self.value):
            buffer[:, tokens:] = torch.nan
        self.output.fill_(torch.nan)
        if batch is None:
            return
        self.context_lens[:rows] = torch.tensor(batch.context_lens, dtype=torch.int32)
        tables = self.block_tables[:rows].cpu()
        for row, pages in enumerate(batch.pages):
            tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.block_tables[:rows] = tables
        self.slots[:, :tokens] = batch.slots
        self.query[:, :tokens] = batch.query
        self.key[:, :tokens] = batch.key
        self.value[:, :tokens] = batch.value

    def advance(self) -> None:
        """One more token in every real row, in place, as between draft passes."""
        self.context_lens.add_(self.active)

    def load_capture(self) -> None:
        """What engines capture with: one token per row, in the page that nobody owns."""
        self.load(None)
        self.context_lens.fill_(1)
        self.active.fill_(1)
        self.block_tables.fill_(0)

    def load_dummy(self, context_tokens: int) -> None:
        """An idle rank's inputs: every table entry is -1, whatever the lengths say."""
        self.load(None)
        self.context_lens.fill_(context_tokens)
        self.block_tables.fill_(-1)


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
        pool.write(layer, buffers.slots[call], buffers.key[call], buffers.value[call])
        self._manager.pa_decode(
            plan,
            buffers.output[call],
            buffers.query[call],
            pool.key[layer],
            pool.value[layer],
            buffers.block_tables,
            SOFTMAX_SCALE,
        )
