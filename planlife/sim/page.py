"""One self-contained page: figures, tables, and what they were made from. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..trace_file import printable
from .pictures import as_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font: 16px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 76rem;
  padding: 1rem; overflow-wrap: break-word; }}
h1 {{ font-size: 1.4rem; margin: 0 0 .3rem; }}
h2 {{ font-size: 1.1rem; margin: 1.4rem 0 .4rem; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1rem;
  align-items: start; }}
figure {{ margin: 0; border: 1px solid #ddd; border-radius: 6px; padding: .4rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; margin-bottom: 1rem; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
caption {{ text-align: left; color: #444; padding-bottom: .3rem; }}
code, pre {{ font: .85rem/1.4 ui-monospace, monospace; background: #f4f4f4; border-radius: 4px; }}
pre {{ padding: .5rem; overflow-x: auto; }}
p.note {{ color: #444; font-size: .9rem; }}
</style>
</head>
<body>
"""


def table_html(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; every cell is escaped."""
    head = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(printable(str(cell)))}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def page_html(
    title: str,
    lead: str,
    figures: Sequence[tuple[str, Figure]],
    tables: Sequence[str] = (),
    notes: Sequence[str] = (),
    code: Sequence[tuple[str, str]] = (),
) -> str:
    """The page. figures: what each shows, for those who cannot see it, and the figure. code: headings and lines.

    tables: from `table_html`; everything else is escaped here.
    """
    parts = [
        _HEAD.format(title=escape(title)),
        f"<h1>{escape(title)}</h1>\n<p>{escape(printable(lead))}</p>\n",
        *tables,
    ]
    parts.append('<div class="figures">\n')
    for index, (shows, figure) in enumerate(figures):
        svg = as_svg(figure, f"f{index}")
        svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(shows, quote=True)}" ', 1)
        parts.append(f"<figure>{svg}</figure>\n")
    parts.append("</div>\n")
    for heading, lines in code:
        parts.append(f"<h2>{escape(heading)}</h2>\n<pre>{escape(lines)}</pre>\n")
    parts.extend(f'<p class="note">{escape(note)}</p>\n' for note in notes)
    parts.append("</body>\n</html>\n")
    return "".join(parts)
