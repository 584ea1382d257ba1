"""The tests of tests/lifecycle that a machine with aiter runs, and those that cannot hold there."""

from __future__ import annotations

import itertools

from ..lifecycle.test_budgets_and_shared_plans import *  # noqa: F403
from ..lifecycle.test_cache_kinds import *  # noqa: F403
from ..lifecycle.test_capture_failures import *  # noqa: F403
from ..lifecycle.test_capture_styles import *  # noqa: F403
from ..lifecycle.test_drafts import *  # noqa: F403
from ..lifecycle.test_dummies import *  # noqa: F403
from ..lifecycle.test_guard import *  # noqa: F403
from ..lifecycle.test_lse_and_merge import *  # noqa: F403
from ..lifecycle.test_memory_and_values import *  # noqa: F403
from ..lifecycle.test_named_fallback import *  # noqa: F403
from ..lifecycle.test_past_the_bound import *  # noqa: F403
from ..lifecycle.test_past_the_bound import names_of_other_sites
from ..lifecycle.test_refresh_and_marks import *  # noqa: F403
from ..lifecycle.test_segments import *  # noqa: F403
from ..lifecycle.test_threads_while_capturing import *  # noqa: F403
from ..lifecycle.test_values import *  # noqa: F403
from ..lifecycle.test_values import names_of_other_windows

_OTHER_LAYOUTS = [
    *(f"test_six_query_tokens_of_group_eight_with_scales_per_token_are_served[{layout}]" for layout in ("nhd", "hnd")),
    *(
        f"test_one_token_is_exactly_its_value_whatever_the_key_scale[{tiny}-{layout}]"
        for tiny, layout in itertools.product(("1e-20", "1e-30"), ("nhd", "hnd"))
    ),
    *(
        f"test_table_entries_that_belong_to_no_row_are_never_followed[{stray}-{layout}]"
        for stray, layout in itertools.product((-1, 0, 2**31 - 1, -(2**31)), ("nhd", "hnd"))
    ),
]
_NO_LSE = "aiter gives no log-sum-exps; that they are refused: test_scenarios.py"
_CHECKED_BEFORE = "shapes of 'nhd' caches, which are checked before any backend is asked"
_OWN_LAYOUTS = "aiter reads contiguous packed caches; that views are refused: test_scenarios.py"
_MANY_ROWS = "the warm-up runs each of 4096 row counts, which takes the double minutes"
_ANY_KIND = "its parameters are kinds of other libraries; those of aiter: test_scenarios.py"

#: What cannot hold on aiter, and why. Names of tests, or of one of their parameter sets.
NOT_HERE = {
    **dict.fromkeys(
        (
            "test_every_route_fills_lse_with_key_scales_and_sinks_in_it",
            "test_a_replay_fills_the_captured_lse_for_its_own_lengths",
            "test_a_graph_that_is_replayed_for_a_dummy_says_that_nothing_was_attended",
            "test_a_context_decoded_in_two_halves_of_its_pages_equals_the_whole",
            "test_sinks_in_both_halves_are_counted_twice",
            "test_a_row_that_the_half_with_the_sinks_sees_nothing_of_has_no_sink",
            "test_both_halves_and_their_merge_are_one_graph",
            "test_a_cascade_over_a_shared_prefix_equals_the_whole",
            "test_tokens_of_a_draft_share_a_prefix_as_rows_of_their_own",
            "test_the_lse_of_query_tokens_past_the_bound_is_that_of_the_keys_that_they_see",
        ),
        _NO_LSE,
    ),
    "test_replays_decode_the_lengths_scales_and_sinks_of_their_own_step": _ANY_KIND,
    "test_scales_and_sinks_reach_every_way_that_a_step_can_take": _ANY_KIND,
    "test_more_rows_than_a_backend_plans_at_once_are_served_in_segments": _MANY_ROWS,
    "test_a_cache_that_is_not_the_sites_is_refused_before_any_launch": _CHECKED_BEFORE,
    "test_a_head_parallel_view_of_a_larger_cache_is_served_in_place": _OWN_LAYOUTS,
    "test_caches_that_are_views_of_a_larger_pool_are_served_in_place": _OWN_LAYOUTS,
    "test_a_broadcast_block_axis_is_served_without_a_copy_of_the_pool": _OWN_LAYOUTS,
    **dict.fromkeys(_OTHER_LAYOUTS, "aiter reads packed caches"),
    "test_an_infinite_value_that_is_attended_comes_out_and_reaches_nothing_else": "aiter says nothing of infinite V",
    "test_the_unused_tail_of_a_last_page_reaches_no_output": "poisons tails of V, which aiter wants finite",
    "test_query_tokens_past_the_columns_of_the_block_table_see_the_keys_that_it_has": (
        "aiter reads behind the table; that it is seen: "
        "test_a_replayed_length_above_what_a_row_can_have_is_clamped_and_counted"
    ),
    **dict.fromkeys(names_of_other_sites(), "each is run in every row count when it is minted"),
    "test_outputs_of_one_and_of_two_tasks_per_compute_unit_agree[float32]": "aiter takes no float32",
}

#: What one generation runs for all, to spare the others minutes.
OTHER_WINDOWS = dict.fromkeys(names_of_other_windows(), "a few windows are enough beside another generation's")

#: What holds on a GPU only.
NOT_ON_A_CPU = {"test_a_replay_calls_no_python_of_planlife_or_of_the_model": "the double's kernels are Python there"}

#: Tests, or parameter sets, that do wrong on purpose, and what the double says of it. An installed library would read
#: what does not exist.
ON_PURPOSE = {
    "test_the_zero_page_and_stale_rows_reach_no_output": "V is not finite in the unwritten tail",
    **{
        f"test_a_replayed_length_above_what_a_row_can_have_is_clamped_and_counted[the table-{style}]": (
            "a length is beyond the block table"
        )
        for style in ("before replay", "in graph")
    },
}
