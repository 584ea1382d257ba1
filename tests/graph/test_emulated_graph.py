"""EmulatedGraph holds what CUDA graphs promise, and refuses what they refuse."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from planlife import emulated_graph
from planlife.emulated_graph import unrecorded, watch_current_capture
from planlife.testing import EmulatedGraph, EmulatedStream, current_capture_id, current_stream, launch, record
from planlife.testing.graph_scenarios import REFUSED, REFUSED_ON_CPU, SCENARIOS, Scenario
from tests.child_process import run_python
from tests.eventually import EVENTUALLY_S

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
ALL_REFUSED = REFUSED | REFUSED_ON_CPU


@pytest.fixture(autouse=True)
def _nothing_records_afterwards() -> Iterator[None]:
    yield
    assert current_capture_id() == 0
    assert emulated_graph._num_recording == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario_of_cuda_graphs(scenario: Scenario, mode: str) -> None:
    with MODES[mode]():
        scenario(EmulatedGraph, record, "cpu")


def test_an_ordinary_tensor_may_be_viewed_in_inference_mode() -> None:
    """A buffer made before the engine entered inference mode keeps its version counter; views of it share it."""
    buffer = torch.zeros(8)
    graph = EmulatedGraph()
    with torch.inference_mode():
        with record(graph):
            buffer[:4].view(2, 2)[1].add_(1)
            for element in buffer[6:].unbind(0):
                element.add_(2)
        graph.replay()
        graph.replay()
    assert buffer.tolist() == [0, 0, 2, 2, 0, 0, 4, 4]


# What is refused.


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("mode", ["grad", "inference"])
@pytest.mark.parametrize("name", ALL_REFUSED)
def test_what_cuda_refuses_raises_in_the_body_and_leaves_the_graph_empty(name: str, mode: str) -> None:
    with MODES[mode]():
        x = torch.tensor([1.0, 0.0, 3.0])
        ALL_REFUSED[name](x.clone())  # a positive control: it works while nothing records
        graph, total, reached = EmulatedGraph(), torch.zeros(3), False
        with pytest.raises(RuntimeError, match="not possible while recording"), record(graph):
            total.add_(1)
            ALL_REFUSED[name](x)
            reached = True
        assert not reached
        assert graph.capture_id == 0
        assert total.tolist() == [0, 0, 0]
        with record(graph):
            total.add_(1)
        graph.replay()
        assert total.tolist() == [1, 1, 1]


def test_a_refusal_that_the_body_swallows_still_invalidates_the_capture() -> None:
    x, fired = torch.ones(3), []
    graph = EmulatedGraph()
    with pytest.raises(RuntimeError, match=r"invalidated and the graph is empty: Tensor\.item reads"):
        with record(graph):
            watch_current_capture(lambda: fired.append(1))
            with suppress(RuntimeError):
                x[0].item()
            with pytest.raises(RuntimeError, match="was invalidated"):
                x.add_(1)
            with pytest.raises(RuntimeError, match="was invalidated"):
                launch(print)
    assert fired == [1]
    assert (graph.capture_id, graph.num_ops) == (0, 0)
    assert x.tolist() == [1, 1, 1]


def test_captures_do_not_nest_on_one_thread() -> None:
    outer, inner, x = EmulatedGraph(), EmulatedGraph(), torch.zeros(1)
    with record(outer):
        x.add_(1)
        with pytest.raises(RuntimeError, match="do not nest"), record(inner):
            raise AssertionError("the body of a nested capture ran")
        x.add_(1)
    outer.replay()
    assert x.tolist() == [2]


def test_a_graph_is_neither_replayed_nor_reset_while_it_or_another_records() -> None:
    x, other, graph = torch.zeros(1), EmulatedGraph(), EmulatedGraph()
    with record(other):
        x.add_(1)
    with pytest.raises(RuntimeError, match="launches a graph"), record(graph):
        other.replay()
    with record(graph):
        with pytest.raises(RuntimeError, match="End the capture first"):
            graph.reset()
        with pytest.raises(RuntimeError, match="empty graph"):
            graph.replay()
        x.add_(1)
    assert x.tolist() == [0]
    graph.replay()
    assert x.tolist() == [1]


def test_a_capture_mode_that_does_not_exist_is_refused_before_anything_starts() -> None:
    graph = EmulatedGraph()
    with pytest.raises(RuntimeError, match=r"global, thread_local, relaxed, got 'sloppy'"):
        with record(graph, capture_error_mode="sloppy"):
            raise AssertionError("recorded")
    with record(graph, pool=(0, 1), stream=None, capture_error_mode="relaxed"):
        pass
    graph.replay()


def test_capture_end_belongs_to_the_graph_and_thread_that_record() -> None:
    graph, other = EmulatedGraph(), EmulatedGraph()
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="not recording into this graph"):
        other.capture_end()
    elsewhere: list[str] = []

    def end_elsewhere() -> None:
        try:
            graph.capture_end()
        except RuntimeError as error:
            elsewhere.append(str(error))

    worker = threading.Thread(target=end_elsewhere)
    worker.start()
    worker.join()
    assert elsewhere == ["this thread is not recording into this graph."]
    graph.capture_end()
    with pytest.raises(RuntimeError, match="not recording into this graph"):
        graph.capture_end()


def test_tensors_of_other_devices_and_layouts_are_not_recorded() -> None:
    on_meta, sparse = torch.zeros(1, device="meta"), torch.eye(2).to_sparse()
    with pytest.raises(RuntimeError, match=r"records strided tensors on cpu, got .* on meta"), record(EmulatedGraph()):
        on_meta.to("cpu")
    with pytest.raises(RuntimeError, match=r"got torch.sparse_coo on cpu"), record(EmulatedGraph()):
        sparse.neg()
    with pytest.raises(RuntimeError, match="wants one on vulkan"), record(EmulatedGraph()):
        torch.zeros(1, device="vulkan")


def test_ops_on_meta_tensors_launch_nothing_and_are_not_recorded() -> None:
    """A default device of the caller's makes them, as while a model's shapes are worked out."""
    on_meta = torch.zeros(1, device="meta")
    with record(EmulatedGraph()) as graph:
        found = on_meta.add_(1) + torch.zeros(1, device="meta")
    assert found.device.type == "meta" and graph.num_ops == 0


def test_an_op_whose_result_shapes_are_unknown_says_how_to_make_them_known() -> None:
    with torch.library._scoped_library("planlife_test", "DEF") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        x = torch.ones(2)
        with pytest.raises(RuntimeError, match=r"planlife_test.double.default has no meta kernel.*launch"):
            with record(EmulatedGraph()):
                torch.ops.planlife_test.double(x)
        library.impl("double", torch.empty_like, "Meta")
        graph = EmulatedGraph()
        with record(graph):
            y = torch.ops.planlife_test.double(x)
        graph.replay()
        assert y.tolist() == [2, 2]


# What a failed body leaves.


def test_a_body_that_raises_leaves_an_empty_graph_and_untouched_tensors() -> None:
    x, graph, fired = torch.zeros(3), EmulatedGraph(), []
    with pytest.raises(KeyboardInterrupt), record(graph):
        watch_current_capture(lambda: fired.append(1))
        x.add_(1)
        raise KeyboardInterrupt
    assert fired == [1]
    assert (graph.capture_id, graph.num_ops) == (0, 0)
    assert x.tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match="empty graph"):
        graph.replay()
    with record(graph):
        x.add_(2)
    graph.replay()
    assert x.tolist() == [2, 2, 2]


# Who keeps what alive.


def test_results_are_full_of_ones_bits_until_the_first_replay() -> None:
    x, graph = torch.arange(3), EmulatedGraph()
    with record(graph):
        y, z, uninitialised = x + 1, x.float(), torch.empty(2, dtype=torch.int32)
    assert y.tolist() == [-1, -1, -1]
    assert z.isnan().all()
    assert uninitialised.tolist() == [-1, -1]
    graph.replay()
    assert y.tolist() == [1, 2, 3]
    assert z.tolist() == [0, 1, 2]
    assert uninitialised.tolist() == [-1, -1]


def test_a_replay_that_needs_a_freed_storage_says_so_and_runs_nothing() -> None:
    kept, freed, graph = torch.zeros(2), torch.ones(2), EmulatedGraph()
    with record(graph):
        kept.add_(1)
        kept.mul_(freed)
    graph.replay()
    assert kept.tolist() == [1, 1]
    del freed
    with pytest.raises(RuntimeError, match=r"replay of aten.mul_.Tensor needs .* 8 bytes .* was freed"):
        graph.replay()
    assert kept.tolist() == [1, 1]


def test_a_view_that_is_kept_keeps_the_storage() -> None:
    base, graph = torch.arange(4), EmulatedGraph()
    with record(graph):
        y = base[:2] + 1
    view = base[3:]
    del base
    graph.replay()
    assert y.tolist() == [1, 2]
    del view
    with pytest.raises(RuntimeError, match="was freed"):
        graph.replay()


def test_a_replay_that_needs_a_moved_storage_says_so() -> None:
    x, graph = torch.ones(2), EmulatedGraph()
    with record(graph):
        y = x + 1
    graph.replay()
    x.resize_(1 << 16)
    with pytest.raises(RuntimeError, match=r"resized or moved"):
        graph.replay()
    assert y.tolist() == [2, 2]


def test_storages_born_in_a_capture_live_as_long_as_the_graph() -> None:
    x, graph = torch.ones(3), EmulatedGraph()
    with record(graph):
        between = x + 1
        y = between * 2
    storage = StorageWeakRef(between.untyped_storage())
    del between
    graph.replay()
    assert y.tolist() == [4, 4, 4]
    assert not storage.expired()
    graph.reset()
    assert storage.expired()


def test_a_second_graph_does_not_keep_the_results_of_the_first() -> None:
    x, first, second = torch.ones(2), EmulatedGraph(), EmulatedGraph()
    with record(first):
        y = x + 1
    with record(second):
        z = y + 1
    del y
    first.replay()
    second.replay()
    assert z.tolist() == [3, 3]
    del first
    with pytest.raises(RuntimeError, match="was freed"):
        second.replay()


def test_a_graph_is_collected_without_a_garbage_collection() -> None:
    x, graph = torch.ones(2), EmulatedGraph()
    with record(graph):
        x.add_(1)
    alive = weakref.ref(graph)
    gc.disable()
    try:
        del graph
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_graph_is_not_duplicated(duplicate: Callable[[object], object]) -> None:
    """A copy would free the weak references to storages a second time, and replay into memory that nobody owns."""
    x, graph = torch.zeros(3), EmulatedGraph()
    with record(graph):
        x.add_(1)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(graph)
    graph.replay()
    assert x.tolist() == [1, 1, 1]


def test_graphs_are_told_apart_by_identity() -> None:
    first, second = EmulatedGraph(), EmulatedGraph()
    assert first != second
    assert len({first, second, first}) == 2


# User objects and ids.


def test_a_user_object_fires_once_when_its_graph_is_reset() -> None:
    fired: list[int] = []
    graph, x = EmulatedGraph(), torch.zeros(1)
    with record(graph):
        watch_current_capture(lambda: fired.append(1))
        watch_current_capture(lambda: fired.append(2))
        x.add_(1)
    graph.replay()
    assert fired == []
    graph.reset()
    assert fired == [1, 2]
    graph.reset()
    with record(graph):
        x.add_(1)
    del graph
    gc.collect()
    assert fired == [1, 2]


def test_a_user_object_fires_once_when_its_graph_is_collected() -> None:
    fired: list[int] = []
    graph = EmulatedGraph()
    with record(graph):
        watch_current_capture(lambda: fired.append(1))
    cycle: list[Any] = [graph]
    cycle.append(cycle)
    del graph, cycle
    gc.collect()
    assert fired == [1]


def test_a_user_object_that_raises_does_not_silence_the_others() -> None:
    told: list[str] = []

    def fails() -> None:
        raise ValueError("first")

    graph = EmulatedGraph()
    with record(graph):
        for callback in (fails, partial(told.append, "second"), fails, partial(told.append, "fourth")):
            watch_current_capture(callback)
    with pytest.raises(ValueError, match="first"):
        graph.reset()
    assert told == ["second", "fourth"]


def test_a_user_object_finds_its_graph_already_empty() -> None:
    x, graph = torch.ones(1), EmulatedGraph()
    seen: list[bool] = []
    with record(graph):
        y = x + 1
        storage = StorageWeakRef(y.untyped_storage())
        watch_current_capture(lambda: seen.append(storage.expired()))
    del y
    graph.reset()
    assert seen == [True]


def test_a_user_object_needs_a_capture() -> None:
    with pytest.raises(RuntimeError, match="needs a capture"):
        watch_current_capture(print)


def test_capture_ids_are_unique_and_seen_by_the_recording_thread_only() -> None:
    graph, seen_elsewhere = EmulatedGraph(), []
    assert current_capture_id() == graph.capture_id == 0
    with record(graph):
        first = current_capture_id()
        worker = threading.Thread(target=lambda: seen_elsewhere.append(current_capture_id()))
        worker.start()
        worker.join()
    assert first > 0
    assert seen_elsewhere == [0]
    assert graph.capture_id == first
    assert current_capture_id() == 0
    graph.reset()
    assert graph.capture_id == 0
    with record(graph):
        assert current_capture_id() > first


def test_two_threads_record_at_once_each_its_own_ops() -> None:
    x = [torch.zeros(1), torch.zeros(1)]
    graphs = [EmulatedGraph(), EmulatedGraph()]
    both_record = threading.Barrier(2, timeout=EVENTUALLY_S)

    def work(index: int) -> None:
        with record(graphs[index]):
            both_record.wait()
            for _ in range(index + 1):
                x[index].add_(1)
            both_record.wait()

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [graph.num_ops for graph in graphs] == [1, 2]
    for graph in graphs:
        graph.replay()
    assert [int(tensor) for tensor in x] == [1, 2]


# Threads that join a capture through its stream.


def _on_a_thread(work: Callable[[], object]) -> Any:
    """What `work` returns or raises on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=10)


