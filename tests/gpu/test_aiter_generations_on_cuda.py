"""Scenarios over doubles of the other generations and architectures of aiter, on real CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..aiter_backend import scenarios
from ..aiter_backend.machines import *  # noqa: F403
from ..aiter_backend.machines import Machine, Watched, _over_aiter, double_on, kind_of  # noqa: F401
from ..lifecycle.test_budgets_and_shared_plans import *  # noqa: F403
from ..lifecycle.test_drafts import *  # noqa: F403
from ..lifecycle.test_dummies import *  # noqa: F403
from ..lifecycle.test_segments import *  # noqa: F403
from .aiter_on_cuda import REFRESH_DELAY_CYCLES

MACHINES = (
    Machine("gfx950", "G2", kind_of("gfx950", "bfloat16")),
    Machine("gfx942", "G2", kind_of("gfx942")),
    Machine("gfx1250", "newer", kind_of("gfx1250")),
)
NOT_HERE = {
    name.replace("[", f"[{machine}-"): reason for name, reason in scenarios.NOT_HERE.items() for machine in MACHINES
}


@pytest.fixture(scope="module", params=MACHINES, ids=str)
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.param


@pytest.fixture(scope="module")
def watched(machine: Machine) -> Iterator[Watched]:
    with double_on(machine, "cuda", refresh_delay_cycles=REFRESH_DELAY_CYCLES) as watched:
        yield watched
