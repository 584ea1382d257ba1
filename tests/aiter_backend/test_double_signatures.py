"""Generations of the library: what imports from each, and what its functions take."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import Any

import pytest

from planlife.testing.aiter_double import GENERATIONS, STRANGERS, AiterDouble, aiter_double

from .double_call import assert_right, defining_module, pa_decode, plan_of, valid_call


def generation_of(module: Any) -> str:
    """As the contract tells them apart, by signature."""
    if not hasattr(module, "plan_pa_decode"):
        return "no planner"
    plan = inspect.signature(module.plan_pa_decode).parameters
    decode = inspect.signature(module.pa_decode).parameters
    kind, default = decode["work_plan"].kind, decode["work_plan"].default
    if kind is inspect.Parameter.KEYWORD_ONLY and default is inspect.Parameter.empty:
        if set(plan) - {"context_lengths", "num_kv_heads", "max_batch_size"} - set(GENERATIONS["G3"].plan_defaults):
            return "newer"
        if decode["compute_type"].default is None:
            return "G4"
        planner = sys.modules[module.plan_pa_decode.__module__]
        return "G3" if hasattr(planner, "compile_pa_decode_plan") else "G2"
    if "tuned_file" in decode:
        return "G1d"
    if "total_context_length" in plan:
        return "G1b"
    if "sliding_window" not in plan:
        return "G0"
    return "G1c" if plan["max_partitions"].default is None else "G1a"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_generation_is_told_by_its_signatures(generation):
    with aiter_double(generation=generation):
        assert generation_of(defining_module()) == generation


@pytest.mark.parametrize("generation", STRANGERS)
def test_a_library_that_is_not_it_has_no_planner(generation):
    with aiter_double(generation=generation):
        if generation in ("pypi", "old flydsl"):
            with pytest.raises(ImportError):
                defining_module()
        else:
            assert generation_of(defining_module()) == "no planner"
        assert importlib.util.find_spec("aiter") is not None
        assert importlib.util.find_spec("aiter.nothing") is None


def test_a_fork_with_host_plans_has_a_plan_class_all_the_same():
    with aiter_double(generation="fork with host plans"):
        module = defining_module()
        assert hasattr(module, "PADecodePlan")
        assert hasattr(module, "make_pa_decode_plan")


def test_the_packages_lazy_name_is_what_was_imported_first():
    with aiter_double():
        package = importlib.import_module("aiter.ops.flydsl")
        assert callable(package.pa_decode)
        from aiter.ops.flydsl.pa_decode import plan_pa_decode

        assert plan_pa_decode.__module__ == "aiter.ops.flydsl.kernels.pa_decode_plan"
        assert not hasattr(package, "plan_pa_decode")
    with aiter_double():
        defining_module()
        assert inspect.ismodule(importlib.import_module("aiter.ops.flydsl").pa_decode)


def test_the_double_leaves_imports_as_they_were():
    before = {name for name in sys.modules if name.split(".")[0] == "aiter"}
    with pytest.raises(KeyError), aiter_double(arch="gfx950", num_cu=304):
        chip = importlib.import_module("aiter.jit.utils.chip_info")
        assert (chip.get_gfx_runtime(), chip.get_cu_num()) == ("gfx950", 304)
        raise KeyError
    assert {name for name in sys.modules if name.split(".")[0] == "aiter"} == before


def test_nothing_unknown_is_taken(double):
    call = valid_call(double)
    with pytest.raises(TypeError, match="lse"):
        pa_decode(**call, lse=None)
    with pytest.raises(TypeError, match="num_rows"):
        plan_of(call["context_lengths"], num_rows=3)
    with pytest.raises(TypeError, match="work_plan"):
        del call["work_plan"]
        pa_decode(**call)
    with pytest.raises(TypeError, match="positional"):
        defining_module().plan_pa_decode(call["context_lengths"], 1, 8)


def test_a_newer_library_has_parameters_that_nobody_knows_and_takes_calls_without_them():
    with aiter_double(generation="newer", num_cu=8) as double:
        call = valid_call(double)
        pa_decode(**call)
        assert_right(call)
        with pytest.raises(ValueError, match="nobody"):
            pa_decode(**call, task_order="long first")
        with pytest.raises(ValueError, match="nobody"):
            plan_of(call["context_lengths"], task_order="long first")


@pytest.mark.parametrize(
    "setting", [{"generation": "G9"}, {"optional": ("magic",)}, {"on_violation": "ignore"}], ids=str
)
def test_a_setting_that_is_none_is_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        AiterDouble(**setting)
