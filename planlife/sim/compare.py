"""Several policies over the same steps, each in a process of its own where that pays."""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..backends.base import Backend
from ..configuration import resolve_backend
from ..ladder import CapacityLadder
from ..spec import PlanSpec
from ..step_log import StepBlock, is_step_log, stream_step_log
from ..trace import stream_trace
from ..trace_file import TraceError
from .costs import COSTS, Costs
from .drive import PolicyRun
from .engine import Engine, EngineRun, run_engine
from .policy import Policy
from .result import PolicyResult

#: Below this many steps a second process costs more than it saves: it imports torch first.
_MIN_STEPS_FOR_PROCESSES = 400_000

Progress = Callable[[int, int, str], object]  #: steps done, of, and with what


class Source(Protocol):
    """Steps that can be read more than once, in another process too."""

    @property
    def name(self) -> str: ...

    def blocks(self) -> Iterator[StepBlock]: ...


@dataclass(frozen=True)
class StepLog:
    """A step log on disk."""

    name: str

    def blocks(self) -> Iterator[StepBlock]:
        return stream_step_log(self.name)


@dataclass(frozen=True)
class Requests:
    """A request trace on disk, and the engine that serves it. run: what the last complete reading found."""

    name: str
    engine: Engine = field(default_factory=Engine)
    run: EngineRun = field(default_factory=EngineRun, compare=False)

    def blocks(self) -> Iterator[StepBlock]:
        run = EngineRun()
        yield from run_engine(stream_trace(self.name), self.engine, run)
        self.run.__dict__.update(run.__dict__)


def open_source(path: str | os.PathLike[str], engine: Engine) -> StepLog | Requests:
    """The steps of a step log, or of `engine` serving a request trace; told apart by content. Raises TraceError."""
    name = os.fspath(path)
    mode = stat.S_IFREG
    with suppress(OSError, ValueError):  # what is not there is told by whoever reads it
        mode = os.stat(name).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise TraceError(f"trace {name!r} is a pipe or a device, and is read more than once: save it in a file.")
    return StepLog(name) if is_step_log(name) else Requests(name, engine)


@dataclass
class Survey:
    """What one reading of the steps tells. rows: rows -> steps, dummies (0 rows) among them."""

    rows: Counter[int] = field(default_factory=Counter)
    num_steps: int = 0
    span_us: int = 0
    sites: dict[str, None] = field(default_factory=dict)
    ubatches: int = 1


def survey(source: Source, progress: Callable[[int], object] = lambda num_steps: None) -> Survey:
    """Read all steps once. progress(steps so far). Raises TraceError."""
    found = Survey()
    for block in source.blocks():
        found.rows.update(block.rows)
        found.num_steps += len(block.rows)
        found.span_us += sum(block.dt_us)
        used = [0] if block.site is None else sorted(set(block.site))
        found.sites.update(dict.fromkeys(block.sites[index] for index in used))
        if block.ubatch:
            found.ubatches = max(found.ubatches, max(block.ubatch) + 1)
        progress(found.num_steps)
    return found


@dataclass(frozen=True)
class Setting:
    """What all policies share. sites: a spec per site of the log. backend: whose byte formulas count."""

    sites: Mapping[str, PlanSpec]
    costs: Costs
    ubatches: int = 1
    num_compute_units: int = 256
    num_layers: int = 32
    backend: str | Backend = "torch"
    fold: bool = True


def run_policy(
    blocks: Iterable[StepBlock],
    policy: Policy,
    setting: Setting,
    progress: Callable[[int], object] = lambda num_steps: None,
) -> PolicyResult:
    """One policy over the steps. progress(steps so far). Raises TraceError, ConfigError, BudgetError."""
    run = PolicyRun(
        policy,
        sites=setting.sites,
        costs=setting.costs,
        sizes=resolve_backend(setting.backend),
        ubatches=setting.ubatches,
        num_compute_units=setting.num_compute_units,
        num_layers=setting.num_layers,
        fold=setting.fold,
    )
    num_steps = 0
    for block in blocks:
        run.feed(block)
        num_steps += len(block.rows)
        progress(num_steps)
    return run.finish()


def compare(
    source: Source,
    policies: Sequence[Policy],
    setting: Setting,
    *,
    num_steps: int = 0,
    num_processes: int | None = None,
    progress: Progress = lambda done, total, text: None,
) -> list[PolicyResult]:
    """All policies over the same steps, in the order given.

    num_steps: of the source, if known: for the progress, and to decide whether processes pay. num_processes: None = one
    per core if they do. Raises what run_policy raises.
    """
    total = num_steps * len(policies)
    if num_processes is None:
        pays = num_steps >= _MIN_STEPS_FOR_PROCESSES and len(policies) > 1
        num_processes = min(num_cores(), len(policies)) if pays else 1
    if num_processes > 1:
        return _compare_in_processes(source, policies, setting, num_processes, total, progress)
    results = []
    for index, policy in enumerate(policies):
        done = index * num_steps
        progress(done, total, policy.name)

        def tell(steps: int, done: int = done, name: str = policy.name) -> None:
            progress(done + steps, total, name)

        results.append(run_policy(source.blocks(), policy, setting, tell))
    return results


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_shared_done: Any = None  #: in a worker process: steps done, per policy


def _receive(done: Any) -> None:
    global _shared_done
    _shared_done = done


def _work(source: Source, index: int, policy: Policy, setting: Setting) -> PolicyResult:
    def tell(steps: int) -> None:
        _shared_done[index] = steps

    return run_policy(source.blocks(), policy, setting, tell)


def _compare_in_processes(
    source: Source, policies: Sequence[Policy], setting: Setting, num_processes: int, total: int, progress: Progress
) -> list[PolicyResult]:
    # Spawned, not forked: torch may have started threads, which a fork would cut in the middle.
    context = multiprocessing.get_context("spawn")
    done = context.Array("q", len(policies), lock=False)
    with ProcessPoolExecutor(num_processes, context, _receive, (done,)) as pool:
        futures = [pool.submit(_work, source, index, policy, setting) for index, policy in enumerate(policies)]
        waiting = set(futures)
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                progress(sum(done), total, f"{len(futures) - len(waiting)} of {len(futures)} policies done")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def measure_plan_us(num_steps: int = 5_000) -> float:
    """Microseconds of one plan_for that refreshes, on this machine, with a backend that does nothing."""
    spec = PlanSpec(8, 1, 64, 16, max_context_tokens=1024)
    setting = Setting({"default": spec}, COSTS["h200"], backend=resolve_backend("torch"), fold=False)
    block = StepBlock([0] * num_steps, [1 + i % 8 for i in range(num_steps)])
    policy = Policy("every count", CapacityLadder(range(1, 9)))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run_policy([block], policy, setting)
        seconds.append(time.perf_counter() - start)
    return min(seconds) / num_steps * 1e6
