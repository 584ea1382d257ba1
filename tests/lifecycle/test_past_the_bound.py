"""Lengths past what a row can have: query tokens within it are exact, those past it see the keys up to it.

aiter's kernels read all that they are told a row has, so they are told of no more than the bound, and take every edge
from there: with them only rows within the bound are exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife import PlanSpec
from planlife.testing import row_errors

from .test_values import Served, make_spec
from .world import (
    BEFORE_REPLAY,
    IN_GRAPH,
    PAGE,
    World,
    backend_name,
    both_styles,
    counters_of,
    fallback_name,
    small_spec,
)

LONGEST = 2**31 - 1
#: (query length, window, bound). The bound lies inside a page and a tile; a window skips the tile before that one, or
#: is wider than the bound.
SITES = [*((length, *one) for length in (1, 2, 4, 6) for one in ((0, 250), (100, 394))), (4, 300, 250)]
#: Enough where each costs much.
FEW_SITES = {(4, 300, 250), (6, 100, 394)}
every_site = pytest.mark.parametrize(("query_length", "window", "bound"), SITES)


def lens_around(limit: int, query_length: int) -> list[int]:
    """Rows past the limit by little and by far, among rows within it."""
    past = [limit + 1, limit + 2, limit + query_length, limit + 150, 10 * limit, LONGEST]
    within = [limit, 100, 0, limit - 1, query_length, 1]
    return [length for pair in zip(past, within, strict=True) for length in pair]


def serve(spec: PlanSpec, lens: list[int], limit: int, **options: Any) -> Served:
    """A layer whose rows have as many of their tokens as the limit lets them."""
    return Served(spec, [min(length, limit) for length in lens], **options)


def site(query_length: int, window: int, bound: int) -> PlanSpec:
    return make_spec(query_length=query_length, sliding_window=window, max_context_tokens=bound)


def wanted(served: Served, *, edges_kept: bool | None = None) -> torch.Tensor:
    """What the worlds' backend decodes for the lengths of now. edges_kept: None = as that backend does."""
    if edges_kept is None:
        edges_kept = backend_name() != "aiter"
    return served.expected(served.lens if edges_kept else served.lens.clamp(max=served.spec.max_context_tokens))


def assert_tokens_right(served: Served, output: torch.Tensor, expected: torch.Tensor) -> None:
    """Token by token: a wrong one hides behind none of its row."""
    errors = row_errors(output, expected)
    assert (errors <= served.kind.row_bound).all(), errors.view(-1, served.spec.query_length)


@every_site
def test_each_query_token_past_the_bound_sees_the_keys_up_to_it_and_the_others_are_exact(
    query_length: int, window: int, bound: int
) -> None:
    """Eager and in both styles of capture; counted, and never taken for stale."""
    lens = lens_around(bound, query_length)
    served = serve(site(query_length, window, bound), lens, bound, columns=65, sanitize="count")
    graphs = {style: served.capture(style) for style in (BEFORE_REPLAY, IN_GRAPH)}
    served.lens.copy_(torch.tensor(lens, dtype=torch.int32))
    expected = wanted(served)
    assert_tokens_right(served, served.eager(), expected)
    for style, g in graphs.items():
        assert_tokens_right(served, served.replay(g, style), expected)
    counters = counters_of(served.manager)
    assert (counters["lengths_clamped"], counters["stale_detected"]) == (6 * 3, 0)
    if query_length > 1:  # positive control
        other = wanted(served, edges_kept=backend_name() == "aiter")
        assert (row_errors(served.eager(), other) > served.kind.row_bound).any()


def test_two_tokens_past_the_bound_leave_the_two_before_them_exact() -> None:
    """C90: query_length 4, bound 512, length 514, over a cache that has all 514 tokens."""
    world = World(sites={"default": small_spec(max_context_tokens=512, query_length=4)}, warm=True)
    world.set_lens([514, 300, 512])
    for output in (world.eager(world.step(3)), world.replay(world.capture(world.step(3), IN_GRAPH), world.step(3))):
        errors = row_errors(output[:12], world.expected(world.query[:12], world.lens[:3]))
        is_right = (errors <= world.kind.row_bound).tolist()
        assert is_right[4:] == [True] * 8
        assert is_right[:4] == ([False] * 4 if backend_name() == "aiter" else [True, True, False, False]), errors


@both_styles
@pytest.mark.parametrize(("query_length", "window"), [(1, 0), (4, 0), (4, 100)])
def test_query_tokens_past_the_columns_of_the_block_table_see_the_keys_that_it_has(
    style: str, query_length: int, window: int
) -> None:
    """Past the bound besides, and within it."""
    limit = 10 * PAGE
    lens = [*lens_around(limit, query_length), 1040, 1041]
    served = serve(site(query_length, window, 1040), lens, limit, columns=10, sanitize="count")
    g = served.capture(style)
    served.lens.copy_(torch.tensor(lens, dtype=torch.int32))
    for output in (served.eager(), served.replay(g, style)):
        assert_tokens_right(served, output, served.expected())
    counters = counters_of(served.manager)
    assert (counters["lengths_clamped"], counters["stale_detected"]) == (8 * 2, 0)


@every_site
def test_the_lse_of_query_tokens_past_the_bound_is_that_of_the_keys_that_they_see(
    query_length: int, window: int, bound: int
) -> None:
    """With sinks: a token whose window lies behind the bound is zero, and its lse -inf."""
    lens = lens_around(bound, query_length)
    served = serve(site(query_length, window, bound), lens, bound, columns=65)
    served.lens.copy_(torch.tensor(lens, dtype=torch.int32))
    sinks = torch.randn(served.spec.num_q_heads, generator=served.generator).to(served.device)
    found, expected = (torch.full(served.query.shape[:2], torch.nan, device=served.device) for _ in range(2))
    served.extras |= {"sinks": sinks, "lse": found}
    output = served.eager()
    served.extras["lse"] = expected
    assert_tokens_right(served, output, served.expected())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    assert (found == -torch.inf).any()


@every_site
def test_the_fallback_takes_the_edges_from_the_whole_lengths_too(query_length: int, window: int, bound: int) -> None:
    lens = lens_around(bound, query_length)
    options: dict[str, Any] = {"enabled": False, "fallback": fallback_name()}
    served = serve(site(query_length, window, bound), lens, bound, columns=65, **options)
    served.lens.copy_(torch.tensor(lens, dtype=torch.int32))
    assert served.manager.plan_for(served.step()).route == "fallback"
    assert_tokens_right(served, served.eager(), served.expected())


def names_of_other_sites() -> list[str]:
    """Those that a suite with FEW_SITES leaves out."""
    tests = (
        test_each_query_token_past_the_bound_sees_the_keys_up_to_it_and_the_others_are_exact,
        test_the_lse_of_query_tokens_past_the_bound_is_that_of_the_keys_that_they_see,
        test_the_fallback_takes_the_edges_from_the_whole_lengths_too,
    )
    others = ["-".join(map(str, one)) for one in SITES if one not in FEW_SITES]
    return [f"{test.__name__}[{site}]" for test in tests for site in others]
