"""The suite for engines' builders over the aiter backend: good ones pass and broken ones are named, as on torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from planlife.aiter_library import DEFINING_MODULE
from planlife.testing.aiter_double import AiterDouble
from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.builder_suite import BuilderFailure, run_scenario

from ..lifecycle.world import World
from ..suite import test_builder_suite
from ..suite.builders import SPEC, Adapter, Builder, InGraphBuilder, Metadata
from ..suite.test_builder_suite import run_pytest  # noqa: F401

pytest_plugins = ["pytester"]

AITER_SPEC = replace(SPEC, head_dim=64, kv_layout="packed")

_OTHER_PROCESS = "runs pytest in a process of its own; below is the same with the double"
NOT_HERE = {
    "test_the_plugin_runs_one_test_per_scenario_and_shows_the_failure": _OTHER_PROCESS,
    "test_the_plugin_imports_no_torch_before_a_builder_is_tested": _OTHER_PROCESS,
    "test_the_plugin_knows_the_suites_scenarios": "about the plugin",
    "test_a_good_builder_passes_with_other_specs": "aiter reads no hnd cache; below are specs that it reads",
    "test_a_good_builder_passes_with_every_cache_and_kind_of_scales": "below are those that aiter reads",
    "test_an_output_that_no_length_explains_is_named": "another softmax scale is refused by the call: below",
    "test_a_cache_that_the_suite_cannot_make_is_refused_at_once": "about a cache that no backend reads",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Good builders over every generation. What names a broken one is the suite, to which they are all the same."""
    is_good = metafunc.function.__name__.startswith("test_a_good_builder")
    metafunc.parametrize("double", ["G2", "G3", "newer"] if is_good else ["G3"], indirect=True)


@pytest.fixture(autouse=True)
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AiterDouble]:
    with aiter_machine("gfx942", generation=request.param, on_violation="record") as double:
        monkeypatch.setattr(World, "backend", "aiter")
        monkeypatch.setattr(Adapter, "default_spec", AITER_SPEC)
        monkeypatch.setattr(test_builder_suite, "run_scenario", partial(run_scenario, double=double))
        yield double


for _name, _test in vars(test_builder_suite).items():
    if _name.startswith("test_") and _name not in NOT_HERE:
        globals()[_name] = _test


def test_what_is_left_out_is_there() -> None:
    assert vars(test_builder_suite).keys() >= NOT_HERE.keys()


def failure(scenario: str, builder_class: type[Builder], double: AiterDouble, **options: Any) -> str:
    with pytest.raises(BuilderFailure) as caught:
        run_scenario(scenario, lambda: Adapter(builder_class, **options), num_steps=8, double=double)
    return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_length": 3},
        {"sliding_window": 100},
        {"kv_dtype": "float8_e4m3fnuz", "scales": "per_tensor"},
        {"kv_dtype": "float8_e4m3fnuz", "scales": "per_token", "query_length": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("builder_class", [Builder, InGraphBuilder])
def test_a_good_builder_passes_with_what_aiter_reads(
    builder_class: type[Builder], changes: dict[str, Any], double: AiterDouble
) -> None:
    spec = replace(AITER_SPEC, **changes)
    run_scenario("replayed", lambda: Adapter(builder_class, spec), num_steps=6, double=double)


def test_another_softmax_scale_is_named(double: AiterDouble) -> None:
    message = failure("eager", test_builder_suite.ScalesTwice, double)
    assert message.startswith("build_for_capture(1), warm-up: ConfigError: softmax_scale is 0.25"), message


class CutsItsTables(Builder):
    """A call that reads past its block tables, and is made good before anybody looks."""

    def decode(self, metadata: Metadata, layer: int, *call: Any, **scales: Any) -> None:
        output, query, keys, values, tables, softmax_scale = call
        super().decode(
            metadata, layer, output, query, keys, values, tables[:, :1].contiguous(), softmax_scale, **scales
        )
        super().decode(metadata, layer, *call, **scales)


def test_what_the_double_objects_to_is_named_with_its_step(double: AiterDouble) -> None:
    message = failure("eager", CutsItsTables, double)
    assert message.startswith("prepare_decode, step 1 (eager): aiter's double objects: a length is beyond the block")


class PlansInService(Builder):
    """Still asks aiter for a plan of its own, which no warm-up knows of."""

    def prepare_decode(self, lens: Any, rows: int) -> Metadata:
        aiter = import_module(DEFINING_MODULE)
        aiter.plan_pa_decode(torch.ones(1, dtype=torch.int32), 1, max_partitions=1)
        return super().prepare_decode(lens, rows)


def test_a_kernel_that_aiter_would_compile_in_service_is_named(double: AiterDouble) -> None:
    message = failure("eager", PlansInService, double)
    assert message.startswith("aiter would have compiled 1 kernels after the capture phase: ('plan', "), message


def test_a_builder_that_decodes_by_another_backend_is_named(double: AiterDouble) -> None:
    message = failure("eager", Builder, double, backend="torch")
    assert message.startswith("aiter's double decoded nothing: the manager's backend is 'torch'"), message


def test_the_plugin_brings_the_double_and_requires_that_it_is_taken(
    pytester: pytest.Pytester,
    run_pytest: Callable[..., pytest.RunResult],  # noqa: F811
) -> None:
    pytester.makepyfile(
        """
        from tests.aiter_backend.test_builders_over_the_double import AITER_SPEC
        from tests.suite.builders import Adapter, Builder
        from tests.suite.test_builder_suite import ForgetsToPlanDrafts

        class Plain(Adapter):
            num_ubatches = 0
            has_dummies = False

        def test_good(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Plain(Builder, AITER_SPEC, backend="aiter"))

        def test_broken(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Plain(ForgetsToPlanDrafts, AITER_SPEC, backend="aiter"))

        def test_torch(planlife_builder_scenario):
            planlife_builder_scenario(lambda: Plain(Builder, AITER_SPEC, backend="torch"))
        """
    )
    result = run_pytest(
        *("--planlife-steps=3", "--planlife-aiter=gfx950", "--planlife-aiter-generation=newer"),
        "--planlife-aiter-device=cpu",
    )
    result.assert_outcomes(passed=4 + 2, skipped=6, failed=2 + 4)
    result.stdout.fnmatch_lines(
        [
            "*BuilderFailure: prepare_mtp_decode, draft pass 1 of step 1: row * decoded *",
            "*BuilderFailure: aiter's double decoded nothing*",
        ]
    )
