"""Modes of the caller's around the aiter backend, over the double of one machine."""

from __future__ import annotations

import pytest

from ..lifecycle import test_ambient_modes as modes
from ..lifecycle.test_ambient_modes import test_a_mode_of_the_callers_is_asked_nothing_by_a_step  # noqa: F401
from .machines import *  # noqa: F403
from .machines import Machine, _over_aiter, kind_of  # noqa: F401


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine("gfx942", "G3", kind_of("gfx942"))


@pytest.mark.parametrize("part", ["eager steps", "fallback and dummy", "before replay", "in graph"])
@pytest.mark.parametrize("mode", modes.TELLING_MODES)
def test_a_mode_of_the_callers_changes_no_result(mode: str, part: str) -> None:
    modes.test_a_mode_of_the_callers_changes_no_result(mode, part)
