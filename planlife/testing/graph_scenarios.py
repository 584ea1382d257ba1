"""What holds for CUDA graphs and emulated ones alike, as functions to run on either.

A scenario takes (new_graph, record, device): what makes a graph, what records in
`with record(graph, **options):`, and where the tensors live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

NewGraph = Callable[[], Any]
Record = Callable[..., AbstractContextManager[Any]]
Scenario = Callable[[NewGraph, Record, str], None]


def a_capture_runs_nothing(new_graph: NewGraph, record: Record, device: str) -> None:
    total = torch.zeros(3, device=device)
    graph = new_graph()
    with record(graph):
        total.add_(1)
        total[1:] = 7
    assert total.tolist() == [0, 0, 0]
    graph.replay()
    assert total.tolist() == [1, 7, 7]
    graph.replay()
    assert total.tolist() == [2, 7, 7]


def a_replay_computes_from_what_its_inputs_hold_now(new_graph: NewGraph, record: Record, device: str) -> None:
    first, second = torch.randn(4, 8, device=device), torch.randn(8, 2, device=device)
    x = torch.randn(3, 4, device=device)

    def model() -> Tensor:
        return torch.relu(x @ first).matmul(second).softmax(-1)

    model()
    graph = new_graph()
    with record(graph):
        y = model()
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, model())


def results_keep_their_address_and_each_replay_overwrites_them(
    new_graph: NewGraph, record: Record, device: str
) -> None:
    x = torch.ones(3, device=device)
    graph = new_graph()
    with record(graph):
        y = x + 1
    address = y.data_ptr()
    graph.replay()
    kept = y.clone()
    x.fill_(4)
    graph.replay()
    assert y.data_ptr() == address
    assert kept.tolist() == [2, 2, 2]
    assert y.tolist() == [5, 5, 5]


def results_outlive_a_reset_as_ordinary_tensors(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.ones(3, device=device)
    graph = new_graph()
    with record(graph):
        y = x + 1
    graph.replay()
    graph.reset()
    del graph
    assert y.tolist() == [2, 2, 2]
    y.add_(1)
    assert (y + x).tolist() == [4, 4, 4]


def python_values_are_frozen(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.ones(4, device=device)
    settings: dict[str, Any] = {"scale": 2.0, "shape": [2, 2]}
    graph = new_graph()
    with record(graph):
        y = (x * settings["scale"]).new_full(settings["shape"], settings["scale"])
        z = x * settings["scale"]
    settings["scale"] = 100.0
    settings["shape"].append(5)
    graph.replay()
    assert y.tolist() == [[2, 2], [2, 2]]
    assert z.tolist() == [2, 2, 2, 2]


def factories_are_kernels_too(new_graph: NewGraph, record: Record, device: str) -> None:
    graph = new_graph()
    with record(graph):
        tensors = [
            torch.zeros(2, device=device),
            torch.ones(2, device=device),
            torch.full((2,), 3.0, device=device),
            torch.arange(4, 6, device=device),
            torch.zeros_like(torch.empty(2, device=device)),
        ]
    for tensor in tensors:
        tensor.fill_(99)
    graph.replay()
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [1, 1], [3, 3], [4, 5], [0, 0]]


def a_write_through_a_view_reaches_its_base(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.zeros(2, 3, device=device)

    def body() -> tuple[Tensor, Tensor]:
        x.view(6)[1:3].fill_(1)
        x.t().select(0, 2).add_(5)
        x.reshape(3, 2)[2, 0].mul_(10)  # reshape of a contiguous tensor aliases ...
        x.t().reshape(6).fill_(-1)  # ... and of a transposed one copies
        y = x.contiguous().flatten().unsqueeze(0).expand(2, 6)
        x[0, 0].fill_(8)
        y_copy = y.contiguous()
        return y, y_copy

    graph = new_graph()
    with record(graph):
        y, y_copy = body()
    assert x.flatten().tolist() == [0] * 6
    graph.replay()
    found, results = x.clone(), (y.clone(), y_copy.clone())
    x.zero_()
    expected = body()
    assert torch.equal(found, x)
    assert torch.equal(results[0], expected[0])
    assert torch.equal(results[1], expected[1])
    assert y.data_ptr() == x.data_ptr()


def ops_with_out_arguments_and_many_results(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.tensor([3.0, 1.0, 2.0, 0.0], device=device)
    total = torch.zeros(4, device=device)
    index = torch.tensor([3, 0], device=device)

    def body() -> list[Tensor]:
        torch.add(x, 1, out=total)
        values, places = x.topk(2)
        largest = torch.max(x.view(2, 2), dim=1)
        chunks = torch.split(x, 2)
        total.index_add_(0, index, chunks[1])
        total[index] = values
        low, high = torch.aminmax(x)
        stacked = torch.stack([low, high, *x.unbind()])
        return [values, places, largest.values, largest.indices, *chunks, stacked]

    graph = new_graph()
    with record(graph):
        results = body()
    x.copy_(torch.tensor([0.0, 4.0, 1.0, 9.0], device=device))
    graph.replay()
    found = [result.clone() for result in results]
    found_total = total.clone()
    for one, other in zip(found, body(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found_total, total)


def masks_work_where_no_shape_depends_on_them(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.tensor([1.0, 5.0, 3.0], device=device)
    repeats = torch.tensor([1, 0, 2], device=device)
    graph = new_graph()
    with record(graph):
        y = torch.where(x > 2, x, torch.zeros_like(x)).masked_fill_(x > 4, -1)
        z = x.clone()
        z[z > 2] = 0.0
        repeated = torch.repeat_interleave(x, repeats, output_size=3)
        twice = x.repeat_interleave(2)
    x.copy_(torch.tensor([6.0, 2.0, 4.0], device=device))
    graph.replay()
    assert y.tolist() == [-1, 0, 4]
    assert z.tolist() == [0, 2, 0]
    assert repeated.tolist() == [6, 4, 4]
    assert twice.tolist() == [6, 6, 2, 2, 4, 4]


def an_uninitialised_block_holds_what_the_last_replay_left(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.ones(3, device=device)
    graph = new_graph()
    with record(graph):
        block = torch.empty(3, device=device)
        before = block + 0
        block.copy_(x)
    graph.replay()
    x.fill_(2)
    graph.replay()
    assert before.tolist() == [1, 1, 1]
    assert block.tolist() == [2, 2, 2]


def random_numbers_are_drawn_anew_by_each_replay(new_graph: NewGraph, record: Record, device: str) -> None:
    graph = new_graph()
    with record(graph):
        x = torch.rand(1000, device=device)
    graph.replay()
    first = x.clone()
    graph.replay()
    assert not torch.equal(first, x)
    assert 0.4 < float(x.mean()) < 0.6


def a_replay_bumps_no_version(new_graph: NewGraph, record: Record, device: str) -> None:
    if torch.is_inference_mode_enabled():
        return  # inference tensors have no version
    x = torch.zeros(3, device=device)
    version = x._version
    graph = new_graph()
    with record(graph):
        x.add_(1)
        x[1:].view(1, 2).add_(1)
    assert x._version == version + 2, "recording an in-place op bumps the version, through a view too"
    graph.replay()
    assert x._version == version + 2
    assert x.tolist() == [1, 2, 2]


def a_graph_may_feed_another(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.arange(4, device=device)
    table = torch.tensor([10, 20, 30, 40], device=device)
    first, second = new_graph(), new_graph()
    with record(first):
        index = 3 - x
    with record(second):  # nothing has written the index yet
        y = table[index]
    first.replay()
    second.replay()
    assert y.tolist() == [40, 30, 20, 10]
    x.fill_(2)
    second.replay()
    assert y.tolist() == [40, 30, 20, 10]
    first.replay()
    second.replay()
    assert y.tolist() == [20, 20, 20, 20]


def an_empty_or_reset_graph_does_not_replay(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.zeros(1, device=device)
    graph = new_graph()
    _expect_refusal(graph.replay)
    with record(graph):
        x.add_(1)
    graph.replay()
    graph.reset()
    _expect_refusal(graph.replay)
    assert x.tolist() == [1]


def a_graph_owns_one_capture_until_it_is_reset(new_graph: NewGraph, record: Record, device: str) -> None:
    x = torch.zeros(1, device=device)
    graph = new_graph()
    with record(graph):
        x.add_(1)

    def record_over() -> None:
        with record(graph):
            x.add_(100)

    _expect_refusal(record_over)
    x.zero_()
    graph.replay()
    assert x.tolist() == [1]
    graph.reset()
    with record(graph):
        x.add_(10)
    graph.replay()
    assert x.tolist() == [11]


def what_other_threads_do_is_neither_recorded_nor_disturbed(new_graph: NewGraph, record: Record, device: str) -> None:
    x, other = torch.zeros(3, device=device), torch.zeros(3, device=device)
    inference = torch.is_inference_mode_enabled()
    seen: list[list[float]] = []

    def work() -> None:
        with torch.inference_mode(inference):
            other.add_(1)
            seen.append((other * 2).tolist())

    graph = new_graph()
    with record(graph, capture_error_mode="thread_local"):
        x.add_(1)
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        x.add_(1)
    assert seen == [[2, 2, 2]]
    graph.replay()
    assert x.tolist() == [2, 2, 2]
    assert other.tolist() == [1, 1, 1]


def _expect_refusal(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError:
        return
    raise AssertionError("expected a RuntimeError")


SCENARIOS: tuple[Scenario, ...] = (
    a_capture_runs_nothing,
    a_replay_computes_from_what_its_inputs_hold_now,
    results_keep_their_address_and_each_replay_overwrites_them,
    results_outlive_a_reset_as_ordinary_tensors,
    python_values_are_frozen,
    factories_are_kernels_too,
    a_write_through_a_view_reaches_its_base,
    ops_with_out_arguments_and_many_results,
    masks_work_where_no_shape_depends_on_them,
    an_uninitialised_block_holds_what_the_last_replay_left,
    random_numbers_are_drawn_anew_by_each_replay,
    a_replay_bumps_no_version,
    a_graph_may_feed_another,
    an_empty_or_reset_graph_does_not_replay,
    a_graph_owns_one_capture_until_it_is_reset,
    what_other_threads_do_is_neither_recorded_nor_disturbed,
)

#: What may not be done to a float tensor of three elements while recording.
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0]),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "complex": lambda x: complex(x[0]),
    "index": lambda x: [1, 2, 3][torch.zeros_like(x, dtype=torch.int64)[0]],
    "format": lambda x: f"{x[0]:.1f}",
    "repr": lambda x: repr(x),
    "contains": lambda x: 1.0 in x,
    "is_nonzero": lambda x: x[0].is_nonzero(),
    "equal": lambda x: torch.equal(x, x + 0),
    "allclose": lambda x: torch.allclose(x, x),
    "slice bound": lambda x: x[: x.argmax()],
    "nonzero": lambda x: x.nonzero(),
    "argwhere": lambda x: torch.argwhere(x),
    "where(condition)": lambda x: torch.where(x > 1),
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "mask index": lambda x: x[x > 1],
    "byte mask index": lambda x: x[(x > 1).byte()],
    "mask assignment of a tensor": lambda x: x.__setitem__(x > 0, x[:2] + 1),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
}

#: A CUDA tensor refuses these at any time; on a CPU tensor they are host reads.
REFUSED_ON_CPU: dict[str, Callable[[Tensor], object]] = {
    "numpy": lambda x: x.numpy(),
    "array": lambda x: x.__array__(),  # type: ignore[no-untyped-call]
}
