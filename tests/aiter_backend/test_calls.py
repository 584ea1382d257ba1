"""What the wrapper passes to aiter, and what comes out: exact shapes, one constant bound, scales on the device."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, RouteError, Step
from planlife.backends import aiter_limits
from planlife.backends.aiter_backend import AiterBackend
from planlife.backends.aiter_limits import WIDE_CACHE_BYTES
from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.fakes import FakeDevice
from tests.aiter_backend.packed_world import PackedWorld
from tests.aiter_backend.recording_aiter import RecordingAiter

BF16 = PlanSpec(8, 2, 64, 16, max_context_tokens=600, kv_layout="packed", workgroup_budget=24)
FP8 = replace(BF16, kv_dtype="float8_e4m3fnuz", scales="per_tensor")
LENS = [300, 0, 17]


@pytest.fixture
def aiter():
    fake = RecordingAiter()
    yield fake
    fake.plans.clear()  # what it remembers keeps buffers
    fake.decodes.clear()


@pytest.fixture
def make_world(aiter):
    def make(spec: PlanSpec = BF16, **options: Any) -> PackedWorld:
        names = ("softmax_scales", "max_plan_rows")
        of_backend = {name: options.pop(name) for name in names if name in options}
        backend = AiterBackend(library=aiter.library(), architecture_of=lambda device: "gfx942", **of_backend)
        return PackedWorld(spec, backend, **options)

    return make


# Real consumers' sites, small in what only costs time.
MINIMAX_DENSE = PlanSpec(8, 1, 128, 16, max_context_tokens=600, kv_layout="packed")
QWEN = replace(FP8, num_q_heads=16, query_length=6, scales="per_token", page_size=64)


@pytest.mark.parametrize(
    ("spec", "plain_values"),
    [
        (BF16, False),
        (FP8, False),
        (FP8, True),
        (replace(FP8, scales="per_token", q_dtype="float16"), False),
        (replace(BF16, query_length=3, sliding_window=130), False),
        (MINIMAX_DENSE, False),
        (replace(MINIMAX_DENSE, max_partitions=8), False),
        (QWEN, False),
    ],
    ids=["bf16", "fp8", "plain V", "per token", "window", "MiniMax dense", "MiniMax sparse", "Qwen MTP-5"],
)
def test_a_step_is_decoded_as_the_reference_decodes_it(make_world, aiter, spec, plain_values):
    world = make_world(spec, plain_values=plain_values)
    plan = world.plan(LENS)
    world.assert_right(world.decode(plan))
    world.assert_right(world.decode(plan, rows=4))  # padded to the class
    sinks = torch.randn(spec.num_q_heads)
    world.assert_right(world.decode(plan, sinks=sinks), sinks=sinks)
    assert aiter.decodes[-1]["compute_type"] is getattr(torch, spec.kv_dtype)  # aiter's default is bfloat16


def test_every_row_count_up_to_the_class_is_decoded_through_a_view_without_a_copy(make_world, aiter):
    world = make_world(rows=8, ladder=CapacityLadder([8]))
    for rows in range(1, 9):
        plan = world.plan([290] * rows)
        for query_rows in range(rows, 9):
            world.assert_right(world.decode(plan, rows=query_rows))
            given = aiter.decodes[-1]
            view, whole = given["work_plan"], plan.native
            assert view.reduce_info.shape[0] == given["context_lengths"].shape[0] == query_rows
            assert view.work_info.data_ptr() == whole.work_info.data_ptr()
            assert view.reduce_info.data_ptr() == whole.reduce_info.data_ptr()
            assert given["query"].data_ptr() == world.query.data_ptr()


def test_a_padded_query_with_tables_of_the_real_rows_gives_zeros_behind_them(make_world, aiter):
    world = make_world()
    output = world.decode(world.plan(LENS), rows=4, table_rows=3)
    world.assert_right(output)
    assert output[3:].eq(0).all() and aiter.decodes[-1]["query"].shape[0] == 3
    world.assert_right(world.decode(world.plan(LENS), table_rows=4))  # more tables than rows


def test_lengths_are_staged_for_the_whole_class_with_a_zeroed_tail_also_in_a_graph(make_world, aiter):
    world = make_world()
    world.plan([300, 301, 302, 303])
    world.set_lens(LENS)
    step = Step(world.lens[:3])
    with world.manager.graph() as graph:
        plan = world.manager.plan_for(step)
        world.decode(plan)
    plan.native.staged_lens.fill_(99)
    staged = aiter.plans[-1]["context_lengths"]
    assert staged.shape == (4,) and staged.data_ptr() == plan.native.staged_lens.data_ptr()
    world.lens[:3] = torch.tensor([5, 7, 9999], dtype=torch.int32)
    world.manager.replay(graph, step)
    assert plan.native.staged_lens.tolist() == [5, 7, 600, 0]
    world.manager.release(graph)


def test_refreshes_reuse_one_plan_object_and_name_every_number(make_world, aiter):
    world = make_world(replace(BF16, query_length=2, sliding_window=200, max_partitions=5))
    first = world.plan(LENS)
    world.plan([1, 2, 3])
    last, before = aiter.plans[-1], aiter.plans[-2]
    assert last["plan"] is before["plan"] is first.native.plan
    numbers = {name: last[name] for name in ("max_partitions", "sliding_window", "query_length", "workgroup_budget")}
    assert numbers == {"max_partitions": 5, "sliding_window": 200, "query_length": 2, "workgroup_budget": None}


def test_the_bound_on_lengths_is_the_sites_and_not_the_steps(make_world, aiter):
    world = make_world()
    bounds = set()
    for lens in (LENS, [1], [600] * 4):
        world.decode(world.plan(lens))
        bounds.add((type(aiter.decodes[-1]["max_context_length"]), aiter.decodes[-1]["max_context_length"]))
    assert bounds == {(int, 600)}
    world.tables = world.tables[:, :2].contiguous()  # aiter refuses a bound that the tables have no columns for
    world.lens.zero_()
    world.decode(world.manager.plan_for(Step(world.lens[:1])))
    assert aiter.decodes[-1]["max_context_length"] == 32


@pytest.mark.parametrize("max_plan_rows", [4096, 5])
def test_warm_runs_every_row_count_that_a_class_can_have_so_that_no_call_is_the_first_of_its_kind(
    make_world, aiter, max_plan_rows
):
    """Also those of segments, and of the rest of more rows than the ladder has."""
    spec = replace(FP8, workgroup_budget=1)  # so that the capacity, and with it what is compiled, is each class's own
    world = make_world(spec, rows=18, ladder=CapacityLadder([2, 7, 9]), max_plan_rows=max_plan_rows)

    def kind(call: dict[str, Any]) -> tuple[Any, ...]:
        sinks = call["sinks"]
        return (
            call["query"].shape[0],
            call["work_plan"].capacity,
            call["softmax_scale"],
            call["max_context_length"],
            call["value_cache"].dim(),
            sum(call["key_cache"].nbytes >= size for size in WIDE_CACHE_BYTES),
            None if sinks is None else sinks.dtype,
        )

    of_all_sizes = {kind(call) for call in aiter.decodes}
    assert len(of_all_sizes) == len(aiter.decodes)  # and none twice
    warmed = {one for one in of_all_sizes if not one[-2]}  # caches of this world are small
    without_sinks = sum(one[-1] is None for one in warmed)
    assert len(warmed) + without_sinks * len(WIDE_CACHE_BYTES) == len(of_all_sizes)
    aiter.decodes.clear()
    found = set()
    for rows in range(1, 19):
        plan = world.plan([30] * rows)
        for query_rows in range(rows, max(plan.class_rows, rows) + 1):
            for sinks in (None, torch.zeros(8), torch.zeros(8).bfloat16(), torch.zeros(8).half()):
                world.decode(plan, rows=query_rows, sinks=sinks)
        found |= {kind(call) for call in aiter.decodes}
        aiter.decodes.clear()
    assert found <= warmed
    counts = {(rows, capacity) for rows, capacity, *_ in found}
    assert counts == {(rows, capacity) for rows, capacity, *_ in warmed}  # and none that no call can have
    if max_plan_rows == 4096:  # only the top class has all counts
        assert counts == {(rows, 2) for rows in (1, 2)} | {(rows, 7) for rows in range(3, 8)} | {
            (rows, 9) for rows in range(1, 10)
        }


def test_a_class_is_run_once_for_each_site_and_device_that_share_a_backend(aiter):
    backend = AiterBackend(library=aiter.library(), architecture_of=lambda device: "gfx942")

    def head_dims_run(spec: PlanSpec, device: str) -> set[int]:
        aiter.decodes.clear()
        backend.compile(spec, 4, SimpleNamespace(name=device, num_compute_units=8))
        return {call["query"].shape[2] for call in aiter.decodes}

    sites = [(BF16, "cpu"), (replace(BF16, head_dim=128), "cpu"), (BF16, "cpu:0")]
    assert [head_dims_run(*site) for site in sites] == [{64}, {128}, {64}]
    assert [head_dims_run(*site) for site in sites] == [set()] * 3


def test_a_softmax_scale_that_was_not_compiled_is_refused_and_one_that_float32_cannot_tell_is_passed_as_compiled(
    make_world, aiter
):
    world = make_world(softmax_scales=[0.3])
    plan = world.plan(LENS)
    world.decode(plan, softmax_scale=0.3 * (1 + 1e-12))
    assert aiter.decodes[-1]["softmax_scale"] == 0.3
    num_calls = len(aiter.decodes)
    with pytest.raises(ConfigError, match=r"softmax_scale is 0.125.*compiled for 0.3. Pass PlanSpec.*AiterBackend"):
        world.decode(plan, softmax_scale=0.125)
    assert len(aiter.decodes) == num_calls and world.output.isnan().all()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_host_scales_reach_aiter_as_tensors_in_the_order_of_the_layers(make_world, aiter, is_recorded):
    world = make_world(FP8)
    world.set_lens(LENS)
    step = Step(world.lens[:3])
    plan = world.manager.plan_for(step)
    layers = [(0.5, 2), (3.0, 0.25), (torch.tensor([0.75]), 1.5), (1.25, torch.tensor([2.5]))]
    outputs = [torch.full_like(world.output[:3], torch.nan) for _ in layers]

    def run(plan: Any) -> None:
        for output, (key_scale, value_scale) in zip(outputs, layers, strict=True):
            world.decode(plan, key_scale=key_scale, value_scale=value_scale)
            output.copy_(world.output[:3])
            assert all(isinstance(aiter.decodes[-1][name], torch.Tensor) for name in ("key_scale", "value_scale"))

    if is_recorded:
        with world.manager.graph() as graph:
            run(plan)
        world.manager.replay(graph, step)
        world.manager.release(graph)
    else:
        run(plan)
    for output, (key_scale, value_scale) in zip(outputs, layers, strict=True):
        world.assert_right(output, key_scale=key_scale, value_scale=value_scale)


def test_scales_that_are_tensors_are_passed_as_they_are(make_world, aiter):
    world = make_world(FP8)
    plan = world.plan(LENS)
    world.decode(plan)
    assert aiter.decodes[-1]["key_scale"] is world.scales["key_scale"]
    layer = {name: torch.nn.Parameter(scale, requires_grad=False) for name, scale in world.scales.items()}
    world.assert_right(world.decode(plan, **layer))  # a subclass of torch.Tensor
    assert all(aiter.decodes[-1][name] is scale for name, scale in layer.items())
    for number in (3, 0.5):  # of which the tensor has the second
        mixed = {"key_scale": world.scales["key_scale"], "value_scale": number}
        world.assert_right(world.decode(plan, **mixed), **mixed)
        assert aiter.decodes[-1]["key_scale"] is world.scales["key_scale"]
        assert aiter.decodes[-1]["value_scale"].dtype is torch.float32


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_a_scale_that_float32_does_not_hold_is_refused_before_anything_is_written(make_world, aiter, name):
    """As a word on the device it would be inf, or 0."""
    world = make_world(FP8)
    plan = world.plan(LENS)
    words = plan.native.key_word, plan.native.value_word
    for word in words:
        word.fill_(7)
    num_calls = len(aiter.decodes)
    for number in (1e39, 10**40, 1e-46):
        with pytest.raises(ConfigError, match=rf"{name} is {re.escape(str(number))}, and .* float32, .* not finite"):
            world.decode(plan, **{"key_scale": 0.5, "value_scale": 0.5, name: number})
    assert len(aiter.decodes) == num_calls and [word.item() for word in words] == [7, 7]
    for number in (1e-37, 3.4e38, np.float32(3)):  # positive control
        world.decode(plan, **{"key_scale": 0.5, "value_scale": 0.5, name: number})
        assert aiter.decodes[-1][name].item() == np.float32(number)


def test_numbers_that_are_equal_are_written_once(make_world, aiter):
    world = make_world(FP8)
    plan = world.plan(LENS)
    for key_scale, value_scale, num_words in ((1.5, 1.5, 1), (1.5, 2.5, 2), (2.5, 2.5, 1)):
        world.assert_right(
            world.decode(plan, key_scale=key_scale, value_scale=value_scale),
            key_scale=key_scale,
            value_scale=value_scale,
        )
        assert len({aiter.decodes[-1][name].data_ptr() for name in ("key_scale", "value_scale")}) == num_words


@pytest.mark.parametrize(
    "as_given", [float, np.float64, np.float32, type("Scale", (float,), {}), Fraction], ids=lambda kind: kind.__name__
)
def test_a_scale_of_any_kind_of_number_is_passed_as_the_float_that_was_compiled(make_world, aiter, as_given):
    scale = 256**-0.5
    world = make_world(softmax_scales=[as_given(scale), 1])
    plan = world.plan(LENS)
    for given, compiled in ((as_given(scale), scale), (1, 1.0), (np.float32(1), 1.0)):
        world.decode(plan, softmax_scale=given)
        assert (type(aiter.decodes[-1]["softmax_scale"]), aiter.decodes[-1]["softmax_scale"]) == (float, compiled)


def test_aiters_own_refusal_of_a_call_is_told_and_nothing_else_is_caught(make_world, aiter):
    world = make_world()
    plan = world.plan(LENS)
    aiter.refusal = ValueError("key_cache must be contiguous")
    refusal = "aiter's pa_decode refuses this call: key_cache must be contiguous.*or give the manager backend='triton'"
    with pytest.raises(ConfigError, match=refusal):
        world.decode(plan)
    aiter.refusal = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        world.decode(plan)
    aiter.refusal = None
    world.assert_right(world.decode(plan))


@pytest.mark.parametrize(("arch", "generation"), [("gfx942", "G3"), ("gfx950", "G2"), ("gfx1250", "G4")])
def test_an_output_may_have_any_strides_and_a_query_only_where_it_is_not_read_by_words(arch, generation):
    spec = replace(BF16, num_kv_heads=1, head_dim=128)
    with aiter_machine(arch, generation=generation) as double:
        world = PackedWorld(spec, AiterBackend())
        plan, expected = world.plan([300, 0, 17, 40]), world.expected(4)
        right = {"rtol": 2e-2, "atol": 2e-3}
        world.output = torch.zeros(4 * (8 * 129 + 3) + 1, dtype=torch.bfloat16)[1:].as_strided(
            (4, 8, 128), (1035, 129, 1)
        )
        torch.testing.assert_close(world.decode(plan), expected, **right)
        whole = world.query
        room = torch.zeros(4 * 1035 + 1, dtype=torch.bfloat16)
        odd_strides = room[:-1].as_strided(whole.shape, (1035, 129, 1))
        odd_start = torch.zeros(whole.numel() + 1, dtype=torch.bfloat16)[1:].view(whole.shape)
        for view, said in ((odd_strides, r"strides are \[1035, 129, 1\]"), (odd_start, "starts between two 4-byte")):
            world.query, decodes = view.copy_(whole), double.decodes
            if arch == "gfx1250":
                torch.testing.assert_close(world.decode(plan), expected, **right)
            else:
                with pytest.raises(ConfigError, match=said):
                    world.decode(plan)
                assert double.decodes == decodes and world.output.isnan().all()
        world.query = torch.zeros(4, 8, 130, dtype=torch.bfloat16)[..., :128].copy_(whole)  # positive control
        torch.testing.assert_close(world.decode(plan), expected, **right)
        world.manager.close()


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
def test_on_gfx1250_a_plain_v_of_small_pages_is_refused_for_float16_queries(q_dtype):
    """A page fault is reported there, which would end the process."""
    spec = replace(FP8, kv_dtype="float8_e4m3fn", q_dtype=q_dtype, head_dim=128)
    with aiter_machine("gfx1250", generation="G4") as double:
        world = PackedWorld(spec, AiterBackend(), plain_values=True)
        plan, decodes, violations = world.plan(LENS), double.decodes, double.violations
        if q_dtype == "float16":
            with pytest.raises(ConfigError, match="value_cache is 4-D: .* page fault .*or give the manager backend="):
                world.decode(plan)
            assert double.decodes == decodes and world.output.isnan().all() and not violations
            world.value_cache = world.value_cache.unflatten(3, (1, 16)).permute(0, 1, 3, 2, 4).contiguous()
        world.assert_right(world.decode(plan))
        world.manager.close()


@pytest.mark.parametrize("what", ["query", "output"])
@pytest.mark.parametrize(
    ("heads", "rows", "strides"), [(8, 1, (1025, 128, 1)), (8, 1, (1041, 130, 1)), (1, 3, (128, 131, 1))], ids=str
)
def test_strides_that_are_never_taken_may_be_odd(heads, rows, strides, what):
    """Of a single row, or of a single head: neither wrapper nor library has anything against them."""
    spec = replace(BF16, num_q_heads=heads, num_kv_heads=1, head_dim=128)
    with aiter_machine("gfx942") as double:
        world = PackedWorld(spec, AiterBackend())
        view = torch.zeros(5000, dtype=torch.bfloat16).as_strided((rows, heads, 128), strides)
        plan, num_calls = world.plan([30] * rows), double.decodes
        expected = world.expected(rows)
        setattr(world, what, view.copy_(world.query[:rows]) if what == "query" else view)
        torch.testing.assert_close(world.decode(plan), expected, rtol=2e-2, atol=2e-3)
        assert double.decodes == num_calls + 1
        world.manager.close()


@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
def test_sinks_of_every_dtype_are_compiled_ahead(q_dtype):
    """aiter's reducer is compiled for the dtype of the sinks, and takes the other 16-bit one too."""
    with aiter_machine("gfx942") as double:
        world = PackedWorld(replace(FP8, q_dtype=q_dtype), AiterBackend())
        plan, compiles = world.plan(LENS), double.compiles
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            sinks = torch.randn(8).to(dtype)
            world.assert_right(world.decode(plan, sinks=sinks), sinks=sinks)
        assert double.compiles == compiles
        world.manager.close()


