"""Scenarios of the lifecycle over the double of aiter with its FlyDSL planner, with BF16 caches."""

from __future__ import annotations

from . import scenarios
from .machines import *  # noqa: F403
from .machines import Machine, _over_aiter, kind_of  # noqa: F401
from .scenarios import *  # noqa: F403

MACHINE = Machine("gfx950", "G3", kind_of("gfx950", "bfloat16"))
NOT_HERE = scenarios.NOT_HERE | scenarios.NOT_ON_A_CPU | scenarios.OTHER_WINDOWS