@pytest.mark.parametrize("mode", MODES)
def test_threads_on_the_stream_of_a_capture_record_into_it(mode: str) -> None:
    stream, graph, x = EmulatedStream(), EmulatedGraph(), torch.zeros(3)
    ids, fired, results = [], [], []

    def work(index: int) -> None:
        with MODES[mode](), stream:
            ids.append(current_capture_id())
            watch_current_capture(partial(fired.append, index))
            x[index].add_(index)
            launch(torch.Tensor.add_, x[index], 10)
            results.append(x[index] * 2)
        ids.append(current_capture_id())

    with MODES[mode](), record(graph, stream=stream):
        assert current_stream() is stream
        assert stream.capture_id == current_capture_id() == graph.capture_id
        for index in (1, 2):
            _on_a_thread(partial(work, index))
        x[0].add_(7)
    assert ids == [graph.capture_id, 0] * 2
    assert x.tolist() == [0, 0, 0]
    assert graph.num_ops == 7
    graph.replay()
    assert x.tolist() == [7, 11, 12]
    assert [result.tolist() for result in results] == [22, 24]
    assert fired == []
    graph.reset()
    assert fired == [1, 2]


def test_threads_that_record_one_capture_at_the_same_time_lose_no_op() -> None:
    graph, x, num_threads, num_ops = EmulatedGraph(), torch.zeros(4, 8), 4, 50
    all_record = threading.Barrier(num_threads)

    def work(stream: EmulatedStream, index: int) -> None:
        with stream:
            all_record.wait(timeout=10)
            for _ in range(num_ops):
                x[index] = x[index] + 1

    with record(graph), ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(work, current_stream(), index) for index in range(num_threads)]:
            done.result(timeout=60)
    graph.replay()
    assert graph.num_ops == num_threads * num_ops * 2
    assert x.eq(num_ops).all()


