"""What a caller has set torch to changes nothing: default device and dtype, autocast, modes of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from planlife import CapacityLadder, PlanManager, merge
from planlife.testing import DecodeCase, DecodeInputs, reference_decode

from . import world
from .world import BEFORE_REPLAY, IN_GRAPH, World, backend_name, fallback_name


class Asked(AssertionError):
    """A mode of the caller's was asked about a tensor."""


class Counting(TorchFunctionMode):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked.append(getattr(func, "__qualname__", str(func)))
        return func(*args, **(kwargs or {}))


class Refusing(TorchFunctionMode):
    """For one thread of code that must not reach any mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Asked(getattr(func, "__qualname__", str(func)))


class Passing(TorchDispatchMode):
    """As profilers and counters of operations are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(name: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast(world.DEVICE, dtype=dtype)


def default_device_here() -> AbstractContextManager[Any]:
    return default_device(world.DEVICE)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device meta": partial(default_device, "meta"),
    "default device cpu": partial(default_device, "cpu"),
    "default device of the manager": default_device_here,
    "default dtype float16": partial(default_dtype, torch.float16),
    "default dtype bfloat16": partial(default_dtype, torch.bfloat16),
    "default dtype float64": partial(default_dtype, torch.float64),
    "autocast to bfloat16": partial(autocast, torch.bfloat16),
    "autocast to float16": partial(autocast, torch.float16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic algorithms": deterministic,
    "counting function mode": Counting,
    "refusing function mode": Refusing,
    "dispatch mode": Passing,
}

#: Those that other backends are tried in too.
TELLING_MODES = ("default device meta", "default dtype float64", "autocast to bfloat16", "refusing function mode")

Mode = Callable[[], AbstractContextManager[Any]]


class Ambient:
    """A world whose manager is only called in a mode; the engine's own tensors are made and written outside of it."""

    def __init__(self, mode: Mode, **options: Any) -> None:
        self.mode = mode
        self.world = World(rows=4, enabled=False)  # its manager is replaced
        self.world.set_lens([300, 17, 0, 257])
        self.results: dict[str, torch.Tensor] = {}
        with mode():
            self.manager = self.world.manager = PlanManager(
                self.world.sites,
                ladder=CapacityLadder([2, 4]),
                device=self.world.device,
                backend=World.backend,
                fallback=fallback_name(),
                sanitize="raise",
                **options,
            )
            with self.manager.capture_phase():
                self.manager.warm()

    def keep(self, name: str, call: dict[str, torch.Tensor]) -> None:
        for result in call.keys() & {"output", "lse"}:
            self.results[f"{name} {result}"] = call[result].clone()

    def call(self, rows: int) -> dict[str, torch.Tensor]:
        """Query, output, sinks, and lse where the backend gives it."""
        heads, device = self.world.spec.num_q_heads, self.world.device
        self.world.output.fill_(torch.nan)
        extras = {"query": self.world.query[:rows], "output": self.world.output[:rows]}
        extras |= {"sinks": torch.linspace(-1, 1, heads, dtype=torch.float32, device="cpu").to(device)}
        if backend_name() != "aiter":
            extras["lse"] = torch.full((rows, heads), torch.nan, dtype=torch.float32, device=device)
        return extras

    def finish(self) -> dict[str, torch.Tensor]:
        with self.mode():
            self.manager.invalidate()
            self.manager.trim(0)
            report = self.manager.report()
            self.manager.close()
        assert report.counters["stale_detected"] == 0 and report.counters["lengths_clamped"] == 0
        return self.results


def eager(mode: Mode) -> dict[str, torch.Tensor]:
    """A step of two layers, the first of which refreshes; then one with other lengths and fewer rows."""
    ambient = Ambient(mode)
    world, manager = ambient.world, ambient.manager
    for lens in ([300, 17, 0, 257], [1, 256]):
        world.set_lens(lens)
        step = world.step(len(lens))
        for layer in range(2):
            call = ambient.call(len(lens))
            with mode():
                plan = manager.plan_for(step)
                assert manager.plan_for(step) is plan and plan.route == "planned"
                world.decode(plan, **call)
            ambient.keep(f"{lens} {layer}", call)
    return ambient.finish()


def fallback_and_dummy(mode: Mode) -> dict[str, torch.Tensor]:
    """More rows than the ladder has; then a dummy step."""
    ambient = Ambient(mode)
    engine = World(rows=6, enabled=False)
    engine.manager = ambient.manager
    engine.set_lens([300, 17, 0, 257, 1, 40])
    steps = engine.step(), engine.step(dummy=True)
    call = {"query": engine.query, "output": engine.output}
    call["lse"] = torch.full((6, engine.spec.num_q_heads), torch.nan, dtype=torch.float32, device=engine.device)
    for step, route in zip(steps, ("fallback", "dummy"), strict=True):
        engine.output.fill_(torch.nan)
        with mode():
            plan = engine.manager.plan_for(step)
            assert plan.route == route and plan.rows == 6
            engine.decode(plan, **call)
        ambient.keep(route, call)
    return ambient.finish()


def graphs(style: str, mode: Mode) -> dict[str, torch.Tensor]:
    """A graph is recorded, guarded, replayed by the manager and by the engine, and released."""
    ambient = Ambient(mode)
    world, manager = ambient.world, ambient.manager
    step, call = world.step(), ambient.call(4)
    with mode():
        plan = manager.plan_for(step) if style == BEFORE_REPLAY else None
        with manager.graph() as g:
            world.decode(plan or manager.plan_for(step), **call)
    for lens in ([1, 2, 3, 4], [300, 0, 256, 512]):
        world.set_lens(lens)
        for replay in (manager.replay, guard_and_launch(manager)):
            step = world.step()
            world.output.fill_(torch.nan)
            with mode():
                if style == BEFORE_REPLAY:
                    manager.plan_for(step)
                replay(g, step)
            ambient.keep(f"{lens} {len(ambient.results)}", call)
    with mode():
        manager.release(g)
    return ambient.finish()


def guard_and_launch(manager: PlanManager) -> Callable[..., None]:
    def run(g: Any, step: Any) -> None:
        manager.guard(g, step)
        g.replay()

    return run


def merging(mode: Mode) -> dict[str, torch.Tensor]:
    """Two partial results of one call."""
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(3, 4, 16, generator=generator).to(world.DEVICE, torch.bfloat16) for _ in range(2)]
    lses = [torch.randn(3, 4, generator=generator).to(world.DEVICE) for _ in range(2)]
    lses[0][1] = -torch.inf
    kept = torch.empty_like(outputs[0]), torch.empty_like(lses[0])
    with mode():
        output, lse = merge(outputs[0], lses[0], outputs[1], lses[1])
        merge(outputs[1], lses[1], outputs[0], lses[0], out=kept[0], out_lse=kept[1])
    return {"output": output, "lse": lse, "output in place": kept[0], "lse in place": kept[1]}


