"""A Python of its own, for what is decided when a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python *arguments` in the repository, which imports what this process can, wherever that was found.

    environment: variables beside this process's own.
    """
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
