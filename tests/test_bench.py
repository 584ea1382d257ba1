"""The host bench times what it says, and nothing else."""

from __future__ import annotations

import statistics

import pytest

from planlife import bench
from planlife.errors import ConfigError


def test_every_figure_comes_with_a_yardstick_of_the_same_run():
    figures = bench.measure_host(num_batches=5, calls_per_batch=20)
    assert [figure.call for figure in figures] == [
        "plan_for, skipped",
        "pa_decode, bookkeeping",
        "pa_decode, new tensors",
        "plan_for, off",
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
    bench.measure_host(num_batches=3, calls_per_batch=7)
    assert calls == {"decode": 3 * 7 * (1 + 2), "refresh": 1}  # one layer, then two in turn


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
