"""For tests of planlife and of engines that use it. Names import on first use: the fakes need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..emulated_graph import EmulatedGraph, current_capture_id, launch, record
    from ..planner import plan_tables
    from .builder_suite import BuilderAdapter, BuilderFailure, check_builder
    from .fakes import FakeBackend, FakeDevice, FakeTensor
    from .reference import reference_decode

_HOMES = {
    "BuilderAdapter": ".builder_suite",
    "BuilderFailure": ".builder_suite",
    "EmulatedGraph": "..emulated_graph",
    "FakeBackend": ".fakes",
    "FakeDevice": ".fakes",
    "FakeTensor": ".fakes",
    "check_builder": ".builder_suite",
    "current_capture_id": "..emulated_graph",
    "launch": "..emulated_graph",
    "plan_tables": "..planner",
    "record": "..emulated_graph",
    "reference_decode": ".reference",
}

__all__ = [
    "BuilderAdapter",
    "BuilderFailure",
    "EmulatedGraph",
    "FakeBackend",
    "FakeDevice",
    "FakeTensor",
    "check_builder",
    "current_capture_id",
    "launch",
    "plan_tables",
    "record",
    "reference_decode",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
