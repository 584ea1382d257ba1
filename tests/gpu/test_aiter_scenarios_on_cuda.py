"""The CPU's scenarios over aiter on real CUDA graphs: the aiter that is installed on an AMD GPU, else its double."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..aiter_backend import scenarios
from ..aiter_backend.machines import *  # noqa: F403
from ..aiter_backend.machines import Machine, Watched, _over_aiter, double_on, kind_of  # noqa: F401
from ..aiter_backend.scenarios import *  # noqa: F403
from . import test_lifecycle_on_cuda, test_values_on_cuda
from .aiter_on_cuda import REFRESH_DELAY_CYCLES, installed_machine

NOT_HERE = scenarios.NOT_HERE | test_values_on_cuda.NOT_HERE | test_lifecycle_on_cuda.NOT_HERE


@pytest.fixture(scope="module")
def machine() -> Machine:
    return installed_machine() or Machine("gfx942", "G3", kind_of("gfx942", "bfloat16"))


@pytest.fixture(scope="module")
def watched(machine: Machine) -> Iterator[Watched | None]:
    """None over an installed library, which is its own judge."""
    if machine == installed_machine():
        yield None
        return
    with double_on(machine, "cuda", refresh_delay_cycles=REFRESH_DELAY_CYCLES) as watched:
        yield watched
