"""R34, C66: with planlife off, one hint per process, and only where plans would help. Each negative has its control."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from planlife import CapacityLadder, PlanManager, PlanSpec, hint
from planlife.testing import FakeBackend, FakeDevice
from tests.unit.fake_world import FakeWorld, live_lens_fallback


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint, "_told", [])


@pytest.fixture
def hints(caplog: pytest.LogCaptureFixture) -> Any:
    """The hints that were logged since the test began."""
    caplog.set_level(logging.DEBUG, logger="planlife")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "planlife" and record.levelno == logging.WARNING and "is off" in record.getMessage()
    ]


def make(
    *sites: PlanSpec, rows: int = 8, backend: FakeBackend | None = None, enabled: bool = False, num_cu: int = 8
) -> PlanManager:
    return PlanManager(
        {f"site{number}": one for number, one in enumerate(sites or (spec(),))},
        ladder=CapacityLadder.powers_of_two(rows),
        device=FakeDevice(num_compute_units=num_cu),
        backend=backend or FakeBackend(),
        enabled=enabled,
        fallback=live_lens_fallback,
    )


def spec(**changes: Any) -> PlanSpec:
    fields: dict[str, Any] = {"max_context_tokens": 4096, **changes}
    return PlanSpec(4, 1, 16, 16, **fields)


def test_off_where_it_would_help_is_said_with_site_backend_and_way_out(hints: Any) -> None:
    make()
    (text,) = hints()
    for part in ("'site0'", "backend fake", "on fake", "enabled=True"):
        assert part in text


def test_it_is_said_once_per_process_and_not_per_manager_or_call(hints: Any) -> None:
    world = FakeWorld(enabled=False, fallback=live_lens_fallback)
    for _ in range(3):
        make()
        world.run([700, 3])
    assert len(hints()) == 1


def test_once_it_was_said_no_backend_is_asked_again(hints: Any) -> None:
    first, second = FakeBackend(), FakeBackend()
    make(backend=first)
    make(backend=second)
    assert (first.calls["refuse_spec"], second.calls["refuse_spec"]) == (1, 0)


def test_a_manager_that_is_on_says_nothing_and_leaves_the_hint_to_the_next_that_is_off(hints: Any) -> None:
    make(enabled=True)
    assert hints() == []
    make()
    assert len(hints()) == 1  # positive control


@pytest.mark.parametrize(
    ("useless", "helped"),
    [
        ({"sites": [spec(max_context_tokens=256)]}, {"sites": [spec(max_context_tokens=257)]}),
        ({"rows": 1}, {"rows": 2}),
        ({"sites": [spec(sliding_window=4095)]}, {"sites": [spec(sliding_window=4096)]}),  # as wide as any context
        ({"sites": [spec(max_partitions=1)]}, {"sites": [spec(max_partitions=2)]}),
        ({"sites": [spec(workgroup_budget=2)]}, {"sites": [spec(workgroup_budget=3)]}),  # of a class of 2
        ({"backend": FakeBackend(spec_reasons=["no BF16 caches"])}, {"backend": FakeBackend()}),
    ],
    ids=["one tile", "one row", "window", "one task per row", "no slots to deal", "refused"],
)
def test_where_a_plan_cannot_help_nothing_is_said(useless: Any, helped: Any, hints: Any) -> None:
    def construct(arguments: dict[str, Any]) -> None:
        make(*arguments.pop("sites", ()), **arguments)

    construct(dict(useless))
    assert hints() == []
    construct(dict(helped))  # positive control, one step on the other side
    assert len(hints()) == 1


def test_the_reference_backend_makes_nothing_faster_so_that_nothing_is_said(hints: Any) -> None:
    reference = FakeBackend()
    reference.name = "torch"
    make(backend=reference)
    assert hints() == []
    make(backend=FakeBackend())  # positive control
    assert len(hints()) == 1


def test_only_the_sites_that_plans_would_help_are_named(hints: Any) -> None:
    make(spec(), spec(sliding_window=128), spec(max_context_tokens=200))
    (text,) = hints()
    assert "'site0'" in text and "'site1'" not in text and "'site2'" not in text


def test_all_reasons_against_plans_are_told_at_once() -> None:
    one = spec(max_context_tokens=100)
    refusing = FakeBackend(spec_reasons=["no BF16 caches", "no pages of 16"])
    reasons = hint.reasons_against_plans(one, CapacityLadder([1]), refusing, FakeDevice())
    assert [*reasons[:2]] == ["no BF16 caches", "no pages of 16"]
    assert "never uneven" in reasons[2] and "100 tokens" in reasons[3] and len(reasons) == 4
    assert not hint.reasons_against_plans(spec(), CapacityLadder([2]), FakeBackend(), FakeDevice())  # control


def test_a_backend_that_cannot_be_asked_does_not_keep_a_manager_from_being_off(hints: Any) -> None:
    broken = FakeBackend()
    broken.inject(method="refuse_spec")
    assert make(backend=broken).worst_case_bytes() == 0
    assert hints() == []
    broken.inject(method="refuse_spec")
    with pytest.raises(RuntimeError, match="injected"):  # control: on, it is asked, and the fault is told
        make(backend=broken, enabled=True)
