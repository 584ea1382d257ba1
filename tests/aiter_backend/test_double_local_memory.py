"""Tiles that do not fit into a workgroup's local memory: who says so, and when."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, Step
from planlife.backends.aiter_limits import FP8_OF_ARCHITECTURE
from planlife.backends.aiter_tile import LDS_BYTES, refuse_tile
from planlife.planner import spec_capacity
from planlife.testing.aiter_double import TileCompileError, aiter_double
from planlife.testing.aiter_double.compile_keys import TileShape, check_tile, tile_key
from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.fakes import FakeDevice

from .double_call import num_compiled, pa_decode, valid_call

#: A tile that no schedule tunes, of one row.
PLAIN = TileShape(
    arch="gfx942", num_cu=8, rows=1, num_kv_heads=1, group=16, head_dim=1024, page=64, capacity=4, max_partitions=2,
    softmax_scale=1.0, query_dtype="f16", kv_dtype="fp8", per_token=False, query_length=1, is_transposed_v=True,
    cache_bytes=1, context_bound=256, window=0,
)  # fmt: skip


def shape(**changed: Any) -> TileShape:
    return TileShape(**{**vars(PLAIN), **changed})


@pytest.mark.parametrize(
    ("changed", "most"),
    [
        # By an independent model of the library's layout.
        ({}, 48),
        ({"arch": "gfx950"}, 144),
        ({"per_token": True}, 48),
        ({"head_dim": 896}, 64),
        ({"head_dim": 896, "per_token": True}, 64),
        ({"head_dim": 256}, 224),
        ({"head_dim": 64}, 736),
        ({"arch": "gfx950", "head_dim": 128, "page": 128, "query_dtype": "bf16"}, 1104),
        ({"arch": "gfx950", "head_dim": 128, "page": 128, "query_dtype": "bf16", "per_token": True}, 1040),
    ],
    ids=str,
)
def test_an_fp8_tile_of_more_query_rows_than_its_local_memory_holds_is_not_compiled(changed, most):
    for rows in (1, most - 15, most):
        check_tile(shape(group=rows, **changed))
        tile_key(shape(group=rows, **changed))
    for rows in (most + 1, most + 16, 4096):
        tile_key(shape(group=rows, **changed))  # the schedule does not look
        with pytest.raises(TileCompileError, match=f"{shape(**changed).arch} has"):
            check_tile(shape(group=rows, **changed))


def splits(group: int, query_length: int, head_dim: int = 256, arch: str = "gfx942") -> Any:
    key = tile_key(
        shape(kv_dtype="bf16", query_dtype="bf16", group=group, query_length=query_length, head_dim=head_dim, arch=arch)
    )
    return key[-3]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_queries_of_a_bf16_cache_are_split_until_each_part_fits(arch):
    """112 rows of 256 numbers are 57,344 bytes, and 59,920 with their statistics; 128 are too many."""
    assert [splits(16, length, arch=arch) for length in (1, 2, 7, 8, 9, 14, 15, 16, 11)] == [1, 1, 1, 2, 3, 2, 3, 4, 11]
    assert splits(112, 6, arch=arch) == 6
    with pytest.raises(ValueError, match="BF16.*LDS"):
        splits(113, 6, arch=arch)
    assert splits(113, 4, head_dim=64, arch=arch) == 2  # positive control


def test_on_gfx1250_the_text_of_bf16_caches_holds_one_query_tile_where_local_memory_is_short():
    wide = {"arch": "gfx1250", "head_dim": 1024, "group": 16}
    for kv_dtype in ("fp8", "bf16"):
        tile_key(shape(kv_dtype=kv_dtype, query_length=999, stages_one_query_tile=True, **wide))
    tile_key(shape(query_length=10, **wide))
    with pytest.raises(NotImplementedError, match="LDS"):
        tile_key(shape(query_length=11, **wide))


def test_what_the_compiler_finds_comes_behind_the_checks_of_scratch_and_before_anything_is_launched():
    with aiter_double(arch="gfx942", num_cu=8) as double:
        wide = {"head_dim": 1024, "page": 64, "lens": (300,), "group": 16}
        pa_decode(**valid_call(double, query_length=3, **wide))
        call, decodes = valid_call(double, query_length=4, **wide), double.decodes
        for _ in range(2):  # there is nothing to find a second time
            with pytest.raises(TileCompileError, match="67408 bytes of LDS, and gfx942 has 65536"):
                pa_decode(**call)
        with pytest.raises(ValueError, match="exp_sums must have shape"):
            pa_decode(**call | {"exp_sums": call["exp_sums"][:, 1:]})
        assert double.decodes == decodes and num_compiled(double, "reduce") == 1 and call["output"].isnan().all()


SITE = PlanSpec(16, 1, 1024, 64, max_context_tokens=256, kv_layout="packed", query_length=4)
FP8 = {"kv_dtype": "float8_e4m3fnuz", "scales": "per_tensor"}


@pytest.mark.parametrize(
    ("arch", "generation", "changed"),
    [
        ("gfx942", "G3", FP8),  # the compiler
        ("gfx942", "G3", {"num_q_heads": 48}),  # the schedule of BF16 caches
        ("gfx950", "G2", {"num_q_heads": 32, "page_size": 16, "max_context_tokens": 64, "query_length": 1}),
        ("gfx1250", "G3", {"query_length": 11, "kv_dtype": "float8_e4m3fn", "scales": "per_tensor"}),  # gfx1250's
        ("gfx1250", "newer", {"query_length": 11, "kv_dtype": "float8_e4m3fn", "scales": "per_tensor"}),
    ],
    ids=["gfx942, FP8", "gfx942, BF16", "gfx950, BF16", "gfx1250, FP8", "gfx1250, FP8, newer"],
)
def test_a_site_whose_tile_does_not_fit_is_refused_when_the_manager_is_made_and_auto_goes_on(arch, generation, changed):
    spec = PlanSpec(**{**fields_of(SITE), **changed})
    options = {"ladder": CapacityLadder([1, 2]), "device": "cpu", "backend": "aiter"}
    with aiter_machine(arch, generation=generation):
        with pytest.raises(ConfigError, match=r"bytes of local memory \(LDS\), and has .* or pass 'triton'"):
            PlanManager(spec, **options)
        with PlanManager(spec, fallback="torch", **options) as manager:
            assert manager.plan_for(Step(torch.ones(1, dtype=torch.int32))).route == "fallback"
    with aiter_machine(arch, generation=generation, device_type="meta", num_cu=256):
        device = FakeDevice("meta", 256)
        with PlanManager(spec, ladder=CapacityLadder([1]), device=device) as manager:
            assert manager.report().backend != "aiter"
        smaller = PlanSpec(**{**fields_of(spec), "num_q_heads": 8})
        with PlanManager(smaller, ladder=CapacityLadder([1]), device=device) as manager:
            assert manager.report().backend == "aiter"  # positive control
    if arch == "gfx1250":  # whose other text holds one query tile
        with aiter_machine(arch, generation="G4"):
            PlanManager(spec, **options).close()


def test_what_is_refused_when_a_manager_is_made_is_what_no_class_of_the_site_can_compile():
    draw = random.Random(0)
    outcomes = Counter()
    for number in range(6000):
        spec, arch = random_site(draw)
        refusal = refuse_tile(spec, arch, has_text_of_gfx1250=False, num_compute_units=256)
        compiles = any(is_compiled(spec, arch, rows, has_5d_v) for rows in ROWS for has_5d_v in (True, False))
        assert compiles == (not refusal), f"draw {number}: {spec} on {arch}: {refusal}"
        outcomes[arch, compiles] += 1
    assert len(outcomes) == 6 and min(outcomes.values()) > 50


ROWS = (1, 2, 64, 4096)


def random_site(draw: random.Random) -> tuple[PlanSpec, str]:
    arch = draw.choice(("gfx942", "gfx950", "gfx1250"))
    is_fp8 = arch == "gfx1250" or draw.random() < 0.6
    heads = draw.choice((1, 2))
    head_dim, query_length = draw.choice((64, 128, 128, 256, 896, 1024)), draw.choice((1, 1, 2, 3, 4, 11))
    group = draw.choice((1, 8, 16, 32, 64, 112, 113, 224, 512, 2048))
    if draw.random() < 0.6:  # near the limit
        group = max(1, LDS_BYTES[arch] // (head_dim + 24) // query_length - draw.randrange(-16, 96))
    return PlanSpec(
        heads * group, heads, head_dim, draw.choice((16, 64, 128)),
        max_context_tokens=4096, kv_layout="packed", query_length=query_length,
        sliding_window=draw.choice((0, 0, 1, 300, 5000)), max_partitions=draw.choice((1, 2, 64, 256)),
        workgroup_budget=draw.choice((1, 512, 4000)),
        kv_dtype=FP8_OF_ARCHITECTURE[arch] if is_fp8 else "bfloat16",
        scales=draw.choice(("per_token", "per_tensor")) if is_fp8 else "none",
    ), arch  # fmt: skip


def is_compiled(spec: PlanSpec, arch: str, rows: int, has_5d_v: bool) -> bool:
    tile = TileShape(
        arch=arch, num_cu=256, rows=rows, num_kv_heads=spec.num_kv_heads, group=spec.group_size,
        head_dim=spec.head_dim, page=spec.page_size, capacity=spec_capacity(spec, rows, 256),
        max_partitions=spec.max_partitions, softmax_scale=1.0, query_dtype="bf16",
        kv_dtype="bf16" if spec.scales == "none" else "fp8", per_token=spec.scales == "per_token",
        query_length=spec.query_length, is_transposed_v=has_5d_v, cache_bytes=1, context_bound=4096,
        window=spec.sliding_window,
    )  # fmt: skip
    try:
        tile_key(tile)
        check_tile(tile)
    except (TileCompileError, ValueError, NotImplementedError):
        return False
    return True


def fields_of(spec: PlanSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}
