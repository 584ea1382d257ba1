"""What planlife's own work costs on the host: the public API over a backend that does nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from timeit import Timer
from typing import Any

import torch

from .ladder import CapacityLadder
from .manager import PlanManager
from .spec import PlanSpec, Step, check_int

_ROWS = 8


@dataclass(frozen=True)
class HostFigure:
    """The host time of one call. Times are microseconds per call of a batch; `yardstick_us` is a median.

    has_default_device: it was called under one, as engines set it: torch then runs Python code for each read of a
    tensor. The yardstick is an empty method with as many arguments, timed batch by batch in turn with the call.
    """

    call: str
    included: str
    has_default_device: bool
    batches_us: tuple[float, ...]
    yardstick_us: float

    @property
    def median_us(self) -> float:
        return statistics.median(self.batches_us)

    @property
    def min_us(self) -> float:
        return min(self.batches_us)

    @property
    def max_us(self) -> float:
        return max(self.batches_us)

    @property
    def ratio(self) -> float:
        """Median of the call over median of the yardstick."""
        return self.median_us / self.yardstick_us


def measure_host(*, num_batches: int = 51, calls_per_batch: int = 2000) -> list[HostFigure]:
    """Time plan_for, pa_decode, guard and replay without a kernel, and plan_for of a manager that is off.

    Each without and with a default device.

    Raises ConfigError. Capture: no. Syncs: no. Allocates: a few KiB on the host.
    """
    check_int("num_batches", num_batches, at_least=1)
    check_int("calls_per_batch", calls_per_batch, at_least=1)
    fewer_calls = max(calls_per_batch // 10, 1)  # of what takes ten times as long
    spec = PlanSpec(num_q_heads=8, num_kv_heads=1, head_dim=64, page_size=16, max_context_tokens=1024)
    ladder = CapacityLadder([_ROWS])
    step = Step(torch.full((_ROWS,), 100, dtype=torch.int32, device="cpu"), owner=_Owner())
    nobodys_step = Step(step.context_lens)
    block_tables = torch.zeros(_ROWS, 7, dtype=torch.int32, device="cpu")
    layers = [(*_layer_tensors(spec), block_tables, 0.125) for _ in range(2)]

    def idle_fallback(output: Any, *arguments: Any, **keywords: Any) -> Any:
        return output

    with (
        PlanManager(spec, ladder=ladder, device="cpu", backend=_IdleBackend()) as manager,
        PlanManager(spec, ladder=ladder, device="cpu", backend=_IdleBackend()) as refreshing,
        PlanManager(spec, ladder=ladder, device="cpu", enabled=False, fallback=idle_fallback) as off,
    ):
        for one in (manager, refreshing):
            with one.capture_phase():
                one.warm()
        plan = manager.plan_for(step)
        with refreshing.graph() as graph:
            refreshing.pa_decode(refreshing.plan_for(step), *layers[0])
        figures = [
            *_time(
                "plan_for, skipped",
                "finds the last plan, compares step, owner and version of the lengths with the mark, and skips "
                "the refresh; making the Step is not included.",
                manager.plan_for,
                [(step,)],
                num_batches,
                calls_per_batch,
            ),
            *_time(
                "plan_for, refreshing",
                "a step without an owner, which always refreshes: looks at the lengths, takes the plan's lock, and "
                "calls a planner that does nothing.",
                refreshing.plan_for,
                [(nobodys_step,)],
                num_batches,
                fewer_calls,
            ),
            *_time(
                "pa_decode, bookkeeping",
                "one layer again and again: takes the plan's lock, compares the mark and calls a backend that does "
                "nothing; no refresh, no launch; the input checks know these tensors already.",
                manager.pa_decode,
                [(plan, *layers[0])],
                num_batches,
                calls_per_batch,
            ),
            *_time(
                "pa_decode, new tensors",
                "the same for two layers in turn, each with its own query, output and caches, which the input checks "
                "look at anew in every call.",
                manager.pa_decode,
                [(plan, *layer) for layer in layers],
                num_batches,
                calls_per_batch,
            ),
            *_time(
                "guard",
                "of a graph with one plan, which it refreshes itself.",
                refreshing.guard,
                [(graph, step)],
                num_batches,
                fewer_calls,
            ),
            *_time(
                "replay",
                "the same graph, which is empty: no kernel is launched.",
                refreshing.replay,
                [(graph, step)],
                num_batches,
                fewer_calls,
            ),
            *_time(
                "plan_for, off",
                "enabled=False: answers the fallback route; its kernel is not included.",
                off.plan_for,
                [(step,)],
                num_batches,
                calls_per_batch,
            ),
        ]
        refreshes = manager.report().counters["refreshes"]
    if refreshes != 1:
        raise RuntimeError(f"the bench timed {refreshes - 1} refreshes where all calls should have skipped.")
    return figures


def _layer_tensors(spec: PlanSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, query, key cache and value cache of one layer."""
    options: Any = {"dtype": torch.bfloat16, "device": "cpu"}
    query = torch.zeros(_ROWS, spec.num_q_heads, spec.head_dim, **options)
    cache = torch.zeros(8, spec.page_size, spec.num_kv_heads, spec.head_dim, **options)
    return torch.zeros_like(query), query, cache, torch.zeros_like(cache)


