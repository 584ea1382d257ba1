"""The demo over the Triton backend, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from planlife import PlanManager  # noqa: E402
from planlife.backends.triton_backend import IS_INTERPRETED  # noqa: E402
from planlife.demo import DemoConfig, DemoResult, engine, run_demo  # noqa: E402
from planlife.demo.compile_watch import CompileWatch  # noqa: E402
from planlife.demo.config import STYLES  # noqa: E402
from planlife.kernels.triton_decode import compile_decode  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
#: The interpreter takes a while for each: one graph of a kind, and two steps, of which one verifies and drafts.
SMALL = DemoConfig(backend="triton", device=DEVICE, max_steps=2, mtp=1)


@pytest.fixture(autouse=True)
def few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LADDER_ROWS", (2,))
    monkeypatch.setattr(engine, "CAPTURE_ROWS", {"decode": (2,), "ubatch": (), "verify": (2,), "draft": (2,)})


@pytest.fixture
def hook() -> Iterator[Any]:
    """Triton's own hook, as it was when the test began."""
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook
    yield runtime
    runtime.jit_post_compile_hook = before


@pytest.mark.parametrize("style", STYLES)
def test_every_output_equals_dense_attention(style: str) -> None:
    result = run_demo(dataclasses.replace(SMALL, style=style))
    shown = dict(result.rows())

    assert result.ok, result.first_mismatch
    assert result.num_rows_compared > 0
    assert result.counts.replayed == result.counts.steps == 2
    assert result.counts.draft_passes_replayed == result.counts.verify == 1
    assert result.counts.fallback == 0
    assert shown["backend"] == "triton"
    assert shown["Triton's own count after seal"].startswith("0 (")


def _as_triton_compiles(hook: Any) -> None:
    hook.jit_post_compile_hook(
        key="k", repr="kernel", fn=None, compile={}, is_manual_warmup=False, already_compiled=False
    )


def test_a_kernel_that_triton_compiles_while_serving_shows_and_is_not_ok(
    monkeypatch: pytest.MonkeyPatch, hook: Any
) -> None:
    replay = PlanManager.replay

    def compile_and_replay(self: PlanManager, *args: Any) -> None:
        _as_triton_compiles(hook)
        replay(self, *args)

    monkeypatch.setattr(PlanManager, "replay", compile_and_replay)

    result = run_demo(SMALL)

    assert result.report.counters["compiles_after_seal"] == 0, "planlife itself knows of none"
    assert result.num_mismatches == 0
    assert result.num_triton_compiles_after_seal == 3
    assert not result.ok
    assert dict(result.rows())["Triton's own count after seal"].startswith("3 (")


def test_a_kernel_that_triton_compiles_in_the_capture_phase_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, hook: Any
) -> None:
    warm = PlanManager.warm

    def compile_and_warm(self: PlanManager, rows: Any = None) -> None:
        _as_triton_compiles(hook)
        warm(self, rows)

    monkeypatch.setattr(PlanManager, "warm", compile_and_warm)

    result: DemoResult = run_demo(SMALL)

    assert result.num_triton_compiles is not None and result.num_triton_compiles >= 1
    assert result.num_triton_compiles_after_seal == 0
    assert result.ok


def test_the_watch_hands_on_to_the_hook_before_it_and_puts_it_back(hook: Any) -> None:
    heard: list[dict[str, Any]] = []
    hook.jit_post_compile_hook = lambda **details: heard.append(details)
    before = hook.jit_post_compile_hook

    with CompileWatch() as watch:
        _as_triton_compiles(hook)

    assert watch.num_compiles == len(heard) == 1
    assert heard[0]["repr"] == "kernel"
    assert hook.jit_post_compile_hook is before


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_the_watch_sees_what_planlife_compiles() -> None:
    (spec, *_) = engine.site_specs(dataclasses.replace(SMALL, window=77)).values()
    spec = dataclasses.replace(spec, head_dim=48)  # nobody else's
    with CompileWatch() as watch:
        num_new = compile_decode(spec, f"cuda:{torch.cuda.current_device()}")

    assert watch.num_compiles == num_new > 0


def test_triton_on_a_cpu_without_its_interpreter_is_refused_with_the_way_out() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "planlife", "demo", "--backend", "triton", "--steps", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert run.returncode == 2
    assert run.stdout == ""
    refusal = run.stderr.splitlines()[-1]
    assert refusal.startswith("planlife: --backend='triton' cannot serve the demo on cpu: ")
    assert "TRITON_INTERPRET=1" in refusal and "--backend='torch'" in refusal
