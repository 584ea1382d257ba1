"""Dummy steps (idle ranks, padding) change no plan, read no KV and write zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife import RouteError, StalePlanError, Step

from .world import BEFORE_REPLAY, IN_GRAPH, MAX_PAGES, Owner, World, both_styles

LENS = [500, 3, 257, 64, 1, 0, 256, 17]


class DummyWorld(World):
    """Snapshots of every byte of the plan of class 8."""

    def dummies(self) -> dict[str, Step]:
        far_past_the_tables = torch.full_like(self.lens, 10**6)
        return {
            "dummy": Step(far_past_the_tables, dummy=True),
            "dummy of a real owner": self.step(lens=far_past_the_tables, dummy=True),
            "no rows": self.step(lens=self.lens[:0]),
            "dummy without rows": self.step(lens=self.lens[:0], dummy=True),
            "dummy of one row": self.step(lens=far_past_the_tables[:1], dummy=True),
        }

    def plan_bytes(self) -> torch.Tensor:
        plan = self.manager.plan_for(self.last)
        (line,) = (line for line in self.manager.report().plans if line.class_rows == plan.class_rows)
        storage = plan.native.work_info.untyped_storage()
        assert storage.nbytes() == line.num_bytes  # the whole pair, eager and in-graph
        return torch.tensor([], dtype=torch.uint8, device=self.device).set_(storage).clone()

    def real_step(self) -> Step:
        self.last = self.step()
        return self.last


KINDS = ["dummy", "dummy of a real owner", "no rows", "dummy without rows", "dummy of one row"]
every_dummy = pytest.mark.parametrize("kind", KINDS)


@every_dummy
def test_a_dummy_between_two_real_steps_changes_no_plan_byte_and_writes_zeros(kind: str) -> None:
    """C13: its lengths point far past the block tables, whose every entry is -1."""
    world = DummyWorld(warm=True)
    world.set_lens(LENS)
    plan = world.manager.plan_for(world.real_step())
    before, counters = world.plan_bytes(), world.counters()
    step = world.dummies()[kind]
    dummy = world.manager.plan_for(step)
    assert (dummy.route, dummy.native, dummy.class_rows) == ("dummy", None, None)
    assert dummy.reason and dummy.context_lens is step.context_lens
    nowhere = torch.full((8, MAX_PAGES), -1, dtype=torch.int32, device=world.device)
    world.output.fill_(torch.nan)
    world.key_cache.fill_(torch.nan), world.value_cache.fill_(torch.nan)
    assert (world.decode(dummy, tables=nowhere) == 0).all()
    assert torch.equal(world.plan_bytes(), before)
    assert world.counters()["refreshes"] == counters["refreshes"]
    for cache in (world.key_cache, world.value_cache):
        cache[1:] = torch.randn(cache[1:].shape, generator=world.generator)
    world.output.fill_(torch.nan)
    world.assert_right(world.decode(plan), world.expected())


@both_styles
@every_dummy
def test_a_dummy_plan_for_beside_live_graphs_changes_no_plan_byte(style: str, kind: str) -> None:
    """C57: and the graph replays its own step as if nothing had been."""
    world = DummyWorld(warm=True)
    world.set_lens(LENS)
    graph = world.capture(world.real_step(), style)
    world.set_lens(world.random_lens(8))
    step = world.real_step()
    world.assert_right(world.replay(graph, step, style), world.expected())
    before = world.plan_bytes()
    world.decode(world.manager.plan_for(world.dummies()[kind]))
    assert torch.equal(world.plan_bytes(), before)
    world.output.fill_(torch.nan)
    world.manager.replay(graph, step)
    world.assert_right(world.output, world.expected())


@every_dummy
def test_replaying_a_before_replay_graph_for_a_dummy_reads_nothing_and_the_next_real_step_refreshes(kind: str) -> None:
    """C57: ranks in lockstep must launch the graph; the dummy's block tables are all -1."""
    world = DummyWorld(warm=True)
    world.set_lens(LENS)
    graph = world.capture(world.real_step(), BEFORE_REPLAY)
    for round_number in range(3):
        world.set_lens(world.random_lens(8))
        step = world.real_step()
        world.assert_right(world.replay(graph, step, BEFORE_REPLAY), world.expected())
        tables, caches = world.tables.clone(), (world.key_cache.clone(), world.value_cache.clone())
        world.tables.fill_(-1)
        world.key_cache.fill_(torch.nan), world.value_cache.fill_(torch.nan)
        dummy = world.dummies()[kind]
        before = world.counters()["refreshes"]
        for _ in range(2):
            world.output.fill_(torch.nan)
            if round_number:
                world.manager.plan_for(dummy)
            world.manager.replay(graph, dummy)
            assert (world.output == 0).all()
        assert world.counters()["refreshes"] == before + 2  # each time: a sleep may have overwritten them
        world.tables.copy_(tables)
        world.key_cache.copy_(caches[0]), world.value_cache.copy_(caches[1])

        with pytest.raises(StalePlanError, match="emptied for a dummy step"):
            world.manager.guard(graph, step)
        world.assert_right(world.replay(graph, step, BEFORE_REPLAY), world.expected())


