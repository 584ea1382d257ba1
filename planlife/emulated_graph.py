"""CUDA-graph semantics for plain torch code on a CPU: every rule about graphs is testable without a GPU.

Like a CUDA stream that records, a capture executes nothing. Each op is run on meta tensors to learn the
shapes of its results; the real tensors it would have written are left alone, and the results are storages
full of 0xFF. A replay runs the ops into those same storages.

Every torch tensor counts as a device tensor here: host values are Python numbers and numpy arrays.
Random ops draw from torch's generator anew at every replay, and not at capture.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .ambient import OwnMode, plain
from .identity import Singular

aten = torch.ops.aten

_CAPTURE_ERROR_MODES = ("global", "thread_local", "relaxed")

#: Allocation without a kernel: nothing to replay, and what one replay left in the block the next one finds.
_EMPTY_OPS = frozenset(
    (aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided)
)

#: Reads of a tensor's values by the host that the dispatcher does not see on a CPU, or sees too late to name.
_HOST_READS: dict[Any, str] = {
    getattr(torch.Tensor, name): f"Tensor.{name}"
    for name in (
        "cpu",
        "item",
        "numpy",
        "tolist",
        "is_nonzero",
        "__array__",
        "__bool__",
        "__complex__",
        "__contains__",
        "__float__",
        "__format__",
        "__index__",
        "__int__",
        "__repr__",
    )
}

_last_capture_id = 0
_num_recording = 0
#: Guards the count, and which capture a stream records.
_num_recording_lock = threading.Lock()


class EmulatedStream:
    """What the threads of one capture share; for EmulatedGraph what a torch.cuda.Stream is.

    `with stream:` makes it the current stream of this thread, as `torch.cuda.stream(stream)` does: what the thread
    launches inside is recorded into the capture that the stream records, on whichever thread that was opened, and runs
    at once while the stream records none. So a thread that is still inside when the capture ends launches eagerly from
    then on. Streams order nothing: what is not recorded is done by the time the call returns. A thread that records one
    capture cannot join another: RuntimeError.
    """

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None

    @property
    def capture_id(self) -> int:
        """Id of the capture that this stream records, 0 when it records none."""
        recorder = self._recorder
        return 0 if recorder is None else recorder.capture_id

    def __enter__(self) -> EmulatedStream:
        recorder, own = self._recorder, _thread.recorder_of_any_stream()
        if recorder is not None and own is not None and own is not recorder:
            raise _nested(own)
        if len(_thread.streams) == 1:
            _thread.modes = [mode() for mode in (_HostReadGuard, _OpTap)]
            for mode in _thread.modes:
                mode.__enter__()
        _thread.streams.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _thread.streams.pop()
        if len(_thread.streams) == 1:
            for mode in reversed(_thread.modes):
                mode.__exit__(None, None, None)


#: Records nothing: where a thread launches that is in no stream.
_default_stream = EmulatedStream()


class _ThreadState(threading.local):
    """The streams that this thread entered, the current one last; whether `unrecorded`; the capture it opened."""

    def __init__(self) -> None:
        self.streams = [_default_stream]
        #: Modes belong to one thread each; all of them hand what they see to the recorder of the current stream.
        self.modes: list[Any] = []
        self.is_unrecorded = False
        self.opened: _Recorder | None = None

    def recorder(self) -> _Recorder | None:
        """Who records what this thread launches now."""
        return None if self.is_unrecorded else self.streams[-1]._recorder

    def recorder_of_any_stream(self) -> _Recorder | None:
        """The capture that this thread takes part in, through its current stream or one that it goes back to."""
        recorders = (stream._recorder for stream in self.streams)
        return next((recorder for recorder in recorders if recorder is not None), self.opened)


_thread = _ThreadState()


def current_capture_id() -> int:
    """Process-unique id of the capture that this thread is recording, 0 when it records none."""
    # A thread-local costs several times a global: ask first whether anybody records at all.
    if not _num_recording:
        return 0
    return _thread.streams[-1].capture_id


def current_stream() -> EmulatedStream:
    """The stream that this thread launches on, to hand to threads that are to join its capture.

    As torch.cuda.current_stream(): inside `record` the stream that records, inside `with stream` that one, else a
    default stream, which cannot record.
    """
    return _thread.streams[-1]


def last_capture_id() -> int:
    """Id of the process's last capture, 0 before the first. Ids count up."""
    return _last_capture_id


