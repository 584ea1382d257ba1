"""scripts/test-gpu: what it does before it runs anything, what it may install, and what its summary says."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import gpu_suite
import pytest
import torch

from planlife.testing.aiter_machine import aiter_machine

from .child_process import REPOSITORY, child_environment
from .gpu import aiter_on_cuda

TESTS = """
import pytest

def test_right(): pass

@pytest.mark.skip(reason="needs two GPUs")
def test_one(): pass

@pytest.mark.skip(reason="needs two GPUs")
def test_two(): pass

def test_wrong(): assert 1 == 0
"""


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "why_no_gpu", lambda: "")


def test_without_a_gpu_it_says_so_and_does_nothing_else() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", "scripts/test-gpu"], capture_output=True, text=True, cwd=REPOSITORY, env=child_environment(**hidden)
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("no GPU suite here: torch ") and run.stderr.count("\n") == 1


def test_why_there_is_no_gpu_is_told_by_what_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(hip: str | None, cuda: str | None, *, is_available: bool = False) -> str:
        one = SimpleNamespace(
            __version__="2.9",
            version=SimpleNamespace(hip=hip, cuda=cuda),
            cuda=SimpleNamespace(is_available=lambda: is_available),
        )
        monkeypatch.setitem(sys.modules, "torch", one)
        return gpu_suite.why_no_gpu()

    assert "is a CPU build" in told(None, None)
    assert "built for ROCm 7.0, sees no GPU" in told("7.0", None)
    assert "built for CUDA 12.8, sees no GPU" in told(None, "12.8")
    assert told("7.0", None, is_available=True) == ""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch cannot be imported" in gpu_suite.why_no_gpu()


FIND_SPEC = util.find_spec


def absent(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None if name in modules else FIND_SPEC(name))


def test_only_what_is_missing_is_installed_and_never_what_belongs_to_the_machine(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", run)
    absent(monkeypatch, "cachetools", "torch", "triton", "aiter", "pygments")
    assert gpu_suite.main([]) == 3  # pip's status: nothing is run without what it could not install
    (pip,) = commands
    assert "--no-deps" in pip and pip[-1:] == ["cachetools"]  # pytest is here, whatever it needs
    assert not Path(pip[pip.index("--target") + 1]).parent.exists()
    absent(monkeypatch, "pytest", "pluggy")
    assert gpu_suite.missing() == ["pytest", "pluggy"]


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        ([], ["tests/gpu"]),
        (["--durations=5"], ["--durations=5", "tests/gpu"]),
        (["-k", "aiter", "-x"], ["-k", "aiter", "-x", "tests/gpu"]),
        (["-x", "tests/gpu/test_triton_decode.py"], ["-x", "tests/gpu/test_triton_decode.py"]),
        (["tests/test_docs.py::test_one"], ["tests/test_docs.py::test_one"]),
    ],
)
def test_the_whole_suite_runs_unless_tests_are_named(arguments: list[str], passed_on: list[str]) -> None:
    assert gpu_suite.with_tests(arguments) == passed_on


def test_the_doctor_the_tests_and_a_summary_with_each_reason_come_in_this_order(
    a_gpu: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)
    assert gpu_suite.main([str(path), "--rootdir", str(tmp_path), "-c", "/dev/null"]) == 1
    output = capfd.readouterr().out
    parts = ["== planlife doctor", "device: ", "== pytest", "== summary", "skipped 2: needs two GPUs"]
    assert [output.index(part) for part in parts] == sorted(output.index(part) for part in parts)
    counts = "1 passed, 1 failed, 2 skipped"
    assert f"test_some: {counts}\n" in output and f"all: {counts}\n" in output
    assert "exit status 1: see above" in output


@pytest.mark.parametrize(("arch", "is_taken"), [("gfx942", True), ("gfx90a", False)])
def test_an_amd_gpu_that_aiter_has_no_kernels_for_runs_the_scenarios_over_the_double(
    monkeypatch: pytest.MonkeyPatch, arch: str, is_taken: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(aiter_on_cuda, "resolve_device", lambda name: None)
    monkeypatch.setattr(aiter_on_cuda, "architecture_of", lambda device: arch)
    monkeypatch.setattr(aiter_on_cuda, "PlanManager", mock.MagicMock())  # this machine has no such GPU to serve
    with aiter_machine(arch):
        machine = aiter_on_cuda.installed_machine.__wrapped__()
    assert (machine is not None) == is_taken
