"""The figures of `planlife bench precision` are what they say, and docs/precision.md states none below them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from planlife import precision
from planlife.backends.torch_backend import TorchBackend
from planlife.commands import planlife as command
from planlife.precision import PrecisionReport, measure_precision, rounded_up
from planlife.testing import DecodeCase, decode_cases
from planlife.testing.decode_table import SCALE_FORMS

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "precision.md").read_text("utf-8")
#: Another CPU adds FP32 numbers in another order; where the output is FP32, that is all there is.
SLACK = {"float32": 2.0, "bfloat16": 1.05, "float16": 1.05}
#: R44: how close outputs of 1 x and 2 x as many workgroups as compute units have to be.
BETWEEN_BUDGETS = 8e-4


def kind_of(case: DecodeCase) -> tuple[str, str, str]:
    return case.q_dtype, case.kv_dtype, SCALE_FORMS[case.scales]


def one_of_each_kind() -> list[DecodeCase]:
    """The cheapest of each combination of dtypes and scales."""
    by_cost = sorted(decode_cases(), key=lambda c: c.group * c.query_length * c.head_dim * sum(c.lens), reverse=True)
    return list({kind_of(case): case for case in by_cost}.values())


def table_after(heading: str) -> list[list[str]]:
    """The rows of the page's first table behind a heading."""
    lines = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows[1:] if not set(row[0]) <= set("-: ")]


@pytest.fixture(scope="module")
def report() -> PrecisionReport:
    return measure_precision(cases=one_of_each_kind(), with_splits=False)


def test_every_combination_of_dtypes_and_scales_has_a_figure(report: PrecisionReport) -> None:
    found = {(figure.q_dtype, figure.kv_dtype, figure.scales) for figure in report.figures}
    assert found == {kind_of(case) for case in decode_cases()}
    assert len(found) == 3 * (3 + 2 * 2)
    assert report.ok and not report.refused
    for figure in report.figures:
        assert 0 < figure.worst_error <= figure.rounding + 3e-6
        assert figure.num_rows > figure.num_cases > 0


def test_the_page_states_no_figure_below_what_is_measured(report: PrecisionReport) -> None:
    stated = {tuple(row[:3]): float(row[5]) for row in table_after("By dtype")}
    for figure in report.figures:
        limit = stated.pop((figure.q_dtype, figure.kv_dtype, figure.scales)) * SLACK[figure.q_dtype]
        assert figure.worst_error <= limit, f"{figure.worst_case}: {figure.worst_error}"
        assert limit <= 4 * (figure.rounding + 1e-6), "the page states far more than rounding costs"
    assert not stated, "the page has kinds that are not measured"


def test_the_page_states_no_difference_between_budgets_below_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_CAPS", (8, 256))
    monkeypatch.setattr(precision, "_SPLIT_CASES", precision._SPLIT_CASES[::2])
    splits = measure_precision(cases=()).splits
    assert len(splits) == 6
    stated = {tuple(row[:5]): [float(cell) for cell in row[5:]] for row in table_after("By number of splits")}
    for split in splits:
        logits = "peaked" if split.is_peaked else "flat"
        most_splits, worst_error, *differences = stated[
            split.q_dtype, split.kv_dtype, split.scales, logits, str(split.max_partitions)
        ]
        assert split.most_splits == most_splits
        assert split.worst_error <= worst_error * SLACK[split.q_dtype], split
        found = (split.relative_difference, split.largest_difference)
        if split.q_dtype == "float32":
            assert all(value <= 2 * limit for value, limit in zip(found, differences, strict=True)), split
        else:  # a number that rounds the other way is off by a unit in its last place, on one machine or another
            assert max(found) <= 2**-7, split


def test_the_page_has_budgets_agree_as_required_wherever_the_output_is_fp32() -> None:
    rows = table_after("By number of splits")
    assert {row[4] for row in rows} == {"8", "16", "32", "64", "128", "256"}
    exact = [row for row in rows if row[0] == "float32"]
    assert len(exact) == 12
    assert all(float(row[7]) <= BETWEEN_BUDGETS and float(row[8]) <= BETWEEN_BUDGETS for row in exact)


def test_no_error_is_rounded_down() -> None:
    chance = random.Random(0)
    for error in [1.0, 9.99e-3, 1e-7, 3.9e-3, *(10 ** chance.uniform(-9, 0) for _ in range(1000))]:
        shown = rounded_up(error)
        assert error <= float(shown) * (1 + 1e-12) and float(shown) <= error * 1.11
        assert re.fullmatch(r"\d\.\de-?\+?\d\d", shown)
    assert (rounded_up(0.0), rounded_up(math.inf)) == ("0", "inf")


