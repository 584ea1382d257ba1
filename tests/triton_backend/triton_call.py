"""Decode calls of the torch backend's tests, decoded by the Triton kernels: on the GPU, or interpreted without one."""

from __future__ import annotations

from typing import Any

import torch

from planlife.kernels.triton_decode import compile_decode, decode_into

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
        """float64[rows * query_length, q_heads] on the CPU, of an "nhd" cache: log of the sum of exp(logits), sinks
        included."""
        spec = self.spec
        keys, query = self.nhd[0].cpu().double(), self.query.cpu().double()
        if self.key_scale is not None:
            scale = torch.as_tensor(self.key_scale).cpu().double()
            keys = keys * (scale.view(*scale.shape[:3], 1).transpose(1, 2) if scale.numel() > 1 else scale)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
        for row, length in enumerate(self.lens.tolist()):
            positions = torch.arange(length)
            pages = self.tables[row].cpu()[positions // spec.page_size]
            row_keys = keys[pages, positions % spec.page_size].repeat_interleave(spec.group_size, 1)
            for token in range(spec.query_length):
                index, end = row * spec.query_length + token, length - spec.query_length + 1 + token
                if end <= 0:
                    continue
                first = max(end - spec.sliding_window, 0) if spec.sliding_window else 0
                logits = torch.einsum("hd,thd->ht", query[index], row_keys[first:end]) * self.scale
                if self.sinks is not None:
                    logits = torch.cat([logits, self.sinks.cpu().double()[:, None]], 1)
                lse[index] = logits.logsumexp(1)
        return lse
