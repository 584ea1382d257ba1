"""Plans are minted in the capture phase and nowhere else; what was minted once is never compiled again."""

from __future__ import annotations

import logging

import pytest

from planlife import CapacityError, CapacityLadder, ConfigError, MintError, RouteError
from planlife.testing import FakeBackend
from tests.unit.fake_world import Captured, FakeWorld, live_lens_fallback, spec


def test_a_class_never_minted_is_refused_while_recording_before_any_device_work() -> None:
    """C14."""
    world = FakeWorld()
    world.warm(4)
    calls, allocations = dict(world.backend.calls), world.device.num_allocations
    step = world.step([5] * 8)
    with pytest.raises(MintError, match=r"default/8/ub0 was never minted.*warm\(\)"):
        with world.manager.graph():
            world.manager.plan_for(step)
    launched = {"refresh", "decode", "compile", "make_tables"}
    assert {name: world.backend.calls[name] for name in launched} == {name: calls.get(name, 0) for name in launched}
    assert world.device.num_allocations == allocations
    assert world.manager.report().num_graphs == 0

    captured = Captured(world, world.step([5] * 4), in_graph=True)  # positive control: a minted class records
    world.manager.replay(captured.g, world.step([6] * 4))
    assert captured.output == [6] * 4
    with world.manager.capture_phase():
        assert world.run([5] * 8) == [5] * 8


@pytest.mark.parametrize("in_phase", [False, True])
def test_an_open_phase_does_not_make_minting_possible_while_recording(in_phase: bool) -> None:
    """C14: the phase is the manager's, recording is the stream's."""
    world = FakeWorld()
    step = world.step([5] * 8)

    def record() -> None:
        with world.manager.graph():
            world.manager.plan_for(step)

    if in_phase:
        with world.manager.capture_phase():
            with pytest.raises(MintError):
                record()
            assert world.manager.plan_for(step).route == "planned"
    else:
        with pytest.raises(MintError):
            record()


def test_on_miss_fallback_names_the_reason_and_compiles_nothing() -> None:
    """C15."""
    world = FakeWorld(fallback=live_lens_fallback)
    world.warm(4)
    compiles = world.counters["compiles"]
    step = world.step([7] * 8)
    plan = world.manager.plan_for(step)
    assert plan.route == "fallback"
    assert "class 8 of site 'default' (ubatch 0) was never minted" in plan.reason
    assert "capture_phase()" in plan.reason
    assert plan.native is None and plan.segments is None and plan.class_rows is None
    assert world.decode(plan) == [7] * 8
    assert world.backend.calls["decode"] == 0
    assert (world.counters["compiles"], world.counters["fallbacks"]) == (compiles, 1)
    assert world.manager.plan_for(world.step([7] * 4)).route == "planned"


def test_on_miss_fallback_without_a_fallback_is_refused_at_the_decode() -> None:
    """C15: plan_for answers, so that an engine with a kernel of its own can serve the step."""
    world = FakeWorld()
    plan = world.manager.plan_for(world.step([7] * 8))
    assert plan.route == "fallback"
    with pytest.raises(RouteError, match=r"never minted.*fallback="):
        world.decode(plan)


def test_on_miss_raise_refuses_the_plan() -> None:
    """C15."""
    world = FakeWorld(on_miss="raise")
    with pytest.raises(RouteError, match=r"class 8 .* was never minted.*capture_phase\(\)"):
        world.manager.plan_for(world.step([7] * 8))
    assert world.backend.calls["compile"] == 0
    world.warm(8)
    assert world.run([7] * 8) == [7] * 8


def test_on_miss_mint_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """C15: never a silent compile."""
    world = FakeWorld(on_miss="mint")
    world.warm(4)
    assert world.counters["compiles_after_seal"] == 0
    with caplog.at_level(logging.WARNING, "planlife"):
        assert world.run([7] * 8) == [7] * 8
    assert world.counters["compiles_after_seal"] == 1
    assert [record.levelname for record in caplog.records if "stalls this step" in record.message] == ["WARNING"]
    world.run([8] * 8)
    assert world.counters["compiles_after_seal"] == 1


@pytest.mark.parametrize("on_miss", ["fallback", "raise", "mint"])
def test_an_evicted_class_comes_back_without_a_compile_whatever_on_miss_says(on_miss: str) -> None:
    """C15: on_miss is about classes never minted; an evicted one is known."""
    world = FakeWorld(on_miss=on_miss)
    world.warm()
    world.manager.trim(0)
    assert world.run([9] * 3) == [9] * 3
    assert world.counters["compiles_after_seal"] == 0
    assert world.counters["rematerialised"] == 2  # the pair and the arena
    assert world.counters["mints"] == 4  # of the warm-up: coming back is none


def test_all_row_counts_of_a_class_share_one_compile() -> None:
    """C17."""
    world = FakeWorld(rows=64, ladder=CapacityLadder([64]))
    with world.manager.capture_phase():
        for rows in range(1, 65):
            assert world.run([rows] * rows) == [rows] * rows
    assert world.counters["compiles"] == 1
    assert world.counters["mints"] == 1
    assert world.backend.calls["compile"] == 1


def test_ubatches_share_code_and_not_buffers() -> None:
    """C17, C25: one compile per class and site, one plan per ubatch."""
    world = FakeWorld(ubatches=3, rows=4)
    world.warm()
    assert world.counters["compiles"] == 3
    assert world.counters["mints"] == 9
    buffers = {world.manager.plan_for(world.step([1] * 4, ubatch=ub)).native.buffer.address for ub in range(3)}
    assert len(buffers) == 3


