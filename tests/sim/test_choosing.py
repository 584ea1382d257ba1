"""Policies, fitted ladders and the comparison: what is chosen, and that processes change no figure."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest

import planlife.sim.compare as compare_module
from planlife import CapacityLadder, PlanManager, PlanSpec
from planlife.errors import BudgetTooSmallError, ConfigError
from planlife.sim import fitting
from planlife.sim.compare import Requests, Setting, StepLog, compare, measure_plan_us, num_cores, open_source, survey
from planlife.sim.costs import COSTS
from planlife.sim.engine import Engine
from planlife.sim.fitting import Fitter, configuration_lines
from planlife.sim.policy import CAPTURE_SIZES, engine_ladder, fit_to, standard_policies
from planlife.sim.result import quantiles
from planlife.step_log import StepLogWriter
from planlife.testing import FakeBackend

DATA = Path(__file__).resolve().parents[1] / "data"
SPEC = PlanSpec(4, 2, 32, 16, max_context_tokens=512)


def test_default_sizes_are_those_of_the_engines():
    assert CAPTURE_SIZES["vllm"](256)[:6] == [1, 2, 4, 8, 16, 24]
    assert CAPTURE_SIZES["vllm"](256)[-3:] == [480, 496, 512]
    assert CAPTURE_SIZES["vllm"](4) == [1, 2, 4, 8]
    assert CAPTURE_SIZES["sglang"](160)[:7] == [1, 2, 4, 8, 12, 16, 24]
    assert CAPTURE_SIZES["sglang"](160)[-1] == 160
    assert CAPTURE_SIZES["nano-vllm"](50) == [1, 2, 4, 8, 16, 32, 48]


@pytest.mark.parametrize("engine", CAPTURE_SIZES)
@pytest.mark.parametrize("max_rows", [1, 3, 30, 50, 256, 700, 2000])
def test_an_engines_ladder_serves_every_count_and_captures_its_own_sizes_only(engine, max_rows):
    ladder, captured = engine_ladder(engine, max_rows)
    assert ladder.max_rows >= max_rows
    assert set(captured) <= set(CAPTURE_SIZES[engine](max_rows)) & set(ladder.classes)
    assert set(ladder.classes) - set(captured) <= {max_rows}
    assert len([rows for rows in ladder.classes if rows >= max_rows]) == 1


def test_policies_are_named_and_cover_the_most_rows():
    policies = standard_policies({3: 10, 17: 2, 0: 5}, num_classes=2, max_rows=40)
    assert [policy.name for policy in policies] == [
        "plan per count", "plan per step", "powers of two", "vllm sizes", "fitted, 2 classes",
    ]  # fmt: skip
    assert all(policy.ladder.max_rows >= 40 for policy in policies)
    assert policies[-1].ladder.classes == (3, 40)  # 17 would pad ten steps by 14 rows to spare two steps 23
    assert all(policy.captured == () for policy in standard_policies({3: 1}, num_classes=1, capture=False))


def test_policies_for_nothing_or_for_too_few_rows_are_refused():
    for histogram in ({}, {0: 7}):
        with pytest.raises(ConfigError, match="no step"):
            standard_policies(histogram, num_classes=2)
    with pytest.raises(ConfigError, match="max_rows=16 is below the 17"):
        standard_policies({17: 1}, num_classes=2, max_rows=16)
    with pytest.raises(ConfigError, match="'toy'"):
        standard_policies({17: 1}, num_classes=2, engine="toy")


def fitter(histogram: dict[int, int], max_rows: int) -> Fitter:
    return Fitter(histogram, max_rows, {"default": SPEC}, backend=FakeBackend(), num_compute_units=8)


def busy_histogram() -> dict[int, int]:
    chance = random.Random(0)
    return dict(Counter(max(1, min(64, round(chance.gauss(30, 12)))) for _ in range(5000)))


def test_a_choice_tells_what_the_ladder_pads_and_what_a_manager_would_take():
    choice = fitter({3: 10, 8: 1, 0: 4}, 8).judge("by hand", CapacityLadder([4, 8]))
    assert (choice.padded_rows, choice.real_rows) == (10, 38)
    assert choice.padding_share == 10 / 38
    assert choice.worst_case_bytes == PlanManager.estimate_bytes(
        SPEC, ladder=CapacityLadder([4, 8]), backend=FakeBackend(), num_compute_units=8
    )


def test_more_classes_never_pad_more():
    curve = fitter(busy_histogram(), 64).curve()
    assert [len(choice.classes) for choice in curve] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    padding = [choice.padded_rows for choice in curve]
    assert padding == sorted(padding, reverse=True)
    assert len(set(padding)) > 8
    assert padding[-1] == 0


def test_a_curve_over_many_counts_is_fitted_in_processes_and_is_the_same(monkeypatch):
    pools = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, num_processes, *options):
            pools.append(num_processes)
            super().__init__(num_processes, *options)

    monkeypatch.setattr(fitting, "ProcessPoolExecutor", Pool)
    alone = fitter(busy_histogram(), 64).curve()
    assert pools == []  # a few counts are fitted here
    monkeypatch.setattr(fitting, "_MIN_COUNTS_FOR_PROCESSES", 0)
    heard = []
    assert fitter(busy_histogram(), 64).curve(progress=heard.append) == alone
    assert pools == [min(num_cores(), len(alone))]
    assert heard == list(range(1, len(alone) + 1))


def test_a_budget_buys_as_many_classes_as_fit():
    fit = fitter(busy_histogram(), 64)
    for num_classes in (1, 2, 5, 17):
        budget = fit.fit(num_classes).worst_case_bytes
        choice = fit.fit_bytes(budget)
        assert choice.worst_case_bytes <= budget
        assert len(choice.classes) >= num_classes
        assert fit.fit(len(choice.classes) + 1).worst_case_bytes > budget
    assert fit.fit_bytes(1 << 40).padded_rows == 0
    with pytest.raises(BudgetTooSmallError, match="not even one class of 64 rows"):
        fit.fit_bytes(fit.fit(1).worst_case_bytes - 1)


def test_lines_to_paste_hold_the_classes_and_vllms_count_tokens():
    lines = configuration_lines(CapacityLadder([2, 7]), query_length=3)
    assert lines == {
        "planlife": "CapacityLadder([2, 7])",
        "vLLM": "--cudagraph-capture-sizes 6 21",
        "SGLang": "--cuda-graph-bs 2 7",
        "ATOM": '--cudagraph-capture-sizes "[2,7]"',
    }
    assert eval(lines["planlife"]) == CapacityLadder([2, 7])


def test_the_most_rows_are_served_where_no_step_had_them():
    assert fit_to({3: 5, 0: 9}, 4, 8).classes == (3, 8)


def test_a_source_is_told_by_its_content_and_reads_again(tmp_path):
    trace = open_source(DATA / "azure_conversation_excerpt.csv", Engine(max_rows=8))
    assert isinstance(trace, Requests)
    first, again = survey(trace), survey(trace)
    assert first == again
    assert trace.run.num_requests == 40
    with StepLogWriter(tmp_path / "any name") as writer:
        writer.add_blocks(trace.blocks())
    log = open_source(tmp_path / "any name", Engine())
    assert isinstance(log, StepLog)
    assert survey(log) == first


def test_sites_and_ubatches_are_surveyed(tmp_path):
    with StepLogWriter(tmp_path / "log") as writer:
        writer.add(0, 3, "target", 0)
        writer.add(4, 0, "draft", 2)
    found = survey(StepLog(str(tmp_path / "log")))
    assert (list(found.sites), found.ubatches, found.num_steps, found.span_us) == (["target", "draft"], 3, 2, 4)
    assert found.rows == {3: 1, 0: 1}


def test_processes_change_no_figure_and_tell_their_progress():
    source = Requests(str(DATA / "mooncake_conversation_excerpt.csv"), Engine(max_rows=16))
    found = survey(source)
    policies = standard_policies(found.rows, num_classes=4)[2:4]
    setting = Setting({"default": SPEC}, COSTS["mi355x"])
    told: list[tuple[int, int]] = []
    alone = compare(source, policies, setting, num_steps=found.num_steps)
    several = compare(
        source, policies, setting, num_steps=found.num_steps, num_processes=2,
        progress=lambda done, total, text: told.append((done, total)),
    )  # fmt: skip
    assert several == alone
    assert told[-1] == (2 * found.num_steps, 2 * found.num_steps)


def test_an_error_in_a_process_is_told_as_it_is(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"planlife_steps":1,"dt_us":[0],"rows":[9]}\n{')
    policies = standard_policies({9: 1}, num_classes=1)[2:4]
    with pytest.raises(ConfigError, match="line 2"):
        compare(StepLog(str(path)), policies, Setting({"default": SPEC}, COSTS["h200"]), num_processes=2)


def test_quantiles_are_weighted():
    assert quantiles({1.0: 98, 5.0: 1, 9.0: 1}, (0.5, 0.98, 0.99, 1.0)) == [1.0, 1.0, 5.0, 9.0]
    assert quantiles({}, (0.5,)) == [0.0]


def test_costs_can_be_given_and_say_so():
    costs = COSTS["h200"].with_changes(compile_us=1500.0)
    assert costs.compile_us == 1500
    assert costs.source.endswith("Given by the user: compile_us.")
    assert COSTS["h200"].with_changes() is COSTS["h200"]
    for changes, named in (({"compile_ms": 1.0}, "compile_ms"), ({"compile_us": -1.0}, "compile_us")):
        with pytest.raises(ConfigError, match=named):
            COSTS["h200"].with_changes(**changes)


def test_the_bench_tells_the_best_of_five_runs_a_step(monkeypatch):
    ran = []
    real_run = compare_module.run_policy

    def run(blocks, *arguments):
        ran.append(sum(len(block.rows) for block in blocks))
        return real_run(blocks, *arguments)

    ticks = iter(accumulate([0, 5, 0, 3, 0, 4, 0, 6, 0, 7]))  # a start and an end of each
    monkeypatch.setattr(compare_module, "run_policy", run)
    monkeypatch.setattr(compare_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert measure_plan_us(1000) == pytest.approx(3e6 / 1000)
    assert ran == [1000] * 5
