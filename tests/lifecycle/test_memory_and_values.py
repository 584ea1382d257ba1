"""Memory and values with real tensors: bytes measured by storages, rows compared one by one with the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, Step
from planlife.device import block_bytes
from tests.lifecycle.world import (
    IN_GRAPH,
    NUM_PAGES,
    PAGE,
    Owner,
    World,
    backend_class,
    both_styles,
    limited_backend,
    new_device,
    small_spec,
)


class Measured:
    """A device's bytes, by the storages of its blocks that are alive, whatever anybody says of them."""

    def __init__(self, num_compute_units: int = 256) -> None:
        self.device = new_device(num_compute_units)
        self._allocate, self.device.allocate = self.device.allocate, self.allocate
        self.high_water_bytes = 0
        self._storages: dict[StorageWeakRef, int] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        block: torch.Tensor = self._allocate(num_bytes)
        storage = block.untyped_storage()
        self._storages[StorageWeakRef(storage)] = block_bytes(storage.nbytes())  # type: ignore[no-untyped-call]
        self.high_water_bytes = max(self.high_water_bytes, self.live_bytes)
        return block

    @property
    def live_bytes(self) -> int:
        self._storages = {ref: size for ref, size in self._storages.items() if not ref.expired()}  # type: ignore[no-untyped-call]
        return sum(self._storages.values())


def test_200_random_steps_stay_within_the_budget_by_the_storages_that_are_alive() -> None:
    """C16: with real tables, and the storages of evicted plans gone before the newcomer's are there."""
    sites = {"full": small_spec(), "windowed": small_spec(sliding_window=100)}
    ladder = CapacityLadder([1, 2, 3, 4])
    measured = Measured(num_compute_units=8)
    world = World(sites=sites, rows=4)
    options: dict[str, Any] = {"ladder": ladder, "device": measured.device, "ubatches": 2, "backend": world.backend}
    free = PlanManager(sites, **options)
    least, worst = free.min_budget_bytes(), free.worst_case_bytes()
    budget_bytes = least + (worst - least) // 3
    assert worst > budget_bytes > least
    world.manager = PlanManager(sites, **options, budget_bytes=budget_bytes)
    with world.manager.capture_phase():
        world.manager.warm()
    compiles = world.counters()["compiles"]
    buffers = [(world.lens_buffer(), torch.full_like(world.tables, -1)) for _ in range(2)]
    pick = random.Random(16)
    for _ in range(200):
        site, ubatch, rows = pick.choice(("full", "windowed")), pick.randint(0, 1), pick.randint(1, 4)
        lens, tables = buffers[ubatch]
        world.set_lens(world.random_lens(rows), lens, tables)
        plan = world.manager.plan_for(world.step(rows, lens=lens, site=site, ubatch=ubatch))
        assert plan.route == "planned"
        query, output = world.buffers(rows)
        world.decode(plan, query, output, tables)
        world.assert_right(output, world.expected(query, lens[:rows], tables, sites[site]))
        assert measured.live_bytes == world.manager.report().resident_bytes <= budget_bytes
    counters = world.counters()
    assert measured.high_water_bytes <= budget_bytes
    assert counters["evictions"] > 20
    assert (counters["compiles"], counters["compiles_after_seal"]) == (compiles, 0)
    assert len(world.manager.report().plans) <= 4 * 2 * 2
    world.manager.close()
    del plan
    assert measured.live_bytes == 0


