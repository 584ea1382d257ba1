"""A simulated policy is the real manager: folded or not, on fakes or on tensors, it counts the same."""

from __future__ import annotations

import gc
import logging
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import planlife
from planlife import BudgetError, CapacityLadder, PlanManager, PlanSpec, Step
from planlife.errors import ConfigError
from planlife.sim import timeline
from planlife.sim.compare import Setting, run_policy
from planlife.sim.costs import COSTS
from planlife.sim.drive import PolicyRun
from planlife.sim.engine import Engine, StepTimes, run_engine
from planlife.sim.policy import Policy, standard_policies
from planlife.step_log import StepBlock
from planlife.testing import FakeBackend
from planlife.trace import stream_trace

DATA = Path(__file__).resolve().parents[1] / "data"

SPEC = PlanSpec(4, 2, 32, 16, max_context_tokens=512)


def setting(**changes: Any) -> Setting:
    fields: dict[str, Any] = {"num_compute_units": 16, "backend": FakeBackend(), **changes}
    return Setting(fields.pop("sites", {"default": SPEC}), COSTS["h200"], **fields)


def busy_blocks(seed: int, num_steps: int, max_rows: int = 24, **columns: Any) -> list[StepBlock]:
    """Row counts that wander like a busy engine's, with stays, jumps and dummies."""
    chance = random.Random(seed)
    rows, count = [], max_rows // 2
    for _ in range(num_steps):
        kind = chance.random()
        if kind < 0.4:
            count = min(max(count + chance.choice([-1, 1]), 1), max_rows)
        elif kind < 0.45:
            count = chance.randint(1, max_rows)
        rows.append(0 if kind > 0.97 else count)
    blocks, start = [], 0
    while start < num_steps:
        end = min(start + chance.randint(1, 300), num_steps)
        part = rows[start:end]
        times = [chance.randint(100, 9000) for _ in part]
        sites = columns.get("sites", ("default",))
        site = [chance.randrange(len(sites)) for _ in part] if len(sites) > 1 else None
        ubatch = [chance.randrange(columns["ubatches"]) for _ in part] if "ubatches" in columns else None
        blocks.append(StepBlock(times, part, sites, site, ubatch))
        start = end
    return blocks


def budget_for(policy: Policy, where: Setting, share: float) -> int:
    """A budget between the least and the worst case of a policy."""
    run = PolicyRun(
        replace(policy, budget_bytes=None), sites=where.sites, costs=where.costs, sizes=where.backend,
        ubatches=where.ubatches, num_compute_units=where.num_compute_units,
    )  # fmt: skip
    worst_bytes = run._manager.worst_case_bytes()
    least_bytes = run._manager.min_budget_bytes()
    return least_bytes + int(share * (worst_bytes - least_bytes))


TWO_LANES = {"dense": SPEC, "sparse": replace(SPEC, sliding_window=64, lane="other")}


def variants() -> Iterator[tuple[str, Policy, Setting, dict[str, Any]]]:
    every, powers, few = CapacityLadder(range(1, 25)), CapacityLadder.powers_of_two(24), CapacityLadder([5, 11, 24])
    one, two, ubatches = setting(), setting(sites=TWO_LANES), setting(ubatches=2)
    yield "per count", Policy("per count", every, warm=False), one, {}
    yield "per step", Policy("per step", every, warm=False, trim_each_step=True), one, {}
    yield "per step, 2 lanes", Policy("", every, warm=False, trim_each_step=True), two, {"sites": ("dense", "sparse")}
    yield "captured", Policy("captured", powers, powers.classes), one, {}
    for share in (0.0, 0.1, 0.5, 0.9):
        for name, ladder, captured, warm in (
            ("warm", powers, (), True),
            ("cold", every, (), False),
            ("part captured", few, (11,), True),
            ("all captured", every, every.classes, True),
        ):
            policy = Policy(name, ladder, captured, warm)
            yield f"{name} {share}", replace(policy, budget_bytes=budget_for(policy, one, share)), one, {}
            budget = budget_for(policy, two, share)
            yield f"{name} {share} lanes", replace(policy, budget_bytes=budget), two, {"sites": ("dense", "sparse")}
            budget = budget_for(policy, ubatches, share)
            yield f"{name} {share} ubatches", replace(policy, budget_bytes=budget), ubatches, {"ubatches": 2}


