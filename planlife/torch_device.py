"""The devices of the torch backends: what all of them share, the CPU, and which one a user means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from . import ambient
from .device import Device, ReleaseQueue, require_device
from .emulated_graph import (
    EmulatedGraph,
    current_capture_id,
    last_capture_id,
    record,
    unrecorded,
    watch_current_capture,
)
from .errors import ConfigError, MintError
from .kernels.torch_write import overwrite
from .spec import check_int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of torch's had none left.

    The CPU's raises a bare RuntimeError; one that is put in its place may raise torch's own class.
    """
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


class TorchDevice:
    """What is the same on every device of torch. name: as torch writes it."""

    def __init__(self, device: torch.device) -> None:
        self.name = str(device)
        self._device = device
        self.is_disturbed: Callable[[], bool] = ambient.is_disturbed
        self.undisturbed: Callable[[], AbstractContextManager[None]] = ambient.undisturbed
        self.as_called: Callable[[], AbstractContextManager[None]] = ambient.as_called

    def dtype(self, name: str) -> torch.dtype:
        """The torch dtype of that name."""
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype {name!r} is not one of torch's.")
        return dtype

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """Write one number into all of `tensor`. Capture: yes. Syncs: no. Allocates: no."""
        overwrite(tensor, value)

    def empty_lens(self, context_lens: torch.Tensor) -> None:
        """Zeros, which no version tells of. Capture: no. Syncs: no. Allocates: no."""
        with torch.inference_mode():
            overwrite(context_lens.data, 0)

    def inspect_lens(self, context_lens: Any) -> tuple[int, int, int | None]:
        """(rows, address, version) of int32[rows]; version None for an inference tensor.

        Raises ConfigError with everything that is wrong. Capture: allowed. Syncs: no. Allocates: no.
        """
        if not isinstance(context_lens, torch.Tensor):
            raise ConfigError(
                f"context_lens must be a torch.Tensor int32[rows] on {self.name}, got {type(context_lens).__name__}."
            )
        # requires_grad implies another dtype, and is only named in the message.
        if (
            context_lens.dtype is not torch.int32
            or context_lens.dim() != 1
            or not self._is_here(context_lens)
            or not context_lens.is_contiguous()
        ):
            raise ConfigError(self._lens_message(context_lens))
        version = None if context_lens.is_inference() else context_lens._version
        return context_lens.size(0), context_lens.data_ptr(), version

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type and (
            self._device.index is None or tensor.device.index == self._device.index
        )

    def _lens_message(self, lens: torch.Tensor) -> str:
        checks = (
            (lens.dtype is torch.int32, f"dtype {lens.dtype}, wanted torch.int32"),
            (lens.dim() == 1, f"shape {tuple(lens.shape)}, wanted (rows,)"),
            (self._is_here(lens), f"device {lens.device}, wanted {self.name}"),
            (lens.is_contiguous(), f"strides {lens.stride()}, wanted contiguous"),
            (not lens.requires_grad, "requires_grad True, wanted False"),
        )
        is_other_int = lens.dtype in (torch.int64, torch.int16, torch.uint8, torch.int8)
        casting = (
            " In a graph that plans for itself, record the cast, lens.to(torch.int32), and keep the tensor that it "
            "gives: the Steps of guard and replay take that one."
        )
        found = "; ".join(text for is_right, text in checks if not is_right)
        return (
            f"context_lens must be int32[rows], contiguous, on {self.name}, without requires_grad: got {found}. "
            f"Make one int32 buffer on this device and write each step's lengths into it.{casting * is_other_int}"
        )