@pytest.mark.parametrize("seed", range(12))
def test_worst_case_bytes_is_what_warm_allocates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C22: measured by storage sizes."""
    monkeypatch.setattr(backend_class(), "compile", lambda *call: 1)  # nothing is launched here
    pick = random.Random(seed)
    sites = {
        f"site {index}": small_spec(
            num_q_heads=8,
            num_kv_heads=pick.choice((1, 2, 8)),
            head_dim=pick.choice((1, 4)) * World.kind.head_dim,
            page_size=pick.choice((World.kind.other_page_size, PAGE)),
            max_context_tokens=pick.choice((64, 4096)),
            query_length=pick.choice((1, 2)),
            max_partitions=pick.choice((None, 1, 4)),
            workgroup_budget=pick.choice((None, 1, 304)),
            lane=pick.choice(("main", "draft")),
        )
        for index in range(pick.randint(1, 3))
    }
    measured = Measured(num_compute_units=pick.choice((8, 132)))
    manager = PlanManager(
        sites,
        ladder=CapacityLadder(pick.choices(range(1, 200), k=3)),
        device=measured.device,
        backend=limited_backend(pick.choice((None, 9))),
        ubatches=pick.randint(1, 3),
    )
    assert measured.live_bytes == 0
    with manager.capture_phase():
        manager.warm()
    assert measured.live_bytes == measured.high_water_bytes == manager.worst_case_bytes() > 0
    manager.close()
    assert measured.live_bytes == 0


def test_a_builder_thrown_away_and_built_again_decodes_the_same_and_leaves_nothing() -> None:
    """C80."""
    world = World()
    world.set_lens([3, 400, 0, 257])
    measured = Measured()
    outputs = []
    for _ in range(2):
        options = {"device": measured.device, "backend": world.backend}
        world.manager = PlanManager(world.sites, ladder=CapacityLadder([4, 8]), **options)
        with world.manager.capture_phase():
            world.manager.warm()
            step = world.step(4)
            g = world.capture(step, IN_GRAPH)
        world.replay(g, step)
        outputs.append(world.output[:4].clone())
        world.assert_right(world.output[:4], world.expected(world.query[:4], world.lens[:4]))
        world.manager.close()
        del g
        world.settle()
        assert measured.live_bytes == 0
    world.assert_same(*outputs)


@both_styles
def test_three_graphs_of_one_lane_replay_right_while_everything_else_is_evicted(style: str) -> None:
    """C83: the arena stays while any of them lives, and goes after the last."""
    measured = Measured()
    world = World()
    ladder = CapacityLadder([2, 4, 8])
    world.manager = PlanManager(world.sites, ladder=ladder, device=measured.device, backend=world.backend)
    with world.manager.capture_phase():
        world.manager.warm()
    graphs = {rows: world.capture(world.step(rows), style) for rows in (2, 4, 8)}
    for gone in (4, 2, 8):
        world.manager.trim(0)
        for rows, g in graphs.items():
            world.set_lens(world.random_lens(rows))
            world.replay(g, world.step(rows), style)
            world.assert_right(world.output[:rows], world.expected(world.query[:rows], world.lens[:rows]))
        del g, graphs[gone]
        world.settle()
    world.manager.trim(0)
    assert measured.live_bytes == 0


def test_two_ubatches_of_equal_rows_decode_their_own_lengths() -> None:
    """C25: plan 0, plan 1, decode 0, decode 1, layer after layer."""
    world = World(ubatches=2, warm=True)
    lens = [world.lens_buffer(), world.lens_buffer()]
    tables = [world.tables, world.tables.clone()]
    for longest in ((30, 500), (500, 30)):
        for ub in (0, 1):
            world.set_lens([longest[ub] - row for row in range(8)], lens[ub], tables[ub])
        plans = [world.manager.plan_for(world.step(lens=lens[ub], ubatch=ub)) for ub in (0, 1)]
        for _layer in range(3):
            for ub in (0, 1):
                world.output.fill_(torch.nan)
                world.decode(plans[ub], tables=tables[ub])
                world.assert_right(world.output, world.expected(lens=lens[ub], tables=tables[ub]))
                world.assert_wrong(world.output, world.expected(lens=lens[1 - ub], tables=tables[1 - ub]))
    storages = [plans[ub].native.work_info.untyped_storage().data_ptr() for ub in (0, 1)]
    assert storages[0] != storages[1]


@pytest.mark.parametrize("lens", [[0] * 8, [0, 640, 0, 0, 1, 0, 255, 0], [0]], ids=["all empty", "mixed", "one"])
@pytest.mark.parametrize("query_length", [1, 3])
def test_empty_rows_are_exactly_zero_and_nothing_is_infinite(lens: list[int], query_length: int) -> None:
    """C33."""
    world = World(sites={"default": small_spec(query_length=query_length)}, warm=True)
    world.set_lens(lens)
    rows = len(lens)
    output = world.eager(world.step(rows))[: rows * query_length].view(rows, -1)
    assert torch.isfinite(output).all()
    for row, length in enumerate(lens):
        assert bool(output[row].any()) is (length > 0)
    expected = world.expected(world.query[: rows * query_length], world.lens[:rows])
    world.assert_right(output.view_as(expected), expected, query_length)


def test_the_zero_page_and_stale_rows_reach_no_output() -> None:
    """C34, C81: page 0 is NaN, padding points to it, to -1 and beyond the pool; rows behind the batch are stale."""
    world = World(warm=True)
    for padding in (0, -1, NUM_PAGES, 2**31 - 1, -(2**31)):
        world.set_lens([640] * 8)
        stale = world.tables.clone()
        world.set_lens([3, 0, 300])
        world.tables[world.tables == -1] = padding
        world.tables[5:] = stale[5:]
        world.tables[1] = 0  # an empty row, whose entries are the NaN page
        output = world.eager(world.step(3))
        world.assert_right(output[:3], world.expected(lens=world.lens[:3], query=world.query[:3]))
        assert torch.equal(output[3:4], torch.zeros_like(output[3:4]))
    control = World(warm=True)  # positive control: a page that is read does show
    control.set_lens([3, 0, 300])
    control.tables[0, 0] = 0
    assert torch.isnan(control.eager(control.step(3))[0]).any()


def test_the_unused_tail_of_a_last_page_reaches_no_output() -> None:
    """C35."""
    world = World(warm=True)
    lens = [3, 17, 300, 255]
    world.set_lens(lens)
    expected = world.expected(world.query[:4], world.lens[:4])
    for poison in (torch.nan, torch.inf, -torch.inf):
        for row, length in enumerate(lens):
            last = world.tables[row, (length - 1) // PAGE]
            tail = world.key_cache[last, length % PAGE :], world.value_cache[last, length % PAGE :]
            if not any((world.tables[other] == last).any() for other in range(4) if other != row):
                for cache in tail:
                    cache.fill_(poison)
        world.assert_right(world.eager(world.step(4))[:4], expected)


BAD_LENS: dict[str, tuple[Callable[[], Any], str]] = {
    "int64": (lambda: torch.ones(4, dtype=torch.int64), r"dtype torch.int64, wanted torch.int32"),
    "int16": (lambda: torch.ones(4, dtype=torch.int16), r"dtype torch.int16, wanted torch.int32"),
    "float32": (lambda: torch.ones(4), r"dtype torch.float32, wanted torch.int32"),
    "bool": (lambda: torch.ones(4, dtype=torch.bool), r"dtype torch.bool, wanted torch.int32"),
    "strided": (lambda: torch.ones(8, dtype=torch.int32)[::2], r"strides \(2,\), wanted contiguous"),
    "expanded": (lambda: torch.ones(1, dtype=torch.int32).expand(4), r"strides \(0,\), wanted contiguous"),
    "2-D": (lambda: torch.ones(4, 1, dtype=torch.int32), r"shape \(4, 1\), wanted \(rows,\)"),
    "scalar": (lambda: torch.tensor(4, dtype=torch.int32), r"shape \(\), wanted \(rows,\)"),
    "meta": (lambda: torch.ones(4, dtype=torch.int32, device="meta"), r"device meta, wanted (cpu|cuda:0)"),
    "requires_grad": (lambda: torch.ones(4, requires_grad=True), r"requires_grad True, wanted False"),
    "sparse": (lambda: torch.ones(4, dtype=torch.int32).to_sparse(), r"context_lens"),
    "list": (lambda: [1, 2, 3, 4], r"got list"),
    "None": (lambda: None, r"got NoneType"),
    "numpy": (lambda: torch.ones(4, dtype=torch.int32).numpy(), r"got ndarray"),
}


@pytest.mark.parametrize("bad", BAD_LENS)
def test_lengths_of_the_wrong_kind_are_refused_before_any_launch(bad: str) -> None:
    """C36."""
    world = World(warm=True)
    world.set_lens([5, 6, 7, 8])
    plan = world.manager.plan_for(world.step(4))
    before, counters = plan.native.work_info.clone(), world.counters()
    make, message = BAD_LENS[bad]
    with pytest.raises(ConfigError, match=message) as refusal:
        world.manager.plan_for(Step(make(), owner=Owner()))
    assert "int32" in str(refusal.value)
    assert torch.equal(plan.native.work_info, before)
    assert world.counters() == counters


class Subclass(torch.Tensor):
    """An engine's own tensor type."""


