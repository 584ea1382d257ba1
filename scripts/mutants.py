"""Takes guards of the lifecycle out of a copy of planlife, one at a time, and runs the test that must miss each.

    python scripts/mutants.py [--on gpu|cpu] [--jobs N] [words of a guard's name ...]

Prints a line for each guard: `red` where its test failed, `SURVIVED` where nothing noticed. The tests also run on an
unchanged copy, where they must pass. Exits 0 only if every guard was missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("planlife", "tests", "pyproject.toml")
TIMEOUT_S = 300


class Guard(NamedTuple):
    """What stands in `file`, exactly once, and what remains of it without the guard.

    gpu, cpu: a test that then fails, under tests/; cpu is "" where only a GPU can show it.
    """

    name: str
    file: str
    text: str
    without: str
    gpu: str
    cpu: str


LIFECYCLE = "gpu/test_lifecycle_on_cuda.py"
ON_AITER = "gpu/test_aiter_scenarios_on_cuda.py"
OVER_THE_DOUBLE = "aiter_backend/test_scenarios_g2.py"
GUARDS = (
    Guard(
        "the capture id in the mark",
        "planlife/manager.py",
        "found.capture_id == mark.capture_id\n",
        "True\n",
        f"{LIFECYCLE}::test_two_graphs_of_the_same_metadata_both_follow_their_lengths",
        "lifecycle/test_capture_styles.py::test_two_graphs_of_the_same_metadata_both_follow_their_lengths",
    ),
    Guard(
        "the ubatch in a plan's identity",
        "planlife/manager.py",
        "plans[(owner, ubatch)],\n",
        "plans[(owner, 0)],\n",
        f"{LIFECYCLE}::test_two_ubatches_of_equal_rows_decode_their_own_lengths",
        "lifecycle/test_memory_and_values.py::test_two_ubatches_of_equal_rows_decode_their_own_lengths",
    ),
    Guard(
        "the pin",
        "planlife/graph_book.py",
        "        new: list[Item] = [item for item in (plan, arena) if item not in record.pinned]\n",
        "        new: list[Item] = []\n",
        f"{LIFECYCLE}::test_three_graphs_of_one_lane_replay_right_while_everything_else_is_evicted",
        "lifecycle/test_memory_and_values.py"
        "::test_three_graphs_of_one_lane_replay_right_while_everything_else_is_evicted",
    ),
    Guard(
        "the zeros behind the last task (Triton planner)",
        "planlife/kernels/triton_planner.py",
        "_store_records(work_info, slots, slots < capacity, zeros, zeros, zeros, zeros)\n",
        "_store_records(work_info, slots, slots < 0, zeros, zeros, zeros, zeros)\n",
        "gpu/test_triton_planner.py::TestRowPlanner::test_fewer_rows_leave_nothing_of_an_earlier_step",
        "triton_backend/test_planner.py::TestRowPlanner::test_fewer_rows_leave_nothing_of_an_earlier_step",
    ),
    Guard(
        "the unclamped causal edge",
        "planlife/kernels/triton_decode.py",
        "    length = tl.load(task + 3)\n",
        "    length = tl.minimum(tl.load(task + 3), max_tokens)\n",
        f"{LIFECYCLE}::test_two_tokens_past_the_bound_leave_the_two_before_them_exact",
        "triton_backend/test_past_the_bound.py::test_two_tokens_past_the_bound_leave_the_two_before_them_exact",
    ),
    Guard(
        "the zeros behind the staged lengths (aiter)",
        "planlife/backends/aiter_backend.py",
        "            tables.lens_and_emptied[num_rows:].zero_()\n",
        "            tables.emptied.zero_()\n",
        f"{ON_AITER}::test_captured_rows_behind_the_real_ones_give_exact_zeros",
        f"{OVER_THE_DOUBLE}::test_captured_rows_behind_the_real_ones_give_exact_zeros",
    ),
    Guard(
        "the bound on staged lengths (aiter)",
        "planlife/backends/aiter_backend.py",
        "            torch.clamp(lens, 0, tables.spec.max_context_tokens, out=staged)\n",
        "            staged.copy_(lens)\n",
        f"{ON_AITER}::test_lengths_above_the_bound_are_clamped_and_read_nothing_behind_it",
        f"{OVER_THE_DOUBLE}::test_lengths_above_the_bound_are_clamped_and_read_nothing_behind_it",
    ),
    Guard(
        "the front of the tables that a call's rows need (aiter)",
        "planlife/backends/aiter_plan.py",
        "self.plan = tables.plan_of(tables.work_info[:capacity], tables.reduce_info[:num_rows])\n",
        "self.plan = tables.plan\n",
        f"{ON_AITER}::test_a_query_that_ends_inside_a_segment_is_decoded_as_far_as_it_goes",
        f"{OVER_THE_DOUBLE}::test_a_query_that_ends_inside_a_segment_is_decoded_as_far_as_it_goes",
    ),
    Guard(
        "every row count of a class is run when it is minted (aiter)",
        "planlife/backends/aiter_backend.py",
        "        for num_rows in range(least_rows, plan_rows + 1):\n",
        "        for num_rows in range(plan_rows, plan_rows + 1):\n",
        "",
        "aiter_backend/test_scenarios.py::test_each_row_count_of_a_class_was_run_when_it_was_minted",
    ),
    Guard(
        "the capture id in adopt",
        "planlife/graph_book.py",
        "record = self.record_for(current_id)\n",
        "record = next(iter(self._by_capture.values()), None) or self.record_for(current_id)\n",
        f"{LIFECYCLE}::test_a_capture_that_touches_no_plan_never_gets_another_graphs_pins",
        "lifecycle/test_adopt.py::test_a_capture_that_touches_no_plan_never_gets_another_graphs_pins",
    ),
    Guard(
        "a replay ends the step that plan_for may skip",
        "planlife/manager.py",
        "                            and (capture_id or mark.epoch == self._epoch)\n",
        "",
        f"{LIFECYCLE}::test_one_owner_for_ever_is_right_in_66_replays",
        "lifecycle/test_consumed_marks.py::test_one_owner_for_ever_is_right_in_66_replays",
    ),
    Guard(
        "a graph consumes a mark once",
        "planlife/guard.py",
        "        if held is not None and record.capture_id in held.consumers:\n            raise StalePlanError(\n",
        "        if False:\n            raise StalePlanError(\n",
        f"{LIFECYCLE}::test_a_guard_accepts_a_step_once_for_a_graph",
        "lifecycle/test_consumed_marks.py::test_a_guard_accepts_a_step_once_for_a_graph",
    ),
    Guard(
        "an eager decode may have ended the step",
        "planlife/guard.py",
        "            or (found_mark.is_used_eagerly and not found_mark.consumers)\n",
        "",
        f"{LIFECYCLE}::test_eager_steps_and_replays_of_one_owner_in_turn_are_right",
        "lifecycle/test_consumed_marks.py::test_eager_steps_and_replays_of_one_owner_in_turn_are_right",
    ),
    Guard(
        "one decision for plan_for and guard",
        "planlife/manager.py",
        "return self._decide(slot, step, one.rows, recording=read.captured)\n",
        "return self._decide(slot, step, one.rows, recording=False)\n",
        f"{LIFECYCLE}::test_a_graph_that_recorded_the_fallback_is_replayed_for_new_steps",
        "lifecycle/test_consumed_marks.py::test_a_graph_that_recorded_the_fallback_is_replayed_for_new_steps",
    ),
    Guard(
        "the owner's weak reference",
        "planlife/plan.py",
        "        return weakref.ref(owner)\n",
        "        return _Held(owner)\n",
        f"{LIFECYCLE}::test_a_plan_stored_on_its_own_owner_does_not_keep_the_owner",
        "lifecycle/test_refresh_and_marks.py::test_a_plan_stored_on_its_own_owner_does_not_keep_the_owner",
    ),
    Guard(
        "the allocator thread",
        "planlife/cuda_device.py",
        "return _allocator().submit(self._empty, num_bytes, stream).result()\n",
        "return self._empty(num_bytes, stream)\n",
        "gpu/test_cuda_device.py::test_buffers_minted_inside_another_memory_pool_outlive_it",
        "",
    ),
    Guard(
        "the relaxed guard",
        "planlife/cuda_runtime.py",
        "        mode = ctypes.c_int(_MODE_RELAXED)\n"
        '        self._check(self._exchange_mode(ctypes.byref(mode)), "relaxing this thread\'s capture mode")\n'
        "        try:\n"
        "            yield\n"
        "        finally:\n"
        '            self._check(self._exchange_mode(ctypes.byref(mode)), "restoring this thread\'s capture mode")\n',
        "        yield\n",
        "gpu/test_cuda_device.py::test_another_thread_may_plan_bring_back_evict_and_drop_graphs_while_this_one_records",
        "graph/test_cuda_runtime.py::test_a_body_is_recorded_inside_the_relaxed_guard",
    ),
    Guard(
        "the user object on a captured graph",
        "planlife/cuda_runtime.py",
        "self.can_watch = self._create is not None and self._retain is not None\n",
        "self.can_watch = False\n",
        "gpu/test_cuda_device.py::test_a_graph_that_ends_while_replays_are_in_flight_keeps_what_they_read",
        "graph/test_cuda_runtime.py::test_a_watched_capture_arrives_in_the_queue_when_its_graph_goes",
    ),
    Guard(
        "the arena of the class that takes most, not of the top one",
        "planlife/sizing.py",
        "                    for class_rows in self._ladders[site].classes\n                    for rows in",
        "                    for class_rows in self._ladders[site].classes[-1:]\n                    for rows in",
        "",
        "unit/test_memory_budget.py::test_bytes_are_those_of_the_class_that_takes_most_not_of_the_top_one",
    ),
    Guard(
        "the pair of the class that takes most, not of the top one",
        "planlife/sizing.py",
        "                for class_rows in self._ladders[site].classes\n            ),\n",
        "                for class_rows in self._ladders[site].classes[-1:]\n            ),\n",
        "",
        "unit/test_memory_budget.py::test_bytes_are_those_of_the_class_that_takes_most_not_of_the_top_one",
    ),
    Guard(
        "a step that fell back may be planned after trim()",
        "planlife/manager.py",
        '{target_bytes:,} bytes")\n            self._forget_fallbacks()\n',
        '{target_bytes:,} bytes")\n',
        "",
        "unit/test_fallbacks_that_pass.py::test_a_guard_does_not_hold_an_old_fallback_against_the_step",
    ),
    Guard(
        "a step that fell back for want of memory may ask again",
        "planlife/manager.py",
        "answers.may_ask_again = why.may_pass\n",
        "answers.may_ask_again = False\n",
        "",
        "unit/test_fallbacks_that_pass.py::test_the_step_is_planned_when_it_is_asked_for_again",
    ),
    Guard(
        "evict before allocate",
        "planlife/residency.py",
        "        for victim in victims:\n"
        "            self.store.evict(victim, tombstone)\n"
        "        buffers: list[Any] = []\n"
        "        contents: list[Any] = []\n"
        "        stream = self._device.current_stream()\n"
        "        try:\n"
        "            for item in items:\n"
        "                buffers.append(self._device.allocate(item.num_bytes))\n",
        "        buffers: list[Any] = []\n"
        "        contents: list[Any] = []\n"
        "        stream = self._device.current_stream()\n"
        "        try:\n"
        "            for item in items:\n"
        "                buffers.append(self._device.allocate(item.num_bytes))\n"
        "            for victim in victims:\n"
        "                self.store.evict(victim, tombstone)\n",
        f"{LIFECYCLE}::test_200_random_steps_stay_within_the_budget_by_the_storages_that_are_alive",
        "lifecycle/test_memory_and_values.py"
        "::test_200_random_steps_stay_within_the_budget_by_the_storages_that_are_alive",
    ),
)


def copy_without(guard: Guard | None, into: Path) -> None:
    """The sources and tests, less a guard. Exits if its text is not there exactly once."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, into / name)
    if guard is not None:
        path = into / guard.file
        text = path.read_text("utf-8")
        if text.count(guard.text) != 1:
            sys.exit(f"{guard.name}: its text is {text.count(guard.text)} times in {guard.file}, not once; update it.")
        path.write_text(text.replace(guard.text, guard.without))


