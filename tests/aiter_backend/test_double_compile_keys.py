"""What the double counts as a new kernel."""

from __future__ import annotations

import pytest
import torch

from planlife.testing.aiter_double import aiter_double

from .double_call import INT32, copy_of, num_compiled, pa_decode, plan_of, valid_call


def test_reducers_are_forgotten_beyond_256_and_tiles_are_not():
    with aiter_double(num_cu=512) as double:
        call = valid_call(double, (17,), max_partitions=1)
        calls = [call | {"work_plan": copy_of(call["work_plan"], max_partitions=1 + at)} for at in range(257)]
        for one in calls[:256]:
            pa_decode(**one)
        pa_decode(**calls[0])  # and is now the one that was asked for last
        assert num_compiled(double, "reduce") == 256
        pa_decode(**calls[256])
        tiles = num_compiled(double, "tile")
        for at, num_reducers in ((0, 257), (1, 258)):
            pa_decode(**calls[at])
            assert (num_compiled(double, "reduce"), num_compiled(double, "tile")) == (num_reducers, tiles)


def test_the_planner_is_compiled_per_batch_capacity_cap_and_window():
    for generation, by_alignment in (("G2", 2), ("G3", 1)):
        with aiter_double(generation=generation, num_cu=8) as double:
            buffer = torch.zeros(16, dtype=INT32)
            plan = plan_of(buffer[:4])
            for query_length in (1, 2, 4):  # a dense plan does not know it
                plan_of(buffer[4:8], plan=plan, query_length=query_length)
            assert double.compiles == 1
            plan_of(buffer[1:5], plan=plan)
            assert double.compiles == by_alignment
            before = double.compiles
            for options in ({"max_partitions": 3}, {"workgroup_budget": 9}, {"sliding_window": 5}):
                plan_of(buffer[:4], **options)
            plan_of(buffer[:4], sliding_window=5, query_length=2)
            plan_of(buffer[:5])
            assert double.compiles == before + 5


def test_an_fp8_and_a_bf16_cache_have_tiles_of_their_own(double):
    for kv in ("fp8", "bf16"):
        pa_decode(**valid_call(double, kv=kv))
    assert num_compiled(double, "tile") == 2


def test_the_tile_is_compiled_per_shape_and_not_per_batch(double):
    for lens in ((300,), (300, 17), (300, 17, 2)):
        pa_decode(**valid_call(double, lens))
    assert num_compiled(double, "tile") == 1
    for options in ({"max_partitions": 3}, {"query_length": 2}, {"page": 64}, {"group": 4}, {"scales": "per_token"}):
        before = num_compiled(double, "tile")
        pa_decode(**valid_call(double, **options))
        assert num_compiled(double, "tile") == before + 1, options


def test_crossing_a_threshold_of_the_schedule_compiles_another_tile():
    shape = {"head_dim": 128, "page": 128, "scales": "per_token", "group": 16, "columns": 20}
    with aiter_double(arch="gfx950", num_cu=8) as double:
        # Four queries: split while 4 x rows x tiles of the bound fit twice the compute units.
        for bound, expected in ((256, 1), (1024, 1), (1025, 2), (2560, 2)):
            pa_decode(**valid_call(double, (200,), query_length=4, **shape), max_context_length=bound)
            assert num_compiled(double, "tile") == expected, bound
    with aiter_double(arch="gfx950", num_cu=8) as double:
        # One query: another page loop where rows x cap is above the compute units.
        for rows, expected in ((1, 1), (2, 1), (3, 2), (4, 2)):
            pa_decode(**valid_call(double, (200,) * rows, max_partitions=4, **shape))
            assert num_compiled(double, "tile") == expected, rows
    with aiter_double(arch="gfx942", num_cu=8) as double:
        for rows in (1, 2, 3, 4):
            pa_decode(**valid_call(double, (200,) * rows, max_partitions=4, **shape))
        assert num_compiled(double, "tile") == 1


def test_gfx1250_compiles_a_tile_whatever_the_cap():
    with aiter_double(arch="gfx1250", num_cu=8) as double:
        for cap in (1, 3, None):
            pa_decode(**valid_call(double, max_partitions=cap))
        assert num_compiled(double, "tile") == 1


def test_the_reducer_is_compiled_per_partitions_sinks_and_compactness():
    with aiter_double(num_cu=256) as double:
        for rows in (1, 15, 16, 32):  # 512 slots are compact from 16 rows
            pa_decode(**valid_call(double, (17,) * rows, head_dim=128))
            assert num_compiled(double, "reduce") == (1 if rows < 16 else 2)
        call = valid_call(double, (17,), head_dim=128)
        for dtype in (torch.float32, torch.bfloat16):
            pa_decode(**call, sinks=torch.zeros(2, dtype=dtype))
        assert num_compiled(double, "reduce") == 4


@pytest.mark.parametrize(
    ("dimension", "stride", "is_another"),
    [(0, 7, True), (0, 2**31, True), (0, 2**31 - 2, False), (1, 8, True), (0, 6, False)],
)
def test_the_reducer_is_compiled_for_the_strides_of_scratch_even_where_a_size_is_1(dimension, stride, is_another):
    with aiter_double(num_cu=256) as double:
        call = valid_call(double, (17,), head_dim=128, max_partitions=1)
        pa_decode(**call)
        partials = call["temporary_output"]
        strides = list(partials.stride())
        assert partials.shape[dimension] == 1
        assert strides[dimension] != stride
        strides[dimension] = stride
        before = double.compiles
        call["temporary_output"] = partials.as_strided(partials.shape, strides)
        assert call["temporary_output"].is_contiguous()
        pa_decode(**call)
        assert double.compiles == before + is_another


def test_the_reducer_is_compiled_for_scratch_that_starts_on_four_bytes():
    with aiter_double(num_cu=256) as double:
        call = valid_call(double, (17,), head_dim=128, max_partitions=64)
        shape, num_items = call["temporary_output"].shape, call["temporary_output"].numel()
        buffer = torch.zeros(num_items + 4, dtype=torch.bfloat16)
        for offset, expected in ((0, 1), (2, 1), (4, 1), (1, 2), (3, 2)):
            pa_decode(**call | {"temporary_output": buffer[offset : offset + num_items].view(shape)})
            assert num_compiled(double, "reduce") == expected, offset