def harness(mode: Mode) -> dict[str, torch.Tensor]:
    """planlife.testing: a case, its reference, and a manager made for it."""
    case = DecodeCase(group=2, lens=(300, 0, 17), sinks=True, scales="per token", kv_dtype="float8_e4m3fn")
    with mode():
        inputs = DecodeInputs.of(case, device=world.DEVICE)
    query = inputs.query[:3]
    with mode():
        expected = reference_decode(
            query,
            *inputs.nhd,
            inputs.block_tables,
            inputs.context_lens,
            inputs.softmax_scale,
            key_scale=inputs.key_scale,
            value_scale=inputs.value_scale,
            sinks=inputs.sinks,
        )
        output, _ = inputs.decode(backend="torch" if world.DEVICE == "cpu" else "triton")
        errors = inputs.errors(backend="torch" if world.DEVICE == "cpu" else "triton")
    return {"expected": expected, "output": output, "errors": errors}


PARTS: dict[str, Callable[[Mode], dict[str, torch.Tensor]]] = {
    "eager steps": eager,
    "fallback and dummy": fallback_and_dummy,
    BEFORE_REPLAY: partial(graphs, BEFORE_REPLAY),
    IN_GRAPH: partial(graphs, IN_GRAPH),
    "merge": merging,
    "testing": harness,
}


