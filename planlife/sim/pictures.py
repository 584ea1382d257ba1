"""Figures of simulations and fits, with matplotlib. They read the same without colour: line styles, hatches, labels."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailableError
from ..report import MemoryReport
from ..trace_file import printable
from .fitting import Choice
from .result import PolicyResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's, which differ for every common kind of colour blindness, in an order of falling contrast to white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "+++")
_WIDTH_INCHES = 5.6
_MAX_BARS_SHOWN = 32
_DPI = 120

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be read out, searched, and is not bigger than it must be
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.titlesize": 11,
    "figure.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "text.parse_math": False,  # names come from files: a dollar sign is a dollar sign
    "figure.constrained_layout.use": True,
}


def require_matplotlib() -> None:
    """To be asked before the work that ends in figures. Raises BackendUnavailableError."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as missing:
        raise BackendUnavailableError(
            f"pictures need {missing.name}, which is not here: pip install 'planlife[sim]', or leave out --html and "
            "--png."
        ) from None


@contextmanager
def _figure(height_inches: float, rows: int = 1, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of its own, which no global state of pyplot knows. Raises BackendUnavailableError."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height_inches))
        yield figure, figure.subplots(rows, 1, **options)


def _time_axis(axes: Axes, span_us: float) -> tuple[float, str]:
    """(microseconds per unit, unit) that suits a span; labels the axis."""
    for unit_us, unit in ((3.6e9, "hours"), (6e7, "minutes"), (1e6, "seconds")):
        if span_us >= 2 * unit_us or unit_us == 1e6:
            axes.set_xlabel(f"time ({unit})")
            return unit_us, unit
    raise AssertionError


def _byte_unit(most_bytes: float) -> tuple[float, str]:
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if most_bytes >= 1 << exponent:
            return float(1 << exponent), unit
    return 1.0, "bytes"


def memory_figure(results: Sequence[PolicyResult]) -> Figure:
    """Bytes of plans and scratch over time, a line per policy; where plans were evicted, a row of marks below."""
    with _figure(3.9 + 0.22 * len(results), 2, height_ratios=(5, 0.4 + 0.35 * len(results)), sharex=True) as (
        figure,
        rows,
    ):
        above, below = rows
        unit_us, _ = _time_axis(below, max(result.span_us for result in results))
        unit_bytes, unit = _byte_unit(max(result.peak_bytes for result in results))
        for index, result in enumerate(results):
            buckets = result.memory
            times = [bucket["t_us"] / unit_us for bucket in buckets] + [result.span_us / unit_us]
            last = [bucket["last_bytes"] / unit_bytes for bucket in buckets]
            high = [bucket["max_bytes"] / unit_bytes for bucket in buckets]
            colour = COLOURS[index % len(COLOURS)]
            above.step(
                times, [*last, last[-1]], where="post", color=colour, linestyle=_LINES[index % len(_LINES)],
                linewidth=1.8, label=result.name,
            )  # fmt: skip
            if any(top > bottom for top, bottom in zip(high, last, strict=True)):
                above.fill_between(
                    times, [*last, last[-1]], [*high, high[-1]], step="post", color=colour, alpha=0.15, linewidth=0
                )
            evicted = [bucket["t_us"] / unit_us for bucket in buckets if bucket["evictions"]]
            below.plot(evicted, [index] * len(evicted), "|", color=colour, markersize=7)
        above.set_ylabel(f"plans and scratch ({unit})")
        above.set_ylim(bottom=0, top=above.get_ylim()[1] * 1.1)  # a line along the edge would be half a line
        figure.suptitle("Memory over time")
        above.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=2, frameon=False)
        below.set_yticks(range(len(results)), [result.name for result in results], fontsize=10)
        below.set_ylim(len(results) - 0.5, -0.5)
        below.set_title("evictions", fontsize=11, loc="left")
    return figure


