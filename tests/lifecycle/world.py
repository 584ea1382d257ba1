"""A small model world for scenarios: caches, tables, length buffers, and the dense answer to compare with.

On a CPU with emulated graphs; tests/gpu runs the same scenarios on CUDA graphs by setting DEVICE. A suite of another
backend sets World.backend, and World.kind where that backend reads other caches.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, Step, StepPlan
from planlife.backends.torch_backend import TorchBackend
from planlife.emulated_graph import current_stream
from planlife.testing import LAYOUTS, EmulatedGraph, EmulatedStream, lay_out, record, reference_decode, row_errors
from planlife.torch_device import CpuDevice, resolve_device
from tests.eventually import EVENTUALLY_S

DEVICE = "cpu"  #: where worlds are made that are not told
NUM_PAGES, PAGE, MAX_PAGES = 160, 16, 40

#: Where plan_for is called: before each replay, or inside the recording.
BEFORE_REPLAY, IN_GRAPH = "before replay", "in graph"
both_styles = pytest.mark.parametrize("style", [BEFORE_REPLAY, IN_GRAPH])

Result = TypeVar("Result")


@dataclass(frozen=True)
class Kind:
    """A kind of cache, of which worlds are made.

    layout: a name of LAYOUTS. kv_dtype, scales, head_dim: as of PlanSpec.
    layouts: all that may be had with this dtype. other_page_size: one besides PAGE that may be had.
    fp8: what an FP8 cache is, whatever this kind's own is.
    finite_values: V must be finite in all of a row's own pages, also behind its last token.
    row_bound: the largest relative error of a row that rounding explains.
    """

    layout: str = "nhd"
    kv_dtype: str = "bfloat16"
    scales: str = "none"
    head_dim: int = 16
    layouts: tuple[str, ...] = ("nhd", "hnd", "packed")
    other_page_size: int = 1
    fp8: str = "float8_e4m3fn"
    finite_values: bool = False
    row_bound: float = 1e-2  # BF16

    def spec(self, **changes: Any) -> PlanSpec:
        """A small site over such caches."""
        fields: dict[str, Any] = {
            "num_q_heads": 4,
            "num_kv_heads": 2,
            "head_dim": self.head_dim,
            "page_size": PAGE,
            "max_context_tokens": PAGE * MAX_PAGES,
            "workgroup_budget": 24,
            "kv_dtype": self.kv_dtype,
            "kv_layout": LAYOUTS[self.layout][0],
            "scales": self.scales,
        }
        return PlanSpec(**{**fields, **changes})

    def caches(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Such caches of these numbers, which come as "nhd" caches do."""
        dtype = getattr(torch, self.kv_dtype)
        return lay_out(keys.to(dtype), values.to(dtype), self.layout)

    def make_scales(self, spec: PlanSpec, generator: torch.Generator, device: str) -> dict[str, torch.Tensor]:
        """key_scale and value_scale of a call; those of page 0 are NaN, where each token has its own."""
        if self.scales == "none":
            return {}
        shape = (1,) if self.scales == "per_tensor" else (NUM_PAGES, spec.num_kv_heads, spec.page_size)
        scales = {name: torch.rand(shape, generator=generator) + 0.25 for name in ("key_scale", "value_scale")}
        if self.scales == "per_token":
            for scale in scales.values():
                scale[0] = torch.nan
        return {name: scale.to(device) for name, scale in scales.items()}


def new_device(num_compute_units: int) -> Any:
    """A device of the worlds' kind, with as many compute units as a test counts on."""
    device = resolve_device(DEVICE)
    device.num_compute_units = num_compute_units  # type: ignore[attr-defined]
    return device


def backend_class() -> Any:
    """Of the backend that worlds are made with here."""
    if not isinstance(World.backend, str):
        return type(World.backend)
    if World.backend != "triton":
        return TorchBackend
    from planlife.backends.triton_backend import TritonBackend

    return TritonBackend


def backend_name() -> str:
    """Of the backend that worlds are made with here."""
    return str(backend_class().name)


def fallback_name() -> str:
    """Of the fallback that shares that backend's kernels, or of one that reads the same caches."""
    return "triton" if backend_name() == "triton" else "torch"


def limited_backend(max_plan_rows: int | None) -> Any:
    """The worlds' backend, with a limit on the rows of a table set; None: its own."""
    return backend_class()(**({} if max_plan_rows is None else {"max_plan_rows": max_plan_rows}))


def backend_with(mixin: type) -> Any:
    """The worlds' backend with what a test does to its calls."""
    return type(mixin.__name__, (mixin, backend_class()), {})()


def counters_of(manager: PlanManager) -> dict[str, int]:
    """Of now: on a GPU the sanitizer's arrive once the device has caught up."""
    for _ in range(2 * (DEVICE != "cpu")):  # what one report sets out to fetch, the next one has
        manager.report()
        torch.cuda.synchronize()
    return manager.report().counters


class Owner:
    """A step's metadata object."""


def scale_of(spec: PlanSpec) -> float:
    """What a site's layers are called with."""
    return spec.softmax_scale or spec.head_dim**-0.5


