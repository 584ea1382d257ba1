"""When tables are refreshed, and when not: the mark on them says whose lengths they hold."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, PlanManager, StalePlanError, Step

from .world import BEFORE_REPLAY, MAX_PAGES, Owner, World, both_styles, small_spec


@contextmanager
def refreshes(manager: PlanManager, number: int) -> Iterator[None]:
    before = manager.report().counters["refreshes"]
    yield
    assert manager.report().counters["refreshes"] - before == number


@dataclass
class UnhashableMetadata:
    rows: int = 0


@dataclass
class SlotsMetadata:
    __slots__ = ("rows",)
    rows: int


@dataclass(eq=True)
class EqualMetadata:
    """All instances are equal: only identity tells them apart."""

    rows: int = 0


def test_layers_of_one_step_share_one_refresh() -> None:
    """C09, the positive control: same owner, same lengths, no refresh but the first."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1])
    owner = Owner()
    with refreshes(world.manager, 1):
        for _ in range(57):
            plan = world.manager.plan_for(world.step(owner=owner))
    world.assert_right(world.decode(plan), world.expected())


def test_200_refreshes_across_tile_boundaries_keep_every_address_and_stay_right() -> None:
    """C05."""
    world = World(warm=True)
    addresses = set()
    for index in range(200):
        rows = 5 + index % 4
        world.set_lens([min(length + index % 3, 500) for length in world.random_lens(rows)])
        plan = world.manager.plan_for(world.step(rows))
        addresses.add((plan.class_rows, plan.native.work_info.data_ptr(), plan.native.reduce_info.data_ptr()))
        world.output.fill_(torch.nan)
        world.assert_right(world.decode(plan), world.expected())
    assert len(addresses) == 1


def test_rows_of_an_earlier_fuller_step_leave_no_task_behind() -> None:
    """C03: eager."""
    world = World(warm=True)
    world.set_lens([500, 499, 300, 257, 256, 255, 400, 100])
    world.assert_right(world.eager(world.step()), world.expected())
    world.set_lens([300, 0, 20, 255, 600])
    output = world.eager(world.step(5))
    world.assert_right(output, world.expected())
    assert (output[5:] == 0).all()
    native = world.manager.plan_for(world.step(5)).native
    assert native.work_info[:, 0].max() < 5
    assert (native.reduce_info[5:, 1] == 0).all()


@both_styles
def test_captured_rows_behind_the_real_ones_give_exact_zeros(style: str) -> None:
    """C03: five rows inside class 8, replayed after an eager step that had eight."""
    world = World(warm=True)
    world.set_lens([300, 17, 255, 0, 40])
    graph = world.capture(world.step(5), style)
    for seed_rows in range(3):
        other = world.lens_buffer()
        world.set_lens(world.random_lens(8), into=other)
        world.eager(world.step(lens=other))
        world.set_lens([512 - seed_rows, 1, 257, 33, 0])
        output = world.replay(graph, world.step(5), style)
        world.assert_right(output, world.expected())
        assert (output[5:] == 0).all()


