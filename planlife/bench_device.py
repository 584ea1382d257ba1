"""What the hot path costs on a GPU, each figure beside a limit or a peer that was measured in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from .configuration import resolve_backend, resolve_device
from .device import Device, Graph
from .errors import BackendUnavailableError, ConfigError
from .ladder import CapacityLadder
from .manager import PlanManager
from .plan import StepPlan
from .spec import PlanSpec, Step, check_int

_HEAD_DIM = 128
_PAGE_SIZE = 16
_SOFTMAX_SCALE = _HEAD_DIM**-0.5
#: A set of KV caches is read again only after so many times the L2 were read in between.
_L2_TIMES = 4
_ROOF_BYTES = 1 << 30
_CALLS_PER_BATCH = 50
_PER_GRAPH = 64
_LEAST_DECODES = 16
_MORE_WORKGROUPS = 4  # for each compute unit
_REFRESH_ROWS = (8, 64, 256, 1024)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """One decode call over a BF16 "nhd" cache of shuffled pages of 16 tokens, head dimension 128."""

    name: str
    lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int

    def spec(self, workgroup_budget: int | None = None) -> PlanSpec:
        """The call site."""
        return PlanSpec(
            self.num_q_heads,
            self.num_kv_heads,
            _HEAD_DIM,
            _PAGE_SIZE,
            max_context_tokens=max(self.lens) + 64,
            workgroup_budget=workgroup_budget,
        )

    @property
    def kv_bytes(self) -> int:
        """Of the tokens of all rows, K and V: what a decode has to read."""
        return 2 * 2 * sum(self.lens) * self.num_kv_heads * _HEAD_DIM


SHORT = Shape("short", (257,) * 8, 8, 1)
SHAPES = (
    Shape("uniform8k", (8192,) * 32, 8, 1),
    Shape("skew", (200_003, *(257,) * 31), 8, 1),
    Shape("skew-gqa", (200_003, *(257,) * 31), 32, 8),
    SHORT,
)


@dataclass(frozen=True)
class Cost:
    """Microseconds of one call, and of its peer, in turn with it or in the same run. The peer's is a median."""

    call: str
    included: str
    samples_us: tuple[float, ...]
    peer: str
    peer_us: float

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def ratio(self) -> float:
        """Of the call's median to the peer's."""
        return self.median_us / self.peer_us


@dataclass(frozen=True)
class DecodeRate:
    """Decodes of one shape in a graph. num_sets: KV caches they read in turn, kv_bytes each."""

    shape: str
    workgroup_budget: int
    kv_bytes: int
    num_sets: int
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def bytes_per_second(self) -> float:
        return self.kv_bytes / self.median_us * 1e6


