"""What the double computes is attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife.testing.aiter_double import GENERATIONS, aiter_double, device_side

from .double_call import assert_right, front_of, num_compiled, pa_decode, valid_call

CASES: dict[str, dict[str, Any]] = {
    "fp8 per tensor": {},
    "fp8 per token": {"scales": "per_token", "num_kv_heads": 2},
    "plain V": {"layout": "packed, plain V", "page": 64},
    "bf16": {"kv": "bf16", "head_dim": 192},
    "several queries": {"query_length": 4, "lens": (300, 2, 0, 1000)},
    "a window": {"sliding_window": 100, "query_length": 2, "lens": (300, 2, 0, 1000)},
    "one partition": {"max_partitions": 1, "lens": (1000, 300)},
    "many partitions": {"workgroup_budget": 64, "lens": (2000, 300)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
def test_results_are_attention(arch, options):
    if arch == "gfx1250" and options.get("kv") == "bf16":
        pytest.skip("the gfx1250 text takes FP8 caches only")
    with aiter_double(arch=arch, num_cu=8) as double:
        call = valid_call(double, **options)
        call["sinks"] = torch.linspace(-1, 1, call["query"].shape[1])
        pa_decode(**call)
        assert_right(call)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_gpu_attends_as_a_cpu_does(options, monkeypatch):
    with aiter_double(arch="gfx950", num_cu=8) as double:
        call = valid_call(double, **options)
        call["sinks"] = torch.linspace(-1, 1, call["query"].shape[1])
        monkeypatch.setattr(device_side, "attend_on_host", device_side.attend_on_device)
        pa_decode(**call)
        assert_right(call)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_decodes(generation):
    with aiter_double(generation=generation, num_cu=8) as double:
        call = valid_call(double)
        pa_decode(**call)
        assert_right(call)
        assert double.violations == []


@pytest.mark.parametrize("arch", ["gfx942", "gfx1250"])
def test_softmax_scale_may_be_left_out(arch):
    with aiter_double(arch=arch, num_cu=8) as double:
        call = valid_call(double)
        pa_decode(**call | {"softmax_scale": None})
        assert_right(call)
        pa_decode(**call)
        # It stands for head_dim ** -0.5, which gfx1250's cache knows and the others' does not.
        assert num_compiled(double, "tile") == (1 if arch == "gfx1250" else 2)


def test_scales_may_be_left_out_or_numbers_outside_a_capture(double):
    call = valid_call(double)
    pa_decode(**call | {"key_scale": None, "value_scale": None})
    assert_right(call | {"key_scale": None, "value_scale": None})
    pa_decode(**call | {"key_scale": 2.0, "value_scale": 0.5})
    assert_right(call | {"key_scale": torch.tensor([2.0]), "value_scale": torch.tensor([0.5])})


def test_empty_rows_are_zeros_and_unused_scratch_stays_as_it_was(double):
    call = valid_call(double, (0, 0, 0), columns=1)
    pa_decode(**call | {"sinks": torch.zeros(2)})
    assert torch.equal(call["output"], torch.zeros_like(call["output"]))
    assert call["temporary_output"].isnan().all()
    call = valid_call(double, (600,))
    pa_decode(**call)
    used = int(call["work_plan"].reduce_info.sum())
    for name in ("exp_sums", "max_logits", "temporary_output"):
        assert not call[name][:, :used].isnan().any()
        assert call[name][:, used:].isnan().all()


def test_a_view_of_a_plan_decodes_its_first_rows(double):
    call = valid_call(double, (300, 17, 0, 0))
    front = front_of(call, 2)
    pa_decode(**front)
    assert_right(front)


def test_early_generations_decode_windows_with_a_plan():
    with aiter_double(generation="G1c", num_cu=8) as double:
        call = valid_call(double, sliding_window=100)
        pa_decode(**call)
        assert_right(call)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_torchs_default_device_is_nothing_to_the_double_and_the_reference(options):
    """Engines set it while they build a model."""
    device_side._values_of.cache_clear()  # made by the first FP8 call
    with aiter_double(arch="gfx950", num_cu=8) as double:
        call = valid_call(double, **options)
        with torch.device("meta"):
            pa_decode(**call)
            assert_right(call)
