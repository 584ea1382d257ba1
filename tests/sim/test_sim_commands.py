"""planlife simulate, fit-ladder and report: figures, pages, and refusals in one line."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from planlife import CapacityLadder, PlanManager, PlanSpec
from planlife.commands import planlife as command
from planlife.step_log import StepLogWriter, stream_step_log
from tests.eventually import EVENTUALLY_S

DATA = Path(__file__).resolve().parents[1] / "data"
AZURE = str(DATA / "azure_conversation_excerpt.csv")
SPEC = PlanSpec(4, 2, 32, 16, max_context_tokens=512)
NASTY = "<script>alert(1)</script>&\"'$x_1$"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def good(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def refused(*arguments: str) -> str:
    """The one line of a refusal as bad input."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    line = result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    return line


def page_of(path: Path) -> str:
    """A page that was checked: it parses, loads nothing, and no script is in it."""

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "iframe", "object", "embed", "form")
            for name, value in attributes:
                assert not name.startswith("on")
                if name in ("src", "href", "xlink:href"):
                    assert value is not None
                    assert value.startswith(("#", "data:")), value

    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert re.findall(r"url\((?!#)", text) == []
    return text


def test_simulate_prints_every_policy_and_figure():
    output = good("simulate", "--trace", AZURE, "--classes", "3", "--layers", "4").output
    for word in (
        "plan per count",
        "plan per step",
        "powers of two",
        "vllm sizes",
        "fitted, 3",
        "replayed",
        "evictions",
    ):
        assert word in output.replace("\n", " ")
    assert "65-72 ms" in " ".join(good("simulate", "--trace", AZURE, "--costs", "mi355x").output.split())


def test_json_is_one_document_and_nothing_else_is_on_stdout(tmp_path):
    page = tmp_path / "page.html"
    result = good("simulate", "--trace", AZURE, "--json", "--html", str(page))
    document = json.loads(result.stdout)
    assert [policy["name"] for policy in document["policies"]][:2] == ["plan per count", "plan per step"]
    assert document["engine_run"]["num_requests"] == 40
    assert document["policies"][0]["service"]["refreshes"] == document["steps"]
    assert f"wrote {page}" in result.stderr
    fit = json.loads(good("fit-ladder", "--trace", AZURE, "--classes", "3", "--json").stdout)
    assert len(fit["fitted"]["classes"]) == 3
    assert fit["fitted"]["padded_rows"] <= fit["others"][0]["padded_rows"]


def test_a_step_log_and_the_trace_it_came_from_give_the_same_figures(tmp_path):
    log = tmp_path / "steps.jsonl.gz"
    options = ("--max-rows", "16", "--no-capture", "--json")
    one = json.loads(good("simulate", "--trace", AZURE, "--steps-out", str(log), *options).stdout)
    two = json.loads(good("simulate", "--trace", str(log), *options).stdout)
    three = json.loads(good("simulate", "--trace", str(log), "--unfolded", *options).stdout)
    for policy in (policy for document in (one, two, three) for policy in document["policies"]):
        policy.pop("memory"), policy.pop("lifetimes")
    assert one["policies"] == two["policies"] == three["policies"]
    assert sum(len(block.rows) for block in stream_step_log(log)) == one["steps"]


def test_options_reach_the_simulated_engine():
    def rows(*options: str) -> dict[str, Any]:
        document = json.loads(good("simulate", "--trace", AZURE, "--json", "--policy", "powers", *options).stdout)
        assert len(document["policies"]) == 1
        return document

    plain, fast = rows(), rows("--speedup", "50")
    assert fast["engine_run"]["peak_rows"] > plain["engine_run"]["peak_rows"]
    assert rows("--speedup", "50", "--max-rows", "3")["engine_run"]["peak_rows"] == 3
    assert rows("--speedup", "50", "--kv-tokens", "4000")["engine_run"]["peak_kv_tokens"] <= 4000
    assert rows("--draft-tokens", "3", "--acceptance", "1")["steps"] < plain["steps"]
    assert rows("--step-time", "step_us=10000")["engine_run"]["busy_us"] > plain["engine_run"]["busy_us"]
    assert rows("--cost", "compile_us=7")["costs"]["compile_us"] == 7


