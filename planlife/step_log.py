"""Step logs: the row count of every step that an engine planned, and when. One line of JSON per block of steps.

A line is an object of columns, equally long lists with one entry per step:

    {"planlife_steps": 1, "dt_us": [0, 8123, ...], "rows": [17, 17, ...]}

planlife_steps: the version of the format, 1. dt_us: whole microseconds since the step before, 0 for the first of the
log. rows: sequences of the step; 0 is a dummy. Where there is more than one of each, also ubatch: a micro-batch per
step, and site: an index per step into sites, a list of names. Nothing else, no tokens and no text: what a planner
decides depends on row counts alone.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, NamedTuple, cast

from .errors import ConfigError
from .trace_file import Refused, TraceFile, refuse

FORMAT_VERSION = 1
MAX_BLOCK_STEPS = 4096

_MAX_ROWS = 2**31 - 1
_MAX_DT_US = 10**15
_MAX_UBATCH = 1023
_DEFAULT_SITES = ("default",)


class StepBlock(NamedTuple):
    """Some consecutive steps, as columns. None for site or ubatch: 0 throughout.

    dt_us: since the step before. site: indices into `sites`.
    """

    dt_us: list[int]
    rows: list[int]
    sites: tuple[str, ...] = _DEFAULT_SITES
    site: list[int] | None = None
    ubatch: list[int] | None = None


def is_step_log(path: str | os.PathLike[str]) -> bool:
    """Whether the first line of a file is one of a step log. Raises TraceError for a file that cannot be read."""
    file = TraceFile(path)
    with file.explaining():
        first_line = next(file.lines(), "")
    return first_line.startswith("{") and '"planlife_steps"' in first_line


def stream_step_log(path: str | os.PathLike[str]) -> Iterator[StepBlock]:
    """The blocks of a step log, plain or gzip; memory does not grow with the file.

    Raises TraceError where the file turns out to be broken. Capture: n/a. Syncs: no. Allocates: host memory only.
    """
    file = TraceFile(path)
    is_empty = True
    with file.explaining():
        for line in file.lines():
            block = _parse(line)
            is_empty = is_empty and not block.rows
            yield block
        if is_empty:
            raise Refused("there is no step: a step log has at least one")


def _parse(line: str) -> StepBlock:
    try:
        columns = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        refuse("block", line, "a JSON object")
    if type(columns) is not dict:
        refuse("block", line, "a JSON object")
    version = columns.pop("planlife_steps", None)
    if type(version) is not int or version != FORMAT_VERSION:
        refuse("planlife_steps", version, f"{FORMAT_VERSION}, the version of the format")
    sites = columns.pop("sites", list(_DEFAULT_SITES))
    if type(sites) is not list or not sites or not all(type(site) is str and site for site in sites):
        refuse("sites", sites, "a list of names")
    dt_us = _column(columns, "dt_us", _MAX_DT_US)
    rows = _column(columns, "rows", _MAX_ROWS)
    site = _column(columns, "site", len(sites) - 1) if "site" in columns else None
    ubatch = _column(columns, "ubatch", _MAX_UBATCH) if "ubatch" in columns else None
    if columns:
        refuse("columns", ", ".join(columns), "dt_us, rows, site, sites and ubatch")
    for name, column in (("dt_us", dt_us), ("site", site), ("ubatch", ubatch)):
        if column is not None and len(column) != len(rows):
            raise Refused(f"{name} has {len(column)} entries and rows has {len(rows)}: there is one of each per step")
    return StepBlock(dt_us, rows, tuple(sites), site, ubatch)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _column(columns: dict[str, Any], name: str, at_most: int) -> list[int]:
    column = columns.pop(name, None)
    if type(column) is not list:
        refuse(name, column, "a list of whole numbers")
    if column and (set(map(type, column)) != {int} or min(column) < 0 or max(column) > at_most):
        wrong = next(entry for entry in column if type(entry) is not int or not 0 <= entry <= at_most)
        refuse(f"an entry of {name}", wrong, f"a whole number in [0, {at_most}]")
    return column


class StepLogWriter:
    """Writes a step log; gzip where the path ends in .gz. A block is written when it is full and at the end.

    Owns: the file, until close(). Raises OSError. Not for several threads at once.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        if type(name) is not str or "\0" in name:
            raise ConfigError(f"a step log is named by its path, a string without zero bytes; got {path!r}.")
        self._file = cast(IO[bytes], (gzip.open if name.endswith(".gz") else open)(name, "wb"))
        self._site_index: dict[str, int] = {}
        self._dt_us: list[int] = []
        self._rows: list[int] = []
        self._site: list[int] = []
        self._ubatch: list[int] = []

    def add(self, dt_us: int, rows: int, site: str = "default", ubatch: int = 0) -> None:
        """Note one step."""
        self._dt_us.append(dt_us)
        self._rows.append(rows)
        self._site.append(self._site_index.setdefault(site, len(self._site_index)))
        self._ubatch.append(ubatch)
        if len(self._rows) >= MAX_BLOCK_STEPS:
            self.flush()

    def add_blocks(self, blocks: Iterable[StepBlock]) -> None:
        """Note the steps of blocks, as they come."""
        for block in blocks:
            for i, (dt_us, rows) in enumerate(zip(block.dt_us, block.rows, strict=True)):
                site = block.sites[block.site[i] if block.site is not None else 0]
                self.add(dt_us, rows, site, block.ubatch[i] if block.ubatch is not None else 0)

    def flush(self) -> None:
        """Write what was noted since the last block."""
        if not self._rows:
            return
        columns: dict[str, Any] = {"planlife_steps": FORMAT_VERSION, "dt_us": self._dt_us, "rows": self._rows}
        sites = list(self._site_index)
        if sites != list(_DEFAULT_SITES):
            columns |= {"site": self._site, "sites": sites}
        if any(self._ubatch):
            columns["ubatch"] = self._ubatch
        self._file.write(json.dumps(columns, separators=(",", ":")).encode() + b"\n")
        for column in (self._dt_us, self._rows, self._site, self._ubatch):
            column.clear()

    def close(self) -> None:
        """Write the rest and close the file. Idempotent."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def abandon(self) -> None:
        """Close the file without what it did not take."""
        for column in (self._dt_us, self._rows, self._site, self._ubatch):
            column.clear()
        with suppress(OSError):
            self._file.close()

    def __enter__(self) -> StepLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
