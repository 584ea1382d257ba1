"""A device, a backend and tensors without torch, for tests of the lifecycle: every rule in milliseconds.

Stricter than a GPU where that helps: addresses are never reused, a replay that needs a freed buffer or a collected
tensor raises, and tables that were never refreshed cannot be decoded.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any

from ..backends.base import FLAG_CLAMPED, FLAG_STALE
from ..device import ReleaseQueue, block_bytes
from ..errors import ConfigError, MintError
from ..planner import default_workgroup_budget, plan_tables, spec_capacity
from ..spec import DTYPE_BYTES, PlanSpec

#: Who is told, of which capture, and what stays alive until then.
_Watch = tuple[ReleaseQueue, int, object]

_tensor_addresses = count(1 << 40, 1 << 20)


class _Storage:
    """What the views of one tensor share: one Python value per index of axis 0, an address, a version."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.address = next(_tensor_addresses)
        self.version = 0


class FakeTensor:
    """A tensor's attributes, and one value per index of axis 0.

    values: for lengths the lengths; for an output what was decoded for each query row.
    strides: None = contiguous. inference: `_version` cannot be read, as under torch.inference_mode.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: str = "int32",
        device: str = "fake",
        *,
        values: Sequence[Any] | None = None,
        strides: Sequence[int] | None = None,
        requires_grad: bool = False,
        inference: bool = False,
    ) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = dtype
        self.device = device
        self.requires_grad = requires_grad
        self._inference = inference
        self._strides = self._contiguous_strides() if strides is None else tuple(strides)
        self._storage = _Storage([0] * self.shape[0] if values is None else list(values))
        self._start = 0
        if len(self._storage.values) != self.shape[0]:
            raise ValueError(f"{len(self._storage.values)} values do not fill axis 0 of {self.shape}")

    def _contiguous_strides(self) -> tuple[int, ...]:
        strides, step = [], 1
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent
        return tuple(reversed(strides))

    def _view(self, start: int, stop: int, storage: _Storage) -> FakeTensor:
        view = FakeTensor.__new__(FakeTensor)
        view.__dict__.update(self.__dict__)
        view.shape = (stop - start, *self.shape[1:])
        view._storage, view._start = storage, self._start + start
        return view

    def __getitem__(self, index: slice) -> FakeTensor:
        start, stop, step = index.indices(self.shape[0])
        if step != 1:
            raise IndexError("a FakeTensor is only sliced in steps of 1")
        return self._view(start, max(start, stop), self._storage)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def values(self) -> list[Any]:
        return self._storage.values[self._start : self._start + self.shape[0]]

    def write(self, values: Sequence[Any]) -> None:
        """Change the values in place, as an engine does: bumps the version of all views."""
        self._store(values)
        self._storage.version += 1

    def zero_(self) -> FakeTensor:
        return self.fill_(0)

    def fill_(self, value: Any) -> FakeTensor:
        self.write([value] * self.shape[0])
        return self

    def _store(self, values: Sequence[Any]) -> None:
        if len(values) != self.shape[0]:
            raise ValueError(f"{len(values)} values do not fill axis 0 of {self.shape}")
        self._storage.values[self._start : self._start + self.shape[0]] = values

    @property
    def _version(self) -> int:
        if self._inference:
            raise RuntimeError("Inference tensors do not track version counter.")
        return self._storage.version

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def is_contiguous(self) -> bool:
        return self._strides == self._contiguous_strides()

    def data_ptr(self) -> int:
        element_bytes = DTYPE_BYTES.get(self.dtype, 4)
        return self._storage.address + self._start * (self._strides or (1,))[0] * element_bytes

    def weak(self) -> Callable[[], FakeTensor]:
        """What a recorded launch keeps: the address, not the memory."""
        storage_ref = weakref.ref(self._storage)
        shell = self._view(0, self.shape[0], _Storage([]))

        def resolve() -> FakeTensor:
            storage = storage_ref()
            if storage is None:
                raise AssertionError("a replay needs a tensor that was collected after the capture")
            return shell._view(0, shell.shape[0], storage)

        return resolve


class FakeBuffer:
    """A block of bytes, or a slice of one. Tables live in `contents` of the whole block, keyed by their offset."""

    def __init__(self, device: FakeDevice, address: int, num_bytes: int, root: FakeBuffer | None = None) -> None:
        self.device = device
        self.address = address
        self.num_bytes = num_bytes
        self._whole = root  # None for a whole block: a reference to itself would keep it for the garbage collector
        self.freed = False
        self.contents: dict[int, Any] = {}
        self.used: tuple[int, int] = (
            device.stream,
            device.tick(),
        )  #: of a whole block: stream and time of its last use

    @property
    def root(self) -> FakeBuffer:
        """The block that this is a slice of, or is."""
        return self if self._whole is None else self._whole

    def __getitem__(self, index: slice) -> FakeBuffer:
        start, stop, step = index.indices(self.num_bytes)
        if step != 1 or stop < start or (index.stop is not None and index.stop > self.num_bytes):
            raise IndexError(f"{index} is no range of a buffer of {self.num_bytes} bytes")
        return FakeBuffer(self.device, self.address + start, stop - start, self.root)

    def __len__(self) -> int:
        return self.num_bytes

    def numel(self) -> int:
        return self.num_bytes

    def data_ptr(self) -> int:
        return self.address

    def read(self) -> Any:
        self.check_alive()
        if self.address not in self.root.contents:
            raise AssertionError(f"bytes at {self.address:#x} were never written: a decode of undefined tables")
        return self.root.contents[self.address]

    def write(self, content: Any) -> None:
        self.check_alive()
        self.root.contents[self.address] = content

    def check_alive(self) -> None:
        if self.root.freed:
            raise AssertionError(f"use after free: buffer at {self.root.address:#x}, {self.root.num_bytes} bytes")

    def weak(self) -> Callable[[], FakeBuffer]:
        root_ref, device, address, num_bytes = (weakref.ref(self.root), self.device, self.address, self.num_bytes)

        def resolve() -> FakeBuffer:
            root = root_ref()
            if root is None:
                raise AssertionError(f"use after free: the buffer of {address:#x} was collected")
            return FakeBuffer(device, address, num_bytes, root)

        return resolve


class FakeGraph:
    """A list of launches that `replay` runs again with what the operands hold by then."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.launches: list[tuple[Callable[..., None], tuple[Callable[[], Any], ...]]] = []
        self.captured = False
        self.capture_id = 0
        self._watches: list[_Watch] = []
        # Holds the list, never the graph: it must fire when the graph is collected.
        weakref.finalize(self, device.release_watches, self._watches)

    def replay(self) -> None:
        if not self.captured:
            raise RuntimeError("replay of a graph that holds no capture")
        for kernel, operands in self.launches:
            self.device.execute(kernel, tuple(resolve() for resolve in operands))

    def reset(self) -> None:
        self.launches.clear()
        self.captured = False
        self.capture_id = 0
        self.device.release_watches(self._watches)

    def watch(self, watch: _Watch) -> None:
        self._watches.append(watch)