def test_sites_may_come_from_a_file(tmp_path):
    sites, log = tmp_path / "sites.json", tmp_path / "log"
    shape = {
        "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16, "max_context_tokens": 512, "ladder": [8],
    }  # fmt: skip
    sites.write_text(json.dumps({"target": shape}))
    options = ("--json", "--policy", "powers")
    given = good("simulate", "--trace", AZURE, "--sites", str(sites), *options).stdout
    spelled = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--max-context-tokens", "512")
    assert given == good("simulate", "--trace", AZURE, *spelled, *options).stdout
    sites.write_text(json.dumps({"target": shape, "draft": {**shape, "lane": "draft"}, "unused": shape}))
    with StepLogWriter(log) as writer:
        writer.add(0, 3, "target")
        writer.add(0, 3, "draft")
    assert json.loads(good("simulate", "--trace", str(log), "--sites", str(sites), *options).stdout)["sites"] == [
        "target", "draft",
    ]  # fmt: skip
    sites.write_text(json.dumps({"target": shape, "other": shape}))
    assert "'draft'" in refused("simulate", "--trace", str(log), "--sites", str(sites))
    sites.write_text(json.dumps({"target": shape, "draft": {**shape, "plan_of": "target"}}))
    assert "drop plan_of of draft" in refused("simulate", "--trace", str(log), "--sites", str(sites))


