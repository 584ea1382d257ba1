"""`planlife simulate`, `fit-ladder` and `report`: what to configure, from what was recorded."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from .errors import ConfigError
from .options import byte_count, progress_bar
from .trace_file import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .sim.compare import Requests, Setting, StepLog, Survey
    from .sim.fitting import Choice
    from .sim.policy import Policy
    from .sim.result import PolicyResult
    from .spec import PlanSpec

#: Arguments of the library that the command line spells with dashes.
RENAMED_OPTIONS = ("max_rows", "kv_tokens", "prefill_tokens", "draft_tokens", "max_context_tokens", "num_compute_units")

_MAX_ROWS = 1 << 20

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _cost(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    costs = {}
    for value in values:
        name, equals, number = value.partition("=")
        try:
            costs[name.strip()] = float(number)
        except ValueError:
            equals = ""
        if not equals:
            raise click.BadParameter(f"{value!r}: write a name and microseconds, as in compile_us=68500.")
    return costs


def _step_times(context: click.Context, parameter: click.Parameter, value: str | None) -> dict[str, float]:
    """A JSON file, or numbers by name: step_us=3800,row_us=5."""
    if value is None:
        return {}
    try:
        if "=" in value:
            pairs = [part.partition("=") for part in value.split(",")]
            return {name.strip(): float(number) for name, _, number in pairs}
        loaded = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.BadParameter(f"{value!r}: {error}") from None
    if type(loaded) is not dict:
        raise click.BadParameter(f"{value!r} must hold an object of numbers.")
    return loaded


def _options(*options: _Decorator) -> _Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_TRACE_OPTIONS = _options(
    click.option(
        "--trace", required=True, type=click.Path(), metavar="FILE",
        help="A request trace (CSV or JSON Lines), or a step log that planlife.record wrote; plain or gzip.",
    ),
    click.option(
        "--max-rows", type=click.IntRange(1, _MAX_ROWS), metavar="N",
        help="Most sequences that the engine runs at once (max_num_seqs). For a request trace 256 unless given, for a "
        "step log its largest count.",
    ),
    click.option("--kv-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens that the KV pool holds."),
    click.option(
        "--prefill-tokens", type=click.IntRange(min=1), default=2048, show_default=True, metavar="N",
        help="Most prompt tokens that a step computes beside its decode rows.",
    ),
    click.option(
        "--draft-tokens", type=click.IntRange(0, 64), default=0, show_default=True, metavar="N",
        help="Speculative tokens per verify step.",
    ),
    click.option(
        "--acceptance", type=float, default=0.7, show_default=True, metavar="P",
        help="Probability that a draft token holds if those before it did.",
    ),
    click.option(
        "--speedup", type=float, default=1.0, show_default=True, metavar="X",
        help="Requests arrive X times as fast as in the trace.",
    ),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of drafts."),
    click.option(
        "--step-time", callback=_step_times, metavar="TIMES",
        help="How long steps take: step_us=3800,row_us=5,context_token_us=0.03,prefill_token_us=27, any of them, or a "
        "JSON file of the same names. An 8B model on an H200 by arithmetic unless given.",
    ),
)  # fmt: skip

_SPEC_OPTIONS = _options(
    click.option(
        "--sites", "sites_path", type=click.Path(), metavar="FILE",
        help="Sites as JSON, as for planlife doctor, instead of the one shape below; their ladders are not used.",
    ),
    click.option("--q-heads", type=click.IntRange(min=1), default=32, show_default=True, help="Query heads per rank."),
    click.option("--kv-heads", type=click.IntRange(min=1), default=8, show_default=True, help="KV heads per rank."),
    click.option("--head-dim", type=click.IntRange(min=1), default=128, show_default=True, help="Head dimension."),
    click.option("--page-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per KV page."),
    click.option(
        "--max-context-tokens", type=click.IntRange(min=1), default=131_072, show_default=True, help="Longest context."
    ),
    click.option(
        "--num-compute-units", type=click.IntRange(min=1), default=256, show_default=True,
        help="The device's SM or CU count: 132 on an H200, 256 on an MI355X.",
    ),
    click.option("--ubatches", type=click.IntRange(1, 1024), metavar="N",
                 help="Micro-batches; the log's unless given."),
    click.option("--engine", type=click.Choice(["vllm", "sglang", "nano-vllm"]), default="vllm", show_default=True,
                 help="Whose default capture sizes to compare with."),
)  # fmt: skip

_OUTPUT_OPTIONS = _options(
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
    click.option(
        "--html",
        type=click.Path(dir_okay=False),
        metavar="OUT",
        help="Write one self-contained page; needs the extra sim.",
    ),
    click.option(
        "--png",
        type=click.Path(dir_okay=False),
        metavar="OUT",
        help="Write the pictures as one PNG; needs the extra sim.",
    ),
)


@contextmanager
def _progress(total: int, text: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr: update(done, total=None, text=None)."""
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task(text, total=total or None)

        def update(done: int, total: int | None = None, text: str | None = None) -> None:
            changes: dict[str, Any] = {"completed": done}
            if total:
                changes["total"] = total
            if text is not None:
                changes["description"] = text
            bar.update(task, **changes)

        yield update


