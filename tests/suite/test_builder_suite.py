"""The builder suite passes good builders of both styles, and names the step that a broken one gets wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planlife import PlanManager, Step
from planlife.backends.dense_fallback import DenseFallback
from planlife.backends.torch_backend import TorchBackend
from planlife.testing import pytest_plugin
from planlife.testing.builder_suite import SCENARIOS, BuilderFailure, Unsupported, check_builder, run_scenario

from ..lifecycle import world
from .builders import MAX_ROWS, SPEC, Adapter, Builder, InGraphBuilder, Metadata

pytest_plugins = ["pytester"]


def failure(scenario: str, builder_class: type[Builder], num_steps: int = 8, **options: Any) -> str:
    with pytest.raises(BuilderFailure) as caught:
        run_scenario(scenario, lambda: Adapter(builder_class, **options), num_steps=num_steps)
    return str(caught.value)


@pytest.mark.parametrize("builder_class", [Builder, InGraphBuilder])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_good_builder_passes(scenario: str, builder_class: type[Builder]) -> None:
    run_scenario(scenario, lambda: Adapter(builder_class), num_steps=72 if scenario == "mixed" else 16)


@pytest.mark.parametrize("builder_class", [Builder, InGraphBuilder])
@pytest.mark.parametrize("changes", [{"query_length": 3}, {"sliding_window": 100}, {"kv_layout": "hnd"}], ids=str)
def test_a_good_builder_passes_with_other_specs(builder_class: type[Builder], changes: dict[str, Any]) -> None:
    run_scenario("replayed", lambda: Adapter(builder_class, replace(Adapter.default_spec, **changes)), num_steps=8)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("kv_layout", ["nhd", "packed"])
def test_a_good_builder_passes_with_every_cache_and_kind_of_scales(kv_layout: str, kv_dtype: str) -> None:
    for scales in ("none",) if kv_dtype == "bfloat16" else ("per_tensor", "per_token"):
        spec = replace(SPEC, kv_layout=kv_layout, kv_dtype=kv_dtype, scales=scales)
        run_scenario("replayed", lambda spec=spec: Adapter(InGraphBuilder, spec), num_steps=4)


class ScalesOfOneLayer(Builder):
    """Every layer decodes with the scales of the first."""

    def decode(self, metadata: Metadata, layer: int, *call: Any, **scales: Any) -> None:
        if layer == 0:
            self.scales = scales
        super().decode(metadata, layer, *call, **self.scales)


@pytest.mark.parametrize("scales", ["per_tensor", "per_token"])
def test_scales_of_another_layer_are_named(scales: str) -> None:
    spec = replace(Adapter.default_spec, kv_layout="packed", kv_dtype="float8_e4m3fnuz", scales=scales)
    message = failure("eager", ScalesOfOneLayer, spec=spec)
    assert re.search(r"away from the answer for its \d+ tokens, and is that of no other length", message), message


class ForgetsToPlanInCapture(Builder):
    def build_for_capture(self, rows: int) -> Metadata:
        return Metadata(self.lens[:rows])


def test_forgetting_plan_for_in_the_capture_method_is_named() -> None:
    message = failure("replayed", ForgetsToPlanInCapture)
    assert message.startswith("build_for_capture(8), warm-up: ConfigError: pa_decode takes the StepPlan")


class DecodesOtherwiseWithoutPlan(ForgetsToPlanInCapture):
    """Its layers take another kernel when there is no plan: right outputs, wrong kernel, and nobody notices (R3)."""

    def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
        if metadata.plan is None:
            decode_without_plan(metadata, *call)
        else:
            super().decode(metadata, layer, *call)


def decode_without_plan(metadata: Metadata, output: torch.Tensor, *call: Any) -> None:
    *tensors, softmax_scale = call
    extras: dict[str, Any] = {"spec": Adapter.default_spec, "key_scale": None, "value_scale": None, "sinks": None}
    DenseFallback(TorchBackend())(output, *tensors, metadata.lens, softmax_scale, **extras)


def test_a_graph_that_reads_no_plan_is_named() -> None:
    message = failure("replayed", DecodesOtherwiseWithoutPlan)
    assert message.startswith("build_for_capture(8): the graph reads 0 plans, wanted 1")


class ForgetsToPlanDrafts(Builder):
    def prepare_mtp_decode(self, metadata: Metadata, draft_pass: int) -> Metadata:
        metadata.lens += 1
        return metadata


class DoesNotRaiseTheRevision(Builder):
    def prepare_mtp_decode(self, metadata: Metadata, draft_pass: int) -> Metadata:
        metadata.lens += 1
        self.plan(metadata)
        return metadata


@pytest.mark.parametrize("builder_class", [ForgetsToPlanDrafts, DoesNotRaiseTheRevision])
def test_a_draft_pass_that_decodes_the_last_ones_work_is_named(builder_class: type[Builder]) -> None:
    message = failure("drafts", builder_class)
    found = re.fullmatch(
        r"prepare_mtp_decode, draft pass 1 of step 1: row 0 decoded (\d+) tokens' work, lengths say (\d+) "
        r"\((\d+) is what the pass before had\)",
        message,
    )
    assert found, message
    decoded, wanted, known = map(int, found.groups())
    assert decoded == wanted - 1 == known


class DraftsWithoutPlan(ForgetsToPlanDrafts):
    def prepare_mtp_decode(self, metadata: Metadata, draft_pass: int) -> Metadata:
        metadata = super().prepare_mtp_decode(metadata, draft_pass)
        metadata.plan = None
        return metadata

    def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
        if metadata.plan is None:
            decode_without_plan(metadata, *call)
        else:
            super().decode(metadata, layer, *call)


def test_drafts_that_are_right_but_not_planned_are_named() -> None:
    message = failure("drafts", DraftsWithoutPlan)
    assert message.startswith("prepare_mtp_decode, draft pass 1 of step 1: plan_for was called 0 times"), message


class DoesNotAdvance(Builder):
    def prepare_mtp_decode(self, metadata: Metadata, draft_pass: int) -> Metadata:
        metadata.draft_pass = draft_pass
        self.plan(metadata)
        return metadata


def test_a_draft_pass_that_does_not_advance_the_lengths_is_named() -> None:
    assert re.match(
        r"prepare_mtp_decode, draft pass 1 of step 1: context_lens\[0\] is", failure("drafts", DoesNotAdvance)
    )


class ForgetsToPlanUbatches(Builder):
    """The replay path of an engine's micro-batches: copies the lengths, and nothing else."""

    def prepare_ubatch_decode(self, ubatch: int, lens: Sequence[int], rows: int) -> Metadata:
        return Metadata(self.write(self.ub_lens[ubatch], lens, rows), ubatch)


