"""A class that the backend cannot compile is the fallback's; without a fallback the backend's error is the caller's."""

from __future__ import annotations

from typing import Any

import pytest

from planlife import BudgetError, CapacityLadder, ConfigError, MintError, PlanSpec
from planlife.testing import FakeBackend, FakeTensor
from tests.unit.fake_world import Captured, FakeWorld, live_lens_fallback, spec


class SmallBackend(FakeBackend):
    """Compiles no table set of more than 4 rows."""

    error: type[Exception] = ConfigError
    is_mended = False

    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        num_compiled = super().compile(spec, plan_rows, device, least_rows)
        if plan_rows > 4 and not self.is_mended:
            raise self.error(f"{plan_rows} rows do not fit this device; pass another backend.")
        return num_compiled


@pytest.fixture(params=[ConfigError, MintError])
def backend(request: pytest.FixtureRequest) -> SmallBackend:
    backend = SmallBackend()
    backend.error = request.param
    return backend


REFUSED = "backend fake cannot compile class 8 of site 'default': 8 rows do not fit this device; pass another backend."


def test_with_a_fallback_warm_goes_on_and_the_class_is_the_fallbacks(backend, caplog) -> None:
    world = FakeWorld(backend=backend, fallback=live_lens_fallback, ubatches=2)
    events = []
    world.manager.add_hook(events.append)
    world.warm()
    refusals = [event for event in events if event.kind == "refuse"]
    assert [event.subject for event in refusals] == ["default/8/ub0"]
    assert len([record for record in caplog.records if "do not fit" in record.getMessage()]) == 1
    assert backend.calls["compile"] == 4, "classes 8, 4, 2 and 1, and no second try for the other ubatch"

    for ubatch in (0, 1):
        plan = world.manager.plan_for(world.step([7] * 6, ubatch=ubatch))
        assert plan.route == "fallback"
        assert plan.reason == REFUSED
        assert world.decode(plan) == [7] * 6
        assert world.run([9] * 4, ubatch=ubatch) == [9] * 4
    assert world.counters["compiles_after_seal"] == 0
    assert world.counters["fallbacks"] == 2
    states = world.states()
    assert (states["default/8/ub0"], states["default/8/ub1"], states["default/4/ub1"]) == (
        "refused", "refused", "resident",
    )  # fmt: skip
    world.assert_bytes_add_up()


def test_without_a_fallback_warm_raises_what_the_backend_raised(backend) -> None:
    world = FakeWorld(backend=backend)
    with pytest.raises(backend.error, match=r"^8 rows do not fit this device; pass another backend\.$"):
        world.warm()
    assert world.states() == {}
    assert world.device.live_bytes == 0
    backend.is_mended = True  # positive control: nothing remembers a refusal that was raised
    world.warm()
    assert world.run([5] * 8) == [5] * 8


def test_plan_for_in_a_phase_falls_back_too_and_brings_back_what_it_evicted(backend) -> None:
    world = FakeWorld(backend=backend, fallback=live_lens_fallback)
    with world.manager.capture_phase():
        assert world.run([3] * 4) == [3] * 4
        before = world.states()
        plan = world.manager.plan_for(world.step([5] * 8))
    assert plan.route == "fallback"
    assert {name: state for name, state in world.states().items() if state != "refused"} == before
    assert world.decode(plan) == [5] * 8
    world.assert_bytes_add_up()


def test_a_mint_while_serving_falls_back_as_well(backend) -> None:
    world = FakeWorld(backend=backend, fallback=live_lens_fallback, on_miss="mint")
    world.warm(4)
    for lens in ([5] * 8, [6] * 8):
        assert world.run(lens) == lens
    assert backend.calls["compile"] == 2, "classes 4 and 8, once each"


def test_a_graph_of_a_refused_class_records_the_fallback(backend) -> None:
    def launched_fallback(output: FakeTensor, *call: Any, **extras: Any) -> None:
        world.device.launch(live_lens_fallback, output, *call[:5])

    world = FakeWorld(backend=backend, fallback=launched_fallback)
    world.warm()
    captured = Captured(world, world.step([5] * 8), in_graph=True)
    world.manager.replay(captured.g, world.step([8] * 8))
    assert captured.output == [8] * 8


def test_sites_that_share_plans_share_the_refusal(backend) -> None:
    sites = {"target": spec(), "draft": spec(query_length=2, plan_of="target")}
    world = FakeWorld(sites=sites, backend=backend, fallback=live_lens_fallback)
    world.warm()
    routes = {site: world.manager.plan_for(world.step([5] * 8, site=site)).route for site in sites}
    assert routes == {"target": "fallback", "draft": "fallback"}
    assert world.manager.plan_for(world.step([5] * 4, site="draft")).route == "planned"


@pytest.mark.parametrize("tight", [False, True])
def test_no_memory_for_a_compile_is_no_refusal_and_the_next_warm_mints(tight: bool) -> None:
    """tight: no buffer of class 8 fits beside the first one, so that warm only compiles."""
    backend = SmallBackend()
    backend.error = MemoryError
    world = FakeWorld(backend=backend, fallback=live_lens_fallback)
    if tight:
        options = {"budget_bytes": world.manager.min_budget_bytes(), "ladder": CapacityLadder([8, 9])}
        world = FakeWorld(backend=backend, rows=9, fallback=live_lens_fallback, **options)
        backend.is_mended = True
        world.warm(9)
        backend.is_mended = False
    before = world.states(), world.device.live_bytes
    with pytest.raises(BudgetError, match="no memory to compile default/8/ub0: 8 rows do not fit"):
        world.warm(8)
    assert (world.states(), world.device.live_bytes) == before
    backend.is_mended = True
    world.warm()
    assert world.run([5] * 8) == [5] * 8
    world.assert_bytes_add_up()


def test_a_fault_in_a_compile_is_no_refusal() -> None:
    backend = SmallBackend()
    backend.error = OSError
    world = FakeWorld(backend=backend, fallback=live_lens_fallback)
    with pytest.raises(OSError, match="do not fit"):
        world.warm()
    backend.is_mended = True
    world.warm()
    assert world.run([5] * 8) == [5] * 8
