"""The reference decode against answers that need no kernel."""

from __future__ import annotations

import math

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


def test_keys_past_the_bound_or_the_table_are_cut_and_the_edges_are_not():
    def seen(length: int, **options) -> list[float]:
        return pytest.approx(one_row(length, torch.zeros(3, PAGE, 1, DIM), query_length=3, **options).tolist())

    assert seen(9) == [4.0, 4.5, 5.0]
    assert seen(9, max_context_tokens=8) == [4.0, 4.5, 4.5]
    assert seen(9, max_context_tokens=8, sliding_window=2) == [6.5, 7.5, 8.0]
    for longest in (10, 2**31 - 1):
        assert seen(longest, max_context_tokens=8) == [4.5] * 3
        assert seen(longest, max_context_tokens=7, sliding_window=1) == [0.0] * 3
    for bound in (None, 1000):
        assert seen(2**31 - 1, max_context_tokens=bound) == [6.5] * 3


def test_the_lse_is_the_log_of_what_the_weights_are_divided_by():
    keys = torch.zeros(3, PAGE, 1, DIM)
    keys[1, 1] = 0.5  # token 5: a logit of 1 for a query of ones
    for dtype in (torch.float64, torch.float32):
        lse = torch.full((2, 2), torch.nan, dtype=dtype)
        one_row(6, keys, query_length=2, lse=lse)
        wanted = torch.tensor([5.0, 5.0 + math.e]).log()[:, None].expand(-1, 2).to(dtype)
        torch.testing.assert_close(lse, wanted)
        one_row(6, keys, query_length=2, sinks=torch.tensor([1.0, 0.0]), lse=lse)
        torch.testing.assert_close(lse[1], torch.tensor([5 + 2 * math.e, 6 + math.e], dtype=dtype).log())


def test_the_lse_of_what_sees_nothing_is_minus_infinity_whatever_the_sinks_are():
    lse = torch.full((3, 2), torch.nan)
    one_row(1, torch.zeros(3, PAGE, 1, DIM), query_length=3, sinks=torch.tensor([2.0, 3.0]), lse=lse)
    assert lse[:2].tolist() == [[-math.inf] * 2] * 2
    assert lse[2].isfinite().all()
    one_row(0, torch.zeros(3, PAGE, 1, DIM), query_length=3, lse=lse)
    assert (lse == -math.inf).all()


def test_both_layouts_are_the_same_cache():
    torch.manual_seed(0)
    keys, values, query = torch.randn(3, PAGE, 2, DIM), torch.randn(3, PAGE, 2, DIM), torch.randn(1, 4, DIM)
    rest = (torch.tensor([[2, 1, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32), 0.5)
    nhd = reference_decode(query, keys, values, *rest)
    hnd = reference_decode(query, keys.transpose(1, 2), values.transpose(1, 2), *rest, kv_layout="hnd")
    assert torch.equal(nhd, hnd)
    with pytest.raises(ValueError, match="must be 'nhd', 'hnd' or 'packed', got 'dhn'"):
        reference_decode(query, keys, values, *rest, kv_layout="dhn")
