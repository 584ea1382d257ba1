"""The Triton planner on a GPU: its contract, ten thousand random plans, its largest class, and no compiles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
triton = pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from planlife.backends.triton_backend import TritonBackend, TritonPlan  # noqa: E402
from planlife.kernels import triton_planner  # noqa: E402
from planlife.spec import PlanSpec  # noqa: E402
from tests.planner_contract import recorded  # noqa: E402
from tests.triton_backend import test_launch, test_planner  # noqa: E402
from tests.triton_backend.planner_cases import Case, assert_case, random_cases, tensor_plan  # noqa: E402

TestRowPlanner = test_planner.TestRowPlanner
TestRunPlanner = test_planner.TestRunPlanner
TestTiledPlanner = test_planner.TestTiledPlanner
scale = test_launch.scale
test_nothing_compiles_after_prepare = test_launch.test_nothing_compiles_after_prepare
test_a_launch_takes_any_counts_strides_and_alignments = (
    test_launch.test_a_launch_takes_any_counts_strides_and_alignments
)
test_a_recorded_launch_runs_at_each_replay = test_launch.test_a_recorded_launch_runs_at_each_replay_and_not_before
test_a_launch_runs_on_its_own_device = test_launch.test_a_launch_runs_on_its_own_device_whatever_the_current_one_is

NOT_HERE = {"test_random_plans_equal_the_tensor_planner": "ten thousand of its cases are below"}

DEVICE = "cuda:0"
SPEC = PlanSpec(8, 1, 128, 16, max_context_tokens=300_000)
NUM_CU = 132


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def backend() -> TritonBackend:
    return TritonBackend()


def make(spec: PlanSpec, rows: int, num_cu: int = NUM_CU) -> TritonPlan:
    backend = TritonBackend()
    triton_planner.prepare_planners(DEVICE)
    buffer = torch.full((backend.table_bytes(spec, rows, num_cu),), 0x7F, dtype=torch.uint8, device=DEVICE)
    return backend.make_tables(spec, rows, num_cu, buffer)


@pytest.fixture
def compiled() -> Iterator[list[Any]]:
    """What Triton compiles while the test runs."""
    seen: list[Any] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **info: seen.append(info)
    yield seen
    triton.knobs.runtime.jit_post_compile_hook = before


@pytest.mark.parametrize(
    ("row_blocks", "run_blocks", "count"),
    [(256, 256, 10_000), (0, 256, 3_000), (0, 0, 3_000)],
    ids=["rows", "runs", "tiles"],
)
def test_ten_thousand_random_plans_equal_the_tensor_planner(backend, monkeypatch, row_blocks, run_blocks, count):
    monkeypatch.setattr(triton_planner, "MAX_ROW_BLOCKS", row_blocks)
    monkeypatch.setattr(triton_planner, "MAX_RUN_BLOCKS", run_blocks)
    for case in random_cases(1, count, 256):
        assert_case(backend, make, case, DEVICE)


@pytest.mark.parametrize("rows", [257, 512, 513, 4096, 4097, 131_072])
def test_large_classes_equal_the_tensor_planner(backend, rows):
    rng = random.Random(rows)
    for active, longest in ((1.0, 2000), (0.01, 2**31 - 1), (0.5, 100_000), (1.0, 2**31 - 1)):
        lens = [rng.randint(1, longest) if rng.random() < active else 0 for _ in range(rows)]
        assert_case(backend, make, Case(SPEC, NUM_CU, rows, lens), DEVICE)


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 256, 1000, 5000])
def test_replays_of_a_recorded_refresh_plan_the_lengths_of_now(backend, rows):
    plan = make(SPEC, rows)
    step_rows = -(-rows * 3 // 4)
    lens = torch.zeros(step_rows, dtype=torch.int32, device=DEVICE)
    flags = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with recorded(DEVICE) as graph:
        backend.refresh(plan, lens, step_rows)
        backend.sanitize(plan, lens, step_rows, flags, 300_000)
    rng = random.Random(rows)
    for number in range(100):
        values = [rng.choice([0, rng.randint(1, 300_000)]) for _ in range(step_rows)]
        lens.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        work_info, reduce_info = tensor_plan(Case(SPEC, NUM_CU, rows, values), DEVICE)
        assert torch.equal(plan.work_info, work_info), (number, values)
        assert torch.equal(plan.reduce_info, reduce_info), (number, values)
    assert flags.tolist() == [0, 0]
    backend.sanitize(plan, lens + 1, step_rows, flags, 300_000)
    assert flags.tolist() == [1, 0]


def test_nothing_compiles_once_the_classes_are_prepared(backend, compiled):
    classes = (1, 2, 16, 64, 65, 256, 257, 600, 4096)
    plans = {rows: make(SPEC, rows) for rows in classes}
    buffer = torch.randint(0, 5000, (5000,), dtype=torch.int32, device=DEVICE)
    flags = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    compiled.clear()
    for rows in range(1, 700):
        for class_rows in {min(c for c in classes if c >= rows), 4096}:
            lens = buffer[rows % 7 : rows % 7 + rows]
            backend.refresh(plans[class_rows], lens, rows)
            backend.sanitize(plans[class_rows], lens, rows, flags, 300_000)
    for spec in (SPEC, PlanSpec(8, 2, 64, 32, max_context_tokens=1, sliding_window=1, max_partitions=1)):
        plan = make(spec, 100)
        backend.refresh(plan, None, 0)
        backend.refresh(plan, buffer[1:1], 0)
    assert compiled == []
    assert flags.tolist() == [0, 0]


def test_the_hook_would_see_a_compile(compiled):
    triton_planner.Kernel(test_launch._scale).prepare(DEVICE, *test_launch.DTYPES, BLOCK=64)
    assert len(compiled) == 1