def test_eager_tables_and_in_graph_tables_do_not_write_each_other() -> None:
    """C06."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1, 5, 6])
    eager = world.manager.plan_for(world.step())
    with world.manager.graph() as graph:
        captured = world.manager.plan_for(world.step())
        world.decode(captured)
    for native, poison in ((eager.native, 0x7F7F7F7F), (captured.native, 0x5A5A5A5A)):
        native.work_info.fill_(poison)
        native.reduce_info.fill_(poison)

    world.eager(world.step())
    assert (captured.native.work_info == 0x5A5A5A5A).all() and (captured.native.reduce_info == 0x5A5A5A5A).all()
    assert not (eager.native.work_info == 0x7F7F7F7F).any()

    eager.native.work_info.fill_(0x7F7F7F7F)
    eager.native.reduce_info.fill_(0x7F7F7F7F)
    world.replay(graph, world.step())
    assert (eager.native.work_info == 0x7F7F7F7F).all() and (eager.native.reduce_info == 0x7F7F7F7F).all()
    assert not (captured.native.work_info == 0x5A5A5A5A).any()


def test_a_foreign_refresh_is_never_mistaken_for_ones_own() -> None:
    """C09, first half: A plans, B plans on the same tables, a later layer of A decodes."""
    world = World(warm=True)
    lens_b, tables_b = world.lens_buffer(), torch.full_like(world.tables, -1)
    world.set_lens([500, 3, 257, 64, 1])
    world.set_lens([2, 400, 18, 0, 512, 33], into=lens_b, tables=tables_b)
    plan_a = world.manager.plan_for(world.step())
    world.assert_right(world.decode(plan_a), world.expected())
    with refreshes(world.manager, 1):
        plan_b = world.manager.plan_for(world.step(lens=lens_b))
    with refreshes(world.manager, 1):
        world.output.fill_(torch.nan)
        world.assert_right(world.decode(plan_a), world.expected())
    world.output.fill_(torch.nan)
    output_b = world.decode(plan_b, tables=tables_b)
    world.assert_right(output_b, world.expected(lens=lens_b, tables=tables_b))
    world.assert_wrong(output_b, world.expected())


def test_a_foreign_refresh_over_ones_own_lengths_is_refused() -> None:
    """C09, second half: B's lengths are in A's buffer, so A's can not be planned again."""
    world = World(warm=True)
    world.set_lens([500, 3, 257, 64, 1])
    plan_a = world.manager.plan_for(world.step())
    world.set_lens([2, 400, 18, 0, 512, 33])
    plan_b = world.manager.plan_for(world.step())
    world.output.fill_(torch.nan)
    with pytest.raises(StalePlanError, match="length buffer was written since plan_for"):
        world.decode(plan_a)
    assert world.output.isnan().all()
    world.assert_right(world.decode(plan_b), world.expected())


@pytest.mark.parametrize("rows", [5, 3])
def test_a_length_tensor_that_is_another_buffer_by_now_is_not_planned_again(rows: int) -> None:
    """Assigning `.data` moves a tensor without a new version."""
    world = World(warm=True)
    world.set_lens([500, 3, 257, 64, 1])
    lens = world.lens[:5].clone()
    plan = world.manager.plan_for(world.step(lens=lens))
    world.manager.trim(0)
    world.assert_right(world.decode(plan), world.expected())  # positive control: planned again from its own buffer
    world.manager.trim(0)
    lens.data = torch.tensor([2, 400, 18, 0, 512], dtype=torch.int32, device=world.device)[:rows]
    world.output.fill_(torch.nan)
    with pytest.raises(StalePlanError, match="is another buffer since plan_for"):
        world.decode(plan)
    assert world.output.isnan().all()


def test_a_foreign_refresh_over_lengths_without_a_version_is_refused_and_beside_them_is_not() -> None:
    """C09 in inference mode: nothing tells whether A's buffer was written, only that B was planned from it."""
    with torch.inference_mode():
        world = World(warm=True)
        world.set_lens([500, 3, 257, 64, 1])
        plan_a = world.manager.plan_for(world.step())
        world.set_lens([2, 400, 18, 0, 512, 33])
        plan_b = world.manager.plan_for(world.step())
        world.output.fill_(torch.nan)
        with pytest.raises(StalePlanError, match="planned since for another step"):
            world.decode(plan_a)
        assert world.output.isnan().all()
        world.assert_right(world.decode(plan_b), world.expected())

        other_lens = world.lens.clone().fill_(7)  # positive control: B in a buffer of its own
        world.manager.plan_for(world.step(lens=other_lens))
        world.assert_right(world.decode(plan_b), world.expected())


def test_a_step_plan_kept_for_later_steps_decodes_its_own_step_or_is_refused() -> None:
    world = World(warm=True)
    world.set_lens([500, 3, 257, 64, 1])
    kept = world.manager.plan_for(world.step())
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.eager(world.step()), world.expected())
        with pytest.raises(StalePlanError):
            world.decode(kept)
    kept = world.manager.plan_for(world.step())
    world.manager.invalidate()
    world.output.fill_(torch.nan)
    world.assert_right(world.decode(kept), world.expected())