def test_a_thread_on_a_stream_follows_what_the_stream_records() -> None:
    """As in CUDA, where a launch asks its stream: one long-lived worker serves several captures, and eager steps."""
    stream, x = EmulatedStream(), torch.zeros(1)
    graphs = [EmulatedGraph(), EmulatedGraph()]
    seen: list[int] = []

    def work() -> None:
        x.add_(1)
        seen.append(current_capture_id())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(stream.__enter__).result(timeout=10)
        for graph in graphs:
            pool.submit(work).result(timeout=10)
            with record(graph, stream=stream):
                pool.submit(work).result(timeout=10)
        pool.submit(work).result(timeout=10)
        assert pool.submit(x.item).result(timeout=10) == 3, "nothing is recorded: a host read is served"
        pool.submit(stream.__exit__).result(timeout=10)
    assert seen == [0, graphs[0].capture_id, 0, graphs[1].capture_id, 0]
    graphs[0].replay()
    assert x.tolist() == [4]


def test_what_is_on_another_stream_than_the_capture_runs_at_once() -> None:
    other, graph, x = EmulatedStream(), EmulatedGraph(), torch.zeros(1)
    with record(graph):
        with other:
            x.add_(1)
            launch(torch.Tensor.add_, x, 1)
            assert (x.item(), current_capture_id(), other.capture_id) == (2, 0, 0)
            with pytest.raises(RuntimeError, match="do not nest"), record(EmulatedGraph(), stream=other):
                raise AssertionError("the body of a nested capture ran")
            with pytest.raises(RuntimeError, match="not recording into this graph"):
                graph.capture_end()
        x.add_(1)
    assert graph.num_ops == 1
    graph.replay()
    assert x.tolist() == [3]


