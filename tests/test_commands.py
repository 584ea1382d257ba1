"""The command line: options reach the library, and its refusals are one line and an exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import click
import pytest
from click.testing import CliRunner

import planlife.demo
from planlife import PlanManager, doctor
from planlife.commands import byte_count
from planlife.commands import planlife as command
from planlife.errors import BudgetError, ConfigError
from planlife.sites import DEFAULT_SITES, read_sites

from .child_process import REPOSITORY, child_environment, run_python


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
    result, (config,) = run_with("demo", "--backend", "aiter", "--double", "gfx950", "--aiter-generation", "newer")
    assert config == planlife.demo.DemoConfig(
        backend="aiter", double="gfx950", aiter_generation="newer", layout="packed"
    )
    result, (config,) = run_with(
        *("demo", "--style", "in-graph", "--trace", "requests.csv", "--steps", "7"),
        *("--seed", "3", "--layers", "4", "--budget", "3MiB"),
        *("--kv", "fp8", "--scales", "per_token", "--layout", "packed", "--mtp", "5", "--window", "1024"),
        *("--backend", "triton", "--device", "cuda:1"),
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
        backend="triton",
        device="cuda:1",
    )


@pytest.mark.parametrize(
    ("arguments", "is_told"),
    [
        (("--backend", "triton"), True),
        (("--backend", "triton", "--device", "cuda"), False),
        (("--backend", "torch"), False),
        ((), False),
    ],
)
def test_triton_on_a_cpu_is_told_to_be_slow_with_the_ways_out(run_with, arguments, is_told):
    result, _ = run_with("demo", *arguments)
    assert ("interpreter" in result.stderr) is is_told
    assert ("--device cuda" in result.stderr and "--backend torch" in result.stderr) is is_told


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [((), "nhd"), (("--backend", "aiter"), "packed"), (("--backend", "aiter", "--layout", "hnd"), "hnd")],
)
def test_caches_are_as_the_backend_reads_them_unless_told_otherwise(run_with, arguments, layout):
    _, (config,) = run_with("demo", *arguments)
    assert config.layout == layout


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        (("--double", "gfx942", "--kv", "fp8"), "pass --kv fp8_fnuz."),
        (("--double", "gfx1250"), "pass --kv fp8, upgrade aiter"),
    ],
)
def test_a_cache_that_aiter_does_not_read_is_refused_with_the_option_for_one_that_it_does(arguments, way_out):
    result = CliRunner().invoke(command, ["demo", "--backend", "aiter", *arguments])
    assert result.exit_code == 2 and way_out in result.stderr


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
        *(("--backend", "gluon"), ("--double", "gfx90a"), ("--aiter-generation", "G1d")),
    ],
)
def test_bad_options_exit_with_2_before_anything_runs(run_with, arguments):
    result, configs = run_with("demo", *arguments)
    assert result.exit_code == 2
    assert configs == []


def test_a_generation_of_aiter_without_a_double_is_refused_and_not_left_out(run_with):
    result = CliRunner().invoke(command, ["demo", "--backend", "aiter", "--aiter-generation", "newer"])
    assert result.exit_code == 2
    assert result.stderr.startswith("planlife: --aiter-generation='newer' does not go without a double: ")
    assert "Pass --double='gfx942', or leave --aiter-generation out." in result.stderr


def test_a_missing_trace_exits_with_2_and_names_the_file(tmp_path):
    result = CliRunner().invoke(command, ["demo", "--trace", str(tmp_path / "gone.csv")])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "gone.csv" in result.stderr


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_the_command_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom planlife.cli import main; main()"
    run = run_python("-c", code)
    assert run.returncode == 2
    assert run.stderr == f"planlife: the command line needs {missing}: pip install 'planlife[cli]'\n"


@pytest.mark.parametrize("arguments", [("estimate",), ("demo",), ("bench", "precision"), ("bench", "host")])
def test_without_torch_a_command_that_needs_it_says_so_in_one_line(arguments):
    code = f"import sys; sys.modules['torch'] = None; sys.argv = {['planlife', *arguments]!r}\n"
    code += "from planlife.cli import main; main()"
    run = run_python("-c", code)
    assert run.returncode == 1
    assert run.stderr == "planlife: this command needs torch: install one that is built for this machine\n"


def test_the_version_is_known_where_planlife_is_only_on_the_path(monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    result = CliRunner().invoke(command, ["--version"])
    assert result.exit_code == 0 and planlife.__version__ in result.output


@pytest.mark.parametrize("module", ["planlife", "planlife.cli"])
def test_the_entry_point_runs_where_the_extra_is_installed(module):
    run = run_python("-m", module, "--help")
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


SITE = {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 128, "page_size": 16, "max_context_tokens": 4096}


@pytest.fixture
def sites_file(tmp_path):
    path = tmp_path / "sites.json"
    path.write_text(json.dumps({"dense": {**SITE, "ladder": [1, 8]}, "draft": {**SITE, "lane": "b", "ladder": [2]}}))
    return str(path)


def test_doctor_prints_what_it_found_and_exits_with_0(sites_file):
    result = CliRunner().invoke(command, ["doctor", "--device", "cpu", "--sites", sites_file])
    assert result.exit_code == 0, result.output
    for part in ("planlife", "torch", "site dense", "site draft", "backend torch (chosen)", "is not installed"):
        assert part in result.output
    assert "device: cpu, backend: torch" in result.output


def test_doctor_exits_with_1_where_what_was_asked_for_cannot_work(sites_file):
    arguments = ["doctor", "--device", "cpu", "--sites", sites_file, "--backend"]
    result = CliRunner().invoke(command, [*arguments, "aiter"])
    assert result.exit_code == 1
    assert result.output.count("cannot work: site d") == 2
    assert CliRunner().invoke(command, [*arguments, "torch"]).exit_code == 0


def test_doctor_and_estimate_print_one_json_object_where_that_is_wanted(sites_file):
    result = CliRunner().invoke(command, ["doctor", "--device", "cpu", "--sites", sites_file, "--json"])
    found = json.loads(result.output)
    assert [site["site"] for site in found["sites"]] == ["dense", "draft"]
    result = CliRunner().invoke(command, ["estimate", "--sites", sites_file, "--json"])
    estimated = json.loads(result.output)
    assert estimated["worst_case_bytes"] == found["worst_case_bytes"]
    assert estimated["min_budget_bytes"] == found["min_budget_bytes"]


def test_what_a_library_prints_while_it_is_imported_is_no_part_of_the_json(tmp_path):
    """ROCm's aiter tells of its own imports."""
    for name in ("aiter", "aiter/ops", "aiter/ops/flydsl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("print('[aiter] import')")
    (tmp_path / "aiter/ops/flydsl/pa_decode.py").write_text("")
    main = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from planlife.cli import main; main()"
    for arguments in (["doctor", "--device", "cpu"], ["estimate", "--backend", "aiter"]):
        run = run_python("-c", main, *arguments, "--json")
        assert "[aiter] import" in run.stderr
        assert "[aiter]" not in run.stdout and (not run.stdout or json.loads(run.stdout))


def test_doctor_prints_gpus_nodes_and_lines_whole_whatever_the_width(monkeypatch):
    found = doctor.diagnose(DEFAULT_SITES, device="cpu")
    gpu = doctor.Gpu(0, "5", "AMD Instinct MI300X", "gfx942", 304, 192 << 30, None, "0000:05:00.0", None)
    wrong = "word " * 40 + "[end]"
    found = replace(found, gpus=(gpu,), numa_nodes=(0, 1), cpu_nodes=(1,), wrong=(wrong,))
    monkeypatch.setattr(doctor, "diagnose", lambda *arguments, **keywords: found)
    output = CliRunner().invoke(command, ["doctor"], terminal_width=80).output
    assert f"wrong: {wrong}\n" in output
    assert (
        "GPU 0 (physical 5): AMD Instinct MI300X, gfx942, 304 SMs or CUs, ? of 192.0 GiB free, PCI 0000:05:00.0, "
        "NUMA node ?\n" in output
    )
    assert "NUMA nodes: 2; this process may run on 1" in output


def test_estimate_is_the_managers_worst_case_with_its_parts(sites_file):
    sites = read_sites(sites_file)
    arguments = ["estimate", "--sites", sites_file, "--num-cu", "132", "--ubatches", "2"]
    found = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).output)
    worst_case = PlanManager.estimate_bytes(sites.specs, ladder=sites.ladders, ubatches=2, num_compute_units=132)
    assert found["worst_case_bytes"] == worst_case
    parts = [one["plan_bytes"] for one in found["classes"]] + [one["arena_bytes"] for one in found["lanes"]]
    assert 2 * sum(parts) == worst_case
    assert [(one["site"], one["class_rows"]) for one in found["classes"]] == [("dense", 1), ("dense", 8), ("draft", 2)]
    assert [(one["lane"], one["sites"]) for one in found["lanes"]] == [("main", ["dense"]), ("b", ["draft"])]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0
    assert f"{worst_case:,} bytes" in result.output and "plan dense/8" in result.output


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", r"\u041f\u2713"), ("utf-8", "П✓")])
@pytest.mark.parametrize("name", ["doctor", "estimate"])
def test_letters_that_the_terminal_does_not_have_are_escaped(name, encoding, shown, tmp_path):
    path = tmp_path / "sites.json"
    path.write_text(json.dumps({"П✓ \ud800": {**SITE, "ladder": [1]}}))
    arguments = [sys.executable, "-m", "planlife", name, "--sites", str(path)]
    variables = child_environment(PYTHONIOENCODING=encoding, CUDA_VISIBLE_DEVICES="\udcff")  # a byte that is no UTF-8
    run = subprocess.run(arguments, capture_output=True, cwd=REPOSITORY, env=variables)
    assert run.returncode == 0, run.stderr
    assert rf"{shown} \ud800" in run.stdout.decode()
    assert name == "estimate" or "CUDA_VISIBLE_DEVICES=" in run.stdout.decode()