class FakeDevice:
    """planlife.device.Device in plain Python.

    fail_at: the n-th allocation from now raises MemoryError, then None again.
    stream: the current stream, of all threads. A launch on a block that another stream used last, and that was not
    ordered after that use, raises: on a GPU both would run at once.
    live_bytes, high_water_bytes: in allocator blocks. log: ("allocate" | "free", block bytes, live bytes after).
    executed: names of the kernels that ran, eagerly or in a replay.
    """

    def __init__(self, name: str = "fake", num_compute_units: int = 8) -> None:
        self.name = name
        self.num_compute_units = num_compute_units
        self.fail_at: int | None = None
        self.stream = 0
        self.live_bytes = 0
        self.high_water_bytes = 0
        self.num_allocations = 0
        self.log: list[tuple[str, int, int]] = []
        self.executed: list[str] = []
        self._next_address = 1 << 20
        self._last_capture_id = 0
        self._clock = count(1)
        self._waits: dict[tuple[int, int], int] = {}  # (waiting stream, stream it waited for) -> when
        self._recording = threading.local()
        self._held_back: list[_Watch] | None = None

    def allocate(self, num_bytes: int) -> FakeBuffer:
        if self.capture_id():
            raise MintError("allocation while recording")
        self.num_allocations += 1
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at <= 0:
                self.fail_at = None
                raise MemoryError(f"injected: no room for {num_bytes} bytes")
        buffer = FakeBuffer(self, self._next_address, num_bytes)
        self._next_address += block_bytes(num_bytes)
        self._account("allocate", block_bytes(num_bytes))
        return buffer

    def free(self, buffer: FakeBuffer, stream: int) -> None:
        if buffer.root is not buffer:
            raise AssertionError("only whole buffers are freed, not slices")
        buffer.check_alive()
        if stream != buffer.used[0]:
            raise AssertionError(f"freed behind stream {stream}, but stream {buffer.used[0]} used it last")
        buffer.freed = True
        self._account("free", -block_bytes(buffer.num_bytes))

    def _account(self, event: str, change_bytes: int) -> None:
        self.live_bytes += change_bytes
        self.high_water_bytes = max(self.high_water_bytes, self.live_bytes)
        self.log.append((event, abs(change_bytes), self.live_bytes))

    def tick(self) -> int:
        """The time of something that happens now."""
        return next(self._clock)

    def is_disturbed(self) -> bool:
        return False

    def undisturbed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def as_called(self) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self) -> int:
        return self.stream

    def order_after(self, stream: int) -> None:
        if self.capture_id():
            raise AssertionError("a recording stream waited for work outside the graph")
        self._waits[self.stream, stream] = self.tick()

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        was, self._recording.is_relaxed = self.is_relaxed, True
        try:
            yield
        finally:
            self._recording.is_relaxed = was

    @property
    def is_relaxed(self) -> bool:
        """Whether this thread is inside `relaxed`."""
        return getattr(self._recording, "is_relaxed", False)

    def _use(self, block: FakeBuffer) -> None:
        stream, time = block.used
        if stream != self.stream and self._waits.get((self.stream, stream), 0) < time:
            raise AssertionError(f"stream {self.stream} uses a block while stream {stream} may still be using it")
        block.used = (self.stream, self.tick())

    def dtype(self, name: str) -> object:
        return name

    def inspect_lens(self, context_lens: Any) -> tuple[int, int, int | None]:
        if not isinstance(context_lens, FakeTensor):
            raise ConfigError(f"context_lens must be a tensor, got {type(context_lens).__name__}.")
        for what, found, wanted in (
            ("dtype", context_lens.dtype, "int32"),
            ("device", context_lens.device, self.name),
            ("number of axes", context_lens.ndim, 1),
            ("contiguity", context_lens.is_contiguous(), True),
            ("requires_grad", context_lens.requires_grad, False),
        ):
            if found != wanted:
                raise ConfigError(f"context_lens: {what} is {found}, wanted {wanted}.")
        try:
            version: int | None = context_lens._version
        except RuntimeError:
            version = None
        return len(context_lens), context_lens.data_ptr(), version

    def capture_id(self) -> int:
        graph = self._graph()
        return 0 if graph is None else graph[1]

    def _graph(self) -> tuple[FakeGraph, int] | None:
        return getattr(self._recording, "graph", None)

    def release_queue(self) -> ReleaseQueue:
        return ReleaseQueue()

    def watch_capture(self, queue: ReleaseQueue, keep: object) -> int:
        recording = self._graph()
        if recording is None:
            raise AssertionError("watch_capture is only called while recording")
        graph, capture_id = recording
        graph.watch((queue, capture_id, keep))
        return capture_id

    def release_watches(self, watches: list[_Watch]) -> None:
        """Tell who watched that their graph is gone: now, or when the device is done (`busy`)."""
        if self._held_back is not None:
            self._held_back.extend(watches)
        else:
            for queue, capture_id, _ in watches:
                queue.append(capture_id)
        watches.clear()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Replays are in flight in the body: releases arrive at its end."""
        self._held_back = []
        try:
            yield
        finally:
            watches, self._held_back = self._held_back, None
            self.release_watches(watches)

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def record(self, graph: FakeGraph, **options: Any) -> Iterator[FakeGraph]:
        if self.capture_id():
            raise RuntimeError("this thread records already")
        if graph.captured:
            raise RuntimeError("the graph holds a capture: reset it first")
        self._last_capture_id += 1
        self._recording.graph = (graph, self._last_capture_id)
        try:
            yield graph
        except BaseException:
            self._recording.graph = None
            graph.reset()
            raise
        graph.capture_id = self.capture_id()
        self._recording.graph = None
        graph.captured = True

    def capture_of(self, graph: FakeGraph) -> int | None:
        return graph.capture_id

    def may_be_last_capture(self, capture_id: int) -> bool:
        return capture_id == self._last_capture_id

    def reset(self, graph: FakeGraph) -> None:
        graph.reset()

    def replay(self, graph: FakeGraph) -> None:
        graph.replay()

    def launch(self, kernel: Callable[..., None], *operands: Any) -> None:
        """Run `kernel(*operands)`, or put it into the graph that this thread records: then nothing runs."""
        recording = self._graph()
        if recording is None:
            self.execute(kernel, operands)
        else:
            recording[0].launches.append((kernel, tuple(operand.weak() for operand in operands)))

    def execute(self, kernel: Callable[..., None], operands: Sequence[Any]) -> None:
        for operand in operands:
            if isinstance(operand, FakeBuffer):
                operand.check_alive()
                self._use(operand.root)
        kernel(*operands)
        self.executed.append(getattr(kernel, "func", kernel).__name__.strip("_"))

    def fill(self, tensor: FakeTensor, value: float) -> None:
        tensor.fill_(value)

    def empty_lens(self, context_lens: FakeTensor) -> None:
        context_lens._store([0] * len(context_lens))

    def zeros_flags(self, num_words: int) -> FakeTensor:
        return FakeTensor(num_words, "int64", self.name)

    def read_flags(self, flags: FakeTensor) -> Sequence[int]:
        words = flags.values
        flags._store([0] * len(words))
        return words


class FakePlan:
    """One table set: its numbers, and the slice of bytes where its tables are."""

    def __init__(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: FakeBuffer) -> None:
        self.spec = spec
        self.plan_rows = plan_rows
        self.num_compute_units = num_compute_units
        self.buffer = buffer

    @property
    def work_info(self) -> list[list[int]]:
        tables: tuple[list[list[int]], list[list[int]], bool] = self.buffer.read()
        return tables[0]

    @property
    def reduce_info(self) -> list[list[int]]:
        tables: tuple[list[list[int]], list[list[int]], bool] = self.buffer.read()
        return tables[1]


class FakeBackend:
    """planlife.backends.base.Backend on lists. A decode writes, per query row, the length that its tables hold; its lse
    is that length too, and -inf for 0.

    spec_reasons, step_reasons: what refuse_spec and refuse_step answer. default_budget: what default_workgroup_budget
    answers, None = 2 x compute units. calls: how often each method was called.
    compiled: (spec, plan_rows) of every compile. call_reasons: what check_call raises.
    """

    name = "fake"

    def __init__(
        self,
        max_plan_rows: int | None = None,
        *,
        spec_reasons: Sequence[str] = (),
        step_reasons: Sequence[str] = (),
        call_reasons: Sequence[str] = (),
        default_budget: Callable[[PlanSpec, Any], int] | None = None,
    ) -> None:
        self.max_plan_rows = max_plan_rows
        self.spec_reasons = list(spec_reasons)
        self.step_reasons = list(step_reasons)
        self.call_reasons = list(call_reasons)
        self.default_budget = default_budget
        self.calls: Counter[str] = Counter()
        self.compiled: list[tuple[PlanSpec, int]] = []
        self._fault: tuple[str | None, int, Exception] | None = None

    def inject(self, at: int = 1, *, method: str | None = None, error: Exception | None = None) -> None:
        """The `at`-th call from now, of `method` or of any, raises; calls after it work again."""
        self._fault = (method, at, RuntimeError("injected fault") if error is None else error)

    def _count(self, method: str) -> None:
        self.calls[method] += 1
        if self._fault is None or self._fault[0] not in (None, method):
            return
        name, at, error = self._fault
        self._fault = None if at <= 1 else (name, at - 1, error)
        if at <= 1:
            raise error

    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        self._count("refuse_spec")
        return self.spec_reasons

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        self._count("refuse_step")
        return self.step_reasons

    def check_call(self, spec: PlanSpec, *call: Any) -> None:
        self._count("check_call")
        if self.call_reasons:
            raise ConfigError("; ".join(self.call_reasons))

    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        self._count("default_workgroup_budget")
        if self.default_budget is not None:
            return self.default_budget(spec, device)
        return default_workgroup_budget(device.num_compute_units)

    def excluded(self, device: Any) -> Mapping[str, str]:
        return {}

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        self._count("table_bytes")
        return _table_bytes(spec, plan_rows, num_compute_units)

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        self._count("scratch_bytes")
        return _scratch_bytes(spec, plan_rows, num_compute_units)

    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        self._count("compile")
        if device.capture_id():
            raise AssertionError("compile while recording")
        if not device.is_relaxed:
            raise AssertionError("compile outside Device.relaxed(): loading code kills another thread's capture")
        self._check_rows(plan_rows)
        self.compiled.append((spec, plan_rows))
        return 1

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> FakePlan:
        self._count("make_tables")
        self._check_rows(plan_rows)
        num_bytes = _table_bytes(spec, plan_rows, num_compute_units)
        if len(buffer) < num_bytes:
            raise AssertionError(f"make_tables got {len(buffer)} bytes, table_bytes said {num_bytes}")
        return FakePlan(spec, plan_rows, num_compute_units, buffer)

    def _check_rows(self, plan_rows: int) -> None:
        if self.max_plan_rows is not None and plan_rows > self.max_plan_rows:
            raise AssertionError(f"{plan_rows} rows in one table set, above the limit of {self.max_plan_rows}")

    def refresh(self, tables: FakePlan, context_lens: FakeTensor | None, num_rows: int) -> None:
        self._count("refresh")
        if context_lens is not None and not num_rows <= min(tables.plan_rows, len(context_lens)):
            raise AssertionError(
                f"refresh of {num_rows} rows, of {len(context_lens)} lengths, into {tables.plan_rows} plan rows"
            )
        kernel = partial(_refresh, tables.spec, tables.plan_rows, tables.num_compute_units, num_rows)
        operands = (tables.buffer,) if context_lens is None else (tables.buffer, context_lens)
        tables.buffer.device.launch(kernel, *operands)

    def decode(
        self,
        tables: FakePlan,
        scratch: FakeBuffer,
        output: FakeTensor,
        query: FakeTensor,
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        softmax_scale: float,
        key_scale: Any,
        value_scale: Any,
        sinks: Any,
        lse: FakeTensor | None,
    ) -> None:
        self._count("decode")
        needed = _scratch_bytes(tables.spec, tables.plan_rows, tables.num_compute_units)
        if len(scratch) < needed:
            raise AssertionError(f"decode got {len(scratch)} bytes of scratch and needs {needed}")
        if len(output) > tables.plan_rows * tables.spec.query_length:
            raise AssertionError(f"{len(output)} query rows for a table set of {tables.plan_rows} rows")
        operands = [tables.buffer, scratch, output, query]
        if lse is not None:
            if len(lse) != len(output):
                raise AssertionError(f"lse has {len(lse)} rows for {len(output)} query rows")
            operands.append(lse)
        tables.buffer.device.launch(partial(_decode, tables.spec), *operands)

    def sanitize(
        self, tables: FakePlan, context_lens: FakeTensor, num_rows: int, flags: FakeTensor, max_tokens: int
    ) -> None:
        self._count("sanitize")
        kernel = partial(_sanitize, tables.plan_rows, num_rows, max_tokens)
        tables.buffer.device.launch(kernel, tables.buffer, context_lens, flags)


def _table_bytes(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
    return 16 * spec_capacity(spec, plan_rows, num_compute_units) + 12 * plan_rows


def _scratch_bytes(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
    slots = spec.num_kv_heads * spec_capacity(spec, plan_rows, num_compute_units)
    return slots * spec.query_rows_per_kv_head * (8 + 4 * spec.head_dim)


def _planned_lens(plan_rows: int, num_rows: int, lens: Sequence[int]) -> list[int]:
    planned = [max(length, 0) for length in lens[:num_rows]]
    return planned + [0] * (plan_rows - len(planned))


def _refresh(
    spec: PlanSpec,
    plan_rows: int,
    num_compute_units: int,
    num_rows: int,
    buffer: FakeBuffer,
    context_lens: FakeTensor | None = None,
) -> None:
    lens = [] if context_lens is None else context_lens.values
    tables = plan_tables(
        _planned_lens(plan_rows, num_rows, lens),
        num_kv_heads=spec.num_kv_heads,
        num_cu=num_compute_units,
        max_partitions=spec.max_partitions,
        workgroup_budget=spec.workgroup_budget,
        sliding_window=spec.sliding_window,
        query_length=spec.query_length,
        max_context_tokens=spec.max_context_tokens,
    )
    emptied = context_lens is None
    buffer.write((*tables, emptied))


def _lens_in(buffer: FakeBuffer) -> list[int]:
    """The length that each row of the tables was planned with."""
    work_info, reduce_info, _ = buffer.read()
    return [work_info[slot][3] if tasks else 0 for slot, tasks in reduce_info]


def _decode(
    spec: PlanSpec,
    buffer: FakeBuffer,
    scratch: FakeBuffer,
    output: FakeTensor,
    query: FakeTensor,
    lse: FakeTensor | None = None,
) -> None:
    lens = _lens_in(buffer)
    decoded = [lens[i // spec.query_length] for i in range(len(output))]
    output._store(decoded)
    if lse is not None:
        lse._store([length or -math.inf for length in decoded])


def _sanitize(
    plan_rows: int, num_rows: int, max_tokens: int, buffer: FakeBuffer, context_lens: FakeTensor, flags: FakeTensor
) -> None:
    words, lens = flags.values, context_lens.values[:num_rows]
    is_current = _lens_in(buffer) == _planned_lens(plan_rows, num_rows, lens)
    words[FLAG_STALE] += not (is_current or buffer.read()[2])
    words[FLAG_CLAMPED] += sum(length > max_tokens for length in lens)
    flags._store(words)
