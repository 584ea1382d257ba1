"""The decode compiles for GPUs on a machine that has none: what the interpreter takes, the compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from .test_targets import PROGRAM, REPOSITORY

#: What has the most branches: FP8 that the target does not know, packed, scales per token, a window over query tokens.
DECODES = """
from planlife.kernels import triton_decode
from planlife.spec import PlanSpec

triton_decode._takes_natively = lambda kv_dtype: False
target = GPUTarget("cuda", 90, 32)
options = {"kv_dtype": "float8_e4m3fn", "scales": "per_token", "kv_layout": "packed"}
spec = PlanSpec(4, 1, 32, 16, max_context_tokens=4096, query_length=2, sliding_window=100, **options)
triton_decode._PreparedDecode(spec, torch.device("cuda:0"))
"""


def test_decode_and_merge_compile(tmp_path):
    program = PROGRAM[: PROGRAM.index("for target in")] + DECODES
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert run.returncode == 0, run.stderr
    kernels = [line.split()[1] for line in run.stdout.splitlines() if "cubin" in line.split()]
    assert kernels == ["_decode_tasks", "_decode_tasks", "_merge_parts"]
