"""The few calls of the CUDA (or HIP) runtime that torch does not offer, and words that its threads may write.

Nothing here imports torch: handles and streams are the integers that torch and the runtime exchange.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import BackendUnavailableError

_CAPTURE_ACTIVE = 1
_MODE_RELAXED = 2
_NO_DESTRUCTOR_SYNC = 1
_MOVE_REFERENCE = 1
#: Capture ids count up in a process. A capture of torch's takes this many of them, one that is begun and ended past
#: torch takes one (measured with CUDA 13.0 and torch 2.11).
_IDS_PER_CAPTURE = 3

_out = ctypes.POINTER


class Names(NamedTuple):
    """What the calls are called in one vendor's library."""

    library: str
    get_error_string: str
    #: In the order of preference: (symbol, how many arguments follow the graph). CUDA 11.3 to 12 export _v2, and their
    #: symbol without a version is older and knows no graph. CUDA 13 exports only that one, with edges in its results.
    get_capture_info: tuple[tuple[str, int], ...]
    is_capturing: str
    begin_capture: str
    end_capture: str
    destroy_graph: str
    exchange_mode: str
    create_user_object: str
    retain_user_object: str


CUDA = Names(
    library="libcudart.so",
    get_error_string="cudaGetErrorString",
    get_capture_info=(("cudaStreamGetCaptureInfo_v2", 2), ("cudaStreamGetCaptureInfo", 3)),
    is_capturing="cudaStreamIsCapturing",
    begin_capture="cudaStreamBeginCapture",
    end_capture="cudaStreamEndCapture",
    destroy_graph="cudaGraphDestroy",
    exchange_mode="cudaThreadExchangeStreamCaptureMode",
    create_user_object="cudaUserObjectCreate",
    retain_user_object="cudaGraphRetainUserObject",
)
HIP = Names(
    library="libamdhip64.so",
    get_error_string="hipGetErrorString",
    get_capture_info=(("hipStreamGetCaptureInfo_v2", 2),),
    is_capturing="hipStreamIsCapturing",
    begin_capture="hipStreamBeginCapture",
    end_capture="hipStreamEndCapture",
    destroy_graph="hipGraphDestroy",
    exchange_mode="hipThreadExchangeStreamCaptureMode",
    create_user_object="hipUserObjectCreate",
    retain_user_object="hipGraphRetainUserObject",
)


class Capture(NamedTuple):
    """A capture that is under way. graph: the handle that it records into."""

    capture_id: int
    graph: int


class Runtime:
    """Checked calls into one loaded runtime library.

    can_fence: whether it can begin and end a capture of its own, which tells how far capture ids have come.
    can_watch: False where the library has no user objects; then nobody learns when the device is done with a graph.
    """

    def __init__(self, library: Any, names: Names) -> None:
        """Raises BackendUnavailableError if the library lacks what captures cannot be told without."""
        self._library = library
        self._error_string = self._bind(names.get_error_string, ctypes.c_int)
        if self._error_string is not None:
            self._error_string.restype = ctypes.c_char_p
        word, handle = ctypes.c_ulonglong, ctypes.c_void_p
        for name, num_more in names.get_capture_info:
            info = self._bind(name, handle, _out(ctypes.c_int), _out(word), _out(handle), *[handle] * num_more)
            if info is not None:
                self._get_capture_info = info
                self._no_more = (None,) * num_more
                break
        is_capturing = self._bind(names.is_capturing, handle, _out(ctypes.c_int))
        begin_capture = self._bind(names.begin_capture, handle, ctypes.c_int)
        exchange_mode = self._bind(names.exchange_mode, _out(ctypes.c_int))
        if None in (info, is_capturing, begin_capture, exchange_mode):
            wanted = [names.get_capture_info[0][0], names.is_capturing, names.begin_capture, names.exchange_mode]
            raise BackendUnavailableError(
                f"{names.library} lacks one of {', '.join(wanted)}, without which captures cannot be told apart. "
                "planlife needs CUDA 11.3 or ROCm 5.3 at least."
            )
        self._is_capturing, self._begin_capture, self._exchange_mode = is_capturing, begin_capture, exchange_mode
        self._end_capture = self._bind(names.end_capture, handle, _out(handle))
        self._destroy_graph = self._bind(names.destroy_graph, handle)
        self.can_fence = self._end_capture is not None and self._destroy_graph is not None
        self._fence_lock = threading.Lock()
        self._fence_ids: list[int] = []
        count = ctypes.c_uint
        self._create = self._bind(names.create_user_object, _out(handle), handle, handle, count, count)
        self._retain = self._bind(names.retain_user_object, handle, handle, count, count)
        self.can_watch = self._create is not None and self._retain is not None

    def _bind(self, name: str, *argtypes: Any) -> Any:
        """The function of that name, None if the library has none."""
        function = getattr(self._library, name, None)
        if function is not None:
            function.argtypes = argtypes
        return function

    def _check(self, code: int, what: str) -> None:
        if code:
            text = self._error_string(code) if self._error_string is not None else b""
            raise RuntimeError(f"{what} failed with error {code} ({text.decode()}).")

    def capture_of(self, stream: int) -> Capture | None:
        """The capture that `stream` is in, None if it records nothing.

        Raises RuntimeError for a capture that was invalidated: it has no id any more, and nothing can be recorded.
        """
        status, capture_id, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
        self._check(
            self._get_capture_info(
                stream, ctypes.byref(status), ctypes.byref(capture_id), ctypes.byref(graph), *self._no_more
            ),
            "asking a stream for its capture",
        )
        if not status.value:
            return None
        if status.value != _CAPTURE_ACTIVE:
            raise RuntimeError(
                "this stream's capture was invalidated by an earlier call that cannot be recorded: nothing can be "
                "recorded into it any more. Let the exception end the capture."
            )
        return Capture(capture_id.value, graph.value or 0)

    def is_capturing(self, stream: int) -> bool:
        """Whether `stream` records, whichever thread began it."""
        if not stream:
            return False  # the default stream cannot, and asking it is an error while another one does
        status = ctypes.c_int()
        self._check(self._is_capturing(stream, ctypes.byref(status)), "asking a stream whether it records")
        return bool(status.value)

    def begin_capture(self, stream: int) -> None:
        """Record what `stream` is given from now on, past torch."""
        self._check(self._begin_capture(stream, _MODE_RELAXED), "beginning a capture")

    def may_be_last_capture(self, capture_id: int, idle_stream: int) -> bool:
        """Whether no other capture of this process need have come after that one; True where nothing tells.

        Records nothing on `idle_stream`, which nobody else uses, only to learn the id that this capture is given.
        """
        if not self.can_fence:
            return True
        with self._fence_lock, self.relaxed():
            self.begin_capture(idle_stream)
            fence = self.capture_of(idle_stream)
            graph = ctypes.c_void_p()
            self._check(self._end_capture(idle_stream, ctypes.byref(graph)), "ending a capture")
            self._check(self._destroy_graph(graph), "destroying an empty graph")
            assert fence is not None
            since = fence.capture_id - capture_id - sum(one > capture_id for one in self._fence_ids)
            self._fence_ids.append(fence.capture_id)
        return since <= _IDS_PER_CAPTURE

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """What this thread does inside kills no capture, neither its own nor another thread's."""
        mode = ctypes.c_int(_MODE_RELAXED)
        self._check(self._exchange_mode(ctypes.byref(mode)), "relaxing this thread's capture mode")
        try:
            yield
        finally:
            self._check(self._exchange_mode(ctypes.byref(mode)), "restoring this thread's capture mode")

    def post_when_gone(self, graph: int, word: Word) -> None:
        """Post `word` once `graph`, and all that was instantiated of it, is destroyed and has run for the last time."""
        user_object = ctypes.c_void_p()
        self._check(
            self._create(ctypes.byref(user_object), word.address, post_address(), 1, _NO_DESTRUCTOR_SYNC),
            "creating a user object",
        )
        self._check(self._retain(graph, user_object, 1, _MOVE_REFERENCE), "retaining a user object in a graph")


