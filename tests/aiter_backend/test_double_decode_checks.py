"""What the double's pa_decode refuses before it launches, in the library's order, and what it takes."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from planlife.testing.aiter_double import aiter_double
from planlife.testing.aiter_double.host_checks import check_decode

from .double_call import assert_right, fp8_of, num_compiled, pa_decode, plan_of, valid_call
from .refused_calls import DECODE_FAULTS, is_another_call

ALL_DECODE_ARGUMENTS = dict.fromkeys(("query_scale", "alibi_slopes", "sinks")) | {"context_partition_size": 256}

FAULT_IDS = [f"{row} {message}" for row, _, _, message in DECODE_FAULTS]


@pytest.mark.parametrize(("row", "spoil", "error", "message"), DECODE_FAULTS, ids=FAULT_IDS)
def test_decode_refuses_what_the_library_refuses(double, row, spoil, error, message):
    call = valid_call(double)
    with pytest.raises(error, match=message) as caught:
        pa_decode(**{**call, **spoil(call)})
    assert type(caught.value) is error
    assert call["output"].isnan().all()
    assert (num_compiled(double, "tile") > 0) == (row >= 41)  # the scratch is looked at after the compile
    pa_decode(**call)  # the control: nothing else is wrong with this call
    assert not call["output"].isnan().any()


def test_every_row_of_the_contract_that_can_be_reached_on_this_machine_is_in_the_table():
    elsewhere = {15, 20, 28, 40, 42}  # of other machines and caches: tests below; 42 cannot be reached after 37
    assert {row for row, *_ in DECODE_FAULTS} | elsewhere == set(range(1, 43))


def test_of_several_faults_decode_names_the_first(double):
    call = valid_call(double)
    checked = 0
    for at, (_, first, error, message) in enumerate(DECODE_FAULTS):
        earlier = first(call)
        for _, second, _, _ in DECODE_FAULTS[at + 1 :]:
            later = second(call)
            if earlier.keys() & later.keys() or is_another_call(earlier) or is_another_call(later):
                continue
            with pytest.raises(error, match=message):
                pa_decode(**{**call, **later, **earlier})
            checked += 1
    assert checked > 1500


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100", "gfx90a:sramecc+:xnack-"])
def test_other_architectures_are_refused_with_rows_before_them_first(arch):
    with aiter_double(arch=arch, num_cu=8) as double:
        call = valid_call(double)
        with pytest.raises(NotImplementedError, match="does not support"):
            pa_decode(**call)
        with pytest.raises(ValueError, match="output shape"):
            pa_decode(**call | {"output": call["output"][:, :1]})


@pytest.mark.parametrize("native_bf16", [True, False])
def test_decode_takes_what_is_just_inside_its_limits(native_bf16):
    with aiter_double(arch="gfx950", num_cu=8, native_bf16=native_bf16) as double:
        for shape in ({"group": 1}, {"head_dim": 1024}, {"lens": (0,), "columns": 1}, {"query_length": 2}):
            call = valid_call(double, **shape)
            pa_decode(**call, max_context_length=int(call["context_lengths"].max()))
            pa_decode(**call, max_context_length=16 * call["block_tables"].shape[1])
            # A dense plan does not know the query length.
            pa_decode(**call | {"work_plan": plan_of(call["context_lengths"], query_length=9)})


def test_scales_per_token_may_end_in_a_dimension_of_1(double):
    call = valid_call(double, scales="per_token")
    pa_decode(**call | {name: call[name][..., None] for name in ("key_scale", "value_scale")})
    assert_right(call)
    two = torch.ones(1, 1, 2)
    with pytest.raises(ValueError, match="blocks, kv, page"):
        pa_decode(**call | {"key_scale": two, "value_scale": two})


def test_head_dims_of_bf16_caches_are_multiples_of_64(double):
    call = valid_call(double, kv="bf16")
    with pytest.raises(NotImplementedError, match="head_dim=96"):
        pa_decode(**call | {name: call[name].repeat(1, 1, 2)[..., :96] for name in ("query", "output")})


@pytest.mark.parametrize("native_bf16", [True, False])
def test_features_of_an_architecture_do_not_matter(native_bf16):
    with aiter_double(arch="gfx950:sramecc+:xnack-", num_cu=8, native_bf16=native_bf16) as double:
        pa_decode(**valid_call(double))
        assert importlib.import_module("aiter.jit.utils.chip_info").get_gfx_runtime() == "gfx950"
        assert {key[1] for key in double.compiled if key[0] != "plan"} == {"gfx950"}


def test_bf16_caches_are_taken_as_the_library_takes_them(double):
    call = valid_call(double, kv="bf16", head_dim=192)
    pa_decode(**call)
    for change, error, message in (
        ({"value_cache": call["value_cache"].permute(0, 1, 3, 2, 4).flatten(3)}, ValueError, "5-D value_cache"),
        ({"query": call["query"].half(), "output": call["output"].half()}, NotImplementedError, "bfloat16 queries"),
        ({"key_scale": torch.ones(1)}, ValueError, "takes no key or value scale"),
        ({"compute_type": fp8_of(double)}, NotImplementedError, "compute_type"),
    ):
        with pytest.raises(error, match=message):
            pa_decode(**call | change)


@pytest.mark.parametrize("settings", [{"native_bf16": False}, {"arch": "gfx1250"}, {"generation": "G1c"}], ids=str)
def test_texts_without_bf16_caches_look_at_the_architecture_after_the_shapes(settings):
    with aiter_double(**{"num_cu": 8, **settings}) as double:
        pa_decode(**valid_call(double))
        with pytest.raises(ValueError, match="key_cache must be"):
            pa_decode(**valid_call(double, kv="bf16"))
        call = valid_call(double)
        with pytest.raises(NotImplementedError, match="head_dim"):
            narrow = {name: call[name][..., :32] for name in ("query", "output")}
            pa_decode(**call | {"compute_type": torch.bfloat16} | narrow)
        with pytest.raises(NotImplementedError, match="compute_type"):
            pa_decode(**call | {"compute_type": torch.bfloat16})


def test_texts_without_bf16_caches_refuse_bf16_in_whatever_shape():
    with aiter_double(arch="gfx950", num_cu=8, native_bf16=False) as double:
        call = valid_call(double, scales="per_tensor")
        bf16 = {name: call[name].to(torch.bfloat16) for name in ("key_cache", "value_cache")}
        with pytest.raises(NotImplementedError, match="compute_type"):
            pa_decode(**call | bf16 | {"compute_type": torch.bfloat16})
        with pytest.raises(TypeError, match="key_cache must be"):
            pa_decode(**call | bf16)


def test_gfx1250_came_with_mandatory_plans():
    with aiter_double(arch="gfx1250", num_cu=8, generation="G1d") as double:
        with pytest.raises(NotImplementedError, match="does not support gfx1250"):
            pa_decode(**valid_call(double))


def test_the_larger_cache_decides_about_wide_addresses():
    with aiter_double(num_cu=8, device_type="meta") as double:
        for kv, num_pages, is_wide in (
            *(("fp8", 2**21, True), ("fp8", 2**21 - 1, False)),  # of 1024 bytes
            *(("bf16", 2**20, True), ("bf16", 2**20 - 1, False)),
        ):
            call = valid_call(double, (17,), kv=kv, device="meta")
            for name, pages in (("key_cache", num_pages), ("value_cache", 1)):
                shape = (pages, *call[name].shape[1:])
                call[name] = torch.empty(shape, dtype=call[name].dtype, device="meta")
            checked = check_decode(double.library, SimpleNamespace(**ALL_DECODE_ARGUMENTS | call), double.plan_class)
            assert (checked.shape.cache_bytes >= 2**31) is is_wide


def test_gfx1250_refuses_a_query_that_its_lds_does_not_hold():
    with aiter_double(arch="gfx1250", num_cu=8) as double:
        wide = {"head_dim": 1024, "page": 64, "lens": (300,), "group": 16}
        pa_decode(**valid_call(double, query_length=10, **wide))
        with pytest.raises(NotImplementedError, match="LDS"):
            pa_decode(**valid_call(double, query_length=11, **wide))


def test_a_plan_of_another_installation_is_no_plan(double):
    call = valid_call(double)
    with aiter_double(num_cu=8):
        with pytest.raises(TypeError, match="work_plan must be a PADecodePlan"):
            pa_decode(**call)


@pytest.mark.parametrize(
    ("generation", "change", "message"),
    [
        ("G1a", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1b", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1b", {"ps": False}, "ps=False"),
        ("G1b", {"ps": 1}, "ps must be a bool"),
        ("G1c", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1d", {"max_context_partition_num": 3}, "must match work_plan.max_partitions"),
        ("G1c", {"work_plan": object()}, "must be a PADecodePlan"),
        # Only one text looks at the plan before everything else.
        *(
            (generation, {"work_plan": object(), "query": None}, "query must be")
            for generation in ("G1a", "G1c", "G1d")
        ),
        ("G1b", {"work_plan": object(), "query": None}, "must be a PADecodePlan"),
        ("G1c", {"max_context_partition_num": 3, "query": None}, "query must be"),
        ("G1d", {"max_context_partition_num": 3, "query": None}, "query must be"),
        ("G1b", {"max_context_partition_num": 3, "query": None}, "must match work_plan.max_partitions"),
        ("G1c", {"work_plan": None, "sliding_window": 5}, "requires work_plan"),
        *(
            ("G1c", {"work_plan": None, "max_context_partition_num": number}, "in .1, 256.")
            for number in (257, 0, 1.0, None)
        ),
        *(("G1c", {"work_plan": None, "max_context_partition_num": number}, "no static path") for number in (1, 256)),
    ],
)
def test_earlier_generations_check_partitions_and_plan_in_their_own_way(generation, change, message):
    with aiter_double(generation=generation, num_cu=8) as double:
        call = valid_call(double)
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
            pa_decode(**call | change)
        pa_decode(**call)
