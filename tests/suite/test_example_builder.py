"""The example's metadata builder under the builder suite: an engine's adapter, written against a builder as it is."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, PlanManager, PlanSpec
from planlife.testing.builder_suite import SCENARIOS, BuilderAdapter, BuilderFailure, Unsupported, run_scenario

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "metadata_builder.py"))


class ExampleAdapter(BuilderAdapter):
    spec = draft_spec = PlanSpec(4, 2, 32, 16, max_context_tokens=512)
    capture_rows = (2, 4, 8)
    draft_passes = 2
    num_ubatches = 2

    def __init__(self, builder_class: type[Any] = EXAMPLE["DecodeMetadataBuilder"]) -> None:
        self.manager = PlanManager(
            {"target": self.spec, "draft": self.spec}, ladder=CapacityLadder.powers_of_two(8), device="cpu", ubatches=2
        )
        with self.manager.capture_phase():
            self.manager.warm()
        self.builder = builder_class(self.manager, 8)

    def build_for_capture(self, rows: int) -> Any:
        return self.builder.build_for_cudagraph_capture(rows)

    def prepare_decode(self, lens: Sequence[int], rows: int) -> Any:
        return self.builder.prepare_decode(batch(lens), rows)

    def prepare_mtp_decode(self, metadata: Any, draft_pass: int) -> Any:
        return self.builder.prepare_mtp_decode(metadata, draft_pass)

    def build_ubatches_for_capture(self, rows: int) -> Sequence[Any]:
        return self.builder.build_ubatches_for_cudagraph_capture(2 * rows)

    def prepare_ubatch_decode(self, lens: Sequence[Sequence[int]], rows: int) -> Sequence[Any]:
        # The builder splits one batch in the middle: rows that pad the first half are sequences of length 0 there.
        first, second = lens
        return self.builder.prepare_ubatch_decode(batch([*first, *[0] * (rows - len(first)), *second]), 2 * rows)

    def decode(self, metadata: Any, layer: int, *call: Any) -> None:
        self.manager.pa_decode(metadata.plan, *call)

    def context_lens(self, metadata: Any) -> torch.Tensor:
        return metadata.context_lens

    def replay(self, graph: Any, *metadata: Any) -> None:
        self.manager.replay(graph, *(one.step() for one in metadata))


def batch(lens: Sequence[int]) -> Any:
    """The suite brings block tables of its own, so the builder's may stay empty."""
    return EXAMPLE["Batch"](list(lens), [[] for _ in lens])


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "dummies"])
def test_the_example_builder_passes_the_suite(scenario: str) -> None:
    run_scenario(scenario, ExampleAdapter, num_steps=12)


def test_the_example_builder_has_no_dummies() -> None:
    with pytest.raises(Unsupported):
        run_scenario("dummies", ExampleAdapter, num_steps=1)


def test_a_method_that_the_example_would_forget_is_named() -> None:
    class Forgets(EXAMPLE["DecodeMetadataBuilder"]):  # type: ignore[misc]
        def prepare_mtp_decode(self, target: Any, draft_pass: int) -> Any:
            target.context_lens.add_((target.context_lens > 0).int())
            return target

    with pytest.raises(BuilderFailure, match=r"^prepare_mtp_decode, draft pass 1 of step 1: row 0 decoded"):
        run_scenario("drafts", lambda: ExampleAdapter(Forgets), num_steps=1)
