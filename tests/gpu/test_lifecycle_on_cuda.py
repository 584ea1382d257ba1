"""The CPU's scenarios on real CUDA graphs: the same tests, imported, with worlds that are made on the GPU."""

from __future__ import annotations

import pytest

from ..lifecycle import world
from ..lifecycle.test_cache_kinds import *  # noqa: F403
from ..lifecycle.test_capture_failures import *  # noqa: F403
from ..lifecycle.test_capture_styles import *  # noqa: F403
from ..lifecycle.test_drafts import *  # noqa: F403
from ..lifecycle.test_dummies import *  # noqa: F403
from ..lifecycle.test_guard import *  # noqa: F403
from ..lifecycle.test_memory_and_values import *  # noqa: F403
from ..lifecycle.test_refresh_and_marks import *  # noqa: F403
from ..lifecycle.test_refresh_and_marks import gc_off  # noqa: F401
from ..lifecycle.test_segments import *  # noqa: F403
from ..lifecycle.test_threads_while_capturing import *  # noqa: F403

_OTHER_DEVICE = "measures the storages of a CPU device; CUDA's allocator is measured in test_cuda_device.py"
_TOLD_LATER = "counters arrive later on a GPU: test_cuda_device.py has the test of what is raised, and when"

#: What cannot hold on CUDA graphs, and why. Names of tests, or of one of their parameter sets.
NOT_HERE = {
    "test_200_random_steps_stay_within_the_budget_by_the_storages_that_are_alive": _OTHER_DEVICE,
    "test_worst_case_bytes_is_what_warm_allocates": _OTHER_DEVICE,
    "test_a_builder_thrown_away_and_built_again_decodes_the_same_and_leaves_nothing": _OTHER_DEVICE,
    "test_three_graphs_of_one_lane_replay_right_while_everything_else_is_evicted": _OTHER_DEVICE,
    "test_a_capture_that_touched_no_plan_is_adopted_without_the_pins_of_the_one_before": (
        "a CUDAGraph does not tell which capture it holds"
    ),
    "test_two_threads_capture_at_the_same_time": "torch.cuda.graph synchronises the device, which kills other captures",
    "test_the_sanitizer_sees_a_stale_replay_that_no_guard_was_asked_about[raise]": _TOLD_LATER,
    "test_where_the_version_cannot_be_read_the_sanitizer_finds_lengths_that_advanced[raise]": _TOLD_LATER,
    "test_eager_work_of_another_thread_is_neither_recorded_nor_refused[global-before replay]": (
        "the test's own synchronising reads kill captures in global mode; see test_cuda_device.py"
    ),
    "test_eager_work_of_another_thread_is_neither_recorded_nor_refused[global-in graph]": (
        "the test's own synchronising reads kill captures in global mode; see test_cuda_device.py"
    ),
}


@pytest.fixture(autouse=True)
def worlds_on_the_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name in (request.node.originalname, request.node.name):
        if name in NOT_HERE:
            pytest.skip(NOT_HERE[name])
    monkeypatch.setattr(world, "DEVICE", "cuda")