VARIANTS = {name: (policy, where, columns) for name, policy, where, columns in variants()}


@pytest.mark.parametrize("name", VARIANTS)
def test_folding_changes_no_figure(name):
    policy, where, columns = VARIANTS[name]
    for seed in range(3):
        blocks = busy_blocks(seed, 1500, **columns)
        folded = run_policy(blocks, policy, where)
        unfolded = run_policy(blocks, policy, replace(where, fold=False))
        left, right = folded.to_dict(), unfolded.to_dict()
        if policy.trim_each_step:  # what comes back for each step and goes again is folded into the buckets' figures
            assert sum(bucket["evictions"] for bucket in left.pop("memory")) == folded.service["evictions"]
            assert sum(bucket["evictions"] for bucket in right.pop("memory")) == folded.service["evictions"]
            left.pop("lifetimes"), right.pop("lifetimes")
        assert left == right


def test_folding_changes_no_figure_of_random_policies():
    chance = random.Random(11)
    for seed in range(60):
        shapes = [replace(SPEC, num_kv_heads=chance.choice([1, 2, 4]), head_dim=chance.choice([16, 64])) for _ in "abc"]
        lanes = chance.choice([("main", "main", "main"), ("main", "other", "other"), ("a", "b", "c")])
        sites = {f"site {lane}{i}": replace(shapes[i], lane=lane) for i, lane in enumerate(lanes)}
        where = setting(sites=sites, ubatches=chance.randint(1, 2))
        classes = [*chance.sample(range(1, 24), chance.randint(1, 6)), 24]
        captured = tuple(chance.sample(classes, chance.randint(0, 2)))
        policy = Policy("random", CapacityLadder(classes), captured, warm=chance.random() < 0.6)
        policy = replace(policy, budget_bytes=budget_for(policy, where, chance.random()))
        blocks = busy_blocks(seed, 300, sites=tuple(sites), ubatches=where.ubatches)
        assert run_policy(blocks, policy, where) == run_policy(blocks, policy, replace(where, fold=False)), policy


def test_folding_does_meet_evictions_fallbacks_and_skipped_work():
    """Positive control: the variants above are not all trivial."""
    seen: dict[str, int] = {}
    for policy, where, columns in VARIANTS.values():
        for name, value in run_policy(busy_blocks(0, 1500, **columns), policy, where).service.items():
            seen[name] = seen.get(name, 0) + value
    assert all(seen[name] for name in ("mints", "evictions", "rematerialised", "fallbacks", "hits", "misses"))
    policy, where, _ = VARIANTS["captured"]
    run = PolicyRun(policy, sites=where.sites, costs=where.costs, sizes=where.backend)
    for block in busy_blocks(0, 1500):
        run.feed(block)
    assert run._manager.report().counters["hits"] < 100 < run.finish().service["hits"]


