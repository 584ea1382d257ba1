"""What can never work is refused before anything is launched or changed, by its value, the rule and the way out."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from planlife import BackendUnavailableError, CapacityLadder, ConfigError, PlanManager, PlanSpec, RouteError, Step
from planlife.configuration import absence_reasons, auto_backend
from planlife.testing import FakeBackend, FakeDevice, FakeTensor
from tests.unit.fake_world import POISON, Captured, FakeWorld, Owner, spec

HUGE = 10**400


def shown(value: object) -> str:
    """A test id that is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


NOT_INTS = [None, True, 1.0, float("nan"), "1", np.int64(1), [1], b"1", 1 + 0j]


class Watch:
    """What must not move when a call is refused: launches, allocations, and all that the report tells."""

    def __init__(self, world: FakeWorld) -> None:
        self._world = world
        self._before = self._state()

    def _state(self) -> tuple[object, ...]:
        world = self._world
        report = world.manager.report().to_dict()
        report["counters"].pop("stale_detected")
        launches = {name: world.backend.calls[name] for name in ("refresh", "decode", "compile", "make_tables")}
        return report, launches, len(world.device.executed), world.device.num_allocations

    def assert_nothing_happened(self) -> None:
        assert self._state() == self._before


def warmed(**options: Any) -> FakeWorld:
    world = FakeWorld(**options)
    world.warm()
    return world


# --- Step: site, ubatch, revision, dummy


@pytest.mark.parametrize("ubatch", [2, -1, 2**63, True, False, 1.0, "0", None, np.int64(0)], ids=shown)
@pytest.mark.parametrize("enabled", [True, False])
def test_an_ubatch_out_of_range_is_refused_with_the_configured_number(ubatch: Any, enabled: bool) -> None:
    """C27."""
    world = FakeWorld(ubatches=2, enabled=enabled)
    if enabled:
        world.warm()
    watch = Watch(world)
    lens = FakeTensor(2, values=[3, 4])
    with pytest.raises(ConfigError, match=r"ubatch must be an int in \[0, 1\].*ubatches=2") as refusal:
        world.manager.plan_for(Step(lens, ubatch=ubatch))
    assert repr(ubatch) in str(refusal.value)
    watch.assert_nothing_happened()
    assert world.manager.plan_for(Step(lens, ubatch=1)).ubatch == 1  # positive control


@pytest.mark.parametrize("site", ["other", None, 3, ("default",), "DEFAULT"], ids=shown)
def test_an_unknown_site_is_refused_with_the_known_ones(site: Any) -> None:
    world = warmed()
    watch = Watch(world)
    with pytest.raises(ConfigError, match="no site .*'default'"):
        world.manager.plan_for(Step(FakeTensor(2), site=site))
    watch.assert_nothing_happened()


@pytest.mark.parametrize("field", ["revision", "dummy"])
@pytest.mark.parametrize("seen_before", [False, True])
def test_a_revision_or_dummy_of_the_wrong_type_is_refused_also_where_it_equals_a_right_one(
    field: str, seen_before: bool
) -> None:
    """1, True and 1.0 are equal to Python and to a comparison of marks."""
    world = warmed()
    lens, owner = FakeTensor(2, values=[3, 4]), Owner()
    if seen_before:
        world.manager.plan_for(Step(lens, owner=owner, revision=1))
    wrong = [True, 1.0, np.int64(1), None, "1"] if field == "revision" else [0, None, "", np.bool_(False)]
    for value in wrong:
        watch = Watch(world)
        with pytest.raises(ConfigError, match=f"{field} must be") as refusal:
            world.manager.plan_for(Step(lens, owner=owner, **{"revision": 1, field: value}))
        assert repr(value) in str(refusal.value)
        watch.assert_nothing_happened()
    assert world.manager.plan_for(Step(lens, owner=owner, revision=1)).route == "planned"


@pytest.mark.parametrize("not_a_step", [None, 3, "step", FakeTensor(2), object()])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_no_step_is_refused(not_a_step: Any, enabled: bool) -> None:
    world = FakeWorld(enabled=enabled)
    with pytest.raises(ConfigError, match=r"planlife.Step is needed, got " + type(not_a_step).__name__):
        world.manager.plan_for(not_a_step)