class CpuDevice(TorchDevice):
    """planlife.device.Device on a CPU, with emulated graphs.

    num_compute_units: the planner's CU count, which a CPU does not have.
    tells_captures: False: no graph object tells which capture it holds, as on a GPU.
    """

    @ambient.plain
    def __init__(self, num_compute_units: int = 256, *, tells_captures: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        self._tells_captures = tells_captures
        self.num_compute_units = check_int("num_compute_units", num_compute_units, at_least=1)
        #: Id of the capture that this thread records, 0 when it records none.
        self.capture_id: Callable[[], int] = current_capture_id

    @ambient.plain
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """uint8[num_bytes], contents undefined.

        Raises MintError while this thread records, MemoryError when there is no memory. Capture: refused.
        """
        if current_capture_id():
            raise MintError(
                f"{num_bytes} bytes were asked for while recording capture {current_capture_id()}: the graph "
                "would own them. Mint before the capture, in a capture phase."
            )
        try:
            # Never an inference tensor: those can only be written in inference mode.
            with torch.inference_mode(False):
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(
                f"the CPU allocator has no {num_bytes} bytes. Lower budget_bytes or the ladder's top class."
            ) from error

    def free(self, buffer: torch.Tensor, stream: int) -> None:
        """Nothing to do: a CPU has no queued work, and the block goes with its last reference."""

    def current_stream(self) -> int:
        """The only one: whatever is launched on a CPU is done by the time the call returns."""
        return 0

    def order_after(self, stream: int) -> None:
        """Nothing to do."""

    def relaxed(self) -> AbstractContextManager[None]:
        """Nothing to do: an emulated capture knows its own stream only."""
        return nullcontext()

    def release_queue(self) -> ReleaseQueue:
        """An empty queue."""
        return ReleaseQueue()

    def watch_capture(self, queue: ReleaseQueue, keep: object) -> int:
        """Append the current capture's id to `queue` once its graph is gone or failed; hold `keep` until then."""
        capture_id = current_capture_id()
        watch_current_capture(partial(_append, queue, capture_id, keep))
        return capture_id

    def new_graph(self) -> EmulatedGraph:
        """An empty graph."""
        return EmulatedGraph()

    def record(self, graph: EmulatedGraph, **options: Any) -> AbstractContextManager[EmulatedGraph]:
        """Record the body into `graph`; options as for torch.cuda.graph."""
        return record(graph, **options)

    def capture_of(self, graph: EmulatedGraph) -> int | None:
        """Id of the capture that `graph` holds, 0 if it holds none; None for the id with tells_captures=False."""
        if self._tells_captures:
            return graph.capture_id
        return None if graph.holds_capture else 0

    def may_be_last_capture(self, capture_id: int) -> bool:
        """Whether it is the last of this process."""
        return capture_id == last_capture_id()

    def reset(self, graph: EmulatedGraph) -> None:
        """Empty `graph`."""
        graph.reset()

    def replay(self, graph: EmulatedGraph) -> None:
        """Run `graph`."""
        graph.replay()

    def zeros_flags(self, num_words: int) -> torch.Tensor:
        """int64[num_words] zeros."""
        with unrecorded(), torch.inference_mode(False):
            return torch.zeros(num_words, dtype=torch.int64, device="cpu")

    def read_flags(self, flags: torch.Tensor) -> Sequence[int]:
        """The words of `flags`, which are zero afterwards. Capture: allowed, not recorded."""
        with unrecorded():
            words: list[int] = flags.tolist()
            flags.zero_()
        return words


def _append(queue: ReleaseQueue, capture_id: int, keep: object) -> None:
    """May run in a garbage collection: nothing but the append. `keep` is held by the partial, and dropped with it."""
    queue.append(capture_id)


def resolve_device(device: object = None) -> Device:
    """The Device for what a user passes: None, a name, a torch.device, or an object with Device's methods.

    None: the current CUDA device if there is one, else the CPU.

    Raises BackendUnavailableError for a GPU where torch sees none, else ConfigError.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(device, (str, torch.device)):
        return require_device(device)
    kind = str(device).partition(":")[0]
    if kind == "cpu":
        return CpuDevice()
    if kind == "cuda":
        # Imported here: a machine without a GPU needs none of it.
        from .cuda_device import CudaDevice

        return CudaDevice(device)
    raise ConfigError(
        "device must be a name or an object with the members of planlife.device.Device; the names are 'cpu', 'cuda' "
        f"and 'cuda:N', got {str(device)!r}."
    )
