"""The commands of `planlife`. Only this module and `cli` print; what they print is made elsewhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Any

import click
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from . import __version__, sim_commands
from .configuration import BACKENDS, FALLBACKS
from .diagnosis import exact_bytes, human_bytes
from .errors import ConfigError, PlanlifeError
from .options import byte_count, progress_bar
from .spec import INT32_MAX, MAX_COMPUTE_UNITS

if TYPE_CHECKING:
    from .bench_device import Cost

_WIDE_COLUMNS = 120
_COUNT = click.IntRange(min=1, max=INT32_MAX)


def _in_options(message: str) -> str:
    """A refusal by the library, in the names that the command line has for its arguments."""
    for name, option in (
        ("budget_bytes", "--budget"),
        ("memory_bytes", "--memory"),
        ("num_layers", "--layers"),
        ("num_classes", "--classes"),
        ("aiter_generation", "--aiter-generation"),
        *((name, "--" + name.replace("_", "-")) for name in sim_commands.RENAMED_OPTIONS),
    ):
        message = re.sub(rf"\b{name}\b", option, message)  # not within another name, as in min_budget_bytes
    for dtype, kv in (("float8_e4m3fnuz", "fp8_fnuz"), ("float8_e4m3fn", "fp8")):
        message = re.sub(rf"make the cache {dtype}\b", f"pass --kv {kv}", message)
    return re.sub(r"\b(kv|scales|backend|device|double)(?==|\b out)", r"--\1", message)


class _Commands(click.Group):
    """Turns what planlife raises on purpose into one line and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PlanlifeError as error:
            click.echo("planlife: " + _in_options(" ".join(str(error).split())), err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except ModuleNotFoundError as missing:
            if missing.name != "torch":
                raise
            click.echo("planlife: this command needs torch: install one that is built for this machine", err=True)
            ctx.exit(1)
        except BrokenPipeError:
            raise  # click ends quietly: whoever read has seen enough
        except OSError as error:
            click.echo(f"planlife: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands)
@click.version_option(__version__)
def planlife() -> None:
    """Owns the life of GPU work plans for paged decode."""


@planlife.command()
@click.option(
    "--backend",
    type=click.Choice(["auto", "torch", "triton", "aiter"]),
    default="auto",
    show_default=True,
    help="Who plans and decodes; auto is torch on a CPU, and on a GPU aiter or triton.",
)
@click.option(
    "--double",
    type=click.Choice(["gfx942", "gfx950", "gfx1250"]),
    help="For --backend aiter without an AMD GPU: take --device for this one, with the strict double of aiter; "
    "what is installed unless given.",
)
@click.option(
    "--aiter-generation",
    type=click.Choice(["G2", "G3", "G4", "newer"]),
    help="The text of aiter that --double has; G3 unless given.",
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="NAME",
    help="cpu, with emulated graphs, or cuda or cuda:N, with real ones.",
)
@click.option(
    "--style",
    type=click.Choice(["before-replay", "in-graph"]),
    default="before-replay",
    show_default=True,
    help="Where plan_for is called: before each replay, or recorded inside the graph.",
)
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(),
    metavar="FILE",
    help="A request trace to serve, CSV or JSON Lines, plain or gzip; a packaged sample unless given.",
)
@click.option(
    "--steps",
    "max_steps",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    metavar="N",
    help="Engine steps to serve at most. The first requests of the trace are served, as many as fit these steps; "
    "long prompts are folded and long outputs cut to the toy model's context.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of queries, keys, values and draft acceptance.",
)
@click.option(
    "--layers",
    "num_layers",
    type=click.IntRange(2, 64),
    default=2,
    show_default=True,
    metavar="N",
    help="Attention layers of the toy model; many of them need a larger --memory.",
)
@click.option(
    "--kv",
    type=click.Choice(["bf16", "fp16", "fp8", "fp8_fnuz"]),
    default="bf16",
    show_default=True,
    help="What the KV cache stores; fp8 is e4m3fn with scales, fp8_fnuz e4m3fnuz, the FP8 of gfx942.",
)
@click.option(
    "--scales", type=click.Choice(["per_tensor", "per_token"]), help="Of an fp8 cache; per_tensor unless given."
)
@click.option(
    "--layout",
    type=click.Choice(["nhd", "hnd", "packed"]),
    help="Of the KV cache; unless given, nhd, and packed with --backend aiter.",
)
@click.option(
    "--mtp",
    type=click.IntRange(1, 7),
    default=3,
    show_default=True,
    metavar="N",
    help="Draft tokens: a verify step has N + 1 query tokens per row, and N draft passes follow it.",
)
@click.option(
    "--window",
    type=click.IntRange(1, 8192),
    default=128,
    show_default=True,
    metavar="TOKENS",
    help="Of the layers with a sliding window. Contexts are up to twice as long, and at least 1024 tokens.",
)
@click.option(
    "--memory",
    "memory_bytes",
    type=byte_count,
    metavar="BYTES",
    help="What plans, scratch and the KV pool share; 16MiB unless given.",
)
@click.option(
    "--budget",
    "budget_bytes",
    type=byte_count,
    metavar="BYTES",
    help="Budget for plans and scratch, such as 100KiB; their worst case unless given.",
)
@click.pass_context
def demo(ctx: click.Context, /, **options: Any) -> None:
    """Serve a request trace on this machine and compare every output with dense attention.

    Exit status: 0 all outputs right and nothing compiled while serving, 1 otherwise, 2 bad input.
    """
    from .demo import DemoConfig, run_demo

    given = {name: value for name, value in options.items() if value is not None}
    if given["backend"] == "aiter":
        given.setdefault("layout", "packed")
    config = DemoConfig(**given)
    if config.backend == "triton" and config.device == "cpu":
        click.echo(
            "planlife: on a CPU, Triton's kernels run in its interpreter, if at all: half a minute to start, then a "
            "second or more per step. Take a few --steps, --device cuda where there is a GPU, or --backend torch.",
            err=True,
        )
    console = Console(markup=False, highlight=False)
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=None)
        result = run_demo(
            config, progress=lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
        )
    table = Table(show_header=False)
    for label, value in result.rows():
        table.add_row(label, value)
    table.add_row("verdict", "ok" if result.ok else "NOT OK")
    console.print(table)
    if not result.ok:
        ctx.exit(1)


