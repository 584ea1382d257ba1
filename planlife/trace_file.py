"""Lines of a trace, plain or gzip, and what is wrong with them: one message that names file and line."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from .errors import ConfigError

_MAX_LINE_BYTES = 1 << 20  # a JSON line carries one hash per block of its prompt; a file without line ends is no trace
_GZIP_MAGIC = b"\x1f\x8b"


class TraceError(ConfigError):
    """A trace that cannot be read. The message is one line and names the file, and the line if there is one."""


class Refused(Exception):
    """What is wrong with the current line; `TraceFile.explaining` adds where."""


class TraceFile:
    """A file that is read line by line, once. Raises TraceError for what is no path.

    line_number: of the line that was read last, 0 before the first.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        if type(name) is not str or "\0" in name:
            raise TraceError(f"a trace is named by its path, a string without zero bytes; got {path!r}.")
        self.name = name
        self.line_number = 0

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around the reading and the parsing: turns what goes wrong into a TraceError."""
        try:
            yield
        except Refused as refused:
            raise TraceError(f"trace {self.name!r}, line {max(1, self.line_number)}: {refused}.") from None
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            if isinstance(error, OSError) and error.errno and not self.line_number:
                raise TraceError(f"trace {self.name!r} cannot be opened: {reason}.") from None
            raise TraceError(f"trace {self.name!r}, line {self.line_number + 1}: cannot read on: {reason}.") from None

    def lines(self) -> Iterator[str]:
        """The lines that are not blank, stripped. Raises Refused, OSError, EOFError, zlib.error."""
        for raw_line in self._raw_lines():
            self.line_number += 1
            line = _text(raw_line)
            if line:
                yield line

    def _raw_lines(self) -> Iterator[bytes]:
        with open(self.name, "rb") as file:
            if file.peek(2)[:2] != _GZIP_MAGIC:
                while line := file.readline(_MAX_LINE_BYTES + 1):
                    yield line
                return
            with gzip.GzipFile(fileobj=file) as unzipped:
                while line := unzipped.readline(_MAX_LINE_BYTES + 1):
                    yield line


def _text(raw_line: bytes) -> str:
    if len(raw_line) > _MAX_LINE_BYTES:
        raise Refused(f"longer than {_MAX_LINE_BYTES} bytes: this is no trace")
    try:
        return raw_line.decode().removeprefix("\ufeff").strip()
    except UnicodeDecodeError as error:
        raise Refused(f"no UTF-8 text (byte {raw_line[error.start]:#04x}): this is no trace") from None


def printable(text: str) -> str:
    """What comes from a file, to be shown: control characters, lone surrogates and their like as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def refuse(what: str, found: object, wanted: str) -> NoReturn:
    """Raise Refused for a value, shown in at most 60 characters."""
    shown = repr(found)
    raise Refused(f"{what} must be {wanted}; got {shown if len(shown) <= 60 else shown[:57] + '...'}")