@pytest.mark.parametrize("name", ALL_REFUSED)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_what_cuda_refuses_on_a_thread_that_joined_invalidates_the_whole_capture(name: str) -> None:
    graph, x, fired = EmulatedGraph(), torch.tensor([1.0, 0.0, 3.0]), []

    def work(stream: EmulatedStream) -> None:
        with stream:
            watch_current_capture(partial(fired.append, 1))
            ALL_REFUSED[name](x)

    with pytest.raises(RuntimeError, match="invalidated and the graph is empty"), record(graph):
        with pytest.raises(RuntimeError, match="not possible while recording"):
            _on_a_thread(partial(work, current_stream()))
        with pytest.raises(RuntimeError, match="was invalidated"):
            x.add_(1)
    assert (graph.capture_id, graph.num_ops, fired) == (0, 0, [1])


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_thread_that_is_still_inside_when_the_capture_ends_goes_on_eagerly(ends: str) -> None:
    stream, graph, x = EmulatedStream(), EmulatedGraph(), torch.zeros(1)
    is_in, is_over = threading.Event(), threading.Event()

    def work() -> tuple[float, int]:
        with stream:
            x.add_(1)
            is_in.set()
            assert is_over.wait(timeout=10)
            with pytest.raises(RuntimeError, match="needs a capture"):
                watch_current_capture(print)
            x.add_(2)
            return x.item(), current_capture_id()

    with ThreadPoolExecutor(1) as pool:
        with suppress(KeyError), record(graph, stream=stream):
            result = pool.submit(work)
            assert is_in.wait(timeout=10)
            if ends == "badly":
                raise KeyError
        is_over.set()
        assert result.result(timeout=10) == (2, 0)
    assert graph.num_ops == (1 if ends == "well" else 0)


