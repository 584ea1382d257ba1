"""Caches of every layout, made from "nhd" ones: what a test says about tokens holds for all of them."""

from __future__ import annotations

import torch

#: By the name that a test shows: kv_layout, and whether V is stored as 4-D [pages, kv_heads, head_dim, page].
LAYOUTS = {
    "nhd": ("nhd", False),
    "hnd": ("hnd", False),
    "packed": ("packed", False),
    "packed, plain V": ("packed", True),
}


def lay_out(keys: torch.Tensor, values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of "nhd" caches in a layout of LAYOUTS."""
    kv_layout, plain = LAYOUTS[layout]
    if kv_layout == "nhd":
        return keys.clone(), values.clone()
    if kv_layout == "hnd":
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    pages, page, heads, dim = keys.shape
    pack = 16 // keys.element_size()
    keys = keys.view(pages, page, heads, dim // pack, pack).permute(0, 2, 3, 1, 4)
    if plain:
        return keys.contiguous(), values.permute(0, 2, 3, 1).contiguous()
    values = values.view(pages, page // pack, pack, heads, dim).permute(0, 3, 1, 4, 2)
    return keys.contiguous(), values.contiguous()