def test_lse_is_refused_by_name_before_anything_is_launched(make_world, aiter):
    world = make_world()
    plan = world.plan(LENS)
    num_calls = len(aiter.decodes)
    with pytest.raises(RouteError, match="gives no log-sum-exps, and this call asks for lse.*backend='triton'"):
        world.decode(plan, lse=torch.zeros(3, 8))
    assert len(aiter.decodes) == num_calls and world.output.isnan().all()


def test_a_class_that_aiters_reducer_cannot_index_is_refused_when_it_is_minted_and_served_in_segments(
    make_world, monkeypatch
):
    """R47, with a small limit, below the stride of a KV head: 12 slots x 4 query rows x head_dim 64."""
    monkeypatch.setattr(aiter_limits, "INT32_MAX", 12 * 4 * 64 - 1)
    said = r"a class of 4 rows .* 32 bits, and 2 KV heads x 12 slots x 4 query rows x head_dim 64 .*max_plan_rows=3"
    with pytest.raises(ConfigError, match=said):
        make_world(replace(BF16, max_partitions=3, workgroup_budget=64))
    world = make_world(replace(BF16, max_partitions=3, workgroup_budget=64), max_plan_rows=3)
    world.assert_right(world.decode(world.plan([300, 0, 17, 40])))


#: A site, a class, and the largest class that its reducer can index.
REDUCED = [
    (PlanSpec(1024, 128, 128, 16, max_context_tokens=64, kv_layout="packed", max_partitions=256), 2048, 4096),
    (
        PlanSpec(
            16, 1, 256, 16, max_context_tokens=64, kv_layout="packed", query_length=4, max_partitions=256,
            workgroup_budget=140_000, kv_dtype="float8_e4m3fnuz", scales="per_tensor",
        ),
        1024,
        511,  # x 256 slots x 64 x 256 is just below 2**31
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "rows", "most"), REDUCED)
def test_a_class_is_refused_exactly_where_the_reducers_32_bits_end(spec, rows, most):
    """R47."""
    assert aiter_limits.most_reducer_rows(spec, 256) == most
    if rows <= most:
        aiter_limits.check_reducer(spec, rows, 256)
        return
    with pytest.raises(ConfigError, match=f"a class of {rows} rows is too large .*max_plan_rows={most}"):
        aiter_limits.check_reducer(spec, rows, 256)
    aiter_limits.check_reducer(spec, most, 256)
    with pytest.raises(ConfigError, match="too large"):
        aiter_limits.check_reducer(spec, most + 1, 256)
    # Up to 64 partitions it has 64-bit addresses, of which the stride of a head must fit 32.
    few = replace(spec, max_partitions=64)
    aiter_limits.check_reducer(few, 1024, 256)
    assert aiter_limits.most_reducer_rows(few, 256) == 2047
    # And so it has for a window of few tiles.
    more_heads = replace(spec, num_q_heads=64, num_kv_heads=4, workgroup_budget=160_000)
    assert aiter_limits.most_reducer_rows(more_heads, 256) == 128
    aiter_limits.check_reducer(replace(more_heads, sliding_window=4096), 1024, 256)
    # The output is indexed as a whole.
    wide = replace(few, num_q_heads=128 * 16, num_kv_heads=128, max_partitions=1, workgroup_budget=1, head_dim=1024)
    assert aiter_limits.most_reducer_rows(wide, 256) == 2**31 // (128 * 64 * 1024)