def lifetimes_figure(result: PolicyResult) -> Figure:
    """Plans as bars from mint to eviction; pinned ones hatched. The classes that most steps rode, at most 32."""
    steps = {line.class_rows: line.steps for line in result.class_lines}
    plans = sorted(result.lifetimes, key=lambda plan: -steps.get(plan["class_rows"], 0))[:_MAX_BARS_SHOWN]
    plans.sort(key=lambda plan: (plan["site"], plan["class_rows"], plan["ubatch"]))
    several = len({(plan["site"], plan["ubatch"]) for plan in plans}) > 1
    with _figure(1.6 + 0.2 * max(len(plans), 2)) as (figure, axes):
        unit_us, _ = _time_axis(axes, result.span_us)
        labels = []
        for index, plan in enumerate(plans):
            bars = [
                (start / unit_us, max(end - start, result.span_us / 1000) / unit_us) for start, end in plan["bars_us"]
            ]
            pinned = plan["pinned"]
            axes.broken_barh(
                bars, (index - 0.38, 0.76), facecolor=COLOURS[0] if pinned else COLOURS[4], edgecolor="white",
                hatch="///" if pinned else "", linewidth=0.3,
            )  # fmt: skip
            labels.append(
                printable(f"{plan['site']}/{plan['class_rows']}/ub{plan['ubatch']}")
                if several
                else str(plan["class_rows"])
            )
        from matplotlib.patches import Patch

        figure.legend(
            handles=[
                Patch(facecolor=COLOURS[0], edgecolor="white", hatch="///", label="pinned by a graph"),
                Patch(facecolor=COLOURS[4], label="resident; gap: evicted"),
            ],
            fontsize=10, loc="outside lower center", ncols=2, frameon=False,
        )  # fmt: skip
        axes.set_yticks(range(len(plans)), labels, fontsize=10)
        axes.set_ylim(-0.6, max(len(plans), 1) - 0.4)
        axes.set_ylabel("plan" if several else "class (rows)")
        shown = "" if len(plans) == len(result.lifetimes) else f", {len(plans)} of {len(result.lifetimes)} plans"
        figure.suptitle(f"Plan lifetimes: {result.name}{shown}")
    return figure


def rows_figure(histogram: Mapping[int, int], ladders: Mapping[str, Sequence[int]], *, first_colour: int = 0) -> Figure:
    """How many steps had how many rows, over the classes of each ladder. first_colour: of the first ladder."""
    counts = {rows: steps for rows, steps in histogram.items() if rows}
    with _figure(4.2, 2, height_ratios=(4, 0.5 + 0.4 * len(ladders)), sharex=True) as (figure, (above, below)):
        above.bar(list(counts), list(counts.values()), width=1.0, color=COLOURS[5], linewidth=0)
        above.set_yscale("log")
        above.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        above.yaxis.set_minor_formatter(lambda value, _: "")
        above.set_ylabel("steps (log scale)")
        figure.suptitle("Rows of the steps, and the classes that serve them")
        for index, classes in enumerate(ladders.values()):
            colour = COLOURS[(first_colour + index) % len(COLOURS)]
            below.plot(classes, [index] * len(classes), "|", color=colour, markersize=11, markeredgewidth=1.6)
        below.set_yticks(range(len(ladders)), list(ladders), fontsize=10)
        below.set_ylim(len(ladders) - 0.5, -0.5)
        below.set_xlim(0, max(max(counts, default=1), *(classes[-1] for classes in ladders.values())) * 1.02)
        below.set_xlabel("rows of a step; each mark is a class")
    return figure


def padding_figure(results: Sequence[PolicyResult]) -> Figure:
    """Padded rows by real rows, as the class grows: which classes a policy pads in."""
    with _figure(4.0) as (figure, axes):
        for index, result in enumerate(results):
            rows, total = [], 0
            shares = []
            for line in result.class_lines:
                total += line.padded_rows
                rows.append(line.class_rows)
                shares.append(100 * total / max(result.real_rows, 1))
            axes.step(
                [0, *rows], [0, *shares], where="post", color=COLOURS[index % len(COLOURS)],
                linestyle=_LINES[index % len(_LINES)], linewidth=1.8,
                label=f"{result.name}: {100 * result.padding_share:.1f} %",
            )  # fmt: skip
        axes.set_xlabel("classes up to (rows)")
        axes.set_ylabel("padded rows, % of real rows")
        figure.suptitle("Padding, summed over the classes")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
    return figure


def policies_figure(results: Sequence[PolicyResult]) -> Figure:
    """Policies side by side: one panel per figure of merit, each with its numbers written out."""
    unit_bytes, unit = _byte_unit(max(result.peak_bytes for result in results))
    panels = (
        ("replayed steps (%)", [100 * result.replay_share for result in results], "{:.1f}"),
        ("padded rows (% of real rows)", [100 * result.padding_share for result in results], "{:.1f}"),
        ("compile stalls while serving (s)", [result.stall_us / 1e6 for result in results], "{:.2f}"),
        ("evictions", [float(result.service["evictions"]) for result in results], "{:,.0f}"),
        ("added to a step, p99 (ms)", [result.added_p99_us / 1e3 for result in results], "{:.3f}"),
        (f"peak of plans and scratch ({unit})", [result.peak_bytes / unit_bytes for result in results], "{:.2f}"),
    )
    with _figure((0.6 + 0.26 * len(results)) * len(panels), len(panels)) as (figure, every):
        for axes, (title, values, form) in zip(every, panels, strict=True):
            bars = axes.barh(
                range(len(results)), values, color=[COLOURS[i % len(COLOURS)] for i in range(len(results))],
                edgecolor="white", height=0.75,
            )  # fmt: skip
            for index, bar in enumerate(bars):
                bar.set_hatch(_HATCHES[index % len(_HATCHES)])
            axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=10)
            axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=10)
            axes.invert_yaxis()
            axes.set_title(title, fontsize=11, loc="left")
            axes.set_xlim(0, max(max(values) * 1.18, 1e-9))
            axes.xaxis.set_visible(False)
            axes.grid(False)
    return figure


