"""How many tasks aiter would plan for at a site: tuned on this machine, known to the library, or neither."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..aiter_library import AiterLibrary, ask_count, attribute_of, parameters_of
from ..planner import default_workgroup_budget, plan_capacity
from ..spec import FP8_DTYPES, PlanSpec
from .aiter_sample import LayerCaches, SampleCall

#: aiter tunes by row count, and a site has one budget: the largest that is found for one of these.
_ROW_COUNTS = tuple(2**power for power in range(13))
#: Names of FlyDSL's tuner.
_CACHE_FOLDER, _SEARCH = "FLYDSL_AUTOTUNE_CACHE_DIR", "FLYDSL_AUTOTUNE"
_CACHE_FILE = "_pa_decode_autotuner.json"


def known_budget(
    library: AiterLibrary, spec: PlanSpec, device: Any, architecture: str, softmax_scale: float
) -> int | None:
    """None: this aiter knows no other than 2 x compute units. device: one that is here."""
    default = default_workgroup_budget(device.num_compute_units)
    try:
        tuned = [budget for budget in _tuned(library, spec, device, architecture, softmax_scale) if budget != default]
    except Exception:  # whatever a library raises, nobody is stopped by a number that was only better
        tuned = []
    if tuned:
        return max(tuned)
    if library.workgroup_budget is None:
        return None
    return ask_count(
        library.workgroup_budget,
        torch.device(device.name),
        kv_dtype=getattr(torch, spec.kv_dtype),
        head_dim=spec.head_dim,
        block_size=spec.page_size,
        query_length=spec.query_length,
        query_group_size=spec.group_size,
        sliding_window=spec.sliding_window,
    )


def _tuned(
    library: AiterLibrary, spec: PlanSpec, device: Any, architecture: str, softmax_scale: float
) -> Iterator[int]:
    if library.budget_cache is not None:
        sample = SampleCall(spec, 1, "meta")  # layouts are looked at, and no memory
        for caches in sample.caches:
            for rows in _ROW_COUNTS:
                budget = _cached(library, spec, device.num_compute_units, architecture, sample, caches, rows)
                yield from () if budget is None else (budget,)
    elif library.prepare is not None and _has_tuned(library.prepare, architecture):
        with device.relaxed():
            sample = SampleCall(spec, 1, device.name)
            for caches in sample.caches:
                for rows in _ROW_COUNTS:
                    budget = _prepared(library, spec, device, sample, caches, rows, softmax_scale)
                    yield from () if budget is None else (budget,)


def _cached(
    library: AiterLibrary,
    spec: PlanSpec,
    num_compute_units: int,
    architecture: str,
    sample: SampleCall,
    caches: LayerCaches,
    rows: int,
) -> int | None:
    """A lookup in FlyDSL's cache, which neither compiles nor launches."""
    cache = library.budget_cache
    assert cache is not None
    is_fp8 = spec.kv_dtype in FP8_DTYPES
    of_dtype = {"kv_dtype": "fp8" if is_fp8 else spec.kv_dtype}
    if "kv_dtype" not in parameters_of(cache.make_shape):
        if not is_fp8:
            return None  # of before BF16 caches: it would answer for FP8
        of_dtype = {}
    _, query, *_ = sample.call(1, caches)

    def ask() -> Any:
        shape = cache.make_shape(
            rows,
            spec.max_context_tokens,
            spec.query_length,
            num_query_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=spec.page_size,
            dtype=spec.q_dtype,
            per_token=spec.scales == "per_token",
            trans_v=caches.value_cache.dim() == 5,
            window=spec.sliding_window,
            **of_dtype,
        )
        return cache.get(shape, architecture, num_compute_units, storage_key=cache.storage_key(query, *caches))

    return ask_count(ask)


def _has_tuned(prepare: Any, architecture: str) -> bool:
    """Whether there may be a tuned budget: to look it up, prepare_pa_decode_plan compiles and runs the planner.

    Not where it would search: with a sample of empty rows it would keep a budget that nobody measured.
    """
    if os.environ.get(_SEARCH, "0") not in ("", "0"):
        return False
    if os.environ.get(_CACHE_FOLDER):
        return True
    file = attribute_of(sys.modules.get(prepare.__module__), "__file__")
    folders = [Path.home() / ".flydsl" / "autotune"]
    if isinstance(file, str):
        folders.append(Path(file).parent / "configs" / "pa" / architecture)
    return any((folder / _CACHE_FILE).is_file() for folder in folders)


def _prepared(
    library: AiterLibrary,
    spec: PlanSpec,
    device: Any,
    sample: SampleCall,
    caches: LayerCaches,
    rows: int,
    softmax_scale: float,
) -> int | None:
    """The budget of the plan that aiter makes for empty rows, as far as its capacity tells it."""
    prepare = library.prepare
    assert prepare is not None
    _, query, key_cache, value_cache, tables = sample.call(1, caches)

    def capacity_of() -> Any:
        return prepare(
            query[:1].expand(rows * spec.query_length, -1, -1),
            key_cache,
            value_cache,
            torch.zeros(rows, dtype=torch.int32, device=device.name),
            tables.expand(rows, -1),
            softmax_scale,
            spec.query_length,
            compute_type=getattr(torch, spec.kv_dtype),
            key_scale=caches.key_scale,
            value_scale=caches.value_scale,
            sliding_window=spec.sliding_window,
            max_partitions=spec.max_partitions,
            max_context_length=spec.max_context_tokens,
        ).capacity

    capacity = ask_count(capacity_of)
    default = plan_capacity(
        rows,
        num_kv_heads=spec.num_kv_heads,
        num_cu=device.num_compute_units,
        max_partitions=spec.max_partitions,
        workgroup_budget=None,
    )
    return None if capacity in (None, default) else capacity * spec.num_kv_heads
