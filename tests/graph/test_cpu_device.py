"""CpuDevice keeps the promises of planlife.device.Device."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planlife.device import Device, ReleaseQueue
from planlife.errors import BackendUnavailableError, ConfigError, MintError
from planlife.torch_device import CpuDevice, resolve_device


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


@pytest.mark.parametrize("num_bytes", [0, 1, 513, 3 << 20])
def test_allocate_gives_exactly_the_bytes_asked_for(device: CpuDevice, num_bytes: int) -> None:
    buffer = device.allocate(num_bytes)
    assert (buffer.dtype, tuple(buffer.shape), buffer.device.type) == (torch.uint8, (num_bytes,), "cpu")
    assert buffer.untyped_storage().nbytes() == num_bytes
    assert device.free(buffer, 0) is None


def test_a_buffer_allocated_in_inference_mode_can_be_written_outside_it(device: CpuDevice) -> None:
    with torch.inference_mode():
        buffer, flags = device.allocate(4), device.zeros_flags(1)
        buffer.fill_(1)
    buffer.fill_(2)
    flags.add_(1)
    assert buffer.tolist() == [2, 2, 2, 2]
    assert not buffer.is_inference()


def test_allocate_is_refused_while_recording_and_the_capture_survives(device: CpuDevice) -> None:
    graph, x = device.new_graph(), torch.zeros(1)
    with device.record(graph):
        with pytest.raises(MintError, match="4096 bytes were asked for while recording capture"):
            device.allocate(4096)
        x.add_(1)
    device.replay(graph)
    assert x.tolist() == [1]
    assert device.allocate(4096).numel() == 4096


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


def test_a_right_length_tensor_gives_rows_address_and_version(device: CpuDevice) -> None:
    lens = torch.tensor([3, 0, 5], dtype=torch.int32)
    assert device.inspect_lens(lens) == (3, lens.data_ptr(), lens._version)
    version = lens._version
    lens.add_(1)
    assert device.inspect_lens(lens)[2] == version + 1
    assert device.inspect_lens(lens[1:]) == (2, lens.data_ptr() + 4, lens._version)
    assert device.inspect_lens(torch.empty(0, dtype=torch.int32))[0] == 0
    assert device.inspect_lens(torch.zeros(8, dtype=torch.int32)[::8])[0] == 1


def test_an_inference_tensor_has_no_version(device: CpuDevice) -> None:
    with torch.inference_mode():
        lens = torch.zeros(2, dtype=torch.int32)
        assert device.inspect_lens(lens) == (2, lens.data_ptr(), None)
    assert device.inspect_lens(lens) == (2, lens.data_ptr(), None)


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


def test_dtypes_are_found_by_name(device: CpuDevice) -> None:
    assert device.dtype("int32") is torch.int32
    assert device.dtype("float8_e4m3fn") is torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="'nn'"):
        device.dtype("nn")


# Graphs.


def test_a_watched_capture_arrives_in_the_queue_when_its_graph_goes(device: CpuDevice) -> None:
    queue = ReleaseQueue()
    ids = []
    graphs = [device.new_graph() for _ in range(3)]
    for graph in graphs:
        with device.record(graph, pool=None, capture_error_mode="thread_local"):
            ids.append(device.watch_capture(queue, None))
            assert ids[-1] == device.capture_id()
    assert device.capture_id() == 0
    assert not queue
    device.reset(graphs[1])
    assert list(queue) == [ids[1]]
    del graph, graphs
    gc.collect()
    assert sorted(queue) == sorted(ids)


def test_a_watched_capture_that_fails_arrives_in_the_queue_at_once(device: CpuDevice) -> None:
    queue, graph = ReleaseQueue(), device.new_graph()
    with pytest.raises(ZeroDivisionError), device.record(graph):
        capture_id = device.watch_capture(queue, None)
        raise ZeroDivisionError
    assert list(queue) == [capture_id]


def test_what_a_capture_must_keep_lives_until_its_graph_goes(device: CpuDevice) -> None:
    class Pinned:
        pass

    queue, graph, pinned = device.release_queue(), device.new_graph(), Pinned()
    alive = weakref.ref(pinned)
    with device.record(graph):
        device.watch_capture(queue, pinned)
    del pinned
    assert alive() is not None
    device.reset(graph)
    assert alive() is None
    assert len(queue) == 1


def test_watching_needs_a_capture(device: CpuDevice) -> None:
    with pytest.raises(RuntimeError, match="needs a capture"):
        device.watch_capture(device.release_queue(), None)


def test_flags_are_read_and_zeroed_also_while_recording(device: CpuDevice) -> None:
    flags = device.zeros_flags(2)
    assert (flags.dtype, flags.tolist()) == (torch.int64, [0, 0])
    graph = device.new_graph()
    with device.record(graph):
        flags[1].add_(3)
        assert list(device.read_flags(flags)) == [0, 0]
        made_while_recording = device.zeros_flags(1)
    assert made_while_recording.tolist() == [0]
    device.replay(graph)
    assert list(device.read_flags(flags)) == [0, 3]
    assert list(device.read_flags(flags)) == [0, 0]


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
