"""The fixture `planlife_builder_scenario`. Installed for every pytest run, so it imports nothing until it is used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .aiter_double import AiterDouble
    from .builder_suite import BuilderAdapter

#: Those of builder_suite, which needs torch.
_SCENARIOS = ("replayed", "eager", "drafts", "ubatches", "dummies", "mixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("planlife")
    group.addoption("--planlife-steps", type=int, default=72, help="steps of each scenario of a builder (72)")
    group.addoption(
        "--planlife-aiter",
        metavar="ARCH",
        help="gfx942, gfx950 or gfx1250: builders find a strict double of aiter on such a GPU, and must take it",
    )
    group.addoption("--planlife-aiter-generation", default="G3", help="of the double: G2, G3, G4 or newer (G3)")
    group.addoption(
        "--planlife-aiter-device",
        choices=("cpu", "cuda"),
        help="which devices are taken for that GPU; what a manager takes unless given",
    )
    group.addoption("--planlife-seed", type=int, default=0, help="seed of lengths and queries of a builder's steps (0)")


@pytest.fixture(params=_SCENARIOS)
def planlife_builder_scenario(request: pytest.FixtureRequest) -> Callable[[Callable[[], BuilderAdapter]], None]:
    """One test per scenario: call it with a function that makes a BuilderAdapter around the engine's builder."""
    from .builder_suite import Unsupported, run_scenario

    option = request.config.getoption

    def run(factory: Callable[[], BuilderAdapter]) -> None:
        try:
            with _machine(option) as double:
                run_scenario(
                    request.param,
                    factory,
                    num_steps=option("--planlife-steps"),
                    seed=option("--planlife-seed"),
                    double=double,
                )
        except Unsupported as reason:
            pytest.skip(f"the builder has no such steps: {reason}")

    return run


def _machine(option: Callable[[str], Any]) -> AbstractContextManager[AiterDouble | None]:
    """What the builder finds: this machine, or one that has aiter."""
    arch = option("--planlife-aiter")
    if arch is None:
        return nullcontext()
    from ..torch_device import resolve_device
    from .aiter_machine import aiter_machine

    device = option("--planlife-aiter-device") or resolve_device(None).name.partition(":")[0]
    generation = option("--planlife-aiter-generation")
    return aiter_machine(arch, device_type=device, generation=generation, on_violation="record")
