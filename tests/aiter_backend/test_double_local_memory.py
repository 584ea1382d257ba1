"""Tiles that do not fit into a workgroup's local memory: who says so, and when."""

from __future__ import annotations

from typing import Any

import pytest

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec
from planlife.testing.aiter_double import TileCompileError, aiter_double
from planlife.testing.aiter_double.compile_keys import TileShape, check_tile, tile_key
from planlife.testing.aiter_machine import aiter_machine

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
        ("gfx1250", "G3", {"query_length": 11, "kv_dtype": "float8_e4m3fn", "scales": "per_tensor"}),  # gfx1250's
    ],
    ids=["gfx942, FP8", "gfx942, BF16", "gfx1250, FP8"],
)
def test_a_class_whose_tile_does_not_fit_is_refused_when_it_is_minted_and_the_fallback_takes_it(
    arch, generation, changed
):
    spec = PlanSpec(**{**fields_of(SITE), **changed})
    options = {"ladder": CapacityLadder([1, 2]), "device": "cpu", "backend": "aiter"}
    with aiter_machine(arch, generation=generation):
        with PlanManager(spec, **options) as manager, manager.capture_phase():
            with pytest.raises(ConfigError, match="LDS"):
                manager.warm()
        with PlanManager(spec, fallback="torch", **options) as manager:
            with manager.capture_phase():
                manager.warm()
    with aiter_machine(arch, generation="G4" if arch == "gfx1250" else generation):
        smaller = spec if arch == "gfx1250" else PlanSpec(**{**fields_of(spec), "num_q_heads": 8})
        with PlanManager(smaller, **options) as manager, manager.capture_phase():
            manager.warm()  # positive control


def fields_of(spec: PlanSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}
