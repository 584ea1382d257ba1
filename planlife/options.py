"""What the commands share: how options are read, and how progress is shown."""

from __future__ import annotations

import re

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kmgt])(i?))?b?", re.ASCII | re.IGNORECASE)


def byte_count(text: str) -> int:
    """4096, 512KiB, 3MiB, 1.5GB -> bytes. KiB, MiB, ... are powers of 1024; kB, MB, ... of 1000."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no number of bytes: write 4096, 512KiB, 3MiB or 1.5GB.")
    number, letter, binary = match.groups()
    exponent = "kmgt".index(letter.lower()) + 1 if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def progress_bar(console: Console) -> Progress:
    """A bar that is gone when its work is done, and never there where nobody looks."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