class StepOfAnEngine(Step):
    """A subclass."""


def test_a_subclass_of_step_is_a_step() -> None:
    world = warmed()
    assert world.manager.plan_for(StepOfAnEngine(FakeTensor(2))).route == "planned"


# --- lengths


BAD_LENS: dict[str, tuple[Callable[[], Any], str]] = {
    "int64": (lambda: FakeTensor(2, "int64"), "dtype is int64, wanted int32"),
    "int16": (lambda: FakeTensor(2, "int16"), "dtype is int16, wanted int32"),
    "float32": (lambda: FakeTensor(2, "float32"), "dtype is float32, wanted int32"),
    "bool": (lambda: FakeTensor(2, "bool"), "dtype is bool, wanted int32"),
    "strided": (lambda: FakeTensor(2, strides=(2,)), "contiguity is False"),
    "2-D": (lambda: FakeTensor((2, 1)), "axes is 2, wanted 1"),
    "int": (lambda: 5, "must be a tensor, got int"),
    "host": (lambda: FakeTensor(2, device="host"), "device is host, wanted fake"),
    "other device": (lambda: FakeTensor(2, device="fake:1"), "device is fake:1, wanted fake"),
    "requires_grad": (lambda: FakeTensor(2, requires_grad=True), "requires_grad is True"),
    "list": (lambda: [1, 2], "must be a tensor, got list"),
    "None": (lambda: None, "must be a tensor, got NoneType"),
    "numpy": (lambda: np.zeros(2, np.int32), "must be a tensor, got ndarray"),
}


@pytest.mark.parametrize("lens", BAD_LENS)
@pytest.mark.parametrize("dummy", [False, True])
def test_lengths_that_the_kernels_cannot_take_are_refused_before_any_launch(lens: str, dummy: bool) -> None:
    """C36."""
    world = warmed()
    captured = Captured(world, world.step([1, 2]))
    watch = Watch(world)
    make, message = BAD_LENS[lens]
    with pytest.raises(ConfigError, match=f"context_lens.*{message}"):
        world.manager.plan_for(Step(make(), dummy=dummy))
    with pytest.raises(ConfigError, match=message):
        world.manager.guard(captured.g, Step(make(), dummy=dummy))
    watch.assert_nothing_happened()
    assert world.manager.plan_for(Step(FakeTensor(2))).route == "planned"


# --- PlanSpec and PlanManager


BAD_SPECS: list[tuple[str, Any, str]] = [
    *[
        ("softmax_scale", value, "softmax_scale must be a number on the host, finite and > 0, got .*head_dim")
        for value in (0, -0.5, float("nan"), float("inf"), True, "0.1")
    ],
    *[("num_kv_heads", value, "num_kv_heads must be") for value in (0, -1, *NOT_INTS)],
    *[("num_q_heads", value, "num_q_heads must be") for value in (0, 3, -4, *NOT_INTS)],
    *[("page_size", value, "page_size must be") for value in (0, -16, *NOT_INTS)],
    *[("head_dim", value, "head_dim must be") for value in (0, *NOT_INTS)],
    *[("query_length", value, "query_length must be") for value in (0, *NOT_INTS)],
    *[("sliding_window", value, "sliding_window must be") for value in (-2, 2**63, HUGE, *filter(None, NOT_INTS))],
    *[("max_context_tokens", value, "max_context_tokens must") for value in (0, 2**31, HUGE, *NOT_INTS)],
    *[
        (name, value, f"{name} must be")
        for name in ("max_partitions", "workgroup_budget")
        for value in (0, 2**31, HUGE, *NOT_INTS[1:])
    ],
    *[("lane", value, "lane must be") for value in ("", None, 3, b"main")],
    *[("shared_lengths", value, "shared_lengths must be") for value in (None, 1, 0, "yes")],
    *[(name, "int8", f"{name} must be one of") for name in ("q_dtype", "kv_dtype", "kv_layout", "scales")],
    ("q_dtype", "float8_e4m3fn", "q_dtype must be one of"),
    ("kv_dtype", "float8_e4m3fn", "FP8 caches take per_tensor or per_token"),
    ("scales", "per_token", "other caches take none"),
    *[(name, None, f"{name} must be one of") for name in ("q_dtype", "kv_dtype", "kv_layout", "scales")],
]


