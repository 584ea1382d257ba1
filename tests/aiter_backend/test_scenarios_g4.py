"""Scenarios of the lifecycle over the double of an aiter with BF16 caches on gfx1250."""

from __future__ import annotations

from . import scenarios
from .machines import *  # noqa: F403
from .machines import Machine, _over_aiter, kind_of  # noqa: F401
from .scenarios import *  # noqa: F403

MACHINE = Machine("gfx1250", "G4", kind_of("gfx1250", "bfloat16", layouts=("packed", "packed, plain V")))
NOT_HERE = scenarios.NOT_HERE | scenarios.NOT_ON_A_CPU | scenarios.OTHER_WINDOWS
