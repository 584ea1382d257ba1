"""The kernels compile for the GPUs that they are meant for, on a machine that has none."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from ..child_process import run_python

#: Kernel.prepare compiles for a target instead of a device, and says what came out.
COMPILE_FOR_TARGETS = """
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
    compiled = triton.compile(source, target=target, options=constants)
    if compiled.metadata.shared > SHARED_BYTES[target.arch]:
        raise triton.runtime.errors.OutOfResources(compiled.metadata.shared, SHARED_BYTES[target.arch], "shared memory")
    print(target.arch, self.name, *compiled.asm)
    return True

#: What a block may have: NVIDIA's by compute capability, AMD's LDS.
SHARED_BYTES = {80: 166_912, 90: 232_448, "gfx942": 65_536, "gfx950": 163_840}
Kernel.prepare = prepare
Kernel.prepared = lambda self, *dtypes, **constants: None
"""

PLANNERS = f"""{COMPILE_FOR_TARGETS}
for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    prepare_planners("cuda:0")
"""

#: Compiling takes seconds, so each GPU of AMD's has one kind of cache: what differs between them is the FP8.
DECODES = f"""{COMPILE_FOR_TARGETS}
from planlife import PlanSpec
from planlife.kernels import triton_decode

def takes_natively(kv_dtype, device):
    options = triton.compiler.make_backend(target).parse_options({{}})
    return triton_decode._FP8_NAMES[kv_dtype] in options.supported_fp8_dtypes

triton_decode._takes_natively = takes_natively
packed = dict(kv_layout="packed", page_size=64, kv_dtype="float8_e4m3fnuz", scales="per_tensor")
for target, kv in (
    (GPUTarget("hip", "gfx942", 64), packed),
    (GPUTarget("hip", "gfx950", 64), dict(kv_layout="nhd", page_size=16)),
):
    triton_decode._PreparedDecode(PlanSpec(32, 4, 128, max_context_tokens=65536, **kv), torch.device("cuda:0"))
"""


def test_planners_and_sanitizer_compile_for_nvidia_and_amd(tmp_path):
    compiled = _compile(PLANNERS, tmp_path)
    planners = {"_plan_rows", "_plan_slots", "_sum_tiles", "_share_slots", "_fill_records", "_compare_lens"}
    for target, binary in (("80", "cubin"), ("90", "cubin"), ("gfx942", "hsaco")):
        kernels = {name: outputs for arch, name, *outputs in compiled if arch == target}
        assert planners <= kernels.keys()
        assert all(binary in outputs for outputs in kernels.values())


def test_the_decode_compiles_for_amd_too_and_fits_a_workgroup(tmp_path):
    """The fallback on AMD GPUs, which never ran on one."""
    compiled = _compile(DECODES, tmp_path)
    for target in ("gfx942", "gfx950"):
        kernels = [(name, outputs) for arch, name, *outputs in compiled if arch == target]
        assert [name for name, _ in kernels] == ["_decode_tasks", "_decode_tasks", "_merge_parts"], "aligned and not"
        assert all("hsaco" in outputs for _, outputs in kernels)


def _compile(program: str, cache: Path) -> list[list[str]]:
    """(target, kernel, what came out of the compiler...) of each kernel."""
    run = run_python("-W", "ignore", "-c", program, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    assert run.returncode == 0, run.stderr
    return [line.split() for line in run.stdout.splitlines()]


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
