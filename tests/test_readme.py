"""What README promises to run, runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from .child_process import REPOSITORY, run_python


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.M | re.S)


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
        assert script.read_text().startswith("#!/usr/bin/env bash\n")
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_what_ci_runs_takes_no_arguments(tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    run = tmp_path / ".ci" / "run"
    shutil.copy(REPOSITORY / ".ci" / "run", run)
    check = tmp_path / "scripts" / "check"
    check.write_text("#!/usr/bin/env bash\necho checked\n")
    check.chmod(0o755)
    refused = subprocess.run(["bash", str(run), "--fast"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("usage: .ci/run")
    assert subprocess.run(["bash", str(run)], capture_output=True, text=True).stdout == "checked\n"
