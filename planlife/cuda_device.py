"""CudaDevice: memory, streams and graphs of one NVIDIA or AMD GPU, as the lifecycle needs them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .ambient import plain
from .cuda_runtime import Runtime, Word, load_runtime, new_word, use_again
from .errors import BackendUnavailableError, ConfigError, MintError, RouteError
from .torch_device import TorchDevice

_FAILED_CAPTURE_WAIT_S = 1.0


class _Watch:
    """What one capture keeps alive until its graph is gone. word: posted by the driver then."""

    __slots__ = ("capture_id", "is_gone", "keep", "queue", "word")

    def __init__(self, capture_id: int, word: Word, queue: GoneGraphs, keep: object) -> None:
        self.capture_id = capture_id
        self.word = word
        self.queue = queue
        self.keep = keep
        self.is_gone = False


#: Of all devices: a graph may outlive its manager and its device.
_watches: set[_Watch] = set()


def drop_what_is_gone() -> None:
    """Let go of what graphs kept that are gone by now, also those of managers that were dropped. Takes no lock."""
    for watch in list(_watches):
        if watch.word:
            try:
                _watches.remove(watch)
            except KeyError:  # another thread took it; the word may be another watch's by now
                continue
            watch.is_gone = True
            watch.keep = None
            use_again(watch.word)


class GoneGraphs(Word):
    """GoneCaptures that the driver fills: the queue itself is a word that each of its graphs posts when it goes.

    So asking it costs what reading a number costs. Which graph it was, its own word tells.
    """

    watches: list[_Watch]

    def popleft(self) -> int:
        """One capture whose graph is gone; IndexError if none is known yet."""
        if self.take():
            drop_what_is_gone()
            for watch in self.watches:
                if watch.is_gone:
                    self.watches.remove(watch)
                    return watch.capture_id
            self.post()  # its own word comes a moment later
        raise IndexError("no graph is gone")


def _new_queue() -> GoneGraphs:
    """Its word is never used again: a graph that outlives the manager posts it."""
    queue = GoneGraphs.from_address(new_word().address)
    queue.watches = []
    return queue


class _FlagReader:
    """The counters of one sanitizer on the host, as they arrive.

    The device only ever adds: what was read is subtracted here, so that a decode on any stream may add meanwhile.
    """

    def __init__(self, flags: torch.Tensor) -> None:
        self.lock = threading.Lock()
        self.copied = torch.zeros(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
        self.told = [0] * flags.numel()
        self.event: torch.cuda.Event | None = None  #: behind the copy that is under way


class CudaDevice(TorchDevice):
    """planlife.device.Device on one GPU of this process, with torch's CUDA graphs.

    device: "cuda" or None for the current one at this moment, "cuda:N", or a torch.device.

    Blocks come from torch's caching allocator, for the stream that is current when they are allocated. A graph's end is
    told by the driver: for each watched capture two user objects are attached to the graph, whose destructor runs when
    the graph is gone and its last replay has finished, whoever launched it.
    """

    current_stream: Callable[[], int]  # a C function: pa_decode asks it in every layer

    @plain
    def __init__(self, device: str | torch.device | None = None, *, runtime: Runtime | None = None) -> None:
        """runtime: the library of torch's own version, if None. Raises BackendUnavailableError, ConfigError."""
        index = _index_of(device)
        super().__init__(torch.device("cuda", index))
        self._index = index
        self.num_compute_units = int(torch.cuda.get_device_properties(index).multi_processor_count)
        self._runtime = runtime or load_runtime(torch.version.cuda, torch.version.hip)
        self.current_stream = partial(torch._C._cuda_getCurrentRawStream, index)
        self._is_recording: Callable[[], bool] = (
            torch._C._cuda_isCurrentStreamCapturing if torch.cuda.device_count() == 1 else self._is_recording_here
        )
        self._flag_readers: dict[int, _FlagReader] = {}
        self._this_thread = threading.local()
        #: Without user objects: what tells the end of a graph that was recorded here.
        self._finalizers: WeakKeyDictionary[Any, list[weakref.finalize[..., Any]]] = WeakKeyDictionary()

    def _is_recording_here(self) -> bool:
        """torch asks the current device's stream, which may be another device's."""
        if torch.cuda.current_device() == self._index:
            return torch._C._cuda_isCurrentStreamCapturing()
        return self._runtime.is_capturing(self.current_stream())

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8[num_bytes], contents undefined, in the allocator's default pool whatever pool the caller is in.

        Raises MintError while this thread's stream records, MemoryError when the allocator has none. Capture: refused.
        """
        capture_id = self.capture_id()
        if capture_id:
            raise MintError(
                f"{num_bytes} bytes were asked for while recording capture {capture_id}: the graph would own them. "
                "Mint before the capture, in a capture phase."
            )
        drop_what_is_gone()
        try:
            # torch.cuda.use_mem_pool is of a thread: another one is in no pool.
            stream = torch.cuda.current_stream(self._index)
            return _allocator().submit(self._empty, num_bytes, stream).result()
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(
                f"the allocator of {self.name} has no {num_bytes} bytes. Lower budget_bytes or the ladder's top class."
            ) from error

    def _empty(self, num_bytes: int, stream: torch.cuda.Stream) -> torch.Tensor:
        with self._runtime.relaxed(), torch.cuda.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @plain
    def free(self, buffer: torch.Tensor, stream: int) -> None:
        """The block is torch's to reuse once `stream` has done what it was given so far."""
        buffer.record_stream(self._stream(stream))

    def _stream(self, stream: int) -> torch.cuda.Stream:
        """torch's object for a raw stream. ExternalStream(0) would make a new stream."""
        if not stream:
            return torch.cuda.default_stream(self._index)
        return torch.cuda.ExternalStream(stream, device=self._device)  # type: ignore[no-untyped-call]

    def order_after(self, stream: int) -> None:
        """The current stream waits for what `stream` was given so far. Capture: no. Syncs: no. Allocates: no."""
        with self._runtime.relaxed():
            # An event there would be recorded into its graph. torch.cuda.graph waits for the device before it begins a
            # capture, so nothing of ours is left on that stream.
            if not self._runtime.is_capturing(stream):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream(stream))
                torch.cuda.current_stream(self._index).wait_event(event)
                del event  # destroyed inside the guard

    def relaxed(self) -> AbstractContextManager[None]:
        """What this thread does in the body kills no capture, whatever its mode."""
        return self._runtime.relaxed()

    def capture_id(self) -> int:
        """Id of the capture that this thread's current stream is in, 0 when it records none.

        Raises RuntimeError in a capture that was invalidated.
        """
        if not self._is_recording():
            return 0
        capture = self._runtime.capture_of(self.current_stream())
        return 0 if capture is None else capture.capture_id

    def release_queue(self) -> GoneGraphs:
        """An empty queue."""
        drop_what_is_gone()
        return _new_queue()

    def watch_capture(self, queue: GoneGraphs, keep: object) -> int:
        """Tell `queue` of the current capture's id once its graph is gone and the device is done with it; hold `keep`.

        `keep` goes when the queue is asked, or at this module's next allocation or watch. Where the runtime has no user
        objects: when a graph that was recorded by `record` is collected, or reset by `reset`, though replays may run.

        Raises RuntimeError without a capture, RouteError for an engine's own capture without user objects.
        """
        capture = self._runtime.capture_of(self.current_stream())
        if capture is None:
            raise RuntimeError("watch_capture() needs a capture, and this thread's stream records none.")
        drop_what_is_gone()
        watch = _Watch(capture.capture_id, new_word(), queue, keep)
        if self._runtime.can_watch:
            self._runtime.post_when_gone(capture.graph, watch.word)
            self._runtime.post_when_gone(capture.graph, queue)
        else:
            self._finalize(watch)
        queue.watches.append(watch)
        _watches.add(watch)
        return capture.capture_id

    def _finalize(self, watch: _Watch) -> None:
        graph = getattr(self._this_thread, "graph", None)
        if graph is None:
            raise RouteError(
                "this GPU runtime has no user objects, so nothing tells when a graph is gone that planlife did not "
                "record. Capture through manager.graph(), or use CUDA 11.3 or ROCm 5.3 at least."
            )
        finalizer = weakref.finalize(graph, _post, watch.word, watch.queue)
        finalizer.atexit = False
        self._finalizers.setdefault(graph, []).append(finalizer)

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """An empty graph."""
        return torch.cuda.CUDAGraph()

    def record(self, graph: torch.cuda.CUDAGraph, **options: Any) -> AbstractContextManager[torch.cuda.CUDAGraph]:
        """Record the body into `graph`; options as for torch.cuda.graph, thread_local in place of global.

        The body may allocate, and collect other graphs, without harm to the capture. One that raises, or that did what
        cannot be recorded, leaves `graph` empty, and torch's stream, allocator and generator as they were.

        Syncs: yes, when it begins, as torch.cuda.graph does, which kills captures of other threads.
        """
        return self._record(graph, **options)

    @contextmanager
    def _record(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "thread_local",
    ) -> Iterator[torch.cuda.CUDAGraph]:
        home = torch.cuda.current_stream(self._index)
        capture_id, capture_stream = 0, home
        failure: BaseException | None = None
        with torch.cuda.device(self._index), self._runtime.relaxed():
            recording = torch.cuda.graph(
                graph, pool=pool, stream=stream or self._capture_stream(), capture_error_mode=capture_error_mode
            )
            try:
                with recording:
                    capture_id, capture_stream = self.capture_id(), torch.cuda.current_stream(self._index)
                    self._this_thread.graph = graph
                    try:
                        yield graph
                    except BaseException as error:
                        failure = error
                        raise
            except BaseException as error:
                try:
                    if capture_id:  # else it never began: the graph may hold an earlier capture, which stays
                        self._abandon(graph, capture_id, capture_stream)
                finally:
                    torch.cuda.set_stream(home)
                # The end of an invalidated capture raises too; what the body raised says why.
                if failure is None or failure is error:
                    raise
            finally:
                self._this_thread.graph = None
        if failure is not None:
            raise failure

    def _capture_stream(self) -> torch.cuda.Stream | None:
        """None for torch's own, which graphs must share that share a pool; it is of the device that captured first."""
        shared = getattr(torch.cuda.graph, "default_capture_stream", None)
        if shared is None or shared.device == self._device:
            return None
        return _capture_stream_of(self._index)

    def _abandon(self, graph: torch.cuda.CUDAGraph, capture_id: int, capture_stream: torch.cuda.Stream) -> None:
        """Empty the graph of a capture that failed: torch leaves a partial one that replays, or never ends it."""
        if self.capture_of(graph) == 0:
            # capture_end gave up before torch's device and host allocators and its generators heard of the end. It goes
            # through once its stream has a capture that can end.
            torch.cuda.set_stream(capture_stream)
            with suppress(RuntimeError):
                if not self._runtime.is_capturing(capture_stream.cuda_stream):
                    self._runtime.begin_capture(capture_stream.cuda_stream)
                torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
                graph.capture_end()
        graph.reset()
        self._fire(graph)
        # Never launched, it is destroyed by now; the driver tells so in a moment.
        deadline = time.monotonic() + _FAILED_CAPTURE_WAIT_S
        watches = [watch for watch in list(_watches) if watch.capture_id == capture_id]
        while time.monotonic() < deadline and not all(map(_is_told, watches)):
            time.sleep(0)

    def capture_of(self, graph: torch.cuda.CUDAGraph) -> int | None:
        """0 for an empty graph, else None: a CUDAGraph does not tell which capture it holds."""
        try:
            graph.pool()
        except RuntimeError:
            return 0
        return None

    def may_be_last_capture(self, capture_id: int) -> bool:
        """As far as capture ids tell, which count up in the process."""
        with torch.cuda.device(self._index):
            return self._runtime.may_be_last_capture(capture_id, _fence_stream_of(self._index).cuda_stream)

    def reset(self, graph: torch.cuda.CUDAGraph) -> None:
        """Empty `graph`."""
        with self._runtime.relaxed():
            graph.reset()
        self._fire(graph)

    def _fire(self, graph: torch.cuda.CUDAGraph) -> None:
        for finalizer in self._finalizers.pop(graph, ()):
            finalizer()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Launch `graph` on the current stream."""
        graph.replay()

    @plain
    def zeros_flags(self, num_words: int) -> torch.Tensor:
        """int64[num_words] zeros. Raises MintError while this thread's stream records."""
        buffer = self.allocate(num_words * 8)
        with self._runtime.relaxed(), torch.inference_mode(False):
            flags = buffer.view(torch.int64).zero_()
            # Once per manager: whichever stream decodes first finds zeros.
            torch.cuda.current_stream(self._index).synchronize()
            self._flag_readers[flags.data_ptr()] = _FlagReader(flags)
        return flags

    @plain
    def read_flags(self, flags: torch.Tensor) -> Sequence[int]:
        """What was added since it was told last, as far as an earlier call's copy has arrived; begins another copy.

        Capture: allowed, not recorded. Syncs: no.
        """
        reader = self._flag_readers[flags.data_ptr()]
        words = [0] * len(reader.told)
        with reader.lock, self._runtime.relaxed():
            if reader.event is not None:
                if not reader.event.query():  # type: ignore[no-untyped-call]
                    return words
                reader.event = None
                now: list[int] = reader.copied.tolist()
                words = [word - told for word, told in zip(now, reader.told, strict=True)]
                reader.told = now
            if not self._is_recording():
                reader.copied.copy_(flags, non_blocking=True)
                reader.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                reader.event.record(torch.cuda.current_stream(self._index))
        return words


def _is_told(watch: _Watch) -> bool:
    """The driver has posted both words of a watch; another thread may have taken either by now."""
    return (watch.is_gone or bool(watch.word)) and (bool(watch.queue) or watch not in watch.queue.watches)


def _post(*words: Word) -> None:
    for word in words:
        word.post()


@lru_cache(maxsize=1)
def _allocator() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="planlife-allocator")


@cache
def _fence_stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


@cache
def _capture_stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _index_of(device: str | torch.device | None) -> int:
    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            f"device {str(device or 'cuda')!r} is not here: torch {torch.__version__} sees no GPU. Pass device='cpu', "
            "or install a torch build for this machine's GPU and driver."
        )
    try:
        wanted = torch.device("cuda" if device is None else device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is no name of a GPU: pass 'cuda' or 'cuda:N'.") from error
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    num_devices = torch.cuda.device_count()
    if wanted.type != "cuda" or not 0 <= index < num_devices:
        raise ConfigError(
            f"device must be cuda:0 to cuda:{num_devices - 1}, the {num_devices} GPUs that are visible here, got "
            f"{str(device)!r}."
        )
    return index