class Word(ctypes.c_uint64):
    """A POSIX semaphore that a driver's thread posts, read as a plain number: true once posted.

    A destructor in Python would need the GIL in the driver's thread, while a thread that holds it may wait for the
    driver. The memory is never given back, only used again: the driver may post at any time, at exit too.
    """

    @property
    def address(self) -> int:
        return ctypes.addressof(self)

    def post(self) -> None:
        """As the driver does. Takes no lock."""
        _libc().sem_post(self.address)

    def take(self) -> bool:
        """Take one post back; False if there is none."""
        return bool(_libc().sem_trywait(self.address) == 0)


_WORD_BYTES = 64  # a sem_t is 32 on 64-bit Linux
_free_words: list[Word] = []


def new_word() -> Word:
    """A word that nobody has posted."""
    try:
        word = _free_words.pop()
    except IndexError:
        word = Word.from_address(_libc().calloc(1, _WORD_BYTES))
    _libc().sem_init(word.address, 0, 0)
    return word


def use_again(word: Word) -> None:
    """`word` was posted for the last time."""
    _free_words.append(word)


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    libc.calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_post.argtypes = libc.sem_trywait.argtypes = (ctypes.c_void_p,)
    return libc


@lru_cache(maxsize=1)
def post_address() -> int:
    """The address of sem_post, which may be called from any thread and needs nothing of Python."""
    return ctypes.cast(_libc().sem_post, ctypes.c_void_p).value or 0


_load_lock = threading.Lock()
_loaded: dict[str, Runtime] = {}


def load_runtime(cuda_version: str | None, hip_version: str | None) -> Runtime:
    """The runtime that torch works with: torch.version.cuda and torch.version.hip say which.

    Raises BackendUnavailableError if it is not found.
    """
    names, version = (HIP, hip_version) if hip_version else (CUDA, cuda_version or "")
    with _load_lock:
        runtime = _loaded.get(names.library)
        if runtime is None:
            runtime = _loaded[names.library] = Runtime(_open(names.library, version), names)
    return runtime


def _open(library: str, version: str) -> ctypes.CDLL:
    """Torch has loaded it already, under whichever path: the one in this process comes first."""
    major, _, rest = version.partition(".")
    versioned = [f"{library}.{major}", f"{library}.{major}.{rest.partition('.')[0]}"]
    # Without a version only what is here already: the loader's path may have another version's.
    loaded = [(name, os.RTLD_NOLOAD) for name in (*versioned, library)]
    for name, mode in (*loaded, *((name, ctypes.DEFAULT_MODE) for name in versioned)):
        with suppress(OSError):
            return ctypes.CDLL(name, mode=mode)
    raise BackendUnavailableError(
        f"none of {', '.join(versioned)} can be loaded: without the runtime that torch {version} works with, captures "
        "cannot be told apart. Put it on the loader's path (LD_LIBRARY_PATH)."
    )