def test_the_commands_on_the_page_about_operating_are_commands():
    """Their options exist and take these values; of the traces they name only the first is part of the project."""
    text = (DATA.parents[1] / "docs" / "operating.md").read_text("utf-8")
    commands = re.findall(r"^planlife (.+)$", "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)), re.M)
    assert len(commands) == 5
    assert "--trace planlife/demo/sample_trace.csv " in commands[0]
    assert (DATA.parents[1] / "planlife" / "demo" / "sample_trace.csv").is_file()
    for line in commands:
        name, *arguments = shlex.split(line)
        found = command.get_command(click.Context(command), name)
        assert found is not None, line
        found.make_context(name, arguments)
    for option in re.findall(r"`(--[a-z-]+)", text):
        assert any(
            option in parameter.opts + parameter.secondary_opts
            for name in ("simulate", "fit-ladder", "report")
            for parameter in command.get_command(click.Context(command), name).params
        ), option


def test_step_times_may_come_from_a_file(tmp_path):
    times = tmp_path / "times.json"
    times.write_text('{"step_us": 10000}')
    one = good("simulate", "--trace", AZURE, "--json", "--step-time", str(times)).stdout
    assert one == good("simulate", "--trace", AZURE, "--json", "--step-time", "step_us=10000").stdout


def test_fit_ladder_prints_lines_that_an_engine_takes():
    lines = dict(
        line.split(": ", 1)
        for line in good("fit-ladder", "--trace", AZURE, "--classes", "4").output.splitlines()
        if re.match(r"(planlife|vLLM|SGLang|ATOM): ", line)
    )
    ladder = eval(lines["planlife"])
    assert len(ladder.classes) == 4
    flag, *sizes = shlex.split(lines["vLLM"])
    assert (flag, tuple(map(int, sizes))) == ("--cudagraph-capture-sizes", ladder.classes)
    flag, *sizes = shlex.split(lines["SGLang"])
    assert (flag, tuple(map(int, sizes))) == ("--cuda-graph-bs", ladder.classes)
    flag, sizes_json = shlex.split(lines["ATOM"])
    assert (flag, tuple(json.loads(sizes_json))) == ("--cudagraph-capture-sizes", ladder.classes)


def test_fit_ladder_keeps_to_a_budget():
    fit = json.loads(good("fit-ladder", "--trace", AZURE, "--budget", "3MiB", "--json").stdout)
    assert fit["fitted"]["worst_case_bytes"] <= 3 << 20
    result = run("fit-ladder", "--trace", AZURE, "--budget", "1KiB")
    assert result.exit_code == 2
    assert "--budget" in result.stderr
    assert "not even one class" in result.stderr
    assert "--classes K or --budget BYTES" in refused("fit-ladder", "--trace", AZURE)
    assert "--classes K or --budget BYTES" in refused(
        "fit-ladder", "--trace", AZURE, "--classes", "2", "--budget", "1MiB"
    )


def test_pages_and_pictures_hold_what_was_found(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra sim")
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    good("simulate", "--trace", AZURE, "--html", str(page), "--png", str(picture))
    text = page_of(page)
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words in ("Memory over time", "Plan lifetimes", "Padding", "evictions", "time (", "classes up to (rows)"):
        assert words in text
    assert text.count("<svg") == 6
    identities = re.findall(r'\bid="([^"]+)"', text)
    assert len(identities) == len(set(identities))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(identities)
    good("fit-ladder", "--trace", AZURE, "--classes", "3", "--html", str(page), "--png", str(picture))
    assert "--cuda-graph-bs" in page_of(page)


def test_whatever_comes_from_a_file_is_escaped(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra sim")
    log, page = tmp_path / f"{NASTY.replace('/', '')}.jsonl", tmp_path / "page.html"
    with StepLogWriter(log) as writer:
        for rows in (1, 5, 3, 0, 7):
            writer.add(1000, rows, NASTY, 0)
            writer.add(1000, rows, "other", 1)
    good("simulate", "--trace", str(log), "--html", str(page))
    text = page_of(page)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    figures = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert re.search(r"<text[^>]*>[^<]*\$x_1\$", figures)  # as it is, not set as a formula
    assert "&lt;script&gt;" in figures


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: the file is empty"),
        (b"a,b,c\n1,2,3\n", "line 1: header must be"),
        (b"timestamp_ms,input_tokens,output_tokens\n0,5,-1\n", "line 2: output_tokens must be"),
        (b"timestamp_ms,input_tokens,output_tokens\n0,5,99999999999\n", "line 2: output_tokens must be"),
        (b"timestamp_ms,input_tokens,output_tokens\nNaN,5,1\n", "line 2: timestamp_ms must be"),
        (b"timestamp_ms,input_tokens,output_tokens\n5,5,1\n4,5,1\n", "line 3: arrives"),
        (gzip.compress(b"timestamp_ms,input_tokens,output_tokens\n0,5,1\n", mtime=0)[:-6], "cannot read on"),
        (b'{"planlife_steps":1,"dt_us":[0],"rows":[NaN]}', "line 1: block must be a JSON object"),
        (b'{"planlife_steps":1,"dt_us":[0],"rows":[0]}', "no step with rows"),
        (b"\xef\xbb\xbftimestamp_ms,input_tokens,output_tokens\r\n0,5,x\r\n", "line 2: output_tokens must be"),
    ],
)
@pytest.mark.parametrize("arguments", [("simulate",), ("fit-ladder", "--classes", "2")], ids=["simulate", "fit-ladder"])
def test_a_broken_trace_is_one_line_that_names_it(tmp_path, content, message, arguments):
    path = tmp_path / "the trace"
    path.write_bytes(content)
    line = refused(*arguments, "--trace", str(path))
    assert message in line
    assert "the trace" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step-time", "speed=3"), "speed"),
        (("--step-time", "step_us=nan"), "step_us"),
        (("--step-time", "no such file"), "no such file"),
        (("--cost", "compile_us"), "compile_us"),
        (("--cost", "compile_ms=3"), "compile_ms"),
        (("--acceptance", "2"), "acceptance"),
        (("--policy", "none"), "none"),
        (("--budget", "512"), "--budget=512"),
        (("--max-context-tokens", "0"), "--max-context-tokens"),
        (("--max-context-tokens", "99999999999"), "--max-context-tokens"),
        (("--max-context-tokens", "1"), "40 requests longer than the KV pool or the longest context"),
        (("--kv-tokens", "1"), "40 requests longer than the KV pool or the longest context"),
        (("--speedup", "1e-300"), "speedup"),
        (("--ubatches", "1025"), "--ubatches"),
    ],
)
def test_an_option_that_can_never_work_is_named(arguments, message):
    assert message in refused("simulate", "--trace", AZURE, *arguments)


