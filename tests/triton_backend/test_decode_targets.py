"""The decode compiles for GPUs on a machine that has none: what the interpreter takes, the compiler may refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

import triton
from triton.backends.compiler import GPUTarget

from planlife.errors import MintError
from planlife.kernels import triton_decode
from planlife.spec import PlanSpec

from ..child_process import run_python
from .test_targets import COMPILE_FOR_TARGETS

#: What has the most branches: FP8 that the target does not know, packed, scales per token under float16, a window over
#: query tokens; and without the last.
DECODES = """
from planlife.kernels import triton_decode
from planlife.spec import PlanSpec

triton_decode._takes_natively = lambda kv_dtype, device: False
target = GPUTarget("cuda", 90, 32)
options = {"q_dtype": "float16", "kv_dtype": "float8_e4m3fn", "scales": "per_token", "kv_layout": "packed"}
for more in ({"query_length": 2, "sliding_window": 100}, {}):
    spec = PlanSpec(4, 1, 32, 16, max_context_tokens=4096, **options, **more)
    triton_decode._PreparedDecode(spec, torch.device("cuda:0"))
"""


def test_decode_and_merge_compile(tmp_path):
    program = COMPILE_FOR_TARGETS + DECODES
    run = run_python("-W", "ignore", "-c", program, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr
    kernels = [line.split()[1] for line in run.stdout.splitlines() if "cubin" in line.split()]
    assert kernels == ["_decode_tasks", "_decode_tasks", "_merge_parts"] * 2


def test_what_the_compiler_takes_is_asked_for_the_device_itself(monkeypatch):
    """C84: another one is current, which knows FP8."""
    current = ["cuda:1"]
    targets = {"cuda:0": GPUTarget("cuda", 80, 32), "cuda:1": GPUTarget("cuda", 90, 32)}

    @contextmanager
    def device(name: str) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    active = SimpleNamespace(get_current_target=lambda: targets[current[-1]])
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    assert not triton_decode._takes_natively("float8_e4m3fn", "cuda:0")
    assert triton_decode._takes_natively("float8_e4m3fn", "cuda:1")


def test_a_decode_that_no_tile_of_the_device_holds_is_refused_with_the_way_out(monkeypatch):
    tried: list[triton_decode._Tiles] = []

    def prepare(self, spec, device, tiles):
        tried.append(tiles)
        raise triton.runtime.errors.OutOfResources(1 << 20, 1 << 16, "shared memory")

    monkeypatch.setattr(triton_decode._PreparedDecode, "_prepare", prepare)
    spec = PlanSpec(1, 1, 2048, 16, max_context_tokens=99)
    with pytest.raises(
        MintError, match="head_dim 2048 and bfloat16 fits cuda:3: .*shared memory.* Pass backend='torch'"
    ):
        triton_decode.compile_decode(spec, "cuda:3")
    assert [tiles.num_stages for tiles in tried] == [5, 3, 1, 1]
    assert (spec, torch.device("cuda:3")) not in triton_decode._PREPARED
