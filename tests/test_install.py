"""Installed as scripts/setup does, planlife is found from everywhere, beside a clone named planlife too."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .child_process import REPOSITORY

PROGRAM = "from planlife import PlanManager\n\nreveal_type(PlanManager.trim)\n"


def is_installed_from_here() -> bool:
    """As an editable install of this very clone, whose own .egg-info comes first and tells nothing."""
    for one in importlib.metadata.distributions(name="planlife"):
        found: dict[str, Any] = json.loads(one.read_text("direct_url.json") or "{}")
        if found.get("dir_info", {}).get("editable") and found["url"] == REPOSITORY.as_uri():
            return True
    return False


pytestmark = pytest.mark.skipif(not is_installed_from_here(), reason="scripts/setup did not install this clone")


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A folder with one named planlife in it that is no package, as the one that a clone lies in."""
    (tmp_path / "planlife").mkdir()
    return tmp_path


def run_there(parent: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    return subprocess.run([sys.executable, *arguments], cwd=parent, env=environment, capture_output=True, text=True)


def test_the_package_is_imported_and_not_the_folder(parent: Path) -> None:
    run = run_there(parent, "-c", "import planlife; print(planlife.__file__, planlife.PlanManager)")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(REPOSITORY / "planlife" / "__init__.py"))


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_a_users_program_is_checked_with_our_types(parent: Path) -> None:
    (parent / "program.py").write_text(PROGRAM)
    run = run_there(parent, "-m", "mypy", "--strict", "--cache-dir", str(parent / "cache"), "program.py")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "def (self: planlife.manager.PlanManager, target_bytes: int) -> int" in run.stdout.replace(
        "builtins.int", "int"
    )
