"""What the lifecycle needs of a device. The core is written against this protocol and knows no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from .errors import ConfigError

Buffer = Any  #: what `Device.allocate` returns: one block of bytes at a fixed address
Graph = Any  #: a CUDA graph, or an emulated one

_Method = TypeVar("_Method", bound=Callable[..., Any])

_SMALL_STEP_BYTES = 512
_LARGE_STEP_BYTES = 2 << 20
_LARGE_FROM_BYTES = 1 << 20


def block_bytes(num_bytes: int) -> int:
    """What a buffer of `num_bytes` takes in the allocator: 512-byte steps, from 1 MiB up 2 MiB steps.

    512 bytes is the rounding of torch's caching allocator; 2 MiB makes large buffers tile its segments, so that an
    evicted one can be reused whole.
    """
    step = _LARGE_STEP_BYTES if num_bytes >= _LARGE_FROM_BYTES else _SMALL_STEP_BYTES
    return -(-num_bytes // step) * step


class GoneCaptures(Protocol):
    """Capture ids whose graph is gone. Destructors and finalisers only add; entry points drain.

    True when something waits, at the price of one C call: every entry point asks.
    """

    def popleft(self) -> int:
        """One of them; IndexError if none is known yet."""
        ...


class ReleaseQueue(deque[int]):
    """GoneCaptures where finalisers run in Python: they append."""


class Device(Protocol):
    """Memory, streams and graphs of one device, as far as the lifecycle needs them."""

    name: str  #: "cpu", "cuda:0", as torch writes it
    num_compute_units: int  #: the planner's CU count

    def allocate(self, num_bytes: int) -> Buffer:
        """A block of exactly `num_bytes`, contents undefined.

        Raises MemoryError when the allocator has none, MintError when this thread's stream is recording.
        """
        ...

    def free(self, buffer: Buffer, stream: int) -> None:
        """The manager drops its reference. stream: where the block was last used; all other uses were ordered before.

        Work already queued there must still find the block intact. The host does not wait.
        """
        ...

    def current_stream(self) -> int:
        """This thread's current stream on this device. Work of one stream runs in the order of its launches."""
        ...

    def order_after(self, stream: int) -> None:
        """What this thread's current stream is given from now on runs after all that `stream` was given so far.

        The host does not wait. Not while this thread's stream records.
        """
        ...

    def relaxed(self) -> AbstractContextManager[None]:
        """What this thread does in the body, loading code and allocating too, kills no capture of another thread."""
        ...

    def dtype(self, name: str) -> object:
        """The tensor library's dtype object for a name of spec.DTYPE_BYTES, or for "int32"."""
        ...

    def inspect_lens(self, context_lens: Any) -> tuple[int, int, int | None]:
        """(rows, address, version) of a length tensor; version None where it cannot be read.

        Raises ConfigError unless it is int32[rows], contiguous, on this device, without requires_grad.
        """
        ...

    def capture_id(self) -> int:
        """Process-unique id of the capture that this thread's current stream is in, 0 when it is not recording."""
        ...

    def is_disturbed(self) -> bool:
        """Whether some mode of the caller's runs Python code whenever this thread reads a tensor. Every call asks."""
        ...

    def undisturbed(self) -> AbstractContextManager[None]:
        """In the body no such mode sees what this thread does with tensors."""
        ...

    def as_called(self) -> AbstractContextManager[None]:
        """In the body of an `undisturbed` one the caller's modes are there again, for code that is the caller's."""
        ...

    def release_queue(self) -> GoneCaptures:
        """A queue of one manager for `watch_capture`."""
        ...

    def watch_capture(self, queue: Any, keep: object) -> int:
        """Add the current capture's id to `queue`, one of this device, once its graph is reset, collected or failed and
        the device is done with its last replay; keep `keep` alive until then, even if the manager is dropped. Returns
        that id. Called while recording."""
        ...

    def new_graph(self) -> Graph:
        """An empty graph object."""
        ...

    def record(self, graph: Graph, **options: Any) -> AbstractContextManager[Any]:
        """Record what the body launches into `graph`; options as for torch.cuda.graph.

        A body that raises leaves `graph` empty, and what watched its capture is told before the exception goes on.
        """
        ...

    def capture_of(self, graph: Graph) -> int | None:
        """Id of the finished capture that `graph` holds, 0 if it holds none; None where the graph object does not tell.

        While it is recorded into: the id of that capture, or 0.
        """
        ...

    def may_be_last_capture(self, capture_id: int) -> bool:
        """Whether no other capture of this process need have begun after that one, which has ended; True where nothing
        tells."""
        ...

    def reset(self, graph: Graph) -> None:
        """Empty `graph` so that it may be recorded again."""
        ...

    def replay(self, graph: Graph) -> None:
        """Launch `graph`."""
        ...

    def fill(self, tensor: Any, value: float) -> None:
        """Write one number into all of a caller's tensor, whatever mode it was made in."""
        ...

    def empty_lens(self, context_lens: Any) -> None:
        """Write zeros into a caller's length tensor, whatever mode it was made in. Its version does not move: the
        lengths of others in the same storage are what they were."""
        ...

    def zeros_flags(self, num_words: int) -> Buffer:
        """int64[num_words] zeros on the device, outside the byte budget (the sanitizer's counters). Not while recording
        on a GPU."""
        ...

    def read_flags(self, flags: Buffer) -> Sequence[int]:
        """What was added to each word since the last call, as far as it is known without waiting for the device.

        A GPU tells a little later: the call after the one that the device has caught up with.
        """
        ...


def undisturbed(method: _Method) -> _Method:
    """A method that reads tensors, which no mode of the caller's sees. Of an object with _device and _is_disturbed."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_disturbed():
            return method(self, *args, **kwargs)
        with self._device.undisturbed():
            return method(self, *args, **kwargs)

    return cast(_Method, run)


def require_members(what: str, thing: object, protocol: type) -> None:
    """ConfigError unless `thing` is an object with all members of `protocol`; names the missing ones."""
    if isinstance(thing, type):
        raise ConfigError(f"{what} must be a name or an object, got the class {thing.__name__}: call it.")
    members = sorted({*protocol.__annotations__, *(name for name in vars(protocol) if name[0] != "_")})
    missing = [name for name in members if not hasattr(thing, name)]
    if missing:
        raise ConfigError(
            f"{what} must be a name or an object with the members of {protocol.__module__}.{protocol.__name__}; "
            f"{type(thing).__name__} lacks {', '.join(missing)}."
        )


def require_device(device: object) -> Device:
    """`device` if it is an object with all of Device's members, else a ConfigError that names the missing ones."""
    require_members("device", device, Device)
    return cast(Device, device)
