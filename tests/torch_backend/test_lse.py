"""What the tensor decode writes as lse, against answers that need no other kernel, and where nothing was attended.

That it equals the FP64 reference for every kind of cache is in test_cache_kinds.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from planlife.testing import EmulatedGraph, record

from .test_cache_kinds import KindCall
from .test_torch_decode import fall_back

NOTHING = -math.inf


def plain(lens: tuple[int, ...], **options) -> KindCall:
    return KindCall(lens, q_dtype="float32", kv_dtype="float32", **options)


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_the_lse_of_one_token_is_its_scaled_logit(scale):
    call = plain((1, 1), num_q_heads=4, num_kv_heads=2)
    call.scale = scale
    lse = call.poisoned_lse()
    call.decode(lse=lse)
    keys = call.keys[call.tables[:, 0], 0].repeat_interleave(2, 1)  # [rows, q_heads, head_dim]
    torch.testing.assert_close(lse, (call.query * keys).sum(-1) * scale, rtol=1e-6, atol=1e-6)


def test_the_lse_of_equal_logits_is_the_log_of_their_number_per_query_token():
    """A windowed row of two query tokens, and one that begins with a token that sees nothing."""
    call = plain((700, 1, 0), query_length=2, sliding_window=600)
    call.query.zero_()
    lse = call.poisoned_lse()
    call.decode(lse=lse)
    seen = torch.tensor([599.0 + 1, 600, 0, 1, 0, 0])
    torch.testing.assert_close(lse, seen.log()[:, None].expand_as(lse), rtol=1e-6, atol=0)
    fall_back(call, lse=lse.fill_(torch.nan))
    torch.testing.assert_close(lse, seen.log()[:, None].expand_as(lse), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lens", [(0, 300, 0, 17), (0, 0, 0, 0)])
def test_where_nothing_is_attended_the_lse_is_minus_infinity(lens, sinks):
    """Empty rows, leading query tokens without a key, and rows behind the plan's."""
    call = plain((*lens, 1), query_length=3, sinks=sinks)
    lse = call.poisoned_lse()
    output = call.decode(lse=lse)
    is_nothing = (output == 0).all(-1).all(-1)
    assert is_nothing.sum() == 3 * lens.count(0) + 2
    assert (lse[is_nothing] == NOTHING).all()
    assert lse[~is_nothing].isfinite().all()


def test_rows_that_have_no_block_table_are_minus_infinity():
    call = plain((300, 17))
    call.backend.refresh(call.plan, call.lens[:1], 1)
    lse = call.poisoned_lse()
    output = call.decode(block_tables=call.tables[:1], lse=lse)
    assert (output[1] == 0).all()
    assert (lse[1] == NOTHING).all()
    assert lse[0].isfinite().all()  # positive control
    lse.fill_(torch.nan)
    call.decode(block_tables=call.tables[:0], lse=lse)
    assert (lse == NOTHING).all()


def test_the_fallback_writes_lse_behind_the_lengths_too(monkeypatch):
    monkeypatch.setattr("planlife.backends.dense_fallback._CHUNK_ROWS", 2)
    call = plain((300, 17, 5, 40), query_length=2)
    lse, wanted = call.poisoned_lse(), call.poisoned_lse()
    call.reference(lse=wanted)
    call.lens = call.lens[:3]
    fall_back(call, lse=lse)
    torch.testing.assert_close(lse[:6], wanted[:6], rtol=1e-5, atol=2e-5)
    assert (lse[6:] == NOTHING).all()


def test_the_sink_is_part_of_the_lse():
    call = plain((300, 17, 0), sinks=True)
    with_sink, without = call.poisoned_lse(), call.poisoned_lse()
    call.decode(lse=with_sink)
    call.decode(lse=without, sinks=None)
    torch.testing.assert_close(with_sink[:2], torch.logaddexp(without, call.sinks.expand(3, -1))[:2])
    assert (with_sink[2] == NOTHING).all()
    call.decode(lse=with_sink, sinks=torch.full((4,), -1e30))
    assert torch.equal(with_sink, without)
    call.decode(lse=with_sink, sinks=torch.full((4,), 1e30))
    assert (with_sink[:2] == 1e30).all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_no_sink_makes_an_empty_row_anything_but_empty(odd):
    call = plain((0, 300), sinks=True)
    lse = call.poisoned_lse()
    call.decode(lse=lse, sinks=torch.full((4,), odd))
    assert (lse[0] == NOTHING).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_asking_for_lse_changes_no_bit_of_the_output(sinks):
    call = KindCall((300, 17, 0, 700), query_length=2, sinks=sinks)
    output = call.decode().clone()
    assert torch.equal(call.decode(lse=call.poisoned_lse()), output)


def test_a_recorded_decode_fills_the_lse_of_its_replay():
    call = plain((300, 17, 256), sinks=True)
    lens, lse, graph = call.lens, call.poisoned_lse(), EmulatedGraph()
    with record(graph):
        call.backend.refresh(call.plan, lens, len(lens))
        call.decode(lse=lse)
    assert lse.isnan().all()
    for new in ((300, 17, 256), (1, 0, 200)):
        lens.copy_(torch.tensor(new, dtype=torch.int32))
        lse.fill_(torch.nan)
        graph.replay()
        call.assert_lse_matches(lse)
