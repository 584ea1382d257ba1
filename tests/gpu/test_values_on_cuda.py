"""The CPU's comparisons with the dense answer on CUDA with the Triton backend: the same tests, imported."""

from __future__ import annotations

from planlife import PlanSpec
from planlife.testing import LAYOUTS

from ..lifecycle.test_budgets_and_shared_plans import *  # noqa: F403
from ..lifecycle.test_cache_kinds import *  # noqa: F403
from ..lifecycle.test_cache_kinds import KINDS
from ..lifecycle.test_decode_cases import *  # noqa: F403
from ..lifecycle.test_decode_cases import CASES
from ..lifecycle.test_lse_and_merge import *  # noqa: F403
from ..lifecycle.test_values import *  # noqa: F403
from ..lifecycle.test_values import BF16_LAYOUTS, FEW_WINDOWS, make_spec, names_of_other_windows
from ..lifecycle.world import small_spec

_OF_THE_TABLE = "about the table of cases, not about a decode"
_WINDOWS = "each width and length is compiled anew: a few here, all of them on a CPU"

NOT_HERE = {
    "test_a_pair_is_missing_only_where_the_library_refuses_every_call_that_has_it": _OF_THE_TABLE,
    "test_a_table_that_lost_a_case_is_found": _OF_THE_TABLE,
    "test_the_axes_have_everything_that_the_library_knows_and_both_ends_of_each_range": _OF_THE_TABLE,
    "test_one_token_more_or_less_is_far_beyond_the_bound": _OF_THE_TABLE,
    "test_what_no_row_owns_is_poisoned": _OF_THE_TABLE,
    "test_the_reference_reads_every_fp8_byte_as_its_format_says": _OF_THE_TABLE,
    "test_a_decode_that_writes_beside_its_output_is_found": "patches the torch backend on the CPU",
    **dict.fromkeys(names_of_other_windows(), _WINDOWS),
}


def specs_ahead() -> list[PlanSpec]:
    return [
        *(case.spec() for case in CASES),
        *(
            small_spec(kv_layout=LAYOUTS[layout][0], kv_dtype=kv_dtype, scales=scales)
            for layout, kv_dtype, scales in KINDS
        ),
        *(
            make_spec(layout, sliding_window=window, query_length=length)
            for layout in BF16_LAYOUTS
            for window, length in FEW_WINDOWS
        ),
    ]