def _check_outputs(source: str, outputs: Mapping[str, str | None]) -> None:
    """Before anything is read or written: what cannot be written, or would be lost.

    Raises OSError, ConfigError, BackendUnavailableError.
    """
    if outputs.get("--html") or outputs.get("--png"):
        from .sim.pictures import require_matplotlib

        require_matplotlib()
    taken = {os.path.realpath(source): "what is read"}
    for option, path in outputs.items():
        if path is None:
            continue
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        clash = taken.setdefault(os.path.realpath(path), option)
        if clash != option:
            raise ConfigError(f"{option} {path!r} would overwrite {clash}: give it a name of its own.")


def _specs_from(path: str, names: Sequence[str], trace: str) -> dict[str, PlanSpec]:
    """The specs of a file of sites that a log names; a request trace has one site, whatever it is called."""
    from .sites import read_sites

    specs = read_sites(path).specs
    if names == ["default"] and len(specs) == 1:
        return {"default": next(iter(specs.values()))}
    missing = [name for name in names if name not in specs]
    if missing:
        raise ConfigError(f"trace {trace!r} has site {missing[0]!r}; {path!r} has {', '.join(map(repr, specs))}.")
    return {name: specs[name] for name in names}


class _Case:
    """What the trace and spec options of a command amount to: the steps, their survey and the spec."""

    def __init__(self, trace: str, options: dict[str, Any]) -> None:
        from .sim.compare import Requests, open_source, survey
        from .sim.engine import Engine, StepTimes
        from .sites import read_sites
        from .spec import PlanSpec

        times = options["step_time"]
        unknown = sorted(times.keys() - {field.name for field in fields(StepTimes)})
        if unknown:
            raise ConfigError(f"--step-time has no {unknown[0]}: give {', '.join(f.name for f in fields(StepTimes))}.")
        longest_tokens: int = options["max_context_tokens"]
        if options["sites_path"] is not None:
            longest_tokens = min(spec.max_context_tokens for spec in read_sites(options["sites_path"]).specs.values())
        engine = Engine(
            max_rows=options["max_rows"] or 256,
            max_context_tokens=longest_tokens,
            times=StepTimes(**times),
            **{
                name: options[name]
                for name in ("kv_tokens", "prefill_tokens", "draft_tokens", "acceptance", "speedup", "seed")
            },
        )
        self.source: StepLog | Requests = open_source(trace, engine)
        self.is_simulated = isinstance(self.source, Requests)
        with _progress(0, "reading the trace") as update:
            self.survey: Survey = survey(self.source, update)
        if not any(self.survey.rows):
            left_out = self._left_out()
            raise ConfigError(
                f"trace {trace!r} has no step with rows: there is nothing to plan{left_out and f' ({left_out})'}."
            )
        if max(self.survey.rows) > _MAX_ROWS:
            raise ConfigError(f"trace {trace!r} has a step of {max(self.survey.rows):,} rows, above {_MAX_ROWS:,}.")
        self.max_rows: int = options["max_rows"] or max(self.survey.rows)
        self.engine_name: str = options["engine"]
        self.ubatches: int = options["ubatches"] or self.survey.ubatches
        self.num_compute_units: int = options["num_compute_units"]
        self.query_length = options["draft_tokens"] + 1
        names = list(self.survey.sites) or ["default"]
        if options["sites_path"] is not None:
            self.sites = _specs_from(options["sites_path"], names, trace)
            return
        spec = PlanSpec(
            options["q_heads"],
            options["kv_heads"],
            options["head_dim"],
            options["page_size"],
            max_context_tokens=options["max_context_tokens"],
            query_length=self.query_length,
        )
        self.sites = dict.fromkeys(names, spec)

    def lead(self) -> str:
        """What was read, in a sentence."""
        found = self.survey
        text = (
            f"{self.source.name}: {found.num_steps:,} decode steps over {found.span_us / 60e6:.1f} minutes, up to "
            f"{max(found.rows)} rows"
        )
        run = getattr(self.source, "run", None)
        if run is not None:
            text += (
                f", of {run.num_requests:,} requests served by a simulated engine (busy {run.busy_us / 1e6:,.0f} s; "
                f"a request waited {run.waited_us / max(run.num_requests, 1) / 1e6:,.1f} s on average)"
            )
            text += "; " * bool(run.num_too_long) + self._left_out()
        return printable(text) + "."

    def _left_out(self) -> str:
        run = getattr(self.source, "run", None)
        if run is None or not run.num_too_long:
            return ""
        return f"{run.num_too_long:,} requests longer than the KV pool or the longest context were left out"

    def to_dict(self) -> dict[str, Any]:
        found = self.survey
        run = getattr(self.source, "run", None)
        return {
            "trace": self.source.name,
            "steps": found.num_steps,
            "span_us": found.span_us,
            "max_rows": self.max_rows,
            "sites": list(self.sites),
            "ubatches": self.ubatches,
            "engine_run": None if run is None else run.to_dict(),
        }


