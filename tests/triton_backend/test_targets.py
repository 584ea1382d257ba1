"""All that the backend compiles for a class compiles for the GPUs it is meant for, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

REPOSITORY = Path(__file__).resolve().parents[2]

#: Kernel.prepare compiles for a target instead of a device, and says what came out.
PROGRAM = """
import inspect
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from planlife import PlanSpec
from planlife.backends.triton_backend import TritonBackend
from planlife.kernels.triton_launch import Kernel

TYPES = {"tl.int32": "i32", "tl.int64": "i64", "tl.float32": "fp32", "tl.constexpr": "constexpr"}
POINTERS = {torch.int32: "*i32", torch.int64: "*i64"}

def prepare(self, device, *dtypes, **constants):
    pointers = iter(dtypes)
    signature = {
        name: POINTERS[next(pointers)] if parameter.annotation is parameter.empty else TYPES[parameter.annotation]
        for name, parameter in inspect.signature(self._function.fn).parameters.items()
    }
    constexprs = {name: constants.pop(name) for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(self._function, signature, constexprs)
    print(target.arch, self.name, *triton.compile(source, target=target, options=constants).asm)
    return True

Kernel.prepare = prepare
spec = PlanSpec(8, 1, 128, 16, max_context_tokens=200_000)
for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    for rows in (1, 100, 1000):
        TritonBackend().compile(spec, rows, SimpleNamespace(name="cuda:0", num_compute_units=132))
"""


def test_the_kernels_of_small_and_large_classes_compile(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert run.returncode == 0, run.stderr
    compiled = [line.split() for line in run.stdout.splitlines()]
    for target, binary in (("80", "cubin"), ("90", "cubin"), ("gfx942", "hsaco")):
        kernels = {name: outputs for arch, name, *outputs in compiled if arch == target}
        assert kernels.keys() >= {"_plan_rows", "_sum_tiles", "_share_slots", "_fill_records", "_compare_lens"}
        assert all(binary in outputs for outputs in kernels.values())