def test_a_sites_own_softmax_scale_is_compiled_and_another_one_names_both(make_world, aiter):
    spec = replace(BF16, softmax_scale=0.25)
    world = make_world(spec)
    plan = world.plan(LENS)
    assert {call["softmax_scale"] for call in aiter.decodes} == {0.25}
    world.decode(plan, softmax_scale=0.25)
    num_calls = len(aiter.decodes)
    said = r"softmax_scale is 0.125, .* compiled for 0.25\. Pass PlanSpec\(softmax_scale=0.125\)"
    with pytest.raises(ConfigError, match=said):
        world.decode(plan, softmax_scale=0.125)
    assert len(aiter.decodes) == num_calls and world.output.isnan().all()
    aiter.decodes.clear()
    both = make_world(spec, softmax_scales=[0.5])
    assert {call["softmax_scale"] for call in aiter.decodes} == {0.25, 0.5}
    both.decode(both.plan(LENS), softmax_scale=0.5)


def test_auto_serves_a_model_of_another_softmax_scale_by_aiter():
    spec = replace(BF16, softmax_scale=0.25)
    with aiter_machine("gfx942", device_type="meta", num_cu=304):
        with PlanManager(spec, ladder=CapacityLadder([1]), device=FakeDevice("meta", 304)) as manager:
            assert manager.report().backend == "aiter"
    with aiter_machine("gfx942") as double:
        world = PackedWorld(spec, AiterBackend())
        plan, compiles = world.plan(LENS), double.compiles
        world.decode(plan, softmax_scale=0.25)
        assert double.compiles == compiles and {key[6] for key in double.compiled if key[0] == "tile"} == {0.25}
        world.manager.close()


