"""The demo and the device bench on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from planlife.bench_device import measure_device
from planlife.demo import DemoConfig, engine, run_demo
from planlife.demo.check import DenseCheck

#: Drafts and windows that no other test compiles for.
CONFIGS = (
    DemoConfig(device="cuda", mtp=6, window=90, max_steps=60),
    DemoConfig(device="cuda", mtp=7, window=91, kv="fp8", layout="packed", max_steps=60, style="in-graph"),
    DemoConfig(device="cuda", kv="fp8", scales="per_token", max_steps=30, backend="torch"),
    DemoConfig(device="cuda", layout="packed", mtp=1, max_steps=40, backend="aiter", double="gfx942"),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.style}-{config.kv}-{config.backend}")
def test_every_output_of_real_graphs_is_right_and_no_step_waits_for_the_device(
    config: DemoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, settle = engine.Engine.serve, DenseCheck.settle

    def serve_without_waiting(self: engine.Engine, *args: Any) -> str:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return serve(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def settle_by_waiting(self: DenseCheck) -> None:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            settle(self)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(engine.Engine, "serve", serve_without_waiting)
    monkeypatch.setattr(DenseCheck, "settle", settle_by_waiting)

    result = run_demo(config)
    shown = dict(result.rows())

    assert result.ok, result.first_mismatch
    assert result.num_rows_compared > 500
    assert result.counts.replayed > 0 and result.counts.eager > 0 and result.counts.recaptured == 1
    assert result.counts.fallback == 0
    assert shown["device"] == f"cuda:{torch.cuda.current_device()}"
    assert shown["graphs are"] == f"{torch.cuda.CUDAGraph.__module__}.CUDAGraph"
    if config.backend == "auto":
        assert shown["backend"] == "triton"
        assert result.num_triton_compiles_after_seal == 0
        assert result.num_triton_compiles is not None and result.num_triton_compiles > 0, "the hook hears of compiles"


def test_a_wrong_row_of_a_replay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = engine.PlanManager
    decode = manager.pa_decode

    def corrupt(self: Any, plan: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        decode(self, plan, output, *args, **kwargs)
        if plan.site == "window":
            output[0, -1, -1].add_(0.5)
        return output

    monkeypatch.setattr(manager, "pa_decode", corrupt)
    result = run_demo(dataclasses.replace(CONFIGS[0], max_steps=8))
    assert result.num_mismatches > 0 and not result.ok
    assert "window/ub0, output row 0 of" in result.first_mismatch


def test_the_bench_measures_every_figure_beside_a_peer() -> None:
    report = measure_device(num_samples=3)
    assert report.backend == "triton" and not report.left_out
    for cost in (*report.host, *report.refreshes, *report.sanitizer):
        assert cost.median_us > 0 and cost.peer_us > 0, cost
    for rate in report.decodes:
        assert rate.num_sets * rate.kv_bytes >= 4 * report.l2_bytes
        assert rate.bytes_per_second > 0