@pytest.mark.parametrize(("field", "value", "message"), BAD_SPECS, ids=lambda value: repr(value)[:20])
def test_a_spec_that_can_never_work_is_refused(field: str, value: Any, message: str) -> None:
    """C37, C42: a ValueError that names the value and the rule, never a ZeroDivisionError."""
    good: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 16, "page_size": 16}
    good["max_context_tokens"] = 4096
    assert PlanSpec(**good).group_size == 4  # positive control
    with pytest.raises(ConfigError, match=message) as refusal:
        PlanSpec(**{**good, field: value})
    assert isinstance(refusal.value, ValueError)
    assert str(value) in str(refusal.value)


def test_a_context_bound_below_the_query_length_is_refused() -> None:
    """C42."""
    with pytest.raises(ConfigError, match="max_context_tokens must cover query_length, got 3 < 4"):
        spec(query_length=4, max_context_tokens=3)
    assert spec(query_length=4, max_context_tokens=4).query_length == 4


BAD_MANAGERS: list[tuple[str, Any, str]] = [
    *[("ubatches", value, "ubatches must be") for value in (0, -1, *NOT_INTS)],
    *[("budget_bytes", value, "budget_bytes") for value in (-1, 0, 1, *NOT_INTS[1:])],
    *[("enabled", value, "enabled must be a bool") for value in (None, 0, 1, "yes")],
    *[("on_miss", value, "on_miss must be one of fallback, raise, mint") for value in (None, True, "Mint", 3)],
    *[("sanitize", value, "sanitize must be one of off, count, raise") for value in (None, False, "on")],
    *[("fallback", value, "fallback must be None") for value in ("flash", 3, True)],
    *[("backend", value, "backend must be") for value in ("cutlass", None, 3, object())],
    ("backend", FakeBackend, "backend must be .*got the class FakeBackend"),
    *[("device", value, "device must be") for value in (3, object())],
    ("device", FakeDevice, "device must be .*got the class FakeDevice"),
    *[
        ("ladder", value, "ladder must")
        for value in (None, [1, 2], 8, {}, {"other": CapacityLadder([1])}, {3: CapacityLadder([1])})
    ],
    *[("ladder", value, "ladder must") for value in ({"default": 8}, {"default": CapacityLadder([1]), "b": None})],
    *[("sites", value, "sites must be") for value in (None, {}, [], "default", {"a": None}, {3: spec()}, 4)],
]


@pytest.mark.parametrize("missing", ["name", "max_plan_rows", "compile", "sanitize", "scratch_bytes"])
def test_a_backend_that_lacks_something_is_refused_before_serving_needs_it(missing: str) -> None:
    class Partial:
        def __getattr__(self, name: str) -> Any:
            if name == missing:
                raise AttributeError(name)
            return getattr(whole, name)

    whole: Any = FakeBackend()
    with pytest.raises(ConfigError, match=f"Partial lacks {missing}"):
        PlanManager(spec(), ladder=CapacityLadder([2]), device=FakeDevice(), backend=Partial())  # type: ignore[arg-type]


@pytest.mark.parametrize(("argument", "value", "message"), BAD_MANAGERS, ids=lambda value: shown(value)[:24])
def test_a_manager_that_can_never_work_is_refused(argument: str, value: Any, message: str) -> None:
    """C37."""
    device, backend = FakeDevice(), FakeBackend()
    good: dict[str, Any] = {"sites": spec(), "ladder": CapacityLadder([2]), "device": device, "backend": backend}
    PlanManager(**good).close()  # positive control
    with pytest.raises(ConfigError, match=message):
        PlanManager(**{**good, argument: value})
    assert device.num_allocations == 0


