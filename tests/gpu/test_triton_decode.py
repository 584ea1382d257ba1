"""What only a GPU can show of the Triton decode: far addresses, long rows, real graphs, and that nothing compiles."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
triton = pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from planlife import PlanSpec  # noqa: E402
from planlife.kernels import torch_decode  # noqa: E402
from planlife.kernels.triton_decode import compile_decode  # noqa: E402

from ..lifecycle.world import row_errors  # noqa: E402
from ..torch_backend.test_cache_kinds import FP8, TOLERANCE, kind_spec  # noqa: E402
from ..triton_backend.triton_call import DEVICE, TritonCall  # noqa: E402

#: Of the worst row against the same decode in float32: the rounding of weights and output to bfloat16.
WORST_BFLOAT16 = 4e-3


#: KV dtypes and shapes of the tests of far pages and of large tiles; they are compiled ahead.
KV_DTYPES = ("bfloat16", *FP8)
LAYOUTS = ("nhd", "hnd", "packed")
TILE_DTYPES = ("bfloat16", "float32", *FP8)
TILES = ((512, 1, 1), (512, 16, 8), (256, 16, 4))


def far_options(layout: str, kv_dtype: str) -> dict[str, Any]:
    scales = "none" if kv_dtype == "bfloat16" else "device [1]"
    shape = {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128}
    return {**shape, "layout": layout, "kv_dtype": kv_dtype, "scales": scales}


def tile_options(dtype: str, head_dim: int, group: int, query_length: int) -> dict[str, Any]:
    scales = "per token" if dtype in FP8 else "none"
    shape = {"num_q_heads": group, "num_kv_heads": 1, "head_dim": head_dim, "query_length": query_length}
    return {**shape, "kv_dtype": dtype, "scales": scales}


def specs_ahead() -> list[PlanSpec]:
    return [
        *(kind_spec(**far_options(layout, dtype)) for layout in LAYOUTS for dtype in KV_DTYPES),
        *(kind_spec(**tile_options(dtype, *tile)) for dtype in TILE_DTYPES for tile in TILES),
    ]


def torch_output(call: TritonCall) -> torch.Tensor:
    """The torch backend's, in float32: for contexts that the dense reference would take minutes for."""
    output = torch.empty_like(call.query)
    torch_decode.decode_into(
        output,
        call.query,
        call.keys,
        call.values,
        call.tables,
        call.scale,
        spec=call.spec,
        work_info=call.plan.work_info,
        reduce_info=call.plan.reduce_info,
        scratch=torch.empty_like(call.scratch),
        **call.extras(),
    )
    return output


