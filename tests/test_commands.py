"""The command line: options reach the library, and its refusals are one line and an exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import planlife.demo
from planlife.commands import byte_count
from planlife.commands import planlife as command
from planlife.errors import BudgetError, ConfigError

REPOSITORY = Path(__file__).resolve().parents[1]


class Result:
    ok = True

    def rows(self) -> list[tuple[str, str]]:
        return [("steps", "12"), ("first mismatch", "row [3] of [bold]step 7")]


@pytest.fixture
def run_with(monkeypatch):
    """Runs the command line with `run_demo` replaced; returns (click result, configs of the calls)."""

    def run(*arguments: str, outcome: object = None):
        configs = []

        def run_demo(config, progress=None):
            configs.append(config)
            progress(1, 12, "captured [decode/4]")
            if isinstance(outcome, Exception):
                raise outcome
            return outcome or Result()

        monkeypatch.setattr(planlife.demo, "run_demo", run_demo)
        return CliRunner().invoke(command, arguments), configs

    return run


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("512KiB", 512 << 10),
        ("3MiB", 3 << 20),
        ("3 mib", 3 << 20),
        (" 1.5GiB ", 3 << 29),
        ("2TiB", 2 << 40),
        ("3MB", 3_000_000),
        ("1.5kB", 1500),
        ("3M", 3_000_000),
        ("0", 0),
    ],
)
def test_bytes_are_written_as_people_write_them(text, num_bytes):
    assert byte_count(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-3MiB", "3x", "3MiBs", "1_000", "nan", "1e6", "٣", "9" * 40])
def test_what_is_no_number_of_bytes_is_refused_by_name(text):
    with pytest.raises(click.BadParameter) as caught:
        byte_count(text)
    assert repr(text) in str(caught.value)


def test_options_reach_the_demo_and_the_rest_keeps_its_defaults(run_with):
    result, (config,) = run_with("demo")
    assert result.exit_code == 0
    assert config == planlife.demo.DemoConfig()
    result, (config,) = run_with(
        *("demo", "--style", "in-graph", "--trace", "requests.csv", "--steps", "7"),
        *("--seed", "3", "--layers", "4", "--budget", "3MiB"),
        *("--kv", "fp8", "--scales", "per_token", "--layout", "packed", "--mtp", "5", "--window", "1024"),
    )
    assert result.exit_code == 0
    assert config == planlife.demo.DemoConfig(
        style="in-graph",
        trace_path="requests.csv",
        max_steps=7,
        seed=3,
        num_layers=4,
        kv="fp8",
        scales="per_token",
        layout="packed",
        mtp=5,
        window=1024,
        budget_bytes=3 << 20,
    )


def test_scales_for_a_cache_that_has_none_are_refused_by_option_value_and_way_out(run_with):
    result, configs = run_with("demo", "--kv", "fp16", "--scales", "per_tensor")
    assert result.exit_code == 2
    assert configs == []
    assert result.stderr == (
        "planlife: --scales='per_tensor' does not go with --kv='fp16': only FP8 caches have scales. "
        "Leave --scales out, or pass --kv='fp8'.\n"
    )


def test_the_table_is_plain_text_where_stdout_is_no_terminal(run_with):
    result, _ = run_with("demo")
    assert "steps" in result.output
    assert "row [3] of [bold]step 7" in result.output  # nothing in it is taken for markup
    assert "\x1b" not in result.output
    assert "captured" not in result.output  # no progress bar


def test_a_run_that_is_not_ok_exits_with_1(run_with):
    failed = Result()
    failed.ok = False
    result, _ = run_with("demo", outcome=failed)
    assert result.exit_code == 1
    assert "NOT OK" in result.output
    assert run_with("demo")[0].exit_code == 0


@pytest.mark.parametrize(("error", "status"), [(ConfigError("no\nsuch thing"), 2), (BudgetError("no\nsuch thing"), 1)])
def test_a_refusal_is_one_line_on_stderr_and_no_traceback(run_with, error, status):
    result, _ = run_with("demo", outcome=error)
    assert result.exit_code == status
    assert result.stderr == "planlife: no such thing\n"
    assert result.stdout == ""


def test_a_refusal_names_options_as_they_are_and_leaves_longer_names_alone(run_with):
    refusal = ConfigError("budget_bytes=1 cannot hold one call. Raise budget_bytes to min_budget_bytes().")
    result, _ = run_with("demo", outcome=refusal)
    assert result.stderr == "planlife: --budget=1 cannot hold one call. Raise --budget to min_budget_bytes().\n"


def test_a_bug_keeps_its_traceback(run_with):
    result, _ = run_with("demo", outcome=ZeroDivisionError("a bug"))
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "arguments",
    [
        *(("--steps", "0"), ("--layers", "-1"), ("--budget", "0"), ("--style", "x"), ("--seed", "y")),
        *(("--kv", "int4"), ("--scales", "none"), ("--layout", "x"), ("--mtp", "0"), ("--mtp", "8"), ("--window", "0")),
    ],
)
def test_bad_options_exit_with_2_before_anything_runs(run_with, arguments):
    result, configs = run_with("demo", *arguments)
    assert result.exit_code == 2
    assert configs == []


def test_a_missing_trace_exits_with_2_and_names_the_file(tmp_path):
    result = CliRunner().invoke(command, ["demo", "--trace", str(tmp_path / "gone.csv")])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "gone.csv" in result.stderr


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_the_command_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom planlife.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert run.returncode == 2
    assert run.stderr == f"planlife: the command line needs {missing}: pip install 'planlife[cli]'\n"


@pytest.mark.parametrize("module", ["planlife", "planlife.cli"])
def test_the_entry_point_runs_where_the_extra_is_installed(module):
    run = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=REPOSITORY)
    assert run.returncode == 0
    assert "demo" in run.stdout


def test_bench_host_prints_each_figure_with_what_it_includes():
    result = CliRunner().invoke(command, ["bench", "host", "--batches", "30", "--calls", "1"])
    assert result.exit_code == 0, result.output
    for call in ("plan_for, skipped", "pa_decode, bookkeeping", "pa_decode, new tensors", "plan_for, off"):
        assert f"{call}:" in result.output
    assert CliRunner().invoke(command, ["bench", "host", "--batches", "29"]).exit_code == 2


def test_a_full_disk_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planlife.bench.measure_host", no_space)
    result = CliRunner().invoke(command, ["bench", "host"])
    assert result.exit_code == 1
    assert result.stderr == "planlife: [Errno 28] No space left on device\n"
