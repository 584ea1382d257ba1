"""The scenarios of emulated graphs on real CUDA graphs: the emulation promises what the device does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from planlife.testing.graph_scenarios import REFUSED, SCENARIOS, Scenario

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@contextmanager
def _record(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, **options):
            yield graph
    except BaseException:
        # An invalidated capture leaves torch on the stream, and its allocator in the pool, of the capture.
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenario_holds_for_cuda_graphs(scenario: Scenario, mode: str) -> None:
    with MODES[mode]():
        scenario(torch.cuda.CUDAGraph, _record, "cuda")


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_emulation_refuses_cuda_refuses_too(name: str) -> None:
    x, total = torch.tensor([1.0, 0.0, 3.0], device="cuda"), torch.zeros(3, device="cuda")
    REFUSED[name](x.clone())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), _record(graph):
        REFUSED[name](x)
    graph = torch.cuda.CUDAGraph()
    with _record(graph):
        total.add_(1)
    graph.replay()
    assert total.tolist() == [1, 1, 1]
