"""Everything here needs a GPU, and is skipped in one place where there is none."""

from __future__ import annotations

import pytest
import torch

from ..lifecycle import world


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that a module takes from elsewhere and names in its NOT_HERE, with the reason, are not collected."""
    here = [item for item in items if "tests/gpu/" in item.nodeid]
    without = [item for item in here if {item.name, getattr(item, "originalname", "")} & {*_not_here(item)}]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
    if not torch.cuda.is_available():
        for item in here:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False"))


def _not_here(item: pytest.Item) -> dict[str, str]:
    return getattr(getattr(item, "module", None), "NOT_HERE", {})


@pytest.fixture(autouse=True)
def _worlds_on_the_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """With the Triton backend, where the module names no other as its BACKEND."""
    monkeypatch.setattr(world, "DEVICE", "cuda")
    monkeypatch.setattr(world.World, "backend", getattr(request.module, "BACKEND", "triton"))
