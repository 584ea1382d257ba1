"""EmulatedGraph holds what CUDA graphs promise, and refuses what they refuse."""

from __future__ import annotations

import torch

from planlife.testing import EmulatedGraph, record


def test_a_replay_reads_what_its_inputs_hold_now() -> None:
    x = torch.ones(3)
    graph = EmulatedGraph()
    with record(graph):
        y = x * 2
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [10, 10, 10]
