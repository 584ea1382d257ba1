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


#: The same scenarios over two more generations, which differ little: CI, which has 15 minutes, runs every third.
THINNED_IN_CI = ("test_scenarios_g3.py", "test_scenarios_newer.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get("CI"):
        return
    thinned = [item for item in items if item.path.name in THINNED_IN_CI]
    left_out = set(thinned) - set(thinned[::3])
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