def small_spec(**changes: Any) -> PlanSpec:
    """A site over the worlds' kind of cache."""
    return World.kind.spec(**changes)


class World:
    """One layer's worth of caches and persistent engine buffers, and a manager over them.

    Unowned pages hold NaN, block tables end in -1, outputs are poisoned with NaN before each decode.
    """

    backend: Any = "auto"  #: of worlds whose test names none; other suites run these tests over theirs
    kind = Kind()

    def __init__(
        self,
        *,
        kind: Kind | None = None,
        rows: int = 8,
        seed: int = 0,
        sites: Any = None,
        device: str | None = None,
        device_object: Any = None,
        warm: bool = False,
        **manager_options: Any,
    ) -> None:
        self.kind = kind = kind or World.kind
        self.device = device = device or DEVICE
        self.generator = torch.Generator().manual_seed(seed)
        self.sites = sites or {"default": kind.spec()}
        self.spec: PlanSpec = next(iter(self.sites.values()))
        # As on a GPU, no graph object tells which capture it holds.
        manager_device = device_object or (CpuDevice(tells_captures=False) if device == "cpu" else device)
        options: dict[str, Any] = {"ladder": CapacityLadder.powers_of_two(rows), "device": manager_device}
        options.update({"backend": self.backend, **manager_options})
        self.manager = PlanManager(self.sites, **options)
        self.rows = rows
        self.lens = self.lens_buffer()
        self.tables = torch.full((rows, MAX_PAGES), -1, dtype=torch.int32, device=device)
        shape = (NUM_PAGES, PAGE, self.spec.num_kv_heads, self.spec.head_dim)
        keys, values = (torch.randn(shape, generator=self.generator) for _ in range(2))
        keys[0], values[0] = torch.nan, torch.nan
        self.key_cache, self.value_cache = (cache.to(device) for cache in kind.caches(keys, values))
        self.scales = kind.make_scales(self.spec, self.generator, device)
        self.query, self.output = self.buffers(rows)
        if warm:
            with self.manager.capture_phase():
                self.manager.warm()

    def lens_buffer(self, rows: int | None = None) -> torch.Tensor:
        """A persistent length buffer."""
        return torch.zeros(rows or self.rows, dtype=torch.int32, device=self.device)

    def buffers(self, rows: int, query_length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(query, poisoned output) for `rows` rows."""
        length = query_length or self.spec.query_length
        shape = (rows * length, self.spec.num_q_heads, self.spec.head_dim)
        query = torch.randn(shape, generator=self.generator).to(self.device, torch.bfloat16)
        return query, torch.full_like(query, torch.nan)

    def set_lens(self, lens: list[int], into: torch.Tensor | None = None, tables: torch.Tensor | None = None) -> None:
        """Write lengths into the persistent buffer, zeros behind them, and give each row fresh random pages."""
        into = self.lens if into is None else into
        tables = self.tables if tables is None else tables
        with torch.inference_mode(into.is_inference()):
            into.zero_()
            into[: len(lens)] = torch.tensor(lens, dtype=torch.int32, device=self.device)
        tables.fill_(-1)
        for row, length in enumerate(lens):
            num_pages = min(-(-length // PAGE), tables.shape[1])
            pages = torch.randperm(NUM_PAGES - 1, generator=self.generator)[:num_pages] + 1
            tables[row, :num_pages] = pages.to(self.device, torch.int32)

    def random_lens(self, rows: int, longest: int = 500) -> list[int]:
        """Uneven lengths, some empty, some at tile edges."""
        picks = torch.randint(0, 10, (rows,), generator=self.generator).tolist()
        lens = torch.randint(1, longest + 1, (rows,), generator=self.generator).tolist()
        edges = {0: 0, 1: 255, 2: 256, 3: 257, 4: 1}
        return [min(edges.get(pick, length), longest) for pick, length in zip(picks, lens, strict=True)]

    def step(self, rows: int | None = None, *, lens: torch.Tensor | None = None, **fields: Any) -> Step:
        lens = self.lens if lens is None else lens
        owner = fields.setdefault("owner", Owner())
        self.owners = [*getattr(self, "owners", []), owner][-64:]  # as long as an engine keeps a step's metadata
        return Step(lens if rows is None or rows == lens.shape[0] else lens[:rows], **fields)

    def decode(
        self,
        plan: StepPlan,
        query: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        tables: torch.Tensor | None = None,
        **extras: Any,
    ) -> torch.Tensor:
        """One layer; its query and output are by default as many rows of the world's as the plan can take."""
        rows = self.rows if plan.route == "dummy" else plan.class_rows or plan.rows
        end = rows * self.spec.query_length
        query = self.query[:end] if query is None else query
        output = self.output[:end] if output is None else output
        tables = self.tables if tables is None else tables
        result: torch.Tensor = self.manager.pa_decode(
            plan,
            output,
            query,
            self.key_cache,
            self.value_cache,
            tables,
            scale_of(self.spec),
            **{**self.scales, **extras},
        )
        return result

    def eager(self, step: Step, **call: torch.Tensor) -> torch.Tensor:
        """One eager layer of `step`, into a poisoned output."""
        call.get("output", self.output).fill_(torch.nan)
        return self.decode(self.manager.plan_for(step), **call)

    def capture(self, step: Step, style: str, layers: Callable[[StepPlan], object] | None = None, g: Any = None) -> Any:
        """The graph of one layer of `step`, or of `layers(plan)`; its output is poisoned before and after."""
        layers = layers or self.decode
        plan = self.manager.plan_for(step) if style == BEFORE_REPLAY else None
        self.output.fill_(torch.nan)
        with self.manager.graph(g) as g:
            layers(plan or self.manager.plan_for(step))
        self.output.fill_(torch.nan)
        return g

    def replay(self, g: Any, step: Step, style: str = IN_GRAPH) -> torch.Tensor:
        """Replay `g` for `step` as an engine of that style does, into a poisoned output."""
        if style == BEFORE_REPLAY:
            self.manager.plan_for(step)
        self.output.fill_(torch.nan)
        self.manager.replay(g, step)
        return self.output

    def new_graph(self) -> Any:
        """A graph object of the engine's own."""
        return EmulatedGraph() if self.device == "cpu" else torch.cuda.CUDAGraph()

    def record(self, g: Any, **options: Any) -> AbstractContextManager[Any]:
        """A capture that the engine opens itself, past the manager."""
        return record(g, **options) if self.device == "cpu" else _record_cuda(g, **options)

    def current_stream(self) -> Any:
        """This thread's, to hand to another one."""
        return current_stream() if self.device == "cpu" else torch.cuda.current_stream()

    def new_stream(self) -> Any:
        """A stream of the engine's own, which can record."""
        return EmulatedStream() if self.device == "cpu" else torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What makes it the current stream of a thread."""
        return stream if self.device == "cpu" else torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def is_empty(self, g: Any) -> bool:
        """Whether a graph holds nothing to replay."""
        if self.device == "cpu":
            return bool(g.num_ops == 0)
        try:
            g.pool()
        except RuntimeError:
            return True
        return False

    def settle(self) -> None:
        """What was dropped is collected, and the device has had time to finish and to tell. Waits for nothing, so that
        it may be called while somebody records."""
        gc.collect()
        if self.device != "cpu":
            from planlife.cuda_device import drop_what_is_gone

            time.sleep(0.02)
            drop_what_is_gone()

    @contextmanager
    def raises_soon(self, error: type[Exception], match: str) -> Iterator[None]:
        """What the body's decodes did wrong is raised by it; on a GPU by a call after it, once the device told."""
        with pytest.raises(error, match=match):
            yield
            for _ in range(3 * (self.device != "cpu")):
                torch.cuda.synchronize()
                self.manager.plan_for(self.step(dummy=True))

    def elsewhere(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on a thread of its own, which records nothing; its exception is raised here."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result(timeout=EVENTUALLY_S)

    def counters(self) -> dict[str, int]:
        return counters_of(self.manager)

    def expected(
        self,
        query: torch.Tensor | None = None,
        lens: torch.Tensor | None = None,
        tables: torch.Tensor | None = None,
        spec: PlanSpec | None = None,
    ) -> torch.Tensor:
        """float64: the dense answer for the lengths that are in the buffer now."""
        spec = spec or self.spec
        query = self.query if query is None else query
        lens = self.lens if lens is None else lens
        tables = self.tables if tables is None else tables
        return reference_decode(
            query.cpu(),
            self.key_cache.cpu(),
            self.value_cache.cpu(),
            tables.cpu(),
            lens.cpu(),
            scale_of(spec),
            query_length=spec.query_length,
            sliding_window=spec.sliding_window,
            kv_layout=spec.kv_layout,
            **{name: scale.cpu() for name, scale in self.scales.items()},
        )

    def assert_right(self, output: torch.Tensor, expected: torch.Tensor, query_length: int = 1) -> None:
        """Row by row: a global norm would hide a wrong long row behind short ones. Rows beyond `expected` are zeros."""
        errors = row_errors(output, expected, query_length)
        assert (errors <= self.kind.row_bound).all(), f"relative error per row: {errors.tolist()}"

    def assert_same(self, output: torch.Tensor, other: torch.Tensor) -> None:
        """Two decodes of the same lengths. On a GPU torch's kernels add up tiles in any order."""
        if self.device == "cpu" or backend_name() == "triton":
            assert torch.equal(output, other)
        else:
            self.assert_right(output, other.to("cpu", torch.float64))

    def assert_wrong(self, output: torch.Tensor, expected: torch.Tensor, query_length: int = 1) -> None:
        """Positive control: the comparison does see another step's work."""
        assert not (row_errors(output, expected, query_length) <= self.kind.row_bound).all()


@contextmanager
def _record_cuda(g: torch.cuda.CUDAGraph, **options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """As an engine does that resets the graph of a capture that failed: torch leaves a part of it that replays."""
    try:
        with torch.cuda.graph(g, **options):
            yield g
    except BaseException:
        g.reset()
        raise