@dataclass(frozen=True)
class DeviceReport:
    """What `measure_device` found. roofs: bytes per second of each way to read memory that was tried."""

    device: str
    gpu: str
    backend: str
    l2_bytes: int
    roofs: dict[str, float]
    host: tuple[Cost, ...]
    refreshes: tuple[Cost, ...]
    decodes: tuple[DecodeRate, ...]
    sanitizer: tuple[Cost, ...]
    left_out: str

    @property
    def roof_bytes_per_second(self) -> float:
        return max(self.roofs.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with medians and ratios."""
        decodes = [
            {
                **asdict(rate),
                "median_us": rate.median_us,
                "bytes_per_second": rate.bytes_per_second,
                "of_roof": rate.bytes_per_second / self.roof_bytes_per_second,
            }
            for rate in self.decodes
        ]
        costs = {
            name: [{**asdict(cost), "median_us": cost.median_us, "ratio": cost.ratio} for cost in getattr(self, name)]
            for name in ("host", "refreshes", "sanitizer")
        }
        return {**asdict(self), **costs, "decodes": decodes, "roof_bytes_per_second": self.roof_bytes_per_second}


def measure_device(
    *, backend: str = "auto", device: str = "cuda", num_samples: int = 31, progress: Progress | None = None
) -> DeviceReport:
    """Time plan_for, pa_decode, refreshes and decodes in graphs, and the sanitizer, on a GPU.

    backend, device: of PlanManager. num_samples: of each figure. progress: called with what is measured next.

    Raises ConfigError for a CPU or a backend that cannot serve it, BackendUnavailableError without a GPU.
    Capture: no. Syncs: yes. Allocates: up to some GiB.
    """
    check_int("num_samples", num_samples, at_least=1)
    if str(device).startswith("cpu"):
        raise ConfigError(
            f"device={device!r} has no device time to measure: pass 'cuda' or 'cuda:N', or run `planlife bench host` "
            "for the host's share."
        )
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"`planlife bench device` measures a GPU, and torch {torch.__version__} sees none here: run it where there "
            "is one, or `planlife bench host` for the host's share."
        )
    here = resolve_device(device)
    resolved = resolve_backend(backend, {shape.name: shape.spec() for shape in SHAPES}, here)
    with torch.cuda.device(here.name):
        return _Bench(here, resolved, num_samples, progress or (lambda text: None)).run()


class _Bench:
    """Owns: nothing between figures."""

    def __init__(self, device: Device, backend: Any, num_samples: int, progress: Progress) -> None:
        self._device = device
        self._backend = backend
        self._num_samples = num_samples
        self._progress = progress
        self._properties = torch.cuda.get_device_properties(device.name)
        self._counter = torch.zeros(8, dtype=torch.int32, device=device.name)

    def run(self) -> DeviceReport:
        # The reference decode walks the longest context for every row, and would do so for minutes.
        shapes = SHAPES if self._backend.name != "torch" else (SHORT,)
        left_out = ", ".join(shape.name for shape in SHAPES if shape not in shapes)
        return DeviceReport(
            device=self._device.name,
            gpu=self._properties.name,
            backend=self._backend.name,
            l2_bytes=self._properties.L2_cache_size,
            roofs=self._roofs(),
            host=self._host_costs(),
            refreshes=tuple(self._refresh_cost(rows) for rows in _REFRESH_ROWS),
            decodes=tuple(rate for shape in shapes for rate in self._decode_rates(shape)),
            sanitizer=self._sanitizer_costs(),
            left_out=f"{left_out}: the torch backend is a reference, not a fast kernel" if left_out else "",
        )

    def _roofs(self) -> dict[str, float]:
        self._progress("how fast this memory can be read")
        source = torch.ones(_ROOF_BYTES // 4, device=self._device.name)
        target = torch.empty_like(source)
        rows = source.view(-1, 1 << 14)
        readers: dict[str, tuple[Callable[[], object], int]] = {
            "copy, reads and writes": (lambda: target.copy_(source), 2),
            "sum of float32": (lambda: torch.sum(rows, 1), 1),
            "max of float32": (lambda: torch.amax(rows, 1), 1),
        }
        roofs = {}
        for name, (read, times) in readers.items():
            read()
            median_us = statistics.median(self._event_us(read))
            roofs[name] = times * _ROOF_BYTES / median_us * 1e6
        return roofs

    def _host_costs(self) -> tuple[Cost, ...]:
        self._progress("host time of eager calls")
        call = _Call(SHORT, self._device)
        with self._manager(SHORT) as manager:
            owner = _Owner()
            steps = [Step(call.lens, owner=owner, revision=revision) for revision in range(2)]
            plan = manager.plan_for(steps[0])
            assert isinstance(plan, StepPlan)
            native = plan.native
            scratch_bytes = self._backend.scratch_bytes(native.spec, len(SHORT.lens), self._device.num_compute_units)
            scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=self._device.name)

            def decode(number: int) -> object:
                return manager.pa_decode(plan, *call.arguments(0))

            def decode_alone(number: int) -> object:
                return self._backend.decode(native, scratch, *call.arguments(0), None, None, None, None)

            def refresh_alone(number: int) -> object:
                return self._backend.refresh(native, call.lens, len(SHORT.lens))

            with manager.graph() as graph:
                decode(0)
            launch = self._host_us(lambda number: self._counter.add_(1))
            costs = [
                self._host_cost(
                    "plan_for, skipped",
                    "the step is planned already; asks CUDA whether this stream records",
                    lambda number: manager.plan_for(steps[0]),
                    "one torch op",
                    launch,
                ),
                self._host_cost(
                    "pa_decode",
                    "one layer: checks, bookkeeping and the backend's launches",
                    decode,
                    "the backend's decode alone",
                    self._host_us(decode_alone),
                ),
                self._host_cost(
                    "replay",
                    "guard of a graph with one decode, and its launch",
                    lambda number: manager.replay(graph, steps[0]),
                    "graph.replay() alone",
                    self._host_us(lambda number: graph.replay()),
                ),
                # Last: it leaves the tables to another step than the graph's.
                self._host_cost(
                    "plan_for, refresh",
                    "another step each time: class, marks and the planner's launch",
                    lambda number: manager.plan_for(steps[number % 2]),
                    "the backend's refresh alone",
                    self._host_us(refresh_alone),
                ),
            ]
        return tuple(costs)

    def _refresh_cost(self, num_rows: int) -> Cost:
        self._progress(f"refreshes of {num_rows} rows in a graph")
        shape = Shape("", (257,) * num_rows, 8, 1)
        call = _Call(shape, self._device)
        with self._manager(shape) as manager:

            def refresh_and_decode(num_refreshes: int) -> None:
                for _ in range(num_refreshes):
                    plan = manager.plan_for(Step(call.lens))
                manager.pa_decode(plan, *call.arguments(0))  # a refresh that no decode reads would be reported

            samples = self._marginal_us(manager, refresh_and_decode)

            def add(times: int) -> None:
                for _ in range(times):
                    self._counter.add_(1)

            peer = self._marginal_us(manager, add)
        return Cost(
            f"refresh, {num_rows} rows",
            f"what one more refresh adds to a graph of {_PER_GRAPH}",
            samples,
            "one torch op on 8 numbers",
            statistics.median(peer),
        )

    def _decode_rates(self, shape: Shape) -> list[DecodeRate]:
        """Under the backend's own budget of workgroups, and under another that shows whether it was well chosen."""
        self._progress(f"decodes of {shape.name}")
        num_sets = max(1, -(-_L2_TIMES * self._properties.L2_cache_size // shape.kv_bytes))
        num_decodes = num_sets * -(-_LEAST_DECODES // num_sets)
        call = _Call(shape, self._device, num_sets)
        rates = []
        for asked in (None, _MORE_WORKGROUPS * self._device.num_compute_units):
            call.output.fill_(torch.nan)
            with self._manager(shape, workgroup_budget=asked) as manager:
                plan = manager.plan_for(Step(call.lens, owner=call))
                with manager.graph() as graph:
                    for number in range(num_decodes):
                        manager.pa_decode(plan, *call.arguments(number % num_sets))
                samples = [sample / num_decodes for sample in self._graph_us(graph)]
                budget = manager.report().sites[0].workgroup_budget
            if not (call.output.isfinite().all() and call.output.any()):
                raise RuntimeError(f"the decode of {shape.name} is wrong: its output is zero or not finite.")
            assert budget is not None
            rates.append(DecodeRate(shape.name, budget, shape.kv_bytes, num_sets, tuple(samples)))
        return rates

    def _sanitizer_costs(self) -> tuple[Cost, ...]:
        self._progress("the sanitizer")
        call = _Call(SHORT, self._device)
        in_graph, eager = {}, {}
        with ExitStack() as stack:
            for sanitize in ("off", "count"):
                manager = stack.enter_context(self._manager(SHORT, sanitize=sanitize))
                owner = _Owner()
                steps = [Step(call.lens, owner=owner, revision=revision) for revision in range(2)]

                def serve(number: int, manager: PlanManager = manager, steps: list[Step] = steps) -> None:
                    manager.pa_decode(manager.plan_for(steps[number % 2]), *call.arguments(0))

                eager[sanitize] = self._host_us(serve)
                with manager.graph() as graph:
                    for number in range(_PER_GRAPH):
                        serve(number)
                in_graph[sanitize] = [sample / _PER_GRAPH for sample in self._graph_us(graph)]
                manager.release(graph)
        step = "plan_for with a refresh and pa_decode of one layer, "
        return tuple(
            Cost(where, step + included, tuple(us["count"]), "sanitize='off'", statistics.median(us["off"]))
            for where, included, us in (
                ("step in a graph, count", "device time, KV from L2", in_graph),
                ("eager step, count", "host time", eager),
            )
        )

    def _manager(self, shape: Shape, *, sanitize: str = "off", workgroup_budget: int | None = None) -> PlanManager:
        """With all its plans."""
        manager = PlanManager(
            shape.spec(workgroup_budget),
            ladder=CapacityLadder([len(shape.lens)]),
            device=self._device,
            backend=self._backend,
            sanitize=sanitize,
        )
        with manager.capture_phase():
            manager.warm()
        return manager

    def _host_cost(
        self, call: str, included: str, function: Callable[[int], object], peer: str, peer_us: Sequence[float]
    ) -> Cost:
        return Cost(call, included, tuple(self._host_us(function)), peer, statistics.median(peer_us))

    def _host_us(self, function: Callable[[int], object]) -> list[float]:
        """Host time of a call, by batches that the device never makes wait."""
        samples = []
        for _ in range(self._num_samples + 1):
            torch.cuda.synchronize()
            started = perf_counter()
            for number in range(_CALLS_PER_BATCH):
                function(number)
            samples.append((perf_counter() - started) / _CALLS_PER_BATCH * 1e6)
        torch.cuda.synchronize()
        return samples[1:]

    def _marginal_us(self, manager: PlanManager, body: Callable[[int], None]) -> tuple[float, ...]:
        """Device time of one more time of what `body` does that many times: without what a graph costs by itself."""
        samples = []
        for times in (1, 1 + _PER_GRAPH):
            with manager.graph() as graph:
                body(times)
            samples.append(self._graph_us(graph))
            manager.release(graph)
        once = statistics.median(samples[0])
        return tuple((sample - once) / _PER_GRAPH for sample in samples[1])

    def _graph_us(self, graph: Graph) -> list[float]:
        for _ in range(3):
            graph.replay()
        return self._event_us(graph.replay)

    def _event_us(self, launch: Callable[[], object]) -> list[float]:
        """Device time of what `launch` launches."""
        samples = []
        for _ in range(self._num_samples):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            launch()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3)
        return samples


class _Owner:
    """An engine's per-step object."""


class _Call:
    """The tensors of decodes of one shape, over `num_sets` KV caches with the same tables.

    Owns: lens, block_tables, query, output, and the caches.
    """

    def __init__(self, shape: Shape, device: Device, num_sets: int = 1) -> None:
        where = device.name
        counts = [-(-length // _PAGE_SIZE) for length in shape.lens]
        generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(sum(counts), generator=generator).to(torch.int32)
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, own in enumerate(torch.split(pages, counts)):
            tables[row, : len(own)] = own
        self.lens = torch.tensor(shape.lens, dtype=torch.int32, device=where)
        self.block_tables = tables.to(where)
        query_shape = (len(counts), shape.num_q_heads, _HEAD_DIM)
        self.query = torch.randn(query_shape, dtype=torch.bfloat16, device=where)
        self.output = torch.full_like(self.query, torch.nan)
        cache_shape = (num_sets, sum(counts), _PAGE_SIZE, shape.num_kv_heads, _HEAD_DIM)
        self._keys, self._values = (torch.randn(cache_shape, dtype=torch.bfloat16, device=where) for _ in range(2))
        self._arguments = [
            (self.output, self.query, keys, values, self.block_tables, _SOFTMAX_SCALE)
            for keys, values in zip(self._keys, self._values, strict=True)
        ]

    def arguments(self, number: int) -> tuple[Any, ...]:
        """Of pa_decode behind the plan, with KV cache `number`."""
        return self._arguments[number]
