"""What a caller has set torch to stays out of our own work: function modes (a default device is one), and autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Whether this thread has function modes: each Python-level read of a tensor then runs their code. One C call.
is_disturbed: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


class OwnMode(TorchFunctionMode):
    """A mode of planlife's own, which stays where it is the only one."""


def undisturbed() -> AbstractContextManager[None]:
    """In the body no function mode of the caller's sees what this thread does with tensors."""
    num_modes = torch._C._len_torch_function_stack()
    if num_modes == 0 or (num_modes == 1 and isinstance(torch._C._get_function_stack_at(0), OwnMode)):
        return nullcontext()
    return torch._C.DisableTorchFunction()


def as_called() -> AbstractContextManager[None]:
    """In the body of an `undisturbed` one the caller's modes are there again."""
    if not torch._C._len_torch_function_stack():
        return nullcontext()
    return torch._C._EnableTorchFunction()


def plain(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run `function` as if the caller had set neither function modes nor autocast.

    Default device and default dtype are for `function` to name: whatever it creates, it creates with both.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not (is_disturbed() or torch._C._is_any_autocast_enabled()):
            return function(*args, **kwargs)
        with undisturbed(), torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run