def test_forgetting_plan_for_in_the_ubatch_method_is_named_eagerly() -> None:
    message = failure("ubatches", ForgetsToPlanUbatches)
    assert message.startswith("prepare_ubatch_decode, step 1 (eager): ConfigError"), message


def test_forgetting_plan_for_in_the_ubatch_method_is_named_in_a_replay() -> None:
    class PlansEagerly(ForgetsToPlanUbatches):
        def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
            if metadata.plan is None:
                self.plan(metadata)
            super().decode(metadata, layer, *call)

    message = failure("ubatches", PlansEagerly)
    assert re.match(
        r"prepare_ubatch_decode, step 2 \(replay of the graph of \d rows each\), ubatch 0: row \d decoded \d+ tokens'",
        message,
    ), message


class ForgetsToPlanUbatchCapture(Builder):
    def build_ubatch_for_capture(self, ubatch: int, rows: int) -> Metadata:
        return Metadata(self.ub_lens[ubatch][:rows], ubatch)


def test_forgetting_plan_for_in_the_ubatch_capture_method_is_named() -> None:
    message = failure("ubatches", ForgetsToPlanUbatchCapture)
    assert message.startswith("build_ubatches_for_capture(4), warm-up: ConfigError"), message


class KeepsLengthsNowhere(Builder):
    def write(self, buffer: torch.Tensor, lens: Sequence[int], rows: int) -> torch.Tensor:
        return torch.tensor([*lens, *[0] * (rows - len(lens))], dtype=torch.int32, device=buffer.device)


@pytest.mark.parametrize("style", [Builder, InGraphBuilder])
def test_lengths_in_a_fresh_tensor_per_step_are_named(style: type[Builder]) -> None:
    message = failure("replayed", type("Fresh", (KeepsLengthsNowhere, style), {}))
    assert message.startswith("prepare_decode, step 1 (replay of the"), message
    assert "Keep one length buffer" in message


