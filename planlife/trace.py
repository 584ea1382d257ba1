"""Request traces: what arrived when, with how many tokens. Reads the public formats as they are published."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal

from .trace_file import Refused, TraceError, TraceFile, refuse

__all__ = ["Request", "TraceError", "read_trace", "stream_trace"]

_MAX_TOKENS = 2**31 - 1
_MAX_MILLISECONDS = 10**15
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?([+-]\d\d:\d\d)?", re.ASCII)
_DECIMAL = re.compile(r"\d{1,20}(?:\.\d{1,20})?", re.ASCII)
_WHOLE = re.compile(r"\d{1,20}", re.ASCII)


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
    """The requests of a trace file, in its order, as `stream_trace` reads them.

    Raises TraceError. Capture: n/a. Syncs: no. Allocates: host memory only.
    """
    return list(stream_trace(path))


def stream_trace(path: str | os.PathLike[str]) -> Iterator[Request]:
    """The requests of a trace file one by one, in its order; memory does not grow with the file.

    path: plain or gzip, told apart by content, as are the formats:
        CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces; date and time),
        CSV `timestamp_ms,input_tokens,output_tokens`,
        JSON Lines with `timestamp` in ms, `input_length`, `output_length` (Mooncake); other keys are ignored.
        A byte order mark, CRLF and blank lines are accepted; arrivals that go back in time are not.

    Raises TraceError where the file turns out to be broken. Capture: n/a. Syncs: no. Allocates: host memory only.
    """
    file = TraceFile(path)
    parse: _Parser | None = None
    start_ns: int | None = None
    previous_ns = 0
    with file.explaining():
        for line in file.lines():
            if parse is None:
                parse = _parser_for(line)
                if parse is not _parse_json:
                    continue
            arrival_ns, input_tokens, output_tokens = parse(line)
            if start_ns is None:
                start_ns = previous_ns = arrival_ns
            if arrival_ns < previous_ns:
                earlier_by = (previous_ns - arrival_ns) / 1e9
                raise Refused(f"arrives {earlier_by:g} s before the request above it: sort the trace by time")
            previous_ns = arrival_ns
            yield Request((arrival_ns - start_ns) / 1e9, input_tokens, output_tokens)
        if start_ns is None:
            found = "the file is empty" if parse is None else "nothing follows the header"
            raise Refused(f"{found}: a trace has at least one request")


_Parser = Callable[[str], tuple[int, int, int]]  #: a line -> (arrival in ns, input tokens, output tokens)


def _parser_for(line: str) -> _Parser:
    if line.startswith("{"):
        return _parse_json
    header = tuple(field.strip() for field in line.split(","))
    arrival_of = _ARRIVAL_BY_HEADER.get(header)
    if arrival_of is None:
        known = " or ".join(",".join(header) for header in _ARRIVAL_BY_HEADER)
        refuse("header", line, f"{known}, or JSON Lines")

    def parse_csv(line: str) -> tuple[int, int, int]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            refuse("row", line, f"{len(header)} fields: {','.join(header)}")
        arrival, input_tokens, output_tokens = fields
        return (arrival_of(header[0], arrival), _tokens(header[1], input_tokens), _tokens(header[2], output_tokens))

    return parse_csv


def _parse_json(line: str) -> tuple[int, int, int]:
    try:
        row = json.loads(line, parse_float=Decimal)
    except (ValueError, RecursionError):
        refuse("row", line, "a JSON object")
    if type(row) is not dict:
        refuse("row", line, "a JSON object")
    for key in ("timestamp", "input_length", "output_length"):
        # Only what JSON calls a number may reach the parsers below, which work on its digits.
        if type(row.get(key)) not in (int, Decimal):
            refuse(key, row.get(key), "a number")
    return (
        _milliseconds("timestamp", str(row["timestamp"])),
        _tokens("input_length", str(row["input_length"])),
        _tokens("output_length", str(row["output_length"])),
    )


def _tokens(column: str, digits: str) -> int:
    if not _WHOLE.fullmatch(digits) or int(digits) > _MAX_TOKENS:
        refuse(column, digits, f"a whole number in [0, {_MAX_TOKENS}]")
    return int(digits)


def _milliseconds(column: str, digits: str) -> int:
    if not _DECIMAL.fullmatch(digits) or Decimal(digits) > _MAX_MILLISECONDS:
        refuse(column, digits, f"milliseconds in [0, {_MAX_MILLISECONDS}]")
    return int(Decimal(digits) * 10**6)


def _clock(column: str, value: str) -> int:
    # datetime drops the seventh digit of these files, and a float of seconds since 1970 would round it.
    match = _CLOCK.fullmatch(value)
    try:
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00")) if match else None
    except ValueError:
        moment = None
    if match is None or moment is None:
        refuse(column, value, "a date and time such as 2023-11-16 18:15:46.6805900")
    since_epoch = moment - _EPOCH
    return (since_epoch.days * 86_400 + since_epoch.seconds) * 10**9 + int((match[2] or "").ljust(9, "0"))


_ARRIVAL_BY_HEADER: dict[tuple[str, ...], Callable[[str, str], int]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _clock,
    ("timestamp_ms", "input_tokens", "output_tokens"): _milliseconds,
}