@click.command()
@_TRACE_OPTIONS
@_SPEC_OPTIONS
@click.option("--classes", "num_classes", type=click.IntRange(min=1), default=16, show_default=True, metavar="K",
              help="Classes of the fitted ladder.")  # fmt: skip
@click.option("--budget", "budget_bytes", type=byte_count, metavar="BYTES",
              help="Budget of the ladder policies, such as 8MiB; their worst case unless given.")  # fmt: skip
@click.option("--capture/--no-capture", default=True, show_default=True,
              help="Whether graphs are captured for the ladders' classes: they pin their plans.")  # fmt: skip
@click.option("--policy", "wanted", multiple=True, metavar="NAME",
              help="Only policies whose name contains NAME; may be repeated.")  # fmt: skip
@click.option("--costs", "costs_name", type=click.Choice(["h200", "mi355x"]), default="h200", show_default=True,
              help="Whose measured costs of a compile, a refresh and a buffer.")  # fmt: skip
@click.option("--cost", "changes", multiple=True, callback=_cost, metavar="NAME=US",
              help="A cost of your own, such as compile_us=1500; may be repeated.")  # fmt: skip
@click.option("--layers", "num_layers", type=click.IntRange(min=1), default=32, show_default=True,
              help="Layers that launch a decode each, where no graph is replayed.")  # fmt: skip
@click.option("--processes", type=click.IntRange(min=1), metavar="N", help="One per core for long logs unless given.")
@click.option("--unfolded", is_flag=True, help="Ask the manager for every single step. Same figures, more time.")
@click.option("--steps-out", type=click.Path(dir_okay=False), metavar="OUT",
              help="Also write the steps as a step log; gzip if it ends in .gz.")  # fmt: skip