def few(monkeypatch: pytest.MonkeyPatch, cases: Sequence[DecodeCase]) -> None:
    monkeypatch.setattr(precision, "decode_cases", lambda: tuple(cases))


CASES = (DecodeCase(), DecodeCase(kv_dtype="float8_e4m3fn", scales="per token", layout="hnd", lens=(40, 0)))


def test_the_command_prints_each_kind_and_as_json_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, CASES)
    shown = CliRunner().invoke(command, ["bench", "precision", "--no-splits", "--backend", "torch"])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"\| bfloat16 +\| float8_e4m3fn +\| per_token +\| +1 \| +4 \| +\d\.\de-03 ", shown.output)
    assert "torch on cpu; 0 cases refused." in shown.output
    as_json = CliRunner().invoke(command, ["bench", "precision", "--no-splits", "--json"])
    found = json.loads(as_json.stdout)
    assert found["ok"] is True
    assert [figure["num_cases"] for figure in found["figures"]] == [1, 1]
    assert all(rounded_up(figure["worst_error"]) in shown.output for figure in found["figures"])


@pytest.mark.parametrize("wrong", [0.5, math.nan])
def test_a_wrong_row_is_the_figure_and_the_command_fails(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    few(monkeypatch, CASES)
    decode = TorchBackend.decode

    def corrupt(self: Any, tables: Any, scratch: Any, output: torch.Tensor, *rest: Any) -> None:
        decode(self, tables, scratch, output, *rest)
        output[0, 0].add_(wrong)

    monkeypatch.setattr(TorchBackend, "decode", corrupt)
    shown = CliRunner().invoke(command, ["bench", "precision", "--no-splits"])
    assert shown.exit_code == 1
    assert "NOT OK" in shown.output


def test_cases_that_a_backend_refuses_are_told_with_its_reason() -> None:
    class NoHnd(TorchBackend):
        def refuse_spec(self, spec: Any, device: Any) -> Sequence[str]:
            return ["no hnd here; use nhd"] if spec.kv_layout == "hnd" else super().refuse_spec(spec, device)

    report = measure_precision(backend=NoHnd(), cases=CASES, with_splits=False)
    assert len(report.figures) == 1
    ((case, reason),) = report.refused
    assert case == str(CASES[1])
    assert "no hnd here; use nhd" in reason
    assert report.ok
    nothing = measure_precision(backend=NoHnd(), cases=CASES[1:], with_splits=False)
    assert not nothing.ok, "nothing was measured"
    assert not dataclasses.replace(report, figures=()).ok


def test_the_command_prints_each_reason_with_how_many_cases_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    hnd = [DecodeCase(layout="hnd", lens=(length,)) for length in (3, 5)]
    few(monkeypatch, (DecodeCase(), *hnd, DecodeCase(sliding_window=9)))
    reasons = {"hnd": "no hnd here; use nhd", "nhd": "no windows here; leave them out"}

    def refuse_some(self: Any, spec: Any, device: Any) -> Sequence[str]:
        return [reasons[spec.kv_layout]] if spec.kv_layout == "hnd" or spec.sliding_window else []

    monkeypatch.setattr(TorchBackend, "refuse_spec", refuse_some)
    shown = CliRunner().invoke(command, ["bench", "precision", "--no-splits"])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.split())
    assert "3 cases refused." in words
    assert "refused 2: " in words and "no hnd here; use nhd" in words
    assert "refused 1: " in words and "no windows here; leave them out" in words
    assert f"such as {hnd[0]}" in words


def test_auto_is_what_a_manager_on_that_device_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def resolve(backend: Any, specs: Any = None, device: Any = None) -> Any:
        asked.append((backend, device.name))
        return TorchBackend()

    monkeypatch.setattr(precision, "resolve_backend", resolve)
    measure_precision(cases=CASES[:1], with_splits=False)
    assert asked == [("auto", "cpu")]


def test_an_unknown_backend_or_device_is_bad_input() -> None:
    for arguments in (("--backend", "cutlass"), ("--device", "tpu")):
        result = CliRunner().invoke(command, ["bench", "precision", *arguments])
        assert result.exit_code == 2, result.output
        assert arguments[1] in result.stderr
