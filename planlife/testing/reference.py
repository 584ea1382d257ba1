"""Paged attention as its definition reads, in FP64 and one row at a time. Shares no code with the kernels."""

from __future__ import annotations

import torch

from ..ambient import plain


@plain
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
    max_context_tokens: int | None = None,
    kv_layout: str = "nhd",
    key_scale: torch.Tensor | float = 1.0,
    value_scale: torch.Tensor | float = 1.0,
    sinks: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The exact output of a decode call: float64[rows * query_length, q_heads, head_dim], on the CPU.

    query: [rows * query_length, q_heads, head_dim], any float dtype.
    key_cache, value_cache: "nhd" [pages, page, kv_heads, head_dim], "hnd" [pages, kv_heads, page, head_dim], or
        "packed": K [pages, kv_heads, head_dim / x, page, x], V [pages, kv_heads, page / x, head_dim, x] or
        [pages, kv_heads, head_dim, page].
    block_tables: int32[rows, columns]; only entries of a row's own pages are looked at.
    context_lens: int32[rows], query tokens included.
    max_context_tokens: keys past it are not seen, by no query token; None = all that the block table has.
    key_scale, value_scale: one number, or float32[pages, kv_heads, page] or [..., 1]: what the stored values stand for.
    sinks: float[q_heads]: a logit per head that takes part in the softmax and has the value 0.
    lse: float[rows * query_length, q_heads], filled with the log-sum-exp of the logits that each query token sees, the
        sink's among them; -inf where it sees none.
    Query token p of a row of length L sees keys [max(0, end - window), end), end = L - query_length + 1 + p, as far as
    there are such keys: within max_context_tokens and the columns of the block table.

    Raises ValueError. Capture: no. Syncs: yes. Allocates: yes.
    """
    if kv_layout not in ("nhd", "hnd", "packed"):
        raise ValueError(f"kv_layout must be 'nhd', 'hnd' or 'packed', got {kv_layout!r}")
    page = key_cache.shape[{"nhd": 1, "hnd": 2, "packed": 3}[kv_layout]]
    num_kv_heads = key_cache.shape[2 if kv_layout == "nhd" else 1]
    num_q_heads = query.shape[1]
    group = num_q_heads // num_kv_heads
    output = torch.zeros(query.shape, dtype=torch.float64, device="cpu")
    if lse is not None:
        lse.fill_(-torch.inf)
    for row, length in enumerate(context_lens.tolist()):
        if length <= 0:
            continue
        held = min(length, block_tables.shape[1] * page, length if max_context_tokens is None else max_context_tokens)
        pages = block_tables[row, : -(-held // page)].tolist()
        keys = torch.cat([_tokens(key_cache[p], kv_layout, True) * _scales(key_scale, p) for p in pages])
        values = torch.cat([_tokens(value_cache[p], kv_layout, False) * _scales(value_scale, p) for p in pages])
        for token in range(query_length):
            end = length - query_length + 1 + token
            begin = max(end - sliding_window, 0) if sliding_window > 0 else 0
            end = min(end, held)
            if end <= begin:
                continue
            for head in range(num_q_heads):
                seen = slice(begin, end), head // group
                q = query[row * query_length + token, head].to("cpu", torch.float64)
                logits = keys[seen] @ q * softmax_scale
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1].to("cpu", torch.float64)])
                weights = torch.softmax(logits, dim=0)[: end - begin]
                output[row * query_length + token, head] = weights @ values[seen]
                if lse is not None:
                    lse[row * query_length + token, head] = torch.logsumexp(logits, dim=0)
    return output


def _tokens(page: torch.Tensor, kv_layout: str, is_key: bool) -> torch.Tensor:
    """One page as float64[page, kv_heads, head_dim] on the CPU."""
    page = page.to("cpu", torch.float64)
    if kv_layout == "nhd":
        return page
    if kv_layout == "hnd":
        return page.transpose(0, 1)
    if is_key:  # [kv_heads, head_dim / x, page, x]
        return page.permute(2, 0, 1, 3).flatten(2)
    if page.dim() == 3:  # [kv_heads, head_dim, page]
        return page.permute(2, 0, 1)
    return page.permute(1, 3, 0, 2).flatten(0, 1)  # [kv_heads, page / x, head_dim, x]


def _scales(scale: torch.Tensor | float, page: int) -> torch.Tensor | float:
    """What multiplies a page's tokens: a number, or float64[page, kv_heads, 1]."""
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return float(scale)
    of_page = scale[page].to("cpu", torch.float64)
    return (of_page if of_page.dim() == 3 else of_page[..., None]).transpose(0, 1)
