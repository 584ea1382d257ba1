"""Every test is a leak test: what it made is gone when it ends, pins and bytes included."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Iterator
from functools import wraps
from pathlib import Path

import pytest

from planlife import PlanManager, aiter_library

# Triton reads this once, when it is first imported, whoever does that: without a GPU its kernels are interpreted.
if not (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that a module takes from elsewhere and names in its NOT_HERE, with the reason, are not collected."""
    without = [item for item in items if {item.name, getattr(item, "originalname", "")} & {*_not_here(item)}]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


def _not_here(item: pytest.Item) -> dict[str, str]:
    return getattr(getattr(item, "module", None), "NOT_HERE", {})


@pytest.fixture(scope="session", autouse=True)
def cheap_collections() -> Iterator[None]:
    """What was imported stays: freezing it makes the leak checks' collections walk the test's own objects only."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # Triton reports objects that outlive the interpreter


@pytest.fixture(autouse=True)
def aiter_is_looked_for_anew() -> Iterator[None]:
    """What a test put in the library's place is not what the next one finds."""
    yield
    aiter_library.probe.cache_clear()


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Follow each manager that the test makes, and each buffer it allocates, to their ends.

    A manager that is still alive when the test ends is closed, and must then hold nothing. Buffers are followed through
    the device, not through the accountant: a byte that the ledger forgot is a leak too.
    """
    managers: list[weakref.ref[PlanManager]] = []
    buffers: list[weakref.ref[object]] = []
    real_init = PlanManager.__init__

    @wraps(real_init)
    def init(self: PlanManager, *args: object, **kwargs: object) -> None:
        real_init(self, *args, **kwargs)
        managers.append(weakref.ref(self))
        device = self._device
        if not getattr(device, "_followed_by_leak_check", False):
            real_allocate = device.allocate

            def allocate(num_bytes: int) -> object:
                buffer = real_allocate(num_bytes)
                buffers.append(weakref.ref(_identity_of(buffer)))
                return buffer

            monkeypatch.setattr(device, "allocate", allocate, raising=False)
            monkeypatch.setattr(device, "_followed_by_leak_check", True, raising=False)

    monkeypatch.setattr(PlanManager, "__init__", init)
    yield
    for ref in managers:
        manager = ref()
        if manager is not None:
            manager.close()
            report = manager.report()
            assert report.resident_bytes == 0, report
            assert report.pinned_bytes == 0, report
            assert report.num_graphs == 0, report
        del manager
    monkeypatch.undo()
    if any(ref() is not None for ref in buffers):
        gc.collect()  # a walk over all of torch: only where a cycle may still hold something
        _let_the_gpu_finish()
    alive = [ref for ref in buffers if ref() is not None]
    assert not alive, f"{len(alive)} of {len(buffers)} buffers outlive the test"


def _let_the_gpu_finish() -> None:
    """A graph's buffers go when the driver has told that the device is done with it, a moment after the graph."""
    cuda_device = sys.modules.get("planlife.cuda_device")
    if cuda_device is not None and cuda_device.torch.cuda.is_initialized():
        cuda_device.torch.cuda.synchronize()
        time.sleep(0.02)
        cuda_device.drop_what_is_gone()


def _identity_of(buffer: object) -> object:
    """A torch buffer is followed by its storage, which views of it keep alive too."""
    storage = getattr(buffer, "untyped_storage", None)
    return storage() if storage is not None else buffer
