"""Machines with aiter on this GPU: the double of one, or the library that is installed on an AMD GPU."""

from __future__ import annotations

from functools import cache

import torch

from planlife import CapacityLadder, ConfigError, PlanManager
from planlife.aiter_library import probe
from planlife.backends.aiter_backend import architecture_of
from planlife.backends.aiter_limits import FP8_OF_ARCHITECTURE
from planlife.torch_device import resolve_device
from tests.aiter_backend.machines import Machine, kind_of

#: Of a refresh, so that what is not ordered behind it reads poison: a few microseconds.
REFRESH_DELAY_CYCLES = 10_000
#: FP8 kernels round the query and the weights to FP8 too: three bits.
FP8_ROW_BOUND = 2**-3


@cache
def installed_machine() -> Machine | None:
    """This one, where it has an AMD GPU and an aiter that planlife can use; with BF16 caches where it reads such."""
    if torch.version.hip is None or probe().library is None:
        return None
    arch = architecture_of(resolve_device("cuda"))
    if arch not in FP8_OF_ARCHITECTURE:
        return None
    kinds = [kind_of(arch, "bfloat16"), kind_of(arch, row_bound=FP8_ROW_BOUND)]
    for kind in kinds:
        try:
            with PlanManager(kind.spec(), ladder=CapacityLadder([1]), device="cuda", backend="aiter") as manager:
                with manager.capture_phase():
                    manager.warm()
        except ConfigError:
            continue
        return Machine(arch, "installed", kind)
    return None
