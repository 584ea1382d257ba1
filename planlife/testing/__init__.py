"""For tests of planlife and of engines that use it. Names import on first use: the fakes need no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..emulated_graph import EmulatedGraph, EmulatedStream, current_capture_id, current_stream, launch, record
    from ..planner import plan_tables
    from .builder_suite import BuilderAdapter, BuilderFailure, check_builder
    from .decode_table import LAYOUTS, DecodeCase, DecodeInputs, decode_cases, lay_out, row_errors
    from .fakes import FakeBackend, FakeDevice, FakeTensor
    from .reference import reference_decode

_HOMES = {
    "BuilderAdapter": ".builder_suite",
    "BuilderFailure": ".builder_suite",
    "DecodeCase": ".decode_table",
    "DecodeInputs": ".decode_table",
    "EmulatedGraph": "..emulated_graph",
    "EmulatedStream": "..emulated_graph",
    "FakeBackend": ".fakes",
    "FakeDevice": ".fakes",
    "FakeTensor": ".fakes",
    "LAYOUTS": ".decode_table",
    "check_builder": ".builder_suite",
    "current_capture_id": "..emulated_graph",
    "current_stream": "..emulated_graph",
    "decode_cases": ".decode_table",
    "lay_out": ".decode_table",
    "launch": "..emulated_graph",
    "plan_tables": "..planner",
    "record": "..emulated_graph",
    "reference_decode": ".reference",
    "row_errors": ".decode_table",
}

__all__ = [
    "LAYOUTS",
    "BuilderAdapter",
    "BuilderFailure",
    "DecodeCase",
    "DecodeInputs",
    "EmulatedGraph",
    "EmulatedStream",
    "FakeBackend",
    "FakeDevice",
    "FakeTensor",
    "check_builder",
    "current_capture_id",
    "current_stream",
    "decode_cases",
    "launch",
    "lay_out",
    "plan_tables",
    "record",
    "reference_decode",
    "row_errors",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
