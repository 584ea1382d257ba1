"""Draws docs/layouts/*.svg: where the elements of KV caches lie in memory. Places are read off real tensors."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import torch

from planlife.testing import LAYOUTS, lay_out

#: Readable on any page: an own background, and a second palette for who asks for a dark one.
_STYLE = """
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328 }
  .title { font-weight: 600; font-size: 13px } .quiet { fill: #59636e } .middle { text-anchor: middle }
  .card { fill: #ffffff; stroke: #d1d9e0 } .a { fill: #cfe3fb } .b { fill: #fbdfc0 } .c { fill: #cdebd0 }
  .none { fill: #eceff2 } rect { stroke: #59636e; stroke-width: 1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9da7b1 } .card { fill: #0d1117; stroke: #3d444d }
    .a { fill: #1f4a7d } .b { fill: #7a4a12 } .c { fill: #215c2c } .none { fill: #2a3038 }
    rect { stroke: #9da7b1 }
  }"""


class _Canvas:
    def __init__(self, width: int, height: int, label: str) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(label)}">',
            f"<style>{_STYLE}\n</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def text(self, x: float, y: float, text: str, css: str = "") -> None:
        self._lines.append(f'<text x="{x:g}" y="{y:g}" class="{css}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, css: str, text: str = "") -> None:
        self._lines.append(f'<rect class="{css}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 4, text, "middle")

    def svg(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])


def draw_layouts() -> str:
    """One page in each layout: the 16-byte pieces of two KV heads, numbered in the order of memory."""
    page, heads, dim, pack = 8, 2, 8, 4
    cell, gap = 18, 22
    canvas = _Canvas(1000, 452, "One page of a KV cache in each layout, its 16-byte pieces numbered by place in memory")
    canvas.text(20, 28, "One page of 8 tokens, 2 KV heads, head_dim 8, FP32 (x = 4). Each box is 16 bytes;", "quiet")
    canvas.text(
        20, 45, "its number is its place in memory. Rows: tokens 0 to 7. Columns: elements 0 to 7 of a head.", "quiet"
    )
    places = torch.arange(page * heads * dim, dtype=torch.float32).view(1, page, heads, dim)
    keys_of = {name: lay_out(places, places, name) for name in LAYOUTS}
    panels = [
        ("nhd: K and V", keys_of["nhd"][0]),
        ("hnd: K and V", keys_of["hnd"][0]),
        ("packed: K", keys_of["packed"][0]),
        ("packed: V, 5-D", keys_of["packed"][1]),
        ("packed: V, 4-D", keys_of["packed, plain V"][1]),
    ]
    for index, (title, cache) in enumerate(panels):
        left, top = 20 + index % 3 * 325, 84 + index // 3 * 190
        canvas.text(left, top - 8, title, "title")
        for place, piece in enumerate(cache.flatten().view(-1, pack).long().tolist()):
            token, head, element = piece[0] // (heads * dim), piece[0] // dim % heads, piece[0] % dim
            is_along_tokens = piece[1] - piece[0] != 1
            x = left + head * (dim * cell + gap / 2) + element * cell
            width, height = (cell, pack * cell) if is_along_tokens else (pack * cell, cell)
            canvas.box(x, top + token * cell, width, height, "ab"[head], str(place))
    left, top = 20 + 2 * 325, 84 + 190
    for head in range(heads):
        canvas.box(left, top + 10 + head * 28, 24, 16, "ab"[head])
        canvas.text(left + 34, top + 23 + head * 28, f"KV head {head}")
    canvas.text(left, top + 84, "lying box: 4 elements of one token", "quiet")
    canvas.text(left, top + 104, "standing box: one element of 4 tokens", "quiet")
    return canvas.svg()


def draw_addressing() -> str:
    """Rows, block table entries and pages of a small step."""
    page = 4
    lens, tables = [6, 0, 3], [[3, 1, None], [None] * 3, [0, None, None]]
    canvas = _Canvas(1000, 300, "Three rows, their block table entries, and the pages and tokens these lead to")
    canvas.text(20, 28, "page_size 4, context_lens [6, 0, 3]. Grey: may be anything; it is never used.", "quiet")
    canvas.text(20, 64, "block_tables", "title")
    canvas.text(560, 64, "pages of the cache", "title")
    owner: dict[int, tuple[int, int]] = {}
    for row, entries in enumerate(tables):
        y = 84 + row * 60
        canvas.text(20, y + 20, f"row {row}: length {lens[row]}")
        for column, entry in enumerate(entries):
            css, text = ("none", "?") if entry is None else ("abc"[row], str(entry))
            canvas.box(170 + column * 52, y, 52, 30, css, text)
            if entry is not None:
                owner[entry] = (row, column)
    for number in range(4):
        y = 76 + number * 50
        row, column = owner.get(number, (-1, 0))
        canvas.text(500, y + 20, f"page {number}")
        for offset in range(page):
            token = column * page + offset
            is_held = row >= 0 and token < lens[row]
            text = f"row {row}, t {token}" if is_held else ""
            canvas.box(560 + offset * 104, y, 104, 30, "abc"[row] if is_held else "none", text)
    canvas.text(20, 284, "token t of row i: page block_tables[i, t // page_size], place t % page_size", "quiet")
    return canvas.svg()


def draw_views() -> str:
    """Five ways to keep K and V in memory, all of which are "nhd" caches to a call."""
    pages, page, heads, dim = 2, 2, 2, 1
    half = pages * page * heads * dim
    numbers = torch.arange(2 * half)
    token_rows = numbers.view(pages, page, heads, 2 * dim)
    by_page = numbers.view(pages, 2, page, heads, dim)
    by_head = numbers.view(2, heads, pages, page, dim).permute(0, 2, 3, 1, 4)
    one_page = numbers[: 2 * half // pages].view(2, 1, page, heads, dim).expand(2, pages, page, heads, dim)
    strips = [
        ("two tensors: [pages, page, kv_heads, D] each", *numbers.view(2, pages, page, heads, dim)),
        ("one tensor: [pages, 2, page, kv_heads, D]", by_page[:, 0], by_page[:, 1]),
        ("halves of one token row: [pages, page, kv_heads, 2 * D]", token_rows[..., :dim], token_rows[..., dim:]),
        ("heads outermost: [2, kv_heads, pages, page, D]", *by_head),
        ("a broadcast page axis, stride 0: [2, 1, page, kv_heads, D]", *one_page),
    ]
    canvas = _Canvas(1000, 486, "Five arrangements of K and V in memory that are all nhd caches by their strides")
    canvas.text(
        20,
        28,
        "2 pages of 2 tokens, 2 KV heads. Each box: the D elements of one head of one token, in the order",
        "quiet",
    )
    canvas.text(20, 45, "of memory. k, v: key, value; p: page; t: place in the page; h: KV head.", "quiet")
    for index, (title, keys, values) in enumerate(strips):
        top = 78 + index * 82
        canvas.text(20, top, title, "title")
        for css, letter, cache in (("a", "k", keys), ("b", "v", values)):
            for place in sorted(set(cache.flatten().tolist())):
                held = (cache[..., 0] == place).nonzero().tolist()
                number = "*" if len(held) > 1 else str(held[0][0])
                x = 20 + place * 60
                canvas.box(x, top + 10, 60, 42, css)
                canvas.text(x + 30, top + 27, letter, "middle")
                canvas.text(x + 30, top + 44, f"p{number}t{held[0][1]}h{held[0][2]}", "middle")
    return canvas.svg()


#: By the path under docs/.
DRAWINGS: dict[str, Callable[[], str]] = {
    "layouts/kv-layouts.svg": draw_layouts,
    "layouts/addressing.svg": draw_addressing,
    "layouts/views.svg": draw_views,
}