def _sites_option(function: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--sites",
        "sites_path",
        type=click.Path(),
        metavar="FILE",
        help="Sites in JSON: by name an object of PlanSpec's fields, and 'ladder', a list of row counts; "
        "one common shape unless given.",
    )(function)


def _ubatches_option(function: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--ubatches",
        type=_COUNT,
        default=1,
        show_default=True,
        metavar="N",
        help="Micro-batches that may be in flight together.",
    )(function)


def _json_option(function: Callable[..., None]) -> Callable[..., None]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")(function)


@planlife.command()
@_sites_option
@click.option(
    "--device", metavar="NAME", help="As for PlanManager: cpu, cuda, cuda:1; what it would take unless given."
)
@click.option(
    "--backend",
    type=click.Choice(["auto", *BACKENDS]),
    default="auto",
    show_default=True,
    help="The backend that has to serve the sites.",
)
@click.option(
    "--fallback", type=click.Choice(FALLBACKS), help="The fallback that has to take what the backend refuses."
)
@_ubatches_option
@_json_option
@click.pass_context
def doctor(
    ctx: click.Context,
    sites_path: str | None,
    device: str | None,
    backend: str,
    fallback: str | None,
    ubatches: int,
    as_json: bool,
) -> None:
    """What is installed and visible here, and what each backend says about each site.

    Exit status: 0 what was asked for works, 1 something of it cannot, 2 bad input. On GPUs it opens a context on each.
    It imports aiter where that is ROCm's, as a manager would.
    """
    from .doctor import diagnose
    from .sites import DEFAULT_SITES, read_sites

    sites = DEFAULT_SITES if sites_path is None else read_sites(sites_path)
    with _only_ours(as_json):
        found = diagnose(sites, device=device, backend=backend, fallback=fallback, ubatches=ubatches)
    print(found.to_json() if as_json else found)  # click.echo loses letters that the terminal does not have
    if found.refused:
        ctx.exit(1)