# --- pa_decode


def bad_tensor(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(call: dict[str, Any]) -> None:
        good = call[name]
        fields = {"shape": good.shape, "dtype": good.dtype, "device": good.device, "strides": None, **changes}
        call[name] = FakeTensor(fields["shape"], fields["dtype"], fields["device"], strides=fields["strides"])

    return change


def bad_value(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda call: call.update(changes)


BAD_CALLS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "page size": (bad_tensor("key_cache", shape=(4, 8, 1, 16)), r"key_cache.*\[4, 8, 1, 16\].*page_size 16"),
    "head dim": (bad_tensor("value_cache", shape=(4, 16, 1, 32)), r"value_cache.*\[4, 16, 1, 32\].*head_dim 16"),
    "kv heads": (bad_tensor("key_cache", shape=(4, 16, 2, 16)), r"key_cache.*\[4, 16, 2, 16\].*num_kv_heads 1"),
    "layout": (bad_tensor("key_cache", shape=(4, 1, 16, 16)), r"key_cache.*\[4, 1, 16, 16\].*kv_layout 'nhd'"),
    "kv dtype": (bad_tensor("key_cache", dtype="float8_e4m3fn"), "key_cache's dtype is float8_e4m3fn, wanted bfloat16"),
    "v dtype": (bad_tensor("value_cache", dtype="float32"), "value_cache's dtype is float32, wanted bfloat16"),
    "kv device": (bad_tensor("key_cache", device="cpu"), "key_cache's device is cpu, wanted the manager's, fake"),
    "kv stride": (bad_tensor("key_cache", strides=(512, 32, 32, 2)), "key_cache's last stride is 2, wanted 1"),
    "no pages": (bad_tensor("key_cache", shape=(0, 16, 1, 16)), r"key_cache's shape is \[0, 16, 1, 16\]"),
    "page counts": (
        bad_tensor("value_cache", shape=(5, 16, 1, 16)),
        "value_cache's page count is 5, wanted key_cache's, 4",
    ),
    "5-D cache": (bad_tensor("key_cache", shape=(4, 16, 1, 16, 1)), "key_cache's shape"),
    "query dtype": (bad_tensor("query", dtype="float16"), "query's dtype is float16, wanted bfloat16"),
    "query heads": (
        bad_tensor("query", shape=(2, 8, 16)),
        r"query's shape is \[2, 8, 16\], wanted \[rows \* 1, 4, 16\]",
    ),
    "few rows": (bad_tensor("query", shape=(1, 4, 16)), "query's row count is 1 .*wanted 2 to 2"),
    "many rows": (bad_tensor("query", shape=(3, 4, 16)), "query's row count is 3 .*wanted 2 to 2"),
    "2-D query": (bad_tensor("query", shape=(2, 64)), "query's shape"),
    "output shape": (
        bad_tensor("output", shape=(1, 4, 16)),
        r"output's shape is \[1, 4, 16\], wanted query's, \[2, 4, 16\]",
    ),
    "output dtype": (bad_tensor("output", dtype="float32"), "output's dtype is float32, wanted bfloat16"),
    "output device": (bad_tensor("output", device="meta"), "output's device is meta"),
    "tables dtype": (bad_tensor("block_tables", dtype="int64"), "block_tables's? dtype is int64, wanted int32"),
    "tables rows": (bad_tensor("block_tables", shape=(1, 8)), r"block_tables' shape is \[1, 8\].*2 rows"),
    "no columns": (bad_tensor("block_tables", shape=(2, 0)), r"block_tables' shape is \[2, 0\].*at least 1 page"),
    "1-D tables": (bad_tensor("block_tables", shape=(2,)), "block_tables' shape"),
    "tables device": (bad_tensor("block_tables", device="host"), "block_tables's device is host"),
    **{
        f"{name} None": (bad_value(**{name: None}), rf"{name} is None \(NoneType\), wanted a tensor")
        for name in ("output", "query", "key_cache", "value_cache", "block_tables")
    },
    **{
        f"{name} list": (bad_value(**{name: [1]}), rf"{name} is \[1\] \(list\), wanted a tensor")
        for name in ("output", "query", "key_cache", "value_cache", "block_tables")
    },
    **{
        f"softmax_scale {value!r:.8}": (bad_value(softmax_scale=value), "softmax_scale is .*, wanted finite and > 0")
        for value in (
            0,
            0.0,
            -0.0,
            -1.0,
            float("nan"),
            float("inf"),
            -float("inf"),
            np.float32("nan"),
            Fraction(-1, 2),
            HUGE,
        )
    },
    **{
        f"softmax_scale {value!r:.8}": (
            bad_value(softmax_scale=value),
            "softmax_scale is .*, wanted a number on the host",
        )
        for value in (None, True, "0.25", Decimal("0.25"), 1j, [0.25], FakeTensor(1, "float32"))
    },
    **{
        f"{name} for bf16": (
            bad_value(**{name: 1.0}),
            rf"{name} is 1.0 \(float\), wanted None: a bfloat16 cache has no scales",
        )
        for name in ("key_scale", "value_scale")
    },
    "sinks": (bad_value(sinks=FakeTensor(3, "float32")), r"sinks' shape is \[3\], wanted \[4\]"),
    "sinks list": (bad_value(sinks=[1.0] * 4), "sinks' shape is "),
    "sinks dtype": (bad_value(sinks=FakeTensor(4, "int32")), "sinks' dtype is int32, wanted one of bfloat16, "),
    "sinks device": (bad_value(sinks=FakeTensor(4, "float32", "cpu")), "sinks' device is cpu"),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
@pytest.mark.parametrize("after", ["nothing", "a good call", "tensors that died"])
def test_a_call_that_the_kernels_cannot_take_is_refused_before_any_launch(bad: str, after: str) -> None:
    """C37, C38, C63: also right after a good call, whose tensors are remembered."""
    world = warmed()
    plan = world.manager.plan_for(world.step([3, 4]))
    call = world.call(2)
    if after != "nothing":
        world.manager.pa_decode(plan, **call)
        assert call["output"].values == [3, 4]  # positive control
    if after == "tensors that died":
        call = {**world.call(2), "key_cache": call["key_cache"]}
    call["output"].write([POISON] * 2)
    change, message = BAD_CALLS[bad]
    change(call)
    watch = Watch(world)
    with pytest.raises(ConfigError, match=f"site 'default': .*{message}"):
        world.manager.pa_decode(plan, **call)
    watch.assert_nothing_happened()
    if isinstance(call["output"], FakeTensor) and bad not in ("output shape", "output dtype", "output device"):
        assert call["output"].values == [POISON] * 2


FP8 = {"kv_dtype": "float8_e4m3fn"}
BAD_SCALES: list[tuple[str, Any, str]] = [
    *[("per_tensor", value, "finite and > 0") for value in (0, 0.0, -1.0, float("nan"), float("inf"), HUGE)],
    *[("per_tensor", value, "a number on the host") for value in (True, "1", [1.0])],
    ("per_tensor", None, "a per_tensor scale"),
    ("per_token", None, "a per_token scale"),
    *[("per_token", value, "a float32 tensor") for value in (1.0, [1.0])],
    *[(kind, FakeTensor(1, "float16"), "float32") for kind in ("per_tensor", "per_token")],
    *[(kind, FakeTensor(1, "float32", "cpu"), "device is cpu") for kind in ("per_tensor", "per_token")],
    ("per_tensor", FakeTensor(2, "float32"), r"shape is \[2\], wanted \[\] or \[1\]"),
    ("per_token", FakeTensor(1, "float32"), r"shape is \[1\], wanted .*, one scale per token"),
]


@pytest.mark.parametrize(("kind", "scale", "message"), BAD_SCALES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_a_scale_that_gives_masked_tokens_weight_is_refused(kind: str, scale: Any, message: str, name: str) -> None:
    """C38."""
    world = warmed(sites=spec(scales=kind, **FP8))
    plan = world.manager.plan_for(world.step([3, 4]))
    call = world.call(2)
    pages, page, heads, _ = call["key_cache"].shape
    good: Any = FakeTensor(1 if kind == "per_tensor" else (pages, heads, page), "float32")
    call |= {"key_scale": good, "value_scale": good}
    world.manager.pa_decode(plan, **call)  # positive control
    watch = Watch(world)
    with pytest.raises(ConfigError, match=f"{name}.*{message}"):
        world.manager.pa_decode(plan, **{**call, name: scale})
    watch.assert_nothing_happened()


def test_scales_on_the_device_are_not_read_back() -> None:
    """C38: a device scale of -1 is the engine's to avoid; reading it would wait for the device."""

    class Unreadable(FakeTensor):
        @property
        def values(self) -> list[Any]:
            raise AssertionError("a device tensor was read back")

    world = warmed(sites=spec(scales="per_tensor", **FP8))
    plan = world.manager.plan_for(world.step([3, 4]))
    scale = Unreadable(1, "float32")
    world.manager.pa_decode(plan, **world.call(2), key_scale=scale, value_scale=scale)


@pytest.mark.parametrize("value", [1, np.float32(0.5), np.float64(0.5), np.int32(2), Fraction(1, 3), 5e-324, 1e308])
def test_every_positive_finite_host_number_is_a_scale(value: Any) -> None:
    world = warmed()
    call = {**world.call(2), "softmax_scale": value}
    world.manager.pa_decode(world.manager.plan_for(world.step([3, 4])), **call)
    assert call["output"].values == [3, 4]


@pytest.mark.parametrize(
    "plan", [None, 3, "plan", object(), FakeTensor(2), np.zeros(2), Step(None)], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_decode_takes_only_what_plan_for_returned(plan: Any, enabled: bool) -> None:
    world = FakeWorld(enabled=enabled)
    with pytest.raises(ConfigError, match=f"StepPlan of plan_for, got {type(plan).__name__}"):
        world.manager.pa_decode(plan, **world.call(2))


def test_a_plan_of_another_manager_is_refused() -> None:
    ours, theirs = warmed(), warmed()
    plan = theirs.manager.plan_for(theirs.step([3, 4]))
    with pytest.raises(RouteError, match="another PlanManager"):
        ours.manager.pa_decode(plan, **ours.call(2))
    assert theirs.decode(plan) == [3, 4]


@pytest.mark.parametrize("output", [None, 3, FakeTensor((2, 4, 16), "float32"), FakeTensor((2, 4, 16), device="cpu")])
def test_a_dummy_decode_checks_the_output_that_it_zeroes(output: Any) -> None:
    world = warmed()
    plan = world.manager.plan_for(world.step([3, 4], dummy=True))
    assert world.decode(plan) == [0, 0]  # positive control
    with pytest.raises(ConfigError, match="output"):
        world.manager.pa_decode(plan, **{**world.call(2), "output": output})


def test_the_fallback_gets_only_calls_that_passed_the_checks() -> None:
    calls = []
    world = FakeWorld(fallback=lambda *call, **extras: calls.append(call))
    plan = world.manager.plan_for(world.step([3, 4]))
    with pytest.raises(ConfigError, match="query's dtype"):
        world.manager.pa_decode(plan, **{**world.call(2), "query": FakeTensor((2, 4, 16), "float32")})
    assert calls == []
    world.decode(plan)
    assert len(calls) == 1


# --- the other methods


NOT_GRAPHS = [None, 3, "g", [], {}, object(), Owner()]


@pytest.mark.parametrize("g", NOT_GRAPHS, ids=shown)
@pytest.mark.parametrize("method", ["guard", "replay", "adopt", "graph", "release"])
def test_what_is_no_graph_of_ours_is_refused(method: str, g: Any) -> None:
    world = warmed()
    watch = Watch(world)

    def call() -> None:
        if method == "graph":
            with world.manager.graph(g if g is not None else 0):
                raise AssertionError("the body ran")
        getattr(world.manager, method)(g)

    with pytest.raises(ConfigError if method != "adopt" else (ConfigError, RouteError), match="graph"):
        call()
    watch.assert_nothing_happened()


@pytest.mark.parametrize(
    "rows", [0, -1, True, 1.5, float("nan"), "8", b"8", np.int64(8), [2, True], [2, 0], {"a"}, object()], ids=shown
)
def test_warm_refuses_what_is_no_row_count(rows: Any) -> None:
    world = FakeWorld()
    with world.manager.capture_phase():
        with pytest.raises(ConfigError, match="row"):
            world.manager.warm(rows)
        assert world.device.num_allocations == 0
        world.manager.warm(iter([8, 2]))  # positive control
    assert world.counters["mints"] == 2


@pytest.mark.parametrize("target", [-1, *NOT_INTS], ids=shown)
def test_trim_refuses_what_is_no_byte_count(target: Any) -> None:
    world = warmed()
    watch = Watch(world)
    with pytest.raises(ConfigError, match="target_bytes must be"):
        world.manager.trim(target)
    watch.assert_nothing_happened()
    assert world.manager.trim(HUGE) == 0


@pytest.mark.parametrize("callback", [None, 3, "print"])
def test_a_hook_must_be_callable(callback: Any) -> None:
    with pytest.raises(ConfigError, match="add_hook takes a callable"):
        FakeWorld().manager.add_hook(callback)


def test_a_dead_weak_reference_is_no_owner_of_anything() -> None:
    """An owner may be anything: also a weakref, an exception, a class, a module."""
    world = warmed()
    lens = FakeTensor(2, values=[3, 4])
    for owner in (weakref.ref(world), ValueError("x"), Owner, np, 1 + 0j, float("nan"), "", (), HUGE, np.int64(3), b""):
        plan = world.manager.plan_for(Step(lens, owner=owner))
        assert world.manager.plan_for(Step(lens, owner=owner)) is plan
        assert world.decode(plan) == [3, 4]
    assert world.counters["refreshes"] == 11


def test_the_fallback_is_not_asked_for_a_site_that_is_served() -> None:
    calls: list[Any] = []
    world = FakeWorld(fallback=lambda *call, **extras: calls.append(call))
    world.warm()
    assert world.run([3, 4]) == [3, 4]
    assert calls == []


@pytest.mark.parametrize(
    "source, found",
    [
        ("raise RuntimeError('built for another torch')", "RuntimeError: built for another torch"),
        ("raise OSError('libcuda.so.1: no such file')", "OSError: libcuda.so.1"),
        ("import no_such_part_of_it", "ModuleNotFoundError: No module named 'no_such_part_of_it'"),
        (None, "is another thing"),  # a folder without Python in it, as every checkout of triton is
        ("__version__ = '3.5.9'", "3.5.9 is here"),
        ("__version__ = '2.999.0+git'", "2.999.0"),
        ("__version__ = 'unknown'", "unknown is here"),
    ],
)
def test_a_triton_that_cannot_be_used_is_absent_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None, found: str
) -> None:
    pytest.importorskip("torch")  # the last resort of "auto", to be loaded while it can be found
    folder = tmp_path / "triton"
    folder.mkdir()
    if source is not None:
        (folder / "__init__.py").write_text(source)
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))  # so that what is imported here goes with the test
    del sys.modules["triton"]
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (reason,) = absence_reasons("triton")
    assert found in reason and "triton >= 3.6" in reason
    if source is None or "__version__" not in source:  # to be installed: not in vain where there is no GPU
        assert "planlife[triton]" in reason and "on a CPU Triton only runs in its interpreter" in reason
    with pytest.raises(BackendUnavailableError, match=re.escape(found)):
        PlanManager(spec(), ladder=CapacityLadder([2]), device=FakeDevice(), backend="triton")
    on_another_device = FakeDevice("cuda:0")
    assert auto_backend({"default": spec()}, on_another_device) == "torch"


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0+git1a2b3c", "3.6rc1", "4.0"])
def test_a_triton_that_is_new_enough_is_here_whatever_follows_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    triton = ModuleType("triton")
    triton.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert absence_reasons("triton") == ()
