"""A fault for scripts/compute-sanitizer to find; no test of planlife, so its name is not one that pytest collects."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_behind(buffer):
    tl.store(buffer + 1024, 1)


def test_a_kernel_writes_behind_its_buffer() -> None:
    buffer = torch.zeros(16, dtype=torch.int32, device="cuda")
    _write_behind[(1,)](buffer)
    torch.cuda.synchronize()
