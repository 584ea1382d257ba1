"""Paged attention as its definition reads, in FP64 and one row at a time. Shares no code with the kernels."""

from __future__ import annotations

import torch


def reference_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    *,
    query_length: int = 1,
    sliding_window: int = 0,
    kv_layout: str = "nhd",
) -> torch.Tensor:
    """The exact output of a decode call: float64[rows * query_length, q_heads, head_dim], on the CPU.

    query: [rows * query_length, q_heads, head_dim], any float dtype.
    key_cache, value_cache: "nhd" [pages, page, kv_heads, head_dim] or "hnd" [pages, kv_heads, page, head_dim].
    block_tables: int32[rows, columns]; only entries of a row's own pages are looked at.
    context_lens: int32[rows], query tokens included.
    Query token p of a row of length L sees keys [max(0, end - window), end), end = L - query_length + 1 + p.

    Raises ValueError. Capture: no. Syncs: yes. Allocates: yes.
    """
    if kv_layout not in ("nhd", "hnd"):
        raise ValueError(f"kv_layout must be 'nhd' or 'hnd', got {kv_layout!r}")
    if kv_layout == "hnd":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    page, num_kv_heads = key_cache.shape[1], key_cache.shape[2]
    num_q_heads = query.shape[1]
    group = num_q_heads // num_kv_heads
    output = torch.zeros(query.shape, dtype=torch.float64)
    for row, length in enumerate(context_lens.tolist()):
        if length <= 0:
            continue
        pages = block_tables[row, : -(-length // page)].tolist()
        keys = torch.cat([key_cache[p] for p in pages])[:length].to("cpu", torch.float64)
        values = torch.cat([value_cache[p] for p in pages])[:length].to("cpu", torch.float64)
        for token in range(query_length):
            end = length - query_length + 1 + token
            begin = max(end - sliding_window, 0) if sliding_window > 0 else 0
            if end <= 0:
                continue
            for head in range(num_q_heads):
                seen = slice(begin, end), head // group
                q = query[row * query_length + token, head].to("cpu", torch.float64)
                weights = torch.softmax(keys[seen] @ q * softmax_scale, dim=0)
                output[row * query_length + token, head] = weights @ values[seen]
    return output
