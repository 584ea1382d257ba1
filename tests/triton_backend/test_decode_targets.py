"""The decode compiles for GPUs on a machine that has none: what the interpreter takes, the compiler may refuse."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from ..child_process import run_python
from .test_targets import PROGRAM

#: What has the most branches: FP8 that the target does not know, packed, scales per token under float16, a window over
#: query tokens; and without the last.
DECODES = """
from planlife.kernels import triton_decode
from planlife.spec import PlanSpec

triton_decode._takes_natively = lambda kv_dtype: False
target = GPUTarget("cuda", 90, 32)
options = {"q_dtype": "float16", "kv_dtype": "float8_e4m3fn", "scales": "per_token", "kv_layout": "packed"}
for more in ({"query_length": 2, "sliding_window": 100}, {}):
    spec = PlanSpec(4, 1, 32, 16, max_context_tokens=4096, **options, **more)
    triton_decode._PreparedDecode(spec, torch.device("cuda:0"))
"""


def test_decode_and_merge_compile(tmp_path):
    program = PROGRAM[: PROGRAM.index("for target in")] + DECODES
    run = run_python("-W", "ignore", "-c", program, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    kernels = [line.split()[1] for line in run.stdout.splitlines() if "cubin" in line.split()]
    assert kernels == ["_decode_tasks", "_decode_tasks", "_merge_parts"] * 2
