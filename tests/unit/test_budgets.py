"""R38, R39: each site plans with its own budget and cap, settled once, when the manager is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec
from planlife.estimate import estimate
from planlife.planner import plan_tables
from planlife.sites import Sites
from planlife.testing import FakeBackend, FakeDevice
from tests.unit.fake_world import FakeWorld, live_lens_fallback, spec

LENS = [4000, 257, 0, 1, 256, 900]
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "capped": {"max_partitions": 2},
    "small budget": {"workgroup_budget": 12},
    "both": {"max_partitions": 3, "workgroup_budget": 40},
    "windowed": {"sliding_window": 300, "max_partitions": 1, "query_length": 3},
    "default, two heads": {"num_kv_heads": 2},
}


def site_spec(**setting: Any) -> PlanSpec:
    return replace(spec(), **setting)


def test_sites_of_one_manager_each_get_the_integers_of_their_own_setting() -> None:
    world = FakeWorld(sites={site: site_spec(**setting) for site, setting in SETTINGS.items()})
    world.warm()
    found = []
    for site, setting in SETTINGS.items():
        one = {"num_kv_heads": 1, **setting}
        native = world.manager.plan_for(world.step(LENS, site=site)).native
        assert [native.work_info, native.reduce_info] == list(plan_tables([*LENS, 0, 0], num_cu=8, **one))
        found.append(native.work_info)
    assert all(first != second for i, first in enumerate(found) for second in found[:i])  # the settings do matter


def test_a_setting_reaches_every_segment() -> None:
    world = FakeWorld(
        sites={"a": spec(max_partitions=2), "b": spec(workgroup_budget=3)}, backend=FakeBackend(max_plan_rows=3)
    )
    world.warm()
    for site, setting in (("a", {"max_partitions": 2}), ("b", {"workgroup_budget": 3})):
        segments = world.manager.plan_for(world.step(LENS, site=site)).segments
        assert segments is not None
        lens = [*LENS, 0, 0]
        for segment, rows in zip(segments, (lens[:3], lens[3:6], lens[6:]), strict=True):
            assert segment.work_info == plan_tables(rows, num_kv_heads=1, num_cu=8, **setting)[0]


@pytest.mark.parametrize(("name", "most"), [("ubatches", 2**31 - 1), ("num_compute_units", 2**30 - 1)])
def test_a_number_that_no_estimate_can_count_with_is_refused_by_name(name: str, most: int) -> None:
    sites = Sites({"a": spec()}, {"a": CapacityLadder([4])})
    values: tuple[Any, ...] = (0, most + 1, 10**400, True, 1.0)
    for value in values:
        with pytest.raises(ConfigError, match=f"{name} must be"):
            estimate(sites, backend=FakeBackend(), **{name: value})
    options: dict[str, Any] = {name: most}
    assert estimate(sites, backend=FakeBackend(), **options).worst_case_bytes > 0  # positive control


def test_bytes_follow_each_sites_setting_and_the_estimate_agrees() -> None:
    ladder = CapacityLadder([4, 64])
    totals = set()
    for setting in ({}, {"max_partitions": 1}, {"workgroup_budget": 100}):
        sites = {"a": spec(), "b": spec(lane="b", **setting)}
        device = FakeDevice(num_compute_units=80)
        with PlanManager(sites, ladder=ladder, device=device, backend=FakeBackend()) as manager:
            with manager.capture_phase():
                manager.warm()
            assert device.live_bytes == manager.worst_case_bytes()
            estimate = PlanManager.estimate_bytes(sites, ladder=ladder, backend=FakeBackend(), num_compute_units=80)
            assert estimate == manager.worst_case_bytes()
            totals.add(estimate)
    assert len(totals) == 3


def one_per_unit_for_fp8(one: PlanSpec, device: Any) -> int:
    """As a library answers that knows one pipe which wants fewer tasks."""
    per_unit = 1 if one.kv_dtype == "float8_e4m3fn" else 2
    return per_unit * int(device.num_compute_units)


def test_a_backend_that_knows_a_better_default_is_asked_once_and_its_answer_is_used_everywhere() -> None:
    fp8 = {"kv_dtype": "float8_e4m3fn", "scales": "per_tensor"}
    sites = {"fp8": spec(**fp8), "bf16": spec(), "fp8 set": spec(**fp8, workgroup_budget=11)}
    budgets = {"fp8": 8, "bf16": 16, "fp8 set": 11}
    backend = FakeBackend(default_budget=one_per_unit_for_fp8)
    world = FakeWorld(sites=sites, backend=backend)
    world.warm()
    assert backend.calls["default_workgroup_budget"] == 2  # not for the site that says its own
    for site, budget in budgets.items():
        native = world.manager.plan_for(world.step(LENS, site=site)).native
        assert native.work_info == plan_tables([*LENS, 0, 0], num_kv_heads=1, num_cu=8, workgroup_budget=budget)[0]
    assert backend.calls["default_workgroup_budget"] == 2
    report = world.manager.report()
    assert {line["site"]: line["workgroup_budget"] for line in report.to_dict()["sites"]} == budgets
    assert {line.max_partitions for line in report.sites} == {8}
    assert "site fp8: plans for 8 tasks, 8 per row" in str(report)
    estimate = PlanManager.estimate_bytes(
        sites, backend=FakeBackend(default_budget=one_per_unit_for_fp8), num_compute_units=8, **world.options
    )
    assert estimate == world.manager.worst_case_bytes() == world.device.live_bytes
    plain = PlanManager(sites, device=world.device, backend=FakeBackend(), **world.options)
    assert plain.worst_case_bytes() > estimate  # positive control: the answer changed the bytes


def test_a_backend_that_answers_no_budget_is_refused_before_anything_is_allocated() -> None:
    device = FakeDevice()
    for answer in (0, 1.5, True):
        backend = FakeBackend(default_budget=lambda one, device, answer=answer: answer)
        with pytest.raises(ConfigError, match=f"workgroup_budget must be .*got {answer!r}"):
            PlanManager(spec(), ladder=CapacityLadder([4]), device=device, backend=backend)
    assert device.num_allocations == 0


def test_a_site_that_is_never_planned_has_no_numbers_and_nobody_is_asked_for_them() -> None:
    for options in ({"enabled": False}, {"fallback": live_lens_fallback}):
        backend = FakeBackend(spec_reasons=["no such kernel"])
        manager = PlanManager(spec(), ladder=CapacityLadder([4]), device=FakeDevice(), backend=backend, **options)
        assert backend.calls["default_workgroup_budget"] == 0
        assert [(line.workgroup_budget, line.max_partitions) for line in manager.report().sites] == [(None, None)]
        assert "site default: never planned" in str(manager.report())


def test_a_fallback_sees_the_site_as_it_was_given() -> None:
    seen = []

    def fallback(output: Any, *call: Any, spec: PlanSpec, **extras: Any) -> None:
        seen.append(spec)

    one = spec()
    world = FakeWorld(sites=one, fallback=fallback)
    world.run([5, 6])
    assert seen == [one]


@pytest.mark.parametrize("name", ["max_partitions", "workgroup_budget"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_a_setting_that_can_never_work_is_refused_with_the_way_out(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be .*got {value!r}.*None takes the default"):
        spec(**{name: value})