def test_two_classes_interleaved_keep_their_own_steps() -> None:
    world = World(warm=True)
    lens_b, tables_b = world.lens_buffer(4), torch.full_like(world.tables, -1)
    query_b, output_b = world.buffers(4)
    world.set_lens([500, 3, 257, 64, 1, 17])
    plan_a = world.manager.plan_for(world.step())
    for _ in range(4):
        world.set_lens(world.random_lens(4), into=lens_b, tables=tables_b)
        plan_b = world.manager.plan_for(world.step(lens=lens_b))
        assert (plan_a.class_rows, plan_b.class_rows) == (8, 4)
        output_b.fill_(torch.nan)
        world.decode(plan_b, query=query_b, output=output_b, tables=tables_b)
        world.assert_right(output_b, world.expected(query=query_b, lens=lens_b, tables=tables_b))
        with refreshes(world.manager, 0):
            world.output.fill_(torch.nan)
            world.assert_right(world.decode(plan_a), world.expected())


def test_a_new_owner_at_a_dead_owners_address_refreshes() -> None:
    """C11: CPython hands an address out again at once, and inference tensors have no `_version` to tell."""
    world = World(warm=True)
    num_reused = 0
    with torch.inference_mode():
        lens = world.lens_buffer()
        for index in range(20):
            world.set_lens([400 - index, 3, 257, 64, 1], into=lens)
            owner = Owner()
            address = id(owner)
            world.manager.plan_for(Step(lens, owner=owner))
            world.set_lens([5, 300 + index, 18], into=lens)
            del owner
            owner = Owner()
            num_reused += id(owner) == address
            with refreshes(world.manager, 1):
                plan = world.manager.plan_for(Step(lens, owner=owner))
            world.output.fill_(torch.nan)
            world.assert_right(world.decode(plan), world.expected(lens=lens))
    assert num_reused, "no address was handed out twice: this test shows nothing"


@pytest.mark.parametrize(
    "make_owner",
    [UnhashableMetadata, lambda: SlotsMetadata(3), lambda: {"rows": 3}, lambda: [3], lambda: (3, 4), lambda: 12345],
    ids=["unhashable dataclass", "slots dataclass", "dict", "list", "tuple", "int"],
)
def test_any_object_may_own_a_step_and_none_is_modified(make_owner: Callable[[], Any]) -> None:
    """C12: skipped for the same owner, refreshed for the next, whatever its type."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1])
    owner, other = make_owner(), "another step"
    before = repr(owner), getattr(owner, "__dict__", {}).copy()
    with refreshes(world.manager, 1):
        for _ in range(3):
            plan = world.manager.plan_for(Step(world.lens, owner=owner))
    world.assert_right(world.decode(plan), world.expected())
    with refreshes(world.manager, 2):
        world.manager.plan_for(Step(world.lens, owner=other))
        world.manager.plan_for(Step(world.lens, owner=owner))
    graph = world.capture(Step(world.lens, owner=owner), "before replay")
    world.set_lens([3, 400, 18])
    world.assert_right(world.replay(graph, Step(world.lens, owner=owner), "before replay"), world.expected())
    assert (repr(owner), getattr(owner, "__dict__", {})) == before


def test_equal_but_distinct_owners_are_different_steps() -> None:
    """C74."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1])
    first, second = EqualMetadata(), EqualMetadata()
    assert first == second
    with refreshes(world.manager, 2):
        world.manager.plan_for(Step(world.lens, owner=first))
        world.manager.plan_for(Step(world.lens, owner=second))
    with refreshes(world.manager, 0):
        world.manager.plan_for(Step(world.lens, owner=second))


def test_1_true_and_1_point_0_are_different_owners() -> None:
    """C74: ints by value, everything else by identity."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1])
    with refreshes(world.manager, 3):
        for owner in (1, True, 1.0):
            world.manager.plan_for(Step(world.lens, owner=owner))
    big, same_value = 10**6, int("1000000")
    assert big is not same_value
    with refreshes(world.manager, 1):
        world.manager.plan_for(Step(world.lens, owner=big))
        world.manager.plan_for(Step(world.lens, owner=same_value))


def test_without_an_owner_every_plan_for_refreshes() -> None:
    """C74: also for the same Step object, which only the guard may accept."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1])
    step = Step(world.lens)
    with refreshes(world.manager, 3):
        for _ in range(3):
            plan = world.manager.plan_for(step)
    world.assert_right(world.decode(plan), world.expected())


@pytest.fixture
def gc_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Metadata:
    """An engine's metadata, which keeps its own plan."""

    plan: object = None
    num_alive = 0

    def __init__(self) -> None:
        Metadata.num_alive += 1

    def __del__(self) -> None:
        Metadata.num_alive -= 1