def watch_current_capture(callback: Callable[[], object]) -> None:
    """Call `callback` once when the graph being recorded is reset or collected, or its capture fails.

    A CUDA user object. The callback may run in a garbage collection: it must be trivial, and must not
    reference the graph, which would then never be collected.

    Raises RuntimeError if this thread records nothing.
    """
    recorder = _thread.recorder()
    if recorder is None or not recorder.watch(callback):
        raise RuntimeError("watch_current_capture() needs a capture, and this thread records none.")


def launch(
    fn: Callable[..., object], *args: Any, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
) -> None:
    """Run, or record, a kernel that torch's dispatcher does not see: `fn(*args)`.

    Tensors among `args` (also in lists, tuples and dicts) are held as those of other ops: `fn` must reach its
    tensors through them, not through a closure, or it keeps them alive. Numbers are frozen.
    reads, writes: tensors that `fn` touches without taking them as arguments; replay refuses a freed one.

    Capture: recorded, not run. Syncs: no. Allocates: no.
    """
    recorder = _thread.recorder() if _num_recording else None
    if recorder is None or not recorder.record_launch(fn, args, (*reads, *writes)):
        plain(fn)(*args)


@contextmanager
def unrecorded() -> Iterator[None]:
    """What this thread does inside runs at once and is not recorded, as on another stream in relaxed mode.

    `current_capture_id()` does not change.
    """
    was_unrecorded, _thread.is_unrecorded = _thread.is_unrecorded, True
    try:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            yield
    finally:
        _thread.is_unrecorded = was_unrecorded