def test_an_op_that_is_being_recorded_when_the_capture_ends_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, graph, x = EmulatedStream(), EmulatedGraph(), torch.zeros(1)
    is_recording, order = threading.Event(), []
    check_valid = emulated_graph._Recorder._check_valid

    def slowly(recorder: Any) -> None:
        is_recording.set()
        time.sleep(0.05)
        check_valid(recorder)
        order.append("recorded")

    def work() -> None:
        with stream:
            x.add_(1)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        with record(graph, stream=stream):
            patch.setattr(emulated_graph._Recorder, "_check_valid", slowly)
            done = pool.submit(work)
            assert is_recording.wait(timeout=10)
        order.append("ended")
        done.result(timeout=10)
    assert order == ["recorded", "ended"]
    assert graph.num_ops == 1


def test_a_thread_that_records_does_not_join_another_capture_and_goes_on() -> None:
    stream, theirs, ours, x = EmulatedStream(), EmulatedGraph(), EmulatedGraph(), torch.zeros(1)

    def work() -> None:
        with record(ours):
            with pytest.raises(RuntimeError, match=f"records capture {ours.capture_id}: captures do not nest"):
                with stream:
                    raise AssertionError("joined")
            x.add_(1)

    with record(theirs, stream=stream):
        _on_a_thread(work)
    assert (ours.num_ops, theirs.num_ops) == (1, 0)


