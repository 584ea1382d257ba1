"""The budget of a site's plans: tuned on this machine, known to aiter, or 2 x compute units (R38)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planlife import CapacityLadder, PlanManager, PlanSpec
from planlife.aiter_generation import imported_generation
from planlife.aiter_library import probe
from planlife.backends.aiter_backend import AiterBackend
from planlife.backends.aiter_limits import FP8_OF_ARCHITECTURE
from planlife.configuration import DeviceMeant
from planlife.estimate import estimate
from planlife.sites import Sites
from planlife.testing.aiter_machine import aiter_machine
from planlife.torch_device import CpuDevice

FP8 = PlanSpec(
    8, 1, 128, 16, max_context_tokens=4096, kv_layout="packed", scales="per_token", kv_dtype="float8_e4m3fnuz"
)
NUM_CU = 304
TUNED = {1: NUM_CU, 4: 4096, 12: 9999, 64: 2048}


def budget_of(spec: PlanSpec = FP8, arch: str = "gfx942", device: Any = None, **settings: Any) -> int:
    with aiter_machine(arch, num_cu=NUM_CU, **{"generation": "G3", **settings}) as double:
        budget = AiterBackend().default_workgroup_budget(spec, device or CpuDevice(num_compute_units=NUM_CU))
        assert double.decodes == 0 and not double.violations
        return budget


@pytest.fixture
def a_tuned_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLYDSL_AUTOTUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FLYDSL_AUTOTUNE", raising=False)


@pytest.mark.parametrize("arch", FP8_OF_ARCHITECTURE)
def test_the_largest_budget_that_was_tuned_for_a_site_is_its_default(arch):
    spec = replace(FP8, kv_dtype=FP8_OF_ARCHITECTURE[arch])
    settings = {"optional": ("get_cached_budget",)}
    assert budget_of(spec, arch, tuned_budgets=TUNED, **settings) == 4096  # of row counts that are powers of two
    assert budget_of(spec, arch, tuned_budgets={1: 100}, **settings) == 100  # fewer than the default, too
    assert budget_of(spec, arch, **settings) == 2 * NUM_CU
    assert budget_of(replace(spec, q_dtype="float32"), arch, tuned_budgets=TUNED, **settings) == 2 * NUM_CU


def test_a_tuned_budget_goes_before_one_that_aiter_knows_and_is_no_estimates():
    names = ("get_cached_budget", "pa_decode_default_workgroup_budget")
    nhd = PlanSpec(8, 1, 256, 64, max_context_tokens=64, kv_dtype="float8_e4m3fn", scales="per_tensor", kv_layout="nhd")
    settings: dict[str, Any] = {"arch": "gfx950", "optional": names}
    assert budget_of(nhd, **settings) == NUM_CU
    assert budget_of(nhd, tuned_budgets=TUNED, **settings) == 4096
    assert budget_of(nhd, device=DeviceMeant(100), tuned_budgets=TUNED, **settings) == 200
    with aiter_machine("gfx950", optional=names[:1]):
        one = Sites({"default": nhd}, {"default": CapacityLadder([1])})
        (note,) = estimate(one, backend="aiter", num_compute_units=NUM_CU).notes
        assert "This aiter has get_cached_budget, which" in note


@pytest.mark.parametrize("is_in_tuning", [False, True])
def test_a_plan_is_prepared_for_its_budget_in_either_home(a_tuned_machine, is_in_tuning):
    settings: dict[str, Any] = {"optional": ("prepare_pa_decode_plan",), "prepares_in_tuning": is_in_tuning}
    with aiter_machine("gfx942", **settings):
        library = probe().library
        assert library is not None and library.prepare is not None
        assert imported_generation(library).newer_names == ("prepare_pa_decode_plan",)
    assert budget_of(tuned_budgets={64: 2048}, **settings) == 2048
    assert budget_of(**settings) == 2 * NUM_CU


def test_no_plan_is_prepared_where_nothing_was_tuned_or_a_search_would_begin(monkeypatch, a_tuned_machine):
    settings: dict[str, Any] = {"optional": ("prepare_pa_decode_plan",), "tuned_budgets": {64: 2048}}
    assert budget_of(**settings) == 2048  # positive control
    monkeypatch.setenv("FLYDSL_AUTOTUNE", "1")
    assert budget_of(**settings) == 2 * NUM_CU
    monkeypatch.delenv("FLYDSL_AUTOTUNE")
    monkeypatch.delenv("FLYDSL_AUTOTUNE_CACHE_DIR")
    monkeypatch.setenv("HOME", "/nowhere")
    with aiter_machine("gfx942", num_cu=NUM_CU, **settings) as double:
        AiterBackend().default_workgroup_budget(FP8, CpuDevice(num_compute_units=NUM_CU))
        assert double.plans_made == 0


def test_a_manager_plans_with_the_tuned_budget_and_compiles_nothing_for_it():
    with aiter_machine("gfx942", optional=("get_cached_budget",), tuned_budgets={4: 1000}) as double:
        with PlanManager(FP8, ladder=CapacityLadder([4]), device="cpu", backend="aiter") as manager:
            assert manager.report().sites[0].workgroup_budget == 1000
        assert (double.compiles, double.plans_made) == (0, 0)


@pytest.mark.parametrize("name", ["get_cached_budget", "make_shape", "storage_key"])
def test_a_tuner_that_cannot_be_asked_is_as_if_it_were_not_there(monkeypatch, name):
    def other(everything: Any) -> Any:
        raise AssertionError("asked")

    settings: dict[str, Any] = {"optional": ("get_cached_budget",), "tuned_budgets": TUNED}
    with aiter_machine("gfx942", num_cu=NUM_CU, **settings):
        library = probe().library
        assert library is not None and library.budget_cache is not None

        monkeypatch.setattr(sys.modules["aiter.ops.flydsl.pa_decode_tuning"], name, other)
        probe.cache_clear()
        library = probe().library
        assert library is not None and library.budget_cache is None
        told = imported_generation(library)
        assert told is not None and told.unusable_names == ("get_cached_budget",)
        assert AiterBackend().default_workgroup_budget(FP8, CpuDevice(num_compute_units=NUM_CU)) == 2 * NUM_CU
    probe.cache_clear()
