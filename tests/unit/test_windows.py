"""Windows as engines hand them over: what means the same passes, and a layer's own is checked against its site's."""

from __future__ import annotations

from typing import Any

import pytest

from planlife import ConfigError
from planlife.testing import FakeTensor
from tests.unit.fake_world import POISON, FakeWorld, spec

#: value -> keys that a query token sees, itself included; 0 = all.
SAME_AT_ANY_LENGTH: list[tuple[Any, int]] = [
    (None, 0), (-1, 0), (0, 0), (7, 7),
    ((-1, -1), 0), ((-1, 0), 0), ([-1, -1], 0), ((6, 0), 7), ([6, 0], 7), ((0, 0), 1), ((6, -1), 7),
]  # fmt: skip
SAME_FOR_ONE_TOKEN: list[tuple[Any, int]] = [((6, 3), 7), ((-1, 3), 0)]
REFUSED: list[tuple[Any, str]] = [
    (-2, r"must be in \[0, 9223372036854775807\], got -2"),
    (2**63, r"must be in \[0, 9223372036854775807\], got 9223372036854775808"),
    (2.0, r"must be an int, got 2\.0"),
    (True, r"must be an int, got True"),
    ("7", r"must be an int, got '7'"),
    ((7,), r"must be one int or \(keys before, keys after\), got \(7,\)"),
    ((6, 0, 0), r"must be one int or \(keys before, keys after\), got \(6, 0, 0\)"),
    ((-2, 0), r"keys before must be in \[-1, 9223372036854775806\], got -2"),
    ((2**63 - 1, 0), r"keys before must be in"),
    ((6, -2), r"keys after must be >= -1, got -2"),
    ((6.0, 0), r"keys before must be an int, got 6\.0"),
    ((None, 0), r"keys before must be an int, got None"),
]


@pytest.mark.parametrize(("value", "window"), SAME_AT_ANY_LENGTH, ids=str)
@pytest.mark.parametrize("query_length", [1, 3])
def test_a_site_takes_every_form_of_one_window_and_keeps_one(value: Any, window: int, query_length: int) -> None:
    site = spec(sliding_window=value, query_length=query_length)
    assert site.sliding_window == window
    assert type(site.sliding_window) is int
    assert site == spec(sliding_window=window, query_length=query_length)
    assert hash(site) == hash(spec(sliding_window=window, query_length=query_length))


@pytest.mark.parametrize(("value", "window"), SAME_FOR_ONE_TOKEN, ids=str)
def test_keys_after_a_query_token_are_none_where_it_is_the_last(value: Any, window: int) -> None:
    assert spec(sliding_window=value).sliding_window == window
    with pytest.raises(
        ConfigError, match="sliding_window's keys after must be 0 or -1 with query_length 2, got 3: non-"
    ):
        spec(sliding_window=value, query_length=2)


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=repr)
def test_a_window_that_means_nothing_is_refused_with_the_forms_that_do(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sliding_window(?:'s)? {message}.* 0, -1 or None sees all keys"):
        spec(sliding_window=value)


# --- pa_decode

CALLS = [
    (window, value, of_value)
    for window in (0, 7)
    for value, of_value in [*SAME_AT_ANY_LENGTH, *SAME_FOR_ONE_TOKEN, (8, 8)]
]


@pytest.mark.parametrize(("window", "value", "of_value"), CALLS, ids=str)
@pytest.mark.parametrize("how", ["planned", "fallback", "dummy"])
def test_a_layers_own_window_is_checked_against_its_sites_before_any_launch(
    how: str, window: int, value: Any, of_value: int
) -> None:
    site = spec(sliding_window=window)
    off = {"enabled": False, "fallback": lambda output, *call, **extras: output.write([5, 6])}
    world = FakeWorld(sites=site, **(off if how == "fallback" else {}))  # type: ignore[arg-type]
    if how != "fallback":
        world.warm()
    plan = world.manager.plan_for(world.step([5, 6], dummy=how == "dummy"))
    assert plan.route == how
    num_executed, call = len(world.device.executed), world.call(2)
    if value is None or of_value == window:
        world.manager.pa_decode(plan, **call, sliding_window=value)
        assert call["output"].values == ([0, 0] if how == "dummy" else [5, 6])
        return
    with pytest.raises(ConfigError, match=rf"site 'default': sliding_window is .*, wanted {window}.*site per window"):
        world.manager.pa_decode(plan, **call, sliding_window=value)
    assert len(world.device.executed) == num_executed
    assert call["output"].values == [POISON] * 2


@pytest.mark.parametrize(
    "value", [FakeTensor(1, "int32"), 7.0, True, "7", (7,)], ids=lambda value: type(value).__name__
)
def test_a_call_whose_window_means_nothing_is_refused_and_not_read_back(value: Any) -> None:
    world = FakeWorld(sites=spec(sliding_window=7))
    world.warm()
    plan = world.manager.plan_for(world.step([5, 6]))
    with pytest.raises(ConfigError, match="sliding_window must be"):
        world.manager.pa_decode(plan, **world.call(2), sliding_window=value)