class SharesOnePlan(Builder):
    """Both micro-batches plan as the first."""

    def step(self, metadata: Metadata) -> Step:
        return Step(metadata.lens, owner=metadata, revision=metadata.draft_pass, dummy=metadata.is_dummy)


def test_a_plan_shared_between_ubatches_is_named_at_capture() -> None:
    message = failure("ubatches", SharesOnePlan)
    assert message.startswith("build_ubatches_for_capture(4), recording:"), message


def test_a_plan_shared_between_ubatches_is_named_eagerly() -> None:
    class SharesOnePlanInService(SharesOnePlan):
        def build_ubatch_for_capture(self, ubatch: int, rows: int) -> Metadata:
            metadata = super().build_ubatch_for_capture(ubatch, rows)
            metadata.plan = self.manager.plan_for(Step(metadata.lens, owner=metadata, ubatch=ubatch))
            return metadata

    message = failure("ubatches", SharesOnePlanInService)
    assert re.match(r"prepare_ubatch_decode, step 1 \(eager\): refreshed \d+ times, wanted at most 2:", message), (
        message
    )


class KeepsThePlanOnItself(InGraphBuilder):
    """The first layer plans, and leaves the plan where the other micro-batch finds it, too."""

    def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
        if layer == 0:
            Builder.plan(self, metadata)
            self.current = metadata.plan
        self.manager.pa_decode(self.current, *call)


def test_a_layer_that_decodes_the_other_ubatchs_work_is_named() -> None:
    message = failure("ubatches", KeepsThePlanOnItself)
    assert re.fullmatch(
        r"prepare_ubatch_decode, step 1 \(eager\), ubatch 0: row \d decoded (\d+) tokens' work, lengths say \d+ "
        r"\(\1 is what ubatch 1 had\)",
        message,
    ), message


class KeepsTheLastPlan(Builder):
    """A plan that fits in rows and heads is taken, whatever step it was made for."""

    def __init__(self, manager: PlanManager) -> None:
        super().__init__(manager)
        self.kept: dict[int, Any] = {}

    def plan(self, metadata: Metadata) -> None:
        rows = metadata.lens.shape[0]
        if rows not in self.kept:
            super().plan(metadata)
            self.kept[rows] = metadata.plan
        metadata.plan = self.kept[rows]


class PlansBeforeItWrites(Builder):
    def prepare_decode(self, lens: Sequence[int], rows: int) -> Metadata:
        metadata = Metadata(self.lens[:rows])
        self.plan(metadata)
        self.write(self.lens, lens, rows)
        return metadata


class OwnsForEver(Builder):
    """One owner for all steps: without `_version` nothing tells them apart."""

    def step(self, metadata: Metadata) -> Step:
        return Step(metadata.lens, owner=self, revision=metadata.draft_pass, ubatch=metadata.ubatch)

    def plan(self, metadata: Metadata) -> None:
        rows = metadata.lens.shape[0]
        # The same tensor object each time, as an engine that slices its buffers once.
        metadata.lens = self.slices.setdefault(rows, metadata.lens)
        super().plan(metadata)

    def __init__(self, manager: PlanManager) -> None:
        super().__init__(manager)
        self.slices: dict[int, torch.Tensor] = {}


@pytest.mark.parametrize("scenario", ["replayed", "eager"])
@pytest.mark.parametrize("builder_class", [KeepsTheLastPlan, PlansBeforeItWrites, OwnsForEver])
def test_decoding_with_the_last_steps_plan_is_named(builder_class: type[Builder], scenario: str) -> None:
    message = failure(scenario, builder_class, num_steps=24)
    assert re.match(r"prepare_decode, step \d+ \((replay|eager)", message), message
    assert re.search(r"row \d decoded \d+ tokens' work, lengths say \d+|StalePlanError", message), message


class PlansOnlyOnce(InGraphBuilder):
    """The warm-up plans, and its mark on the metadata keeps the refresh out of the graph."""

    def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
        if metadata.plan is None:
            Builder.plan(self, metadata)
        self.manager.pa_decode(metadata.plan, *call)


