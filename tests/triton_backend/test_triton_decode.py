"""The Triton decode against the FP64 reference: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

import torch

from planlife.errors import MintError
from planlife.kernels.triton_decode import compile_decode
from planlife.testing import EmulatedGraph, record
from planlife.testing.decode_table import LAYOUTS, lay_out

from ..lifecycle.world import row_errors
from ..torch_backend.test_cache_kinds import FP8, NUM_FAR_PAGES, TABLE, Overlapping
from .triton_call import DEVICE, TritonCall

#: Empty, below, at and above page and tile edges.
EDGE_LENS = (0, 1, 16, 17, 256, 257)
FLOAT32 = {"q_dtype": "float32", "kv_dtype": "float32"}


@pytest.mark.parametrize("case", TABLE, ids=lambda case: ", ".join(map(str, case.values())))
def test_every_combination_of_two_options_equals_the_reference(case):
    options = dict(case)
    lens, group = options.pop("lens"), options.pop("group")
    call = TritonCall(lens, num_q_heads=group * 2, num_kv_heads=2, **options)
    call.assert_matches(call.decode())


@pytest.mark.parametrize("head_dim", [16, 80, 96, 192, 320])
@pytest.mark.parametrize(("kv_dtype", "scales"), [("bfloat16", "none"), (FP8[0], "per token")])
def test_head_dims_that_are_no_powers_of_two_equal_the_reference(head_dim, kv_dtype, scales):
    call = TritonCall((300, 17, 0), head_dim=head_dim, kv_dtype=kv_dtype, scales=scales)
    call.assert_matches(call.decode())


@pytest.mark.parametrize("layout", ["packed", "packed, plain V"])
def test_a_packed_cache_with_an_odd_number_of_packs_equals_the_reference(layout):
    call = TritonCall((300, 49), head_dim=80, page_size=48, kv_dtype=FP8[0], scales="per token", layout=layout)
    call.assert_matches(call.decode())


@pytest.mark.parametrize("page_size", [1, 7, 64, 256, 400])
def test_every_page_size_equals_the_reference(page_size):
    call = TritonCall((0, 1, 255, 257, 600), page_size=page_size, query_length=2)
    call.assert_matches(call.decode())


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "query_length"), [(6, 1, 1), (32, 1, 8), (3, 3, 4), (64, 1, 2)]
)
def test_every_number_of_query_rows_equals_the_reference(num_q_heads, num_kv_heads, query_length):
    call = TritonCall(
        (0, 300, 3), num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, query_length=query_length, head_dim=64
    )
    call.assert_matches(call.decode())


def test_query_rows_beyond_one_block_equal_the_reference():
    """128 query rows of 256 dimensions: more than one block takes."""
    call = TritonCall((20,), num_q_heads=16, num_kv_heads=1, query_length=8, head_dim=256)
    call.assert_matches(call.decode())


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "bfloat16"),
        ("bfloat16", "float16"),
        ("float16", FP8[0]),
        ("float32", FP8[1]),
    ],
)
@pytest.mark.parametrize("scales", ["host number", "per token"])
def test_query_and_cache_may_differ_in_dtype(q_dtype, kv_dtype, scales):
    call = TritonCall((300, 5), q_dtype=q_dtype, kv_dtype=kv_dtype, scales=scales if kv_dtype in FP8 else "none")
    call.assert_matches(call.decode())


@pytest.mark.parametrize("query_length", [1, 2, 6])
@pytest.mark.parametrize("window", [1, 63, 64, 255, 257, 5000, 2**63 - 1])
def test_every_window_and_query_length_equals_the_reference(window, query_length):
    call = TritonCall(
        (3, 0, 256, 520, 777), num_q_heads=1, num_kv_heads=1, query_length=query_length, sliding_window=window
    )
    call.assert_matches(call.decode())


@pytest.mark.parametrize("options", [{"max_partitions": 1}, {"max_partitions": 3}, {"workgroup_budget": 1}])
def test_fewer_partitions_give_the_same_output(options):
    call = TritonCall(EDGE_LENS, **FLOAT32, **options)
    call.assert_matches(call.decode())


def test_more_parts_than_one_step_of_the_merge_takes_equal_the_reference():
    call = TritonCall((9000,), **FLOAT32, num_q_heads=1, num_kv_heads=1, max_context_tokens=9000)
    parts = 36
    with torch.device(DEVICE):
        work_info = torch.tensor([[0, part, part + 1, 9000] for part in range(parts)], dtype=torch.int32)
        reduce_info = torch.tensor([[0, parts]], dtype=torch.int32)
        scratch = torch.full((parts * (8 + 4 * 16),), 0xFF, dtype=torch.uint8)
    call.assert_matches(call.decode(work_info=work_info, reduce_info=reduce_info, scratch=scratch))


def test_lengths_near_the_end_of_int32_do_not_overflow():
    """One page of 2^31 - 1 tokens whose tokens are all one: nothing of that size exists."""
    longest = 2**31 - 1
    call = TritonCall((300,), query_length=8, sliding_window=longest - 1, max_context_tokens=800)
    spec = dataclasses.replace(call.spec, page_size=longest, max_context_tokens=longest)
    compile_decode(spec, DEVICE)
    keys, values = (cache[call.tables[0, 0], :1][None].expand(1, longest, -1, -1) for cache in call.nhd)
    call.plan.work_info[0] = torch.tensor([0, (longest - 300) // 256, 2**23, longest])
    call.plan.reduce_info[0] = torch.tensor([0, 1])
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    output = call.decode(spec=spec, key_cache=keys, value_cache=values, block_tables=tables)
    value = values[0, 0].repeat_interleave(2, 0)
    torch.testing.assert_close(output.float(), value.float().expand(8, -1, -1), rtol=1e-2, atol=0)


def test_a_window_near_the_end_of_int32_does_not_overflow():
    longest = 2**31 - 1
    call = TritonCall((3, 300), query_length=8)
    spec = dataclasses.replace(call.spec, sliding_window=longest - 1, max_context_tokens=longest)
    compile_decode(spec, DEVICE)
    call.assert_matches(call.decode(spec=spec))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_a_larger_pool_are_served_in_place_in_every_layout(layout):
    """C62: K and V as halves of one row, heads outermost, and one element off every alignment."""
    call = TritonCall((100, 17, 0), layout=layout, kv_dtype=FP8[0], scales="per token", num_q_heads=4, num_kv_heads=2)
    for name in ("keys", "values"):
        cache = getattr(call, name)
        head_axis = 2 if layout == "nhd" else 1
        outermost = cache.transpose(0, head_axis).contiguous().transpose(0, head_axis)
        pool = torch.full((*cache.shape[:-1], 2 * cache.shape[-1] + 1), torch.nan, device=DEVICE).to(cache.dtype)
        pool[..., cache.shape[-1] : -1] = cache
        off = torch.full((cache.numel() + 1,), torch.nan, device=DEVICE).to(cache.dtype)[1:].view(cache.shape)
        off.copy_(cache)
        for view in (outermost, pool[..., cache.shape[-1] : -1], off):
            setattr(call, name, view)
            call.output.fill_(torch.nan)
            call.assert_matches(call.decode())


def test_queries_outputs_tables_and_sinks_of_any_strides_are_served_in_place():
    call = TritonCall((300, 17), sinks=True)
    wide = torch.full((*call.query.shape[:2], 2, 17), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, :, 1, 1:] = call.query
    strided = torch.full((4, *call.query.shape), torch.nan, dtype=torch.bfloat16, device=DEVICE).permute(1, 0, 2, 3)
    tables = torch.full((call.tables.shape[1], 5), -1, dtype=torch.int32, device=DEVICE)
    tables[:, 1:3] = call.tables.T
    sinks = torch.full((4, 3), torch.nan, device=DEVICE)
    sinks[:, 1] = call.sinks
    output = call.decode(
        query=wide[:, :, 1, 1:], output=strided[:, 2], block_tables=tables[:, 1:3].T, sinks=sinks[:, 1]
    )
    call.assert_matches(output)
    assert strided[:, [0, 1, 3]].isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_never_copied_whole(layout):
    """C62: a broadcast block axis of 2^30 pages: terabytes, if anything copied it."""
    call = TritonCall((300, 17), layout=layout, kv_dtype=FP8[0], scales="per token")
    pages = 2**30
    page = call.tables[0, 0].item()
    for name in ("keys", "values", "key_scale", "value_scale"):
        one = getattr(call, name)[page : page + 1]
        setattr(call, name, one.expand(pages, *one.shape[1:]))
    call.nhd = tuple(c[page : page + 1].expand(pages, *c.shape[1:]) for c in call.nhd)
    call.tables[call.tables != -1] = pages - 1
    call.assert_matches(call.decode())


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", FP8[0]])
def test_block_ids_past_sixteen_bits_are_read_as_they_are(layout, kv_dtype):
    scales = "none" if kv_dtype == "bfloat16" else "per token"
    call = TritonCall((300, 17), layout=layout, kv_dtype=kv_dtype, scales=scales, num_q_heads=2, num_kv_heads=1)
    with torch.device(DEVICE):
        call.nhd = tuple(Overlapping(call.spec, getattr(torch, kv_dtype)).nhd for _ in range(2))
        call.keys, call.values = (c.transpose(1, 2) for c in call.nhd) if layout == "hnd" else call.nhd
        far = torch.randint(65_536, NUM_FAR_PAGES, ((call.tables != -1).sum(),)).to(torch.int32)
        call.tables[call.tables != -1] = far
        if scales != "none":
            call.key_scale, call.value_scale = (
                (torch.rand(NUM_FAR_PAGES + 16) + 0.5).as_strided((NUM_FAR_PAGES, 1, 16), (1, 1, 1)) for _ in range(2)
            )
    output = call.decode()
    call.assert_matches(output)
    call.tables[call.tables != -1] -= 65_536  # positive control: the low sixteen bits name other pages
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(output)


def test_the_two_fp8_types_are_read_by_their_own_bias():
    outputs = []
    for kv_dtype in FP8:
        call = TritonCall((300, 17), kv_dtype=kv_dtype, scales="host number")
        outputs.append(call.decode())
    as_the_other = {
        "spec": dataclasses.replace(call.spec, kv_dtype=FP8[0]),
        "key_cache": call.keys.view(torch.float8_e4m3fn),
        "value_cache": call.values.view(torch.float8_e4m3fn),
    }
    compile_decode(as_the_other["spec"], DEVICE)
    call.assert_matches(outputs[1])
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(call.decode(**as_the_other))


@pytest.mark.parametrize("kv_dtype", FP8)
def test_every_number_that_fp8_has_is_read_as_torch_reads_it(kv_dtype):
    """One token per bit pattern, attended alone: the output is the value itself, NaN and subnormals included."""
    call = TritonCall((1,), kv_dtype=kv_dtype, scales="host number", q_dtype="float32", num_kv_heads=1, head_dim=256)
    bits = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    call.values.view(torch.uint8)[call.tables[0, 0], 0, 0] = bits
    output = call.decode(value_scale=1.0)[0, 0]
    torch.testing.assert_close(output, bits.view(getattr(torch, kv_dtype)).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize("scales", ["host number", "device [1]", "per token"])
def test_each_scale_has_its_own_effect(name, scales):
    call = TritonCall((300, 17), kv_dtype=FP8[0], scales=scales)
    call.assert_matches(call.decode())
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(call.decode(**{name: getattr(call, name) * 3}))


def test_one_scale_on_the_host_and_the_other_on_the_device():
    call = TritonCall((300, 17), kv_dtype=FP8[0], scales="device scalar")
    call.key_scale = call.key_scale.item()
    call.assert_matches(call.decode())


@pytest.mark.parametrize("scales", ["host number", "device scalar", "per token"])
@pytest.mark.parametrize("tiny", [1e-20, 1e-30])
def test_one_token_is_exactly_its_value_whatever_the_key_scale(tiny, scales):
    """C61."""
    call = TritonCall((1,), kv_dtype=FP8[0], scales=scales, q_dtype="float32")
    call.key_scale = call.key_scale * 0 + tiny
    call.value_scale = call.value_scale * 0 + 1.0
    value = call.nhd[1][call.tables[0, 0], 0].float().repeat_interleave(2, 0)
    assert torch.equal(call.decode()[0], value)
    call.value_scale = call.value_scale * tiny
    assert torch.equal(call.decode()[0], value * tiny)


@pytest.mark.parametrize("query_length", [1, 2])
@pytest.mark.parametrize("scales", ["host number", "per token", "per token, 4-D"])
@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_weights_are_as_exact_as_the_query_under_every_kind_of_scale(q_dtype, kv_dtype, scales, query_length):
    """Many short rows with logits far apart, where no sum evens out how weights are rounded."""
    call = TritonCall(tuple(range(2, 34)), kv_dtype=kv_dtype, scales=scales, q_dtype=q_dtype, query_length=query_length)
    call.query.mul_(8)
    errors = row_errors(call.decode(), call.reference(), query_length)
    # Half a unit in the last place for the weights, half a one for the output.
    assert errors.max() <= torch.finfo(call.query.dtype).eps, errors.max()


@pytest.mark.parametrize("factor", [1e-20, 1e-4, 1e2, 1e30])
def test_value_scales_beyond_what_float16_holds_are_no_loss(factor):
    call = TritonCall((300, 17), kv_dtype=FP8[0], scales="per token", q_dtype="float16")
    bits = call.values.view(torch.uint8)
    bits.copy_((bits & 0x85) | 0x78)  # 256 to 416, of either sign
    call.nhd = call.keys, call.values
    call.value_scale *= factor
    output, wanted = call.decode().cpu(), call.reference()
    if factor in (1e-20, 1e30):
        assert torch.equal(output, wanted.half())  # zeros and infinities
    else:
        assert row_errors(output, wanted).max() <= torch.finfo(torch.float16).eps


def test_value_scales_of_zero_give_zeros_also_where_a_query_token_sees_nothing_of_a_block():
    call = TritonCall((65, 17, 257), kv_dtype=FP8[0], scales="per token", q_dtype="float16", query_length=2)
    call.assert_matches(call.decode())
    call.value_scale *= 0
    assert (call.decode() == 0).all()


@pytest.mark.parametrize("other", [1, 299])
@pytest.mark.parametrize("exponent", [20, 60, 100])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_a_little_weight_under_a_large_scale_counts_beside_a_large_weight_under_a_little_scale(
    q_dtype, exponent, other
):
    """C61: tokens of weight 1 and 2^-exponent whose scales make up for it, in one block and in two tasks."""
    call = TritonCall((300,), kv_dtype=FP8[0], scales="per token", q_dtype=q_dtype, query_length=2, num_q_heads=2)
    call.query.fill_(1.0)
    call.keys[call.tables[0, :19].long()] = torch.ones((), device=DEVICE).to(call.keys.dtype)
    call.nhd = call.keys, call.values
    little = call.key_scale.new_tensor(-0.6931 / (16 * call.scale))  # a logit that halves the weight
    call.key_scale[call.tables[0, :19].long()] = 140 * little
    for token, halvings in ((0, 0), (other, exponent)):
        page, offset = call.tables[0, token // 16], token % 16
        call.key_scale[page, :, offset] = halvings * little
        call.value_scale[page, :, offset] = 2.0**halvings
    errors = row_errors(call.decode(), call.reference(), 2)
    assert errors.max() <= torch.finfo(call.query.dtype).eps, errors


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32"])
def test_an_infinite_value_comes_out_infinite_in_every_layout(layout, kv_dtype):
    """C60: beside it poison in every tail and in every page that nobody owns."""
    call = TritonCall((300, 17), kv_dtype=kv_dtype, query_length=2, num_q_heads=2, num_kv_heads=1, sinks=True)
    call.nhd[1][call.tables[0, 1], 3, 0, :2] = torch.tensor([torch.inf, -torch.inf]).to(call.values)
    spec = dataclasses.replace(call.spec, kv_layout=LAYOUTS[layout][0])
    compile_decode(spec, DEVICE)
    keys, values = lay_out(*call.nhd, layout)
    output = call.decode(spec=spec, key_cache=keys, value_cache=values)
    assert output[:2, :, 0].isposinf().all()
    assert output[:2, :, 1].isneginf().all()
    assert torch.equal(output.isfinite().cpu(), call.reference().isfinite())


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("max_partitions", "infinite_page"), [(1, 0), (2, 0), (1, 31)])
def test_an_infinite_value_survives_a_weight_that_underflows(kv_dtype, max_partitions, infinite_page):
    """exp(-150) is 0 in float32, and 0 x inf is NaN: seen before the largest logit, in another task, beside it."""
    call = TritonCall((512,), kv_dtype=kv_dtype, num_q_heads=1, num_kv_heads=1, max_partitions=max_partitions)
    call.query.fill_(1.0)
    call.keys[call.tables[0, :32].long()] = 0.0
    call.keys[call.tables[0, 31], 15] = 150 / (16 * call.scale)
    call.values[call.tables[0, infinite_page], 0, 0, 0] = torch.inf
    output = call.decode()
    assert output[0, 0, 0] == torch.inf
    assert output[0, 0, 1:].isfinite().all()


def test_small_float16_weights_of_many_tokens_count():
    """2,000 tokens of weight 2^-30 beside one of weight 1: less than float16 holds."""
    call = TritonCall((2001,), kv_dtype="float16", num_q_heads=1, num_kv_heads=1, max_context_tokens=2001)
    call.query.fill_(1.0)
    call.keys[call.tables[0].long()] = 0.0
    call.keys[call.tables[0, 0], 0] = 30 * 0.6931 / (16 * call.scale)
    call.values[call.tables[0].long()] = 1000.0
    call.values[call.tables[0, 0], 0] = 0.0
    call.nhd = call.keys, call.values
    call.assert_matches(call.decode())


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("sliding_window", [0, 100])
def test_what_only_some_query_tokens_see_never_reaches_the_others(poison, sliding_window):
    options = {"num_q_heads": 2, "num_kv_heads": 1, "query_length": 3, "sliding_window": sliding_window, **FLOAT32}
    for position, seeing in ((299, 2), (200 - 2 if sliding_window else 299, 0 if sliding_window else 2)):
        call = TritonCall((300,), **options)
        page, offset = divmod(position, 16)
        call.values[call.tables[0, page], offset] = poison
        output = call.decode()
        others = [token for token in range(3) if token != seeing]
        assert not output[seeing].isfinite().any()
        torch.testing.assert_close(output[others].cpu().double(), call.reference()[others], rtol=0, atol=5e-6)


@pytest.mark.parametrize("cache", ["keys", "values"])
@pytest.mark.parametrize("query_length", [1, 2])
def test_a_nan_of_an_attended_token_is_not_hidden(cache, query_length):
    call = TritonCall((300, 17), query_length=query_length)
    getattr(call, cache)[call.tables[0, 1], 3] = torch.nan
    output = call.decode()
    assert output[:query_length].isnan().all()
    assert output[query_length:].isfinite().all()


@pytest.mark.parametrize("what", ["query", "keys"])
def test_logits_that_are_all_nan_are_not_taken_for_an_empty_row(what):
    call = TritonCall((300, 17))
    if what == "query":
        call.query[0] = torch.nan
    else:
        call.keys[call.tables[0, : -(-300 // call.spec.page_size)]] = torch.nan
    output = call.decode()
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize("gap", [0, 150])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_an_infinite_scale_of_an_attended_token_gives_infinities_and_no_other_row_sees_it(q_dtype, gap):
    """gap: of its logit below the others': exp(-150) is 0 in float32."""
    call = TritonCall((300, 17), kv_dtype=FP8[0], scales="per token", q_dtype=q_dtype)
    page = call.tables[0, 1]
    if gap:
        call.query.fill_(1.0)
        call.keys[page, 3] = torch.ones((), device=DEVICE).to(call.keys)
        call.key_scale[page, :, 3] = -gap / (16 * call.scale)
    call.values[page, 3] = torch.ones((), device=DEVICE).to(call.values)
    call.value_scale[page, :, 3] = torch.inf
    output = call.decode()
    assert output[0].isposinf().all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_the_scale_of_a_token_that_only_a_later_query_token_sees_never_reaches_an_earlier_one(q_dtype, poison):
    call = TritonCall((300,), kv_dtype=FP8[0], scales="per token", q_dtype=q_dtype, query_length=2)
    call.value_scale[call.tables[0, 18], :, 299 % 16] = poison
    output = call.decode()
    assert not output[1].isfinite().any()
    assert output[0].isfinite().all()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_empty_rows_are_zero_whatever_the_sinks_are(odd):
    call = TritonCall((300, 0, 1), query_length=2)
    lse = torch.full((6, 4), torch.nan, device=DEVICE)
    output = call.decode(sinks=torch.full((4,), odd, device=DEVICE), lse=lse)
    assert (output[2:5] == 0).all()  # and the first query token of the row with one token
    assert lse[2:5].isneginf().all()