def test_a_thread_that_joined_neither_ends_the_capture_nor_opens_another() -> None:
    graph, idle, x = EmulatedGraph(), EmulatedStream(), torch.zeros(1)

    def work(stream: EmulatedStream) -> None:
        with stream:
            with pytest.raises(RuntimeError, match="not recording into this graph"):
                graph.capture_end()
            for on in (stream, idle, None):
                with pytest.raises(RuntimeError, match="do not nest"), record(EmulatedGraph(), stream=on):
                    raise AssertionError("recorded")
            with stream:
                x.add_(1)
            x.add_(1)

    with record(graph):
        _on_a_thread(partial(work, current_stream()))
        x.add_(1)
    assert graph.num_ops == 3


def test_what_a_thread_that_joined_leaves_unrecorded_runs_at_once() -> None:
    graph, x = EmulatedGraph(), torch.zeros(1)

    def work(stream: EmulatedStream) -> None:
        with stream:
            with unrecorded():
                x.add_(1)
                assert current_capture_id() == stream.capture_id > 0
            x.add_(1)

    with record(graph):
        _on_a_thread(partial(work, current_stream()))
    assert x.tolist() == [1]
    assert graph.num_ops == 1


def test_a_capture_that_is_begun_by_hand_records_on_the_current_stream() -> None:
    stream, graph, x = EmulatedStream(), EmulatedGraph(), torch.zeros(1)
    with stream:
        graph.capture_begin()
        assert stream.capture_id == graph.capture_id > 0
        x.add_(1)
        graph.capture_end()
        x.add_(1)
    graph.reset()
    graph.capture_begin()
    private = current_stream()
    assert private is not stream
    assert private.capture_id == graph.capture_id
    graph.capture_end()
    assert current_stream() is not private
    x.add_(1)
    assert x.tolist() == [2]


def test_a_capture_needs_an_emulated_stream_that_is_not_the_default_one() -> None:
    graph = EmulatedGraph()
    for stream, error, match in (
        (current_stream(), RuntimeError, "default stream cannot record"),
        (0, TypeError, "recorded on an EmulatedStream, got int"),
    ):
        with pytest.raises(error, match=match), record(graph, stream=stream):  # type: ignore[arg-type]
            raise AssertionError("recorded")
    assert graph.capture_id == 0