def _time(
    call: str,
    included: str,
    function: Callable[..., object],
    argument_sets: Sequence[tuple[object, ...]],
    num_batches: int,
    calls_per_batch: int,
) -> tuple[HostFigure, HostFigure]:
    """Time `function` over the argument sets in turn, without and with a default device; `calls_per_batch` calls with
    each."""
    num_arguments = len(argument_sets[0])
    names = {f"a{i}_{j}": value for i, values in enumerate(argument_sets) for j, value in enumerate(values)}
    statement = "; ".join(
        f"function({', '.join(f'a{i}_{j}' for j in range(num_arguments))})" for i in range(len(argument_sets))
    )
    timer = Timer(statement, globals={"function": function, **names})
    yardstick = Timer(statement, globals={"function": _Empty().methods[num_arguments], **names})
    samples_us: dict[tuple[Timer, bool], list[float]] = {}
    for _ in range(num_batches):
        for has_default_device, mode in ((False, nullcontext()), (True, torch.device("cpu"))):
            for one in (timer, yardstick):
                with mode:
                    batch_s = one.timeit(calls_per_batch)
                batch_us = batch_s / (calls_per_batch * len(argument_sets)) * 1e6
                samples_us.setdefault((one, has_default_device), []).append(batch_us)
    without, under = (
        HostFigure(
            call,
            included,
            has_default_device,
            tuple(samples_us[timer, has_default_device]),
            statistics.median(samples_us[yardstick, has_default_device]),
        )
        for has_default_device in (False, True)
    )
    return without, under


class _Owner:
    """An engine's per-step object, held weakly like most of them."""


class _Empty:
    """Methods that do nothing, by their number of arguments."""

    def __init__(self) -> None:
        self.methods = {1: self.one, 2: self.two, 7: self.seven}

    def one(self, a: Any) -> None: ...

    def two(self, a: Any, b: Any) -> None: ...

    def seven(self, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> None: ...


class _IdleBackend:
    """Plans nothing and decodes nothing, so that what is timed is planlife's own work."""

    name = "idle"
    max_plan_rows: int | None = None

    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        return ()

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        return ()

    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        return 1

    def excluded(self, device: Any) -> Mapping[str, str]:
        return {}

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return 512

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return 512

    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        return 0

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> Any:
        return buffer

    def refresh(self, tables: Any, context_lens: Any | None, num_rows: int) -> None:
        pass

    def decode(
        self,
        tables: Any,
        scratch: Any,
        output: Any,
        query: Any,
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        softmax_scale: float,
        key_scale: Any,
        value_scale: Any,
        sinks: Any,
        lse: Any,
    ) -> None:
        pass

    def sanitize(self, tables: Any, context_lens: Any, num_rows: int, flags: Any, max_tokens: int) -> None:
        pass