def test_a_warm_up_that_keeps_the_refresh_out_of_the_graph_is_named() -> None:
    message = failure("replayed", PlansOnlyOnce)
    assert re.match(r"prepare_decode, step 1 \(replay", message), message
    assert re.search(r"decoded 1 tokens' work, lengths say \d+ \(1 is what build_for_capture had\)", message), message


class PlansEachLayerWithoutOwner(InGraphBuilder):
    def step(self, metadata: Metadata) -> Step:
        return Step(metadata.lens, ubatch=metadata.ubatch, dummy=metadata.is_dummy)

    def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
        Builder.plan(self, metadata)
        self.manager.pa_decode(metadata.plan, *call)


def test_a_refresh_per_layer_is_named() -> None:
    message = failure("eager", PlansEachLayerWithoutOwner)
    assert re.match(r"prepare_decode, step 1 \(eager\): refreshed 2 times, wanted at most 1:", message), message


class PlansDummies(Builder):
    def step(self, metadata: Metadata) -> Step:
        return Step(metadata.lens, owner=metadata, revision=metadata.draft_pass, ubatch=metadata.ubatch)


def test_a_dummy_step_that_rewrites_a_live_plan_is_named() -> None:
    message = failure("dummies", PlansDummies)
    assert message.startswith("prepare_dummy, step 1: it refreshed a plan"), message


class LeavesTheTail(Builder):
    """Rows behind the batch keep the lengths of an earlier one."""

    def write(self, buffer: torch.Tensor, lens: Sequence[int], rows: int) -> torch.Tensor:
        buffer[: len(lens)] = torch.tensor(lens, dtype=torch.int32, device=buffer.device)
        return buffer[:rows]


def test_padding_with_an_earlier_steps_lengths_is_named() -> None:
    message = failure("replayed", LeavesTheTail, num_steps=24)
    assert re.match(
        r"prepare_decode, step \d+ \(replay.*\): context_lens\[\d\] is \d+, wanted 0: the row is padding", message
    )


class PlansTheScheduledRows(Builder):
    def write(self, buffer: torch.Tensor, lens: Sequence[int], rows: int) -> torch.Tensor:
        return super().write(buffer, lens, len(lens))


def test_planning_the_scheduled_instead_of_the_padded_rows_is_named() -> None:
    message = failure("replayed", PlansTheScheduledRows, num_steps=24)
    assert re.match(r"prepare_decode, step \d+ \(replay.*\): context_lens has \d rows, wanted \d", message), message


class SkipsALayer(Builder):
    def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
        if layer == 0:
            super().decode(metadata, layer, *call)


def test_an_output_that_nobody_wrote_is_named() -> None:
    message = failure("eager", SkipsALayer)
    assert re.fullmatch(r"prepare_decode, step 1 \(eager\): row 0 was not written, lengths say \d+", message), message


class ScalesTwice(Builder):
    def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
        super().decode(metadata, layer, *call[:-1], 2 * call[-1])


def test_an_output_that_no_length_explains_is_named() -> None:
    message = failure("eager", ScalesTwice)
    assert re.search(
        r"row \d is [\d.]+ away from the answer for its \d+ tokens, and is that of no other length", message
    )


class DecodesForADummy(Builder):
    """A dummy's layers run by the plan of the step before."""

    def plan(self, metadata: Metadata) -> None:
        if not metadata.is_dummy:
            super().plan(metadata)
            if metadata.lens.shape[0] == MAX_ROWS:
                self.last_plan = metadata.plan
        else:
            metadata.plan = self.last_plan


def test_a_dummy_whose_layers_decode_is_named() -> None:
    message = failure("dummies", DecodesForADummy)
    assert message == "prepare_dummy, step 1: its layers wrote something else than zeros."


class HasInt64Lengths(Builder):
    def __init__(self, manager: PlanManager) -> None:
        super().__init__(manager)
        self.lens = self.lens.to(torch.int64)


def test_what_planlife_refuses_is_named_by_the_builders_method() -> None:
    message = failure("eager", HasInt64Lengths)
    assert message.startswith("build_for_capture(1): ConfigError: context_lens must be int32"), message