def run_tests(tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line"]
    path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])  # the copy comes first
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = {"cwd": tree, "env": environment, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    return subprocess.run([*command, *(f"tests/{test}" for test in tests)], **options)


def verdict(guard: Guard | None, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether all is as it must be, and a line that says so. None: no guard is taken out."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planlife-mutant-") as directory:
        copy_without(guard, Path(directory))
        run = run_tests(Path(directory), tests)
    seconds = f"{time.monotonic() - begin:5.1f} s"
    output = (run.stdout + run.stderr).replace(directory, "").strip().splitlines()
    skipped = " skipped" in run.stdout
    if guard is None:
        word = "green" if run.returncode == 0 and not skipped else "BROKEN"
        return word == "green", f"{word:9}{seconds}  nothing taken out: {output[-1:]}"
    # 1: tests ran, and some failed. Anything else is no answer: not collected, interrupted, internal error.
    word = {0: "SURVIVED", 1: "red"}.get(run.returncode, "BROKEN")
    why = next((line for line in output if line.startswith("/") and ": " in line), "".join(output[-1:]))
    return word == "red", f"{word:9}{seconds}  {guard.name}\n{'':18}{tests[0].split('::')[-1]}\n{'':18}{why[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("gpu", "cpu"), help="whose tests; the GPU's where there is one")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("words", nargs="*", help="only guards whose name has all of these")
    options = parser.parse_args()
    on = options.on
    if on is None:
        import torch

        on = "gpu" if torch.cuda.is_available() else "cpu"
    guards = [one for one in GUARDS if getattr(one, on) and all(word in one.name for word in options.words)]
    if not guards:
        sys.exit(f"no guard with a test on a {on} is named so; they are: {', '.join(one.name for one in GUARDS)}.")
    tests = {one: [getattr(one, on)] for one in guards}
    jobs = [(None, [test for names in tests.values() for test in names]), *tests.items()]
    with ThreadPoolExecutor(options.jobs) as pool:
        are_right = []
        for is_right, line in pool.map(lambda job: verdict(*job), jobs):
            print(line, flush=True)
            are_right.append(is_right)
    sys.exit(not all(are_right))


if __name__ == "__main__":
    main()
