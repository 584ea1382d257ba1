"""What no backend serves is refused by its name: when a site is made, and where a call brings it."""

from __future__ import annotations

import enum
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from planlife import ConfigError, PlanSpec
from planlife.testing import FakeTensor
from planlife.unserved import UNSERVED
from tests.unit.fake_world import MAX_TOKENS, POISON, FakeWorld, spec


class AttentionType(enum.Enum):
    """As engines have it."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class OnDevice(FakeTensor):
    """Whoever looks at its values reads it back."""

    def read_back(self, *_: object) -> Any:
        raise AssertionError("read back")

    __bool__ = __eq__ = __ne__ = __float__ = __iter__ = __repr__ = read_back  # type: ignore[assignment]
    __hash__ = FakeTensor.__hash__


NON_CAUSAL = r"non-causal attention \(encoder or cross attention\) with query_length > 1 or a window"

#: name -> (values that ask for it, values that do not, what the message says).
FEATURES: dict[str, tuple[list[Any], list[Any], str]] = {
    "logits_soft_cap": (
        [30.0, 50, -1.0, float("nan"), "30", OnDevice(1, "float32")],
        [None, 0, 0.0, np.float32(0)],
        "a logits soft cap is not served: no decode kernel bends the logits .*the engine's own kernel",
    ),
    "alibi_slopes": (
        [[0.5, 0.25], (0.5,), OnDevice(4, "float32"), np.array([0.0])],
        [None, 0],
        "ALiBi is not served: no decode kernel adds a bias .*the engine's own kernel",
    ),
    "value_head_dim": (
        [512, 8, "16", OnDevice(1)],
        [None, 0, 16],
        r"MLA \(values of another head_dim than the keys\) is not served: .*the engine's MLA kernel",
    ),
    "causal": (
        [1, "yes", 0],
        [None, True],
        rf"{NON_CAUSAL} is not served: .*Give each query token a row of its own .*query_length=1 and no window",
    ),
    "attn_type": (
        ["encoders", 3, ["encoder"]],
        [None, "decoder", AttentionType.DECODER],
        rf"{NON_CAUSAL} is not served: ",
    ),
}
#: What is the same as causal attention where a query token sees all keys of its row.
ALL_KEYS = [
    ("causal", False),
    *[("attn_type", value) for value in ("encoder", "encoder_only", "encoder_decoder", "decoder_bidirectional")],
    ("attn_type", AttentionType.ENCODER_ONLY),
]
RAGGED = (
    r"non-uniform query lengths \(or another than the site's\) are not served: all rows of a site have .*Pad a row's"
)
ASKING = [(name, value, message) for name, (values, _, message) in FEATURES.items() for value in values]
NEUTRAL = [(name, value) for name, (_, values, _) in FEATURES.items() for value in values]


def shown(value: object) -> str:
    return type(value).__name__ if isinstance(value, FakeTensor) else repr(value)


@pytest.mark.parametrize(("name", "value", "message"), ASKING, ids=shown)
def test_a_site_that_no_backend_serves_is_refused_with_the_reason_and_the_way_out(
    name: str, value: Any, message: str
) -> None:
    """R30."""
    with pytest.raises(ConfigError, match=rf"^{name} must be .*, got .*: {message}"):
        spec(**{name: value})


@pytest.mark.parametrize(("name", "value"), [*NEUTRAL, *ALL_KEYS, ("sliding_window", None)], ids=shown)
def test_what_asks_for_nothing_passes_and_leaves_no_trace(name: str, value: Any) -> None:
    site = spec(**{name: value})
    assert site == spec()
    assert hash(site) == hash(spec())
    assert repr(site) == repr(spec())
    assert replace(site, head_dim=32) == PlanSpec(4, 1, 32, 16, max_context_tokens=MAX_TOKENS)
    assert name not in {field.name for field in fields(PlanSpec)} - {"sliding_window"}


@pytest.mark.parametrize("changes", [{"query_length": 2}, {"sliding_window": 7}, {"sliding_window": (6, 0)}], ids=str)
@pytest.mark.parametrize(("name", "value"), ALL_KEYS, ids=shown)
def test_attention_to_all_keys_is_refused_where_a_query_token_does_not_see_them_all(
    name: str, value: Any, changes: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be .*, got .*: {NON_CAUSAL} is not served: .*no window"):
        spec(**{name: value}, **changes)
    world = FakeWorld(sites=spec(**changes))
    world.warm()
    plan = world.manager.plan_for(world.step([5, 6]))
    with pytest.raises(ConfigError, match=rf"^{name} must be .*, got .*: {NON_CAUSAL} is not served: .*no window"):
        world.manager.pa_decode(plan, **world.call(2), **{name: value})


@pytest.mark.parametrize(("name", "value"), ALL_KEYS, ids=shown)
def test_a_call_of_attention_to_all_keys_is_served_where_a_query_token_sees_them_all(name: str, value: Any) -> None:
    world = FakeWorld(sites=spec(**{name: value}))
    world.warm()
    call = world.call(2)
    world.manager.pa_decode(world.manager.plan_for(world.step([5, 6])), **call, **{name: value})
    assert call["output"].values == [5, 6]


def test_all_names_of_engines_can_be_passed_at_once() -> None:
    neutral = {"logits_soft_cap": 0.0, "alibi_slopes": None, "value_head_dim": 16, "causal": True}
    assert spec(**neutral, attn_type="decoder") == spec()
    with pytest.raises(ConfigError, match="ALiBi"):
        spec(**{**neutral, "alibi_slopes": [1.0]})


@pytest.mark.parametrize(
    "lengths", [[1, 3], (1, 3), [2, 2], [1], np.array([1, 3]), OnDevice(2)], ids=lambda value: type(value).__name__
)
def test_a_query_length_per_row_is_refused_by_its_name(lengths: Any) -> None:
    with pytest.raises(ConfigError, match=f"^query_length must be one int, .*{RAGGED}"):
        spec(query_length=lengths)
    assert spec(query_length=3).query_length == 3


@pytest.mark.parametrize("wrong", [None, "1", 1.0, np.int64(1), True, 0])
def test_a_query_length_that_is_merely_wrong_is_not_told_as_several(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="query_length must be") as refused:
        spec(query_length=wrong)
    assert "non-uniform" not in str(refused.value)


# --- pa_decode


@pytest.fixture
def world() -> FakeWorld:
    world = FakeWorld(sites=spec(query_length=2))
    world.warm()
    return world


RAGGED_CALLS = [
    ("query_length", [1, 3], RAGGED),
    ("query_length", 3, RAGGED),
    ("query_length", True, RAGGED),
    ("query_start_loc", OnDevice(3), RAGGED),
    ("query_start_loc", [0, 2, 4], RAGGED),
    ("cu_seqlens_q", OnDevice(3), RAGGED),
]


@pytest.mark.parametrize(("name", "value", "message"), [*ASKING, *RAGGED_CALLS], ids=shown)
@pytest.mark.parametrize("how", ["planned", "fallback", "dummy"])
def test_a_call_that_brings_it_is_refused_before_any_launch(
    world: FakeWorld, how: str, name: str, value: Any, message: str
) -> None:
    if how == "fallback":
        world = FakeWorld(sites=spec(query_length=2), enabled=False, fallback=lambda output, *call, **extras: None)
    plan = world.manager.plan_for(world.step([5, 6], dummy=how == "dummy"))
    assert plan.route == how
    num_executed, call = len(world.device.executed), world.call(2)
    with pytest.raises(ConfigError, match=rf"^{name} must be .*, got .*: {message}"):
        world.manager.pa_decode(plan, **call, **{name: value})
    assert len(world.device.executed) == num_executed
    assert call["output"].values == [POISON] * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [*NEUTRAL, ("query_length", None), ("query_length", 2), ("query_start_loc", None), ("cu_seqlens_q", None)],
    ids=shown,
)
def test_a_call_may_pass_on_what_asks_for_nothing(world: FakeWorld, name: str, value: Any) -> None:
    call = world.call(2)
    world.manager.pa_decode(world.manager.plan_for(world.step([5, 6])), **call, **{name: value})
    assert call["output"].values == [5, 5, 6, 6]


@pytest.mark.parametrize("others", [{}, {"logits_soft_cap": 30.0}], ids=["alone", "beside a known one"])
def test_a_keyword_that_nobody_knows_is_a_type_error(world: FakeWorld, others: dict[str, Any]) -> None:
    plan = world.manager.plan_for(world.step([5, 6]))
    with pytest.raises(TypeError, match=r"pa_decode\(\) got an unexpected keyword argument 'logit_soft_cap'"):
        world.manager.pa_decode(plan, **world.call(2), **others, logit_soft_cap=None)
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'logit_soft_cap'"):  # as Python says it
        spec(logit_soft_cap=None)


def test_query_rows_that_do_not_divide_are_told_as_non_uniform(world: FakeWorld) -> None:
    plan = world.manager.plan_for(world.step([5, 6]))
    call = world.call(2)
    for name in ("output", "query"):
        call[name] = FakeTensor((3, 4, 16), "bfloat16")
    with pytest.raises(ConfigError, match=rf"query's shape is \[3, 4, 16\], wanted \[rows \* 2, 4, 16\]\. {RAGGED}"):
        world.manager.pa_decode(plan, **call)


def test_every_name_of_the_table_is_tested_here() -> None:
    assert set(UNSERVED) == {*FEATURES, *(name for name, _, _ in RAGGED_CALLS)}