@pytest.mark.parametrize(("index", "share"), [(0, None), (1, None), (2, 0.05), (3, 0.4), (4, 0.05), (4, None)])
def test_a_simulation_counts_what_the_real_manager_does_on_tensors(index, share):
    """2,000 steps of one trace: mints, refreshes, evictions and bytes, with the torch backend on the other side."""
    requests = stream_trace(DATA / "mooncake_conversation_excerpt.csv")
    steps = run_engine(requests, Engine(max_rows=24, times=StepTimes(step_us=9000)))
    rows_of_trace = [count for block in steps for count in block.rows][:2000]
    blocks = [StepBlock([9000] * 2000, rows_of_trace)]
    assert len(set(rows_of_trace)) > 12
    histogram: dict[int, int] = {}
    for count in (count for block in blocks for count in block.rows):
        histogram[count] = histogram.get(count, 0) + 1
    where = setting(backend="torch", num_compute_units=256)  # the CPU device's
    policy = standard_policies(histogram, num_classes=5, capture=share is None)[index]
    if share is not None and not policy.trim_each_step:
        policy = replace(policy, budget_bytes=budget_for(policy, replace(where, backend=torch_backend()), share))
    simulated = run_policy(blocks, policy, where)
    manager = PlanManager(
        SPEC, ladder=policy.ladder, device="cpu", backend="torch", budget_bytes=policy.budget_bytes,
        on_miss="fallback" if policy.warm else "mint",
    )  # fmt: skip
    lens = torch.zeros(24, dtype=torch.int32)
    graphs = []
    with manager.capture_phase():
        if policy.warm:
            manager.warm()
        for class_rows in sorted(policy.captured, reverse=True):
            step = Step(lens[:class_rows], owner=-class_rows)
            try:
                manager.plan_for(step)
            except BudgetError:
                continue
            with manager.graph() as graph:
                manager.plan_for(step)
            graphs.append(graph)
    start = manager.report().counters
    generator = torch.Generator().manual_seed(0)
    owner = 0
    for block in blocks:
        for rows in block.rows:
            owner += 1
            lens[:rows] = torch.randint(1, 400, (rows,), generator=generator, dtype=torch.int32)
            manager.plan_for(Step(lens[:rows], owner=owner))
            if policy.trim_each_step:
                manager.trim(0)
    report = manager.report()
    assert {name: value - start[name] for name, value in report.counters.items()} == simulated.service
    assert start == simulated.start
    assert report.peak_bytes == simulated.peak_bytes
    assert report.resident_bytes == simulated.resident_bytes
    assert report.worst_case_bytes == simulated.worst_case_bytes
    assert simulated.service["evictions"] > 0 or share is None or share == 0.4 or policy.trim_each_step
    manager.close()


def torch_backend() -> Any:
    from planlife.backends.torch_backend import TorchBackend

    return TorchBackend()


def test_costs_are_those_of_what_happened():
    """By hand: five steps of 3, 3, 5, 0 and 4 rows on classes 4 and 8, minted when first met."""
    costs = replace(
        COSTS["h200"], compile_us=1000, allocate_us=100, refresh_us=10, plan_us=1, eager_layer_us=7, padded_row_us=0.5
    )
    where = Setting({"default": SPEC}, costs, num_layers=3, backend=FakeBackend())
    block = StepBlock([0, 10, 10, 10, 10], [3, 3, 5, 0, 4])
    result = run_policy([block], Policy("by hand", CapacityLadder([4, 8]), warm=False), where)
    eager = 3 * 7
    first = 1 + 10 + 1000 + 200 + eager + 0.5  # class 4: its plan and the arena
    second = 1 + 10 + eager + 0.5
    third = 1 + 10 + 1000 + 100 + eager + 3 * 0.5
    last = 1 + 10 + eager
    assert result.added_total_us == pytest.approx(first + second + third + last)
    assert result.added_max_us == pytest.approx(first)
    assert result.added_p50_us == pytest.approx(second)
    assert result.stall_us == 2000
    assert (result.steps, result.dummies, result.real_rows, result.padded_rows, result.replays) == (4, 1, 15, 5, 0)
    assert [(line.class_rows, line.steps, line.padded_rows) for line in result.class_lines] == [(4, 3, 2), (8, 1, 3)]
    assert [(bar["class_rows"], bar["bars_us"]) for bar in result.lifetimes] == [(4, [(0, 40)]), (8, [(20, 40)])]


