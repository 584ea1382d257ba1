"""CpuDevice keeps the promises of planlife.device.Device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planlife.device import Device
from planlife.errors import BackendUnavailableError, ConfigError
from planlife.torch_device import CpuDevice, resolve_device
from tests.graph.device_contract import *  # noqa: F403


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice()


def test_a_cpu_device_counts_as_many_compute_units_as_it_is_told() -> None:
    assert (CpuDevice().name, CpuDevice().num_compute_units) == ("cpu", 256)
    assert CpuDevice(304).num_compute_units == 304
    for wrong in (0, -1, True, 2.0, "8"):
        with pytest.raises(ConfigError, match="num_compute_units"):
            CpuDevice(wrong)  # type: ignore[arg-type]


# Memory.


def test_memory_that_is_not_there_is_a_memory_error_with_the_number(device: CpuDevice) -> None:
    with pytest.raises(MemoryError, match=str(1 << 60)):
        device.allocate(1 << 60)
    with pytest.raises(RuntimeError, match="negative"):
        device.allocate(-1)


def test_torchs_own_out_of_memory_error_is_a_memory_error_too(device: CpuDevice, monkeypatch) -> None:
    def empty(*args, **options):
        raise torch.cuda.OutOfMemoryError("injected")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryError, match="no 4096 bytes"):
        device.allocate(4096)


# Lengths.


WRONG_LENS: dict[str, tuple[Any, str]] = {
    "int64": (torch.zeros(4, dtype=torch.int64), "dtype torch.int64, wanted torch.int32"),
    "int16": (torch.zeros(4, dtype=torch.int16), "dtype torch.int16, wanted torch.int32"),
    "float32": (torch.zeros(4), "dtype torch.float32, wanted torch.int32"),
    "bool": (torch.zeros(4, dtype=torch.bool), "dtype torch.bool, wanted torch.int32"),
    "strided": (torch.zeros(8, dtype=torch.int32)[::2], r"strides \(2,\), wanted contiguous"),
    "two-dimensional": (torch.zeros(2, 3, dtype=torch.int32), r"shape \(2, 3\), wanted \(rows,\)"),
    "a number": (torch.zeros((), dtype=torch.int32), r"shape \(\), wanted \(rows,\)"),
    "other device": (torch.zeros(4, dtype=torch.int32, device="meta"), "device meta, wanted cpu"),
    "requires_grad": (torch.zeros(4, requires_grad=True), "requires_grad True, wanted False"),
    "list": ([1, 2], "got list"),
    "None": (None, "got NoneType"),
    "all of it": (
        torch.zeros(2, 2, device="meta", requires_grad=True).t(),
        r"dtype torch.float32.*shape \(2, 2\).*device meta.*strides \(1, 2\).*requires_grad True",
    ),
}


@pytest.mark.parametrize("name", WRONG_LENS)
def test_wrong_lengths_are_refused_with_what_was_found_and_wanted(device: CpuDevice, name: str) -> None:
    lens, message = WRONG_LENS[name]
    with pytest.raises(ConfigError, match=message):
        device.inspect_lens(lens)
    graph = device.new_graph()
    with device.record(graph):
        with pytest.raises(ConfigError, match=message):
            device.inspect_lens(lens)
        assert device.inspect_lens(torch.ones(3, dtype=torch.int32))[0] == 3


def test_flags_made_while_recording_are_not_recorded(device: CpuDevice) -> None:
    with device.record(device.new_graph()):
        flags = device.zeros_flags(1)
    assert flags.tolist() == [0]


# Which device.


@pytest.mark.parametrize("wish", ["cpu", "cpu:0", torch.device("cpu")])
def test_cpu_in_any_spelling_is_the_cpu_device(wish: object) -> None:
    assert isinstance(resolve_device(wish), CpuDevice)


def test_no_wish_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(resolve_device(None), CpuDevice)


@pytest.mark.parametrize("wish", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_a_gpu_is_refused_where_there_is_none_with_the_way_out(wish: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match=r"'cuda.*sees no GPU. Pass device='cpu'"):
        resolve_device(wish)


def test_an_object_with_the_methods_of_a_device_passes_through(device: CpuDevice) -> None:
    names = [name for name in dir(Device) if not name.startswith("_")]
    own = SimpleNamespace(name="mine", num_compute_units=8, **{name: getattr(device, name) for name in names})
    assert resolve_device(own) is own
    del own.read_flags
    with pytest.raises(ConfigError, match="SimpleNamespace lacks read_flags"):
        resolve_device(own)


@pytest.mark.parametrize("wish", ["tpu", "mps", 3, object()])
def test_anything_else_is_refused(wish: object) -> None:
    with pytest.raises(ConfigError, match=r"device must be a name or an object"):
        resolve_device(wish)
