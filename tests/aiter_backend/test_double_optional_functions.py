"""Functions that only newer libraries have."""

from __future__ import annotations

import inspect

import pytest
import torch

from planlife.testing import EmulatedGraph, record
from planlife.testing.aiter_double import OPTIONAL, aiter_double

from .double_call import REQUIRED, assert_right, defining_module, pa_decode, valid_call
from .refused_calls import DECODE_FAULTS


def test_optional_functions_are_there_when_they_are_asked_for():
    functions = [name for name in OPTIONAL if name != "max_batch_size"]
    with aiter_double():
        assert not any(hasattr(defining_module(), name) for name in functions)
    with aiter_double(optional=OPTIONAL):
        module = defining_module()
        assert all(hasattr(module, name) for name in functions)
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


def test_nhd_caches_are_taken_where_the_library_says_so():
    optional = ("pa_decode_nhd_max_query_length", "pa_decode_default_workgroup_budget")
    shape = {"head_dim": 256, "page": 64, "group": 16, "layout": "nhd", "num_kv_heads": 2}
    with aiter_double(arch="gfx950", num_cu=8, optional=optional) as double:
        module = defining_module()
        cache = {"kv_dtype": torch.float8_e4m3fn, "head_dim": 256, "block_size": 64}
        assert module.pa_decode_nhd_max_query_length("cuda", **cache, query_group_size=16) == 2
        assert module.pa_decode_nhd_max_query_length("cuda", **cache | {"block_size": 16}, query_group_size=16) == 0
        budget = module.pa_decode_default_workgroup_budget
        assert budget("cuda", **cache, query_length=2, query_group_size=16) == 8
        assert budget("cuda", **cache, query_length=4, query_group_size=16) == 16
        assert budget("cuda", **cache, query_length=2, query_group_size=16, sliding_window=5) == 16
        call = valid_call(double, query_length=2, **shape)
        pa_decode(**call)
        assert_right(call)
        pages = torch.stack((call["key_cache"].view(torch.uint8), call["value_cache"].view(torch.uint8)), 1)
        for at, name in enumerate(("key_cache", "value_cache")):  # one allocation for both
            call[name] = pages[:, at].view(call[name].dtype)
            assert not call[name].is_contiguous()
        pa_decode(**call)
        assert_right(call)
        pa_decode(**valid_call(double))  # packed caches as ever
        with pytest.raises(ValueError, match="must match"):
            pa_decode(**call | {"value_cache": call["value_cache"][..., :128]})
        for other in (
            {"query_length": 4},
            {"query_length": 3, "group": 11},
            {"query_length": 2, "kv": "bf16"},
            {"query_length": 2, "sliding_window": 1},
            {"query_length": 2, "page": 16},
            {"query_length": 2, "head_dim": 128},
        ):
            with pytest.raises(NotImplementedError, match="NHD"):
                pa_decode(**valid_call(double, **shape | other))
        for scale in (float("inf"), float("nan"), 0, -1.0, "1"):
            with pytest.raises(ValueError, match="finite and positive"):
                pa_decode(**call | {"softmax_scale": scale})
        pa_decode(**call | {"softmax_scale": 1, "sliding_window": -1})
        wide = torch.zeros(*call["key_cache"].shape[:3], 512, dtype=torch.uint8).view(call["key_cache"].dtype)
        odd = torch.zeros(call["key_cache"].numel() + 16, dtype=torch.uint8).view(wide.dtype)
        shape_of = call["key_cache"].shape
        for cache in (
            wide[..., ::2],
            odd[1 : 1 + call["key_cache"].numel()].view(shape_of),
            torch.zeros(*shape_of[:3], 264, dtype=torch.uint8).view(wide.dtype)[..., :256],
        ):
            for name in ("key_cache", "value_cache"):
                with pytest.raises(ValueError, match=f"{name} must be 16-byte aligned"):
                    pa_decode(**call | {name: cache})
        with pytest.raises(ValueError, match="finite and positive"):
            pa_decode(**call | {"key_scale": 0.0, "value_scale": 1.0})
        with pytest.raises(ValueError, match="finite and positive"):
            pa_decode(**call | {"key_scale": 1.0, "value_scale": float("inf")})
        with pytest.raises(NotImplementedError, match="NHD"):
            pa_decode(**call | {name: call[name][..., :128] for name in ("query", "output")})
    with aiter_double(arch="gfx1250", num_cu=8, optional=optional) as double:
        with pytest.raises(NotImplementedError, match="NHD"):
            pa_decode(**valid_call(double, query_length=2, **shape))
    with aiter_double(arch="gfx950", num_cu=8) as double:
        with pytest.raises(ValueError, match="key_cache must have rank"):
            pa_decode(**valid_call(double, query_length=2, **shape))


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