def test_a_captured_class_is_replayed_and_never_evicted():
    policy = Policy("two of four", CapacityLadder([4, 8, 23, 24]), (4, 8))
    policy = replace(policy, budget_bytes=budget_for(policy, setting(), 1.0) - 512)  # 23 and 24 rows take turns
    result = run_policy([StepBlock([1] * 16, [4, 24, 8, 23] * 4)], policy, setting())
    assert result.replays == 8
    assert result.service["evictions"] >= 7
    assert {bar["class_rows"]: bar["pinned"] for bar in result.lifetimes} == {4: True, 8: True, 23: False, 24: False}
    assert all(bar["bars_us"] == [(0, 16)] for bar in result.lifetimes if bar["pinned"])


def test_a_class_without_room_to_be_captured_is_counted_and_runs_eagerly():
    every = CapacityLadder(range(1, 25))
    policy = Policy("all captured", every, every.classes)
    policy = replace(policy, budget_bytes=budget_for(policy, setting(), 0.1))
    result = run_policy(busy_blocks(0, 500), policy, setting())
    assert 0 < result.num_uncaptured < 24
    assert len(result.captured) == 24 - result.num_uncaptured
    assert result.replays < result.steps


def test_rows_sites_and_ubatches_that_the_policy_does_not_have_are_refused_by_name():
    policy = Policy("small", CapacityLadder([4]))
    with pytest.raises(ConfigError, match="small.*5 rows.*ends at 4"):
        run_policy([StepBlock([0], [5])], policy, setting())
    with pytest.raises(ConfigError, match="'draft'"):
        run_policy([StepBlock([0], [4], ("draft",))], policy, setting())
    with pytest.raises(ConfigError, match="ubatch 1"):
        run_policy([StepBlock([0], [4], ubatch=[1])], policy, setting())


def busy_blocks_of_4096(seed: int, max_rows: int) -> list[int]:
    return [count for block in busy_blocks(seed, 4096, max_rows) for count in block.rows]


@pytest.mark.parametrize("index", range(5))
def test_every_step_of_a_log_is_served_or_a_dummy(index):
    policy = standard_policies(dict.fromkeys(range(1, 257), 1), num_classes=16)[index]
    block = StepBlock([9000] * 4096, busy_blocks_of_4096(0, 256))
    result = run_policy([block], policy, setting(fold=policy.trim_each_step))
    assert result.steps + result.dummies == 4096


def test_memory_does_not_grow_with_the_length_of_the_log(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_BUCKETS", 32)  # full early, so that a short log shows what a long one does
    monkeypatch.setattr(timeline, "MAX_BARS", 4)
    policy = Policy("cold", CapacityLadder(range(1, 17)), warm=False)
    policy = replace(policy, budget_bytes=budget_for(policy, setting(), 0.5))

    blocks = [StepBlock([9000] * 4096, busy_blocks_of_4096(seed, 16)) for seed in range(2)]

    where = setting()
    run = PolicyRun(policy, sites=where.sites, costs=where.costs, sizes=where.backend, num_compute_units=16)

    def held_bytes() -> int:
        gc.collect()
        ours = [tracemalloc.Filter(True, f"{Path(planlife.__file__).parent}/*")]  # the leak check notes every buffer
        return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)

    tracemalloc.start()
    try:
        for block in blocks:
            run.feed(block)
        early_bytes = held_bytes()
        for block in blocks * 3:
            run.feed(block)
        assert held_bytes() < 1.2 * early_bytes
    finally:
        tracemalloc.stop()
    assert run.finish().service["evictions"] > 1000


def test_a_stall_that_is_only_simulated_is_not_logged(caplog):
    with caplog.at_level(logging.INFO, "planlife"):
        run_policy([StepBlock([0], [3])], Policy("cold", CapacityLadder([4]), warm=False), setting())
        assert caplog.records == []
        logging.getLogger("planlife").info("still there")
    assert [record.message for record in caplog.records] == ["still there"]