def pareto_figure(choices: Sequence[Choice], marked: Sequence[Choice] = ()) -> Figure:
    """Classes against padding and against bytes. marked: ladders to compare with, each a point with its name."""
    unit_bytes, unit = _byte_unit(max(choice.worst_case_bytes for choice in (*choices, *marked)))
    with _figure(5.4, 2, sharex=True) as (figure, (above, below)):
        counts = [len(choice.classes) for choice in choices]
        above.plot(
            counts, [100 * c.padding_share for c in choices], "o-", color=COLOURS[0], markersize=4, label="fitted"
        )
        below.plot(counts, [c.worst_case_bytes / unit_bytes for c in choices], "o-", color=COLOURS[0], markersize=4)
        for index, choice in enumerate(marked):
            style = {
                "color": COLOURS[1 + index],
                "marker": "sD^v"[index % 4],
                "linestyle": "",
                "markersize": 8,
                "clip_on": False,
                "zorder": 3,
            }
            above.plot([len(choice.classes)], [100 * choice.padding_share], label=choice.name, **style)
            below.plot([len(choice.classes)], [choice.worst_case_bytes / unit_bytes], **style)
        below.set_xscale("log", base=2)
        below.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        # One class may pad ten times the rows and a few classes next to nothing: both are to be read.
        above.set_yscale("symlog", linthresh=1)
        above.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        above.set_ylabel("padded, % of real (log scale)")
        below.set_ylabel(f"plans and scratch ({unit})")
        below.set_xlabel("classes (log scale)")
        above.set_ylim(bottom=0, top=above.get_ylim()[1] * 2)
        below.set_ylim(bottom=0, top=below.get_ylim()[1] * 1.1)
        figure.suptitle("What more classes buy, and what they take")
        above.legend(fontsize=10)
    return figure


def report_figure(report: MemoryReport) -> Figure:
    """Where the bytes of a live manager are, against its budget."""
    unit_bytes, unit = _byte_unit(max(report.budget_bytes, report.worst_case_bytes, report.peak_bytes, 1))
    figures = {
        "worst case": report.worst_case_bytes,
        "budget": report.budget_bytes,
        "peak": report.peak_bytes,
        "resident": report.resident_bytes,
        "of that, pinned": report.pinned_bytes,
    }
    with _figure(2.6) as (figure, axes):
        bars = axes.barh(
            range(len(figures)), [value / unit_bytes for value in figures.values()], color=COLOURS[: len(figures)],
            edgecolor="white",
        )  # fmt: skip
        for index, bar in enumerate(bars):
            bar.set_hatch(_HATCHES[index])
        axes.bar_label(bars, [f"{value / unit_bytes:.2f}" for value in figures.values()], padding=3, fontsize=10)
        axes.set_yticks(range(len(figures)), list(figures))
        axes.invert_yaxis()
        axes.set_xlabel(f"plans and scratch ({unit})")
        axes.set_xlim(0, max(max(figures.values()) / unit_bytes * 1.15, 1e-9))
        figure.suptitle("Memory of the manager")
    return figure


def as_svg(figure: Figure, prefix: str) -> str:
    """An <svg> element for a page. prefix: of its ids, so that figures of one page do not share any."""
    import matplotlib

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": prefix}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    # The page decides the width; the height follows from the viewBox.
    return re.sub(r'^<svg ([^>]*?)width="[^"]*"', r"<svg \1", re.sub(r'^(<svg [^>]*?)height="[^"]*"', r"\1", text))


def save_png(figures: Sequence[Figure], path: str) -> None:
    """All figures as one PNG, in two columns where there are more than two. Raises OSError."""
    import matplotlib
    import numpy

    columns: list[list[Any]] = [[], []] if len(figures) > 2 else [[]]
    with matplotlib.rc_context(_STYLE):
        for figure in figures:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="rgba", dpi=_DPI)
            width, height = (round(extent * _DPI) for extent in figure.get_size_inches())
            image = numpy.frombuffer(buffer.getvalue(), dtype=numpy.uint8).reshape(-1, width, 4)[:height]
            min(columns, key=lambda column: sum(len(image) for image in column)).append(image)
    pasted = [numpy.concatenate(column) for column in columns]
    most = max(map(len, pasted))
    filled = [numpy.pad(one, ((0, most - len(one)), (0, 0), (0, 0)), constant_values=255) for one in pasted]
    from matplotlib.image import imsave

    imsave(path, numpy.concatenate(filled, axis=1), format="png")