@_OUTPUT_OPTIONS
def simulate(
    trace: str,
    num_classes: int,
    budget_bytes: int | None,
    capture: bool,
    wanted: tuple[str, ...],
    costs_name: str,
    changes: dict[str, float],
    num_layers: int,
    processes: int | None,
    unfolded: bool,
    steps_out: str | None,
    as_json: bool,
    html: str | None,
    png: str | None,
    **options: Any,
) -> None:
    """What PlanManager would do with a trace, under several policies side by side.

    The real manager is driven, on a device that computes nothing. Every policy sees the same steps: what it adds to
    their time is told, and does not move later arrivals.

    Exit status: 0 done, 1 something cannot be written, as pictures without the extra sim, 2 bad input.
    """
    from .sim.compare import Setting, compare
    from .sim.costs import COSTS
    from .sim.policy import standard_policies

    _check_outputs(trace, {"--html": html, "--png": png, "--steps-out": steps_out})
    case = _Case(trace, options)
    if steps_out is not None:
        from .step_log import StepLogWriter

        num_written = 0
        with StepLogWriter(steps_out) as writer, _progress(case.survey.num_steps, "writing the steps") as update:
            for block in case.source.blocks():
                writer.add_blocks([block])
                num_written += len(block.rows)
                update(num_written)
    policies = standard_policies(
        case.survey.rows,
        num_classes=num_classes,
        engine=case.engine_name,
        max_rows=case.max_rows,
        budget_bytes=budget_bytes,
        capture=capture,
    )
    if wanted:
        names = ", ".join(policy.name for policy in policies)
        policies = [policy for policy in policies if any(part in policy.name for part in wanted)]
        if not policies:
            raise ConfigError(f"no policy is named like {', '.join(map(repr, wanted))}; there are {names}.")
    setting = Setting(
        case.sites,
        COSTS[costs_name].with_changes(**changes),
        case.ubatches,
        case.num_compute_units,
        num_layers,
        fold=not unfolded,
    )
    with _progress(case.survey.num_steps * len(policies), "simulating") as update:
        results = compare(
            case.source, policies, setting, num_steps=case.survey.num_steps, num_processes=processes, progress=update
        )
    if as_json:
        document = {
            **case.to_dict(),
            "costs": setting.costs.to_dict(),
            "num_layers": num_layers,
            "policies": [result.to_dict() for result in results],
        }
        click.echo(json.dumps(document))
    else:
        _print_results(case, results, setting)
    if html or png:
        figures = _simulation_figures(case, policies, results)
        notes = _notes(results, setting)
        _write(
            html, png, "What planlife would do", case.lead(), figures, _result_tables(results), notes, as_json=as_json
        )


def _console() -> Console:
    """As wide as the terminal; where there is none, as wide as the tables."""
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=120)


def _print_results(case: _Case, results: Sequence[PolicyResult], setting: Setting) -> None:
    console = _console()
    console.print(case.lead())
    table = Table(caption_justify="left")
    header, rows = _summary(results)
    table.add_column(header[0])
    for heading in header[1:]:
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in _notes(results, setting):
        console.print(note)


def _summary(results: Sequence[PolicyResult]) -> tuple[list[str], list[list[str]]]:
    """Figures by row and policies by column: fits a terminal and a phone."""
    rows: list[tuple[str, Callable[[PolicyResult], str]]] = [
        ("classes", lambda r: f"{len(r.classes)}"),
        ("replayed steps, %", lambda r: f"{100 * r.replay_share:.2f}"),
        ("padded rows, % of real", lambda r: f"{100 * r.padding_share:.2f}"),
        ("padded rows", lambda r: f"{r.padded_rows:,}"),
        ("mints at start-up", lambda r: f"{r.start['mints']:,}"),
        ("mints while serving", lambda r: f"{r.service['mints']:,}"),
        ("compile stalls, s", lambda r: f"{r.stall_us / 1e6:.3f}"),
        ("longest stall, ms", lambda r: f"{r.longest_stall_us / 1e3:.1f}"),
        ("refreshes", lambda r: f"{r.service['refreshes']:,}"),
        ("evictions", lambda r: f"{r.service['evictions']:,}"),
        ("fallbacks", lambda r: f"{r.service['fallbacks']:,}"),
        ("peak, bytes", lambda r: f"{r.peak_bytes:,}"),
        ("worst case, bytes", lambda r: f"{r.worst_case_bytes:,}"),
        ("with scratch per plan, bytes", lambda r: f"{r.unshared_bytes:,}"),
        ("added to a step, p50, us", lambda r: f"{r.added_p50_us:,.1f}"),
        ("added to a step, p99, us", lambda r: f"{r.added_p99_us:,.1f}"),
        ("added to a step, most, us", lambda r: f"{r.added_max_us:,.1f}"),
    ]
    return (
        ["", *(result.name for result in results)],
        [[label, *(form(result) for result in results)] for label, form in rows],
    )


def _notes(results: Sequence[PolicyResult], setting: Setting) -> list[str]:
    notes = [f"{result.name}: {result.note}." for result in results]
    notes.extend(
        f"{result.name}: {result.num_uncaptured} classes found no room to be captured in and run eagerly."
        for result in results
        if result.num_uncaptured
    )
    costs = setting.costs
    notes.append(
        f"Added to a step: planning {costs.plan_us:g} us, refresh {costs.refresh_us:g} us, a compile "
        f"{costs.compile_us / 1e3:g} ms, a buffer {costs.allocate_us:g} us, without a graph {setting.num_layers} "
        f"layers x {costs.eager_layer_us:g} us, a padded row {costs.padded_row_us:g} us. "
        f"Costs {costs.name}: {costs.source}"
    )
    return notes