@pytest.mark.parametrize("low", [-torch.inf, -1e30])
def test_a_sink_far_below_all_logits_changes_nothing(low):
    call = TritonCall((300, 0), kv_dtype="float32")
    without = call.decode().clone()
    assert torch.equal(call.decode(sinks=torch.full((4,), low, device=DEVICE)), without)


def test_a_sink_far_above_all_logits_takes_all_the_weight():
    call = TritonCall((300, 0))
    assert (call.decode(sinks=torch.full((4,), 1e30, device=DEVICE)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sinks_of_any_float_type_are_taken(dtype):
    call = TritonCall((0, 300, 1), sinks=True, query_length=3)
    call.sinks = call.sinks.to(dtype)
    call.assert_matches(call.decode())
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(call.decode(sinks=None))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        FLOAT32,
        {**FLOAT32, "query_length": 3, "sliding_window": 100},
        {"kv_dtype": "float16"},
        {"kv_dtype": FP8[0], "scales": "per token", "q_dtype": "float32"},
    ],
)
def test_the_lse_is_the_natural_logarithm_of_all_weights(options, sinks):
    call = TritonCall((0, 300, 1, 700), sinks=sinks, **options)
    lse = torch.full(call.query.shape[:2], torch.nan, device=DEVICE).T.contiguous().T
    call.assert_matches(call.decode(lse=lse))
    torch.testing.assert_close(lse.cpu().double(), call.reference_lse(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_rows", [2, 3, 4, 8])
def test_rows_behind_the_plans_are_exact_zeros_for_every_row_count_up_to_the_class(query_rows):
    call = TritonCall((300, 0, 17), query_length=2)
    with torch.device(DEVICE):
        call.plan = call.backend.make_tables(call.spec, 8, 8, torch.zeros(4096, dtype=torch.uint8))
        call.scratch = torch.full((call.backend.scratch_bytes(call.spec, 8, 8),), 0xFF, dtype=torch.uint8)
        call.refresh(call.lens)
        query = torch.full((query_rows * 2, 4, 16), torch.nan, dtype=torch.bfloat16)
    real = min(query_rows * 2, 6)
    query[:real] = call.query[:real]
    lse = torch.full(query.shape[:2], torch.nan, device=DEVICE)
    output = call.decode(query=query, output=torch.full_like(query, torch.nan), lse=lse)
    expected = call.reference()[:real]
    torch.testing.assert_close(output[:real].cpu().double(), expected, rtol=0, atol=1.6e-2)
    assert (output[real:] == 0).all()
    assert lse[real:].isneginf().all()


def test_rows_behind_the_reduce_table_are_zero_whatever_lies_behind_it():
    call = TritonCall((300, 17, 5))
    behind = torch.tensor([[0, 1], [1, 1], [0, 1]], dtype=torch.int32, device=DEVICE)
    behind[:1] = call.plan.reduce_info[:1]
    output = call.decode(reduce_info=behind[:1])
    call.assert_matches(output, torch.tensor([300, 0, 0], dtype=torch.int32))


def test_tasks_of_rows_that_nobody_asked_for_read_no_page_and_leave_empty_parts():
    call = TritonCall((300, 17, 5), num_q_heads=1, num_kv_heads=1)
    first_slot = call.plan.reduce_info[1, 0].item()
    call.decode(query=call.query[:1], output=call.output[:1])
    num_slots, dim = call.plan.work_info.shape[0], call.spec.head_dim
    maxima = call.scratch.view(torch.float32)[num_slots * dim :][:num_slots]
    assert maxima[:first_slot].isfinite().all()
    assert maxima[first_slot:].isneginf().all()
    assert call.output[1:].isnan().all()


def test_all_rows_empty_is_all_zeros_and_reads_no_page():
    call = TritonCall((0, 0, 0))
    call.tables.fill_(2**30)
    assert (call.decode() == 0).all()


@pytest.mark.parametrize("stray", [2**30, -1, -(2**31)])
def test_entries_past_a_rows_pages_are_never_used_as_an_index(stray):
    """C81."""
    call = TritonCall((0, 1, 16, 33), layout="packed", kv_dtype=FP8[1], scales="per token", page_size=16)
    for row, length in enumerate(call.lens.tolist()):
        call.tables[row, -(-length // 16) :] = stray
    call.assert_matches(call.decode())


def test_a_length_beyond_the_block_table_reads_what_the_table_has():
    call = TritonCall((320, 0))
    call.refresh(torch.tensor([700, 300], dtype=torch.int32, device=DEVICE))
    call.assert_matches(call.decode(block_tables=call.tables[:1, :20]))


def test_a_length_beyond_the_maximum_reads_no_tile_behind_it():
    call = TritonCall((512,), max_context_tokens=512, **FLOAT32)
    tables = torch.cat([call.tables, torch.full((1, 8), 2**30, dtype=torch.int32, device=DEVICE)], 1)
    call.plan.work_info[0] = torch.tensor([0, 0, 3, 600])
    call.plan.reduce_info[0] = torch.tensor([0, 1])
    call.assert_matches(call.decode(block_tables=tables))


def test_the_tiles_and_lengths_come_from_the_work_table():
    call = TritonCall((512, 250), **FLOAT32)
    assert call.plan.work_info[:3].tolist() == [[0, 0, 1, 512], [0, 1, 2, 512], [1, 0, 1, 250]]
    call.plan.work_info[1, 2] = 1  # an empty tile range
    call.plan.work_info[2, 3] = 211
    call.assert_matches(call.decode(), torch.tensor([256, 211], dtype=torch.int32))


def test_the_merge_takes_only_slots_that_the_reduce_table_names():
    call = TritonCall((512, 512), **FLOAT32)
    call.plan.reduce_info[0] = torch.tensor([0, 1])  # of two
    call.plan.reduce_info[1] = torch.tensor([2, 0])
    call.assert_matches(call.decode(), torch.tensor([256, 0], dtype=torch.int32))


def test_an_arena_larger_than_the_call_is_only_written_in_front():
    call = TritonCall((300, 17))
    arena = torch.full((call.scratch.numel() + 4096,), 0x7F, dtype=torch.uint8, device=DEVICE)
    call.assert_matches(call.decode(scratch=arena))
    assert (arena[call.scratch.numel() :] == 0x7F).all()


def test_very_large_logits_do_not_overflow():
    call = TritonCall((300, 17), **FLOAT32)
    call.query.mul_(1000)
    torch.testing.assert_close(call.decode().cpu().double(), call.reference(), rtol=0, atol=1e-3)


def test_logits_beyond_the_precision_of_their_sum_choose_one_token():
    call = TritonCall((300, 17))
    call.query.mul_(2.0**40)
    call.assert_matches(call.decode())


def test_a_query_without_rows_is_served():
    call = TritonCall((300,))
    assert call.decode(query=call.query[:0], output=call.output[:0]).shape[0] == 0
    assert call.output.isnan().all()


@pytest.mark.skipif(DEVICE != "cpu", reason="emulated graphs record CPU tensors; tests/gpu has real ones")
@pytest.mark.parametrize("scales", ["device [1]", "per token"])
def test_a_recorded_step_decodes_the_lengths_scales_and_sinks_of_its_replay(scales):
    call = TritonCall((300, 257, 17), kv_dtype=FP8[0], scales=scales, sinks=True, query_length=2)
    lens = call.lens.clone()
    graph = EmulatedGraph()
    with record(graph):
        call.refresh(lens)
        call.decode()
    for step in (call.lens, call.lens // 2, call.lens * 0):
        lens.copy_(step)
        for changing in (call.key_scale, call.value_scale, call.sinks):
            changing.mul_(1.5)
        call.scratch.fill_(0xFF)
        call.output.fill_(torch.nan)
        graph.replay()
        call.assert_matches(call.output, step)


def test_a_spec_is_compiled_once_and_a_decode_never_compiles():
    call = TritonCall((300,), workgroup_budget=13)
    assert compile_decode(call.spec, DEVICE) == 0
    other = dataclasses.replace(call.spec, workgroup_budget=14, page_size=32)
    with pytest.raises(MintError, match="was not compiled for PlanSpec"):
        call.decode(spec=other)
    assert call.output.isnan().all()
    assert (call.scratch == 0xFF).all()
    assert compile_decode(other, DEVICE) == 2  # one decode for aligned caches, one for any; the merge is shared
