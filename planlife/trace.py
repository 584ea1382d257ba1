"""Request traces: what arrived when, with how many tokens. Reads the public formats as they are published."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any, NoReturn

from .errors import ConfigError

_MAX_TOKENS = 2**31 - 1
_MAX_MILLISECONDS = 10**15
_MAX_LINE_BYTES = 1 << 20  # a JSON line carries one hash per block of its prompt; a file without line ends is no trace
_GZIP_MAGIC = b"\x1f\x8b"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([+-]\d\d:\d\d)?", re.ASCII)
_DECIMAL = re.compile(r"\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_WHOLE = re.compile(r"\d{1,20}", re.ASCII)


class TraceError(ConfigError):
    """A trace that cannot be read. The message is one line and names the file and the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    arrival_seconds: since the trace's first request, >= 0, never falling along a trace.
    input_tokens, output_tokens: prompt and generated tokens, each in [0, 2**31 - 1].
    """

    arrival_seconds: float
    input_tokens: int
    output_tokens: int


def read_trace(path: str | os.PathLike[str]) -> list[Request]:
    """The requests of a trace file, in its order.

    path: plain or gzip, told apart by content, as are the formats:
        CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces; date and time),
        CSV `timestamp_ms,input_tokens,output_tokens`,
        JSON Lines with `timestamp` in ms, `input_length`, `output_length` (Mooncake); other keys are ignored.
        A byte order mark, CRLF and blank lines are accepted; arrivals that go back in time are not.

    Raises TraceError. Capture: n/a. Syncs: no. Allocates: host memory only.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if type(name) is not str or "\0" in name:
        raise TraceError(f"a trace is named by its path, a string without zero bytes; got {path!r}.")
    parse: _Parser | None = None
    requests: list[Request] = []
    start_ns = previous_ns = line_number = 0
    try:
        for raw_line in _raw_lines(name):
            line_number += 1
            line = _text(raw_line)
            if not line:
                continue
            if parse is None:
                parse = _parser_for(line)
                if parse is not _parse_json:
                    continue
            arrival_ns, input_tokens, output_tokens = parse(line)
            if not requests:
                start_ns = previous_ns = arrival_ns
            if arrival_ns < previous_ns:
                earlier_by = (previous_ns - arrival_ns) / 1e9
                raise _Refused(f"arrives {earlier_by:g} s before the request above it: sort the trace by time")
            previous_ns = arrival_ns
            requests.append(Request((arrival_ns - start_ns) / 1e9, input_tokens, output_tokens))
        if not requests:
            found = "the file is empty" if parse is None else "nothing follows the header"
            raise _Refused(f"{found}: a trace has at least one request")
    except _Refused as refused:
        raise TraceError(f"trace {name!r}, line {max(1, line_number)}: {refused}.") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        is_unopened = isinstance(error, OSError) and error.errno and not line_number
        what = "cannot be opened" if is_unopened else "cannot read on"
        raise TraceError(f"trace {name!r}, line {line_number + 1}: {what}: {reason}.") from None
    return requests


_Parser = Callable[[str], tuple[int, int, int]]  #: a line -> (arrival in ns, input tokens, output tokens)


class _Refused(Exception):
    """What is wrong with the current line; read_trace adds where."""


def _raw_lines(name: str) -> Iterator[bytes]:
    with open(name, "rb") as file:
        if file.peek(2)[:2] != _GZIP_MAGIC:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                yield line
            return
        with gzip.GzipFile(fileobj=file) as unzipped:
            while line := unzipped.readline(_MAX_LINE_BYTES + 1):
                yield line


def _text(raw_line: bytes) -> str:
    if len(raw_line) > _MAX_LINE_BYTES:
        raise _Refused(f"longer than {_MAX_LINE_BYTES} bytes: this is no trace")
    try:
        return raw_line.decode().removeprefix("\ufeff").strip()
    except UnicodeDecodeError as error:
        raise _Refused(f"no UTF-8 text (byte {raw_line[error.start]:#04x}): this is no trace") from None


def _parser_for(line: str) -> _Parser:
    if line.startswith("{"):
        return _parse_json
    header = tuple(field.strip() for field in line.split(","))
    arrival_of = _ARRIVAL_BY_HEADER.get(header)
    if arrival_of is None:
        known = " or ".join(",".join(header) for header in _ARRIVAL_BY_HEADER)
        _refuse("header", line, f"{known}, or JSON Lines")

    def parse_csv(line: str) -> tuple[int, int, int]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            _refuse("row", line, f"{len(header)} fields: {','.join(header)}")
        arrival, input_tokens, output_tokens = fields
        return (arrival_of(header[0], arrival), _tokens(header[1], input_tokens), _tokens(header[2], output_tokens))

    return parse_csv


def _parse_json(line: str) -> tuple[int, int, int]:
    try:
        row = json.loads(line, parse_float=Decimal)
    except (ValueError, RecursionError):
        _refuse("row", line, "a JSON object")
    if type(row) is not dict:
        _refuse("row", line, "a JSON object")
    for key in ("timestamp", "input_length", "output_length"):
        # Only what JSON calls a number may reach the parsers below, which work on its digits.
        if type(row.get(key)) not in (int, Decimal):
            _refuse(key, row.get(key), "a number")
    return (
        _milliseconds("timestamp", str(row["timestamp"])),
        _tokens("input_length", str(row["input_length"])),
        _tokens("output_length", str(row["output_length"])),
    )


def _tokens(column: str, digits: str) -> int:
    if not _WHOLE.fullmatch(digits) or int(digits) > _MAX_TOKENS:
        _refuse(column, digits, f"a whole number in [0, {_MAX_TOKENS}]")
    return int(digits)


def _milliseconds(column: str, digits: str) -> int:
    if not _DECIMAL.fullmatch(digits) or Decimal(digits) > _MAX_MILLISECONDS:
        _refuse(column, digits, f"milliseconds in [0, {_MAX_MILLISECONDS}]")
    return int(Decimal(digits) * 10**6)


def _clock(column: str, value: str) -> int:
    # datetime drops the seventh digit of these files, and a float of seconds since 1970 would round it.
    match = _CLOCK.fullmatch(value)
    try:
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00")) if match else None
    except ValueError:
        moment = None
    if match is None or moment is None:
        _refuse(column, value, "a date and time such as 2023-11-16 18:15:46.6805900")
    since_epoch = moment - _EPOCH
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 10**9 + int((match[2] or "").ljust(9, "0"))


_ARRIVAL_BY_HEADER: dict[tuple[str, ...], Callable[[str, str], int]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _clock,
    ("timestamp_ms", "input_tokens", "output_tokens"): _milliseconds,
}


def _refuse(what: str, found: Any, wanted: str) -> NoReturn:
    shown = repr(found)
    raise _Refused(f"{what} must be {wanted}; got {shown if len(shown) <= 60 else shown[:57] + '...'}")
