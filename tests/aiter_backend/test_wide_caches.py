"""Caches of gigabytes, which aiter addresses by other code: run while minting, with one page of memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, Step
from planlife.backends import aiter_backend, aiter_sample
from planlife.backends.aiter_limits import FP8_OF_ARCHITECTURE, WIDE_CACHE_BYTES
from planlife.backends.aiter_sample import SampleCall, as_if_of
from planlife.testing.aiter_double import AiterDouble, device_side
from planlife.testing.aiter_machine import aiter_machine

SIZES = tuple(size + change for size in WIDE_CACHE_BYTES for change in (-1, 0, 1))
ROWS = 3


def site(architecture: str, **changes: Any) -> PlanSpec:
    """Of the shape that gfx950's schedule looks at most closely, and does not split."""
    fields = {"kv_dtype": FP8_OF_ARCHITECTURE[architecture], "scales": "per_token", "query_length": 4, **changes}
    return PlanSpec(32, 2, 128, 128, max_context_tokens=512, kv_layout="packed", sliding_window=300, **fields)


def keys_after_the_seal(spec: PlanSpec, double: AiterDouble, device: str = "cpu") -> int:
    """How many compile keys are new when layers have caches of each of SIZES."""
    sample = SampleCall(spec, ROWS, device, SIZES)
    with PlanManager(spec, ladder=CapacityLadder([1, ROWS]), device=device, backend="aiter") as manager:
        with manager.capture_phase():
            manager.warm()
        before = double.compiles
        for rows in range(1, ROWS + 1):
            plan = manager.plan_for(Step(torch.zeros(rows, dtype=torch.int32, device=device), owner=object()))
            for caches in sample.caches:
                if caches.value_cache.dim() == 4 and spec.kv_dtype == "bfloat16" and double.arch != "gfx1250":
                    continue  # which no text takes
                output, query, keys, values, tables = sample.call(rows, caches)
                scales = {"key_scale": caches.key_scale, "value_scale": caches.value_scale}
                manager.pa_decode(plan, output, query, keys, values, tables, 128**-0.5, **scales)
    return double.compiles - before


@pytest.mark.parametrize("generation", ["G2", "G3", "newer"])
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx1250"])
def test_layers_with_caches_of_any_size_compile_nothing_after_the_seal(architecture: str, generation: str) -> None:
    with aiter_machine(architecture, generation=generation) as double:
        assert keys_after_the_seal(site(architecture), double) == 0
        assert keys_after_the_seal(site(architecture, scales="per_tensor", query_length=1), double) == 0
        assert not double.violations


@pytest.mark.parametrize("scales", ["per_token", "none"])
def test_layers_of_either_cache_on_gfx1250_compile_nothing_after_the_seal(scales: str) -> None:
    with aiter_machine("gfx1250", generation="G4") as double:
        dtype = {"kv_dtype": "bfloat16"} if scales == "none" else {}
        assert keys_after_the_seal(site("gfx1250", scales=scales, **dtype), double) == 0
        assert not double.violations
        assert {key[-2] for key in double.compiled if key[0] == "tile"} == {True, False}  # V in either form


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "bfloat16"])
def test_a_gpus_double_takes_them_too(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it launches there copies no cache."""
    monkeypatch.setattr(device_side, "attend_on_host", device_side.attend_on_device)
    spec = site("gfx950", kv_dtype=kv_dtype, scales="none" if kv_dtype == "bfloat16" else "per_token")
    with aiter_machine("gfx950") as double:
        assert keys_after_the_seal(spec, double) == 0
        assert double.decodes > 0 and not double.violations


@pytest.mark.parametrize(("architecture", "least"), [("gfx942", 0), ("gfx950", 0), ("gfx950", 1)])
def test_each_size_is_one_that_the_library_compiles_for(
    architecture: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without one of the sizes something is compiled in service."""
    monkeypatch.setattr(aiter_backend, "WIDE_CACHE_BYTES", WIDE_CACHE_BYTES[:least])
    with aiter_machine(architecture) as double:
        assert keys_after_the_seal(site(architecture), double) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fnuz, torch.float32])
def test_a_page_as_if_of_many_has_its_memory_and_gives_it_back(dtype: torch.dtype) -> None:
    page = torch.arange(64).view(1, 4, 16).to(dtype)
    num_pages = 2**31 // page.nbytes + 1
    many = as_if_of(num_pages, page)
    assert many.shape == (num_pages, 4, 16) and many.dtype == dtype and many.is_contiguous()
    assert many.nbytes > 2**31 and many.data_ptr() == page.data_ptr()
    assert torch.equal(many[0].view(torch.uint8), page[0].view(torch.uint8))
    first = many[:1]
    del many
    gc.collect()
    assert torch.equal(first.view(torch.uint8), page.view(torch.uint8))
    assert len(aiter_sample._described) == 1
    del first
    gc.collect()
    assert not aiter_sample._described
