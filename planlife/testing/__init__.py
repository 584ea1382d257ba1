"""For tests of planlife and of engines that use it. Names import on first use: the fakes need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..emulated_graph import EmulatedGraph, current_capture_id, launch, record

_HOMES = {
    "EmulatedGraph": "..emulated_graph",
    "current_capture_id": "..emulated_graph",
    "launch": "..emulated_graph",
    "record": "..emulated_graph",
}

__all__ = ["EmulatedGraph", "current_capture_id", "launch", "record"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