# What is recorded, and how it replays.


def test_a_replay_makes_no_call_into_the_code_that_was_captured() -> None:
    x, graph = torch.ones(3), EmulatedGraph()

    def model() -> torch.Tensor:
        return torch.nn.functional.layer_norm(x * 2 + 1, (3,))

    def calls_into_this_file(run: Any) -> list[str]:
        calls = []

        def profile(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename == __file__:
                calls.append(frame.f_code.co_name)

        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
        return calls

    with record(graph):
        model()
    assert calls_into_this_file(model) == ["model"]
    assert calls_into_this_file(graph.replay) == []


def test_views_cost_no_op() -> None:
    x, graph = torch.zeros(2, 3), EmulatedGraph()
    with record(graph):
        x.t().reshape(3, 2)[1:].unsqueeze(0).expand(4, 2, 2).detach().select(0, 1).add_(1)
        torch.empty(3).view(1, 3)
    assert graph.num_ops == 1


@pytest.mark.parametrize("mode", MODES)
def test_views_that_are_conjugated_or_negated_when_read_stay_so(mode: str) -> None:
    x = torch.zeros(2, dtype=torch.complex64)
    graph = EmulatedGraph()
    with MODES[mode](), record(graph):
        conjugate = x.conj()
        product, negated = conjugate * 1j, conjugate.imag + 1
    x.copy_(torch.tensor([1 + 2j, 3 - 4j]))
    graph.replay()
    assert conjugate.tolist() == [1 - 2j, 3 + 4j]
    assert product.tolist() == [2 + 1j, -4 + 3j]
    assert negated.tolist() == [-1, 5]


def test_ops_that_change_a_shape_in_place_work() -> None:
    graph, x = EmulatedGraph(), torch.arange(6.0)
    with record(graph):
        y = (x + 1).view(2, 3).clone()
        y.t_().unsqueeze_(0)
        z = y * 1
        out = torch.empty(0)
        torch.add(x, 1, out=out)
    graph.replay()
    assert z.tolist() == [[[1, 4], [2, 5], [3, 6]]]
    assert out.tolist() == [1, 2, 3, 4, 5, 6]


def test_constants_made_of_python_values_are_frozen() -> None:
    x, graph = torch.arange(4.0), EmulatedGraph()
    values = numpy.array([1.0, 2.0], dtype=numpy.float32)
    picks = [0, 2]
    with record(graph):
        from_array = torch.as_tensor(values) * 1
        from_list = torch.tensor([3.0, 4.0])
        picked = x[picks]
        from_list.add_(1)
    assert values.tolist() == [1, 2], "recording writes nothing into an array of the host"
    picks[0] = 3
    for _ in range(2):
        graph.replay()
        assert from_array.tolist() == [1, 2]
        assert from_list.tolist() == [4, 5], "a replay starts from the constant, not from what the last one left"
        assert picked.tolist() == [0, 2]


def test_a_module_with_batch_statistics_updates_them_in_replays_only() -> None:
    norm, x, graph = torch.nn.BatchNorm1d(2), torch.tensor([[1.0, 2.0], [3.0, 6.0]]), EmulatedGraph()
    with torch.no_grad(), record(graph):
        norm(x)
    assert norm.running_mean.tolist() == [0, 0]
    graph.replay()
    assert norm.running_mean.tolist() == pytest.approx([0.2, 0.4])
    assert norm.num_batches_tracked.item() == 1


def test_a_recording_draws_no_random_number_and_a_seed_makes_a_replay_repeat() -> None:
    graph, own_generator = EmulatedGraph(), torch.Generator().manual_seed(7)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    with record(graph):
        x = torch.rand(4)
        dropped = torch.nn.functional.dropout(x, 0.5)
        drawn = torch.empty(3).exponential_(generator=own_generator)
    graph.replay()
    assert torch.equal(x, expected)
    assert dropped.shape == x.shape
    assert torch.equal(drawn, torch.empty(3).exponential_(generator=torch.Generator().manual_seed(7)))


def test_an_assertion_on_values_is_checked_by_replays() -> None:
    x, graph = torch.zeros(1), EmulatedGraph()
    with record(graph):
        torch._assert_async((x > 0).all())
    with pytest.raises(RuntimeError):
        graph.replay()
    x.fill_(1)
    graph.replay()


def test_garbage_indices_fault_in_a_replay_and_not_while_recording() -> None:
    table, index, graph = torch.arange(4), torch.full((2,), 0x7F7F7F7F), EmulatedGraph()
    with record(graph):
        y = table[index]
    with pytest.raises(IndexError):
        graph.replay()
    index.fill_(3)
    graph.replay()
    assert y.tolist() == [3, 3]


def test_what_is_unrecorded_runs_at_once() -> None:
    x, other, graph = torch.zeros(2), EmulatedGraph(), EmulatedGraph()
    with record(other):
        x.add_(1)
    with record(graph):
        with unrecorded():
            x.add_(1)
            launch(torch.Tensor.add_, x, 1)
            other.replay()
            assert x.tolist() == [3, 3]
            capture_id = current_capture_id()
        x.add_(1)
    assert capture_id == graph.capture_id
    assert graph.num_ops == 1
    graph.replay()
    assert x.tolist() == [4, 4]


# Launches that the dispatcher does not see.


def _scale_rows(output: torch.Tensor, tensors: dict[str, Any], factors: list[float]) -> None:
    """A kernel on raw memory."""
    output.numpy()[:] = tensors["x"].numpy() * factors[0]


def test_a_launch_runs_at_once_when_nothing_records() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    launch(_scale_rows, y, {"x": x}, [3.0], writes=[y])
    assert y.tolist() == [3, 3]


@pytest.mark.parametrize("mode", MODES)
def test_a_recorded_launch_replays_on_changed_input_with_frozen_numbers(mode: str) -> None:
    with MODES[mode]():
        x, y, factors, graph = torch.ones(2), torch.zeros(2), [3.0], EmulatedGraph()
        with record(graph):
            launch(_scale_rows, y, {"x": x + 1}, factors, reads=[x], writes=[y])
            z = y + 1
        assert y.tolist() == [0, 0]
        factors[0] = 100.0
        x.copy_(torch.tensor([1.0, 4.0]))
    graph.replay()
    assert y.tolist() == [6, 15]
    assert z.tolist() == [7, 16]
    assert graph.num_ops == 3


@pytest.mark.parametrize("how", ["argument", "reads", "writes"])
def test_a_launch_does_not_keep_its_tensors_and_says_when_one_is_gone(how: str) -> None:
    x, graph, runs = torch.ones(2), EmulatedGraph(), []
    with record(graph):
        if how == "argument":
            launch(lambda tensor: runs.append(tensor.tolist()), x)
        else:
            launch(lambda: runs.append(1), **{how: [x]})
    graph.replay()
    assert len(runs) == 1
    del x
    with pytest.raises(RuntimeError, match=r"lambda.*was freed"):
        graph.replay()
    assert len(runs) == 1


def test_autograd_has_no_part_in_a_replay() -> None:
    x, graph, seen = torch.ones(2), EmulatedGraph(), []
    with torch.enable_grad(), record(graph):
        launch(lambda tensor: seen.append((torch.is_inference_mode_enabled(), tensor.is_inference())), x)
    graph.replay()
    assert seen == [(True, True)]


def test_importing_the_testing_package_imports_no_torch() -> None:
    code = "import sys, planlife.testing; assert 'torch' not in sys.modules; planlife.testing.EmulatedGraph()"
    run = run_python("-c", code)
    assert run.returncode == 0, run.stderr