class LongCall(TritonCall):
    """A call over long rows, filled in one go: every page of the pool belongs to a row."""

    def __init__(self, lens: tuple[int, ...], num_cu: int = 132, **options: Any) -> None:
        super().__init__((1,) * len(lens), max_context_tokens=max(lens), **options)
        spec = self.spec
        owned = [-(-length // spec.page_size) for length in lens]
        with torch.device(DEVICE):
            self.lens = torch.tensor(lens, dtype=torch.int32)
            shape = (sum(owned), spec.page_size, spec.num_kv_heads, spec.head_dim)
            self.keys, self.values = (torch.randn(shape).to(self.keys.dtype) for _ in range(2))
            self.tables = torch.full((len(lens), max(owned)), -1, dtype=torch.int32)
            pages = torch.randperm(sum(owned), dtype=torch.int32)
            for row, own in enumerate(pages.split(owned)):
                self.tables[row, : owned[row]] = own
            table_bytes, scratch_bytes = (
                size(spec, len(lens), num_cu) for size in (self.backend.table_bytes, self.backend.scratch_bytes)
            )
            self.plan = self.backend.make_tables(spec, len(lens), num_cu, torch.zeros(table_bytes, dtype=torch.uint8))
            self.scratch = torch.full((scratch_bytes,), 0xFF, dtype=torch.uint8)
        self.refresh(self.lens)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_behind_two_to_the_31_elements_are_read_where_they_are(layout, kv_dtype):
    """The same pages at the end of a pool give the same bits; their offsets fit no 32-bit number, their ids no 16-bit
    one."""
    call = TritonCall((300, 17, 0), **far_options(layout, kv_dtype))
    near = call.decode().clone()
    call.assert_matches(near)
    num_pages = 2**31 // (16 * 128) + 4096
    pages = call.tables.unique()[1:]  # without the -1
    for name in ("keys", "values"):
        cache = getattr(call, name)
        pool = torch.full((num_pages, *cache.shape[1:]), 0xFF, dtype=torch.uint8, device=DEVICE)
        if cache.element_size() == 2:
            pool = torch.full((num_pages, *cache.shape[1:]), torch.nan, dtype=cache.dtype, device=DEVICE)
        pool = pool.view(cache.dtype)
        pool.view(torch.uint8)[num_pages - 1 - pages.long()] = cache.view(torch.uint8)[pages.long()]
        setattr(call, name, pool)
    call.tables = torch.where(call.tables == -1, call.tables, num_pages - 1 - call.tables)
    call.output.fill_(torch.nan)
    assert torch.equal(call.decode(), near)


def test_heads_two_to_the_31_elements_apart_are_read_where_they_are():
    call = TritonCall((300, 17), num_q_heads=4, num_kv_heads=2, head_dim=128)
    near = call.decode().clone()
    for name in ("keys", "values"):
        cache = getattr(call, name)
        pool = torch.empty(2**31 + cache.numel(), dtype=cache.dtype, device=DEVICE)
        page, token = 16 * 128, 128
        far = pool.as_strided(cache.shape, (page, token, 2**31, 1))
        far.copy_(cache)
        setattr(call, name, far)
    call.output.fill_(torch.nan)
    assert torch.equal(call.decode(), near)


@pytest.mark.parametrize(
    "options",
    [
        {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128},
        {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "workgroup_budget": 528},
        {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128, "query_length": 4, "sliding_window": 150_000},
        {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128, "kv_dtype": FP8[0], "scales": "host number"},
        {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128, "kv_dtype": FP8[1], "scales": "host number"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_one_very_long_row_among_short_ones_equals_the_torch_backend(options):
    """C43."""
    call = LongCall((*[257] * 15, 200_003, *[257] * 16), **options)
    errors = row_errors(call.decode(), torch_output(call).cpu().double(), call.spec.query_length)
    assert errors.max() <= WORST_BFLOAT16, errors


def test_a_graph_decodes_the_lengths_of_each_replay():
    call = LongCall((8192, 3000, 257, 1, 0, 700, 5000, 64), num_q_heads=8, num_kv_heads=2, head_dim=128)
    lens, most = call.lens.clone(), call.lens.clone()

    def step() -> None:
        call.refresh(lens)
        call.decode()

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(50):
        lens.copy_((torch.rand(len(lens), device=DEVICE) * (most + 1)).int())
        call.scratch.fill_(0xFF)
        call.output.fill_(torch.nan)
        graph.replay()
        found = call.output.clone()
        step()
        assert torch.equal(found, call.output)
        errors = row_errors(found, torch_output(call).cpu().double())
        assert errors.max() <= WORST_BFLOAT16, (lens, errors)


@contextmanager
def compilations() -> Iterator[list[str]]:
    found: list[str] = []
    knobs = triton.knobs.runtime
    before, knobs.jit_post_compile_hook = knobs.jit_post_compile_hook, lambda **event: found.append(event["repr"])
    try:
        yield found
    finally:
        knobs.jit_post_compile_hook = before


def test_no_row_count_stride_alignment_or_scale_compiles_after_compile():
    """C04."""
    call = TritonCall((300, 17, 1) * 11, kv_dtype=FP8[0], scales="device [1]", sinks=True, head_dim=64)
    rng = random.Random(0)
    with compilations() as found:
        for _ in range(60):
            rows = rng.choice([1, 2, 3, 7, 16, 32, 33])
            query = call.query[:rows]
            if rng.random() < 0.5:
                query = query.transpose(0, 1).contiguous().transpose(0, 1)
            extra = rng.choice([0, 1, 3, 16])
            keys = torch.empty((*call.keys.shape[:-1], 64 + extra), dtype=torch.float16, device=DEVICE)
            keys = keys.to(call.keys.dtype)[..., extra:]
            keys.view(torch.uint8).copy_(call.keys.view(torch.uint8))
            output = call.decode(
                query=query,
                output=torch.empty_like(query),
                key_cache=keys,
                block_tables=torch.nn.functional.pad(call.tables, (0, rng.randrange(5))),
                key_scale=rng.choice([call.key_scale, call.key_scale.item(), call.key_scale[0]]),
                sinks=rng.choice([None, call.sinks, call.sinks.half()]),
                lse=rng.choice([None, torch.empty(rows, 4, device=DEVICE)]),
            )
            assert output.isfinite().all()
        assert found == []
        compile_decode(dataclasses.replace(call.spec, page_size=48), DEVICE)  # positive control
        assert found


@pytest.mark.parametrize("scales", ["none", "host number", "device scalar", "per token"])
def test_a_decode_neither_allocates_nor_waits(scales):
    call = TritonCall((300, 17), kv_dtype="bfloat16" if scales == "none" else FP8[0], scales=scales, sinks=True)
    call.decode()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.decode()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    call.assert_matches(call.output)


@pytest.mark.parametrize("dtype", TILE_DTYPES)
@pytest.mark.parametrize(("head_dim", "group", "query_length"), TILES)
def test_the_largest_tiles_fit_the_device(dtype, head_dim, group, query_length):
    call = TritonCall((300, 17), **tile_options(dtype, head_dim, group, query_length))
    errors = row_errors(call.decode(), call.reference(), query_length)
    assert errors.max() <= TOLERANCE[call.spec.q_dtype], errors
