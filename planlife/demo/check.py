"""The comparison: dense FP64 attention over its own copy of every request's keys and values.

It knows no page, no table and no plan, and shares no code with the rest of planlife: a wrong block table, a
stale length and a wrong kernel all show. It compares on the engine's device, and reads its findings from there in
bulk: the engine's steps do not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .upload import upload

#: Largest relative error of a row's output, ||out - ref|| / ||ref||, that an output of 16 bits explains.
TOLERANCE = 1e-2
_MAX_PENDING = 512


class DenseCheck:
    """Keeps what was written, compares what came out.

    Owns: key, value dtype[layers, cache rows, max context, kv_heads, D].
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
        device: str = "cpu",
    ) -> None:
        shape = (num_layers, num_cache_rows, max_context_tokens, num_kv_heads, head_dim)
        self._key = torch.zeros(shape, dtype=dtype, device=device)
        self._value = torch.zeros(shape, dtype=dtype, device=device)
        self._device = device
        #: (where, float64[rows]: how far off, the most that is right), not yet read from the device.
        self._pending: list[tuple[str, torch.Tensor, float]] = []
        self.num_rows_compared = 0
        #: Output rows that a window kept from seeing their whole context.
        self.num_rows_cut = 0
        self._num_mismatches = 0
        self._first_mismatch = ""
        self._largest_error = 0.0

    @property
    def num_mismatches(self) -> int:
        self.settle()
        return self._num_mismatches

    @property
    def first_mismatch(self) -> str:
        """Where, and by how much; empty if there is none."""
        self.settle()
        return self._first_mismatch

    @property
    def largest_error(self) -> float:
        """Of the rows that were compared with attention, inf where one has a NaN."""
        self.settle()
        return self._largest_error

    def record(
        self, layer: int, cache_rows: torch.Tensor, positions: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Note key, value [tokens, kv_heads, D], what the stored numbers stand for, of cache_rows, positions
        int64[tokens], on the host."""
        cache_rows, positions = (upload(index, self._device) for index in (cache_rows, positions))
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
        found = output.double()
        wanted = self._attention(layer, query.double(), cache_rows, context_lens, window_tokens)
        error = (found - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2))
        self._count(where, error, TOLERANCE)

    def compare_zeros(self, where: str, output: torch.Tensor) -> None:
        """Count the rows of output [tokens, q_heads, D] that are not exactly zero: padding and dummies."""
        if output.numel():
            self._count(where, output.flatten(1).abs().amax(1).double(), 0.0)

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
        rows = upload(torch.tensor(cache_rows), self._device)
        history = [cache[layer][rows, :num_tokens].double() for cache in (self._key, self._value)]
        key, value = (cache.transpose(1, 2) for cache in history)  # [rows, kv_heads, context, D]
        num_kv_heads = key.shape[1]
        grouped = query.view(num_rows, query_length, num_kv_heads, -1, head_dim).transpose(1, 2)
        scores = grouped.flatten(2, 3) @ key.transpose(2, 3) / head_dim**0.5  # [rows, kv_heads, query * group, context]
        end = torch.tensor(context_lens)[:, None] - query_length + 1 + torch.arange(query_length)
        begin = end - window_tokens if window_tokens else torch.zeros_like(end)
        self.num_rows_cut += int((begin > 0).sum())
        position = torch.arange(num_tokens, device=self._device)
        begin, end = (upload(edge, self._device) for edge in (begin, end))
        seen = (position >= begin[..., None]) & (position < end[..., None])  # [rows, query, context]
        seen = seen[:, None].repeat_interleave(num_heads // num_kv_heads, dim=2)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out: torch.Tensor = (weights @ value).view(num_rows, num_kv_heads, query_length, -1, head_dim)
        return out.transpose(1, 2).reshape(tokens, num_heads, head_dim)

    def _count(self, where: str, sizes: torch.Tensor, most: float) -> None:
        self.num_rows_compared += sizes.numel()
        self._pending.append((where, sizes, most))
        if len(self._pending) >= _MAX_PENDING:
            self.settle()

    def settle(self) -> None:
        """Read what was found since. Syncs: yes."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        found = torch.cat([sizes for _, sizes, _ in pending]).cpu()
        by_call = torch.split(found, [sizes.numel() for _, sizes, _ in pending])
        for (where, _, most), sizes in zip(pending, by_call, strict=True):
            is_off = ~(sizes <= most)
            num_off = int(is_off.sum())
            if num_off and not self._num_mismatches:
                row = int(is_off.nonzero()[0])
                self._first_mismatch = f"{where}, output row {row} of {len(sizes)}: off by {sizes[row].item():.3g}"
            self._num_mismatches += num_off
            if most:
                self._largest_error = max(self._largest_error, sizes.nan_to_num(nan=torch.inf).max().item())
