"""What every Device on torch promises; test_cpu_device.py and gpu/test_cuda_device.py run it, each on its `device`."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch

from planlife.errors import ConfigError, MintError


def settle(device: Any) -> None:
    """A GPU tells a moment later that a graph is gone."""
    gc.collect()
    if device.name != "cpu":
        torch.cuda.synchronize()
        time.sleep(0.02)


def drained(device: Any, queue: Any) -> list[int]:
    """The captures whose graphs are gone by now."""
    settle(device)
    gone = []
    while queue:
        gone.append(queue.popleft())
    return gone


def read_now(device: Any, flags: Any) -> list[int]:
    """What a GPU tells once it has caught up."""
    earlier = device.read_flags(flags)
    settle(device)
    return [sum(words) for words in zip(earlier, device.read_flags(flags), strict=True)]


@pytest.mark.parametrize("num_bytes", [0, 1, 513, 3 << 20])
def test_allocate_gives_exactly_the_bytes_asked_for(device: Any, num_bytes: int) -> None:
    buffer = device.allocate(num_bytes)
    assert (buffer.dtype, tuple(buffer.shape), str(buffer.device)) == (torch.uint8, (num_bytes,), device.name)
    assert buffer.untyped_storage().nbytes() == num_bytes
    assert device.free(buffer, device.current_stream()) is None


def test_a_buffer_allocated_in_inference_mode_can_be_written_outside_it(device: Any) -> None:
    with torch.inference_mode():
        buffer, flags = device.allocate(4), device.zeros_flags(1)
        buffer.fill_(1)
    buffer.fill_(2)
    flags.add_(1)
    assert buffer.tolist() == [2, 2, 2, 2]
    assert not buffer.is_inference()


@pytest.mark.parametrize("made", ["in inference mode", "outside of it", "requiring grad"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_fill_writes_a_tensor_of_any_mode_and_is_recorded(device: Any, made: str, is_recorded: bool) -> None:
    with torch.inference_mode(made == "in inference mode"):
        tensor = torch.full((5,), 7.0, device=device.name)
    if made == "requiring grad":
        tensor.requires_grad_()
    if is_recorded:
        graph = device.new_graph()
        with device.record(graph):
            device.fill(tensor[2:], 0.0)
        assert tensor.tolist() == [7.0] * 5
        device.replay(graph)
    else:
        device.fill(tensor[2:], 0.0)
    assert tensor.tolist() == [7.0, 7.0, 0.0, 0.0, 0.0]


def test_allocate_is_refused_while_recording_and_the_capture_survives(device: Any) -> None:
    graph, x = device.new_graph(), torch.zeros(1, device=device.name)
    with device.record(graph):
        with pytest.raises(MintError, match="4096 bytes were asked for while recording capture"):
            device.allocate(4096)
        x.add_(1)
    device.replay(graph)
    assert x.tolist() == [1]
    assert device.allocate(4096).numel() == 4096


def test_a_right_length_tensor_gives_rows_address_and_version(device: Any) -> None:
    lens = torch.tensor([3, 0, 5], dtype=torch.int32, device=device.name)
    assert device.inspect_lens(lens) == (3, lens.data_ptr(), lens._version)
    version = lens._version
    lens.add_(1)
    assert device.inspect_lens(lens)[2] == version + 1
    assert device.inspect_lens(lens[1:]) == (2, lens.data_ptr() + 4, lens._version)
    assert device.inspect_lens(torch.empty(0, dtype=torch.int32, device=device.name))[0] == 0
    assert device.inspect_lens(torch.zeros(8, dtype=torch.int32, device=device.name)[::8])[0] == 1


def test_an_inference_tensor_has_no_version(device: Any) -> None:
    with torch.inference_mode():
        lens = torch.zeros(2, dtype=torch.int32, device=device.name)
        assert device.inspect_lens(lens) == (2, lens.data_ptr(), None)
    assert device.inspect_lens(lens) == (2, lens.data_ptr(), None)


def test_dtypes_are_found_by_name(device: Any) -> None:
    assert device.dtype("int32") is torch.int32
    assert device.dtype("float8_e4m3fn") is torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="'nn'"):
        device.dtype("nn")


def test_a_watched_capture_arrives_in_the_queue_when_its_graph_goes(device: Any) -> None:
    queue = device.release_queue()
    ids = []
    graphs = [device.new_graph() for _ in range(3)]
    for graph in graphs:
        with device.record(graph, pool=None, capture_error_mode="thread_local"):
            ids.append(device.watch_capture(queue, None))
            assert ids[-1] == device.capture_id()
    assert device.capture_id() == 0
    assert drained(device, queue) == []
    device.reset(graphs[1])
    assert drained(device, queue) == [ids[1]]
    del graph, graphs
    assert sorted(drained(device, queue)) == [ids[0], ids[2]]
    with pytest.raises(IndexError):
        queue.popleft()


def test_a_watched_capture_that_fails_arrives_in_the_queue_at_once(device: Any) -> None:
    queue, graph = device.release_queue(), device.new_graph()
    with pytest.raises(ZeroDivisionError), device.record(graph):
        capture_id = device.watch_capture(queue, None)
        raise ZeroDivisionError
    assert queue and queue.popleft() == capture_id


def test_what_a_capture_must_keep_lives_until_its_graph_goes(device: Any) -> None:
    class Pinned:
        pass

    queue, graph, pinned = device.release_queue(), device.new_graph(), Pinned()
    alive = weakref.ref(pinned)
    with device.record(graph):
        device.watch_capture(queue, pinned)
    del pinned
    assert drained(device, queue) == []
    assert alive() is not None
    device.reset(graph)
    assert len(drained(device, queue)) == 1
    assert alive() is None


def test_a_capture_id_is_unique_and_seen_while_recording_only(device: Any) -> None:
    ids = set()
    for _ in range(3):
        graph = device.new_graph()
        assert device.capture_of(graph) == 0
        with device.record(graph):
            ids.add(device.capture_id())
        assert device.capture_id() == 0
        assert device.capture_of(graph) in (None, max(ids))
        device.reset(graph)
        assert device.capture_of(graph) == 0
    assert len(ids) == 3 and 0 not in ids


def test_watching_needs_a_capture(device: Any) -> None:
    with pytest.raises(RuntimeError, match="needs a capture"):
        device.watch_capture(device.release_queue(), None)


def test_flags_are_read_and_zeroed_also_while_recording(device: Any) -> None:
    flags = device.zeros_flags(2)
    assert (flags.dtype, flags.tolist()) == (torch.int64, [0, 0])
    graph = device.new_graph()
    with device.record(graph):
        flags[1].add_(3)
        assert list(device.read_flags(flags)) == [0, 0]
    for _ in range(2):
        device.replay(graph)
        assert read_now(device, flags) == [0, 3]
        assert read_now(device, flags) == [0, 0]