def _result_tables(results: Sequence[PolicyResult]) -> list[str]:
    from .sim.page import table_html

    return [table_html("Policies side by side, over the same steps.", *_summary(results))]


def _simulation_figures(
    case: _Case, policies: Sequence[Policy], results: Sequence[PolicyResult]
) -> list[tuple[str, Figure]]:
    from .sim import pictures

    ladders = {policy.name: policy.ladder.classes for policy in policies}
    figures = [
        ("Policies side by side", pictures.policies_figure(results)),
        ("Memory over time with evictions", pictures.memory_figure(results)),
        ("Rows of the steps against classes", pictures.rows_figure(case.survey.rows, ladders)),
        ("Padding", pictures.padding_figure(results)),
    ]
    # Bars that all go from end to end show nothing, but for one policy that shows just that.
    moving = [result for result in results if result.service["mints"] or result.service["evictions"]]
    shown = [result for result in results if result in moving or (result is results[-1] and result.lifetimes)]
    giving_back = {policy.name for policy in policies if policy.trim_each_step}
    figures.extend(
        (f"Plan lifetimes: {result.name}", pictures.lifetimes_figure(result))
        for result in shown
        if result.name not in giving_back
    )
    return figures


def _write(
    html: str | None,
    png: str | None,
    title: str,
    lead: str,
    figures: Sequence[tuple[str, Figure]],
    tables: Sequence[str],
    notes: Sequence[str],
    code: Sequence[tuple[str, str]] = (),
    *,
    as_json: bool,
) -> None:
    from .sim.page import page_html
    from .sim.pictures import save_png

    if html:
        Path(html).write_text(
            page_html(title, lead, figures, tables, notes, code), encoding="utf-8", errors="backslashreplace"
        )
    if png:
        save_png([figure for _, figure in figures], png)
    for path in (html, png):
        if path:
            click.echo(f"wrote {path}", err=as_json)


@click.command()
@_TRACE_OPTIONS
@_SPEC_OPTIONS
@click.option("--classes", "num_classes", type=click.IntRange(min=1), metavar="K", help="Most classes.")
@click.option("--budget", "budget_bytes", type=byte_count, metavar="BYTES",
              help="As many classes as fit these bytes with their scratch, such as 8MiB.")  # fmt: skip
@_OUTPUT_OPTIONS
def fit_ladder(
    trace: str,
    num_classes: int | None,
    budget_bytes: int | None,
    as_json: bool,
    html: str | None,
    png: str | None,
    **options: Any,
) -> None:
    """The ladder that pads a trace's steps the least, with K classes or within BYTES, and lines to paste.

    Exit status: 0 done, 1 something cannot be written, as pictures without the extra sim, 2 bad input, or a
    budget that holds not even one class.
    """
    from .ladder import CapacityLadder
    from .sim.fitting import Fitter, configuration_lines
    from .sim.policy import engine_ladder

    if (num_classes is None) == (budget_bytes is None):
        raise ConfigError("give either --classes K or --budget BYTES.")
    _check_outputs(trace, {"--html": html, "--png": png})
    case = _Case(trace, options)
    fitter = Fitter(
        case.survey.rows, case.max_rows, case.sites, ubatches=case.ubatches, num_compute_units=case.num_compute_units
    )
    with _progress(0, "fitting") as update:
        fitted = fitter.fit(num_classes) if num_classes is not None else fitter.fit_bytes(budget_bytes or 0, update)
    of_engine, _ = engine_ladder(case.engine_name, case.max_rows)
    others = [
        fitter.judge("powers of two", CapacityLadder.powers_of_two(case.max_rows)),
        fitter.judge(f"{case.engine_name} sizes", of_engine),
    ]
    ladder = CapacityLadder(fitted.classes)
    lines = configuration_lines(ladder, case.query_length)
    with _progress(0, "fitting the curve") as update:
        curve = fitter.curve(progress=update)
    if as_json:
        document = {
            **case.to_dict(),
            "fitted": fitted.to_dict(),
            "others": [choice.to_dict() for choice in others],
            "curve": [choice.to_dict() for choice in curve],
            "configuration": lines,
        }
        click.echo(json.dumps(document))
    else:
        _print_fit(case, fitted, others, curve, lines)
    if html or png:
        from .sim import pictures
        from .sim.page import table_html

        ladders = {choice.name: choice.classes for choice in (fitted, *others)}
        figures = [
            ("Classes against padding and memory", pictures.pareto_figure(curve, [fitted, *others])),
            ("Rows of the steps against classes", pictures.rows_figure(case.survey.rows, ladders, first_colour=1)),
        ]
        tables = [
            table_html("The fitted ladder beside others.", *_choices_table([fitted, *others], fitted)),
            table_html("What more classes buy.", *_choices_table(curve, fitted)),
        ]
        code = [("To paste", "\n".join(f"{engine}: {line}" for engine, line in lines.items()))]
        _write(html, png, "A ladder for this traffic", case.lead(), figures, tables, (), code, as_json=as_json)


