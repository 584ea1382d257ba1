"""Fallbacks that are picked by name: what they cannot read is refused before serving starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planlife import CapacityLadder, ConfigError, PlanManager
from planlife.backends.dense_fallback import DenseFallback
from planlife.testing.fakes import FakeBackend, FakeDevice

from .world import small_spec


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("site", [{"head_dim": 12}, {"page_size": 4}])
def test_a_named_fallback_that_cannot_read_a_site_is_refused_at_construction(site: Any, enabled: bool) -> None:
    """R30: not by the first step that needs it."""
    options: dict[str, Any] = {"ladder": CapacityLadder([2]), "device": FakeDevice(), "enabled": enabled}
    sites = {"main": small_spec(max_partitions=4096), "odd": replace(small_spec(kv_layout="packed"), **site)}
    with pytest.raises(ConfigError, match="fallback='torch' cannot serve site 'odd': the torch backend does not read"):
        PlanManager(sites, backend=FakeBackend(), fallback="torch", **options)
    PlanManager(sites["main"], backend=FakeBackend(), fallback="torch", **options).close()  # positive control


def test_a_fallback_that_is_made_while_another_thread_records_kills_no_capture() -> None:
    """The fake backend raises at a compile that could."""
    backend = FakeBackend()
    DenseFallback(backend).prepare([small_spec()], FakeDevice())
    assert len(backend.compiled) == 1
