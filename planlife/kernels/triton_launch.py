"""The one way our Triton kernels are launched: compiled ahead, never by a launch, and recordable on a CPU.

Triton's own launch compiles whatever it has not seen: another dtype, a stride of 1, a row count that 16 divides, a
pointer that is aligned otherwise. In service that is a stall of 200 ms, and inside a capture an error. Here a kernel
is prepared for named dtypes and constants, on no value of an argument, and what was not prepared cannot be launched.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton

from .. import emulated_graph
from ..errors import MintError

#: (x, y, z) blocks. Launch(grid, *pointers, *numbers) runs a prepared kernel on the current stream of its device.
Grid = tuple[int, int, int]
Launch = Callable[..., None]

#: Examples of numbers for when a kernel is prepared: only the annotated type counts.
_NUMBERS = {"tl.int32": 2, "tl.int64": 2, "tl.float32": 0.5}


class Kernel:
    """A Triton kernel that `prepare` compiles and `prepared` hands out to launch.

    function: its parameters are pointers (no annotation), then numbers (tl.int32, tl.int64, tl.float32), then constants
    (tl.constexpr), in a module with `from __future__ import annotations`. Triton learns nothing from the value of a
    pointer or a number; an alignment or a divisor that the kernel needs is a constant, and a hint inside it.

    Raises TypeError for other parameters. Threads: any. Syncs: no. Allocates: code on the device, in prepare.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        kinds = {
            name: "pointer" if parameter.annotation is parameter.empty else parameter.annotation
            for name, parameter in inspect.signature(function).parameters.items()
        }
        self.name = function.__name__
        self._pointers = [name for name, kind in kinds.items() if kind == "pointer"]
        self._numbers = [_NUMBERS[kind] for kind in kinds.values() if kind in _NUMBERS]
        self._constants = [name for name, kind in kinds.items() if kind == "tl.constexpr"]
        varying = len(self._pointers) + len(self._numbers)
        order = ["pointer"] * len(self._pointers) + ["number"] * len(self._numbers)
        order += ["tl.constexpr"] * len(self._constants)
        if ["number" if kind in _NUMBERS else kind for kind in kinds.values()] != order:
            raise TypeError(
                f"the parameters of {self.name} must be pointers without annotation, numbers as "
                f"{' or '.join(_NUMBERS)}, then tl.constexpr; got {kinds}."
            )
        names = list(kinds)[:varying]
        self._function: Any = triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)
        #: TRITON_INTERPRET was set when the kernel was defined: it runs on CPU tensors, and on no others.
        self.is_interpreted = not isinstance(self._function, triton.JITFunction)
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._preparing = threading.Lock()

    def prepare(self, device: str, *dtypes: torch.dtype | None, **constants: Any) -> bool:
        """Compile for `device` ("cpu", "cuda:0") unless that was done; True if it was new.

        dtypes: of the pointers, in order; None = this one will be None. constants: all of them, and Triton's options
        (num_warps, num_stages, …).

        Raises TypeError for missing ones, and what Triton raises. Capture: no. Syncs: may. Allocates: code.
        """
        key = self._key(device, dtypes, constants)
        with self._preparing:
            if key in self._launches:
                return False
            values = [constants.pop(name) for name in self._constants]
            if self.is_interpreted:
                self._launches[key] = _InterpretedLaunch(self._function, values)
                return True
            with torch.cuda.device(device):
                compiled = self._function.warmup(*dtypes, *self._numbers, *values, grid=(1, 1, 1), **constants)
                # Loads the code, which a recording stream may refuse. Not `.run`, which only the first time says that
                # the device is too small: another spec may have met this kernel before.
                _ = compiled[(1, 1, 1)]
                self._launches[key] = _CompiledLaunch(compiled, torch.cuda.current_device(), values)
            return True

    def prepared(self, device: str, *dtypes: torch.dtype | None, **constants: Any) -> Launch:
        """What launches the kernel, prepared with the same arguments before.

        Raises MintError if it was not. Capture: yes. Syncs: no. Allocates: no.
        """
        launch = self._launches.get(self._key(device, dtypes, constants))
        if launch is None:
            raise MintError(
                f"kernel {self.name} was not compiled for {device}, {', '.join(map(str, dtypes))} and {constants}, and "
                "a launch never compiles. Mint the class in a capture phase: Backend.compile prepares its kernels."
            )
        return launch

    def pending(self, device: str, *dtypes: torch.dtype | None, **constants: Any) -> Launch:
        """`prepared`, asked at the first launch: for tables that are made before their class is compiled."""
        launch: Launch | None = None

        def launch_prepared(grid: Grid, *args: Any) -> None:
            nonlocal launch
            if launch is None:
                launch = self.prepared(device, *dtypes, **constants)
            launch(grid, *args)

        return launch_prepared

    def _key(self, device: str, dtypes: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
        missing = [name for name in self._constants if name not in constants]
        if missing or len(dtypes) != len(self._pointers):
            raise TypeError(
                f"kernel {self.name} takes a dtype for each of {', '.join(self._pointers)}, and the constants "
                f"{', '.join(self._constants)}; got {len(dtypes)} dtypes and {', '.join(constants)}."
            )
        return (device, dtypes, tuple(sorted(constants.items())))


class _CompiledLaunch:
    """Launches compiled code, which no argument can make compile again."""

    __slots__ = ("_compiled", "_constants", "_current_device", "_device_index", "_raw_stream")

    def __init__(self, compiled: Any, device_index: int, constants: list[Any]) -> None:
        driver = triton.runtime.driver.active
        self._current_device, self._raw_stream = driver.get_current_device, driver.get_current_stream
        self._compiled = compiled
        self._device_index = device_index
        self._constants = constants

    def __call__(self, grid: Grid, *args: Any) -> None:
        index = self._device_index
        if self._current_device() != index:
            # Code and stream belong to one context, and the driver launches in the current one.
            with torch.cuda.device(index):
                return self(grid, *args)
        self._compiled[grid](*args, *self._constants, stream=self._raw_stream(index))


class _InterpretedLaunch:
    """Interprets the kernel over CPU tensors; while an emulated graph records, it is recorded instead."""

    __slots__ = ("_constants", "_function")

    #: The interpreter replaces triton.language while it runs.
    _running = threading.Lock()

    def __init__(self, function: Any, constants: list[Any]) -> None:
        self._function = function
        self._constants = constants

    def __call__(self, grid: Grid, *args: Any) -> None:
        emulated_graph.launch(self._run, grid, *args)

    def _run(self, grid: Grid, *args: Any) -> None:
        with self._running:
            self._function[grid](*args, *self._constants)