def _only_ours(as_json: bool) -> AbstractContextManager[object]:
    """Where JSON is printed: what the libraries say that are imported meanwhile goes to stderr."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def _console() -> Console:
    return Console(markup=False, highlight=False)


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


@planlife.command("estimate")
@_sites_option
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="torch", show_default=True, help="Whose tables and scratch."
)
@click.option(
    "--num-cu",
    "num_compute_units",
    type=click.IntRange(min=1, max=MAX_COMPUTE_UNITS),
    default=256,
    show_default=True,
    metavar="N",
    help="SMs or CUs of the device meant, such as 132 of an H200 or 304 of an MI300X; 256 is the CPU device's setting.",
)
@_ubatches_option
@_json_option
def estimate_bytes(sites_path: str | None, backend: str, num_compute_units: int, ubatches: int, as_json: bool) -> None:
    """How many bytes plans and scratch take at most: to be known before a KV pool is sized."""
    from .estimate import estimate
    from .sites import DEFAULT_SITES, read_sites

    sites = DEFAULT_SITES if sites_path is None else read_sites(sites_path)
    with _only_ours(as_json):
        found = estimate(sites, ubatches=ubatches, backend=backend, num_compute_units=num_compute_units)
    if as_json:
        click.echo(found.to_json())
        return
    table = _table("what", "bytes of one ubatch")
    for plan in found.classes:
        table.add_row(f"plan {plan.site}/{plan.class_rows}", f"{plan.plan_bytes:,}")
    for lane in found.lanes:
        table.add_row(f"scratch of lane {lane.lane} ({', '.join(lane.sites)})", f"{lane.arena_bytes:,}")
    table.columns[1].justify = "right"
    _console().print(table)
    click.echo(f"worst case of {found.ubatches} ubatch(es): {exact_bytes(found.worst_case_bytes)}")
    click.echo(f"smallest budget: {exact_bytes(found.min_budget_bytes)}")
    click.echo(f"backend {found.backend}, {found.num_compute_units} compute units")
    for note in found.notes:
        click.echo(f"note: {note}")


@planlife.group()
def bench() -> None:
    """Measure planlife on this machine."""


@bench.command()
@click.option(
    "--batches",
    "num_batches",
    type=click.IntRange(min=30),
    default=51,
    show_default=True,
    metavar="N",
    help="Batches to time.",
)
@click.option(
    "--calls",
    "calls_per_batch",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    metavar="N",
    help="Calls in each batch.",
)
def host(num_batches: int, calls_per_batch: int) -> None:
    """Host time of a call on this CPU, without any kernel."""
    from .bench import measure_host

    table = Table(caption_justify="left")
    table.add_column("call", no_wrap=True)
    table.add_column("device set")
    for heading in ("median us", "min us", "max us", "empty call us", "ratio"):
        table.add_column(heading, justify="right")
    figures = measure_host(num_batches=num_batches, calls_per_batch=calls_per_batch)
    for figure in figures:
        table.add_row(
            figure.call,
            "yes" if figure.has_default_device else "no",
            f"{figure.median_us:.3f}",
            f"{figure.min_us:.3f}",
            f"{figure.max_us:.3f}",
            f"{figure.yardstick_us:.3f}",
            f"{figure.ratio:.1f}",
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    for figure in figures:
        if not figure.has_default_device:
            console.print(f"{figure.call}: {figure.included}")
    console.print(
        f"Per call, over {num_batches} batches of {calls_per_batch} calls, or a tenth as many of those that take long, "
        "without gc. Empty call: "
        "a method that does nothing with as many arguments, timed in turn with the call; its median. "
        "Ratio: of the two medians. Device set: under torch.set_default_device or with torch.device, where torch "
        "runs Python code for each tensor that Python reads."
    )


@bench.command("aiter")
@click.option("--device", default="cpu", show_default=True, help="As torch writes it, such as cuda:0.")
@click.option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(min=30),
    default=301,
    show_default=True,
    metavar="N",
    help="Rounds to time.",
)
@click.option(
    "--calls",
    "calls_per_round",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    metavar="N",
    help="Calls of each layer in a round.",
)
def bench_aiter(device: str, num_rounds: int, calls_per_round: int) -> None:
    """What the aiter backend adds to a layer: host time of a call through the manager beside a bare call.

    Over a pa_decode that returns at once, which takes no AMD GPU, and over the installed aiter where it serves this
    device. Rounds are short, so that on a busy machine some are undisturbed.
    """
    from .bench_aiter import NUM_LAYERS, measure_wrapper

    reports, left_out = measure_wrapper(device=device, num_rounds=num_rounds, calls_per_round=calls_per_round)
    console = Console(markup=False, highlight=False, width=max(Console().width, _WIDE_COLUMNS))
    headings = ("wrapped min", "bare min", "added", "median", "launches", "aiter's own", "added to aiter")
    for report in reports:
        table = Table(title=f"{report.library}, on {report.device}: us per layer", title_justify="left", box=MARKDOWN)
        table.add_column("call")
        for heading in headings:
            table.add_column(heading, justify="right")
        for one in report.figures:
            figures = (
                *(min(one.wrapped_us), min(one.bare_us), one.added_us, one.added_median_us),
                *(min(one.writes_us), min(one.spared_us), one.added_to_aiter_us),
            )
            table.add_row(one.call, *(f"{us:.2f}" for us in figures))
        console.print(table)
    console.print(
        f"Host time per call, over {num_rounds} rounds of {calls_per_round} calls of each of {NUM_LAYERS} layers, "
        "wrapped and bare rounds in turn, without gc. Added: the fastest wrapped round less the fastest bare one; its "
        "median is over the rounds. Launches: of what was added, the two that write scales given as numbers; tensors "
        "need none. aiter's own: pa_decode makes a tensor of each such number itself, which is spared, and which one "
        "that returns at once does not do."
    )
    if left_out:
        console.print(f"Not measured over an installed aiter: {left_out}.")


@bench.command("device")
@click.option("--backend", default="auto", show_default=True, help="auto, torch, triton or aiter.")
@click.option("--device", default="cuda", show_default=True, help="The GPU: cuda or cuda:N.")
@_json_option
def bench_device(backend: str, device: str, as_json: bool) -> None:
    """What plan_for, pa_decode, refreshes, decodes and the sanitizer cost on a GPU.

    Every figure stands beside a limit or a peer that was measured in the same run: compare the ratios. GPUs that others
    use meanwhile give other times.
    """
    from .bench_device import measure_device

    terminal = Console(stderr=True)
    with terminal.status("starting") as status, _only_ours(as_json):
        report = measure_device(backend=backend, device=device, progress=status.update)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        return
    console = Console(markup=False, highlight=False, width=max(terminal.width, _WIDE_COLUMNS))
    console.print(f"{report.backend} on {report.device}, {report.gpu}, L2 {human_bytes(report.l2_bytes)}")
    for title, costs in (
        ("host, eager", report.host),
        ("device, in a graph", report.refreshes),
        ("sanitizer", report.sanitizer),
    ):
        _print_costs(console, title, costs)
    table = Table(title="decodes in a graph, KV from memory", title_justify="left", box=MARKDOWN)
    table.add_column("shape")
    for heading in ("workgroups", "KV bytes", "KV sets", "median us", "min us", "max us", "TB/s", "of roof"):
        table.add_column(heading, justify="right")
    for rate in report.decodes:
        table.add_row(
            *(rate.shape, f"{rate.workgroup_budget:,}", f"{rate.kv_bytes:,}", str(rate.num_sets)),
            *(f"{us:.2f}" for us in (rate.median_us, min(rate.samples_us), max(rate.samples_us))),
            f"{rate.bytes_per_second / 1e12:.2f}",
            f"{rate.bytes_per_second / report.roof_bytes_per_second:.2f}",
        )
    console.print(table)
    roofs = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in report.roofs.items())
    console.print(f"Roof: the best of what was measured here, in TB/s: {roofs}. A better reader may be above it.")
    if report.left_out:
        console.print(f"Left out: {report.left_out}.")


def _print_costs(console: Console, title: str, costs: Sequence[Cost]) -> None:
    table = Table(title=title, title_justify="left", box=MARKDOWN)
    table.add_column("call")
    for heading in ("median us", "min us", "max us"):
        table.add_column(heading, justify="right")
    table.add_column("beside")
    for heading in ("its us", "ratio"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            cost.call,
            *(f"{us:.2f}" for us in (cost.median_us, min(cost.samples_us), max(cost.samples_us))),
            *(cost.peer, f"{cost.peer_us:.2f}", f"{cost.ratio:.2f}"),
        )
    console.print(table)
    for included in dict.fromkeys(cost.included for cost in costs):
        calls = "; ".join(cost.call for cost in costs if cost.included == included)
        console.print(f"{calls}: {included}.")


@bench.command()
@click.option("--backend", default="auto", show_default=True, help="auto, torch, triton or aiter.")
@click.option("--device", default="cpu", show_default=True, help="As torch writes it, such as cuda:0.")
@click.option("--splits/--no-splits", "with_splits", default=True, help="Whether to measure the numbers of splits too.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON, with every refused case and its reason.")
@click.pass_context
def precision(ctx: click.Context, backend: str, device: str, with_splits: bool, as_json: bool) -> None:
    """How far each kind of decode is from the exact answer, by its worst output row.

    Exit status: 0 all rows within 1e-2, 1 otherwise, 2 bad input.
    """
    from .precision import measure_precision, rounded_up

    terminal = Console(stderr=True)
    # A figure that is cut off for want of columns says nothing.
    console = Console(markup=False, highlight=False, width=max(terminal.width, _WIDE_COLUMNS))
    with progress_bar(terminal) as bar, _only_ours(as_json):
        task = bar.add_task("starting", total=None)
        report = measure_precision(
            backend=backend,
            device=device,
            with_splits=with_splits,
            progress=lambda done, total, text: bar.update(task, completed=done, total=total, description=text[:60]),
        )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
        ctx.exit(0 if report.ok else 1)
    table = Table(box=MARKDOWN)
    for heading in ("query", "cache", "scales"):
        table.add_column(heading)
    for heading in ("cases", "rows", "worst error", "of it rounding"):
        table.add_column(heading, justify="right")
    for figure in report.figures:
        error, rounding = rounded_up(figure.worst_error), rounded_up(figure.rounding)
        counts = (str(figure.num_cases), str(figure.num_rows))
        table.add_row(figure.q_dtype, figure.kv_dtype, figure.scales, *counts, error, f"<= {rounding}")
    console.print(table)
    if report.splits:
        table = Table(box=MARKDOWN)
        for heading in ("query", "cache", "scales", "logits"):
            table.add_column(heading)
        for heading in ("cap", "most splits", "worst error", "1 x / 2 x CU, row", "number"):
            table.add_column(heading, justify="right")
        for split in report.splits:
            table.add_row(
                *(split.q_dtype, split.kv_dtype, split.scales, "peaked" if split.is_peaked else "flat"),
                *(str(split.max_partitions), str(split.most_splits), rounded_up(split.worst_error)),
                *(rounded_up(split.relative_difference), rounded_up(split.largest_difference)),
            )
        console.print(table)
    console.print(f"{report.backend} on {report.device}; {len(report.refused)} cases refused.")
    for reason, cases in report.refused_by_reason().items():
        console.print(f"refused {len(cases)}: {reason}\n  such as {cases[0]}")
    if not report.ok:
        console.print("NOT OK: a row is off by more than 1e-2, or nothing could be measured.")
        ctx.exit(1)


for command in (sim_commands.simulate, sim_commands.fit_ladder, sim_commands.report):
    planlife.add_command(command)
bench.add_command(sim_commands.bench_simulate)
