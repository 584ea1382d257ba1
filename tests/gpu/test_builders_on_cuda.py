"""The suite for engines' builders on CUDA graphs with the Triton backend: good ones pass, broken ones are named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..suite.test_builder_suite import *  # noqa: F403
from ..suite.test_builder_suite import run_pytest  # noqa: F401
from ..test_docs import DOCS, code_of

pytest_plugins = ["pytester"]

ON_THE_PAGE = code_of(DOCS / "testing.md")

_OTHER_PROCESS = "runs pytest in a process of its own, on the CPU; below is the same on a GPU"

NOT_HERE = {
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
