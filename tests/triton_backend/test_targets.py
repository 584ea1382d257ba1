"""The planners compile for the GPUs it is meant for, on a machine that has none."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from ..child_process import run_python

#: Kernel.prepare compiles for a target instead of a device, and says what came out.
PROGRAM = """
import inspect
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from planlife.kernels.triton_launch import Kernel
from planlife.kernels.triton_planner import prepare_planners

TYPES = {"tl.int32": "i32", "tl.int64": "i64", "tl.float32": "fp32", "tl.constexpr": "constexpr"}
POINTERS = {
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.float32: "*fp32", torch.float16: "*fp16",
    torch.bfloat16: "*bf16", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e4m3fnuz: "*fp8e4b8",
}

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
Kernel.prepared = lambda self, *dtypes, **constants: None
for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    prepare_planners("cuda:0")
"""


def test_planners_and_sanitizer_compile_for_nvidia_and_amd(tmp_path):
    run = run_python("-W", "ignore", "-c", PROGRAM, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    compiled = [line.split() for line in run.stdout.splitlines()]
    planners = {"_plan_rows", "_plan_slots", "_sum_tiles", "_share_slots", "_fill_records", "_compare_lens"}
    for target, binary in (("80", "cubin"), ("90", "cubin"), ("gfx942", "hsaco")):
        kernels = {name: outputs for arch, name, *outputs in compiled if arch == target}
        assert planners <= kernels.keys()
        assert all(binary in outputs for outputs in kernels.values())


@pytest.mark.parametrize("at_import, later", [("0", "1"), ("1", "0")], ids=["set", "unset"])
def test_an_interpreter_that_is_switched_after_triton_was_imported_is_refused_by_name(at_import, later):
    program = f"""
import os
import triton
os.environ["TRITON_INTERPRET"] = "{later}"
from planlife import PlanSpec
from planlife.backends.triton_backend import TritonBackend
from planlife.torch_device import CpuDevice
print(*TritonBackend().refuse_spec(PlanSpec(1, 1, 16, 16, max_context_tokens=9), CpuDevice()))
"""
    run = run_python("-W", "ignore", "-c", program, TRITON_INTERPRET=at_import)
    assert run.returncode == 0, run.stderr
    assert "TRITON_INTERPRET was changed after something imported triton" in run.stdout
