"""Machines with aiter that the scenarios of tests/lifecycle run on: an architecture, a library, a kind of cache.

A module names its machine as MACHINE, and takes tests and the fixtures here. What its ON_PURPOSE names does wrong past
planlife.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast
from unittest import mock

import pytest

from planlife.backends.aiter_backend import AiterBackend
from planlife.backends.aiter_limits import FP8_OF_ARCHITECTURE
from planlife.testing.aiter_double import AiterDouble
from planlife.testing.aiter_machine import aiter_machine

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

    def __str__(self) -> str:
        return f"{self.arch}-{self.generation}-{self.kind.kv_dtype}"


class Watched:
    """A double, and what is wrong since `start`."""

    def __init__(self, double: AiterDouble) -> None:
        self.double = double
        self.num_before = self.num_of_mints = 0

    def start(self) -> None:
        self.double.check()
        self.double.violations.clear()
        self.num_before, self.num_of_mints = self.double.compiles, 0

    def faults(self) -> list[str]:
        """What would give wrong results or a broken capture, and what was compiled too late, each in a sentence."""
        self.double.check()
        num_late = self.double.compiles - self.num_before - self.num_of_mints
        late = self.double.compiled[-num_late:] if num_late else ()
        return [*self.double.violations, *(f"compiled outside of a mint: {key}" for key in late)]

    @contextmanager
    def counting_mints(self) -> Iterator[None]:
        """In it, what AiterBackend.compile compiles is compiled in time."""
        compile_class = AiterBackend.compile

        @wraps(compile_class)
        def compile_and_count(backend: AiterBackend, *call: Any) -> int:
            before = self.double.compiles
            try:
                return compile_class(backend, *call)
            finally:
                self.num_of_mints += self.double.compiles - before

        with mock.patch.object(AiterBackend, "compile", compile_and_count):
            yield


@contextmanager
def double_on(machine: Machine, device_type: str, **settings: Any) -> Iterator[Watched]:
    """The machine, with the double in the library's place. Violations are for `faults` to tell."""
    settings = {"generation": machine.generation, "num_cu": NUM_CU, "on_violation": "record", **settings}
    with aiter_machine(machine.arch, device_type=device_type, **settings) as double:
        watched = Watched(double)
        with watched.counting_mints():
            yield watched


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Machine:
    return cast(Machine, request.module.MACHINE)


@pytest.fixture(scope="module")
def watched(machine: Machine) -> Iterator[Watched | None]:
    """One double for all tests of a module, which has compiled what an earlier one minted."""
    with double_on(machine, "cpu") as watched:
        yield watched


@pytest.fixture(scope="module")
def backend(watched: Watched | None) -> AiterBackend:
    """One for all tests of a module, so that each row count of a spec is run once."""
    return AiterBackend()


@pytest.fixture(autouse=True)
def _over_aiter(
    machine: Machine,
    watched: Watched | None,
    backend: AiterBackend,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[None]:
    """Worlds over the machine. Over a double, the test has to leave nothing wrong but what ON_PURPOSE says."""
    if "worlds_on_the_gpu" in request.fixturenames:
        request.getfixturevalue("worlds_on_the_gpu")  # which names another backend
    node, on_purpose = request.node, getattr(request.module, "ON_PURPOSE", {})
    wanted = on_purpose.get(node.name) or on_purpose.get(node.originalname)
    if watched is None and wanted is not None:
        pytest.skip(f"wrong on purpose ({wanted}), which an installed library does not survive")
    monkeypatch.setattr(World, "backend", backend)
    monkeypatch.setattr(World, "kind", machine.kind)
    if watched is None:
        yield
        return
    watched.start()
    yield
    faults = watched.faults()
    if wanted is None:
        assert not faults, faults
    else:
        assert faults, f"wrong on purpose, and the double does not see it: {wanted}"
        assert all(re.search(wanted, fault) for fault in faults), faults
