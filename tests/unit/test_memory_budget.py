"""Bytes: the worst case is known before, the budget is never exceeded, what a graph pins stays."""

from __future__ import annotations

import gc
import pickle
import random
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from planlife import BudgetError, CapacityLadder, ConfigError, PlanManager, PlanSpec, RouteError, Step
from planlife.device import block_bytes
from planlife.estimate import estimate
from planlife.planner import plan_capacity
from planlife.sites import Sites
from planlife.testing import FakeBackend, FakeDevice, FakeTensor
from tests.unit.fake_world import Captured, FakeWorld, live_lens_fallback, spec


def numbers_in(message: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?= ?byte)|(?<==)\d[\d,]*", message)]


def test_ten_thousand_random_steps_after_the_seal_stay_within_the_budget_and_compile_nothing() -> None:
    """C16: bytes are read off the device's own log of allocations, so that the high water during evictions counts."""
    pick = random.Random(16)
    sites = {"full": spec(), "windowed": spec(sliding_window=512, max_partitions=1), "draft": spec(lane="draft")}
    sites["shared"] = spec(lane="draft", plan_of="full")
    world = FakeWorld(
        sites=sites, ubatches=2, rows=16, device=FakeDevice(num_compute_units=2), fallback=live_lens_fallback
    )
    worst, least = world.manager.worst_case_bytes(), world.manager.min_budget_bytes()
    budget_bytes = least + (worst - least) // 3
    world.options["budget_bytes"] = budget_bytes
    world.manager.close()
    world.manager = world.new_manager()
    world.warm()
    compiles = world.counters["compiles"]
    checked = 0
    owners: list[Any] = [object(), 7, {"step": 1}, None]
    for number in range(10_000):
        rows = pick.randint(1, 16)
        lens = [pick.choice((0, 1, 255, 256, 257, pick.randint(1, 4096))) for _ in range(rows)]
        plan = world.manager.plan_for(
            world.step(lens, owner=pick.choice(owners), ubatch=pick.randint(0, 1), site=pick.choice(list(sites)))
        )
        assert plan.route == "planned"
        if number % 8 == 0:
            assert world.decode(plan) == lens
            checked += 1
    report = world.manager.report()
    assert checked == 1250
    assert report.counters["compiles_after_seal"] == 0
    assert report.counters["compiles"] == compiles
    assert len(report.plans) <= 5 * len(sites) * 2
    assert max(live for _, _, live in world.device.log) <= budget_bytes
    assert world.device.high_water_bytes <= budget_bytes
    assert report.counters["evictions"] > 1000  # the budget was felt
    world.assert_bytes_add_up()


def test_memory_is_the_same_after_one_pass_over_all_row_counts_and_after_a_hundred() -> None:
    """C16: growth per row count would show here, a fixed count would not."""
    world = FakeWorld(rows=12)
    world.warm()
    seen = set()
    for _ in range(100):
        for rows in range(1, 13):
            world.manager.plan_for(world.step([rows] * rows))
        seen.add(world.device.live_bytes)
    assert seen == {world.manager.worst_case_bytes()}


def random_configuration(pick: random.Random) -> dict[str, Any]:
    sites: dict[str, PlanSpec] = {}
    ladders: dict[str, CapacityLadder] = {}
    for index in range(pick.randint(1, 4)):
        kv_heads = pick.choice((1, 2, 3, 8, 16))
        sites[f"site {index}"] = PlanSpec(
            kv_heads * pick.choice((1, 4, 8)),
            kv_heads,
            pick.choice((16, 64, 128, 256)),
            pick.choice((1, 16, 64)),
            max_context_tokens=pick.choice((8, 4096, 1 << 20)),
            query_length=pick.choice((1, 1, 2, 6)),
            sliding_window=pick.choice((0, 0, 1, 512)),
            max_partitions=pick.choice((None, 1, 8)),
            workgroup_budget=pick.choice((None, 1, 304, 2048)),
            lane=pick.choice(("main", "main", "draft")),
        )
        ladders[f"site {index}"] = CapacityLadder(pick.choices(range(1, 200), k=pick.randint(1, 6)))
    return {
        "sites": sites,
        "ladder": ladders,
        "ubatches": pick.randint(1, 3),
        "max_plan_rows": pick.choice((None, None, 9, 128)),
        "num_compute_units": pick.choice((8, 132, 256, 304)),
    }


