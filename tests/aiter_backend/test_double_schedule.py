"""Which flags the schedule of aiter's decode tile selects: each condition of a flag, one at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planlife.testing.aiter_double.compile_keys import TileShape, plan_key, reduce_key, tile_key

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "aiter_schedule_vectors.json").read_text("utf-8"))

#: gfx950, four queries of a group of 16, per-token FP8 with transposed V: every tuned flag of dense decode.
TUNED = TileShape(
    arch="gfx950", num_cu=8, rows=1, num_kv_heads=1, group=16, head_dim=128, page=128, capacity=4, max_partitions=2,
    softmax_scale=1.0, query_dtype="bf16", kv_dtype="fp8", per_token=True, query_length=4, is_transposed_v=True,
    cache_bytes=1, context_bound=256, window=0,
)  # fmt: skip
NAMES = ("wide", "buffer_kv", "prefetch_v", "one_query", "splits", "single_tile", "batch_first")


def flags(**changed: object) -> dict[str, object]:
    return dict(zip(NAMES, tile_key(replace(TUNED, **changed))[-len(NAMES) :], strict=True))


@pytest.mark.parametrize(
    ("changed", "splits"),
    [
        ({}, 4),
        ({"query_length": 2}, 2),
        ({"page": 16}, 4),
        ({"is_transposed_v": False}, 4),
        ({"group": 8}, 2),
        ({"group": 8, "page": 16}, 1),
        ({"group": 8, "is_transposed_v": False}, 1),
        ({"group": 8, "num_cu": 1}, 1),
        ({"num_cu": 1}, 1),
        ({"query_length": 3}, 1),
        ({"group": 4}, 1),
        ({"arch": "gfx942"}, 1),
        ({"head_dim": 256}, 1),
        ({"page": 64}, 1),
        ({"kv_dtype": "bf16"}, 1),
        ({"query_dtype": "f16"}, 1),
        ({"per_token": False}, 1),
        ({"num_kv_heads": 2}, 4),
        ({"num_kv_heads": 2, "window": 256}, 1),
        # A windowed plan of one tile per task weighs 1 a query, and 4 otherwise.
        ({"window": 256, "capacity": 12, "max_partitions": 8, "rows": 4, "num_cu": 6}, 4),
        ({"window": 256, "capacity": 11, "max_partitions": 8, "rows": 4, "num_cu": 6}, 1),
        ({"window": 256, "capacity": 12, "max_partitions": 1, "rows": 4, "num_cu": 6}, 1),
        ({"window": 256, "capacity": 12, "max_partitions": 8, "rows": 4, "num_cu": 6, "is_transposed_v": False}, 1),
        ({"window": 256, "capacity": 12, "max_partitions": 8, "rows": 4, "num_cu": 6, "page": 16}, 1),
    ],
    ids=str,
)
def test_queries_are_split_where_the_schedule_says_so(changed, splits):
    assert flags(**changed)["splits"] == splits


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_cu": 1, "cache_bytes": 2**31}, True),
        ({"num_cu": 1, "cache_bytes": 2**31 - 1}, False),
        ({"num_cu": 1, "cache_bytes": 2**32}, False),
        ({"num_cu": 1, "cache_bytes": 2**31, "page": 16}, False),
        ({"num_cu": 1, "cache_bytes": 2**31, "query_length": 3}, False),
        ({"cache_bytes": 2**31}, False),  # split: a workgroup has one query
    ],
    ids=str,
)
def test_wide_caches_are_read_through_buffers_by_the_fused_kernel(changed, expected):
    assert flags(**changed)["buffer_kv"] is expected


BATCH_FIRST = {"window": 4096, "rows": 4, "capacity": 72, "max_partitions": 18, "num_cu": 64}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"capacity": 73}, False),
        ({"rows": 3, "capacity": 54}, False),
        ({"num_kv_heads": 2}, False),
        ({"max_partitions": 65}, False),
        ({"window": 4095}, False),
        ({"rows": 10, "capacity": 180, "num_cu": 256}, False),  # an even batch over an even number of tiles
        ({"rows": 9, "capacity": 162, "num_cu": 256}, True),
    ],
    ids=str,
)
def test_the_grid_is_batch_first_for_exact_windowed_plans(changed, expected):
    assert flags(**{**BATCH_FIRST, **changed})["batch_first"] is expected


def shape_of(case: dict[str, object]) -> TileShape:
    return TileShape(**dict(zip(VECTORS["shape_fields"], case["shape"], strict=True)))


@pytest.mark.parametrize("case", VECTORS["tile"], ids=lambda case: str(case["shape"]))
def test_a_tile_is_keyed_as_the_library_keys_it(case):
    if case["key"] == "NotImplementedError":
        with pytest.raises(NotImplementedError, match="LDS"):
            tile_key(shape_of(case))
    else:
        assert list(tile_key(shape_of(case))) == case["key"]


@pytest.mark.parametrize("case", VECTORS["reduce"], ids=lambda case: str(case["shape"]))
def test_a_reducer_is_keyed_as_the_library_keys_it(case):
    given = (case["output_dtype"], case["sink_dtype"], case["pointer"], tuple(case["strides"]))
    assert list(reduce_key(shape_of(case), *given)) == case["key"]


PLAN = {"rows": 4, "capacity": 8, "max_partitions": 3, "window": 256, "query_length": 2, "pointers": (16, 32, 48)}


@pytest.mark.parametrize("planner", ["triton", "flydsl"])
@pytest.mark.parametrize("change", [{name: PLAN[name] + 1} for name in PLAN if name != "pointers"], ids=str)
def test_every_number_of_a_windowed_plan_makes_another_planner(planner, change):
    assert plan_key(planner, **PLAN)[0] == "plan"
    assert plan_key(planner, **PLAN | change) != plan_key(planner, **PLAN)


@pytest.mark.parametrize("planner", ["triton", "flydsl"])
def test_planners_are_shared_where_their_numbers_mean_the_same(planner):
    dense = PLAN | {"window": 0}
    assert plan_key(planner, **dense | {"query_length": 9}) == plan_key(planner, **dense)
    assert plan_key(planner, **PLAN | {"window": 1}) != plan_key(planner, **dense | {"query_length": 2})
    assert plan_key(planner, **PLAN | {"window": 1, "query_length": 3}) != plan_key(planner, **PLAN | {"window": 1})
    widest = PLAN | {"window": 2**31 - 1}
    assert plan_key(planner, **widest | {"window": 2**40}) == plan_key(planner, **widest)
    assert plan_key(planner, **widest | {"window": 2**31 - 2}) != plan_key(planner, **widest)
    assert plan_key(planner, **PLAN | {"pointers": (64, 0, 16)}) == plan_key(planner, **PLAN)
    for at in range(3):
        pointers = tuple(8 if at == one else 16 for one in range(3))
        assert (plan_key(planner, **PLAN | {"pointers": pointers}) == plan_key(planner, **PLAN)) == (
            planner == "flydsl"
        )
