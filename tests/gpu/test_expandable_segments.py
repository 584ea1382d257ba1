"""The allocator's other mode, which is chosen when a process starts."""

from __future__ import annotations

from ..child_process import run_python

TESTS = "triton and (worst_case_bytes or another_memory_pool or in_flight or another_thread or churn)"


def test_memory_and_work_in_flight_are_right_with_expandable_segments_too() -> None:
    """C79: tests of test_cuda_device.py in a process of its own."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_cuda_device.py", "-k", TESTS]
    run = run_python(*command, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert run.returncode == 0, run.stdout[-3000:]
