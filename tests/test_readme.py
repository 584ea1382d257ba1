"""What README promises to run, runs."""

from __future__ import annotations

import os
import re
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
    commands = block.splitlines()
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
