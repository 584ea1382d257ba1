"""The double in captured graphs: what a replay follows, and what a capture must not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife.testing import EmulatedGraph, launch, record
from planlife.testing.aiter_double import AiterDouble, DoubleViolation, aiter_double

from .double_call import assert_right, copy_of, lens_of, pa_decode, plan_of, valid_call


@pytest.mark.parametrize("generation", ["G1a", "G2", "G3"])
def test_a_recorded_step_follows_its_lengths(generation):
    with aiter_double(generation=generation, num_cu=8) as double:
        call = valid_call(double, (300, 17))
        pa_decode(**call)
        compiles = double.compiles
        with record(EmulatedGraph()) as graph:
            plan_of(call["context_lengths"], plan=call["work_plan"], **_omitted_cap(double))
            pa_decode(**call)
        for lens in ((301, 64), (0, 0), (1, 304)):
            call["context_lengths"].copy_(lens_of(*lens))
            call["output"].fill_(float("nan"))
            graph.replay()
            assert_right(call)
        assert double.compiles == compiles


def _omitted_cap(double: AiterDouble) -> dict[str, Any]:
    """The first generations take a cap left out as 256, whatever the plan's is."""
    return {} if double.generation not in ("G0", "G1a") else {"max_partitions": 256}


def test_a_replay_over_a_stale_plan_is_a_violation(double):
    call = valid_call(double, (300, 17))
    pa_decode(**call)
    with record(EmulatedGraph()) as graph:
        pa_decode(**call)
    graph.replay()
    call["context_lengths"].copy_(lens_of(300, 18))
    with pytest.raises(DoubleViolation, match="not refreshed"):
        graph.replay()


def test_a_capture_may_use_a_compile_key_only_again(double):
    call = valid_call(double, (300, 17))
    wrong = call | {"softmax_scale": 0.5}
    with pytest.raises(DoubleViolation, match=r"first use.*'tile'"):
        with record(EmulatedGraph()):
            pa_decode(**call)
    pa_decode(**call)
    with record(EmulatedGraph()):
        pa_decode(**call)
    with pytest.raises(DoubleViolation, match=r"first use.*'tile'"):
        with record(EmulatedGraph()):
            pa_decode(**wrong)
    with pytest.raises(DoubleViolation, match=r"first use.*'reduce'"):
        sinks = torch.zeros(2)
        with record(EmulatedGraph()):
            pa_decode(**call, sinks=sinks)
    other = plan_of(lens_of(1, 2, 3), max_partitions=3)
    lens = lens_of(1, 2)
    small = copy_of(other, work_info=other.work_info[:6], reduce_info=other.reduce_info[:2])
    with pytest.raises(DoubleViolation, match=r"first use.*'plan'"):
        with record(EmulatedGraph()):
            plan_of(lens, plan=small)


def test_nothing_is_allocated_in_a_capture(double):
    call = valid_call(double)
    pa_decode(**call)
    with pytest.raises(DoubleViolation, match="plan was made while recording"):
        with record(EmulatedGraph()):
            plan_of(call["context_lengths"])
    for change in (
        *({name: None} for name in ("exp_sums", "max_logits", "temporary_output")),
        {"key_scale": None, "value_scale": None},
        {"key_scale": 1.0},
    ):
        pa_decode(**call | change)
        with pytest.raises(DoubleViolation, match=f"allocation while recording: {next(iter(change))}"):
            with record(EmulatedGraph()):
                pa_decode(**call | change)


def test_the_launches_go_through_the_seam_of_emulated_graphs(double):
    call = valid_call(double)
    pa_decode(**call)
    with record(EmulatedGraph()) as graph:
        launch(lambda: None)
        plan_of(call["context_lengths"], plan=call["work_plan"])
        pa_decode(**call)
    assert graph.num_ops == 3
