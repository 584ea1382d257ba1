"""The double that a test gets which does not say which one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planlife.testing.aiter_double import AiterDouble, aiter_double


@pytest.fixture
def double() -> Iterator[AiterDouble]:
    with aiter_double(arch="gfx942", num_cu=8) as double:
        yield double
