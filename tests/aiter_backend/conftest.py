"""The double that a test gets which does not say which one; and how much of the scenarios CI runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from planlife.testing.aiter_double import AiterDouble, aiter_double


@pytest.fixture
def double() -> Iterator[AiterDouble]:
    with aiter_double(arch="gfx942", num_cu=8) as double:
        yield double


#: The same scenarios over more generations, and random worlds: CI, which has 15 minutes, runs every n-th of a file.
THINNED_IN_CI = {
    "test_scenarios_g3.py": 4,
    "test_scenarios_g4.py": 4,
    "test_scenarios_newer.py": 4,
    "test_random_steps.py": 3,
    "test_builders_over_the_double.py": 2,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("CI"):
        return
    left_out = []
    for name, step in THINNED_IN_CI.items():
        of_file = [item for item in items if item.path.name == name]
        left_out += [item for number, item in enumerate(of_file) if number % step]
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