def test_worst_case_bytes_is_what_a_full_warm_up_takes() -> None:
    """C22: 200 configurations, against the device's own count of allocator blocks."""
    pick = random.Random(22)
    for _ in range(200):
        config = random_configuration(pick)
        device = FakeDevice(num_compute_units=config.pop("num_compute_units"))
        backend = FakeBackend(config.pop("max_plan_rows"))
        manager = PlanManager(device=device, backend=backend, **config)
        assert device.live_bytes == 0  # known before anything exists
        worst = manager.worst_case_bytes()
        with manager.capture_phase():
            manager.warm()
        assert device.live_bytes == device.high_water_bytes == worst
        assert manager.report().resident_bytes == manager.report().budget_bytes == worst
        estimate = PlanManager.estimate_bytes(**config, backend=backend, num_compute_units=device.num_compute_units)
        assert estimate == worst
        manager.close()
        assert device.live_bytes == 0


class TakesMostInTheMiddle(FakeBackend):
    """Table sets, or their scratch, of some row counts take far more than those of more rows, and are used whole."""

    def __init__(self, *, tables: Mapping[int, int], scratch: Mapping[int, int], max_plan_rows: int | None) -> None:
        super().__init__(max_plan_rows)
        self._more = {"tables": tables, "scratch": scratch}

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return super().table_bytes(spec, plan_rows, num_compute_units) + self._more["tables"].get(plan_rows, 0)

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return super().scratch_bytes(spec, plan_rows, num_compute_units) + self._more["scratch"].get(plan_rows, 0)

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> Any:
        assert len(buffer) >= self.table_bytes(spec, plan_rows, num_compute_units)
        return super().make_tables(spec, plan_rows, num_compute_units, buffer)

    def decode(self, tables: Any, scratch: Any, *call: Any) -> None:
        assert len(scratch) >= self.scratch_bytes(tables.spec, tables.plan_rows, tables.num_compute_units)
        super().decode(tables, scratch, *call)


@pytest.mark.parametrize("max_plan_rows", [None, 3], ids=["one table set", "segments"])
@pytest.mark.parametrize("most_at", [1, 2, 3])
@pytest.mark.parametrize("what", ["tables", "scratch"])
def test_bytes_are_those_of_the_class_that_takes_most_not_of_the_top_one(
    what: str, most_at: int, max_plan_rows: int | None
) -> None:
    """C100: held against what a full warm-up takes, and against the least budget that serves every class."""

    def backend() -> FakeBackend:
        more: dict[str, Mapping[int, int]] = {"tables": {}, "scratch": {}, what: {most_at: 5 << 20}}
        return TakesMostInTheMiddle(**more, max_plan_rows=max_plan_rows)

    ladder = CapacityLadder([1, 2, 3, 7])
    options: dict[str, Any] = {
        "sites": {"a": spec(), "b": spec(lane="b")},
        "ladder": {"a": ladder, "b": CapacityLadder([7])},
        "ubatches": 2,
    }
    world = FakeWorld(**options, backend=backend())
    worst_bytes, least_bytes = world.manager.worst_case_bytes(), world.manager.min_budget_bytes()
    world.warm()
    assert world.device.live_bytes == world.device.high_water_bytes == worst_bytes
    report = world.manager.report()
    num_bytes = {(line.site, line.class_rows): line.num_bytes for line in report.plans}
    arenas = {line.lane: line.num_bytes for line in report.arenas}
    assert least_bytes == max(plan + arenas["main" if site == "a" else "b"] for (site, _), plan in num_bytes.items())

    parts = estimate(Sites(options["sites"], options["ladder"]), ubatches=2, backend=backend(), num_compute_units=8)
    assert (parts.worst_case_bytes, parts.min_budget_bytes) == (worst_bytes, least_bytes)
    assert {(one.site, one.class_rows): one.plan_bytes for one in parts.classes} == num_bytes
    assert {one.lane: one.arena_bytes for one in parts.lanes} == arenas

    with pytest.raises(BudgetError, match="min_budget_bytes"):
        FakeWorld(**options, backend=backend(), budget_bytes=least_bytes - 1)
    least = FakeWorld(**options, backend=backend(), budget_bytes=least_bytes)
    least.warm()
    for site, rows in (("a", 7), ("a", 1), ("b", 7), ("a", 2), ("a", 3), ("b", 1)):
        assert least.run([rows] * rows, site=site) == [rows] * rows
        least.assert_bytes_add_up()