@cache
def results_without(part: str, device: str, backend: str, kind: object) -> dict[str, torch.Tensor]:
    return PARTS[part](nullcontext)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_the_callers_changes_no_result(mode: str, part: str) -> None:
    wanted = results_without(part, world.DEVICE, backend_name(), World.kind)
    found = PARTS[part](MODES[mode])
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and tensor.device == wanted[name].device, name
        if world.DEVICE == "cpu" or backend_name() == "triton":
            assert torch.equal(tensor.nan_to_num(7.0), wanted[name].nan_to_num(7.0)), name
        else:
            torch.testing.assert_close(tensor, wanted[name], rtol=2e-2, atol=1e-3, equal_nan=True)


def test_a_mode_of_the_callers_is_asked_nothing_by_a_step() -> None:
    """Under a default device each attribute of a tensor costs ten times what it costs without."""
    ambient = Ambient(nullcontext)
    world, manager = ambient.world, ambient.manager
    step, call = world.step(), ambient.call(4)
    world.decode(manager.plan_for(step), **call)
    with manager.graph() as g:
        world.decode(manager.plan_for(step), **call)
    skipped, refreshed = world.step(owner=step.owner), world.step()
    other_layer = ambient.call(4)
    with Counting() as counting:
        plan = manager.plan_for(skipped)
        world.decode(plan, **call)
        world.decode(plan, **other_layer)
        world.decode(manager.plan_for(refreshed), **call)
        manager.guard(g, refreshed)
        manager.replay(g, refreshed)
        assert counting.asked == []
        assert world.lens.shape[0] == 4 and len(counting.asked) == 1  # control
    counters = world.counters()
    assert counters["refreshes_skipped"] >= 1 and counters["refreshes"] >= 2
    manager.release(g)


@pytest.mark.parametrize("how", ["fallback", "off"])
def test_a_fallback_and_a_hook_of_the_users_run_in_the_callers_modes(how: str) -> None:
    seen: dict[str, torch.device] = {}

    def fallback(output: torch.Tensor, query: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
        seen["fallback"] = torch.zeros(1).device
        seen["autocast"] = torch.is_autocast_enabled(world.DEVICE)  # type: ignore[assignment]
        return output.copy_(query)

    engine = World(fallback=fallback, enabled=how == "fallback")
    engine.manager.add_hook(lambda event: seen.setdefault(event.kind, torch.zeros(1).device))
    with default_device("meta"), autocast(torch.bfloat16):
        engine.decode(engine.manager.plan_for(engine.step()))
        assert torch.zeros(1).device.type == "meta"
    wanted = {"fallback": torch.device("meta"), "autocast": True}
    assert seen == wanted  # the event of falling back has the same name as the fallback
    assert torch.equal(engine.output, engine.query)


def test_the_casts_of_autocast_are_recorded_and_a_replay_casts_nothing_else() -> None:
    """The caller's ops of a capture; and a replay is what was recorded, whatever is set when it is launched."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(4, 4, generator=generator).to(world.DEVICE) for _ in range(2))
    with autocast(torch.bfloat16):
        wanted = x @ weight
    exact = x @ weight
    assert wanted.dtype is torch.bfloat16
    manager = World().manager
    with autocast(torch.bfloat16), manager.graph() as g:
        cast = x @ weight
    with manager.graph() as plain_graph:
        uncast = x @ weight
    assert cast.dtype is torch.bfloat16 and uncast.dtype is torch.float32
    for mode in (nullcontext, partial(autocast, torch.float16), partial(default_device, "meta"), Refusing, Passing):
        cast.zero_()
        uncast.zero_()
        with mode():
            g.replay()
            plain_graph.replay()
        assert torch.equal(cast, wanted) and torch.equal(uncast, exact)


def test_meta_tensors_of_a_default_device_are_no_part_of_a_capture() -> None:
    x = torch.ones(3, device=world.DEVICE)
    manager = World().manager
    with default_device("meta"), manager.graph() as g:
        shape_only = torch.zeros(3) + torch.tensor([1.0, 2.0, 3.0])
        y = x * 2 + torch.ones(3, device=world.DEVICE)
    assert shape_only.device.type == "meta"
    x.fill_(5)
    g.replay()
    assert y.tolist() == [11.0] * 3