def test_rows_above_the_most_that_were_given_are_refused(tmp_path):
    with StepLogWriter(tmp_path / "log") as writer:
        writer.add(0, 30)
    assert "--max-rows=8 is below the 30 rows" in refused(
        "simulate", "--trace", str(tmp_path / "log"), "--max-rows", "8"
    )


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra sim")
    result = run("simulate", "--trace", AZURE, "--html", str(tmp_path / "none" / "page.html"))
    assert result.exit_code == 1
    assert "none/page.html" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_matplotlib_tables_are_printed_and_pictures_name_their_extra_before_anything_is_done(
    monkeypatch, tmp_path
):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    good("simulate", "--trace", AZURE)
    steps, page = tmp_path / "steps", str(tmp_path / "page")
    for arguments in (
        ("simulate", "--trace", AZURE, "--steps-out", str(steps)),
        ("fit-ladder", "--trace", AZURE, "--classes", "4"),
        ("report", str(live_report(tmp_path)[0])),
    ):
        for option in ("--html", "--png"):
            result = run(*arguments, option, page)
            assert (result.exit_code, result.stdout) == (1, "")
            assert result.stderr.startswith("planlife: pictures need matplotlib") and "planlife[sim]" in result.stderr
    assert not steps.exists()


def live_report(tmp_path: Path) -> tuple[Path, PlanManager]:
    manager = PlanManager({"a<b": SPEC}, ladder=CapacityLadder([2, 8]), device="cpu")
    with manager.capture_phase():
        manager.warm()
    manager.trim(manager.report().resident_bytes - 1)
    path = tmp_path / "report.json"
    path.write_text(manager.report().to_json())
    return path, manager


def test_a_live_report_is_shown_as_it_was(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra sim")
    path, manager = live_report(tmp_path)
    page = tmp_path / "page.html"
    result = good("report", str(path), "--html", str(page), "--png", str(tmp_path / "page.png"))
    assert str(manager.report()) in result.output
    assert good("report", str(path), "--json").stdout == manager.report().to_json() + "\n"
    text = page_of(page)
    assert "a&lt;b/8/ub0" in text
    assert "evicted" in text
    assert f"{manager.report().worst_case_bytes:,}" not in text or "worst case" in text
    manager.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report: "{", "Expecting"),
        (lambda report: "[]", "must be an object"),
        (lambda report: "[" * 100_000, "report"),
        (lambda report: "", "Expecting"),
        (lambda report: json.dumps({**report, "peak_bytes": "much"}), "peak_bytes must be int, got 'much'"),
        (lambda report: json.dumps({**report, "peak_bytes": -1}), "peak_bytes must be in"),
        (lambda report: json.dumps({**report, "peak_bytes": True}), "peak_bytes must be int"),
        (lambda report: json.dumps({**report, "peak_bytes": float("nan")}), "peak_bytes must be int"),
        (lambda report: json.dumps({**report, "sealed": 1}), "sealed must be bool"),
        (lambda report: json.dumps({**report, "more": 1}), "unknown field 'more'"),
        (lambda report: json.dumps({name: report[name] for name in report if name != "device"}), "no field device"),
        (lambda report: json.dumps({**report, "plans": [{"site": "a"}]}), r"plans\[0\] has no field"),
        (lambda report: json.dumps({**report, "plans": 7}), "report"),
        (lambda report: json.dumps({**report, "counters": {"hits": "x"}}), "counters.hits must be int"),
    ],
)
def test_a_broken_report_is_one_line_that_names_the_field(tmp_path, change, message):
    path, manager = live_report(tmp_path)
    path.write_text(change(json.loads(path.read_text("utf-8"))))
    line = refused("report", str(path))
    assert re.search(message, line)
    assert "report.json" in line
    manager.close()


def test_a_report_that_is_not_there_is_named():
    assert "no such.json" in refused("report", "no such.json")


def test_the_help_of_every_command_fits_and_names_its_exit_statuses():
    for name in ("simulate", "fit-ladder", "report"):
        output = good(name, "--help").output
        assert "Exit status" in output
    assert isinstance(command.get_command(click.Context(command), "simulate"), click.Command)


def test_the_bench_prints_the_cost_of_planning():
    assert re.search(r"[\d.]+ us, the best of 5", good("bench", "simulate", "--steps", "1000").output)