class OnlyWarmsTheLargest(Adapter):
    def __init__(self, **options: Any) -> None:
        super().__init__(Builder, **options)
        self.manager.close()
        self.manager = PlanManager(
            self.spec, ladder=self.ladder, ubatches=2, device=world.DEVICE, backend=world.World.backend, **options
        )
        self.builder = Builder(self.manager)
        self.capture_rows = (8,)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"fallback": "torch"}, r"prepare_decode, step \d+ \(eager\): took the fallback: class \d of site"),
        ({"on_miss": "raise"}, r"prepare_decode, step \d+ \(eager\): RouteError: class \d of site"),
        ({"on_miss": "mint"}, r"\d specialisations were compiled after the capture phase"),
    ],
    ids=str,
)
def test_a_class_that_was_never_warmed_is_named(options: dict[str, Any], wanted: str) -> None:
    with pytest.raises(BuilderFailure) as caught:
        run_scenario("eager", lambda: OnlyWarmsTheLargest(**options), num_steps=8)
    assert re.match(wanted, str(caught.value)), caught.value


class FusesDrafts(InGraphBuilder):
    pass


class FusedAdapter(Adapter):
    """Drafts in the graph of their step, as a fused draft loop records them."""

    drafts_in_graph = True
    num_ubatches = 0


def test_drafts_inside_a_graph_see_their_own_lengths() -> None:
    run_scenario("replayed", lambda: FusedAdapter(FusesDrafts), num_steps=16)


def test_drafts_inside_a_graph_that_are_not_planned_are_named() -> None:
    class Forgets(FusesDrafts):
        def decode(self, metadata: Metadata, layer: int, *call: Any) -> None:
            if layer == 0 and metadata.draft_pass == 0:
                Builder.plan(self, metadata)
            self.manager.pa_decode(metadata.plan, *call)

    with pytest.raises(BuilderFailure, match=r"^prepare_mtp_decode, draft pass 1 of prepare_decode, step 1 \(replay"):
        run_scenario("replayed", lambda: FusedAdapter(Forgets), num_steps=4)


def test_a_builder_without_drafts_ubatches_or_dummies_skips_their_scenarios() -> None:
    class Plain(Adapter):
        draft_passes, num_ubatches, has_dummies = 0, 0, False

    for scenario in ("drafts", "ubatches", "dummies"):
        with pytest.raises(Unsupported):
            run_scenario(scenario, lambda: Plain(Builder), num_steps=1)
    assert check_builder(lambda: Plain(Builder), num_steps=2) == ["replayed", "eager", "mixed"]


def test_a_cache_that_the_suite_cannot_make_is_refused_at_once() -> None:
    spec = replace(SPEC, page_size=8, kv_layout="packed", kv_dtype="float8_e4m3fn", scales="per_tensor")
    with pytest.raises(ValueError, match="in multiples of 16, got 8 and 16"):
        run_scenario("eager", lambda: Adapter(Builder, spec, enabled=False), num_steps=1)


def test_the_plugin_knows_the_suites_scenarios() -> None:
    assert pytest_plugin._SCENARIOS == SCENARIOS


@pytest.fixture
def run_pytest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """In a process of its own, with this plugin and no other."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]), prepend=os.pathsep)
    return lambda *options: pytester.runpytest_subprocess("-p", "planlife.testing.pytest_plugin", *options)


def test_the_plugin_imports_no_torch_before_a_builder_is_tested(
    pytester: pytest.Pytester, run_pytest: Callable[..., pytest.RunResult]
) -> None:
    pytester.makepyfile("import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    run_pytest().assert_outcomes(passed=1)


def test_the_plugin_runs_one_test_per_scenario_and_shows_the_failure(
    pytester: pytest.Pytester, run_pytest: Callable[..., pytest.RunResult]
) -> None:
    pytester.makepyfile(
        """
        from tests.suite.builders import Adapter, Builder
        from tests.suite.test_builder_suite import ForgetsToPlanDrafts

        class Plain(Adapter):
            num_ubatches = 0

        def test_good(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Plain(Builder))

        def test_broken(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Plain(ForgetsToPlanDrafts))
        """
    )
    result = run_pytest("--planlife-steps=4", "--planlife-seed=3")
    result.assert_outcomes(passed=5 + 3, skipped=2, failed=2)
    result.stdout.fnmatch_lines(["*BuilderFailure: prepare_mtp_decode, draft pass 1 of step 1: row * decoded *"])
