"""The allocator's other mode, which is chosen when a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = "triton and (worst_case_bytes or another_memory_pool or in_flight or another_thread or churn)"


def test_memory_and_work_in_flight_are_right_with_expandable_segments_too() -> None:
    """C79: tests of test_cuda_device.py in a process of its own."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_cuda_device.py"]
    run = subprocess.run(
        [*command, "-k", TESTS], env=environment, capture_output=True, text=True, cwd=root, timeout=240
    )
    assert run.returncode == 0, run.stdout[-3000:]
