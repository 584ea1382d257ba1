"""Functions that only newer libraries have."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from planlife.testing import EmulatedGraph, record
from planlife.testing.aiter_double import OPTIONAL, AiterDouble, aiter_double
from planlife.testing.aiter_double.double import TUNING_MODULE

from .double_call import REQUIRED, assert_right, defining_module, pa_decode, valid_call
from .refused_calls import DECODE_FAULTS


def test_optional_functions_are_there_when_they_are_asked_for():
    functions = [name for name in OPTIONAL if name != "max_batch_size"]
    with aiter_double():
        assert not any(hasattr(defining_module(), name) for name in functions)
    with aiter_double(optional=OPTIONAL):
        module, tuning = defining_module(), import_module(TUNING_MODULE)
        assert all(hasattr(tuning if name == "get_cached_budget" else module, name) for name in functions)
        assert "max_batch_size" in inspect.signature(module.plan_pa_decode).parameters


def test_the_predicate_answers_as_decode_would_and_compiles_nothing():
    with aiter_double(num_cu=8, optional=("can_use_flydsl_pa_decode",)) as double:
        can_use = defining_module().can_use_flydsl_pa_decode
        call = valid_call(double)
        before = double.compiled
        assert can_use(**call) is True
        assert can_use(**call | {"work_plan": None}) is True
        for row, spoil, _, message in DECODE_FAULTS:
            if row < 41:
                assert can_use(**call | spoil(call)) is False, message
        assert [key for key in double.compiled if key[0] != "plan"] == [key for key in before if key[0] != "plan"]


NHD_FUNCTIONS = ("pa_decode_nhd_max_query_length", "pa_decode_default_workgroup_budget")
NHD = {"head_dim": 256, "page": 64, "group": 16, "layout": "nhd", "num_kv_heads": 2, "query_length": 2}
CACHES = ("key_cache", "value_cache")


@pytest.fixture
def with_nhd() -> Iterator[AiterDouble]:
    with aiter_double(arch="gfx950", num_cu=8, optional=NHD_FUNCTIONS) as double:
        yield double


def test_nhd_caches_are_taken_where_the_library_says_so(with_nhd):
    module = defining_module()
    cache = {"kv_dtype": torch.float8_e4m3fn, "head_dim": 256, "block_size": 64}
    assert module.pa_decode_nhd_max_query_length("cuda", **cache, query_group_size=16) == 2
    assert module.pa_decode_nhd_max_query_length("cuda", **cache | {"block_size": 16}, query_group_size=16) == 0
    budget = module.pa_decode_default_workgroup_budget
    assert budget("cuda", **cache, query_length=2, query_group_size=16) == 8
    assert budget("cuda", **cache, query_length=4, query_group_size=16) == 16
    assert budget("cuda", **cache, query_length=2, query_group_size=16, sliding_window=5) == 16
    call = valid_call(with_nhd, **NHD)
    pa_decode(**call)
    assert_right(call)
    pages = torch.stack([call[name].view(torch.uint8) for name in CACHES], 1)
    for at, name in enumerate(CACHES):  # one allocation for both
        call[name] = pages[:, at].view(call[name].dtype)
        assert not call[name].is_contiguous()
    call["output"].fill_(torch.nan)
    pa_decode(**call)
    assert_right(call)
    pa_decode(**call | {"sliding_window": -1})
    pa_decode(**valid_call(with_nhd))  # packed caches as ever


def test_other_nhd_caches_are_refused(with_nhd):
    for other in (
        {"query_length": 4},
        {"query_length": 3, "group": 11},
        {"kv": "bf16"},
        {"sliding_window": 1},
        {"page": 16},
        {"head_dim": 128},
    ):
        with pytest.raises(NotImplementedError, match="NHD"):
            pa_decode(**valid_call(with_nhd, **NHD | other))
    call = valid_call(with_nhd, **NHD)
    with pytest.raises(NotImplementedError, match="NHD"):
        pa_decode(**call | {name: call[name][..., :128] for name in ("query", "output")})
    with pytest.raises(ValueError, match="must match"):
        pa_decode(**call | {"value_cache": call["value_cache"][..., :128]})


def test_nhd_caches_are_refused_by_other_machines_and_libraries():
    with aiter_double(arch="gfx1250", num_cu=8, optional=NHD_FUNCTIONS) as double:
        with pytest.raises(NotImplementedError, match="NHD"):
            pa_decode(**valid_call(double, **NHD))
    with aiter_double(arch="gfx950", num_cu=8) as double:
        with pytest.raises(ValueError, match="key_cache must have rank"):
            pa_decode(**valid_call(double, **NHD))


@pytest.mark.parametrize("name", CACHES)
def test_the_rows_of_nhd_caches_start_on_16_bytes(with_nhd, name):
    call = valid_call(with_nhd, **NHD)
    shape, num_items = call[name].shape, call[name].numel()

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8).view(call[name].dtype)

    for cache in (
        zeros(*shape[:3], 512)[..., ::2],
        zeros(num_items + 16)[1 : 1 + num_items].view(shape),
        zeros(*shape[:3], 264)[..., :256],
    ):
        with pytest.raises(ValueError, match=f"{name} must be 16-byte aligned"):
            pa_decode(**call | {name: cache})
    for cache in (zeros(num_items + 16)[16:].view(shape), zeros(*shape[:3], 272)[..., :256]):
        pa_decode(**call | {name: cache})


def test_a_library_with_nhd_caches_takes_finite_positive_numbers_only(with_nhd):
    call = valid_call(with_nhd, **NHD)
    for scale in (float("inf"), float("nan"), 0, -1.0, "1"):
        with pytest.raises(ValueError, match="finite and positive"):
            pa_decode(**call | {"softmax_scale": scale})
    for scales in ({"key_scale": 0.0, "value_scale": 1.0}, {"key_scale": 1.0, "value_scale": float("inf")}):
        with pytest.raises(ValueError, match="finite and positive"):
            pa_decode(**call | scales)
    pa_decode(**call | {"softmax_scale": 1, "key_scale": 1.0, "value_scale": 2.0})


def test_a_prepared_plan_is_the_default_one_and_is_not_made_in_a_capture():
    with aiter_double(num_cu=8, optional=("prepare_pa_decode_plan",)) as double:
        prepare = defining_module().prepare_pa_decode_plan
        call = valid_call(double)
        arguments = [call[name] for name in REQUIRED if name != "output"]
        plan = prepare(*arguments, compute_type=call["compute_type"])
        assert plan.capacity == call["work_plan"].capacity
        with pytest.raises(RuntimeError, match="before graph capture"):
            with record(EmulatedGraph()):
                prepare(*arguments)


@pytest.mark.parametrize("is_in_tuning", [False, True])
def test_a_prepared_plan_has_the_budget_that_was_tuned_for_its_rows(is_in_tuning):
    settings = {"tuned_budgets": {3: 14}, "prepares_in_tuning": is_in_tuning}
    with aiter_double(num_cu=8, optional=("prepare_pa_decode_plan",), **settings) as double:
        home = import_module(TUNING_MODULE) if is_in_tuning else defining_module()
        call = valid_call(double)
        arguments = [call[name] for name in REQUIRED if name != "output"]
        tune = {"tune": False, "config_dir": None} if is_in_tuning else {}
        assert home.prepare_pa_decode_plan(*arguments, compute_type=call["compute_type"], **tune).capacity == 14
        if is_in_tuning:
            assert not hasattr(defining_module(), "prepare_pa_decode_plan")


def test_a_cached_budget_is_told_by_rows_and_is_the_default_on_a_miss():
    with aiter_double(arch="gfx942", num_cu=8, optional=("get_cached_budget",), tuned_budgets={12: 64}) as double:
        tuning = import_module(TUNING_MODULE)
        call = valid_call(double)
        key = tuning.storage_key(*(call[name] for name in ("query", *CACHES, "key_scale", "value_scale")))
        for rows, budget in ((12, 64), (1, 16)):
            shape = tuning.make_shape(rows, 4096, 1, num_query_heads=2, num_kv_heads=1, head_dim=64, page_size=16)
            assert tuning.get_cached_budget(shape, "gfx942", 8, storage_key=key) == budget
