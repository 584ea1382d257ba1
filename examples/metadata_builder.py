"""A metadata builder of the kind that serving engines have, on planlife.

The engine calls a builder once per forward; the layers read what it made. Every method that changes lengths plans
anew: capture, decode, MTP drafts and ubatches alike. Forgetting it in one of them is the usual fault.

    python examples/metadata_builder.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, Step, StepPlan
from planlife.testing import reference_decode

PAGE, MAX_CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 16, 512, 4, 2, 32
MAX_PAGES = MAX_CONTEXT // PAGE
SCALE = HEAD_DIM**-0.5
CAPTURE_SIZES = (2, 4, 8)
NUM_LAYERS = 2
NUM_DRAFT_PASSES = 2


@dataclass
class Batch:
    """What the scheduler hands over: tokens and pages per sequence."""

    context_lens: list[int]
    pages: list[list[int]]


class Metadata:
    """What layers read, and the owner of its step. It may hold its plan: planlife holds owners weakly."""

    def __init__(
        self, context_lens: torch.Tensor, block_tables: torch.Tensor, *, site: str, ubatch: int = 0, revision: int = 0
    ) -> None:
        self.context_lens = context_lens
        self.block_tables = block_tables
        self.plan: StepPlan
        self._site = site
        self._ubatch = ubatch
        self._revision = revision

    def step(self) -> Step:
        """Made anew when asked for: a Step refers to its owner, and kept here it would close a cycle."""
        return Step(self.context_lens, site=self._site, owner=self, ubatch=self._ubatch, revision=self._revision)


class RowBuffers:
    """Lengths and tables at fixed addresses: graphs bake the pointers, each step fills the content."""

    def __init__(self, max_rows: int) -> None:
        self.context_lens = torch.zeros(max_rows, dtype=torch.int32)
        self.block_tables = torch.full((max_rows, MAX_PAGES), -1, dtype=torch.int32)

    def fill(self, batch: Batch) -> None:
        rows = len(batch.context_lens)
        self.context_lens[:rows] = torch.tensor(batch.context_lens, dtype=torch.int32)
        self.context_lens[rows:] = 0  # rows that only pad the batch; their tables stay as they were
        for row, pages in enumerate(batch.pages):
            self.block_tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)


class DecodeMetadataBuilder:
    """Owns: the row buffers of the whole batch and of each ubatch. Borrows: the manager."""

    def __init__(self, manager: PlanManager, max_rows: int) -> None:
        self._manager = manager
        self._buffers = RowBuffers(max_rows)
        self._ubatch_buffers = (RowBuffers(max_rows), RowBuffers(max_rows))

    def build_for_cudagraph_capture(self, bs: int) -> Metadata:
        """Metadata over the buffers that every replay of this size reads."""
        self._buffers.context_lens[:bs] = 1
        self._buffers.block_tables[:bs] = 0
        return self._build(self._buffers, bs)

    def prepare_decode(self, batch: Batch, bs: int) -> Metadata:
        """One decode step. bs: the rows that run, which is more than the batch has when a graph pads it."""
        self._buffers.fill(batch)
        return self._build(self._buffers, bs)

    def prepare_mtp_decode(self, target: Metadata, draft_pass: int) -> Metadata:
        """A draft pass over the target's rows: every real row is one token longer than a pass ago."""
        target.context_lens.add_((target.context_lens > 0).int())
        draft = Metadata(target.context_lens, target.block_tables, site="draft", revision=draft_pass)
        draft.plan = self._manager.plan_for(draft.step())
        return draft

    def build_ubatch_metadata(self, ubatch: int, bs: int) -> Metadata:
        """One half of an overlapped batch, from what its buffers hold. Both halves have plans of their own."""
        return self._build(self._ubatch_buffers[ubatch], bs, ubatch=ubatch)

    def build_ubatches_for_cudagraph_capture(self, bs: int) -> tuple[Metadata, Metadata]:
        for buffers in self._ubatch_buffers:
            buffers.context_lens[: bs // 2] = 1
            buffers.block_tables[: bs // 2] = 0
        return self.build_ubatch_metadata(0, bs // 2), self.build_ubatch_metadata(1, bs // 2)

    def prepare_ubatch_decode(self, batch: Batch, bs: int) -> tuple[Metadata, Metadata]:
        """An overlapped decode step, split at bs // 2. Both halves are planned before either runs."""
        half = bs // 2
        self._ubatch_buffers[0].fill(Batch(batch.context_lens[:half], batch.pages[:half]))
        self._ubatch_buffers[1].fill(Batch(batch.context_lens[half:], batch.pages[half:]))
        return self.build_ubatch_metadata(0, half), self.build_ubatch_metadata(1, half)

    def _build(self, buffers: RowBuffers, bs: int, ubatch: int = 0) -> Metadata:
        metadata = Metadata(buffers.context_lens[:bs], buffers.block_tables[:bs], site="target", ubatch=ubatch)
        metadata.plan = self._manager.plan_for(metadata.step())
        return metadata


class Attention:
    """The layers: random queries and caches, one output per layer and ubatch."""

    def __init__(self, manager: PlanManager, max_rows: int, seed: int) -> None:
        self._manager = manager
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        num_pages = max_rows * MAX_PAGES
        self.key = randn(NUM_LAYERS, num_pages, PAGE, KV_HEADS, HEAD_DIM)
        self.value = randn(NUM_LAYERS, num_pages, PAGE, KV_HEADS, HEAD_DIM)
        self.query = randn(NUM_LAYERS, 2, max_rows, HEADS, HEAD_DIM)
        self.output = torch.empty_like(self.query)

    def forward(self, ubatches: Sequence[Metadata]) -> None:
        """Layer by layer, the ubatches interleaved. This is what a graph records."""
        for layer in range(NUM_LAYERS):
            for ubatch, metadata in enumerate(ubatches):
                rows = len(metadata.context_lens)
                self._manager.pa_decode(
                    metadata.plan,
                    self.output[layer, ubatch, :rows],
                    self.query[layer, ubatch, :rows],
                    self.key[layer],
                    self.value[layer],
                    metadata.block_tables,
                    SCALE,
                )

    def largest_error(self, ubatches: Sequence[Metadata]) -> float:
        """||out - ref|| / ||ref|| of the worst layer and ubatch."""
        errors = []
        for layer in range(NUM_LAYERS):
            for ubatch, metadata in enumerate(ubatches):
                rows = len(metadata.context_lens)
                wanted = reference_decode(
                    self.query[layer, ubatch, :rows],
                    self.key[layer],
                    self.value[layer],
                    metadata.block_tables,
                    metadata.context_lens,
                    SCALE,
                )
                found = self.output[layer, ubatch, :rows].double()
                errors.append(float((found - wanted).norm() / wanted.norm().clamp_min(1e-30)))
        return torch.tensor(errors).nan_to_num(nan=torch.inf).max().item()


def random_batch(choices: random.Random, rows: int) -> Batch:
    """Uneven contexts over pages that no two sequences share."""
    pages = list(range(rows * MAX_PAGES))
    choices.shuffle(pages)
    most_tokens = MAX_CONTEXT - NUM_DRAFT_PASSES
    context_lens = [min(int(choices.paretovariate(0.5) * 8), most_tokens) for _ in range(rows)]
    return Batch(context_lens, [pages[row * MAX_PAGES : (row + 1) * MAX_PAGES] for row in range(rows)])


def main(num_steps: int = 100, seed: int = 0) -> bool:
    """Capture, decode `num_steps` steps, compare each; prints one line and returns whether all were right."""
    max_rows = max(CAPTURE_SIZES)
    spec = PlanSpec(HEADS, KV_HEADS, HEAD_DIM, PAGE, max_context_tokens=MAX_CONTEXT)
    with PlanManager(
        {"target": spec, "draft": spec},
        ladder=CapacityLadder.from_capture_sizes(CAPTURE_SIZES, max_rows),
        device="cpu",
        ubatches=2,
    ) as manager:
        builder = DecodeMetadataBuilder(manager, max_rows)
        attention = Attention(manager, max_rows, seed)
        graphs = {}
        with manager.capture_phase():
            manager.warm()
            for bs in sorted(CAPTURE_SIZES, reverse=True):
                metadata = builder.build_for_cudagraph_capture(bs)
                attention.forward([metadata])
                with manager.graph() as graphs["decode", bs]:
                    attention.forward([metadata])
                ubatches = builder.build_ubatches_for_cudagraph_capture(bs)
                attention.forward(ubatches)
                with manager.graph() as graphs["ubatch", bs]:
                    attention.forward(ubatches)

        choices = random.Random(seed)
        num_compared, worst = 0, 0.0

        def compare(ubatches: Sequence[Metadata]) -> None:
            nonlocal num_compared, worst
            worst = max(worst, attention.largest_error(ubatches))
            num_compared += NUM_LAYERS * sum(len(metadata.context_lens) for metadata in ubatches)

        for step in range(num_steps):
            batch = random_batch(choices, choices.randint(1, max_rows))
            bs = next(size for size in CAPTURE_SIZES if size >= len(batch.context_lens))
            attention.output.fill_(torch.nan)
            if step % 3 == 2:
                ubatches = builder.prepare_ubatch_decode(batch, bs)
                manager.replay(graphs["ubatch", bs], *(metadata.step() for metadata in ubatches))
                compare(ubatches)
                continue
            target = builder.prepare_decode(batch, bs)
            manager.replay(graphs["decode", bs], target.step())
            compare([target])
            if step % 3 == 1:
                for draft_pass in range(1, NUM_DRAFT_PASSES + 1):
                    draft = builder.prepare_mtp_decode(target, draft_pass)
                    attention.forward([draft])
                    compare([draft])
        compiles = manager.report().counters["compiles_after_seal"]

    ok = worst <= 1e-2 and compiles == 0
    print(
        f"metadata_builder: {num_steps} steps, {num_compared} output rows compared, largest relative error "
        f"{worst:.1e}, {compiles} compiles after seal: {'ok' if ok else 'NOT OK'}"
    )
    return ok


if __name__ == "__main__":
    torch.set_num_threads(1)  # the ops are tiny: more threads only wait for each other
    raise SystemExit(0 if main() else 1)