def test_a_call_without_scales_is_one_with_ones(make_world, aiter):
    world = make_world(FP8)
    plan = world.plan(LENS)
    ones = dict.fromkeys(("key_scale", "value_scale"), torch.ones(1))
    world.assert_right(world.decode(plan, key_scale=None, value_scale=None), **ones)
    assert [aiter.decodes[-1][name].tolist() for name in ones] == [[1.0], [1.0]]
    with pytest.raises(ConfigError, match="a per_token scale"):
        token = make_world(replace(FP8, scales="per_token"))
        token.decode(token.plan(LENS), key_scale=None, value_scale=None)


def test_rows_past_the_limit_of_a_plan_are_served_in_segments(make_world, aiter):
    """R23, with a small limit; aiter's own is the default."""
    assert AiterBackend(library=aiter.library()).max_plan_rows == 4096
    world = make_world(rows=5, ladder=CapacityLadder([5]), max_plan_rows=2)
    plan = world.plan([300, 0, 17, 256, 1])
    world.assert_right(world.decode(plan))
    assert [len(native.staged_lens) for native in plan.segments] == [2, 2, 1]
    padded = world.decode(world.plan([300, 17]), rows=5, table_rows=2)  # later segments have no block tables
    world.assert_right(padded)
    assert padded[2:].eq(0).all()
    assert all(call["context_lengths"].shape[0] for call in aiter.decodes)  # aiter plans no batch of 0