@pytest.mark.parametrize("name", ["doctor", "estimate"])
def test_a_bad_sites_file_exits_with_2_and_one_line_that_names_it(name, tmp_path):
    path = tmp_path / "sites.json"
    for content, part in (
        ('{"a": {"head_dims": 8}}', "did you mean 'head_dim'?"),
        ("{", "line 1"),
        (json.dumps({"a": {**SITE, "head_dim": 10**400, "ladder": [1]}}), "head_dim must be in [1, 2147483647]"),
        (None, "cannot be"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content)
        result = CliRunner().invoke(command, [name, "--sites", str(path)])
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1 and str(path) in result.stderr and part in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        *(("doctor", "--backend", "x"), ("doctor", "--fallback", "aiter"), ("doctor", "--ubatches", "0")),
        *(("estimate", "--num-cu", "0"), ("estimate", "--backend", "auto")),
        *((name, option, str(2**31)) for name, option in (("doctor", "--ubatches"), ("estimate", "--num-cu"))),
    ],
)
def test_bad_options_of_doctor_and_estimate_exit_with_2(arguments):
    assert CliRunner().invoke(command, arguments).exit_code == 2


def test_estimate_for_a_backend_that_is_not_here_exits_with_1():
    result = CliRunner().invoke(command, ["estimate", "--backend", "aiter"])
    assert result.exit_code == 1 and "is not installed" in result.stderr
