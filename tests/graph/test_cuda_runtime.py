"""The runtime's bindings and the logic of CudaDevice, on a strict double of the library: no GPU needed."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planlife import cuda_device
from planlife.cuda_device import CudaDevice, drop_what_is_gone
from planlife.cuda_runtime import CUDA, HIP, Capture, Names, Runtime, load_runtime, new_word
from planlife.errors import BackendUnavailableError, ConfigError, MintError, RouteError
from planlife.torch_device import resolve_device

NONE, ACTIVE, INVALIDATED = 0, 1, 2
RELAXED = 2
STREAM = 0x5EED
FAILURE = 719


class Function:
    """A symbol: it takes exactly what was declared, as ctypes does."""

    restype: Any = ctypes.c_int
    argtypes: tuple[Any, ...] | None = None

    def __init__(self, body: Callable[..., int], num_arguments: int) -> None:
        self.body = body
        self.num_arguments = num_arguments
        self.num_calls = 0

    def __call__(self, *arguments: Any) -> Any:
        assert self.argtypes is not None and len(arguments) == len(self.argtypes) == self.num_arguments
        self.num_calls += 1
        return self.body(*arguments)


class FakeLibrary:
    """A runtime library with the symbols of one version and no others: asking for another raises, as dlsym does.

    streams: stream -> (status, capture id, graph). fails: the symbols that answer an error code.
    """

    def __init__(self, names: Names, info: tuple[str, int], without: tuple[str, ...] = ()) -> None:
        self.streams: dict[int, tuple[int, int, int]] = {}
        self.destructors: dict[int, list[tuple[int, int]]] = {}
        self.modes: list[int] = []
        self.mode = 0
        self.fails = False
        self._objects: dict[int, tuple[int, int]] = {}
        self._symbols = {
            names.get_error_string: Function(lambda code: b"injected", 1),
            info[0]: Function(self._info, 4 + info[1]),
            names.is_capturing: Function(self._is_capturing, 2),
            names.begin_capture: Function(self._begin, 2),
            names.exchange_mode: Function(self._exchange, 1),
            names.create_user_object: Function(self._create, 5),
            names.retain_user_object: Function(self._retain, 4),
        }
        for name in without:
            del self._symbols[name]

    def __getattr__(self, name: str) -> Function:
        try:
            return self.__dict__["_symbols"][name]
        except KeyError:
            raise AttributeError(f"undefined symbol: {name}") from None

    def _info(self, stream: int, status: Any, capture_id: Any, graph: Any, *more: None) -> int:
        assert set(more) == {None}
        found = self.streams.get(stream, (NONE, 0, 0))
        status._obj.value = found[0]
        if found[0] == ACTIVE:
            capture_id._obj.value, graph._obj.value = found[1:]
        return FAILURE if self.fails else 0

    def _is_capturing(self, stream: int, status: Any) -> int:
        status._obj.value = self.streams.get(stream, (NONE, 0, 0))[0]
        return 0

    def _begin(self, stream: int, mode: int) -> int:
        assert mode == RELAXED and stream not in self.streams
        self.streams[stream] = (ACTIVE, 99, 1099)
        return 0

    def _exchange(self, mode: Any) -> int:
        mode._obj.value, self.mode = self.mode, mode._obj.value
        self.modes.append(self.mode)
        return 0

    def _create(self, out: Any, pointer: int, destructor: int, count: int, flags: int) -> int:
        assert (count, flags) == (1, 1)
        out._obj.value = len(self._objects) + 1
        self._objects[out._obj.value] = (pointer, destructor)
        return 0

    def _retain(self, graph: int, user_object: Any, count: int, flags: int) -> int:
        assert (count, flags) == (1, 1)
        if self.fails:
            return FAILURE
        self.destructors.setdefault(graph, []).append(self._objects[user_object.value])
        return 0

    def destroy(self, graph: int, *, only: int | None = None) -> None:
        """The graph is gone and its last replay over: call its destructors, or one of them, as C code does."""
        for number, (pointer, destructor) in enumerate(self.destructors[graph]):
            if only in (None, number):
                ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destructor)(pointer)


CUDA_13 = (CUDA, ("cudaStreamGetCaptureInfo", 3))
VERSIONS = {
    "CUDA 12": (CUDA, ("cudaStreamGetCaptureInfo_v2", 2)),
    "CUDA 13": CUDA_13,
    "ROCm": (HIP, ("hipStreamGetCaptureInfo_v2", 2)),
}


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary(*CUDA_13)


@pytest.fixture
def current() -> SimpleNamespace:
    """What torch says of this thread: its device and its stream on the device under test."""
    return SimpleNamespace(device=0, stream=STREAM, num_devices=1)


@pytest.fixture
def make_device(
    monkeypatch: pytest.MonkeyPatch, library: FakeLibrary, current: SimpleNamespace
) -> Callable[..., CudaDevice]:
    def is_recording() -> bool:
        assert current.device == 0, "torch asks the stream of the current device, which is another one"
        return library.streams.get(current.stream, (NONE,))[0] != NONE

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: current.num_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.device)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current.stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", is_recording, raising=False)

    def make(device: Any = None, names: Names = CUDA) -> CudaDevice:
        return CudaDevice(device, runtime=Runtime(library, names))

    return make


@pytest.fixture(autouse=True)
def no_watch_is_left() -> Iterator[None]:
    yield
    cuda_device._watches.clear()


# The library.


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_of_the_library_is_called_with_its_own_arguments(version: str) -> None:
    names, info = VERSIONS[version]
    library = FakeLibrary(names, info)
    if version == "CUDA 12":  # the symbol without a version is an older call there, with fewer arguments
        library._symbols["cudaStreamGetCaptureInfo"] = Function(lambda *arguments: FAILURE, 3)
    runtime = Runtime(library, names)
    assert runtime.can_watch
    assert runtime.capture_of(STREAM) is None
    library.streams[STREAM] = (ACTIVE, 41, 0xABC)
    assert runtime.capture_of(STREAM) == Capture(41, 0xABC)
    assert runtime.is_capturing(STREAM) and not runtime.is_capturing(STREAM + 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_default_stream_never_records_and_is_not_asked(version: str) -> None:
    """HIP, and CUDA with a blocking stream, answer with an error while another stream records."""
    names, info = VERSIONS[version]
    library = FakeLibrary(names, info)
    library.streams[STREAM] = (ACTIVE, 41, 0xABC)

    def is_capturing(stream: int, status: Any) -> int:
        return 0 if stream else FAILURE

    library._symbols[names.is_capturing].body = is_capturing
    assert not Runtime(library, names).is_capturing(0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_library_that_cannot_tell_captures_apart_is_refused_by_name(version: str) -> None:
    names, info = VERSIONS[version]
    for missing in (info[0], names.is_capturing, names.begin_capture, names.exchange_mode):
        with pytest.raises(BackendUnavailableError, match=f"{names.library} lacks one of .*{names.exchange_mode}"):
            Runtime(FakeLibrary(names, info, without=(missing,)), names)


def test_a_call_that_fails_says_which_and_how(library: FakeLibrary) -> None:
    library.fails = True
    with pytest.raises(RuntimeError, match=r"asking a stream for its capture failed with error 719 \(injected\)"):
        Runtime(library, CUDA).capture_of(STREAM)


def test_the_runtime_is_the_one_of_torchs_version() -> None:
    with pytest.raises(BackendUnavailableError, match=r"none of libcudart\.so\.99, libcudart\.so\.99\.1 can be"):
        load_runtime("99.1", None)
    with pytest.raises(BackendUnavailableError, match=r"libamdhip64\.so\.99"):
        load_runtime(None, "99.1.2")


def test_the_relaxed_mode_ends_with_its_body_also_by_an_exception(library: FakeLibrary) -> None:
    runtime = Runtime(library, CUDA)
    with runtime.relaxed():
        assert library.mode == RELAXED
        with runtime.relaxed():
            pass
        assert library.mode == RELAXED
    assert library.mode == 0
    with pytest.raises(ZeroDivisionError), runtime.relaxed():
        raise ZeroDivisionError
    assert library.mode == 0
    assert RELAXED in library.modes


# Captures.


def test_the_capture_id_is_asked_of_the_library_only_while_recording(
    make_device: Callable[..., CudaDevice], library: FakeLibrary
) -> None:
    device = make_device()
    assert device.capture_id() == 0
    assert library.cudaStreamGetCaptureInfo.num_calls == 0
    library.streams[STREAM] = (ACTIVE, 41, 0xABC)
    assert device.capture_id() == 41


def test_an_invalidated_capture_is_told_by_its_own_message(
    make_device: Callable[..., CudaDevice], library: FakeLibrary
) -> None:
    device = make_device()
    library.streams[STREAM] = (INVALIDATED, 0, 0)
    with pytest.raises(RuntimeError, match="was invalidated by an earlier call"):
        device.capture_id()


def test_a_capture_is_seen_while_another_device_is_current(
    make_device: Callable[..., CudaDevice], library: FakeLibrary, current: SimpleNamespace
) -> None:
    """C84."""
    current.num_devices = 2
    device = make_device("cuda:0")
    library.streams[STREAM] = (ACTIVE, 41, 0xABC)
    for current.device in (0, 1):
        assert device.capture_id() == 41
    library.streams.clear()
    for current.device in (0, 1):
        assert device.capture_id() == 0


def test_nothing_is_allocated_while_recording(make_device: Callable[..., CudaDevice], library: FakeLibrary) -> None:
    library.streams[STREAM] = (ACTIVE, 41, 0xABC)
    device = make_device()
    for allocate in (device.allocate, device.zeros_flags):
        with pytest.raises(MintError, match=r"bytes were asked for while recording capture 41"):
            allocate(4096)


class Kept:
    """What a graph reads."""


def watched(device: CudaDevice, library: FakeLibrary, queue: Any, capture_id: int) -> weakref.ref[Kept]:
    library.streams[STREAM] = (ACTIVE, capture_id, 1000 + capture_id)
    kept = Kept()
    assert device.watch_capture(queue, kept) == capture_id
    library.streams.clear()
    return weakref.ref(kept)


def test_a_watched_capture_arrives_in_the_queue_when_its_graph_goes(
    make_device: Callable[..., CudaDevice], library: FakeLibrary
) -> None:
    device = make_device()
    queue, other = device.release_queue(), device.release_queue()
    kept = {capture_id: watched(device, library, queue, capture_id) for capture_id in (1, 2, 3)}
    kept[4] = watched(device, library, other, 4)
    assert not queue and not other
    with pytest.raises(IndexError):
        queue.popleft()
    for gone in (2, 3, 1):
        library.destroy(1000 + gone)
        assert queue and not other
        assert kept[gone]() is not None
        assert queue.popleft() == gone
        assert kept[gone]() is None
        assert not queue
    assert kept[4]() is not None
    library.destroy(1004)
    assert (bool(queue), bool(other), other.popleft()) == (False, True, 4)


def test_a_word_that_is_used_again_meanwhile_ends_no_watch_but_its_own(
    make_device: Callable[..., CudaDevice], library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread looks at a watch that another has ended since, and whose word belongs to the next capture by now."""
    device = make_device()
    queue = device.release_queue()
    watched(device, library, queue, 1)
    (stale,) = cuda_device._watches
    library.destroy(1001)
    assert queue.popleft() == 1
    kept = watched(device, library, queue, 2)
    (own,) = cuda_device._watches
    assert own.word.address == stale.word.address

    class LateLook(set[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield stale
            yield from super().__iter__()

    late_look = LateLook(cuda_device._watches)
    cuda_device._watches.clear()
    monkeypatch.setattr(cuda_device, "_watches", late_look)
    drop_what_is_gone()
    assert kept() is not None
    library.destroy(1002)
    assert queue.popleft() == 2
    assert kept() is None and not queue
    assert new_word().address != new_word().address  # it was given back once


@pytest.mark.parametrize("first", [0, 1])
def test_the_driver_may_tell_in_any_order_and_at_any_pace(
    make_device: Callable[..., CudaDevice], library: FakeLibrary, first: int
) -> None:
    """A capture posts its own word and the queue's; between the two the queue is asked."""
    device = make_device()
    queue = device.release_queue()
    for capture_id in (1, 2):
        watched(device, library, queue, capture_id)
    library.destroy(1001, only=first)
    with pytest.raises(IndexError):
        queue.popleft()
    library.destroy(1001, only=1 - first)
    assert queue.popleft() == 1
    assert not queue
    library.destroy(1002)
    assert queue.popleft() == 2
    assert not queue


def test_what_a_graph_keeps_outlives_its_manager_and_its_device(
    make_device: Callable[..., CudaDevice], library: FakeLibrary
) -> None:
    device = make_device()
    queue = device.release_queue()
    kept = watched(device, library, queue, 1)
    del device, queue
    gc.collect()
    drop_what_is_gone()
    assert kept() is not None
    library.destroy(1001)
    drop_what_is_gone()
    assert kept() is None


def test_a_watch_that_the_library_refuses_keeps_nothing(
    make_device: Callable[..., CudaDevice], library: FakeLibrary
) -> None:
    device = make_device()
    queue = device.release_queue()
    library.streams[STREAM] = (ACTIVE, 1, 1001)
    real_info = library.cudaStreamGetCaptureInfo.body

    def info(*arguments: Any) -> int:
        real_info(*arguments)
        return 0

    library.cudaStreamGetCaptureInfo.body = info
    library.fails = True
    kept = Kept()
    alive = weakref.ref(kept)
    with pytest.raises(RuntimeError, match="retaining a user object in a graph failed"):
        device.watch_capture(queue, kept)
    del kept
    gc.collect()
    assert alive() is None
    assert not queue


def test_watching_needs_a_capture(make_device: Callable[..., CudaDevice]) -> None:
    device = make_device()
    with pytest.raises(RuntimeError, match="needs a capture"):
        device.watch_capture(device.release_queue(), None)


def test_torch_comes_home_also_when_the_graph_of_a_failed_capture_cannot_be_emptied(recorder: Recorder) -> None:
    """A device that has failed for good refuses every call; what the body raised is told along with it."""

    def reset() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    recorder.graph.reset = reset  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        with recorder.device.record(recorder.graph):  # type: ignore[arg-type]
            recorder.library.streams[STREAM] = (INVALIDATED, 0, 0)
            raise BodyError
    recorder.assert_torch_is_as_it_was()
    assert isinstance(caught.value.__context__.__context__, BodyError)  # type: ignore[union-attr]


def test_a_failed_capture_waits_no_longer_when_another_thread_was_told_of_it_first(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drains the queue meanwhile takes the posts that the failed capture waits for."""
    device = recorder.device
    queue = device.release_queue()
    told: list[int] = []
    slept: list[float] = []

    asked: list[float] = []

    def monotonic() -> float:
        asked.append(0.0)
        if len(asked) == 2:  # the failed capture has looked up its watches, and has not asked them yet
            told.append(queue.popleft())
        return 0.0

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert not slept[10:], "it waits for what will never come"

    monkeypatch.setattr(cuda_device, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))
    with pytest.raises(BodyError), device.record(recorder.graph):  # type: ignore[arg-type]
        device.watch_capture(queue, None)
        raise BodyError
    assert told == [41]
    assert not slept


class FakeGraph:
    """As much of a torch.cuda.CUDAGraph as a device without user objects uses."""

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("end", ["collected", "reset"])
def test_without_user_objects_the_graph_object_tells_its_end(
    make_device: Callable[..., CudaDevice], library: FakeLibrary, end: str
) -> None:
    """The stated fallback: of graphs that planlife records itself; an engine's own captures are refused."""
    del library._symbols["cudaGraphRetainUserObject"]
    device = make_device()
    queue = device.release_queue()
    with pytest.raises(RouteError, match="Capture through manager.graph"):
        watched(device, library, queue, 1)
    graph = FakeGraph()
    device._this_thread.graph = graph
    kept = watched(device, library, queue, 2)
    device._this_thread.graph = None
    assert not queue and kept() is not None
    if end == "reset":
        device.reset(graph)  # type: ignore[arg-type]
    del graph
    assert queue
    assert queue.popleft() == 2
    assert kept() is None
    with pytest.raises(IndexError):
        queue.popleft()


def test_a_stream_that_records_is_not_given_an_event(
    make_device: Callable[..., CudaDevice], library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be recorded into that stream's graph, and would pull the waiting stream into the capture."""
    device = make_device()
    events: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            assert library.mode == RELAXED
            events.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    waits: list[object] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index: SimpleNamespace(wait_event=lambda event: waits.append(event))
    )
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: "default")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: f"{stream:#x}", raising=False)
    device.order_after(0)
    device.order_after(0xA)
    assert events == ["default", "0xa"] and len(waits) == 2
    library.streams[0xA] = (ACTIVE, 1, 1001)
    device.order_after(0xA)
    assert len(events) == len(waits) == 2
    assert library.mode == 0


def test_what_is_done_relaxed_kills_no_capture_and_the_threads_mode_comes_back(
    make_device: Callable[..., CudaDevice], library: FakeLibrary
) -> None:
    device = make_device()
    with device.relaxed():
        assert library.mode == RELAXED
    with pytest.raises(KeyError), device.relaxed():
        raise KeyError
    assert library.mode == 0


# Which device, and what it is given.


def test_a_gpu_in_any_spelling_is_that_gpu(
    make_device: Callable[..., CudaDevice], current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C84: "cuda" and None mean the index that is current now."""
    current.num_devices, current.device = 2, 1
    for wish, name in ((None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), (torch.device("cuda", 1), "cuda:1")):
        device = make_device(wish)
        assert (device.name, device.num_compute_units) == (name, 132)
    monkeypatch.setattr(cuda_device, "load_runtime", lambda cuda, hip: object())
    assert [resolve_device(wish).name for wish in (None, "cuda", "cuda:0")] == ["cuda:1", "cuda:1", "cuda:0"]


@pytest.mark.parametrize("wish", ["cuda:2", torch.device("cuda", 7), "cuda:x", "cuda:-1"])
def test_a_gpu_that_is_not_here_is_refused(
    make_device: Callable[..., CudaDevice], current: SimpleNamespace, wish: Any
) -> None:
    current.num_devices = 2
    with pytest.raises(ConfigError, match="cuda"):
        make_device(wish)


def test_lengths_elsewhere_are_refused_with_what_was_found_and_wanted(make_device: Callable[..., CudaDevice]) -> None:
    with pytest.raises(ConfigError, match="got device cpu, wanted cuda:0"):
        make_device().inspect_lens(torch.ones(3, dtype=torch.int32))


def test_a_word_counts_its_posts() -> None:
    word = new_word()
    assert not word and not word.take()
    word.post()
    word.post()
    assert word and word.take() and word and word.take()
    assert not word


# Recording, with torch's part of it on a double too.


class RecordedGraph:
    """torch.cuda.CUDAGraph as far as recording goes: an invalidated capture ends with an error and stays half open."""

    def __init__(self, library: FakeLibrary, handle: int = 1041) -> None:
        self.library = library
        self.handle = handle
        self.is_open = False  # torch's allocators and generators take it for recording
        self.is_full = False
        self.library.destructors[handle] = []

    def begin(self) -> None:
        if self.is_full:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        self.is_open = True
        self.library.streams[STREAM] = (ACTIVE, 41, self.handle)

    def capture_end(self) -> None:
        status, _, handle = self.library.streams.pop(STREAM)
        if status == INVALIDATED:
            self.library.destroy(self.handle)
            self.library.destructors[self.handle] = []
            raise RuntimeError("operation failed due to a previous error during capture")
        self.is_open, self.is_full = False, True
        self.handle = handle

    def pool(self) -> tuple[int, int]:
        if not self.is_full:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return 0, 1

    def reset(self) -> None:
        assert self.library.mode == RELAXED
        if self.is_full:
            self.library.destroy(self.handle)
        self.is_full = False


class Recorder:
    """A device, a graph to record into, and where torch is."""

    def __init__(self, device: CudaDevice, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.library = library
        self.library.destructors[1099] = []
        self.graph = RecordedGraph(library)
        self.home = SimpleNamespace(cuda_stream=0)
        self.side = SimpleNamespace(cuda_stream=STREAM)
        self.stream = self.home
        recorder = self

        class graph:
            default_capture_stream = None

            def __init__(self, graph: RecordedGraph, pool: Any, stream: Any, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                self.graph = graph

            def __enter__(self) -> None:
                recorder.stream = recorder.side
                self.graph.begin()

            def __exit__(self, *exc_info: object) -> None:
                self.graph.capture_end()
                recorder.stream = recorder.home

        def sleep(cycles: int) -> None:
            assert recorder.stream is recorder.side and library.streams[STREAM][0] == ACTIVE

        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: recorder.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(recorder, "stream", stream))
        monkeypatch.setattr(torch.cuda, "_sleep", sleep, raising=False)

    def assert_torch_is_as_it_was(self) -> None:
        assert self.stream is self.home
        assert not self.graph.is_open
        assert STREAM not in self.library.streams
        assert self.library.mode == 0


@pytest.fixture
def recorder(make_device: Callable[..., CudaDevice], library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(make_device(), library, monkeypatch)


def test_a_body_is_recorded_inside_the_relaxed_guard(recorder: Recorder) -> None:
    with recorder.device.record(recorder.graph) as graph:
        assert graph is recorder.graph
        assert recorder.library.mode == RELAXED
        assert recorder.device.capture_id() == 41
    assert recorder.graph.is_full
    assert recorder.device.capture_of(recorder.graph) is None  # type: ignore[arg-type]
    recorder.assert_torch_is_as_it_was()


class BodyError(Exception):
    """What a model raises in its forward."""


@pytest.mark.parametrize("invalidated", [False, True])
def test_a_body_that_raises_leaves_an_empty_graph_and_its_watchers_told(recorder: Recorder, invalidated: bool) -> None:
    """The body's own exception comes out, also where the end of its invalidated capture raises another; nothing holds
    its frames afterwards."""
    device, library = recorder.device, recorder.library
    queue = device.release_queue()
    alive: list[weakref.ref[Kept]] = []

    def body() -> None:
        in_frame = Kept()
        alive.append(weakref.ref(in_frame))
        raise BodyError

    with pytest.raises(BodyError) as caught:
        with device.record(recorder.graph):
            device.watch_capture(queue, None)
            if invalidated:
                library.streams[STREAM] = (INVALIDATED, 0, 0)
            body()
    assert device.capture_of(recorder.graph) == 0  # type: ignore[arg-type]
    recorder.assert_torch_is_as_it_was()
    assert queue and queue.popleft() == 41
    gc.disable()
    try:
        del caught
        assert alive[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("moves", [False, True])
def test_a_body_that_swallows_what_invalidated_its_capture_raises_at_the_end(recorder: Recorder, moves: bool) -> None:
    """Also where the body left torch on another stream."""
    with pytest.raises(RuntimeError, match="due to a previous error during capture"):
        with recorder.device.record(recorder.graph):
            recorder.library.streams[STREAM] = (INVALIDATED, 0, 0)
            if moves:
                recorder.stream = recorder.home
    assert recorder.device.capture_of(recorder.graph) == 0  # type: ignore[arg-type]
    recorder.assert_torch_is_as_it_was()


def test_a_capture_that_does_not_begin_costs_no_earlier_one(recorder: Recorder) -> None:
    with recorder.device.record(recorder.graph):
        pass
    with pytest.raises(RuntimeError, match="already owns"), recorder.device.record(recorder.graph):
        raise AssertionError("the body ran")
    assert recorder.graph.is_full
    recorder.assert_torch_is_as_it_was()
    with pytest.raises(TypeError, match="strem"):
        recorder.device.record(recorder.graph, strem=None)