def test_the_sanitizer_knows_tables_that_were_emptied_on_purpose() -> None:
    """C57: the lengths in the buffer are still the last real step's."""
    world = DummyWorld(warm=True, sanitize="count")
    world.set_lens(LENS)
    graph = world.capture(world.real_step(), BEFORE_REPLAY)
    world.replay(graph, world.real_step(), BEFORE_REPLAY)
    for dummy in world.dummies().values():
        world.manager.replay(graph, dummy)
        assert world.counters()["stale_detected"] == 0
    world.manager.plan_for(world.real_step())
    world.lens += 1
    graph.replay()
    assert world.counters()["stale_detected"] == 1  # positive control: planned tables are looked at again


def test_a_dummy_replay_without_guard_would_read_the_old_lengths() -> None:
    """C57, the control: this is what the emptying prevents."""
    world = DummyWorld(warm=True)
    world.set_lens(LENS)
    graph = world.capture(world.real_step(), BEFORE_REPLAY)
    world.replay(graph, world.last, BEFORE_REPLAY)
    world.manager.plan_for(world.dummies()["dummy"])
    world.key_cache.fill_(torch.nan)
    world.output.fill_(torch.nan)
    graph.replay()
    assert world.output.isnan().any()


@every_dummy
def test_an_in_graph_graph_reads_the_lengths_that_the_engine_zeroed(kind: str) -> None:
    """C57, the other style: nothing of ours is emptied, the recorded refresh reads the engine's buffer."""
    world = DummyWorld(warm=True)
    world.set_lens(LENS)
    graph = world.capture(world.real_step(), IN_GRAPH)
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.real_step()), world.expected())
        world.lens.zero_()
        world.tables.fill_(-1)
        before = world.counters()["refreshes"]
        world.output.fill_(torch.nan)
        world.manager.replay(graph, world.dummies()[kind])
        assert (world.output == 0).all()
        assert world.counters()["refreshes"] == before


def test_a_dummy_of_another_site_or_ubatch_stands_for_no_read_of_the_graph() -> None:
    world = World(warm=True, ubatches=2)
    world.set_lens(LENS)
    step = world.step()
    graph = world.capture(step, BEFORE_REPLAY)
    world.manager.plan_for(step)
    with pytest.raises(StalePlanError, match="has ubatch: found 1, wanted 0"):
        world.manager.guard(graph, world.step(dummy=True, ubatch=1))
    world.output.fill_(torch.nan)
    world.manager.replay(graph, step)
    world.assert_right(world.output, world.expected())


@every_dummy
@pytest.mark.parametrize("options", [{}, {"fallback": "torch"}], ids=["no fallback", "fallback"])
def test_a_dummy_while_recording_is_refused(kind: str, options: dict[str, Any]) -> None:
    """C77: planned there, or planned before and decoded there. A real step of empty rows is recorded."""
    world = DummyWorld(warm=True, **options)
    world.set_lens(LENS)
    dummy = world.dummies()[kind]
    made_before = world.manager.plan_for(dummy)
    for record_it in (lambda: world.manager.plan_for(dummy), lambda: world.decode(made_before)):
        with pytest.raises(RouteError, match="while recording"), world.manager.graph() as graph:
            record_it()
        assert world.is_empty(graph)
    world.set_lens([0] * 8)
    graph = world.capture(world.real_step(), IN_GRAPH)
    assert (world.replay(graph, world.real_step()) == 0).all()
    world.set_lens(LENS)
    world.assert_right(world.replay(graph, world.real_step()), world.expected())


def test_a_dummy_needs_no_minted_class_and_no_backend_that_could_serve_it() -> None:
    """C13: on a cold manager, and for more rows than the ladder has."""
    world = World()
    for lens in (world.lens, world.lens_buffer(100)):
        plan = world.manager.plan_for(Step(lens, owner=Owner(), dummy=True))
        assert plan.route == "dummy"
        world.output.fill_(torch.nan)
        assert (world.decode(plan) == 0).all()
    counters = world.counters()
    assert counters["mints"] == counters["misses"] == counters["fallbacks"] == 0
