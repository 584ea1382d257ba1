"""The tensor decode over every kind of cache, row by row against the dense FP64 answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planlife.errors import ConfigError
from planlife.spec import PlanSpec
from planlife.testing import (
    LAYOUTS,
    DecodeCase,
    EmulatedGraph,
    decode_cases,
    lay_out,
    record,
    reference_decode,
    row_errors,
)
from planlife.testing.decode_table import FP8_NAN, SCALE_FORMS, make_scale

from .test_torch_decode import Call, fall_back, make_spec

FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
#: Largest relative error of a row: rounding of the output, or of the sums for float32.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 8e-3}


def kind_spec(*, layout: str = "nhd", kv_dtype: str = "bfloat16", scales: str = "none", **options: Any) -> PlanSpec:
    """The spec of a KindCall."""
    kind = SCALE_FORMS[scales]
    options.setdefault("q_dtype", kv_dtype if kind == "none" else "bfloat16")
    return make_spec(kv_dtype=kv_dtype, kv_layout=LAYOUTS[layout][0], scales=kind, **options)


class KindCall(Call):
    """A Call whose caches are of any layout, dtype and scales. Scales of tokens that no row owns are NaN."""

    def __init__(
        self,
        lens: tuple[int, ...],
        *,
        layout: str = "nhd",
        kv_dtype: str = "bfloat16",
        scales: str = "none",
        sinks: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        kind = SCALE_FORMS[scales]
        spec = kind_spec(layout=layout, kv_dtype=kv_dtype, scales=scales, **options)
        super().__init__(spec, lens, seed=seed)
        owned = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
        for row, length in enumerate(lens):
            for position in range(length):
                owned[self.tables[row, position // spec.page_size], position % spec.page_size] = True
        if kind != "none":  # FP8 has no infinity
            for cache in (self.keys, self.values):
                cache.view(torch.uint8)[~owned] = FP8_NAN[kv_dtype]
        self.layout = layout
        self.nhd = self.keys, self.values
        self.keys, self.values = lay_out(*self.nhd, layout)
        self.key_scale, self.value_scale = (make_scale(scales, owned, spec.num_kv_heads) for _ in range(2))
        self.sinks = torch.randn(spec.num_q_heads) * 3 if sinks else None

    def decode(self, **changed: Any) -> torch.Tensor:
        return super().decode(**{**self.extras(), **changed})

    def extras(self) -> dict[str, Any]:
        return {"key_scale": self.key_scale, "value_scale": self.value_scale, "sinks": self.sinks}

    def reference(self, lens: torch.Tensor | None = None, lse: torch.Tensor | None = None) -> torch.Tensor:
        scaled = self.key_scale is not None
        return reference_decode(
            self.query,
            *self.nhd,
            self.tables,
            self.lens if lens is None else lens,
            self.scale,
            query_length=self.spec.query_length,
            sliding_window=self.spec.sliding_window,
            key_scale=self.key_scale if scaled else 1.0,
            value_scale=self.value_scale if scaled else 1.0,
            sinks=self.sinks,
            lse=lse,
        )

    def poisoned_lse(self) -> torch.Tensor:
        return torch.full(self.query.shape[:2], torch.nan)

    def assert_lse_matches(self, lse: torch.Tensor) -> None:
        wanted = self.poisoned_lse()
        self.reference(lse=wanted)
        torch.testing.assert_close(lse, wanted, rtol=1e-5, atol=2e-5)

    def assert_matches(self, output: torch.Tensor, lens: torch.Tensor | None = None) -> None:
        errors = row_errors(output, self.reference(lens), self.spec.query_length)
        assert (errors <= TOLERANCE[self.spec.q_dtype]).all(), f"relative error per row: {errors.tolist()}"


def options_of(case: DecodeCase) -> dict[str, Any]:
    """The options of a KindCall, and the case's lens and group."""
    options = dataclasses.asdict(case)
    del options["num_kv_heads"], options["peaked"]
    return {**options, "max_context_tokens": case.spec().max_context_tokens}


#: The table of decode_cases, for kernels that are called without a manager.
TABLE = [options_of(case) for case in decode_cases()]


