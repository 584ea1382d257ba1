"""What a caller has set torch to changes nothing: default device and dtype, autocast, function modes, inference mode."""

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
