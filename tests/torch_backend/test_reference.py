"""The reference decode against answers that need no kernel."""

from __future__ import annotations

import pytest
import torch

from planlife.testing import reference_decode

PAGE, DIM = 4, 2


def one_row(length: int, keys: torch.Tensor, **options) -> torch.Tensor:
    """Values 1, 2, 3, ... in pages 2, 1, 0 of one KV head; two query heads of ones."""
    values = torch.arange(1.0, 13.0).view(3, PAGE, 1, 1).expand(-1, -1, -1, DIM).flip(0)
    query = torch.ones(options.get("query_length", 1), 2, DIM)
    table, lens = torch.tensor([[2, 1, 0]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    return reference_decode(query, keys, values, table, lens, 1.0, **options)[:, 0, 0]


def test_equal_keys_average_the_values_of_the_context():
    assert one_row(6, torch.zeros(3, PAGE, 1, DIM)).tolist() == [3.5]


def test_one_far_larger_key_takes_all_the_weight():
    keys = torch.zeros(3, PAGE, 1, DIM)
    keys[1, 1] = 1000.0  # token 5, whose value is 6
    assert one_row(6, keys).tolist() == [6.0]
    assert one_row(5, keys).tolist() == [3.0]  # not yet in the context


def test_each_query_token_sees_itself_and_what_was_before():
    assert one_row(6, torch.zeros(3, PAGE, 1, DIM), query_length=3).tolist() == [2.5, 3.0, 3.5]


def test_a_window_keeps_only_the_newest_keys():
    assert one_row(6, torch.zeros(3, PAGE, 1, DIM), query_length=2, sliding_window=2).tolist() == [4.5, 5.5]


def test_a_context_shorter_than_the_query_leaves_its_leading_tokens_zero():
    assert one_row(1, torch.zeros(3, PAGE, 1, DIM), query_length=3).tolist() == [0.0, 0.0, 1.0]
    assert one_row(0, torch.zeros(3, PAGE, 1, DIM)).tolist() == [0.0]


def test_both_layouts_are_the_same_cache():
    torch.manual_seed(0)
    keys, values, query = torch.randn(3, PAGE, 2, DIM), torch.randn(3, PAGE, 2, DIM), torch.randn(1, 4, DIM)
    rest = (torch.tensor([[2, 1, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32), 0.5)
    nhd = reference_decode(query, keys, values, *rest)
    hnd = reference_decode(query, keys.transpose(1, 2), values.transpose(1, 2), *rest, kv_layout="hnd")
    assert torch.equal(nhd, hnd)
    with pytest.raises(ValueError, match="must be 'nhd', 'hnd' or 'packed', got 'dhn'"):
        reference_decode(query, keys, values, *rest, kv_layout="dhn")
