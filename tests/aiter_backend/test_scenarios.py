"""Scenarios of the lifecycle over the aiter backend: a library that says it reads the worlds' caches."""

from __future__ import annotations

import pytest

from planlife.backends.aiter_backend import AiterBackend
from tests.aiter_backend.recording_aiter import RecordingAiter
from tests.lifecycle import (
    test_capture_failures,
    test_capture_styles,
    test_drafts,
    test_dummies,
    test_guard,
    test_named_fallback,
    test_refresh_and_marks,
    test_segments,
)
from tests.lifecycle.world import World

MODULES = (
    test_capture_failures,
    test_capture_styles,
    test_drafts,
    test_dummies,
    test_guard,
    test_named_fallback,
    test_refresh_and_marks,
    test_segments,
)

gc_off = test_refresh_and_marks.gc_off


@pytest.fixture(scope="module")
def backend():
    """One for all, so that each row count of a spec is run once."""
    return backend_with_limit(4096)


def backend_with_limit(max_plan_rows: int) -> AiterBackend:
    library = RecordingAiter(num_calls=0).library(can_use_flydsl_pa_decode=can_use)
    return AiterBackend(max_plan_rows, library=library, architecture_of=lambda device: "gfx950")


class TestScenarios:
    @pytest.fixture(autouse=True)
    def _over_aiter(self, backend, monkeypatch):
        monkeypatch.setattr(World, "backend", backend)
        monkeypatch.setattr(test_segments, "limited_backend", backend_with_limit)


def can_use(
    output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length, *,
    compute_type, key_scale, value_scale, exp_sums, max_logits, temporary_output, sinks, sliding_window, work_plan,
    max_context_length,
):  # fmt: skip
    return True


def _take_over(modules):
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_"):
                setattr(TestScenarios, f"{name}__{module.__name__.rpartition('.')[2]}", staticmethod(test))


_take_over(MODULES)
