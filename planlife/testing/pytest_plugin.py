"""The fixture `planlife_builder_scenario`. Installed for every pytest run, so it imports nothing until it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .builder_suite import BuilderAdapter

#: Those of builder_suite, which needs torch.
_SCENARIOS = ("replayed", "eager", "drafts", "ubatches", "dummies", "mixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("planlife")
    group.addoption("--planlife-steps", type=int, default=72, help="steps of each scenario of a builder (72)")
    group.addoption("--planlife-seed", type=int, default=0, help="seed of lengths and queries of a builder's steps (0)")


@pytest.fixture(params=_SCENARIOS)
def planlife_builder_scenario(request: pytest.FixtureRequest) -> Callable[[Callable[[], BuilderAdapter]], None]:
    """One test per scenario: call it with a function that makes a BuilderAdapter around the engine's builder."""
    from .builder_suite import Unsupported, run_scenario

    def run(factory: Callable[[], BuilderAdapter]) -> None:
        option = request.config.getoption
        try:
            run_scenario(request.param, factory, num_steps=option("--planlife-steps"), seed=option("--planlife-seed"))
        except Unsupported as reason:
            pytest.skip(f"the builder has no such steps: {reason}")

    return run
