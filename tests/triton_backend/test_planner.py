"""All structures of the Triton planner make the integers of the others, in place."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from planlife.backends.triton_backend import TritonBackend
from planlife.kernels import triton_planner
from planlife.spec import PlanSpec
from tests.planner_contract import PlannerContract
from tests.triton_backend.planner_cases import assert_case, random_cases

INTERPRETED = not torch.cuda.is_available()


class TritonPlanner(PlannerContract):
    num_cases = 60 if INTERPRETED else 5000
    max_rows = 6 if INTERPRETED else 256

    @pytest.fixture
    def backend(self) -> TritonBackend:
        return TritonBackend()

    def compile(self, backend, spec, rows, device):
        triton_planner.prepare_planners(device.name)  # and no decode for each of thousands of specs

    @pytest.fixture
    def device(self) -> str:
        return "cpu" if INTERPRETED else "cuda:0"

    @pytest.fixture(autouse=True)
    def _only_what_the_interpreter_can_take(self, request):
        case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
        rows = len(case["context_lengths"]) if case and "context_lengths" in case else 0
        if INTERPRETED and rows > self.max_vector_rows:
            pytest.skip(f"{rows} rows take the interpreter too long; it runs on a GPU")

    def test_random_plans_equal_the_tensor_planner(self, backend, make, device):
        for case in random_cases(11, self.num_cases, self.max_rows):
            assert_case(backend, make, case, device)


class TestRowPlanner(TritonPlanner):
    max_vector_rows = 32


class TestRunPlanner(TritonPlanner):
    max_vector_rows = 1000

    @pytest.fixture(autouse=True)
    def _a_block_for_runs_in_every_class(self, monkeypatch):
        monkeypatch.setattr(triton_planner, "MAX_ROW_BLOCKS", 0)

    def test_plans_of_many_runs_equal_the_tensor_planner(self, backend, make, device):
        for case in random_cases(13, 2 if INTERPRETED else 300, 1200 if INTERPRETED else 5000):
            assert_case(backend, make, case, device)


class TestTiledPlanner(TritonPlanner):
    max_vector_rows = 1000

    @pytest.fixture(autouse=True)
    def _tile_every_class(self, monkeypatch):
        monkeypatch.setattr(triton_planner, "MAX_ROW_BLOCKS", 0)
        monkeypatch.setattr(triton_planner, "MAX_RUN_BLOCKS", 0)

    def test_plans_of_many_tiles_equal_the_tensor_planner(self, backend, make, device):
        for case in random_cases(12, 6 if INTERPRETED else 300, 2000 if INTERPRETED else 5000):
            assert_case(backend, make, case, device)

    def test_stale_rows_in_several_blocks_of_the_sanitizer_count_once(self, backend, make, lens_of, flags):
        spec = PlanSpec(1, 1, 16, 16, max_context_tokens=1000)
        plan = make(spec, 2500)
        lens = lens_of([100] * 2500)
        backend.refresh(plan, lens, 2500)
        backend.sanitize(plan, lens, 2500, flags, 1000)
        assert flags.tolist() == [0, 0]
        for changed, found in (([3], 1), ([3, 2499], 2), ([1024, 2048], 3)):
            wrong = lens.clone()
            wrong[changed] += 1
            backend.sanitize(plan, wrong, 2500, flags, 1000)
            backend.sanitize(plan, lens, 2500, flags, 1000)
            assert flags.tolist() == [found, 0]
        backend.sanitize(plan, lens_of([1001] * 2500), 2500, flags, 1000)
        assert flags.tolist() == [4, 2500]


def test_only_classes_of_many_rows_take_more_than_one_launch():
    planners = [triton_planner.planner_for(rows) for rows in (1, 256, 257, 1024, 1025)]
    row, run, tiled = triton_planner.RowPlanner, triton_planner.RunPlanner, triton_planner.TiledPlanner
    assert planners == [row, row, run, run, tiled]