def _choices_table(choices: Sequence[Choice], fitted: Choice) -> tuple[list[str], list[list[str]]]:
    header = ["ladder", "classes", "padded rows", "% of real", "against fitted", "plans and scratch, bytes"]
    rows = [
        [
            choice.name,
            str(len(choice.classes)),
            f"{choice.padded_rows:,}",
            f"{100 * choice.padding_share:.2f}",
            f"{choice.padded_rows - fitted.padded_rows:+,}",
            f"{choice.worst_case_bytes:,}",
        ]
        for choice in choices
    ]
    return header, rows


def _print_fit(
    case: _Case, fitted: Choice, others: Sequence[Choice], curve: Sequence[Choice], lines: Mapping[str, str]
) -> None:
    console = _console()
    console.print(case.lead())
    for caption, choices in (("the fitted ladder and others", [fitted, *others]), ("what more classes buy", curve)):
        header, rows = _choices_table(choices, fitted)
        table = Table(title=caption, title_justify="left")
        table.add_column(header[0])
        for heading in header[1:]:
            table.add_column(heading, justify="right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for engine, line in lines.items():
        click.echo(f"{engine}: {line}")  # one line each, however long: to be pasted


@click.command()
@click.argument("file", type=click.Path())
@_OUTPUT_OPTIONS
def report(file: str, as_json: bool, html: str | None, png: str | None) -> None:
    """Show a live manager's report, from the JSON that PlanManager.report().to_json() gave.

    Exit status: 0 done, 1 something cannot be written, as pictures without the extra sim, 2 bad input.
    """
    from .sim.report_file import read_report

    _check_outputs(file, {"--html": html, "--png": png})
    found = read_report(file)
    click.echo(found.to_json() if as_json else "\n".join(map(printable, str(found).split("\n"))))
    if html or png:
        from .sim import pictures
        from .sim.page import table_html

        plans = [
            [f"{p.site}/{p.class_rows}/ub{p.ubatch}", p.state, f"{p.num_bytes:,}", p.num_pins, p.note]
            for p in found.plans
        ]
        arenas = [
            [f"scratch {a.lane}/ub{a.ubatch}", a.state, f"{a.num_bytes:,}", a.num_pins, a.note] for a in found.arenas
        ]
        header = ["what", "state", "bytes", "pins", "note"]
        counters = [[name, f"{value:,}"] for name, value in found.counters.items()]
        tables = [
            table_html("Plans and scratch.", header, plans + arenas),
            table_html("Counters since the manager was made.", ["counter", "count"], counters),
        ]
        notes = [f"Not counted: {name}: {text}." for name, text in found.excluded.items()]
        figures = [("Memory against the budget", pictures.report_figure(found))]
        state = "closed" if found.closed else "sealed" if found.sealed else "not sealed yet"
        lead = f"{found.device}, backend {found.backend}, {state}, {found.num_graphs} graphs."
        _write(html, png, "A planlife manager", lead, figures, tables, notes, as_json=as_json)


@click.command("simulate")
@click.option("--steps", "num_steps", type=click.IntRange(min=1000), default=20_000, show_default=True, metavar="N")
def bench_simulate(num_steps: int) -> None:
    """Time plan_for with a refresh on this CPU, the backend left out: cost plan_us, and the simulator's own speed."""
    from .sim.compare import measure_plan_us

    plan_us = measure_plan_us(num_steps)
    click.echo(
        f"plan_for that refreshes, backend left out: {plan_us:.2f} us, the best of 5 runs of {num_steps:,} steps; "
        f"{1e6 / plan_us:,.0f} steps/s through the real logic."
    )
