"""CudaDevice keeps the contract of devices, and is the GPU that its name says."""

from __future__ import annotations

import pytest
import torch

from planlife.cuda_device import CudaDevice
from planlife.torch_device import resolve_device

from ..graph.device_contract import *  # noqa: F403


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice()


def test_names_and_units_are_those_of_the_gpu(device: CudaDevice) -> None:
    index = torch.cuda.current_device()
    assert device.name == f"cuda:{index}"
    assert device.num_compute_units == torch.cuda.get_device_properties(index).multi_processor_count
    for wish in (None, "cuda", f"cuda:{index}", torch.device("cuda", index)):
        assert resolve_device(wish).name == device.name


def test_memory_that_is_not_there_is_a_memory_error_with_the_number(device: CudaDevice) -> None:
    with pytest.raises(MemoryError, match=str(1 << 50)):
        device.allocate(1 << 50)
