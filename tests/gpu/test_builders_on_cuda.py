"""The suite for engines' builders on CUDA graphs with the Triton backend, and with aiter's over its double."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.builder_suite import BuilderFailure

from ..suite import test_builder_suite as suite
from ..suite.builders import SPEC, Adapter, Builder, InGraphBuilder
from ..suite.test_builder_suite import *  # noqa: F403
from ..suite.test_builder_suite import run_pytest  # noqa: F401
from ..test_docs import DOCS, code_of

pytest_plugins = ["pytester"]

ON_THE_PAGE = code_of(DOCS / "testing.md")

_OTHER_PROCESS = "runs pytest in a process of its own, on the CPU; below is the same on a GPU"

_CACHES = "each cache is compiled anew: over the double's torch ops below, all of them on a CPU"

NOT_HERE = {
    "test_a_good_builder_passes_with_every_cache_and_kind_of_scales": _CACHES,
    "test_scales_of_another_layer_are_named": _CACHES,
    "test_the_plugin_runs_one_test_per_scenario_and_shows_the_failure": _OTHER_PROCESS,
    "test_the_plugin_imports_no_torch_before_a_builder_is_tested": _OTHER_PROCESS,
}


def test_the_plugin_passes_a_good_builder_and_fails_broken_ones_on_the_gpu(
    pytester: pytest.Pytester,
    run_pytest: Callable[..., pytest.RunResult],  # noqa: F811
) -> None:
    """As an engine runs it: one that forgets its drafts, and one with a new length tensor for each step."""
    pytester.makepyfile(
        """
        import torch
        from tests.lifecycle import world
        from tests.suite.builders import Adapter, Builder
        from tests.suite.test_builder_suite import ForgetsToPlanDrafts, KeepsLengthsNowhere

        world.DEVICE, world.World.backend = "cuda", "triton"

        class Fresh(KeepsLengthsNowhere):
            pass

        def test_good(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Adapter(Builder))

        def test_drafts(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Adapter(ForgetsToPlanDrafts))

        def test_lengths(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Adapter(Fresh))
        """
    )
    result = run_pytest("--planlife-steps=6")
    result.assert_outcomes(passed=6 + 4 + 1, failed=2 + 5)
    result.stdout.fnmatch_lines(["*BuilderFailure: prepare_mtp_decode, draft pass 1 of step 1: row * decoded *"])


@pytest.mark.parametrize("adapter", ["OnTheGpu", "OwnCapture"])
@pytest.mark.parametrize("scenario", ["replayed", "eager", "drafts", "mixed"])
def test_the_builder_on_the_page_about_testing_passes_on_the_gpu(scenario: str, adapter: str) -> None:
    run_scenario(scenario, ON_THE_PAGE[adapter], num_steps=8)  # noqa: F405


AITER_SPEC = replace(SPEC, head_dim=64, kv_layout="packed")


@pytest.mark.parametrize(
    ("arch", "generation", "scenario", "builder_class", "changes"),
    [
        ("gfx942", "G2", "mixed", Builder, {"kv_dtype": "float8_e4m3fnuz", "scales": "per_token"}),
        ("gfx942", "G3", "mixed", InGraphBuilder, {}),
        ("gfx950", "newer", "drafts", InGraphBuilder, {"kv_dtype": "float8_e4m3fn", "scales": "per_tensor"}),
        ("gfx950", "newer", "replayed", Builder, {"query_length": 3, "sliding_window": 100}),
    ],
)
def test_a_good_builder_passes_over_aiters_double(
    arch: str, generation: str, scenario: str, builder_class: type[Builder], changes: dict[str, object]
) -> None:
    adapter = partial(Adapter, builder_class, replace(AITER_SPEC, **changes), backend="aiter")
    with aiter_machine(arch, device_type="cuda", generation=generation, on_violation="record") as double:
        run_scenario(scenario, adapter, num_steps=10, double=double)  # noqa: F405


@pytest.mark.parametrize(
    ("broken", "scenario", "wanted"),
    [
        (suite.ForgetsToPlanDrafts, "drafts", r"prepare_mtp_decode, draft pass 1 of step 1: row 0 decoded \d+ tokens'"),
        (suite.SharesOnePlan, "ubatches", r"build_ubatches_for_capture\(4\), recording:"),
        (suite.PlansOnlyOnce, "replayed", r"prepare_decode, step 1 \(replay.* decoded 1 tokens' work"),
        (suite.PlansDummies, "dummies", "prepare_dummy, step 1: it refreshed a plan"),
        (suite.KeepsLengthsNowhere, "replayed", r"prepare_decode, step 1 \(replay of the.*Keep one length buffer"),
    ],
)
def test_a_broken_builder_is_named_over_aiters_double(broken: type[Builder], scenario: str, wanted: str) -> None:
    adapter = partial(Adapter, broken, AITER_SPEC, backend="aiter")
    with aiter_machine("gfx942", device_type="cuda", on_violation="record") as double:
        with pytest.raises(BuilderFailure) as caught:
            run_scenario(scenario, adapter, num_steps=4, double=double)  # noqa: F405
    assert re.match(wanted, str(caught.value)), caught.value
