"""Scenarios of the lifecycle over the double of a newer aiter, on its newest architecture, with FP8 caches."""

from __future__ import annotations

from . import scenarios
from .machines import *  # noqa: F403
from .machines import Machine, _over_aiter, kind_of  # noqa: F401
from .scenarios import *  # noqa: F403

MACHINE = Machine("gfx1250", "newer", kind_of("gfx1250"))
NOT_HERE = scenarios.NOT_HERE | scenarios.NOT_ON_A_CPU | scenarios.OTHER_WINDOWS
