"""The log-sum-exps of a call reach whoever decodes it, on every route; the fake's lse of a row is its length."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from planlife import CapacityLadder, ConfigError, RouteError, StepPlan
from planlife import configuration as configuration_module
from planlife.testing import FakeBackend, FakeTensor
from tests.unit.fake_world import POISON, FakeWorld, spec

NOTHING = -math.inf


def poisoned_lse(world: FakeWorld, rows: int) -> FakeTensor:
    one = next(iter(world.sites.values()))
    return FakeTensor((rows * one.query_length, one.num_q_heads), "float32", values=[POISON] * rows * one.query_length)


def decode(world: FakeWorld, plan: StepPlan, rows: int) -> tuple[list[Any], list[Any]]:
    """(output, lse) of a layer of that many rows, both poisoned before."""
    lse = poisoned_lse(world, rows)
    output = world.manager.pa_decode(plan, **world.call(rows), lse=lse)
    return output.values, lse.values


WORLDS: dict[str, dict[str, Any]] = {
    "one table set": {},
    "segments": {"backend": FakeBackend(max_plan_rows=3), "ladder": CapacityLadder([8])},
    "parts": {"ladder": CapacityLadder([2])},
}


@pytest.mark.parametrize("how", WORLDS)
@pytest.mark.parametrize("query_length", [1, 2])
def test_a_plan_of_any_kind_fills_the_whole_lse(how: str, query_length: int) -> None:
    world = FakeWorld(sites=spec(query_length=query_length), **WORLDS[how])
    world.warm()
    lens = [300, 0, 17, 40, 2]
    plan = world.manager.plan_for(world.step(lens))
    num_rows = 5 if how == "parts" else 8
    output, lse = decode(world, plan, num_rows)
    wanted = [length for length in [*lens, 0, 0, 0][:num_rows] for _ in range(query_length)]
    assert output == wanted
    assert lse == [length or NOTHING for length in wanted]
    assert world.decode(plan, num_rows) == wanted  # and it is the call's, not the plan's


def test_a_dummy_has_attended_nothing() -> None:
    world = FakeWorld()
    world.warm()
    for plan in (world.manager.plan_for(world.step([5, 6], dummy=True)), world.manager.plan_for(world.step([]))):
        assert decode(world, plan, 2) == ([0, 0], [NOTHING, NOTHING])
        call = world.call(2)
        with pytest.raises(ConfigError, match=r"lse's shape is \[3, 4\], wanted \[2, 4\]"):
            world.manager.pa_decode(plan, **call, lse=poisoned_lse(world, 3))
        assert call["output"].values == [POISON] * 2


def test_a_wrong_lse_is_refused_before_any_launch() -> None:
    world = FakeWorld()
    world.warm()
    plan = world.manager.plan_for(world.step([5, 6]))
    num_executed = len(world.device.executed)
    call = world.call(2)
    with pytest.raises(ConfigError, match=r"site 'default': lse's shape is \[1, 4\], wanted \[2, 4\]"):
        world.manager.pa_decode(plan, **call, lse=poisoned_lse(world, 1))
    assert len(world.device.executed) == num_executed
    assert call["output"].values == [POISON] * 2
    assert decode(world, plan, 2) == ([5, 6], [5, 6])  # positive control


# --- fallbacks


def taking(output: FakeTensor, *call: Any, lse: FakeTensor | None = None, **extras: Any) -> None:
    output.write(call[4].values)
    if lse is not None:
        lse.write([length or NOTHING for length in call[4].values])


def documented(
    output: FakeTensor,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    context_lens: FakeTensor,
    softmax_scale: float,
    *,
    spec: Any,
    key_scale: Any,
    value_scale: Any,
    sinks: Any,
) -> None:
    output.write(context_lens.values)


class Kernel:
    """A callable object that takes lse by its name."""

    def __call__(self, output: FakeTensor, *call: Any, spec: Any, lse: Any = None, **scales: Any) -> None:
        taking(output, *call, lse=lse)


class DocumentedKernel:
    """A callable object without lse, and without a name."""

    def __call__(self, *call: Any, spec: Any, key_scale: Any, value_scale: Any, sinks: Any) -> None:
        call[0].write(call[5].values)


class Unreadable(DocumentedKernel):
    """Like compiled callables: nobody can tell what it takes."""

    __signature__ = 3


@functools.wraps(documented)
def wrapped(*call: Any, **extras: Any) -> None:
    documented(*call, **extras)


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(
    "fallback", [taking, Kernel(), functools.partial(taking, spec=None)], ids=["function", "object", "partial"]
)
def test_a_fallback_that_takes_lse_gets_its_rows(fallback: Any, enabled: bool) -> None:
    world = FakeWorld(enabled=enabled, fallback=fallback)
    plan = world.manager.plan_for(world.step([5, 0, 7]))
    assert plan.route == "fallback"
    rows = 4 if enabled else 3
    assert decode(world, plan, rows) == ([5, 0, 7, 0][:rows], [5, NOTHING, 7, NOTHING][:rows])


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(
    ("fallback", "name"),
    [
        (documented, "'documented'"),
        (DocumentedKernel(), "DocumentedKernel object"),
        (wrapped, "'documented'"),
        (Unreadable(), "Unreadable object"),
    ],
    ids=["function", "object", "wrapped", "no signature"],
)
def test_a_fallback_without_lse_is_refused_by_name_where_a_call_asks_for_it(
    fallback: Any, name: str, enabled: bool
) -> None:
    world = FakeWorld(enabled=enabled, fallback=fallback)
    plan = world.manager.plan_for(world.step([5, 0, 7]))
    lse, call = poisoned_lse(world, 3), world.call(3)
    with pytest.raises(RouteError, match=f"asks for lse and goes to the fallback .*{name}.* does not take it"):
        world.manager.pa_decode(plan, **call, lse=lse)
    assert lse.values == call["output"].values == [POISON] * 3
    assert world.decode(plan) == [5, 0, 7]  # positive control: what does not ask is served as before


def test_a_planned_step_is_served_whatever_the_fallback_takes() -> None:
    world = FakeWorld(fallback=documented)
    world.warm()
    assert decode(world, world.manager.plan_for(world.step([5, 0])), 2) == ([5, 0], [5, NOTHING])


def test_a_fallback_that_swallows_lse_leaves_nan_and_no_earlier_numbers() -> None:
    def swallowing(output: FakeTensor, *call: Any, **extras: Any) -> None:
        output.write(call[4].values)

    world = FakeWorld(fallback=swallowing)
    output, lse = decode(world, world.manager.plan_for(world.step([5, 6, 7])), 4)
    assert output == [5, 6, 7, 0]
    assert all(math.isnan(value) for value in lse[:3])
    assert lse[3] == NOTHING


def test_what_a_fallback_takes_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    signature = configuration_module.signature

    def noting_signature(fallback: Any) -> Any:
        asked.append(fallback)
        return signature(fallback)

    monkeypatch.setattr(configuration_module, "signature", noting_signature)
    world = FakeWorld(enabled=False, fallback=taking)
    assert asked == [taking]
    for lens in ([5, 6], [7]):
        decode(world, world.manager.plan_for(world.step(lens)), len(lens))
    assert asked == [taking]


def test_hooks_hear_of_the_refusal() -> None:
    world = FakeWorld(fallback=documented)
    events: list[str] = []
    world.manager.add_hook(lambda event: events.append(event.kind))
    plan = world.manager.plan_for(world.step([5]))
    with pytest.raises(RouteError, match="lse"):
        world.manager.pa_decode(plan, **world.call(1), lse=poisoned_lse(world, 1))
    assert events[-1] == "refuse"


def test_a_graph_fills_the_lse_that_it_was_captured_with() -> None:
    world = FakeWorld()
    world.warm()
    plan = world.manager.plan_for(world.step([5, 6]))
    lse, call = poisoned_lse(world, 2), world.call(2)
    with world.manager.graph() as g:
        world.manager.pa_decode(plan, **call, lse=lse)
    assert lse.values == [POISON] * 2
    step = world.step([0, 9])
    world.manager.plan_for(step)
    world.manager.replay(g, step)
    assert (call["output"].values, lse.values) == ([0, 9], [NOTHING, 9])
