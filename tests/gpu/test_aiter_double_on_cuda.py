"""The double of aiter on a GPU: real graphs, real streams, and nothing read back by the host until it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from planlife.backends import aiter_backend
from planlife.backends.aiter_limits import WIDE_CACHE_BYTES
from planlife.backends.aiter_sample import as_if_of
from planlife.testing.aiter_double import AiterDouble, DoubleViolation, aiter_double
from planlife.testing.aiter_machine import aiter_machine
from tests.aiter_backend.double_call import assert_right, lens_of, pa_decode, plan_of, valid_call
from tests.aiter_backend.test_wide_caches import keys_after_the_seal, site


@pytest.fixture
def double() -> Iterator[AiterDouble]:
    with aiter_double(arch="gfx942", num_cu=256, device_type="cuda", refresh_delay_cycles=20_000_000) as double:
        yield double


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fnuz, torch.float32])
def test_a_page_as_if_of_many_has_its_memory(dtype):
    page = torch.arange(64, device="cuda").view(1, 4, 16).to(dtype)
    many = as_if_of(2**31 // page.nbytes + 1, page)
    assert many.device == page.device and many.dtype == dtype and many.is_contiguous()
    assert many.nbytes > 2**31 and many.data_ptr() == page.data_ptr()
    assert torch.equal(many[0].view(torch.uint8), page[0].view(torch.uint8))


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_layers_with_caches_of_any_size_compile_nothing_after_the_seal(architecture):
    with aiter_machine(architecture, device_type="cuda") as double:
        assert keys_after_the_seal(site(architecture, query_length=3), double, "cuda") > 0  # control: left out on a GPU
        with mock.patch.object(aiter_backend, "WIDE_CACHE_BYTES", WIDE_CACHE_BYTES):
            assert keys_after_the_seal(site(architecture), double, "cuda") == 0


def test_lengths_on_the_cpu_are_refused(double):
    with pytest.raises(ValueError, match="CUDA int32 tensor"):
        plan_of(torch.ones(2, dtype=torch.int32))


def test_an_eager_call_reads_nothing_back(double):
    call = valid_call(double, device="cuda")
    pa_decode(**call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan_of(call["context_lengths"], plan=call["work_plan"])
        pa_decode(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    double.check()
    assert_right(call)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_recorded_step_follows_its_lengths_on_a_gpu(arch):
    with aiter_double(arch=arch, num_cu=256, device_type="cuda") as double:
        call = valid_call(double, (300, 17), device="cuda")
        pa_decode(**call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan_of(call["context_lengths"], plan=call["work_plan"])
            pa_decode(**call)
        for lens in ((301, 64), (0, 0), (1, 304)):
            call["context_lengths"].copy_(lens_of(*lens, device="cuda"))
            call["output"].fill_(float("nan"))
            graph.replay()
            assert_right(call)
            double.check()
        torch.cuda.synchronize()


def test_a_replay_over_a_stale_plan_is_told_at_the_next_check(double):
    call = valid_call(double, (300, 17), device="cuda")
    pa_decode(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pa_decode(**call)
    graph.replay()
    double.check()
    call["context_lengths"].copy_(lens_of(300, 18, device="cuda"))
    graph.replay()
    with pytest.raises(DoubleViolation, match="not refreshed"):
        double.check()
    double.check()  # told once


def test_leaving_a_double_judges_what_was_not_asked_for():
    with pytest.raises(DoubleViolation, match="not refreshed"):
        with aiter_double(num_cu=256, device_type="cuda") as double:
            call = valid_call(double, (300, 17), device="cuda")
            call["context_lengths"].copy_(lens_of(300, 18, device="cuda"))
            pa_decode(**call)


def test_a_plan_made_in_inference_mode_is_refreshed_and_recorded_outside_it(double):
    call = valid_call(double, (300, 17), device="cuda")
    with torch.inference_mode():
        call["work_plan"] = plan_of(call["context_lengths"])
        pa_decode(**call)
    versions = [call[name]._version for name in ("output", "exp_sums")]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_of(call["context_lengths"], plan=call["work_plan"])
        pa_decode(**call)
    call["context_lengths"].copy_(lens_of(301, 0, device="cuda"))
    graph.replay()
    assert [call[name]._version for name in ("output", "exp_sums")] == versions
    assert_right(call)
    double.check()


def test_a_first_use_and_an_allocation_in_a_capture_are_violations(double):
    call = valid_call(double, device="cuda")
    for change, message in (({}, "first use"), ({"exp_sums": None}, "allocation")):
        with pytest.raises(DoubleViolation, match=message):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                pa_decode(**call | change)
        pa_decode(**call)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_decode_that_no_order_puts_behind_its_refresh_is_a_violation(double, is_ordered):
    call = valid_call(double, (300, 17), device="cuda")
    pa_decode(**call)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        plan_of(call["context_lengths"], plan=call["work_plan"])
    if is_ordered:
        torch.cuda.current_stream().wait_stream(other)
        pa_decode(**call)
        double.check()
        assert_right(call)
    else:
        pa_decode(**call)
        with pytest.raises(DoubleViolation, match="not refreshed"):
            double.check()
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_shared", [True, False])
def test_calls_on_two_streams_that_share_scratch_are_a_violation(is_shared):
    with aiter_double(arch="gfx942", num_cu=256, device_type="cuda", on_violation="record") as double:
        calls = [valid_call(double, (5000,) * 8, group=16, head_dim=128, device="cuda") for _ in range(2)]
        if is_shared:
            calls[1] |= {name: calls[0][name] for name in ("exp_sums", "max_logits", "temporary_output")}
        streams = [torch.cuda.Stream() for _ in calls]
        graphs = [torch.cuda.CUDAGraph() for _ in calls]
        for call, graph in zip(calls, graphs, strict=True):
            pa_decode(**call)
            with torch.cuda.graph(graph):
                for _ in range(20):
                    pa_decode(**call)
        torch.cuda.synchronize()
        double.check()
        assert double.violations == []
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        double.check()
        assert any("overwritten" in text for text in double.violations) == is_shared
