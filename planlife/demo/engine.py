"""A small continuous-batching engine on planlife: it captures, serves a trace, and compares every output."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources

import torch

from ..aiter_library import describe
from ..backends.base import Backend
from ..configuration import resolve_backend, resolve_device
from ..device import Device, Graph
from ..errors import BudgetError, ConfigError, MintError
from ..ladder import CapacityLadder
from ..manager import PlanManager
from ..spec import PlanSpec
from ..testing.aiter_double import AiterDouble
from ..testing.aiter_machine import aiter_machine
from ..trace import Request, read_trace
from .check import DenseCheck
from .config import (
    CAPTURE_ROWS,
    HEAD_DIM,
    LADDER_ROWS,
    MAX_ROWS,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    PAGE_SIZE,
    SAMPLE_CONTEXT_TOKENS,
    DemoConfig,
)
from .kv_pool import KVPool, page_bytes
from .model import Batch, Metadata, StepBuffers, ToyModel
from .result import DemoResult, DoubleCounts, StepCounts
from .scheduler import Running, Scheduler, TokenSource, arrivals_from_trace
from .upload import upload

Progress = Callable[[int, int, str], None]
GraphKey = tuple[str, int]  #: kind of forward, rows

_UBATCHES = 2
_SITES_BY_KIND = {
    "decode": ("dense", "window"),
    "ubatch": ("dense", "window"),
    "verify": ("verify", "verify_window"),
    "draft": ("draft",),
}


def run_demo(config: DemoConfig, progress: Progress | None = None) -> DemoResult:
    """Serve a trace and compare every output with dense attention.

    progress: called with (done, total, text) as it runs.

    Runs torch on one CPU thread meanwhile, and with `config.double` takes aiter's place for imports. Raises
    ConfigError, TraceError, BackendUnavailableError for a backend or device that is not here; whatever planlife
    refuses comes through.
    Capture: no. Syncs: yes. Allocates: the KV pool and the buffers of all graphs.
    """
    num_threads = torch.get_num_threads()
    # The ops are tiny. More threads only wait for each other, on busy cores for minutes.
    torch.set_num_threads(1)
    try:
        return _run(config, progress)
    finally:
        torch.set_num_threads(num_threads)


def _run(config: DemoConfig, progress: Progress | None) -> DemoResult:
    report_progress = progress if progress is not None else lambda done, total, text: None
    started = time.perf_counter()
    arrivals, num_clipped = arrivals_from_trace(_read_requests(config), config)

    specs, device = site_specs(config), resolve_device(config.device)
    num_captures = sum(len(sizes) for sizes in CAPTURE_ROWS.values())
    total = num_captures + config.max_steps
    with ExitStack() as stack:
        double = stack.enter_context(_machine_of(config.double, device, config)) if config.double else None
        backend = _resolve_backend(config, specs, device)
        config = replace(config, device=device.name)
        watch = None
        if backend.name == "triton":
            from .compile_watch import CompileWatch  # needs Triton

            watch = stack.enter_context(CompileWatch())
        manager = stack.enter_context(
            PlanManager(
                specs,
                ladder=CapacityLadder(LADDER_ROWS),
                device=device,
                backend=backend,
                ubatches=_UBATCHES,
                budget_bytes=config.budget_bytes,
                fallback="torch",
            )
        )
        engine = Engine(config, manager, finite_tails=backend.name == "aiter")
        engine.capture_all(lambda done, text: report_progress(done, total, text))
        startup_seconds = time.perf_counter() - started
        num_compiles_at_seal = watch.num_compiles if watch else 0
        num_keys_at_seal = double.compiles if double else 0
        graph_kinds = {type(graph) for captured in engine.graphs.values() for graph in captured.graphs}
        scheduler = Scheduler(arrivals, engine.pool, config)
        for step in range(config.max_steps):
            if not scheduler.has_work:
                break
            text = engine.serve(step, scheduler)
            report_progress(num_captures + step + 1, total, text)
            if step == config.max_steps // 2:
                engine.capture_again()
        report_progress(total, total, "served")
        check = engine.check
        if double:
            double.check()
        return DemoResult(
            config=config,
            counts=engine.counts,
            report=manager.report(),
            graph_kind=" and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in graph_kinds),
            num_triton_compiles=watch.num_compiles if watch else None,
            num_triton_compiles_after_seal=watch.num_compiles - num_compiles_at_seal if watch else None,
            double=_counts_of(double, num_keys_at_seal) if double else None,
            num_graphs=sum(len(captured.graphs) for captured in engine.graphs.values()),
            num_graphs_refused=engine.num_graphs_refused,
            num_requests=len(arrivals),
            num_finished=scheduler.num_finished,
            num_clipped=num_clipped,
            kv_pool_bytes=engine.pool.num_bytes,
            num_rows_compared=check.num_rows_compared,
            num_rows_cut=check.num_rows_cut,
            num_mismatches=check.num_mismatches,
            first_mismatch=check.first_mismatch,
            largest_error=check.largest_error,
            startup_seconds=startup_seconds,
            seconds=time.perf_counter() - started,
        )


def _machine_of(arch: str, device: Device, config: DemoConfig) -> AbstractContextManager[AiterDouble]:
    """`device` as an `arch` with aiter. What is wrong is noted and the run goes on: a mismatch would show beside it."""
    device_type = device.name.partition(":")[0]
    return aiter_machine(arch, device_type=device_type, generation=config.double_generation, on_violation="record")


def _counts_of(double: AiterDouble, num_keys_at_seal: int) -> DoubleCounts:
    return DoubleCounts(
        arch=double.arch,
        generation=double.generation,
        num_decodes=double.decodes,
        num_compile_keys=double.compiles,
        num_compile_keys_after_seal=double.compiles - num_keys_at_seal,
        violations=tuple(double.violations),
    )


def _resolve_backend(config: DemoConfig, specs: Mapping[str, PlanSpec], device: Device) -> Backend:
    """The backend of that name. The demo's fallback would take what it refuses, and the run would say nothing of it."""
    backend = resolve_backend(config.backend, specs, device)
    reasons = dict.fromkeys(reason for spec in specs.values() for reason in backend.refuse_spec(spec, device))
    if reasons:
        raise ConfigError(f"backend={backend.name!r} cannot serve the demo on {device.name}: {'; '.join(reasons)}.")
    return backend