@pytest.mark.parametrize(
    "make",
    [
        lambda lens: torch.nn.Parameter(lens, requires_grad=False),
        lambda lens: lens.as_subclass(Subclass),
        lambda lens: torch.cat([lens, lens])[4:],
    ],
    ids=["parameter", "subclass", "slice"],
)
def test_any_int32_tensor_may_hold_the_lengths(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    world = World(warm=True)
    world.set_lens([5, 300, 0, 8])
    lens = make(world.lens[:4].clone())
    output = world.eager(Step(lens, owner=Owner()))
    world.assert_right(output[:4], world.expected(world.query[:4], world.lens[:4]))


BAD_CACHES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "page": (lambda cache: cache.view(NUM_PAGES * 2, PAGE // 2, 2, 16), r"page_size 16"),
    "head_dim": (lambda cache: cache.view(NUM_PAGES, PAGE, 4, 8), r"head_dim 16"),
    "kv heads": (lambda cache: cache[:, :, :1], r"num_kv_heads 2"),
    "layout": (lambda cache: cache.transpose(1, 2), r"kv_layout 'nhd'"),
    "dtype": (lambda cache: cache.float(), r"dtype is torch.float32, wanted bfloat16"),
    "strided": (lambda cache: cache.transpose(-1, -2).contiguous().transpose(-1, -2), r"last stride is 2, wanted 1"),
    "meta": (lambda cache: cache.to("meta"), r"device is meta, wanted the manager's, (cpu|cuda:0)"),
    "4-D flat": (lambda cache: cache.flatten(1), r"shape is \[160, 512\]"),
}


@pytest.mark.parametrize("which", ["key_cache", "value_cache"])
@pytest.mark.parametrize("bad", BAD_CACHES)
def test_a_cache_that_is_not_the_sites_is_refused_before_any_launch(bad: str, which: str) -> None:
    """C63: both named, also after calls with the right caches."""
    world = World(warm=True)
    world.set_lens([5, 6, 7, 8])
    plan = world.manager.plan_for(world.step(4))
    world.decode(plan)  # positive control
    world.output.fill_(torch.nan)
    change, message = BAD_CACHES[bad]
    setattr(world, which, change(getattr(world, which)))
    with pytest.raises(ConfigError, match=f"{which}.*{message}"):
        world.decode(plan)
    assert torch.isnan(world.output).all()


def test_a_head_parallel_view_of_a_larger_cache_is_served_in_place() -> None:
    """C62, beside the refusals: what only looks odd is not refused."""
    world = World(warm=True)
    world.set_lens([5, 300, 0, 8])
    joint = torch.stack([world.key_cache, world.value_cache], dim=3)  # K and V as halves of one row
    world.key_cache, world.value_cache = joint[:, :, :, 0], joint[:, :, :, 1]
    assert not world.key_cache.is_contiguous()
    output = world.eager(world.step(4))
    world.assert_right(output[:4], world.expected(world.query[:4], world.lens[:4]))


@pytest.mark.parametrize("sanitize", ["off", "count"])
def test_lengths_above_the_bound_are_clamped_and_read_nothing_behind_it(sanitize: str) -> None:
    """C55: the bound lies inside a tile, and the pages behind it hold NaN."""
    world = World(sites={"default": small_spec(max_context_tokens=250)}, warm=True, sanitize=sanitize)
    world.set_lens([250, 100, 256, 640])
    for row in (2, 3):
        world.tables[row, 256 // PAGE :] = 0
    clamped = world.lens[:4].clamp(max=250)
    output = world.eager(world.step(4))
    world.assert_right(output[:4], world.expected(world.query[:4], clamped))
    unclamped = world.lens[:4].clamp(max=256)  # positive control: the last six tokens do show
    world.assert_wrong(output[:4], world.expected(world.query[:4], unclamped))
    world.set_lens([250, 249, 1, 0])
    world.assert_right(world.eager(world.step(4))[:4], world.expected(world.query[:4], world.lens[:4]))
    assert world.counters()["lengths_clamped"] == (2 if sanitize == "count" else 0)


def test_a_failed_mint_lets_go_of_its_buffers_before_its_victims_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be memory for one of both only."""
    measured, backend = Measured(), limited_backend(None)
    real_compile = backend.compile

    def compile_two_rows(spec: PlanSpec, plan_rows: int, device: Any, least_rows: int) -> int:
        if plan_rows > 2:
            raise RuntimeError("no compiler")
        num_compiled: int = real_compile(spec, plan_rows, device, least_rows)
        return num_compiled

    monkeypatch.setattr(backend, "compile", compile_two_rows)
    spec = small_spec(max_partitions=1)
    options: dict[str, Any] = {"ladder": CapacityLadder([2, 4]), "device": measured.device, "backend": backend}
    budget_bytes = PlanManager(spec, **options).min_budget_bytes()
    manager = PlanManager(spec, budget_bytes=budget_bytes, on_miss="mint", **options)
    with manager.capture_phase():
        manager.warm(2)
    resident_bytes = measured.live_bytes
    with pytest.raises(RuntimeError, match="no compiler"):
        manager.plan_for(Step(torch.ones(4, dtype=torch.int32, device=measured.device.name)))
    assert [(line.class_rows, line.state) for line in manager.report().plans] == [(2, "resident")]
    assert measured.live_bytes == manager.report().resident_bytes == resident_bytes
    assert measured.high_water_bytes <= budget_bytes