@contextmanager
def record(
    graph: EmulatedGraph,
    *,
    pool: object = None,
    stream: EmulatedStream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[EmulatedGraph]:
    """Record what the body launches into `graph`; for EmulatedGraph what torch.cuda.graph is.

    stream: records, and is the body's current stream; None makes one. What other threads launch inside `with stream`
    is recorded too.

    A body that raises leaves `graph` empty.

    Raises RuntimeError if this thread or `stream` records already, for the default stream, if `graph` owns a capture,
    or at the end if an op that CUDA refuses was called on any thread and its error did not leave the body. TypeError
    for another kind of stream.
    """
    if stream is None:
        stream = EmulatedStream()
    elif not isinstance(stream, EmulatedStream):
        raise TypeError(f"an EmulatedGraph is recorded on an EmulatedStream, got {type(stream).__name__}.")
    elif stream is _default_stream:
        raise RuntimeError("the default stream cannot record. Make one: EmulatedStream().")
    with stream:
        graph.capture_begin(pool=pool, capture_error_mode=capture_error_mode)
        try:
            yield graph
        except BaseException:
            graph._abandon()
            raise
        graph.capture_end()


class EmulatedGraph(Singular):
    """A CUDA graph on a CPU, with the methods of torch.cuda.CUDAGraph.

    Owns: the storages that its ops created while recording; their addresses are stable until `reset()`.
    Borrows: all other storages, weakly. A replay that needs one that was freed raises RuntimeError.
    """

    _ONE_ONLY = (
        "an EmulatedGraph cannot be copied or pickled: addresses are baked into it. Record a new one, and keep graphs "
        "off the objects that are copied."
    )

    def __init__(self) -> None:
        self._program: _Program | None = None
        self._recorder: _Recorder | None = None
        self._fire: weakref.finalize[..., EmulatedGraph] | None = None
        self._capture_id = 0

    @property
    def capture_id(self) -> int:
        """Id of the capture that this graph records or holds, 0 when it is empty."""
        return self._capture_id

    @property
    def holds_capture(self) -> bool:
        """Whether a capture into it has ended well."""
        return self._program is not None

    @property
    def num_ops(self) -> int:
        """Kernels that one replay runs."""
        return 0 if self._program is None else len(self._program.ops)

    def pool(self) -> tuple[int, int]:
        """An opaque handle, for the `pool` of another capture; memory is never shared on a CPU."""
        return (0, self._capture_id)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Start to record on the current stream, or on a new one where that is the default.

        Raises RuntimeError, see `record`.
        """
        global _last_capture_id, _num_recording
        if capture_error_mode not in _CAPTURE_ERROR_MODES:
            raise RuntimeError(
                f"capture_error_mode must be one of {', '.join(_CAPTURE_ERROR_MODES)}, got {capture_error_mode!r}."
            )
        own = _thread.recorder_of_any_stream()
        if own is not None:
            raise _nested(own)
        if self._capture_id:
            raise RuntimeError(
                f"this graph already owns capture {self._capture_id}. Call reset() on it, or use a new graph."
            )
        stream = current_stream()
        is_private = stream is _default_stream
        if is_private:
            stream = EmulatedStream()
        with _num_recording_lock:
            if stream._recorder is not None:  # another thread was faster
                raise _nested(stream._recorder)
            _last_capture_id += 1
            recorder = stream._recorder = _Recorder(_last_capture_id, stream, is_private)
            _num_recording += 1
        self._capture_id = recorder.capture_id
        # The finaliser holds the list of callbacks and not the graph, or the graph could never be collected.
        self._fire = weakref.finalize(self, _fire_all, recorder.callbacks)
        self._recorder = _thread.opened = recorder
        if is_private:
            stream.__enter__()

    def capture_end(self) -> None:
        """Make the graph ready to replay. Raises RuntimeError if the capture was invalidated."""
        recorder = self._stop()
        if recorder.refusal is not None:
            self._clear()
            raise RuntimeError(f"the capture was invalidated and the graph is empty: {recorder.refusal}")
        self._program = recorder.program

    def replay(self) -> None:
        """Run the recorded ops into the recorded storages.

        Raises RuntimeError, before anything ran, if the graph is empty, if this thread is recording, or if a
        storage that the graph does not own was freed or moved.

        Capture: refused. Syncs: no. Allocates: temporaries.
        """
        if self._program is None:
            raise RuntimeError(
                "replay of an empty graph: nothing was captured into it, or it was reset. Record it first."
            )
        recorder = _thread.recorder()
        if recorder is not None:
            recorder.refuse("EmulatedGraph.replay()", "launches a graph")
        self._program.run()

    def reset(self) -> None:
        """Drop what was recorded; outputs that the caller kept become ordinary tensors.

        Raises RuntimeError while the graph is being recorded.
        """
        if self._recorder is not None:
            raise RuntimeError(f"reset of a graph that is recording capture {self._capture_id}. End the capture first.")
        self._clear()

    def _abandon(self) -> None:
        self._stop()
        self._clear()

    def _stop(self) -> _Recorder:
        global _num_recording
        recorder = self._recorder
        # One that joined may not end it, and it ends on the stream that it began on.
        if recorder is None or recorder is not _thread.opened or current_stream() is not recorder.stream:
            raise RuntimeError("this thread is not recording into this graph.")
        with recorder.lock:  # an op that another thread is recording comes first
            recorder.is_open = False
        with _num_recording_lock:
            recorder.stream._recorder = None
            _num_recording -= 1
        self._recorder = _thread.opened = None
        if recorder.leaves_stream:
            recorder.stream.__exit__()
        return recorder

    def _clear(self) -> None:
        # The program goes first: whoever is told by a callback may reuse what the graph read.
        self._program, self._capture_id = None, 0
        if self._fire is not None:
            fire, self._fire = self._fire, None
            fire()


def _fire_all(callbacks: list[Callable[[], object]]) -> None:
    try:
        while callbacks:
            callbacks.pop(0)()
    finally:
        if callbacks:  # one raised, and the others are owed their call all the same
            _fire_all(callbacks)


def _nested(recorder: _Recorder) -> RuntimeError:
    return RuntimeError(
        f"this thread already records capture {recorder.capture_id}: captures do not nest. End that one first."
    )


class _OutsideStorage:
    """A storage that the graph reads or writes and does not own."""

    __slots__ = ("_address", "_first_op", "_num_bytes", "_weak")

    def __init__(self, storage: torch.UntypedStorage, first_op: str) -> None:
        # Not weakref.ref: the storage's Python object may go while the storage lives.
        self._weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._address = storage.data_ptr()
        self._num_bytes = storage.nbytes()
        self._first_op = first_op

    def require(self) -> torch.UntypedStorage:
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is not None and storage.data_ptr() == self._address:
            return storage
        what = "was freed" if storage is None else "was resized or moved"
        raise RuntimeError(
            f"replay of {self._first_op} needs the storage of {self._num_bytes} bytes at {self._address:#x} "
            f"that it was captured with, and that storage {what}. Keep its tensor as long as the graph."
        )


class _TensorRef:
    """A tensor of a recorded op: a place in one of the program's storages."""

    __slots__ = ("_dtype", "_is_conj", "_is_neg", "_offset", "_owned", "_size", "_slot", "_stride")

    def __init__(self, tensor: torch.Tensor, slot: int) -> None:
        self._slot = slot
        self._dtype = tensor.dtype
        self._offset = tensor.storage_offset()
        self._size = tuple(tensor.size())
        self._stride = tuple(tensor.stride())
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()
        self._owned: torch.Tensor | None = None

    def bind(self, program: _Program, storages: Sequence[torch.UntypedStorage]) -> torch.Tensor:
        if self._owned is not None:
            return self._owned
        tensor = _view(storages[self._slot], self._dtype, self._offset, self._size, self._stride)
        _set_lazy_bits(tensor, self._is_conj, self._is_neg)
        if program.owns(self._slot):
            self._owned = tensor
        return tensor


@dataclass(frozen=True)
class _Op:
    name: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: (position among the leaves of the result, the tensor of the capture): results that replay copies there.
    results: tuple[tuple[int, _TensorRef], ...] = ()


class _Program:
    """What a capture recorded: ops, and the storages they use."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self._storages: list[torch.UntypedStorage | _OutsideStorage] = []
        #: Address of the C storage object -> slot. Owned or weakly held, it is not reused while it is here.
        self._slots: dict[int, int] = {}

    def own(self, storage: torch.UntypedStorage) -> None:
        self._slots[storage._cdata] = len(self._storages)
        self._storages.append(storage)

    def owns(self, slot: int) -> bool:
        return not isinstance(self._storages[slot], _OutsideStorage)

    def ref(self, tensor: torch.Tensor, op_name: str) -> _TensorRef:
        storage = tensor.untyped_storage()
        slot = self._slots.get(storage._cdata)
        if slot is None:
            slot = self._slots[storage._cdata] = len(self._storages)
            self._storages.append(_OutsideStorage(storage, op_name))
        return _TensorRef(tensor, slot)

    @plain
    def run(self) -> None:
        # All of them before the first op: a replay that cannot run changes nothing, and none goes half-way.
        storages = [s.require() if isinstance(s, _OutsideStorage) else s for s in self._storages]

        def bind(value: Any) -> Any:
            return value.bind(self, storages) if isinstance(value, _TensorRef) else value

        # A replayed kernel knows nothing of autograd, nor of who looks at the caller's ops.
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for op in self.ops:
                result = op.call(*_map(bind, op.args), **_map(bind, op.kwargs))
                if op.results:
                    leaves = list(_leaves(result))
                    for position, ref in op.results:
                        ref.bind(self, storages).copy_(leaves[position])


class _Recorder:
    """One capture while it is recorded: what the threads on its stream hand it, one op at a time."""

    def __init__(self, capture_id: int, stream: EmulatedStream, leaves_stream: bool) -> None:
        self.capture_id = capture_id
        self.stream = stream
        #: Whether the capture entered the stream by itself, and leaves it at its end.
        self.leaves_stream = leaves_stream
        self.program = _Program()
        self.callbacks: list[Callable[[], object]] = []
        self.refusal: str | None = None
        #: Held while an op is recorded, and by the end of the capture: what comes later finds `is_open` False.
        self.lock = threading.RLock()
        self.is_open = True

    def watch(self, callback: Callable[[], object]) -> bool:
        """Whether the capture is open still, and so `callback` will be called."""
        with self.lock:
            if self.is_open:
                self.callbacks.append(callback)
            return self.is_open

    def refuse(self, what: str, why: str) -> NoReturn:
        self.refusal = f"{what} {why}, which is not possible while recording. Do it before the capture."
        raise RuntimeError(self.refusal)

    def record_launch(self, fn: Callable[..., object], args: tuple[Any, ...], others: tuple[torch.Tensor, ...]) -> bool:
        """Whether the launch was recorded: the capture is open still."""
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        with self.lock:
            if not self.is_open:
                return False
            self._check_valid()
            with torch._C.DisableTorchFunction():
                for tensor in others:
                    self._ref(tensor, name)
                self.program.ops.append(_Op(name, fn, self._refs(args, name), {}))
        return True

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tap: _OpTap) -> Any:
        """Record one op, seen by `tap`. The lock is held."""
        self._check_valid()
        with torch._C.DisableTorchFunction():
            if _is_without_memory(args, kwargs):
                return func(*args, **kwargs)
            why = _why_refused(func, args, kwargs)
            if why is not None:
                self.refuse(str(func), why)
            # In inference mode composite ops arrive whole. Their parts tell what aliases and what reads the host.
            if func._can_decompose():
                with tap:
                    return func.decompose(*args, **kwargs)
            return self._record(func, args, kwargs)

    def _check_valid(self) -> None:
        if self.refusal is not None:
            raise RuntimeError(f"this capture was invalidated: {self.refusal}")

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(func)
        if func is aten.lift_fresh.default:
            return self._freeze(args[0], name)
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)

        shadow = _Shadow(self.program)
        try:
            shadow_result = func(*_map(shadow.of, args), **shadow.kwargs(func, kwargs))
        except NotImplementedError as error:
            raise RuntimeError(
                f"{name} has no meta kernel, so the shapes of its results are unknown while recording. "
                "Register a fake kernel (torch.library.register_fake), or call it through launch()."
            ) from error
        born: list[tuple[int, torch.Tensor]] = []
        positions = itertools.count()

        def real(value: Any) -> Any:
            position = next(positions)
            if not isinstance(value, torch.Tensor):
                return value
            tensor, is_born = shadow.real(value)
            if is_born:
                born.append((position, tensor))
            return tensor

        result = _map(real, shadow_result)
        launches = func._schema.is_mutable or shadow_result is None or born
        if launches and func.overloadpacket not in _EMPTY_OPS:
            results = tuple((position, self._ref(tensor, name)) for position, tensor in born)
            self.program.ops.append(_Op(name, func, self._refs(args, name), self._refs(kwargs, name), results))
        return result

    def _freeze(self, constant: torch.Tensor, name: str) -> torch.Tensor:
        """A tensor made from Python values, torch.tensor([1, 2]): every replay writes the values of now."""
        self.program.own(constant.untyped_storage())
        self.program.ops.append(_Op(name, aten.copy_.default, (self._ref(constant, name), constant.clone()), {}))
        return constant

    def _refs(self, values: Any, name: str) -> Any:
        return _map(lambda leaf: self._ref(leaf, name) if isinstance(leaf, torch.Tensor) else leaf, values)

    def _ref(self, tensor: torch.Tensor, name: str) -> _TensorRef:
        return self.program.ref(tensor, name)


class _OpTap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op of one thread that is in a stream."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = _thread.recorder()
        if recorder is not None:
            with recorder.lock:
                if recorder.is_open:
                    return recorder.record(func, args, kwargs, self)
        return func(*args, **kwargs)


class _HostReadGuard(OwnMode):
    """Refuses the host reads that never reach the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = _thread.recorder()
        if recorder is not None and func in _HOST_READS:
            recorder.refuse(_HOST_READS[func], "reads a tensor on the host")
        return func(*args, **(kwargs or {}))


class _Shadow:
    """Meta tensors that stand in for the tensors of one op, and the way back from its results to real ones.

    Views are told by storage: a result in a storage of an argument is a view of it, whatever the schema says.
    """

    def __init__(self, program: _Program) -> None:
        self._program = program
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of shadow -> (shadow, real)
        self._shadow_storages: dict[int, torch.UntypedStorage] = {}
        #: Address of shadow storage -> (real storage, whether its tensors are inference tensors).
        self._real_storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}
        self._born: set[int] = set()

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return None
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise RuntimeError(
                f"an EmulatedGraph records strided tensors on cpu, got {value.layout} on {value.device}."
            )
        storage = value.untyped_storage()
        shadow_storage = self._shadow_storages.get(storage._cdata)
        if shadow_storage is None:
            shadow_storage = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._shadow_storages[storage._cdata] = shadow_storage
            self._real_storages[shadow_storage._cdata] = (storage, value.is_inference())
        shadow = _view(shadow_storage, value.dtype, value.storage_offset(), value.size(), value.stride(), device="meta")
        _set_lazy_bits(shadow, value.is_conj(), value.is_neg())
        self._tensors[id(shadow)] = (shadow, value)
        return shadow

    def kwargs(self, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        shadows: dict[str, Any] = _map(self.of, kwargs)
        if any(argument.name == "device" and argument.kwarg_only for argument in func._schema.arguments):
            device = kwargs.get("device")
            if device is not None and torch.device(device).type != "cpu":
                raise RuntimeError(f"an EmulatedGraph records tensors on cpu, {func} wants one on {device}.")
            shadows["device"] = "meta"
        return shadows

    def real(self, shadow: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(tensor, whether its storage was born in this op)."""
        known = self._tensors.get(id(shadow))
        if known is not None:
            tensor = known[1]
            if tensor.shape != shadow.shape:  # an out= argument that had another shape
                tensor.resize_(shadow.shape)
            return tensor, False
        key = shadow.untyped_storage()._cdata
        if key not in self._real_storages:
            num_bytes = shadow.untyped_storage().nbytes()
            storage = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device="cpu").untyped_storage()
            self._program.own(storage)
            self._real_storages[key] = (storage, torch.is_inference_mode_enabled())
            self._born.add(key)
        storage, is_inference = self._real_storages[key]
        # A view is what its base is: in inference mode an ordinary tensor's views are ordinary.
        with torch.inference_mode(is_inference):
            tensor = _view(storage, shadow.dtype, shadow.storage_offset(), shadow.size(), shadow.stride())
        _set_lazy_bits(tensor, shadow.is_conj(), shadow.is_neg())
        return tensor, key in self._born


def _is_without_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op is about meta tensors, which launches nothing: a default device may make some of a caller's."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    leaves = (*_leaves(args), *kwargs.values())
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "meta" for leaf in leaves)


def _why_refused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if torch.Tag.data_dependent_output in func.tags:
        return "reads a tensor on the host"
    why = "has a result whose shape depends on tensor values"
    packet = func.overloadpacket
    if packet is aten.index:
        return why if _has_mask(args[1]) else None
    if packet in (aten.index_put, aten.index_put_, aten._index_put_impl_):
        # A number written through a mask is a masked_fill, which needs no count of the mask.
        return why if _has_mask(args[1]) and args[2].dim() > 0 else None
    if packet is aten.repeat_interleave:
        if func is aten.repeat_interleave.self_int:  # whole in inference mode; its tag means the overloads of tensors
            return None
        return why if kwargs.get("output_size") is None else None
    return why if torch.Tag.dynamic_output_shape in func.tags else None


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int | torch.SymInt,
    size: Sequence[int],
    stride: Sequence[int],
    device: str = "cpu",
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, tuple(size), tuple(stride))


def _set_lazy_bits(view: torch.Tensor, is_conj: bool, is_neg: bool) -> None:
    """Tensor.conj() and its .imag are views that their readers conjugate or negate."""
    if is_conj:
        torch._C._set_conj(view, True)
    if is_neg:
        torch._C._set_neg(view, True)


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    """`fn` of every leaf of nested tuples, lists and dicts, in the order of `_leaves`."""
    if type(value) is tuple:
        return tuple([_map(fn, item) for item in value])
    if type(value) is list:
        return [_map(fn, item) for item in value]
    if type(value) is dict:
        return {key: _map(fn, item) for key, item in value.items()}
    return fn(value)


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (tuple, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