def test_scratch_has_aiters_shapes_inside_the_arena_and_no_two_parts_overlap(make_world, aiter):
    world = make_world(replace(BF16, num_q_heads=6, max_partitions=3), ladder=CapacityLadder([4]))
    starts = set()
    for rows in (1, 2, 3, 4):
        world.decode(world.plan([30] * rows))
        given = aiter.decodes[-1]
        parts = [given[name] for name in ("exp_sums", "max_logits", "temporary_output")]
        spans = [(one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in parts]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        arena = parts[0].untyped_storage()
        assert arena.data_ptr() <= spans[0][0] and spans[-1][1] <= arena.data_ptr() + arena.nbytes()
        assert all((start - arena.data_ptr()) % 256 == 0 for start, _ in spans)  # alignment is a compile key
        starts.add(tuple(start for start, _ in spans))
    assert len(starts) == 1  # and so the same for every row count of a class


def test_an_evicted_arena_is_not_kept_alive_by_plans_that_used_it(make_world, aiter):
    world = make_world()
    plan = world.plan(LENS)
    world.decode(plan)
    aiter.decodes.clear()
    arena, native = weakref.ref(plan.slot.arena.buffer), plan.native
    assert len(native.last_views.partials) == 3  # positive control
    gc.disable()
    try:
        world.manager.trim(0)
        assert arena() is None and native.last_views.partials == []
    finally:
        gc.enable()
    world.assert_right(world.decode(world.plan(LENS)))


def test_a_new_arena_is_used_from_the_next_call_on(make_world, aiter):
    world = make_world()
    plan = world.plan(LENS)
    world.decode(plan)
    native, first = plan.native, plan.slot.arena.buffer
    second = torch.zeros_like(first)
    backend = AiterBackend(library=aiter.library())
    call = (world.output[:3], world.query[:3], world.key_cache, world.value_cache, world.tables[:3])
    for arena in (first, second):
        backend.decode(native, arena, *call, BF16.head_dim**-0.5, None, None, None, None)
        for name in ("exp_sums", "max_logits", "temporary_output"):
            assert aiter.decodes[-1][name].untyped_storage().data_ptr() == arena.data_ptr()


def test_the_sanitizer_tells_stale_tables_from_tables_that_were_emptied_on_purpose():
    backend = AiterBackend(library=RecordingAiter().library(), architecture_of=lambda device: "gfx942")
    buffer = torch.full((backend.table_bytes(BF16, 4, 8),), 0x7F, dtype=torch.uint8)
    tables = backend.make_tables(BF16, 4, 8, buffer)
    lens = torch.tensor(LENS, dtype=torch.int32)

    def stale() -> int:
        flags = torch.zeros(2, dtype=torch.int64)
        backend.sanitize(tables, lens, 3, flags, 600)
        return int(flags[0])

    backend.refresh(tables, lens, 3)
    assert stale() == 0
    lens[0] = 301
    assert stale() == 1
    backend.refresh(tables, None, 0)
    assert stale() == 0 and tables.staged_lens.tolist() == [0, 0, 0, 0]
    backend.refresh(tables, lens, 3)
    assert stale() == 0


def test_a_library_that_plans_into_another_object_is_refused_when_a_class_is_compiled(aiter):
    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        return replace(aiter.plan_pa_decode(*args, **kwargs))

    elsewhere.__signature__ = inspect.signature(aiter.plan_pa_decode)  # type: ignore[attr-defined]
    library = aiter.library(plan_pa_decode=elsewhere)
    with pytest.raises(ConfigError, match="made another plan"):
        PackedWorld(BF16, AiterBackend(library=library, architecture_of=lambda device: "gfx942"))


def test_what_is_made_in_inference_mode_serves_outside_of_it_and_the_other_way_round(make_world, aiter):
    world = make_world(FP8)
    for made_in in (True, False):
        world.manager.trim(0)
        for is_inference in (made_in, not made_in):
            with torch.inference_mode(is_inference):
                plan = world.plan(LENS)
                for rows in (3, 4):
                    output = world.decode(plan, rows=rows, key_scale=0.5, value_scale=3.0)
                    world.assert_right(output, key_scale=0.5, value_scale=3.0)
                    # Whoever writes these, in whatever mode: the manager's own bytes are no inference tensors.
                    given = aiter.decodes[-1]
                    own = ("context_lengths", "exp_sums", "max_logits", "temporary_output", "key_scale", "value_scale")
                    assert not any(given[name].is_inference() for name in own)


@pytest.mark.parametrize("max_plan_rows", [4096, 2])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_an_output_that_was_made_in_inference_mode_is_zeroed_behind_the_tables_outside_of_it(
    is_recorded, max_plan_rows
):
    """The mode is a thread's own: a micro-batch's thread decodes into what another one made. Kernels do not mind."""
    with torch.inference_mode():
        output = torch.full((4, 8, 64), 7, dtype=torch.bfloat16)
    with aiter_machine("gfx942"):
        world = PackedWorld(BF16, AiterBackend(max_plan_rows), ladder=CapacityLadder([4]))
        world.set_lens([300])
        manager, step = world.manager, Step(world.lens[:1])
        plan = manager.plan_for(step)
        call = (output, world.query, world.key_cache, world.value_cache, world.tables[:1], 64**-0.5)
        if is_recorded:
            with manager.graph() as graph:
                manager.pa_decode(plan, *call)
            manager.replay(graph, step)
            manager.release(graph)
        else:
            manager.pa_decode(plan, *call)
        torch.testing.assert_close(output[:1], world.expected(1), rtol=2e-2, atol=2e-3)
        assert output[1:].eq(0).all()
        manager.close()


def test_threads_that_decode_one_plan_with_different_row_counts_get_their_own_rows(make_world, aiter):
    world = make_world(rows=8, ladder=CapacityLadder([8]))
    lens = [290, 3, 40]
    plan = world.plan(lens)
    expected = world.expected(8)

    def decode(rows: int) -> list[torch.Tensor]:
        outputs = []
        for _ in range(12):
            output = torch.full_like(world.query[:rows], torch.nan)
            world.manager.pa_decode(
                plan, output, world.query[:rows], world.key_cache, world.value_cache, world.tables,
                BF16.head_dim**-0.5,
            )  # fmt: skip
            outputs.append(output)
        return outputs

    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(range(3, 9), threads.map(decode, range(3, 9)), strict=True))
    for rows, outputs in found.items():
        for output in outputs:
            torch.testing.assert_close(output, expected[:rows], rtol=2e-2, atol=2e-3)


