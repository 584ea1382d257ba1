"""The text of BF16 caches on gfx1250, and what the first text refuses: each beside what it takes."""

from __future__ import annotations

import pytest
import torch

from planlife.testing.aiter_double import aiter_double

from .double_call import assert_right, num_compiled, pa_decode, plan_of, valid_call


@pytest.mark.parametrize("compute_type", [None, torch.bfloat16])
@pytest.mark.parametrize("layout", ["packed", "packed, plain V"])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float16])
def test_g4_reads_bf16_caches_on_gfx1250_with_either_v_and_either_query(query_dtype, layout, compute_type):
    with aiter_double(arch="gfx1250", generation="G4", num_cu=8) as double:
        call = valid_call(double, kv="bf16", layout=layout, head_dim=128, query_length=2)
        for name in ("query", "output", "temporary_output"):
            call[name] = call[name].to(query_dtype)
        pa_decode(**call | {"compute_type": compute_type})
        assert_right(call)
        assert num_compiled(double, "tile") == 1


def test_g4_has_tiles_of_either_cache_and_takes_the_compute_type_of_the_cache():
    with aiter_double(arch="gfx1250", generation="G4", num_cu=8) as double:
        for kv in ("fp8", "bf16"):
            call = valid_call(double, kv=kv)
            pa_decode(**{name: one for name, one in call.items() if name != "compute_type"})
            assert_right(call)
        assert num_compiled(double, "tile") == 2
        with pytest.raises(ValueError, match="key_cache must be"):  # 16 bytes of what it computes with
            pa_decode(**call | {"compute_type": torch.float8_e4m3fn})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_dim": 192}, NotImplementedError, "head_dim=192"),
        ({"key_scale": torch.ones(1), "value_scale": torch.ones(1)}, ValueError, "takes no key or value scale"),
    ],
    ids=["head_dim", "scales"],
)
def test_g4_treats_a_bf16_cache_as_an_fp8_one_without_scales(change, error, message):
    with aiter_double(arch="gfx1250", generation="G4", num_cu=8) as double:
        shape = {name: change[name] for name in change if name == "head_dim"}
        pa_decode(**valid_call(double, kv="bf16"))  # positive control
        call = valid_call(double, kv="bf16", **shape) | {name: change[name] for name in change.keys() - shape.keys()}
        with pytest.raises(error, match=message):
            pa_decode(**call)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_g4_refuses_bf16_elsewhere_behind_the_shapes_of_caches(arch):
    with aiter_double(arch=arch, generation="G4", num_cu=8) as double:
        pa_decode(**valid_call(double))  # positive control
        call = valid_call(double, kv="bf16")
        with pytest.raises(NotImplementedError, match="compute_type must be .*float8"):
            pa_decode(**call)
        with pytest.raises(ValueError, match="block_size"):
            pa_decode(**call | {"key_cache": call["key_cache"].repeat(1, 1, 1, 2, 1)})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sinks": torch.zeros(2)}, NotImplementedError, "sinks"),
        ({"sliding_window": 5}, NotImplementedError, "sliding windows"),
        ({"sliding_window": -2}, NotImplementedError, "sliding windows"),
        ({"sliding_window": 1.5}, NotImplementedError, "sliding windows"),
        ({"ps": 1}, TypeError, "ps must be a bool"),
        ({"ps": False}, NotImplementedError, "ps=False"),
        ({"query_length": 0}, ValueError, "query_length"),
        ({"max_context_partition_num": 257}, ValueError, r"\[1, 256\]"),
    ],
    ids=str,
)
def test_the_first_text_refuses_sinks_windows_and_other_partitionings(change, error, message):
    with aiter_double(generation="G0", num_cu=8) as double:
        call = valid_call(double)
        for window in (0, -1):
            pa_decode(**call | {"sliding_window": window, "ps": True})
        assert_right(call)
        with pytest.raises(error, match=message):
            pa_decode(**call | change)


def test_the_first_text_says_what_it_does_not_do_in_this_order():
    spoiled = {"sinks": torch.zeros(2), "sliding_window": 5, "ps": None, "query_length": 0}
    with aiter_double(generation="G0", num_cu=8) as double:
        call = valid_call(double) | {"work_plan": plan_of(torch.ones(1, dtype=torch.int32))}
        for name, message in zip(list(spoiled), ("sinks", "windows", "ps must", "query_length must"), strict=True):
            with pytest.raises((NotImplementedError, TypeError, ValueError), match=message):
                pa_decode(**call | spoiled)
            del spoiled[name]
