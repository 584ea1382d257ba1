"""The host bench times what it says, and nothing else."""

from __future__ import annotations

import statistics

import pytest
import torch

from planlife import bench
from planlife.errors import ConfigError


def test_every_figure_comes_with_a_yardstick_of_the_same_run():
    figures = bench.measure_host(num_batches=5, calls_per_batch=20)
    calls = [
        "plan_for, skipped",
        "plan_for, refreshing",
        "pa_decode, bookkeeping",
        "pa_decode, new tensors",
        "guard",
        "replay",
        "plan_for, off",
    ]
    assert [(one.call, one.has_default_device) for one in figures] == [
        (call, under) for call in calls for under in (False, True)
    ]
    for figure in figures:
        assert len(figure.batches_us) == 5
        assert 0 < figure.min_us <= figure.median_us <= figure.max_us
        assert figure.median_us == statistics.median(figure.batches_us)
        assert figure.ratio == figure.median_us / figure.yardstick_us
        assert figure.included


def test_the_bench_decodes_as_often_as_it_says_and_refreshes_once(monkeypatch):
    calls = {"decode": 0, "refresh": 0}
    for name in calls:

        def counted(self, *arguments, _name=name):
            calls[_name] += 1

        monkeypatch.setattr(bench._IdleBackend, name, counted)
    bench.measure_host(num_batches=3, calls_per_batch=20)
    batches = 2 * 3  # without and with a default device
    # One layer, then two in turn, and one into the graph; what refreshes, a tenth as often, what skips, and the graph.
    assert calls == {"decode": batches * 20 * (1 + 2) + 1, "refresh": batches * 2 + 1 + 1}


def test_the_bench_calls_under_a_default_device_and_leaves_none_behind(monkeypatch):
    seen = []
    real = bench.PlanManager.plan_for
    monkeypatch.setattr(
        bench.PlanManager, "plan_for", lambda *call: seen.append(torch._C._len_torch_function_stack()) or real(*call)
    )
    bench.measure_host(num_batches=1, calls_per_batch=1)
    assert {0, 1} <= set(seen) and not torch._C._len_torch_function_stack()


def test_the_bench_fails_when_what_it_timed_was_no_skip(monkeypatch):
    monkeypatch.setattr(bench, "_Owner", lambda: None)  # without an owner every plan_for refreshes
    with pytest.raises(RuntimeError, match="refreshes where all calls should have skipped"):
        bench.measure_host(num_batches=3, calls_per_batch=7)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, None])
def test_bad_counts_are_refused(bad):
    with pytest.raises(ConfigError, match="num_batches"):
        bench.measure_host(num_batches=bad)
    with pytest.raises(ConfigError, match="calls_per_batch"):
        bench.measure_host(calls_per_batch=bad)