def test_a_form_of_v_that_this_aiter_does_not_take_keeps_no_class_from_being_minted(aiter):
    def of_5d_values(output: Any, query: Any, key_cache: Any, value_cache: Any, *rest: Any, **keywords: Any) -> None:
        if value_cache.dim() != 5:
            raise ValueError("value_cache must have rank 5")
        aiter.pa_decode(output, query, key_cache, value_cache, *rest, **keywords)

    of_5d_values.__signature__ = inspect.signature(aiter.pa_decode)  # type: ignore[attr-defined]
    library = aiter.library(pa_decode=of_5d_values)
    world = PackedWorld(FP8, AiterBackend(library=library, architecture_of=lambda device: "gfx942"))
    plan = world.plan(LENS)
    world.assert_right(world.decode(plan))
    world.value_cache = world.value_cache.transpose(2, 3).flatten(3)
    with pytest.raises(ConfigError, match="refuses this call: value_cache must have rank 5"):
        world.decode(plan)


def test_a_class_of_which_aiter_takes_no_call_is_refused_when_it_is_minted(make_world, aiter):
    """What it was asked when the manager was made ends before it looks at scratch."""
    aiter.refusal = ValueError("exp_sums must be contiguous")
    with pytest.raises(ConfigError, match="aiter's pa_decode refuses this call: exp_sums must be contiguous"):
        make_world()
    aiter.refusal = None
    world = make_world()  # positive control
    world.assert_right(world.decode(world.plan(LENS)))