def test_warm_and_mint_are_idempotent() -> None:
    world = FakeWorld()
    world.warm()
    compiled, allocations = list(world.backend.compiled), world.device.num_allocations
    world.warm()
    world.warm([1, 3, 8])
    assert (world.backend.compiled, world.device.num_allocations) == (compiled, allocations)


def test_warm_of_some_rows_mints_their_classes_and_no_others() -> None:
    world = FakeWorld(rows=8)
    world.warm([3, 4])
    assert [line.class_rows for line in world.manager.report().plans] == [4]
    with world.manager.capture_phase():
        with pytest.raises(CapacityError, match="9 rows"):
            world.manager.warm([1, 9])
    assert [line.class_rows for line in world.manager.report().plans] == [4]  # nothing of the refused call


@pytest.mark.parametrize("call", ["warm", "capture_phase"])
def test_warm_and_capture_phase_are_refused_while_recording(call: str) -> None:
    """C14."""
    world = FakeWorld()
    with world.manager.capture_phase():
        with pytest.raises(MintError, match="records"), world.manager.graph():
            world.manager.warm() if call == "warm" else world.manager.capture_phase().__enter__()
        world.manager.warm()
    assert world.counters["mints"] == 4


def test_warm_is_refused_outside_a_capture_phase() -> None:
    world = FakeWorld()
    with pytest.raises(MintError, match=r"capture_phase\(\)"):
        world.manager.warm()
    assert world.device.num_allocations == 0
    world.warm()
    assert world.device.num_allocations == 5


def test_an_exception_in_the_capture_phase_seals_it_and_leaves_no_pins() -> None:
    """C50."""
    world = FakeWorld()
    step = world.step([5] * 8)

    def capture_until_interrupted() -> None:
        with world.manager.capture_phase():
            world.manager.warm(8)
            with world.manager.graph():
                world.manager.pa_decode(world.manager.plan_for(step), **world.call(8))
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_until_interrupted()
    report = world.manager.report()
    assert report.sealed
    assert (report.pinned_bytes, report.num_graphs) == (0, 0)
    assert world.run([6] * 8) == [6] * 8  # minted so far: usable
    assert world.manager.plan_for(world.step([6] * 2)).route == "fallback"  # sealed: not minted any more
    with world.manager.capture_phase():
        assert world.run([6] * 2) == [6] * 2  # positive control: a phase may be opened again


def test_a_nested_phase_seals_only_at_the_outer_end() -> None:
    world = FakeWorld()
    with world.manager.capture_phase():
        with world.manager.capture_phase():
            pass
        assert not world.manager.report().sealed
        assert world.run([3]) == [3]
    assert world.manager.report().sealed


def test_a_builder_thrown_away_leaves_nothing_and_the_second_is_identical() -> None:
    """C80: the profiling pass of an engine."""
    world = FakeWorld(ubatches=2)

    def build() -> tuple[dict[str, int], int]:
        manager = world.manager = world.new_manager()
        with manager.capture_phase():
            manager.warm()
            graphs = [Captured(world, world.step([5] * rows, ubatch=ub)) for rows in (1, 8) for ub in (0, 1)]
        assert len(graphs) == 4
        live_bytes = world.device.live_bytes
        counters = manager.report().counters
        manager.close()
        return counters, live_bytes

    first, second = build(), build()
    assert first == second
    assert first[1] == world.manager.worst_case_bytes()
    assert world.device.live_bytes == 0


def test_a_manager_dropped_without_close_leaves_no_buffer() -> None:
    """C80: builders are dropped, not closed; the leak check looks at the buffers themselves."""
    world = FakeWorld()
    world.warm()
    del world.manager


def test_a_site_that_the_backend_refuses_is_refused_at_construction_without_a_fallback() -> None:
    """C44, C65: where the configuration can never work."""
    backend = FakeBackend(spec_reasons=["head_dim 16 is not built; use 64"])
    with pytest.raises(ConfigError, match=r"head_dim 16 is not built; use 64.*No fallback"):
        FakeWorld(backend=backend)
    world = FakeWorld(backend=backend, fallback=live_lens_fallback)  # positive control
    world.warm()
    assert world.run([4, 5]) == [4, 5]
    assert world.backend.calls["compile"] == 0


def test_capability_is_asked_once_per_step_and_site_and_never_by_a_decode() -> None:
    """C64: 57 layers of 10 steps."""
    world = FakeWorld(sites={"full": spec(), "windowed": spec(sliding_window=256)})
    world.warm()
    asked = world.backend.calls["refuse_step"]
    for _ in range(10):
        for site in ("full", "windowed"):
            step = world.step([300] * 4, site=site)
            for _layer in range(57):
                plan = world.manager.plan_for(step)
                before = world.backend.calls["refuse_step"], world.backend.calls["refuse_spec"]
                world.decode(plan)
                assert (world.backend.calls["refuse_step"], world.backend.calls["refuse_spec"]) == before
    assert world.backend.calls["refuse_step"] - asked <= 20


def test_all_reasons_against_a_route_are_told() -> None:
    """C65."""
    world = FakeWorld(fallback=live_lens_fallback)
    world.warm()
    assert world.manager.plan_for(world.step([1])).route == "planned"
    world.backend.step_reasons = ["page 16 needs 64-token tiles", "4 query heads are too few"]
    plan = world.manager.plan_for(world.step([2]))
    assert plan.route == "fallback"
    assert "page 16 needs 64-token tiles; 4 query heads are too few" in plan.reason
