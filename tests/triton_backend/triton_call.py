"""Decode calls of the torch backend's tests, decoded by the Triton kernels: on the GPU, or interpreted without one."""

from __future__ import annotations

from typing import Any

import torch

from planlife.kernels.triton_decode import compile_decode, decode_into
from planlife.testing import reference_decode

from ..torch_backend.test_cache_kinds import KindCall

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


class TritonCall(KindCall):
    """A KindCall on DEVICE. Tables come from the torch backend, so that nothing but the decode is under test."""

    def __init__(self, lens: tuple[int, ...], **options: Any) -> None:
        with torch.device(DEVICE):
            super().__init__(lens, **options)
        compile_decode(self.spec, DEVICE)

    def decode(self, **changed: Any) -> torch.Tensor:
        call = {
            "output": self.output,
            "query": self.query,
            "key_cache": self.keys,
            "value_cache": self.values,
            "block_tables": self.tables,
            "softmax_scale": self.scale,
            "spec": self.spec,
            "work_info": self.plan.work_info,
            "reduce_info": self.plan.reduce_info,
            "scratch": self.scratch,
            **self.extras(),
            **changed,
        }
        decode_into(**call)
        return call["output"]

    def refresh(self, lens: torch.Tensor) -> None:
        self.backend.refresh(self.plan, lens, len(lens))

    def reference(self, lens: torch.Tensor | None = None) -> torch.Tensor:
        with torch.device("cpu"):
            return super().reference(lens)

    def reference_lse(self) -> torch.Tensor:
        """float64[rows * query_length, q_heads] on the CPU."""
        scales = {} if self.key_scale is None else {"key_scale": self.key_scale, "value_scale": self.value_scale}
        lse = torch.full(self.query.shape[:2], torch.nan, dtype=torch.float64)
        with torch.device("cpu"):
            reference_decode(
                self.query,
                *self.nhd,
                self.tables,
                self.lens,
                self.scale,
                query_length=self.spec.query_length,
                sliding_window=self.spec.sliding_window,
                sinks=self.sinks,
                lse=lse,
                **scales,
            )
        return lse
