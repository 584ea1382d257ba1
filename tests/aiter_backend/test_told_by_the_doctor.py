"""What the doctor says of aiter, per architecture and library: what is there, what is missing, what will happen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planlife import aiter_library
from planlife.backends import aiter_backend
from planlife.testing.fakes import FakeDevice
from tests.aiter_backend.recording_aiter import RecordingAiter, install
from tests.aiter_backend.test_refusals import BF16, FN, FNUZ, newer_planner
from tests.test_doctor import Torch, examine, machine, mi300x, numa, sites, verdicts

OLD = {"plan_pa_decode": None}
NEW = {"plan_pa_decode": newer_planner}


@pytest.fixture(autouse=True)
def asked_anew():
    yield
    aiter_library.probe.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "changes", "refused"),
    [
        ("gfx942", {}, {"bf16": "", "fnuz": "", "fn": "FP8 cache of gfx942"}),
        ("gfx950", {}, {"bf16": "", "fnuz": "FP8 cache of gfx950", "fn": ""}),
        ("gfx1250", NEW, {"bf16": "", "fnuz": "FP8 cache of gfx1250", "fn": ""}),
        ("gfx90a", {}, dict.fromkeys(("bf16", "fnuz", "fn"), "this GPU is gfx90a")),
        ("gfx942", OLD, dict.fromkeys(("bf16", "fnuz", "fn"), "has no plan_pa_decode")),
    ],
)
def test_each_site_is_served_or_refused_as_a_manager_would(monkeypatch, architecture, changes, refused):
    install(monkeypatch, RecordingAiter().module(**changes))
    monkeypatch.setattr(aiter_backend, "architecture_of", lambda device: architecture)
    one = machine(Torch(mi300x(5), hip="7.0"), files=numa(0), device=FakeDevice("cuda:0", 304))
    three = sites(bf16=BF16, fnuz=FNUZ, fn=replace(FN, lane="b"))
    found = examine(one, three)
    for site, said in refused.items():
        reasons = verdicts(found, site)["aiter"]
        assert bool(reasons) == bool(said) and said in "".join(reasons)
    served = [site for site, said in refused.items() if not said]
    only = sites(**{site: three.specs[site] for site in served})
    if served:
        chosen = examine(one, only)
        assert (chosen.backend, chosen.refused) == ("aiter", ()) and chosen.worst_case_bytes
