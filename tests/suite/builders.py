"""A metadata builder as engines write them, in both styles of capture, and an adapter around it.

The builder's methods are small on purpose: a broken builder is a subclass that gets one of them wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, Step, StepPlan
from planlife.testing.builder_suite import BuilderAdapter

from ..lifecycle import world
from ..lifecycle.world import World

MAX_ROWS, NUM_UBATCHES, DRAFT_PASSES = 8, 2, 2
SPEC = PlanSpec(4, 2, 16, 16, max_context_tokens=640, workgroup_budget=24)


class Metadata:
    """One step's metadata, made new for each: the owner of its Step."""

    def __init__(self, lens: torch.Tensor, ubatch: int = 0) -> None:
        self.lens = lens
        self.ubatch = ubatch
        self.draft_pass = 0
        self.is_dummy = False
        self.plan: StepPlan | None = None


class Builder:
    """Before-replay style: every method plans, and the layers only decode."""

    def __init__(self, manager: PlanManager) -> None:
        self.manager = manager
        self.lens = torch.zeros(MAX_ROWS, dtype=torch.int32, device=manager.report().device)
        self.ub_lens = [torch.zeros_like(self.lens) for _ in range(NUM_UBATCHES)]

    def build_for_capture(self, rows: int) -> Metadata:
        self.lens.fill_(1)
        metadata = Metadata(self.lens[:rows])
        self.plan(metadata)
        return metadata

    def prepare_decode(self, lens: Sequence[int], rows: int) -> Metadata:
        metadata = Metadata(self.write(self.lens, lens, rows))
        self.plan(metadata)
        return metadata

    def prepare_mtp_decode(self, metadata: Metadata, draft_pass: int) -> Metadata:
        metadata.lens += 1
        metadata.draft_pass = draft_pass
        self.plan(metadata)
        return metadata

    def build_ubatch_for_capture(self, ubatch: int, rows: int) -> Metadata:
        self.ub_lens[ubatch].fill_(1)
        metadata = Metadata(self.ub_lens[ubatch][:rows], ubatch)
        self.plan(metadata)
        return metadata

    def prepare_ubatch_decode(self, ubatch: int, lens: Sequence[int], rows: int) -> Metadata:
        metadata = Metadata(self.write(self.ub_lens[ubatch], lens, rows), ubatch)
        self.plan(metadata)
        return metadata

    def prepare_dummy(self, rows: int) -> Metadata:
        metadata = Metadata(self.write(self.lens, [10_000] * rows, rows))
        metadata.is_dummy = True
        self.plan(metadata)
        return metadata

    def write(self, buffer: torch.Tensor, lens: Sequence[int], rows: int) -> torch.Tensor:
        """The step's lengths in the persistent buffer, zeros behind them; its padded rows."""
        buffer.zero_()
        buffer[: len(lens)] = torch.tensor(lens, dtype=torch.int32, device=buffer.device)
        return buffer[:rows]

    def plan(self, metadata: Metadata) -> None:
        metadata.plan = self.manager.plan_for(self.step(metadata))

    def step(self, metadata: Metadata) -> Step:
        return Step(
            metadata.lens, owner=metadata, revision=metadata.draft_pass, ubatch=metadata.ubatch, dummy=metadata.is_dummy
        )

    def decode(self, metadata: Metadata, layer: int, *call: Any, **scales: Any) -> None:
        self.manager.pa_decode(metadata.plan, *call, **scales)


class InGraphBuilder(Builder):
    """In-graph style: the methods only write lengths, and every forward's first layer plans, while recording too."""

    def plan(self, metadata: Metadata) -> None:
        if metadata.is_dummy:
            super().plan(metadata)

    def build_for_capture(self, rows: int) -> Metadata:
        metadata = super().build_for_capture(rows)
        self.mint(metadata)
        return metadata

    def build_ubatch_for_capture(self, ubatch: int, rows: int) -> Metadata:
        metadata = super().build_ubatch_for_capture(ubatch, rows)
        self.mint(metadata)
        return metadata

    def mint(self, metadata: Metadata) -> None:
        """Nothing may be allocated in the recording: the class must be there before."""
        Builder.plan(self, metadata)

    def decode(self, metadata: Metadata, layer: int, *call: Any, **scales: Any) -> None:
        if layer == 0:
            Builder.plan(self, metadata)
        self.manager.pa_decode(metadata.plan, *call, **scales)


class Adapter(BuilderAdapter):
    """The suite's view of a Builder class."""

    default_spec = SPEC  #: of adapters that are told none; another suite has another one
    capture_rows = (1, 2, 4, 8)
    draft_passes = DRAFT_PASSES
    num_ubatches = NUM_UBATCHES
    has_dummies = True

    def __init__(self, builder_class: type[Builder], spec: PlanSpec | None = None, **manager_options: Any) -> None:
        self.spec = spec = spec or self.default_spec
        self.ladder = CapacityLadder.powers_of_two(MAX_ROWS)
        self.manager = PlanManager(
            spec,
            ladder=self.ladder,
            ubatches=NUM_UBATCHES,
            **{"device": world.DEVICE, "backend": World.backend, **manager_options},
        )
        if spec.query_length > 1:
            self.draft_passes = 0
        with self.manager.capture_phase():
            self.manager.warm()
        self.builder = builder_class(self.manager)

    def build_for_capture(self, rows: int) -> Metadata:
        return self.builder.build_for_capture(rows)

    def prepare_decode(self, lens: Sequence[int], rows: int) -> Metadata:
        return self.builder.prepare_decode(lens, rows)

    def decode(self, metadata: Metadata, layer: int, *call: Any, **scales: Any) -> None:
        self.builder.decode(metadata, layer, *call, **scales)

    def context_lens(self, metadata: Metadata) -> torch.Tensor:
        return metadata.lens

    def prepare_mtp_decode(self, metadata: Metadata, draft_pass: int) -> Metadata:
        return self.builder.prepare_mtp_decode(metadata, draft_pass)

    def build_ubatches_for_capture(self, rows: int) -> list[Metadata]:
        return [self.builder.build_ubatch_for_capture(ubatch, rows) for ubatch in range(NUM_UBATCHES)]

    def prepare_ubatch_decode(self, lens: Sequence[Sequence[int]], rows: int) -> list[Metadata]:
        return [self.builder.prepare_ubatch_decode(ubatch, one, rows) for ubatch, one in enumerate(lens)]

    def prepare_dummy(self, rows: int) -> Metadata:
        return self.builder.prepare_dummy(rows)
