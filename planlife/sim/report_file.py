"""A live manager's report, read back from its JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..report import ArenaLine, MemoryReport, PlanLine
from ..trace_file import TraceError

_MAX_BYTES = 64 << 20
_KINDS: dict[str, type] = {"int": int, "str": str, "bool": bool, "dict[str, int]": dict, "dict[str, str]": dict}


def read_report(path: str | os.PathLike[str]) -> MemoryReport:
    """What `PlanManager.report().to_json()` wrote into a file. Raises TraceError that names the file and the field."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES:,} bytes: this is no report")
        values = json.loads(content.decode().removeprefix("\ufeff"))
        if type(values) is dict:
            values = {
                **values,
                "plans": tuple(_line(PlanLine, f"plans[{i}]", one) for i, one in enumerate(values.get("plans") or ())),
                "arenas": tuple(
                    _line(ArenaLine, f"arenas[{i}]", one) for i, one in enumerate(values.get("arenas") or ())
                ),
            }
        report: MemoryReport = _line(MemoryReport, "the report", values)
        return report
    except OSError as error:
        raise TraceError(f"report {name!r}: cannot be opened: {error.strerror or error}.") from None
    except (ValueError, TypeError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise TraceError(f"report {name!r}: {message}. Write it with PlanManager.report().to_json().") from None


def _line(kind: Any, where: str, values: object) -> Any:
    if type(values) is not dict:
        raise ValueError(f"{where} must be an object, got {_shown(values)}")
    known = {field.name: str(field.type) for field in fields(kind)}
    unknown, missing = sorted(values.keys() - known.keys()), sorted(known.keys() - values.keys() - {"note"})
    if unknown or missing:
        what = f"has no field {missing[0]}" if missing else f"has an unknown field {unknown[0]!r:.60}"
        raise ValueError(f"{where} {what}")
    for name, wanted in known.items():
        if name in values and wanted in _KINDS:
            _check(f"{where}.{name}", values[name], wanted)
    return kind(**values)


def _check(where: str, value: object, wanted: str) -> None:
    if type(value) is not _KINDS[wanted]:
        raise ValueError(f"{where} must be {wanted}, got {_shown(value)}")
    if wanted == "int" and not 0 <= value < 1 << 63:  # type: ignore[operator]
        raise ValueError(f"{where} must be in [0, 2**63), got {_shown(value)}")
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _check(f"{where}.{key:.60}", entry, "int" if wanted.endswith("int]") else "str")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
