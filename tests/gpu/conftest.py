"""Everything here needs a GPU, and is skipped in one place where there is none."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ..lifecycle import world


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False"))


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled_ahead(request: pytest.FixtureRequest) -> None:
    """Triton takes seconds for each spec: those that a module's `specs_ahead` names are compiled by all cores at once.

    Not for a module of which only a few tests run: they compile what they need.
    """
    num_tests = Counter(getattr(item, "module", None) for item in request.session.items)
    modules = [module for module, count in num_tests.items() if hasattr(module, "specs_ahead") and count > 10]
    if modules and torch.cuda.is_available():
        from .compile_ahead import compile_ahead

        compile_ahead([spec for module in modules for spec in module.specs_ahead()])


@pytest.fixture(autouse=True)
def worlds_on_the_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """With the Triton backend, where the module names no other as its BACKEND."""
    monkeypatch.setattr(world, "DEVICE", "cuda")
    monkeypatch.setattr(world.World, "backend", getattr(request.module, "BACKEND", "triton"))