def _read_requests(config: DemoConfig) -> list[Request]:
    """The trace; the packaged one with prompts as much longer as the contexts are that it was not made for."""
    if config.trace_path is not None:
        return read_trace(config.trace_path)
    with resources.as_file(resources.files(__package__) / "sample_trace.csv") as sample:
        requests = read_trace(sample)
    longer = config.max_context_tokens / SAMPLE_CONTEXT_TOKENS
    return [replace(request, input_tokens=int(request.input_tokens * longer)) for request in requests]


def site_specs(config: DemoConfig) -> dict[str, PlanSpec]:
    """The call sites of the toy engine. A windowed plan is bound to its query length, so verify has two."""

    def spec(*, query_length: int = 1, sliding_window: int = 0) -> PlanSpec:
        return PlanSpec(
            NUM_Q_HEADS,
            NUM_KV_HEADS,
            HEAD_DIM,
            PAGE_SIZE,
            max_context_tokens=config.max_context_tokens,
            q_dtype=config.q_dtype,
            kv_dtype=config.kv_dtype,
            kv_layout=config.layout,
            scales=config.kv_scales,
            query_length=query_length,
            sliding_window=sliding_window,
            max_partitions=4,
            workgroup_budget=64,
        )

    return {
        "dense": spec(),
        "window": spec(sliding_window=config.window),
        "verify": spec(query_length=config.verify_tokens),
        "verify_window": spec(query_length=config.verify_tokens, sliding_window=config.window),
        "draft": spec(),
    }


@dataclass(frozen=True)
class Captured:
    """Graphs of one kind and size, and the buffers they read: one graph, or one per draft pass."""

    graphs: tuple[Graph, ...]
    buffers: tuple[StepBuffers, ...]


