"""The demo over the aiter backend and the library's double, on a CPU."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from planlife import BackendUnavailableError, ConfigError
from planlife.backends.aiter_backend import AiterBackend
from planlife.demo import DemoConfig, engine, run_demo
from planlife.demo.kv_pool import KVPool
from planlife.demo.result import DoubleCounts
from planlife.testing.aiter_machine import aiter_machine

SMALL = DemoConfig(backend="aiter", double="gfx942", layout="packed", max_steps=12)
#: Each generation and GPU, both styles, and each kind of cache and scales that they have.
KINDS = (
    dataclasses.replace(SMALL, aiter_generation="G2"),
    dataclasses.replace(SMALL, style="in-graph", kv="fp8_fnuz", mtp=1),
    dataclasses.replace(SMALL, double="gfx950", kv="fp8", scales="per_token", mtp=5, window=300),
    dataclasses.replace(SMALL, double="gfx950", aiter_generation="newer", style="in-graph"),
    dataclasses.replace(SMALL, double="gfx1250", aiter_generation="newer", kv="fp8", mtp=1),
    dataclasses.replace(SMALL, double="gfx1250", aiter_generation="G4", mtp=1),
)


@pytest.fixture(autouse=True)
def few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LADDER_ROWS", (1, 4, 8))
    monkeypatch.setattr(engine, "CAPTURE_ROWS", {"decode": (2, 8), "ubatch": (8,), "verify": (8,), "draft": (8,)})


@pytest.mark.parametrize(
    "config", KINDS, ids=lambda one: f"{one.double} {one.double_generation} {one.kv} {one.kv_scales} {one.style}"
)
def test_every_output_is_right_and_the_double_objects_to_nothing(config: DemoConfig) -> None:
    result = run_demo(config)
    shown, seen = dict(result.rows()), result.double

    assert result.ok, (result.first_mismatch, seen)
    assert seen is not None and seen.num_decodes > 0 and seen.num_compile_keys > 0
    assert seen.num_compile_keys_after_seal == 0 and seen.violations == ()
    assert result.report.counters["compiles_after_seal"] == result.counts.fallback == 0
    assert result.counts.replayed > 0 and result.counts.draft_passes_replayed > 0
    assert result.num_rows_cut > 0
    assert shown["backend"] == "aiter"
    assert shown["aiter"].startswith(f"a double ({config.double_generation}, as on a {config.double})")
    assert shown["its compile keys after seal"] == f"0 ({seen.num_compile_keys:,} before)"
    assert shown["its violations"] == "0"
    assert "aiter" not in sys.modules


def test_a_key_that_is_new_while_serving_shows_and_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_nothing(self: AiterBackend, *args: Any) -> int:
        return 1

    monkeypatch.setattr(AiterBackend, "compile", run_nothing)
    monkeypatch.setattr(engine, "CAPTURE_ROWS", dict.fromkeys(engine.CAPTURE_ROWS, ()))
    result = run_demo(SMALL)

    assert result.num_mismatches == result.report.counters["compiles_after_seal"] == 0, "planlife knows of none"
    assert result.double is not None and result.double.num_compile_keys_after_seal > 0
    assert result.double.violations == ()
    assert not result.ok


def test_what_the_double_objects_to_shows_and_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    make_pool = KVPool.__init__

    def with_nan_tails(self: KVPool, *args: Any, **kwargs: Any) -> None:
        make_pool(self, *args, **{**kwargs, "finite_tails": False})

    monkeypatch.setattr(KVPool, "__init__", with_nan_tails)
    result = run_demo(SMALL)

    assert result.num_mismatches == 0, "the double itself multiplies nothing with a weight of 0"
    assert result.double is not None and result.double.num_compile_keys_after_seal == 0
    assert not result.ok
    assert dict(result.rows())["first violation"].startswith("V is not finite in the unwritten tail")


def test_a_double_that_decoded_nothing_is_not_ok() -> None:
    assert DoubleCounts("gfx942", "G3", 5, 7, 0, ()).ok
    assert not DoubleCounts("gfx942", "G3", 0, 7, 0, ()).ok


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layout": "nhd"}, "reads no kv_layout='nhd'.*; use 'packed'"),
        ({"kv": "fp8"}, "the FP8 cache of gfx942 is float8_e4m3fnuz, not float8_e4m3fn"),
        ({"kv": "fp16"}, "reads no float16 cache; make it bfloat16 or float8_e4m3fnuz"),
        ({"double": "gfx1250"}, "pa_decode refuses calls of this site on gfx1250"),  # it has FP8 caches only
    ],
    ids=str,
)
def test_what_aiter_does_not_take_is_refused_before_anything_runs(changes: dict[str, Any], why: str) -> None:
    progress: list[str] = []
    with pytest.raises(ConfigError, match=f"backend='aiter' cannot serve the demo on cpu: .*{why}"):
        run_demo(dataclasses.replace(SMALL, **changes), progress=lambda done, total, text: progress.append(text))
    assert progress == []


@pytest.mark.parametrize("generation", ["pypi", "G1d"])
def test_without_a_double_the_library_that_is_installed_is_asked(generation: str) -> None:
    config = dataclasses.replace(SMALL, double=None)
    with aiter_machine(generation=generation), pytest.raises(BackendUnavailableError, match="'triton', 'torch' or"):
        run_demo(config)
    with aiter_machine() as double:
        result = run_demo(dataclasses.replace(config, max_steps=2))
    assert result.ok and result.double is None and double.decodes > 0
    assert "aiter" not in dict(result.rows())