def test_what_is_read_is_never_written_over(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(Path(AZURE).read_bytes())
    (tmp_path / "link").symlink_to(path)
    for option in ("--steps-out", "--html", "--png"):
        for name in ("trace.csv", "link"):
            assert f"{option} " in refused("simulate", "--trace", str(path), option, str(tmp_path / name))
    assert "--html" in refused("fit-ladder", "--trace", str(path), "--classes", "2", "--html", str(path))
    out = str(tmp_path / "out")
    assert "--png" in refused("simulate", "--trace", str(path), "--html", out, "--png", out)
    assert path.read_bytes() == Path(AZURE).read_bytes()
    report, manager = live_report(tmp_path)
    assert "would overwrite what is read" in refused("report", str(report), "--html", str(report))
    manager.close()


def test_a_folder_that_is_not_there_is_named_before_anything_is_simulated(tmp_path):
    for option in ("--html", "--png", "--steps-out"):
        result = run("simulate", "--trace", AZURE, option, str(tmp_path / "none" / "out"))
        assert result.exit_code == 1
        assert "none/out" in result.stderr
        assert result.stdout == ""


def test_a_pipe_is_refused_since_a_trace_is_read_more_than_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe" in refused("simulate", "--trace", str(tmp_path / "pipe"))


def test_a_step_of_more_rows_than_any_engine_runs_is_refused_and_one_of_a_million_is_not(tmp_path):
    for rows in ((1 << 20) + 1, 2**31 - 1):
        (tmp_path / "log").write_text(json.dumps({"planlife_steps": 1, "dt_us": [0], "rows": [rows]}))
        assert f"a step of {rows:,} rows" in refused("simulate", "--trace", str(tmp_path / "log"))
    (tmp_path / "log").write_text(json.dumps({"planlife_steps": 1, "dt_us": [0, 1], "rows": [1 << 20, 3]}))
    document = json.loads(good("simulate", "--trace", str(tmp_path / "log"), "--json").stdout)
    assert document["policies"][0]["classes"] == [3, 1 << 20]  # counts that occur, not all below


def test_names_that_no_terminal_shows_are_escaped_everywhere(tmp_path):
    """Control characters and lone surrogates: JSON carries both."""
    pytest.importorskip("matplotlib", reason="pictures need the extra sim")
    names = ["a\ud800", "\x1b[31m\x00\n", "caf\u00e9"]
    trace, page = tmp_path / os.fsdecode(b"\xff\x1b.log"), tmp_path / "page.html"
    trace.write_text(
        json.dumps({"planlife_steps": 1, "dt_us": [0, 1, 1], "rows": [1, 2, 3], "site": [0, 1, 2], "sites": names})
    )
    outcome = planlife_in_a_process("simulate", "--trace", str(trace), "--html", str(page), "--png", str(page) + ".png")
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert b"\x1b" not in outcome.stdout and b"\\x1b.log" in outcome.stdout
    text = page_of(page)
    assert "\x1b" not in text and "\x00" not in text
    assert "a\\ud800/1/ub0" in text and "\\x1b[31m\\x00\\n/2/ub0" in text and "caf\u00e9/3/ub0" in text
    with PlanManager(dict.fromkeys(names, SPEC), ladder=CapacityLadder([2]), device="cpu") as manager:
        with manager.capture_phase():
            manager.warm()
        (tmp_path / "report.json").write_text(manager.report().to_json())
    outcome = planlife_in_a_process("report", str(tmp_path / "report.json"), "--html", str(page))
    assert (outcome.returncode, outcome.stderr) == (0, b"")
    assert b"\x1b" not in outcome.stdout
    assert re.search(rb"plan caf(\\xe9|\xc3\xa9)/2/ub0", outcome.stdout)  # click writes UTF-8 where ASCII is asked for
    assert "\x1b" not in page_of(page)


def planlife_in_a_process(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """In a terminal that knows ASCII only, 40 columns wide."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40", "PYTHONUTF8": "0"}
    return subprocess.run(
        [sys.executable, "-m", "planlife", *arguments],
        capture_output=True,
        env=environment,
        timeout=EVENTUALLY_S,
        check=False,
    )
