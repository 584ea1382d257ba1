"""The fakes refuse what a device refuses: a test that passes on them means something."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from planlife.device import block_bytes
from planlife.errors import ConfigError, MintError
from planlife.planner import plan_tables
from planlife.spec import PlanSpec
from planlife.testing import FakeBackend, FakeDevice, FakeTensor

SPEC = PlanSpec(4, 2, 16, 16, max_context_tokens=1000)


class World:
    """A table set of 4 rows, its arena, lengths and an output, on a device of their own."""

    def __init__(self, spec: PlanSpec = SPEC) -> None:
        self.device, self.backend = FakeDevice(), FakeBackend()
        num_cu = self.device.num_compute_units
        self.table_buffer = self.device.allocate(self.backend.table_bytes(spec, 4, num_cu))
        self.arena = self.device.allocate(self.backend.scratch_bytes(spec, 4, num_cu))
        self.plan = self.backend.make_tables(spec, 4, num_cu, self.table_buffer)
        self.lens = FakeTensor(3, values=[300, 0, 17])
        self.output = FakeTensor((4 * spec.query_length, 4, 16), "bfloat16")

    def refresh(self) -> None:
        self.backend.refresh(self.plan, self.lens, len(self.lens))

    def decode(self) -> None:
        nothing: tuple[Any, ...] = (None,) * 4  # scales, sinks and lse
        self.backend.decode(self.plan, self.arena, self.output, self.output, None, None, None, 1.0, *nothing)


def test_a_decode_shows_the_lengths_in_its_tables():
    world = World()
    world.refresh()
    world.decode()
    assert world.output.values == [300, 0, 17, 0]
    world.lens.write([5, 6, 7])
    world.decode()
    assert world.output.values == [300, 0, 17, 0]
    world.refresh()
    world.decode()
    assert world.output.values == [5, 6, 7, 0]


def test_the_tables_are_those_of_the_host_planner():
    world = World()
    world.lens.write([-1, 1001, 17])
    world.refresh()
    assert (world.plan.work_info, world.plan.reduce_info) == plan_tables(
        [0, 1001, 17, 0], num_kv_heads=2, num_cu=8, max_context_tokens=1000
    )
    world.backend.refresh(world.plan, None, 4)
    assert (world.plan.work_info, world.plan.reduce_info) == plan_tables([0, 0, 0, 0], num_kv_heads=2, num_cu=8)


def test_tables_that_were_never_refreshed_cannot_be_decoded():
    with pytest.raises(AssertionError, match="never written"):
        World().decode()


def test_each_row_shows_for_all_its_query_tokens():
    world = World(PlanSpec(4, 2, 16, 16, max_context_tokens=1000, query_length=2))
    world.refresh()
    world.decode()
    assert world.output.values == [300, 300, 0, 0, 17, 17, 0, 0]


def test_recording_runs_nothing_and_a_replay_reads_what_is_there_by_then():
    world = World()
    graph = world.device.new_graph()
    with world.device.record(graph):
        world.refresh()
        world.decode()
    assert world.output.values == [0, 0, 0, 0]
    assert world.device.executed == []
    world.lens.write([1, 2, 3])
    world.device.replay(graph)
    assert world.output.values == [1, 2, 3, 0]
    assert world.device.executed == ["refresh", "decode"]


def test_a_replay_that_needs_a_freed_buffer_raises():
    world = World()
    graph = world.device.new_graph()
    with world.device.record(graph):
        world.refresh()
    world.device.replay(graph)
    world.device.free(world.table_buffer, 0)
    with pytest.raises(AssertionError, match="use after free"):
        world.device.replay(graph)
    with pytest.raises(AssertionError, match="use after free"):
        world.refresh()


def test_a_replay_that_needs_a_collected_length_tensor_raises():
    world = World()
    graph = world.device.new_graph()
    base = world.lens
    world.lens = base[:2]
    with world.device.record(graph):
        world.refresh()
    world.lens = None
    world.device.replay(graph)  # the view is gone, its memory is not
    del base
    gc.collect()
    with pytest.raises(AssertionError, match="collected"):
        world.device.replay(graph)


def test_nothing_is_allocated_or_compiled_while_recording():
    device = FakeDevice()
    with device.record(device.new_graph()):
        with pytest.raises(MintError):
            device.allocate(1)
        with pytest.raises(AssertionError, match="compile while recording"):
            FakeBackend().compile(SPEC, 4, device)
    device.allocate(1)


def test_bytes_are_counted_in_allocator_blocks():
    device = FakeDevice()
    small, large = device.allocate(1), device.allocate(3 << 20)
    assert device.live_bytes == block_bytes(1) + block_bytes(3 << 20) == 512 + (4 << 20)
    device.free(large, 0)
    device.free(small, 0)
    assert (device.live_bytes, device.high_water_bytes) == (0, 512 + (4 << 20))
    assert [event for event, _, _ in device.log] == ["allocate", "allocate", "free", "free"]
    with pytest.raises(AssertionError, match="use after free"):
        device.free(small, 0)


def test_the_chosen_allocation_fails_and_no_other():
    device = FakeDevice()
    device.fail_at = 2
    device.allocate(1)
    with pytest.raises(MemoryError):
        device.allocate(1)
    device.allocate(1)
    assert device.live_bytes == 1024


@pytest.mark.parametrize("end", ["reset", "collected"])
def test_a_watched_capture_is_reported_once_when_its_graph_ends(end):
    device, queue = FakeDevice(), FakeDevice().release_queue()
    graph = device.new_graph()
    with device.record(graph):
        capture_id = device.watch_capture(queue, None)
        assert capture_id == device.capture_id() > 0
    assert (list(queue), device.capture_id()) == ([], 0)
    if end == "reset":
        device.reset(graph)
        assert list(queue) == [capture_id]
        with pytest.raises(RuntimeError, match="no capture"):
            device.replay(graph)
    del graph
    gc.collect()
    assert list(queue) == [capture_id]


def test_a_failed_capture_is_reported_at_once_and_leaves_no_graph():
    world = World()
    graph, queue = world.device.new_graph(), world.device.release_queue()

    def failing_body() -> None:
        world.refresh()
        world.device.watch_capture(queue, None)
        raise ValueError("body")

    with pytest.raises(ValueError, match="body"), world.device.record(graph):
        failing_body()
    assert len(queue) == 1
    assert (graph.launches, world.device.capture_id()) == ([], 0)
    with world.device.record(graph):
        world.refresh()


def test_while_replays_are_in_flight_releases_wait():
    device = FakeDevice()
    queue, graph = device.release_queue(), device.new_graph()
    with device.record(graph):
        capture_id = device.watch_capture(queue, None)
    with device.busy():
        device.reset(graph)
        assert not queue
    assert list(queue) == [capture_id]


def test_a_graph_that_holds_a_capture_is_reset_before_the_next():
    device = FakeDevice()
    graph = device.new_graph()
    with device.record(graph), pytest.raises(RuntimeError, match="records already"), device.record(device.new_graph()):
        pass
    with pytest.raises(RuntimeError, match="reset it first"), device.record(graph):
        pass


def test_writes_raise_the_version_of_all_views_and_slices_share_memory():
    lens = FakeTensor(4, values=[1, 2, 3, 4])
    half = lens[2:]
    assert half.data_ptr() == lens.data_ptr() + 8
    half.write([7, 8])
    assert lens.values == [1, 2, 7, 8]
    assert lens._version == half._version == 1
    with pytest.raises(RuntimeError):
        _ = FakeTensor(1, inference=True)._version


@pytest.mark.parametrize(
    ("lens", "named"),
    [
        ([1, 2], "list"),
        (FakeTensor(2, "int64"), "dtype is int64, wanted int32"),
        (FakeTensor(2, device="cpu"), "device is cpu, wanted fake"),
        (FakeTensor((2, 2)), "number of axes is 2, wanted 1"),
        (FakeTensor(2, strides=(2,)), "contiguity is False"),
        (FakeTensor(2, requires_grad=True), "requires_grad is True"),
    ],
)
def test_wrong_lengths_are_refused(lens, named):
    with pytest.raises(ConfigError, match=named):
        FakeDevice().inspect_lens(lens)


def test_right_lengths_tell_rows_address_and_version():
    lens = FakeTensor(5)
    lens.write([0] * 5)
    assert FakeDevice().inspect_lens(lens) == (5, lens.data_ptr(), 1)
    assert FakeDevice().inspect_lens(FakeTensor(0, inference=True))[2] is None


def test_an_injected_fault_hits_the_chosen_call_only():
    world = World()
    world.backend.inject(2, method="refresh", error=OSError("chosen"))
    world.refresh()
    with pytest.raises(OSError, match="chosen"):
        world.refresh()
    world.refresh()
    world.backend.inject()
    with pytest.raises(RuntimeError, match="injected"):
        world.decode()
    world.decode()
    assert (world.backend.calls["refresh"], world.backend.calls["decode"]) == (3, 2)


def test_a_row_limit_and_refusals_are_settings():
    backend = FakeBackend(max_plan_rows=4, spec_reasons=["a", "b"], step_reasons=["c"])
    assert (list(backend.refuse_spec(SPEC, None)), list(backend.refuse_step(SPEC, None))) == (["a", "b"], ["c"])
    with pytest.raises(AssertionError, match="limit of 4"):
        compile_relaxed(backend, 5)
    assert compile_relaxed(backend, 4) == 1
    assert backend.compiled == [(SPEC, 4)]


def compile_relaxed(backend: FakeBackend, rows: int) -> int:
    device = FakeDevice()
    with device.relaxed():
        return backend.compile(SPEC, rows, device)


def test_a_compile_that_could_kill_another_threads_capture_raises():
    device, backend = FakeDevice(), FakeBackend()
    with device.relaxed():
        with device.relaxed():
            pass
        assert backend.compile(SPEC, 4, device) == 1
        with ThreadPoolExecutor(1) as other:  # relaxed is a thread, not the device
            refused = other.submit(backend.compile, SPEC, 4, device).exception()
    with pytest.raises(AssertionError, match=r"compile outside Device.relaxed\(\)"):
        backend.compile(SPEC, 4, device)
    assert "compile outside Device.relaxed()" in str(refused)


@pytest.mark.parametrize(("lens", "flags"), [([300, 0, 17], [0, 0]), ([301, 0, 17], [1, 0]), ([300, 0, 1001], [1, 1])])
def test_the_sanitizer_counts_stale_and_clamped(lens, flags):
    world = World()
    world.refresh()
    words = world.device.zeros_flags(2)
    world.lens.write(lens)
    world.backend.sanitize(world.plan, world.lens, 3, words, 1000)
    assert world.device.read_flags(words) == flags
    assert world.device.read_flags(words) == [0, 0]