@pytest.mark.parametrize("case", TABLE, ids=lambda case: ", ".join(map(str, case.values())))
def test_every_combination_of_two_options_equals_the_reference(case):
    options = dict(case)
    lens, group = options.pop("lens"), options.pop("group")
    call = KindCall(lens, num_q_heads=group * 2, num_kv_heads=2, **options)
    lse = call.poisoned_lse()
    call.assert_matches(call.decode(lse=lse))
    call.assert_lse_matches(lse)
    call.output.fill_(torch.nan)
    lse.fill_(torch.nan)
    fall_back(call, **call.extras(), lse=lse)
    call.assert_matches(call.output)
    call.assert_lse_matches(lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_reads_every_layout_alike(layout):
    call = KindCall((300, 17), layout=layout, kv_dtype=FP8[0], scales="per token")
    wanted = call.reference()
    call.nhd = call.keys, call.values
    found = reference_decode(
        call.query,
        call.keys,
        call.values,
        call.tables,
        call.lens,
        call.scale,
        kv_layout=call.spec.kv_layout,
        key_scale=call.key_scale,
        value_scale=call.value_scale,
    )
    assert torch.equal(found, wanted)
    assert wanted.isfinite().all()


@pytest.mark.parametrize("window", [0, 1, 255, 256, 257, 5000])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_six_query_tokens_of_group_eight_with_scales_per_token_equal_the_reference(kv_dtype, window):
    """C39, C40."""
    call = KindCall(
        (3, 0, 256, 520),
        layout="packed",
        kv_dtype=kv_dtype,
        scales="per token",
        num_q_heads=8,
        num_kv_heads=1,
        head_dim=64,
        query_length=6,
        sliding_window=window,
    )
    call.assert_matches(call.decode())


def test_the_two_fp8_types_are_read_by_their_own_bias():
    outputs = []
    for kv_dtype in FP8:
        call = KindCall((300, 17), kv_dtype=kv_dtype, scales="host number")
        outputs.append(call.decode())
    bits = call.nhd[0].view(torch.uint8)
    as_the_other = {"key_cache": bits.view(torch.float8_e4m3fn), "value_cache": call.nhd[1].view(torch.float8_e4m3fn)}
    call.assert_matches(outputs[1])
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(call.decode(**as_the_other))


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize("scales", ["host number", "device [1]", "per token"])
def test_each_scale_has_its_own_effect(name, scales):
    call = KindCall((300, 17), kv_dtype=FP8[0], scales=scales)
    call.assert_matches(call.decode())
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(call.decode(**{name: getattr(call, name) * 3}))


@pytest.mark.parametrize("scales", ["host number", "device scalar", "per token"])
@pytest.mark.parametrize("tiny", [1e-20, 1e-30])
def test_one_token_is_exactly_its_value_whatever_the_key_scale(tiny, scales):
    """C61."""
    call = KindCall((1,), kv_dtype=FP8[0], scales=scales, q_dtype="float32")
    call.key_scale = call.key_scale * 0 + tiny
    call.value_scale = call.value_scale * 0 + 1.0
    value = call.nhd[1][call.tables[0, 0], 0].float().repeat_interleave(2, 0)
    assert torch.equal(call.decode()[0], value)
    call.value_scale = call.value_scale * tiny
    assert torch.equal(call.decode()[0], value * tiny)


@pytest.mark.parametrize("kv_dtype", FP8)
def test_tiny_key_scales_average_the_values(kv_dtype):
    call = KindCall((300, 17), kv_dtype=kv_dtype, scales="host number", q_dtype="float32")
    call.key_scale = 1e-30
    call.assert_matches(call.decode())


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed"])
@pytest.mark.parametrize("sinks", [False, True])
def test_an_infinite_value_comes_out_infinite_in_every_layout(layout, sinks):
    """C60: beside it poison in every tail and in every page that nobody owns."""
    call = KindCall((300, 17), query_length=2, num_q_heads=2, num_kv_heads=1, sinks=sinks)
    page = call.tables[0, 1]
    call.nhd[1][page, 3, 0, :2] = torch.tensor([torch.inf, -torch.inf], dtype=torch.bfloat16)
    call.plan = KindCall((300, 17), layout=layout, query_length=2, num_q_heads=2, num_kv_heads=1).plan
    keys, values = lay_out(*call.nhd, layout)
    output = call.decode(key_cache=keys, value_cache=values)
    assert output[:2, :, 0].isposinf().all()
    assert output[:2, :, 1].isneginf().all()
    assert torch.equal(output.double().isfinite(), call.reference().isfinite())


def test_an_infinite_scale_of_an_attended_token_gives_infinities_and_no_other_row_sees_it():
    call = KindCall((300, 17), kv_dtype=FP8[0], scales="per token")
    page = call.tables[0, 1]
    call.nhd[1][page, 3] = 1.0
    call.values = call.nhd[1]
    call.value_scale[page, :, 3] = torch.inf
    output = call.decode()
    assert output[0].isposinf().all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize("query_length", [1, 3])
def test_sinks_take_weight_and_empty_rows_stay_exactly_zero(query_length):
    call = KindCall((0, 300, 1, 0, 700), sinks=True, q_dtype="float32", kv_dtype="float32", query_length=query_length)
    call.assert_matches(call.decode())
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(call.decode(sinks=None))
    assert (call.decode(sinks=torch.full((4,), 80.0))[:query_length] == 0).all()


def test_a_sink_counts_once_however_many_tasks_a_row_has():
    lens = (700,)
    call = KindCall(lens, sinks=True, q_dtype="float32", kv_dtype="float32")
    assert call.plan.reduce_info[0, 1] > 1
    call.assert_matches(call.decode())


@pytest.mark.parametrize("low", [-torch.inf, -1e30])
def test_a_sink_far_below_all_logits_changes_nothing(low):
    call = KindCall((300, 0), kv_dtype="float32")
    without = call.decode().clone()
    assert torch.equal(call.decode(sinks=torch.full((4,), low)), without)


def test_a_sink_far_above_all_logits_takes_all_the_weight():
    call = KindCall((300, 0))
    assert (call.decode(sinks=torch.full((4,), 1e30)) == 0).all()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_empty_rows_are_zero_whatever_the_sinks_are(odd):
    call = KindCall((300, 0, 1), query_length=2)
    output = call.decode(sinks=torch.full((4,), odd))
    assert (output[2:5] == 0).all()  # and the first query token of the row with one token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_of_any_float_type_are_taken(dtype):
    call = KindCall((300, 17), sinks=True)
    call.sinks = call.sinks.to(dtype)
    call.assert_matches(call.decode())


class Overlapping:
    """Pages that start one token after another: 70,000 distinct ones in a few MiB."""

    def __init__(self, spec: PlanSpec, dtype: torch.dtype) -> None:
        self.rows = torch.randn(NUM_FAR_PAGES + spec.page_size, spec.head_dim).to(dtype)
        dim = spec.head_dim
        self.nhd = self.rows.as_strided((NUM_FAR_PAGES, spec.page_size, 1, dim), (dim, dim, dim, 1))


NUM_FAR_PAGES = 70_000


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", FP8[0]])
def test_block_ids_past_sixteen_bits_are_read_as_they_are(layout, kv_dtype):
    scales = "none" if kv_dtype == "bfloat16" else "per token"
    call = KindCall((300, 17), layout=layout, kv_dtype=kv_dtype, scales=scales, num_q_heads=2, num_kv_heads=1)
    call.nhd = tuple(Overlapping(call.spec, getattr(torch, kv_dtype)).nhd for _ in range(2))
    call.keys, call.values = (c.transpose(1, 2) for c in call.nhd) if layout == "hnd" else call.nhd
    call.tables[call.tables != -1] = torch.randint(65_536, NUM_FAR_PAGES, ((call.tables != -1).sum(),)).to(torch.int32)
    if scales != "none":
        call.key_scale, call.value_scale = (
            (torch.rand(NUM_FAR_PAGES + 16) + 0.5).as_strided((NUM_FAR_PAGES, 1, 16), (1, 1, 1)) for _ in range(2)
        )
    output = call.decode()
    call.assert_matches(output)
    call.tables[call.tables != -1] -= 65_536  # positive control: the low sixteen bits name other pages
    with pytest.raises(AssertionError, match="relative error"):
        call.assert_matches(output)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_never_copied_whole(layout):
    """C62: a broadcast block axis of 2^30 pages: terabytes, if anything copied it."""
    call = KindCall((300, 17), layout=layout, kv_dtype=FP8[0], scales="per token")
    pages = 2**30
    page = call.tables[0, 0].item()
    for name in ("keys", "values", "key_scale", "value_scale"):
        one = getattr(call, name)[page : page + 1]
        setattr(call, name, one.expand(pages, *one.shape[1:]))
    call.nhd = tuple(c[page : page + 1].expand(pages, *c.shape[1:]) for c in call.nhd)
    call.tables[call.tables != -1] = pages - 1
    call.assert_matches(call.decode())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_a_larger_pool_are_served_in_place_in_every_layout(layout):
    """C62: K and V as halves of one row, and heads outermost."""
    call = KindCall((300, 17, 0), layout=layout, kv_dtype=FP8[0], scales="per token", sinks=True)
    for name in ("keys", "values"):
        cache = getattr(call, name)
        head_axis = 2 if layout == "nhd" else 1
        outermost = cache.transpose(0, head_axis).contiguous().transpose(0, head_axis)
        pool = torch.full((*cache.shape[:-1], 2 * cache.shape[-1]), torch.nan).to(cache.dtype)
        pool[..., cache.shape[-1] :] = cache
        for view in (outermost, pool[..., cache.shape[-1] :]):
            assert not view.is_contiguous()
            setattr(call, name, view)
            call.assert_matches(call.decode())


def test_table_entries_that_no_row_owns_name_no_scale_either():
    """C81."""
    call = KindCall((0, 300, 17), layout="packed", kv_dtype=FP8[1], scales="per token", sinks=True)
    for stray in (-1, 2**31 - 1, -(2**31)):
        owned = [-(-length // 16) for length in call.lens.tolist()]
        for row, columns in enumerate(owned):
            call.tables[row, columns:] = stray
        call.assert_matches(call.decode())


class _NoReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read back"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scales", ["device scalar", "device [1]", "per token"])
def test_nothing_on_the_device_is_read_back(scales):
    call = KindCall((300, 17), layout="packed", kv_dtype=FP8[0], scales=scales, sinks=True)
    with _NoReadBack():
        call.decode()
        with pytest.raises(AssertionError, match="read back"):
            call.sinks[0].item()  # positive control
    call.assert_matches(call.output)


@pytest.mark.parametrize("scales", ["device [1]", "per token"])
def test_a_recorded_decode_reads_the_scales_and_sinks_of_its_replay(scales):
    call = KindCall((300, 17), layout="packed", kv_dtype=FP8[0], scales=scales, sinks=True)
    graph = EmulatedGraph()
    with record(graph):
        call.decode()
    for factor in (1.0, 2.0):
        for changing in (call.key_scale, call.value_scale, call.sinks):
            changing.mul_(factor)
        call.output.fill_(torch.nan)
        graph.replay()
        call.assert_matches(call.output)


@pytest.mark.parametrize("serve", [Call.decode, fall_back])
@pytest.mark.parametrize("missing", ["key_scale", "value_scale"])
def test_an_fp8_cache_without_its_scale_is_refused_before_anything_changes(serve, missing):
    call = KindCall((300, 17), kv_dtype=FP8[0], scales="host number")
    with pytest.raises(ConfigError, match=f"{missing} is None, but a float8_e4m3fn cache takes scales='per_tensor'"):
        serve(call, **{**call.extras(), missing: None})
    assert call.output.isnan().all()
    assert (call.scratch == 0xFF).all()


@pytest.mark.parametrize("form", [form for form in SCALE_FORMS if form not in ("none", "host number")])
def test_a_scale_is_where_its_generator_is_and_without_one_where_its_pages_are(form):
    owned = torch.ones(2, 16, dtype=torch.bool, device="meta")
    assert make_scale(form, owned, 1).device.type == "meta"
    assert make_scale(form, torch.ones(2, 16, dtype=torch.bool), 1, torch.Generator()).device.type == "cpu"
