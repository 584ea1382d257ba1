"""Machines with aiter that the scenarios of tests/lifecycle run on: an architecture, a library, a kind of cache.

A module names its machine as MACHINE, and takes tests and the fixtures here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import pytest

from planlife.backends.aiter_backend import FP8_OF_ARCHITECTURE, AiterBackend
from planlife.testing.aiter_double import AiterDouble
from planlife.testing.aiter_machine import aiter_machine

from ..lifecycle import world
from ..lifecycle.world import Kind, World

#: Compute units of the double's GPU: as many as the tests count on at the most.
NUM_CU = 256


def kind_of(arch: str, kv_dtype: str = "", **changes: Any) -> Kind:
    """A kind of cache that aiter reads there; kv_dtype: "" for the FP8 of that architecture."""
    fp8 = FP8_OF_ARCHITECTURE[arch]
    is_fp8 = kv_dtype in ("", fp8)
    fields: dict[str, Any] = {
        "layout": "packed",
        "layouts": ("packed", "packed, plain V") if is_fp8 else ("packed",),
        "kv_dtype": kv_dtype or fp8,
        "scales": "per_tensor" if is_fp8 else "none",
        "head_dim": 64,
        "other_page_size": 64,
        "fp8": fp8,
        "finite_values": True,
    }
    return Kind(**{**fields, **changes})


@dataclass(frozen=True)
class Machine:
    """An architecture, a generation of the library, and the kind of cache that its worlds have."""

    arch: str
    generation: str
    kind: Kind


class Watched:
    """The double of one module's tests, and what is wrong since `start`."""

    def __init__(self, double: AiterDouble) -> None:
        self.double = double
        self.num_of_mints = 0

    def start(self) -> None:
        self.double.check()
        self.double.violations.clear()
        self.num_before = self.double.compiles
        self.num_of_mints = 0

    def faults(self) -> list[str]:
        """What the library would have got wrong results from, or stalls, or a broken capture."""
        self.double.check()
        num_late = self.double.compiles - self.num_before - self.num_of_mints
        late = [f"compiled outside of a mint: {key}" for key in self.double.compiled[-num_late:]] if num_late else []
        return [*self.double.violations, *late]

    @contextmanager
    def mints_counted(self) -> Iterator[None]:
        """What AiterBackend.compile compiles is compiled in time."""
        with pytest.MonkeyPatch.context() as patch:
            compile_class = AiterBackend.compile

            @wraps(compile_class)
            def compile_and_count(backend: AiterBackend, *call: Any) -> int:
                before = self.double.compiles
                try:
                    return compile_class(backend, *call)
                finally:
                    self.num_of_mints += self.double.compiles - before

            patch.setattr(AiterBackend, "compile", compile_and_count)
            yield


@pytest.fixture(scope="module")
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    """One double for all tests of a module, which has compiled what an earlier one minted."""
    machine: Machine = request.module.MACHINE
    settings: dict[str, Any] = {"generation": machine.generation, "num_cu": NUM_CU, "on_violation": "record"}
    with aiter_machine(machine.arch, device_type=_device_type(request.module), **settings) as double:
        watched = Watched(double)
        with watched.mints_counted():
            yield watched


@pytest.fixture(scope="module")
def backend(watched: Watched) -> AiterBackend:
    """One for all tests of a module, so that each row count of a spec is run once."""
    return AiterBackend()


@pytest.fixture(autouse=True)
def _over_aiter(
    watched: Watched, backend: AiterBackend, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Worlds over the machine of the module; the test has to leave nothing wrong, or what its ON_PURPOSE says."""
    monkeypatch.setattr(World, "backend", backend)
    monkeypatch.setattr(World, "kind", request.module.MACHINE.kind)
    watched.start()
    yield
    faults = watched.faults()
    on_purpose, node = request.module.ON_PURPOSE, request.node
    wanted = on_purpose.get(node.name) or on_purpose.get(node.originalname)
    if wanted is None:
        assert not faults, faults
    else:
        assert faults, f"wrong on purpose, and the double did not see it: {wanted}"
        assert all(re.search(wanted, fault) for fault in faults), faults


def _device_type(module: ModuleType) -> str:
    return str(getattr(module, "DEVICE_TYPE", world.DEVICE))
