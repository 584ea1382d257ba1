"""Engines copy, deep-copy and send their metadata: what may be copied is, and the rest says so by its name."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from planlife import CapacityLadder, Step
from planlife.events import Event
from tests.unit.fake_world import FakeWorld, spec


@dataclass
class Metadata:
    """What a builder hands to layers."""

    plan: Any
    step: Any
    tokens: list[int]


class SlottedOwner:
    """Takes no weak reference, so that it is held."""

    __slots__ = ("metadata", "plan")


COPIES: dict[str, Callable[[Metadata], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
    "asdict": lambda metadata: Metadata(**dataclasses.asdict(metadata)),
}
PICKLES = [*range(pickle.HIGHEST_PROTOCOL + 1)]


def metadata_of(how: str, owner: object = Ellipsis) -> tuple[FakeWorld, Metadata]:
    off = {"enabled": False, "fallback": lambda output, *call, **extras: output.write([5, 6])}
    world = FakeWorld(sites=spec(), **(off if how == "off" else {}))  # type: ignore[arg-type]
    if how in ("planned", "dummy"):
        world.warm()
    step = world.step([5, 6], owner=owner, dummy=how == "dummy")
    return world, Metadata(world.manager.plan_for(step), step, [1, 2])


@pytest.mark.parametrize("how", ["planned", "dummy", "off"])
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_of_metadata_holds_the_same_plan_and_step(how: str, duplicate: Callable[[Metadata], Any]) -> None:
    world, metadata = metadata_of(how)
    copied = duplicate(metadata)
    assert copied is not metadata
    assert copied.plan is metadata.plan
    assert copied.step is metadata.step
    call = world.call(2)
    world.manager.pa_decode(copied.plan, **call)
    assert call["output"].values == ([0, 0] if how == "dummy" else [5, 6])
    if how == "planned":
        assert world.manager.plan_for(copied.step) is metadata.plan, "the same step: nothing is refreshed"
        assert world.counters["refreshes"] == 1


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_an_owner_that_holds_its_plan_and_step_is_copied(duplicate: Callable[[Any], Any]) -> None:
    owner = SlottedOwner()
    _, owner.metadata = metadata_of("planned", owner)
    owner.plan = owner.metadata.plan
    copied = duplicate(owner)
    assert copied is not owner
    assert copied.plan is owner.plan
    assert copied.metadata.step.owner is owner, "the step's owner is the object that it was made with"


@pytest.mark.parametrize("protocol", PICKLES)
@pytest.mark.parametrize(
    ("how", "field", "message"),
    [
        ("planned", "plan", "a StepPlan cannot be pickled: .* Leave it out of what is sent, .* plan_for"),
        ("off", "plan", "an OffPlan cannot be pickled: .* Leave it out of what is sent, .* plan_for"),
        ("planned", "step", "a Step cannot be pickled: .* Send the numbers, and make a Step"),
    ],
)
def test_metadata_that_holds_one_is_not_pickled_and_the_way_out_is_told(
    how: str, field: str, message: str, protocol: int
) -> None:
    _, metadata = metadata_of(how)
    kept = {name: None if name != field else getattr(metadata, name) for name in ("plan", "step")}
    with pytest.raises(TypeError, match=message):
        pickle.dumps(dataclasses.replace(metadata, **kept), protocol)
    assert pickle.loads(pickle.dumps(dataclasses.replace(metadata, plan=None, step=None), protocol)).tokens == [1, 2]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_owns_memory_or_counts_by_identity_is_refused_by_its_name(duplicate: Callable[[Any], Any]) -> None:
    world, metadata = metadata_of("planned")
    for thing, message in (
        (world.manager, "a PlanManager cannot be copied or pickled: .* leaves it out"),
        (metadata.plan.item, "a Plan cannot be copied or pickled: "),
        (metadata.plan.mark, "a Mark cannot be copied or pickled: "),
    ):
        with pytest.raises(TypeError, match=message):
            duplicate(thing)
    assert world.manager.plan_for(metadata.step) is metadata.plan


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["c", "d", "p"]
)
def test_values_are_copied_and_pickled(duplicate: Callable[[Any], Any]) -> None:
    world, _ = metadata_of("planned")
    seen: list[Event] = []
    world.manager.add_hook(seen.append)
    world.manager.trim(0)
    site, ladder = spec(sliding_window=(6, 0), query_length=2, causal=True), CapacityLadder([1, 4, 9])
    report = world.manager.report()
    assert seen
    for value in (site, ladder, report, seen[0]):
        assert duplicate(value) == value
        assert type(duplicate(value)) is type(value)
    assert hash(duplicate(site)) == hash(site)
    assert duplicate(ladder).max_rows == ladder.max_rows
    assert duplicate(report).to_dict() == report.to_dict()


def test_a_step_is_still_immutable_and_another_step_of_the_same_lengths_another() -> None:
    _, metadata = metadata_of("planned")
    with pytest.raises(AttributeError, match="immutable"):
        copy.copy(metadata.step).owner = None
    assert Step(metadata.step.context_lens) is not metadata.step
