"""The simulated engine: who runs when, within which limits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from planlife.errors import ConfigError
from planlife.sim.engine import Engine, EngineRun, StepTimes, run_engine
from planlife.step_log import StepBlock
from planlife.trace import Request, stream_trace

DATA = Path(__file__).resolve().parents[1] / "data"
EVEN = StepTimes(step_us=1000, row_us=0, context_token_us=0, prefill_token_us=0)


def rows_of(blocks: Iterator[StepBlock]) -> list[int]:
    return [rows for block in blocks for rows in block.rows]


def test_one_request_prefills_in_one_step_and_decodes_the_rest():
    run = EngineRun()
    blocks = list(run_engine([Request(0.0, 10, 5)], Engine(times=EVEN), run))
    assert blocks == [StepBlock([0, 1000, 1000, 1000], [1, 1, 1, 1])]  # the prompt's step gives the first token
    assert (run.num_requests, run.num_steps, run.num_prefill_only_steps) == (1, 4, 1)
    assert run.busy_us == run.span_us == 5000


def test_a_long_prompt_is_chunked_and_decoding_goes_on_meanwhile():
    requests = [Request(0.0, 10, 6), Request(0.0015, 250, 3)]
    run = EngineRun()
    # Steps: prompt 1; then 1 row while the second prompt takes three chunks; then both.
    assert rows_of(run_engine(requests, Engine(prefill_tokens=100, times=EVEN), run)) == [1, 1, 1, 1, 2, 1]
    assert run.num_prefill_only_steps == 1


def test_no_more_rows_run_than_the_engine_has():
    requests = [Request(0.0, 1, 9)] * 10
    run = EngineRun()
    rows = rows_of(run_engine(requests, Engine(max_rows=4, times=EVEN), run))
    assert max(rows) == run.peak_rows == 4
    assert sum(rows) == 10 * 8  # every token of every request but the prompts'


def test_the_kv_pool_bounds_what_runs_together():
    requests = [Request(0.0, 50, 50)] * 6 + [Request(0.0, 500, 1)]
    run = EngineRun()
    rows = rows_of(run_engine(requests, Engine(kv_tokens=250, times=EVEN), run))
    assert max(rows) == 2
    assert run.peak_kv_tokens == 200
    assert run.num_too_long == 1  # 501 tokens never fit
    assert sum(rows) == 6 * 49


def test_a_request_beyond_the_longest_context_is_left_out_and_counted():
    """A trace that asks for a billion tokens ends all the same."""
    run = EngineRun()
    requests = [Request(0.0, 3, 10**9), Request(0.0, 10**9, 3), Request(0.0, 60, 41), Request(0.0, 60, 40)]
    rows = rows_of(run_engine(requests, Engine(max_context_tokens=100, times=EVEN), run))
    assert (run.num_requests, run.num_too_long) == (4, 3)
    assert rows == [1] * 39


def test_drafts_that_hold_shorten_the_decode():
    requests = [Request(0.0, 1, 1001)]
    assert len(rows_of(run_engine(requests, Engine(draft_tokens=3, acceptance=1.0, times=EVEN)))) == 250
    assert len(rows_of(run_engine(requests, Engine(draft_tokens=3, acceptance=0.0, times=EVEN)))) == 1000
    some = len(rows_of(run_engine(requests, Engine(draft_tokens=3, acceptance=0.7, times=EVEN))))
    assert 1000 / 2.8 < some < 1000 / 2.3  # 1 + .7 + .49 + .343 = 2.533 tokens a step
    assert some == len(rows_of(run_engine(requests, Engine(draft_tokens=3, acceptance=0.7, times=EVEN))))
    assert some != len(rows_of(run_engine(requests, Engine(draft_tokens=3, acceptance=0.7, times=EVEN, seed=1))))


def test_an_idle_engine_waits_for_the_next_request_and_a_speedup_shortens_that():
    requests = [Request(0.0, 1, 2), Request(10.0, 1, 2)]
    assert [block.dt_us for block in run_engine(requests, Engine(times=EVEN))] == [[0, 10_000_000]]
    assert [block.dt_us for block in run_engine(requests, Engine(times=EVEN, speedup=10))] == [[0, 1_000_000]]


def test_step_times_are_a_line_in_what_a_step_computes():
    times = StepTimes(step_us=1000, row_us=100, context_token_us=1, prefill_token_us=10)
    run = EngineRun()
    blocks = list(run_engine([Request(0.0, 20, 4)], Engine(times=times), run))
    # 20 prompt tokens; then one row over 20, 21.33, 22.67 tokens of context: 4 tokens in 3 steps.
    assert blocks[0].dt_us == [0, 1120, 1121]
    assert run.busy_us == pytest.approx(1000 + 200 + 3 * 1100 + 20 + 21 + 1 / 3 + 22 + 2 / 3)


def test_a_request_without_output_computes_its_prompt_only():
    run = EngineRun()
    assert list(run_engine([Request(0.0, 5, 0), Request(0.0, 5, 1)], Engine(times=EVEN), run)) == []
    assert (run.num_requests, run.num_prefill_only_steps) == (2, 1)


@pytest.mark.parametrize("name", ["azure_conversation_excerpt.csv", "mooncake_conversation_excerpt.csv"])
def test_every_token_of_a_real_trace_is_decoded_once(name):
    requests = list(stream_trace(DATA / name))
    run = EngineRun()
    rows = rows_of(run_engine(stream_trace(DATA / name), Engine(max_rows=8), run))
    assert sum(rows) == sum(max(request.output_tokens - 1, 0) for request in requests)
    assert run.num_requests == len(requests)
    assert run.num_steps == len(rows)


def test_memory_grows_with_what_runs_at_once_only():
    def peak_bytes(num_requests: int) -> int:
        requests = (Request(i * 0.05, 20, 10) for i in range(num_requests))
        tracemalloc.start()
        for _ in run_engine(requests, Engine()):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(100)
    assert peak_bytes(8000) < 1.5 * peak_bytes(1000)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_rows": 0}, "max_rows"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"prefill_tokens": 0}, "prefill_tokens"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"acceptance": float("nan")}, "acceptance"),
        ({"speedup": 0}, "speedup"),
        ({"speedup": float("inf")}, "speedup"),
        ({"seed": -1}, "seed"),
    ],
)
def test_limits_that_can_never_be_are_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        Engine(**changes)


@pytest.mark.parametrize("changes", [{"step_us": 0}, {"row_us": -1}, {"context_token_us": float("nan")}])
def test_step_times_that_can_never_be_are_refused_by_name(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        StepTimes(**changes)
