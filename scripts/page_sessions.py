"""Runs the ```pycon blocks of a page, and writes what they print and raise under each input."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from doctest import DocTestParser
from io import StringIO
from typing import Any

import planlife

_SESSION = re.compile(r"(?<=^```pycon\n).*?(?=^```$)", re.M | re.S)
_CODE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
_COLUMNS = 116


def replayed(page: str) -> str:
    """The page with the outputs that its sessions have now.

    Each session starts from what the page's ```python blocks define. An error is shown by the name that planlife
    exports, and its message. What differs between two runs does not show: addresses, and the numbers of captures,
    which are counted anew in each session.
    """
    if not _SESSION.search(page):
        return page
    names: dict[str, Any] = {"__name__": "page"}
    for block in _CODE.findall(page):
        exec(compile(block, "page", "exec"), names)
    return _SESSION.sub(lambda session: "".join(_lines(session[0], dict(names))), page)


def _lines(session: str, names: dict[str, Any]) -> Iterator[str]:
    captures: dict[str, str] = {}
    for example in DocTestParser().get_examples(session):
        first, *others = example.source.splitlines()
        yield f">>> {first}\n"
        yield from (f"... {line}".rstrip() + "\n" for line in others)
        for line in _output(example.source, names).splitlines():
            line = re.sub(r"\b0x[0-9a-f]+", "0x…", line)
            line = re.sub(
                r"(?<=\bcapture )\d+", lambda found: captures.setdefault(found[0], str(len(captures) + 1)), line
            )
            yield textwrap.fill(line, _COLUMNS, break_long_words=False, break_on_hyphens=False) + "\n"


def _output(source: str, names: dict[str, Any]) -> str:
    printed = StringIO()
    with redirect_stdout(printed):
        try:
            exec(compile(source, "session", "single"), names)
        except Exception as error:
            known = (one.__name__ for one in type(error).__mro__ if one.__name__ in planlife.__all__)
            print(f"{next(known, type(error).__name__)}: {error}")
    return printed.getvalue()
