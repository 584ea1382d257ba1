"""The comparison: dense FP64 attention over its own copy of every request's keys and values.

It knows no page, no table and no plan, and shares no code with the rest of planlife: a wrong block table, a
stale length and a wrong kernel all show.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Largest relative error of a row's output, ||out - ref|| / ||ref||, that an output of 16 bits explains.
TOLERANCE = 1e-2


class DenseCheck:
    """Keeps what was written, compares what came out.

    Owns: key, value dtype[layers, cache rows, max context, kv_heads, D], on the CPU.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_cache_rows: int,
        max_context_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        shape = (num_layers, num_cache_rows, max_context_tokens, num_kv_heads, head_dim)
        self._key = torch.zeros(shape, dtype=dtype)
        self._value = torch.zeros(shape, dtype=dtype)
        self.num_rows_compared = 0
        #: Output rows that a window kept from seeing their whole context.
        self.num_rows_cut = 0
        self.num_mismatches = 0
        self.first_mismatch = ""
        self.largest_error = 0.0

    def record(
        self, layer: int, cache_rows: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Note key, value [tokens, kv_heads, D], what the stored numbers stand for, of cache_rows, positions
        int64[tokens]."""
        self._key[layer, cache_rows, positions] = key
        self._value[layer, cache_rows, positions] = value

    def compare(
        self,
        where: str,
        layer: int,
        output: torch.Tensor,
        query: torch.Tensor,
        *,
        cache_rows: Sequence[int],
        context_lens: Sequence[int],
        window_tokens: int = 0,
    ) -> None:
        """Count the rows of output, query [rows * query_length, q_heads, D] that are off."""
        found = output.cpu().double()
        wanted = self._attention(layer, query.double(), cache_rows, context_lens, window_tokens)
        error = (found - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
        self._count(where, error, ~(error <= TOLERANCE))
        self.largest_error = max(self.largest_error, error.nan_to_num(nan=torch.inf).max().item())

    def compare_zeros(self, where: str, output: torch.Tensor) -> None:
        """Count the rows of output [tokens, q_heads, D] that are not exactly zero: padding and dummies."""
        largest = output.cpu().flatten(1).abs().amax(1) if output.numel() else torch.zeros(0)
        self._count(where, largest, ~(largest == 0))

    def _attention(
        self,
        layer: int,
        query: torch.Tensor,
        cache_rows: Sequence[int],
        context_lens: Sequence[int],
        window_tokens: int,
    ) -> torch.Tensor:
        num_rows, num_tokens = len(cache_rows), max(context_lens)
        tokens, num_heads, head_dim = query.shape
        query_length = tokens // num_rows
        history = [cache[layer, list(cache_rows), :num_tokens].double() for cache in (self._key, self._value)]
        key, value = (cache.transpose(1, 2) for cache in history)  # [rows, kv_heads, context, D]
        num_kv_heads = key.shape[1]
        grouped = query.view(num_rows, query_length, num_kv_heads, -1, head_dim).transpose(1, 2)
        scores = grouped.flatten(2, 3) @ key.transpose(2, 3) / head_dim**0.5  # [rows, kv_heads, query * group, context]
        end = torch.tensor(context_lens)[:, None] - query_length + 1 + torch.arange(query_length)
        begin = end - window_tokens if window_tokens else torch.zeros_like(end)
        position = torch.arange(num_tokens)
        self.num_rows_cut += int((begin > 0).sum())
        seen = (position >= begin[..., None]) & (position < end[..., None])  # [rows, query, context]
        seen = seen[:, None].repeat_interleave(num_heads // num_kv_heads, dim=2)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out: torch.Tensor = (weights @ value).view(num_rows, num_kv_heads, query_length, -1, head_dim)
        return out.transpose(1, 2).reshape(tokens, num_heads, head_dim)

    def _count(self, where: str, size: torch.Tensor, is_off: torch.Tensor) -> None:
        self.num_rows_compared += is_off.numel()
        num_off = int(is_off.sum())
        if num_off and not self.num_mismatches:
            row = int(is_off.nonzero()[0])
            self.first_mismatch = f"{where}, output row {row} of {is_off.numel()}: off by {size[row].item():.3g}"
        self.num_mismatches += num_off
