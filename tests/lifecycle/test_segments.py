"""Rows past a backend's limit: one class is several table sets, minted, refreshed and decoded together."""

from __future__ import annotations

from typing import Any

import pytest

from planlife import CapacityLadder, PlanManager

from .world import World, both_styles, limited_backend, small_spec


def segmented_world(**spec: int) -> World:
    """Ten rows of at most four a table set: segments of 4, 4 and 2."""
    return World(
        rows=10,
        warm=True,
        sites={"default": small_spec(**spec)},
        ladder=CapacityLadder([10]),
        backend=limited_backend(4),
    )


@both_styles
@pytest.mark.parametrize(
    "spec",
    [{}, {"query_length": 3}, {"sliding_window": 100}, {"query_length": 2, "sliding_window": 257}],
    ids=["plain", "drafts", "window", "both"],
)
def test_a_class_past_the_backends_limit_is_served_in_segments(style: str, spec: dict[str, int]) -> None:
    """C41, R23: eager and replayed, with rows that end inside any of the segments."""
    world = segmented_world(**spec)
    length = world.spec.query_length
    plan = world.manager.plan_for(world.step())
    assert plan.native is None
    assert [native.reduce_info.shape[0] for native in plan.segments] == [4, 4, 2]

    graph = world.capture(world.step(), style)
    for rows in (10, 9, 3, 0, 5, 8):
        lens = [max(count, length) for count in world.random_lens(rows)]
        world.set_lens(lens)
        replayed = world.replay(graph, world.step(), style)
        world.assert_right(replayed, world.expected(), length)
        query, output = world.buffers(10)
        world.eager(world.step(rows), query=query, output=output)
        world.assert_right(output, world.expected(query=query), length)
    world.set_lens([500] * 10)
    world.assert_wrong(replayed, world.expected(), length)  # positive control


def test_a_query_that_ends_inside_a_segment_is_decoded_as_far_as_it_goes() -> None:
    world = segmented_world()
    world.set_lens(world.random_lens(5))
    query, output = world.buffers(6)
    world.eager(world.step(5), query=query, output=output)
    world.assert_right(output, world.expected(query=query, lens=world.lens[:6]))


def test_segments_share_one_arena_and_count_as_one_plan() -> None:
    world = segmented_world()
    report = world.manager.report()
    assert len(report.plans) == len(report.arenas) == 1
    assert report.counters["mints"] == 1
    assert report.counters["compiles"] == 2  # table sets of four rows and of two
    assert report.resident_bytes == world.manager.worst_case_bytes()
    whole = PlanManager(world.spec, ladder=CapacityLadder([10]), device=world.device, backend=world.backend)
    assert report.arenas[0].num_bytes <= whole.min_budget_bytes()


def test_the_sanitizer_looks_into_every_segment() -> None:
    world = segmented_world()
    options: dict[str, Any] = {"backend": limited_backend(4), "sanitize": "count"}
    with PlanManager(world.spec, ladder=CapacityLadder([10]), device=world.device, **options) as manager:
        world.manager = manager
        with manager.capture_phase():
            manager.warm()
        world.set_lens([300] * 10)
        for num_seen, row in enumerate((0, 5, 9)):
            plan = manager.plan_for(world.step())
            world.decode(plan)
            assert world.counters()["stale_detected"] == num_seen  # positive control
            world.lens[row] += 1
            world.decode(plan)
            assert world.counters()["stale_detected"] == num_seen + 1
