"""A live manager's report, read back from its JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from ..report import ArenaLine, MemoryReport, PlanLine, SiteLine
from ..trace_file import TraceError

_MAX_BYTES = 64 << 20
#: The types that fields of a report have, and what JSON makes of them.
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
    "str | None": (str, type(None)),
    "bool": (bool,),
    "dict[str, int]": (dict,),
    "dict[str, str]": (dict,),
}
_LINES: dict[str, type] = {"sites": SiteLine, "plans": PlanLine, "arenas": ArenaLine}


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
            for field, kind in _LINES.items():
                lines = values.get(field, [])
                if type(lines) is not list:
                    raise ValueError(f"{field} must be a list, got {_shown(lines)}")
                values[field] = tuple(_line(kind, f"{field}[{i}]", line) for i, line in enumerate(lines))
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
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    unknown, missing = sorted(values.keys() - known.keys()), sorted(known.keys() - values.keys() - optional)
    if unknown or missing:
        what = f"has no field {missing[0]}" if missing else f"has an unknown field {unknown[0]!r:.60}"
        raise ValueError(f"{where} {what}")
    for name, wanted in known.items():
        if name in values and name not in _LINES:
            _check(f"{where}.{name}", values[name], wanted)
    return kind(**values)


def _check(where: str, value: object, wanted: str) -> None:
    if type(value) not in _KINDS[wanted]:
        raise ValueError(f"{where} must be {wanted}, got {_shown(value)}")
    if type(value) is int and not 0 <= value < 1 << 63:
        raise ValueError(f"{where} must be in [0, 2**63), got {_shown(value)}")
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _check(f"{where}.{key:.60}", entry, "int" if wanted.endswith("int]") else "str")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
