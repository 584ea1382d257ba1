"""The commands of `planlife`. Only this module and `cli` print; what they print is made elsewhere."""

from __future__ import annotations

import re
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from . import sim_commands
from .errors import ConfigError, PlanlifeError
from .options import byte_count, progress_bar


def _in_options(message: str) -> str:
    """A refusal by the library, in the names that the command line has for its arguments."""
    for name, option in (
        ("budget_bytes", "--budget"),
        ("memory_bytes", "--memory"),
        ("num_layers", "--layers"),
        ("num_classes", "--classes"),
        *((name, "--" + name.replace("_", "-")) for name in sim_commands.RENAMED_OPTIONS),
    ):
        message = re.sub(rf"\b{name}\b", option, message)  # not within another name, as in min_budget_bytes
    return message


class _Commands(click.Group):
    """Turns what planlife raises on purpose into one line and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PlanlifeError as error:
            click.echo("planlife: " + _in_options(" ".join(str(error).split())), err=True)
            ctx.exit(2 if isinstance(error, ConfigError) else 1)
        except BrokenPipeError:
            raise  # click ends quietly: whoever read has seen enough
        except OSError as error:
            click.echo(f"planlife: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands)
@click.version_option(package_name="planlife")
def planlife() -> None:
    """Owns the life of GPU work plans for paged decode."""


@planlife.command()
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
    "--memory",
    "memory_bytes",
    type=byte_count,
    metavar="BYTES",
    help="What plans, scratch and the KV pool share; 8MiB unless given.",
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

    config = DemoConfig(**{name: value for name, value in options.items() if value is not None})
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
    table.add_column("call")
    for heading in ("median us", "min us", "max us", "empty call us", "ratio"):
        table.add_column(heading, justify="right")
    figures = measure_host(num_batches=num_batches, calls_per_batch=calls_per_batch)
    for figure in figures:
        table.add_row(
            figure.call,
            f"{figure.median_us:.3f}",
            f"{figure.min_us:.3f}",
            f"{figure.max_us:.3f}",
            f"{figure.yardstick_us:.3f}",
            f"{figure.ratio:.1f}",
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    for figure in figures:
        console.print(f"{figure.call}: {figure.included}")
    console.print(
        f"Per call, over {num_batches} batches of {calls_per_batch} calls, without gc. Empty call: "
        "a method that does nothing with as many arguments, timed in turn with the call; its median. "
        "Ratio: of the two medians."
    )


for command in (sim_commands.simulate, sim_commands.fit_ladder, sim_commands.report):
    planlife.add_command(command)
bench.add_command(sim_commands.bench_simulate)
