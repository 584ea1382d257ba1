"""The CPU's scenarios on real CUDA graphs: the same tests, imported, with worlds on the GPU and the Triton backend."""

from __future__ import annotations

from dataclasses import replace

from planlife import PlanSpec

from ..lifecycle.test_adopt import *  # noqa: F403
from ..lifecycle.test_ambient_modes import *  # noqa: F403
from ..lifecycle.test_capture_failures import *  # noqa: F403
from ..lifecycle.test_capture_styles import *  # noqa: F403
from ..lifecycle.test_consumed_marks import *  # noqa: F403
from ..lifecycle.test_drafts import *  # noqa: F403
from ..lifecycle.test_dummies import *  # noqa: F403
from ..lifecycle.test_guard import *  # noqa: F403
from ..lifecycle.test_handed_over import *  # noqa: F403
from ..lifecycle.test_lengths_past_what_was_said import *  # noqa: F403
from ..lifecycle.test_memory_and_values import *  # noqa: F403
from ..lifecycle.test_past_the_bound import *  # noqa: F403
from ..lifecycle.test_past_the_bound import SITES, site
from ..lifecycle.test_refresh_and_marks import *  # noqa: F403
from ..lifecycle.test_refresh_and_marks import gc_off  # noqa: F401
from ..lifecycle.test_segments import *  # noqa: F403
from ..lifecycle.test_threads_while_capturing import *  # noqa: F403
from ..lifecycle.world import small_spec
from ..suite.builders import SPEC

_READS = (
    "the test's own synchronising reads kill captures in global mode; test_cuda_device.py has the rule without them"
)

#: What cannot hold on CUDA graphs, and why. Names of tests, or of one of their parameter sets.
NOT_HERE = {
    "test_a_capture_that_touched_no_plan_is_adopted_without_the_pins_of_the_one_before": (
        "a CUDAGraph does not tell which capture it holds"
    ),
    "test_two_threads_capture_at_the_same_time": "torch.cuda.graph synchronises the device, which kills other captures",
    "test_eager_work_of_another_thread_is_neither_recorded_nor_refused[global-before replay]": _READS,
    "test_eager_work_of_another_thread_is_neither_recorded_nor_refused[global-in graph]": _READS,
}


def specs_ahead() -> list[PlanSpec]:
    """Those of most tests here and in the builder suite."""
    changes = [
        {},
        *({"query_length": length} for length in (2, 3)),
        *({"sliding_window": width} for width in (100, 130)),
    ]
    specs = [*(small_spec(**change) for change in changes), *(replace(SPEC, **change) for change in changes)]
    return [*specs, *(site(*one) for one in SITES)]
