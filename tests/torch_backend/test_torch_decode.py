"""The tensor decode against the FP64 reference, with everything poisoned that a row does not own."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planlife.backends import dense_fallback
from planlife.backends.dense_fallback import DenseFallback
from planlife.backends.torch_backend import TorchBackend
from planlife.errors import ConfigError
from planlife.kernels import torch_decode
from planlife.spec import PlanSpec
from planlife.testing import EmulatedGraph, record, reference_decode

NUM_CU = 8
#: Largest error against the reference: rounding of the output for 16-bit types, of the sums for float32.
TOLERANCE = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
#: Empty, below, at and above page and tile edges.
EDGE_LENS = (0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 700)


class Call:
    """One decode call over `lens`: pages shuffled, whatever no row owns is NaN, table entries past a row's pages are
    -1, scratch and output hold NaN before."""

    def __init__(self, spec: PlanSpec, lens: tuple[int, ...], *, plan_rows: int | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.spec, self.lens = spec, torch.tensor(lens, dtype=torch.int32)
        self.scale = 1 / math.sqrt(spec.head_dim)
        self.backend = TorchBackend()
        self.plan_rows = len(lens) if plan_rows is None else plan_rows
        tables, scratch = (
            torch.full((num_bytes(spec, self.plan_rows, NUM_CU),), 0xFF, dtype=torch.uint8)
            for num_bytes in (self.backend.table_bytes, self.backend.scratch_bytes)
        )
        self.scratch = scratch
        self.plan = self.backend.make_tables(spec, self.plan_rows, NUM_CU, tables)
        self.backend.refresh(self.plan, self.lens, len(lens))
        owned = [-(-length // spec.page_size) for length in lens]
        num_pages = sum(owned) + 3
        pages = (torch.randperm(num_pages - 1) + 1).tolist()  # page 0 belongs to nobody
        q_dtype, kv_dtype = getattr(torch, spec.q_dtype), getattr(torch, spec.kv_dtype)
        shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=kv_dtype) for _ in range(2))
        columns = -(-spec.max_context_tokens // spec.page_size)
        self.tables = torch.full((len(lens), columns), -1, dtype=torch.int32)
        for row, (length, num_owned) in enumerate(zip(lens, owned, strict=True)):
            for column in range(num_owned):
                page = pages.pop()
                self.tables[row, column] = page
                filled = min(length - column * spec.page_size, spec.page_size)
                for cache in (self.keys, self.values):
                    cache[page, :filled] = torch.randn(filled, *shape[2:])
                    cache[page, filled:] = torch.inf
        self.query = torch.randn(len(lens) * spec.query_length, spec.num_q_heads, spec.head_dim).to(q_dtype)
        self.output = torch.full_like(self.query, torch.nan)

    def decode(self, **changed: Any) -> torch.Tensor:
        call = {
            "tables": self.plan,
            "scratch": self.scratch,
            "output": self.output,
            "query": self.query,
            "key_cache": self.keys,
            "value_cache": self.values,
            "block_tables": self.tables,
            "softmax_scale": self.scale,
            "key_scale": None,
            "value_scale": None,
            "sinks": None,
            "lse": None,
            **changed,
        }
        self.backend.decode(**call)
        return call["output"]

    def reference(self, lens: torch.Tensor | None = None) -> torch.Tensor:
        return reference_decode(
            self.query,
            self.keys,
            self.values,
            self.tables,
            self.lens if lens is None else lens,
            self.scale,
            query_length=self.spec.query_length,
            sliding_window=self.spec.sliding_window,
        )

    def assert_matches(self, output: torch.Tensor, lens: torch.Tensor | None = None) -> None:
        wanted = self.reference(lens)
        torch.testing.assert_close(output.double(), wanted, rtol=0, atol=TOLERANCE[self.spec.q_dtype])
        empty = (self.lens if lens is None else lens).repeat_interleave(self.spec.query_length) == 0
        assert (output[empty] == 0).all()


def make_spec(num_q_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, **options: Any) -> PlanSpec:
    defaults = {"max_context_tokens": 800, "q_dtype": "float32", "kv_dtype": "float32"}
    return PlanSpec(num_q_heads, num_kv_heads, head_dim, options.pop("page_size", 16), **{**defaults, **options})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("query_length", [1, 3])
def test_every_dtype_and_length_equals_the_reference(dtype, query_length):
    call = Call(make_spec(q_dtype=dtype, kv_dtype=dtype, query_length=query_length), EDGE_LENS)
    call.assert_matches(call.decode())


def test_query_and_cache_may_differ_in_dtype():
    call = Call(make_spec(q_dtype="bfloat16", kv_dtype="float32"), (300, 5))
    call.assert_matches(call.decode())


@pytest.mark.parametrize("group", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_every_group_size_equals_the_reference(group, num_kv_heads):
    call = Call(make_spec(group * num_kv_heads, num_kv_heads, query_length=2), (0, 300, 17))
    call.assert_matches(call.decode())


@pytest.mark.parametrize("query_length", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("window", [0, 1, 255, 256, 257, 5000, 2**63 - 1])
def test_every_window_and_query_length_equals_the_reference(window, query_length):
    call = Call(make_spec(2, 1, query_length=query_length, sliding_window=window), (3, 0, 256, 520, 777))
    call.assert_matches(call.decode())


@pytest.mark.parametrize("page_size", [1, 7, 64, 256, 400])
def test_every_page_size_equals_the_reference(page_size):
    call = Call(make_spec(page_size=page_size, max_context_tokens=600), (0, 1, 255, 257, 600))
    call.assert_matches(call.decode())


@pytest.mark.parametrize("options", [{"max_partitions": 1}, {"max_partitions": 3}, {"workgroup_budget": 1}])
def test_fewer_partitions_give_the_same_output(options):
    call = Call(make_spec(**options), EDGE_LENS)
    call.assert_matches(call.decode())


def test_the_head_outermost_layout_equals_the_reference():
    call = Call(make_spec(), EDGE_LENS)
    hnd = [cache.transpose(1, 2).contiguous() for cache in (call.keys, call.values)]
    plan = call.backend.make_tables(
        dataclasses.replace(call.spec, kv_layout="hnd"),
        call.plan_rows,
        NUM_CU,
        torch.zeros(call.backend.table_bytes(call.spec, call.plan_rows, NUM_CU), dtype=torch.uint8),
    )
    call.backend.refresh(plan, call.lens, len(call.lens))
    call.assert_matches(call.decode(tables=plan, key_cache=hnd[0], value_cache=hnd[1]))


def test_views_of_any_strides_are_served_in_place():
    call = Call(make_spec(), (300, 17))
    halves = torch.cat((call.keys, call.values), dim=-1)  # K and V as two halves of one token's row
    outermost = call.values.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    strided = torch.full((4, 2, *call.query.shape), torch.nan).permute(1, 2, 3, 4, 0)[0, ..., 0]
    views = {"key_cache": halves[..., :16], "value_cache": halves[..., 16:], "output": strided}
    call.assert_matches(call.decode(**views))
    call.assert_matches(
        call.decode(value_cache=outermost, query=call.query.transpose(0, 1).contiguous().transpose(0, 1))
    )


def test_one_page_broadcast_over_the_block_axis_is_served():
    call = Call(make_spec(), (300, 17))
    call.keys, call.values = (torch.randn(1, 16, 2, 16).expand(call.keys.shape) for _ in range(2))
    call.assert_matches(call.decode())


@pytest.mark.parametrize("query_rows", [3, 4, 6, 8])
def test_rows_behind_the_plans_are_exact_zeros_for_every_row_count_up_to_the_class(query_rows):
    call = Call(make_spec(query_length=2), (300, 0, 17), plan_rows=8)
    query = torch.cat((call.query, torch.full(((query_rows - 3) * 2, 4, 16), torch.nan)))
    output = call.decode(query=query, output=torch.full_like(query, torch.nan))
    call.assert_matches(output[:6])
    assert (output[6:] == 0).all()


def test_rows_of_the_table_that_are_not_asked_for_change_nothing():
    call = Call(make_spec(), (300, 257, 17))
    output = call.decode(query=call.query[:2], output=call.output[:2])
    torch.testing.assert_close(output.double(), call.reference()[:2], rtol=0, atol=5e-6)
    assert call.output[2:].isnan().all()


def test_all_rows_empty_is_all_zeros_and_reads_no_page():
    call = Call(make_spec(), (0, 0, 0))
    call.tables.fill_(2**30)
    assert (call.decode() == 0).all()


def test_entries_past_a_rows_pages_are_never_used_as_an_index():
    call = Call(make_spec(), EDGE_LENS)
    call.tables[call.tables == -1] = 2**30
    call.assert_matches(call.decode())


def test_a_length_beyond_the_block_table_reads_what_the_table_has():
    call = Call(make_spec(), (320,))
    call.backend.refresh(call.plan, torch.tensor([700], dtype=torch.int32), 1)
    narrow = call.tables[:, :20].contiguous()
    call.assert_matches(call.decode(block_tables=narrow))


def test_lengths_come_from_the_plan_so_that_a_stale_plan_gives_the_stale_answer():
    call = Call(make_spec(), (300, 257))
    stale = torch.tensor([299, 100], dtype=torch.int32)
    call.backend.refresh(call.plan, stale, 2)
    call.assert_matches(call.decode(), stale)
    call.backend.refresh(call.plan, call.lens, 2)
    call.assert_matches(call.decode())


def test_column_three_alone_decides_the_length_inside_a_tile():
    call = Call(make_spec(), (200, 250))
    call.plan.work_info[1, 3] = 211
    call.assert_matches(call.decode(), torch.tensor([200, 211], dtype=torch.int32))


def test_the_tiles_come_from_the_work_table():
    """A row of two tiles in two tasks: without its second task it decodes its first tile only."""
    call = Call(make_spec(), (512,))
    assert call.plan.work_info[:2].tolist() == [[0, 0, 1, 512], [0, 1, 2, 512]]
    call.plan.work_info[1, 2] = 1  # an empty tile range
    call.assert_matches(call.decode(), torch.tensor([256], dtype=torch.int32))


def test_the_reduce_takes_only_slots_that_the_reduce_table_names():
    call = Call(make_spec(), (512, 512))
    call.plan.reduce_info[0] = torch.tensor([0, 1])  # of two
    call.plan.reduce_info[1] = torch.tensor([2, 0])
    call.lens = torch.tensor([256, 0], dtype=torch.int32)
    call.assert_matches(call.decode())


@pytest.mark.parametrize("unnamed", [0, 1, 4, 7])
def test_a_row_without_slots_in_the_reduce_table_is_zero_and_the_others_stay_right(unnamed):
    call = Call(make_spec(), (300, 17, 5, 700, 9, 257, 100, 3))
    call.plan.reduce_info[unnamed, 1] = 0
    call.lens[unnamed] = 0
    call.assert_matches(call.decode())


def test_a_query_token_that_sees_nothing_leaves_an_empty_partial():
    call = Call(make_spec(1, 1, query_length=3), (1,))
    call.assert_matches(call.decode())
    max_logits, exp_sums = call.scratch.view(torch.float32)[: 6 * call.plan.capacity].view(2, call.plan.capacity, 3)
    assert max_logits[0, :2].isneginf().all()
    assert exp_sums[0].tolist() == [0.0, 0.0, 1.0]


def test_the_partials_are_in_the_arena_as_documented():
    """max_logits, exp_sums [kv_heads, capacity, rows], then partial outputs: softmax state of each slot."""
    call = Call(make_spec(2, 1), (300,))
    output = call.decode()
    slots = call.plan.capacity * 2
    words = call.scratch.view(torch.float32)
    sums, partials = words[slots : 2 * slots].view(-1, 2), words[2 * slots :].view(-1, 2, 16)
    weights = torch.exp(words[:slots].view(-1, 2) - words[:slots].view(-1, 2).amax(0))
    merged = (weights[..., None] * partials).sum(0) / (weights * sums).sum(0)[..., None]
    torch.testing.assert_close(output[0], merged, rtol=0, atol=1e-6)


def test_an_arena_larger_than_the_call_is_only_written_in_front():
    call = Call(make_spec(), (300,))
    arena = torch.full((call.scratch.numel() + 4096,), 0x7F, dtype=torch.uint8)
    call.assert_matches(call.decode(scratch=arena))
    assert (arena[call.scratch.numel() :] == 0x7F).all()


@pytest.mark.parametrize("chunk_bytes", [1, 200_000])
def test_small_chunks_give_the_same_output(monkeypatch, chunk_bytes):
    monkeypatch.setattr(torch_decode, "_CHUNK_BYTES", chunk_bytes)
    call = Call(make_spec(query_length=2), EDGE_LENS)
    call.assert_matches(call.decode())


@pytest.mark.parametrize("max_context_tokens", [256, 4096, 200_000])
def test_chunks_cover_all_rows_and_tiles_once_within_their_bound(max_context_tokens):
    spec = make_spec(64, 8, 128, max_context_tokens=max_context_tokens, query_length=4)
    rows, tiles = 33, -(-max_context_tokens // 256)
    chunks = list(torch_decode._chunks(rows, tiles, spec))
    assert sorted((r, t) for rs, ts in chunks for r in rs for t in ts) == [
        (r, t) for r in range(rows) for t in range(tiles)
    ]
    kv_bytes = 2 * 4 * 256 * 8 * 128
    assert max(len(rs) * len(ts) for rs, ts in chunks) * kv_bytes <= 32 << 20


def test_an_infinite_value_that_is_attended_comes_out_infinite():
    call = Call(make_spec(2, 1, query_length=2), (300, 17))
    call.values[call.tables[0, 0], 3, 0, 0] = torch.inf
    call.values[call.tables[0, 1], 3, 0, 1] = -torch.inf
    output = call.decode()
    assert output[:2, :, 0].isposinf().all()
    assert output[:2, :, 1].isneginf().all()
    assert torch.equal(output.double().isfinite(), call.reference().isfinite())


def test_an_infinite_value_survives_a_weight_that_underflows():
    """exp(-150) is 0 in float32, and 0 x inf would be NaN. The infinite token is in a task of its own."""
    call = Call(make_spec(1, 1), (512,))
    call.query.fill_(1.0)
    for column in range(32):
        call.keys[call.tables[0, column]] = 0.0
    call.keys[call.tables[0, 31], 15] = 150 / (16 * call.scale)
    call.values[call.tables[0, 0], 0, 0, 0] = torch.inf
    assert call.reference()[0, 0, 0] == torch.inf
    output = call.decode()
    assert output[0, 0, 0] == torch.inf
    assert output[0, 0, 1:].isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_only_a_later_query_token_sees_never_reaches_an_earlier_one(poison):
    call = Call(make_spec(2, 1, query_length=3), (300,))
    newest = divmod(299, 16)
    call.values[call.tables[0, newest[0]], newest[1]] = poison
    output = call.decode()
    assert not output[2].isfinite().any()
    torch.testing.assert_close(output[:2].double(), call.reference()[:2], rtol=0, atol=5e-6)


def test_very_large_logits_do_not_overflow():
    call = Call(make_spec(), (300, 17))
    call.query.mul_(1000)
    torch.testing.assert_close(call.decode().double(), call.reference(), rtol=0, atol=1e-3)


def test_a_trainable_query_leaves_the_arena_free_of_gradients():
    call = Call(make_spec(), (300, 17))
    call.query.requires_grad_()
    output = call.decode()
    assert not output.requires_grad
    assert not call.scratch.requires_grad


def test_a_recorded_step_decodes_the_lengths_of_its_replay():
    call = Call(make_spec(query_length=2), EDGE_LENS, plan_rows=16)
    lens = call.lens.clone()
    graph = EmulatedGraph()
    with record(graph):
        call.backend.refresh(call.plan, lens, len(lens))
        call.decode()
    for step in (call.lens, call.lens // 2, call.lens * 0, call.lens):
        lens.copy_(step)
        call.scratch.fill_(0xFF)
        call.output.fill_(torch.nan)
        graph.replay()
        call.assert_matches(call.output, step)


def fall_back(call: Call, **changed: Any) -> torch.Tensor:
    options = {"spec": call.spec, "key_scale": None, "value_scale": None, "sinks": None, **changed}
    fallback = DenseFallback(TorchBackend())
    fallback(call.output, call.query, call.keys, call.values, call.tables, call.lens, call.scale, **options)
    return call.output


@pytest.mark.parametrize("options", [{}, {"query_length": 3, "sliding_window": 256}, {"max_partitions": 5}])
def test_the_fallback_equals_the_reference(options):
    call = Call(make_spec(**options), EDGE_LENS)
    call.assert_matches(fall_back(call))


def test_the_fallback_bounds_its_scratch_by_going_on_in_row_ranges(monkeypatch):
    """As little as its largest range needs, and none of it is left."""
    monkeypatch.setattr(dense_fallback, "_CHUNK_ROWS", 5)
    call = Call(make_spec(query_length=2), EDGE_LENS)
    scratch_rows, scratches = [], []
    scratch_bytes, decode = TorchBackend.scratch_bytes, TorchBackend.decode

    def noting_scratch_bytes(self, spec, plan_rows, num_compute_units):
        scratch_rows.append(plan_rows)
        return scratch_bytes(self, spec, plan_rows, num_compute_units)

    def noting_decode(self, tables, scratch, *rest):
        scratches.append(weakref.ref(scratch))
        decode(self, tables, scratch, *rest)

    monkeypatch.setattr(TorchBackend, "scratch_bytes", noting_scratch_bytes)
    monkeypatch.setattr(TorchBackend, "decode", noting_decode)
    call.assert_matches(fall_back(call))
    assert scratch_rows == [5, 5, 2]
    assert [scratch() for scratch in scratches] == [None] * 3


def test_the_fallback_zeroes_query_rows_behind_the_lengths():
    call = Call(make_spec(), (300, 17))
    call.lens = call.lens[:1]
    output = fall_back(call)
    torch.testing.assert_close(output[:1].double(), call.reference()[:1], rtol=0, atol=5e-6)
    assert (output[1:] == 0).all()


def test_a_recorded_fallback_decodes_the_lengths_of_its_replay():
    call = Call(make_spec(), (300, 17))
    step = call.lens.clone()
    graph = EmulatedGraph()
    with record(graph):
        fall_back(call)
    for divisor in (1, 2):
        call.lens.copy_(step // divisor)
        graph.replay()
        call.assert_matches(call.output)


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize("serve", [Call.decode, fall_back])
def test_what_the_backend_cannot_take_is_refused_before_anything_changes(name, serve):
    call = Call(make_spec(), (300, 17))
    with pytest.raises(ConfigError, match=name):
        serve(call, **{name: torch.ones(4)})
    assert call.output.isnan().all()
    assert (call.scratch == 0xFF).all()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_layout": "packed", "head_dim": 18}, "head_dim 18 and page_size 16: a packed float32 .* multiples of 4"),
        ({"kv_layout": "packed", "kv_dtype": "bfloat16", "page_size": 4}, "page_size 4: .* multiples of 8"),
        (
            {"kv_layout": "packed", "kv_dtype": "float8_e4m3fn", "scales": "per_token", "head_dim": 24},
            "head_dim 24 .* multiples of 16",
        ),
        ({"max_partitions": NUM_CU + 1}, "max_partitions=9 is above the 8 compute units of cpu"),
    ],
)
def test_a_spec_that_can_never_be_served_is_refused_with_its_reason(options, named):
    device = types.SimpleNamespace(name="cpu", num_compute_units=NUM_CU)
    (reason,) = TorchBackend().refuse_spec(make_spec(**options), device)
    assert re.search(named, reason)


def test_every_reason_is_given_and_a_spec_beside_them_is_taken():
    device = types.SimpleNamespace(name="cpu", num_compute_units=NUM_CU)
    backend = TorchBackend()
    refused = make_spec(kv_layout="packed", head_dim=18, max_partitions=NUM_CU + 1)
    assert len(backend.refuse_spec(refused, device)) == 2
    assert not backend.refuse_spec(make_spec(kv_layout="hnd", max_partitions=NUM_CU, query_length=6), device)


def test_the_row_limit_is_a_setting():
    assert TorchBackend().max_plan_rows is None
    assert TorchBackend(max_plan_rows=4).max_plan_rows == 4


@pytest.mark.parametrize("limit", [0, -3, True, 2.5, "4"])
def test_a_row_limit_that_can_never_work_is_refused(limit):
    with pytest.raises(ConfigError, match="max_plan_rows must be"):
        TorchBackend(max_plan_rows=limit)


@pytest.mark.parametrize(("device", "is_told"), [("cuda:0", True), ("cpu", False)])
def test_what_matrix_products_keep_on_a_gpu_is_told(device, is_told):
    assert ("cuBLAS" in str(TorchBackend().excluded(SimpleNamespace(name=device)))) is is_told