def test_a_site_that_the_backend_refuses_takes_no_part_of_the_worst_case() -> None:
    """C22: what is never minted must not be taken off the KV pool."""

    class RefusesHeadDim32(FakeBackend):
        def refuse_spec(self, spec: PlanSpec, device: Any) -> list[str]:
            return ["head_dim 32 is not built"] if spec.head_dim == 32 else []

    refused = PlanSpec(4, 1, 32, 16, max_context_tokens=4096, lane="other")
    world = FakeWorld(
        sites={"served": spec(), "refused": refused}, backend=RefusesHeadDim32(), fallback=live_lens_fallback
    )
    world.warm()
    assert world.device.live_bytes == world.manager.worst_case_bytes() > 0
    assert world.manager.worst_case_bytes() == FakeWorld(sites={"served": spec()}).manager.worst_case_bytes()
    assert world.run([3], site="refused") == [3]
    assert world.run([3], site="served") == [3]


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows", [1, 4096, 131_072])
def test_bytes_are_bounded_by_the_capacity_formula(kv_heads: int, rows: int) -> None:
    """C23: a million tokens of context and prefill as decode cost no more than the slots of the work budget."""
    num_cu = 256
    site = PlanSpec(kv_heads * 8, kv_heads, 128, 64, max_context_tokens=1 << 20)
    device, backend = FakeDevice(num_compute_units=num_cu), FakeBackend(max_plan_rows=4096)
    manager = PlanManager(site, ladder=CapacityLadder([rows]), device=device, backend=backend)
    segment = min(rows, 4096)
    slots = max(segment, -(-2 * num_cu // kv_heads))
    assert (
        plan_capacity(segment, num_kv_heads=kv_heads, num_cu=num_cu, max_partitions=None, workgroup_budget=None)
        <= slots
    )
    num_segments = -(-rows // 4096)
    tables = 2 * num_segments * (slots * 16 + segment * 12 + 256)
    scratch = kv_heads * slots * 8 * (8 + 4 * 128)
    assert manager.worst_case_bytes() <= block_bytes(tables) + block_bytes(scratch)
    longer = PlanSpec(kv_heads * 8, kv_heads, 128, 64, max_context_tokens=1024)
    same = PlanManager(longer, ladder=CapacityLadder([rows]), device=device, backend=backend)
    assert same.worst_case_bytes() == manager.worst_case_bytes()  # the context's bound costs nothing


def test_a_budget_below_one_call_is_refused_at_construction_with_both_numbers() -> None:
    """C23."""
    least = FakeWorld().manager.min_budget_bytes()
    for error in (BudgetError, ConfigError):
        with pytest.raises(error) as refusal:
            FakeWorld(budget_bytes=least - 1)
    assert {least, least - 1} <= set(numbers_in(str(refusal.value)))
    assert "min_budget_bytes()" in str(refusal.value)
    world = FakeWorld(budget_bytes=least)  # positive control: exactly enough serves every class, one at a time
    world.warm()
    for rows in (8, 1, 4, 8, 2, 3, 8):
        assert world.run([rows] * rows) == [rows] * rows
        world.assert_bytes_add_up()
    assert world.counters["compiles_after_seal"] == 0


def test_a_budget_of_exactly_the_worst_case_never_evicts() -> None:
    world = FakeWorld(ubatches=2)
    world = FakeWorld(ubatches=2, budget_bytes=world.manager.worst_case_bytes())
    world.warm()
    for _ in range(3):
        for rows in range(1, 9):
            for ubatch in (0, 1):
                world.run([rows] * rows, ubatch=ubatch)
    assert world.counters["evictions"] == 0
    assert world.counters["rematerialised"] == 0


def test_warm_below_the_worst_case_compiles_everything_and_keeps_what_fits() -> None:
    device = FakeDevice()
    worst = FakeWorld().manager.worst_case_bytes()
    world = FakeWorld(budget_bytes=worst - 1, device=device)
    world.warm()
    report = world.manager.report()
    assert report.counters["compiles"] == report.counters["mints"] == 4
    assert report.counters["evictions"] == 0  # nothing goes for a warm-up
    assert sorted(line.state for line in report.plans) == ["evicted", "resident", "resident", "resident"]
    assert next(line for line in report.plans if line.class_rows == 8).state == "resident"  # largest first
    assert "no room" in next(line.note for line in report.plans if line.state == "evicted")
    for rows in (1, 2, 4, 8):
        assert world.run([rows] * rows) == [rows] * rows
    assert world.counters["compiles_after_seal"] == 0


def squeezed(**options: Any) -> FakeWorld:
    """A world whose budget holds the arena and two pairs."""
    free = FakeWorld(**options)
    return FakeWorld(**options, budget_bytes=free.manager.min_budget_bytes() + pair_bytes(free))


def pair_bytes(world: FakeWorld) -> int:
    with world.manager.capture_phase():
        world.manager.warm()
    sizes = {line.num_bytes for line in world.manager.report().plans}
    assert len(sizes) == 1, "choose classes whose pairs take the same block"
    return sizes.pop()


EQUAL_PAIRS = {"rows": 4, "ladder": CapacityLadder([2, 3, 4]), "sites": spec(max_partitions=1)}


def test_eviction_takes_the_least_recently_used_plan() -> None:
    world = squeezed(**EQUAL_PAIRS)
    world.warm()
    world.run([1] * 4)
    world.run([1] * 3)
    world.run([1] * 4)  # 3 is the older one now
    world.run([1] * 2)
    assert world.states() == {
        "default/2/ub0": "resident",
        "default/3/ub0": "evicted",
        "default/4/ub0": "resident",
        "scratch/main/ub0": "resident",
    }
    note = next(line.note for line in world.manager.report().plans if line.class_rows == 3)
    assert "evicted to make room for default/2/ub0" in note


def test_planning_again_counts_as_a_use_also_where_the_tables_were_right() -> None:
    world = squeezed(**EQUAL_PAIRS)
    world.warm()
    step = world.step([1] * 4)
    world.manager.plan_for(step)
    other = Step(FakeTensor(3), owner=world)
    world.manager.plan_for(other)
    for _ in range(3):
        world.manager.plan_for(step)
    world.run([1] * 2)
    assert world.states()["default/4/ub0"] == "resident"
    assert world.states()["default/3/ub0"] == "evicted"


def test_a_pinned_set_that_leaves_no_room_is_a_budget_error_that_evicts_nothing() -> None:
    """C19."""
    world = squeezed(**EQUAL_PAIRS)
    world.warm()
    graphs = [Captured(world, world.step([1] * rows)) for rows in (3, 4)]
    before, allocations = world.manager.report(), world.device.num_allocations
    with world.manager.capture_phase():
        with pytest.raises(BudgetError) as refusal:
            world.manager.plan_for(world.step([1] * 2))
    message = str(refusal.value)
    pair = next(line.num_bytes for line in before.plans if line.class_rows == 2)
    assert {pair, before.budget_bytes, before.pinned_bytes} <= set(numbers_in(message))
    assert "pinned by 2 graphs" in message and "default/2/ub0" in message
    assert "Release a graph or raise budget_bytes" in message
    after = world.manager.report()
    assert (after.plans, after.arenas, after.counters["evictions"]) == (
        before.plans,
        before.arenas,
        before.counters["evictions"],
    )
    assert world.device.num_allocations == allocations

    world.manager.release(graphs.pop().g)  # the way out that the message names
    assert world.run([1] * 2) == [1] * 2


def test_a_budget_error_crosses_a_process_boundary() -> None:
    """A worker's error that cannot be unpickled hangs or kills its parent instead of telling it."""
    world = FakeWorld(budget_bytes=FakeWorld().manager.min_budget_bytes())
    world.warm(8)
    captured = Captured(world, world.step([5] * 8))
    with world.manager.capture_phase(), pytest.raises(BudgetError) as caught:
        world.manager.plan_for(world.step([5] * 4))
    received = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(received, BudgetError)
    assert str(received) == str(caught.value)
    assert str(received).startswith("no room for default/4/ub0")
    assert captured.g.captured


def test_part_of_the_victims_is_never_evicted_when_the_rest_is_pinned() -> None:
    """C19: what could go does not make enough room, so it does not go."""
    options = {
        "sites": {"small": spec(max_partitions=1), "big": spec(query_length=64, lane="big")},
        "ladder": CapacityLadder([4]),
        "rows": 4,
        "ubatches": 2,
    }
    free = FakeWorld(**options)
    big_bytes = free.manager.min_budget_bytes()
    small_bytes = free.manager.worst_case_bytes() // 2 - big_bytes
    world = FakeWorld(**options, budget_bytes=big_bytes + small_bytes - 512)
    with world.manager.capture_phase():
        captured = Captured(world, world.step([1] * 4, site="small"))
        world.run([2] * 4, site="small", ubatch=1)
        before, allocations = world.states(), world.device.num_allocations
        assert sorted(before.values()) == ["pinned", "pinned", "resident", "resident"]
        with pytest.raises(BudgetError, match="pinned by 1 graph"):
            world.manager.plan_for(world.step([1] * 4, site="big"))
        assert (world.states(), world.device.num_allocations) == (before, allocations)
        del captured
        assert world.run([1] * 4, site="big") == [1] * 4 * 64  # positive control: unpinned, all of it may go
        assert world.states()["small/4/ub1"] == "evicted"


def test_a_serving_step_without_room_falls_back_with_the_reason() -> None:
    """C19, while serving."""
    world = squeezed(**EQUAL_PAIRS, fallback=live_lens_fallback)
    world.warm()
    graphs = [Captured(world, world.step([1] * rows)) for rows in (3, 4)]
    plan = world.manager.plan_for(world.step([9] * 2))
    assert plan.route == "fallback"
    assert plan.reason.startswith("no room in the budget")
    assert world.decode(plan) == [9] * 2
    graphs.clear()
    assert world.manager.plan_for(world.step([9] * 2)).route == "planned"


def test_on_miss_raise_raises_the_budget_error_while_serving() -> None:
    world = squeezed(**EQUAL_PAIRS, fallback=live_lens_fallback, on_miss="raise")
    world.warm()
    graphs = [Captured(world, world.step([1] * rows)) for rows in (3, 4)]
    with pytest.raises(BudgetError):
        world.manager.plan_for(world.step([9] * 2))
    graphs.clear()
    assert world.run([9] * 2) == [9] * 2


def let_go(world: FakeWorld, captured: Captured) -> None:
    del captured.g
    gc.collect()


@pytest.mark.parametrize(
    "destroy",
    [let_go, lambda world, captured: captured.g.reset(), lambda world, captured: world.manager.release(captured.g)],
    ids=["del", "reset", "release"],
)
@pytest.mark.parametrize("in_graph", [False, True], ids=["before replay", "in graph"])
def test_a_destroyed_graph_gives_its_pins_back(destroy: Callable[[FakeWorld, Captured], None], in_graph: bool) -> None:
    """C20."""
    world = FakeWorld()
    world.warm()
    captured = Captured(world, world.step([1] * 8), in_graph=in_graph)
    assert world.states()["default/8/ub0"] == "pinned"
    assert world.manager.trim(0) < world.manager.worst_case_bytes()
    assert world.states()["default/8/ub0"] == "pinned"  # positive control: nothing evicts a pin
    destroy(world, captured)
    assert world.states()["default/8/ub0"] == "resident"
    assert world.manager.report().pinned_bytes == 0
    world.manager.trim(0)
    assert world.device.live_bytes == 0


def test_pins_stay_until_the_device_is_done_with_the_last_replay() -> None:
    """C20, C21: on the fake device a graph that is busy tells of its end when the device is done."""
    world = FakeWorld()
    world.warm()
    captured = Captured(world, world.step([1] * 8))
    with world.device.busy():
        captured.g.reset()
        world.manager.trim(0)
        assert world.states()["default/8/ub0"] == "pinned"
    world.manager.trim(0)
    assert world.states()["default/8/ub0"] == "evicted"


def test_close_gives_every_byte_back_also_of_live_graphs() -> None:
    """C20, C49."""
    world = FakeWorld(ubatches=2)
    world.warm()
    captured = Captured(world, world.step([1] * 8))
    world.manager.close()
    assert world.device.live_bytes == 0
    assert world.manager.report().num_graphs == 0
    captured.g.reset()  # its late end finds nothing to release, and harms nothing
    world.manager.close()


def test_an_arena_stays_while_any_plan_of_its_lane_is_pinned() -> None:
    """C83: three plans of one lane in three graphs, budget squeezed."""
    world = FakeWorld(rows=4, ladder=CapacityLadder([2, 3, 4]))
    world.warm()
    graphs = {rows: Captured(world, world.step([1] * rows), in_graph=True) for rows in (2, 3, 4)}
    arena = world.manager.report().arenas[0]
    assert (arena.state, arena.num_pins) == ("pinned", 3)
    for gone in (3, 2, 4):
        world.manager.trim(0)
        assert world.states()["scratch/main/ub0"] == "pinned"
        for rows in graphs:
            world.manager.replay(graphs[rows].g, world.step([rows + 5] * rows))
            assert graphs[rows].output == [rows + 5] * rows
        graphs.pop(gone)
    world.manager.trim(0)
    assert world.states()["scratch/main/ub0"] == "evicted"
    assert world.device.live_bytes == 0


def test_a_plan_pinned_by_several_graphs_goes_after_the_last() -> None:
    world = FakeWorld()
    world.warm()
    graphs = [Captured(world, world.step([1] * 8), in_graph=index % 2 == 0) for index in range(4)]
    while graphs:
        line = next(line for line in world.manager.report().plans if line.class_rows == 8)
        assert (line.state, line.num_pins) == ("pinned", len(graphs))
        world.manager.trim(0)
        graphs.pop()
    world.manager.trim(0)
    assert world.device.live_bytes == 0


def test_an_arena_outlives_the_plans_of_its_lane() -> None:
    """Every use of a plan is a use of its lane's scratch, so the scratch is never the older one."""
    world = FakeWorld()
    world.warm()
    for rows in (8, 1, 4, 2):
        world.run([1] * rows)
    evicted: list[str] = []
    world.manager.add_hook(lambda event: evicted.append(event.subject) if event.kind == "evict" else None)
    world.manager.trim(0)
    assert evicted == [f"default/{rows}/ub0" for rows in (8, 1, 4, 2)] + ["scratch/main/ub0"]


def test_a_miss_uses_the_arena_that_is_there_too() -> None:
    """The scratch of the call that was just served is not the next victim."""
    world = FakeWorld()
    world.warm()
    world.manager.trim(0)
    for rows in (8, 1, 4):
        world.run([1] * rows)
    evicted: list[str] = []
    world.manager.add_hook(lambda event: evicted.append(event.subject) if event.kind == "evict" else None)
    world.manager.trim(0)
    assert evicted == [*(f"default/{rows}/ub0" for rows in (8, 1, 4)), "scratch/main/ub0"]


def test_sites_of_one_lane_share_scratch_and_lanes_never_do() -> None:
    """R21: memory is the maximum over serial calls, not their sum."""
    one_lane = FakeWorld(sites={"a": spec(), "b": spec(sliding_window=64)}, ubatches=2)
    two_lanes = FakeWorld(sites={"a": spec(), "b": spec(sliding_window=64, lane="b")}, ubatches=2)
    for world, num_arenas in ((one_lane, 2), (two_lanes, 4)):
        world.warm()
        assert len(world.manager.report().arenas) == num_arenas
    arena_bytes = one_lane.manager.report().arenas[0].num_bytes
    assert two_lanes.manager.worst_case_bytes() - one_lane.manager.worst_case_bytes() == 2 * arena_bytes


def test_each_site_has_the_ladder_of_its_name() -> None:
    ladders = {"a": CapacityLadder([2, 8]), "b": CapacityLadder([3])}
    world = FakeWorld(sites={"a": spec(), "b": spec()}, ladder=ladders)
    world.warm()
    assert {(line.site, line.class_rows) for line in world.manager.report().plans} == {("a", 2), ("a", 8), ("b", 3)}
    assert world.manager.plan_for(world.step([1] * 3, site="a")).class_rows == 8
    assert world.manager.plan_for(world.step([1] * 3, site="b")).class_rows == 3
    assert world.run([4] * 8, site="b") == [4] * 8  # beyond b's ladder, no fallback: in parts
    assert {line.class_rows for line in world.manager.report().plans if line.site == "b"} == {3}


def test_trim_returns_what_it_freed_and_stops_at_its_target() -> None:
    world = FakeWorld()
    world.warm()
    worst = world.manager.worst_case_bytes()
    assert world.manager.trim(worst) == 0
    freed = world.manager.trim(worst - 1)
    assert 0 < freed < worst
    assert world.device.live_bytes == worst - freed
    assert freed + world.manager.trim(0) == worst
    assert world.manager.trim(0) == 0
    world.assert_bytes_add_up()


def test_a_manager_that_is_dropped_gives_its_buffers_back_at_once() -> None:
    """C80: also where the engine runs with garbage collection off, as for its captures."""

    class Remembering(FakeDevice):
        def allocate(self, num_bytes: int) -> Any:
            buffer = super().allocate(num_bytes)
            alive.append(weakref.ref(buffer))
            return buffer

    alive: list[weakref.ref[Any]] = []
    world = FakeWorld(ubatches=2, device=Remembering())
    world.warm()
    world.run([3, 4])
    world.run([3, 4], ubatch=1)
    assert all(ref() is not None for ref in alive) and len(alive) == 10
    gc.disable()
    try:
        del world.manager
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


def test_a_graph_captured_again_keeps_what_its_last_replay_reads() -> None:
    """R25: manager.graph(g) resets g while its last replay is in flight; nobody promised that it is over."""
    world = FakeWorld()
    world.warm()
    captured = Captured(world, world.step([1] * 8))
    with world.device.busy():
        Captured(world, world.step([1] * 2), g=captured.g)
        world.manager.trim(0)
        assert world.states()["default/8/ub0"] == "pinned"
    world.manager.trim(0)
    assert world.states()["default/8/ub0"] == "evicted"
    assert world.states()["default/2/ub0"] == "pinned"  # positive control: by the graph as it is now


def test_a_graph_whose_second_capture_failed_stands_for_neither() -> None:
    world = FakeWorld()
    world.warm()
    captured = Captured(world, world.step([1] * 8))
    step = world.step([1] * 8)
    world.manager.plan_for(step)
    with world.device.busy():
        with pytest.raises(ZeroDivisionError), world.manager.graph(captured.g):
            raise ZeroDivisionError
        with pytest.raises(RouteError, match="holds no pins here"):
            world.manager.guard(captured.g, step)
    assert world.manager.report().num_graphs == 0
