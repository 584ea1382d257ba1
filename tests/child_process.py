"""A Python of its own, for what is decided when a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's variables and these, with which a child imports what this process can, wherever that was found."""
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": paths, **variables}


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python *arguments` in the repository, in the `child_environment` of these variables."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=child_environment(**environment),
    )