class Engine:
    """Owns: the KV pool, the graphs and their buffers. Borrows: the manager."""

    def __init__(self, config: DemoConfig, manager: PlanManager, *, finite_tails: bool = False) -> None:
        self._config = config
        self._plan_in_layers = config.style == "in-graph"
        self._manager = manager
        self._specs = site_specs(config)
        self._num_layers = config.num_layers
        self.pool = _size_kv_pool(config, manager, finite_tails)
        self._model = ToyModel(manager, self.pool, num_layers=config.num_layers)
        self._tokens = TokenSource(config)
        self.check = DenseCheck(
            num_layers=config.num_layers + 1,
            num_cache_rows=MAX_ROWS,
            max_context_tokens=config.max_context_tokens,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            # FP8 numbers times their scales need more bits than the cache has.
            dtype=torch.float32 if config.is_fp8 else getattr(torch, config.kv_dtype),
            device=config.device,
        )
        self.counts = StepCounts()
        self.graphs: dict[GraphKey, Captured] = {}
        self.num_graphs_refused = 0

    def capture_all(self, progress: Callable[[int, str], None]) -> None:
        """Mint everything, then record every size, largest first."""
        keys = [(kind, rows) for kind, sizes in CAPTURE_ROWS.items() for rows in sizes]
        keys.sort(key=lambda key: -key[1])
        with self._manager.capture_phase():
            self._manager.warm()
            for number, (kind, rows) in enumerate(keys):
                self._capture_if_it_fits(kind, rows)
                progress(number + 1, f"captured {kind}/{rows}")

    def capture_again(self) -> None:
        """Destroy one graph and record it anew, as engines do after they reload weights or change a mode.

        What only that graph pinned is let go in between, so that it has to come back.
        """
        key = max(self.graphs, key=lambda key: (key[0] == "decode", key[1]), default=None)
        if key is None:
            return
        for graph in self.graphs.pop(key).graphs:
            self._manager.release(graph)
        self._manager.trim(0)
        with self._manager.capture_phase():
            self._capture_if_it_fits(*key)
        self.counts.recaptured += key in self.graphs

    def _capture_if_it_fits(self, kind: str, rows: int) -> None:
        """Under a budget below the worst case earlier graphs may leave no room: that size runs eagerly."""
        try:
            captured = self._capture(kind, rows)
        except (BudgetError, MintError):
            captured = None
        if captured is None:
            self.num_graphs_refused += 1
        else:
            self.graphs[kind, rows] = captured

    def _capture(self, kind: str, rows: int) -> Captured | None:
        """None if some call in the graph would be the fallback's; an eager step may find room for it."""
        buffers = self._new_buffers(kind, rows)
        for part in buffers:
            part.load_capture()
        metadata = self._metadata(kind, buffers)
        graphs = []
        for prepare, record in self._recordings(kind, metadata):
            prepare()
            record()  # the eager warm-up, over the metadata and tensors that the capture uses too
            prepare()
            with self._manager.graph() as graph:
                record()
            graphs.append(graph)
        return None if metadata.fell_back else Captured(tuple(graphs), buffers)

    def _recordings(self, kind: str, metadata: Metadata) -> list[tuple[Callable[[], None], Callable[[], None]]]:
        """What runs before and what runs inside each recording of one kind."""
        if kind != "draft":
            return [(metadata.build, partial(self._model.target, metadata))]
        if self._plan_in_layers:
            return [(metadata.build, partial(self._draft_loop, metadata))]
        # A before-replay graph reads a plan for one step only, and each pass is a step of its own.
        return [
            (partial(metadata.build, number), partial(self._model.draft, metadata, number))
            for number in range(self._config.mtp)
        ]

    def _draft_loop(self, metadata: Metadata) -> None:
        """All draft passes in a row; fits into one graph where the layers plan."""
        (buffers,) = metadata.buffers
        for number in range(self._config.mtp):
            if number:
                buffers.advance()
            metadata.build(number)
            self._model.draft(metadata, number)

    def _new_buffers(self, kind: str, rows: int) -> tuple[StepBuffers, ...]:
        row_counts = (rows // 2, rows - rows // 2) if kind == "ubatch" else (rows,)
        return tuple(
            StepBuffers(
                self._config,
                num_rows=count,
                query_length=self._config.verify_tokens if kind == "verify" else 1,
                num_calls=self._config.mtp if kind == "draft" else self._num_layers,
            )
            for count in row_counts
        )

    def _metadata(self, kind: str, buffers: Sequence[StepBuffers], *, dummy: bool = False) -> Metadata:
        by_turns = _SITES_BY_KIND[kind]
        num_sites = 1 if kind == "draft" else self._num_layers
        sites = [by_turns[layer % len(by_turns)] for layer in range(num_sites)]
        return Metadata(self._manager, buffers, sites, plan_in_layers=self._plan_in_layers, dummy=dummy)

    def serve(self, step: int, scheduler: Scheduler) -> str:
        """One engine step, with its draft passes if it verifies. Returns a line on what ran."""
        for request in scheduler.advance():
            self._prefill(request, scheduler)
        shape = scheduler.shape(step)
        where = f"step {step} {shape.kind}"
        if shape.kind == "dummy":
            return f"{where}, {self._serve_dummy(where, step, shape.may_replay)}"
        query_length = self._config.verify_tokens if shape.kind == "verify" else 1
        running = scheduler.running
        for request in running:
            scheduler.grow(request, request.num_tokens + query_length)
        batch = self._tokens.batch(running, query_length=query_length)
        how = self._run_target(where, shape.kind, batch, shape.may_replay)
        num_accepted = scheduler.accept(query_length)
        self.counts.tokens += num_accepted
        if shape.kind == "verify":
            self.counts.verify += 1
            self.counts.drafts_verified += self._config.mtp * len(running)
            self.counts.drafts_accepted += num_accepted - len(running)
            self._serve_drafts(f"{where} draft", scheduler, shape.may_replay)
        self.counts.ubatch += shape.kind == "ubatch"
        scheduler.retire()
        return f"{where}, {batch.num_rows} rows, {how}"

    def _prefill(self, request: Running, scheduler: Scheduler) -> None:
        scheduler.grow(request, request.num_tokens)
        for layer in range(self._num_layers):
            self._write_context(layer, request, 0)
        self._catch_draft_up(request)

    def _catch_draft_up(self, request: Running) -> None:
        """The draft reads the tokens that were accepted since it last ran, as a prefill does."""
        self._write_context(self._model.draft_layer, request, request.draft_tokens)
        request.draft_tokens = request.num_tokens

    def _write_context(self, layer: int, request: Running, begin: int) -> None:
        positions = torch.arange(begin, request.num_tokens)
        _, new = self._tokens.draw([layer], len(positions))
        slots = torch.tensor(request.pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        parts = (new.key, new.value, new.key_scale, new.value_scale)
        self.pool.write(layer, upload(slots, self._config.device), *(part[0] for part in parts if part is not None))
        self.check.record(layer, torch.full_like(positions, request.cache_row), positions, *new.meant(0))

    def _fitting(self, kind: str, rows: int) -> Captured | None:
        """The smallest captured size that holds `rows`."""
        sizes = [size for captured_kind, size in self.graphs if captured_kind == kind and size >= rows]
        return self.graphs[kind, min(sizes)] if sizes else None

    def _run_target(self, where: str, kind: str, batch: Batch, may_replay: bool) -> str:
        captured = self._fitting(kind, batch.num_rows) if may_replay else None
        buffers = captured.buffers if captured else self._new_buffers(kind, batch.num_rows)
        parts = _split(batch, buffers)
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.load(part)
        metadata = self._metadata(kind, buffers)
        metadata.build()
        if captured:
            self._manager.replay(captured.graphs[0], *metadata.steps())
        else:
            self._model.target(metadata)

        for layer in range(self._num_layers):
            self._record(layer, layer, batch)
            site = metadata.sites[layer]
            window_tokens = self._specs[site].sliding_window
            for ubatch, (buffer, part) in enumerate(zip(buffers, parts, strict=True)):
                self._compare(f"{where} {site}/ub{ubatch}", layer, layer, buffer, part, window_tokens)
        return self._count_target(captured, metadata)

    def _count_target(self, captured: Captured | None, metadata: Metadata) -> str:
        how = "fallback" if metadata.fell_back else "replayed" if captured else "eager"
        setattr(self.counts, how, getattr(self.counts, how) + 1)
        return how

    def _serve_drafts(self, where: str, scheduler: Scheduler, may_replay: bool) -> None:
        running = scheduler.running
        for request in running:
            self._catch_draft_up(request)
            scheduler.grow(request, request.num_tokens + self._config.mtp)
        batch = self._tokens.draft_batch(running)
        captured = self._fitting("draft", batch.num_rows) if may_replay else None
        (buffers,) = captured.buffers if captured else self._new_buffers("draft", batch.num_rows)
        buffers.load(batch)
        metadata = self._metadata("draft", (buffers,))
        if captured is None:
            self._draft_loop(metadata)
        elif self._plan_in_layers:
            self._manager.replay(captured.graphs[0], *metadata.steps())
        else:
            for number, graph in enumerate(captured.graphs):
                if number:
                    buffers.advance()
                metadata.build(number)
                self._manager.replay(graph, *metadata.steps(number))
        for number in range(self._config.mtp):
            self._record(self._model.draft_layer, number, batch)
            self._compare(f"{where} {number}", self._model.draft_layer, number, buffers, batch.ahead(number))
        self.counts.draft_passes += self._config.mtp
        self.counts.draft_passes_replayed += self._config.mtp if captured else 0

    def _serve_dummy(self, where: str, step: int, may_replay: bool) -> str:
        """An idle rank's step. It runs the size that its neighbours run; here each size in turn."""
        captured_sizes = sorted(rows for kind, rows in self.graphs if kind == "decode")
        sizes = captured_sizes if may_replay and captured_sizes else LADDER_ROWS
        rows = sizes[step // 2 % len(sizes)]
        captured = self.graphs.get(("decode", rows)) if may_replay else None
        (buffers,) = captured.buffers if captured else self._new_buffers("decode", rows)
        # A graph that plans for itself reads the length buffer as it is, so the engine zeroes it. Otherwise
        # the lengths may be anything, here far past the tables.
        buffers.load_dummy(0 if captured and self._plan_in_layers else 4 * self._config.max_context_tokens)
        metadata = self._metadata("decode", (buffers,), dummy=True)
        metadata.build()
        if captured:
            self._manager.replay(captured.graphs[0], *metadata.steps())
        else:
            self._model.target(metadata)
        for output in buffers.output:
            self.check.compare_zeros(where, output)
        self.counts.dummy += 1
        self.counts.dummy_replayed += captured is not None
        return f"{rows} rows, {'replayed' if captured else 'eager'}"

    def _record(self, layer: int, call: int, batch: Batch) -> None:
        cache_rows = torch.tensor(batch.cache_rows).repeat_interleave(batch.query_length)
        self.check.record(layer, cache_rows, batch.positions[call], *batch.new.meant(call))

    def _compare(
        self, where: str, layer: int, call: int, buffers: StepBuffers, batch: Batch | None, window_tokens: int = 0
    ) -> None:
        output = buffers.output[call]
        num_real = 0
        if batch is not None:
            num_real = batch.num_rows * batch.query_length
            self.check.compare(
                where,
                layer,
                output[:num_real],
                batch.query[call],
                cache_rows=batch.cache_rows,
                context_lens=batch.context_lens,
                window_tokens=window_tokens,
            )
        self.check.compare_zeros(f"{where} padding", output[num_real:])


def _size_kv_pool(config: DemoConfig, manager: PlanManager, finite_tails: bool) -> KVPool:
    """The pool from what plans and scratch leave of the memory; nothing is allocated to find out (R19)."""
    reserved_bytes = manager.worst_case_bytes() if config.budget_bytes is None else config.budget_bytes
    one_page_bytes = page_bytes(config)
    num_pages = (config.memory_bytes - reserved_bytes) // one_page_bytes
    needed_pages = 1 + config.max_pages_per_row
    if num_pages < needed_pages:
        raise ConfigError(
            f"memory_bytes={config.memory_bytes:,} less {reserved_bytes:,} for plans and scratch holds "
            f"{max(num_pages, 0)} KV pages of {config.num_layers + 1} layers; one request of "
            f"{config.max_context_tokens} tokens needs {needed_pages}. "
            f"Raise memory_bytes to at least {reserved_bytes + needed_pages * one_page_bytes:,}."
        )
    try:
        return KVPool(config, num_pages=num_pages, finite_tails=finite_tails)
    except (RuntimeError, MemoryError) as error:  # as torch says it, on a CPU and on a GPU
        raise ConfigError(
            f"{config.device} has no room for the {num_pages:,} KV pages that memory_bytes={config.memory_bytes:,} "
            f"holds ({describe(error)}). Lower memory_bytes."
        ) from error


def _split(batch: Batch, buffers: Sequence[StepBuffers]) -> list[Batch | None]:
    """The rows of each ubatch; None for one that gets none."""
    parts: list[Batch | None] = []
    begin = 0
    for buffer in buffers:
        end = min(begin + buffer.num_rows, batch.num_rows)
        parts.append(batch.rows(begin, end) if begin < end else None)
        begin = end
    return parts