@both_styles
def test_a_plan_stored_on_its_own_owner_does_not_keep_the_owner(gc_off: None, style: str) -> None:
    """C75: with the garbage collector off, also for an owner whose step a graph has captured."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1])

    def forward(metadata: Metadata) -> None:
        metadata.plan = world.manager.plan_for(Step(world.lens, owner=metadata))
        world.decode(metadata.plan)

    forward(Metadata())
    assert Metadata.num_alive == 0
    metadata = Metadata()
    if style == "before replay":
        metadata.plan = world.manager.plan_for(Step(world.lens, owner=metadata))
    with world.manager.graph():
        if style == "before replay":
            world.decode(metadata.plan)
        else:
            forward(metadata)
    assert Metadata.num_alive == 1
    del metadata
    assert Metadata.num_alive == 0


class SlotsOwner:
    """Takes no weak reference, so that it has to be held; tells when it goes."""

    __slots__ = ("plan",)
    num_alive = 0

    def __init__(self) -> None:
        SlotsOwner.num_alive += 1

    def __del__(self) -> None:
        SlotsOwner.num_alive -= 1


def test_an_owner_that_takes_no_weak_reference_is_let_go_by_the_next_refresh(gc_off: None) -> None:
    """C75: a slots object that holds its own plan, with the garbage collector off."""
    world = World(warm=True)
    world.set_lens([300, 17, 512, 1])
    owner = SlotsOwner()
    owner.plan = world.manager.plan_for(Step(world.lens, owner=owner))
    del owner
    assert SlotsOwner.num_alive == 1
    world.manager.plan_for(world.step())
    assert SlotsOwner.num_alive == 0


def test_a_fallback_does_not_keep_its_owner_longer_than_a_plan_would(gc_off: None) -> None:
    """C75: rows beyond the ladder, by the fallback."""
    world = World(rows=8, fallback="torch", warm=True)
    lens = world.lens_buffer(20)
    owner = SlotsOwner()
    owner.plan = world.manager.plan_for(Step(lens, owner=owner))
    assert owner.plan.route == "fallback"
    del owner
    world.manager.plan_for(world.step(lens=lens))
    assert SlotsOwner.num_alive == 0


@pytest.mark.parametrize("decoded", [True, False], ids=["decoded", "only planned"])
def test_a_step_in_parts_does_not_keep_its_owner_longer_than_a_plan_would(gc_off: None, decoded: bool) -> None:
    """C75: rows beyond the ladder, without a fallback."""
    world = World(rows=8, warm=True)
    lens, tables = world.lens_buffer(20), torch.full((20, MAX_PAGES), -1, dtype=torch.int32, device=world.device)
    world.set_lens(world.random_lens(20), into=lens, tables=tables)
    query, output = world.buffers(20)
    owner = SlotsOwner()
    owner.plan = world.manager.plan_for(Step(lens, owner=owner))
    assert owner.plan.route == "planned"
    if decoded:
        world.decode(owner.plan, query=query, output=output, tables=tables)
        world.assert_right(output, world.expected(query=query, lens=lens, tables=tables))
    del owner
    world.manager.plan_for(world.step())
    assert SlotsOwner.num_alive == 0


def test_lengths_that_advance_in_place_refresh_without_a_new_revision() -> None:
    """C58: `_version` tells, where it can be read."""
    world = World(warm=True)
    world.set_lens([300, 17, 511, 255])
    world.tables[:] = world.tables[0]
    owner = Owner()
    world.manager.plan_for(world.step(owner=owner))
    for _ in range(3):
        world.lens[:4] += 1
        with refreshes(world.manager, 1):
            plan = world.manager.plan_for(world.step(owner=owner))
        world.output.fill_(torch.nan)
        world.tables[:, :] = torch.arange(1, MAX_PAGES + 1)
        world.assert_right(world.decode(plan), world.expected())


@pytest.mark.parametrize("sanitize", ["count", "raise"])
def test_where_the_version_cannot_be_read_the_sanitizer_finds_lengths_that_advanced(sanitize: str) -> None:
    """C58: inference tensors; with a revision the same code is right."""
    world = World(warm=True, sanitize=sanitize)
    with torch.inference_mode():
        lens = world.lens_buffer()
        world.set_lens([300, 17, 511, 255], into=lens)
        world.tables[:] = torch.arange(1, MAX_PAGES + 1)
        owner = Owner()
        world.decode(world.manager.plan_for(world.step(lens=lens, owner=owner)))
        lens[:4] += 1
        assert world.counters()["stale_detected"] == 0
        plan = world.manager.plan_for(world.step(lens=lens, owner=owner))
        if sanitize == "raise":
            with world.raises_soon(StalePlanError, "sanitizer saw"):
                world.decode(plan)
        else:
            world.decode(plan)
        assert world.counters()["stale_detected"] == 1

        plan = world.manager.plan_for(world.step(lens=lens, owner=owner, revision=1))
        world.output.fill_(torch.nan)
        world.assert_right(world.decode(plan), world.expected(lens=lens))
        assert world.counters()["stale_detected"] == 1


def test_a_layer_that_rewrites_shared_lengths_refreshes() -> None:
    """C59: shared_lengths=True is a statement that is checked, not believed."""
    world = World(warm=True)
    owner = Owner()
    for _layer in range(4):
        world.set_lens(world.random_lens(8))
        with refreshes(world.manager, 1):
            plan = world.manager.plan_for(world.step(owner=owner))
        world.output.fill_(torch.nan)
        world.assert_right(world.decode(plan), world.expected())


def test_lengths_that_are_not_shared_refresh_for_each_of_57_layers() -> None:
    """C59: also where nothing tells that they changed."""
    world = World(warm=True, sites={"default": small_spec(shared_lengths=False)})
    with torch.inference_mode():
        lens = world.lens_buffer()
        owner = Owner()
        for layer in range(57):
            world.set_lens([300 + layer, 17, 511 - layer, 255], into=lens)
            with refreshes(world.manager, 1):
                plan = world.manager.plan_for(world.step(lens=lens, owner=owner))
            world.output.fill_(torch.nan)
            world.assert_right(world.decode(plan), world.expected(lens=lens))


def test_a_plan_minted_in_inference_mode_is_refreshed_outside_it() -> None:
    """C76: inference mode belongs to a thread, and the one that warms up need not be the one that serves."""
    world = World()
    with torch.inference_mode(), world.manager.capture_phase():
        world.manager.warm()
    world.set_lens([300, 17, 511, 255])
    plan = world.manager.plan_for(world.step(owner=Owner()))
    world.assert_right(world.decode(plan), world.expected())


@both_styles
def test_inference_mode_tensors_work_throughout(style: str) -> None:
    """C76: no `_version` to read anywhere."""
    with torch.inference_mode():
        world = World(warm=True)
        assert world.lens.is_inference() and world.key_cache.is_inference()
        world.set_lens([300, 17, 511, 255])
        owner = Owner()
        with refreshes(world.manager, 1):
            plan = world.manager.plan_for(world.step(owner=owner))
            assert world.manager.plan_for(world.step(owner=owner)).mark is plan.mark
        world.assert_right(world.decode(plan), world.expected())
        graph = world.capture(world.step(), style)
        for _ in range(3):
            world.set_lens(world.random_lens(8))
            world.assert_right(world.replay(graph, world.step(), style), world.expected())


@both_styles
def test_a_step_in_parts_after_a_step_of_the_top_class_decodes_its_own_lengths_in_inference_mode(style: str) -> None:
    """Its first part begins where the earlier step's lengths began: planned before it, and not since."""
    with torch.inference_mode():
        world = World(ladder=CapacityLadder([4]), warm=True)
        world.set_lens([300, 17, 512, 1, 5, 640, 0, 9])
        if style == BEFORE_REPLAY:
            world.manager.plan_for(Step(world.lens[:4], owner=1))
            plan = world.manager.plan_for(Step(world.lens, owner=2))
            for _ in range(2):
                world.assert_right(world.decode(plan, world.query, world.output), world.expected())
            world.manager.plan_for(Step(world.lens[:4], owner=3))
            with pytest.raises(StalePlanError, match="planned since"):  # the control: this one came after it
                world.decode(plan, world.query, world.output)
        else:
            with world.manager.graph() as earlier:
                world.decode(world.manager.plan_for(Step(world.lens[:4], owner=1)))
            with world.manager.graph() as graph:
                plan = world.manager.plan_for(Step(world.lens, owner=2))
                for _ in range(2):
                    world.decode(plan, world.query, world.output)
            graph.replay()
            world.assert_right(world.output, world.expected())
            del earlier
