"""What README promises to run, runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .child_process import REPOSITORY, run_python


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (REPOSITORY / "README.md").read_text("utf-8"), re.M | re.S)


def test_readmes_example_runs_as_it_stands():
    (example,) = code_blocks("python")
    run = run_python("-c", example)
    assert run.returncode == 0, run.stderr
    assert "tensor(" in run.stdout


def test_readme_has_two_commands_and_both_can_be_run():
    (block,) = code_blocks("sh")
    index, *commands = block.splitlines()
    assert index.startswith("export PIP_EXTRA_INDEX_URL=")  # before anything fetches torch
    assert len(commands) == 2
    for command in commands:
        script = REPOSITORY / command
        assert script.is_file()
        assert os.access(script, os.X_OK)


def test_every_script_is_bash_without_a_syntax_error():
    scripts = [path for path in (REPOSITORY / "scripts").iterdir() if path.suffix == ""]
    for script in [*scripts, REPOSITORY / ".ci" / "run"]:
        assert script.read_text("utf-8").startswith("#!/usr/bin/env bash\n")
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.fixture(params=["planlife", "another name"])
def checkout(request, tmp_path):
    """As much of one as .ci/run needs, whose scripts/check tells where it runs and what is there."""
    root = tmp_path / "checkouts" / request.param
    for folder in (".ci", "scripts", ".venv", "planlife/__pycache__"):
        (root / folder).mkdir(parents=True)
    for name in (".ci/run", ".gitignore"):
        shutil.copy(REPOSITORY / name, root / name)
    (root / "planlife" / "__pycache__" / "old.pyc").touch()
    check = root / "scripts" / "check"
    check.write_text("#!/usr/bin/env bash\npwd\nfind . | sort\nexit ${CHECK_STATUS:-0}\n")
    check.chmod(0o755)
    return root


def run_ci(checkout, *arguments, **variables):
    folder = checkout.parents[1] / "temporary"
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(folder), **variables}
    run = subprocess.run(
        ["bash", str(checkout / ".ci" / "run"), *arguments], capture_output=True, text=True, env=environment
    )
    assert not list(folder.iterdir())  # whatever happened, nothing stays behind
    return run


def test_what_ci_runs_takes_no_arguments(checkout):
    refused = run_ci(checkout, "--fast")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("usage: .ci/run")


def test_ci_checks_in_a_folder_named_planlife_once(checkout):
    run = run_ci(checkout)
    assert (run.returncode, run.stderr) == (0, "")
    where, *files = run.stdout.splitlines()
    assert Path(where).name == "planlife"
    if checkout.name == "planlife":
        assert where == str(checkout)
        return
    # Sources, and nothing that an earlier run left: a virtual environment does not work in another place.
    assert files == [".", "./.ci", "./.ci/run", "./.gitignore", "./planlife", "./scripts", "./scripts/check"]


def test_ci_fails_where_the_check_does(checkout):
    assert run_ci(checkout, CHECK_STATUS="3").returncode == 3
