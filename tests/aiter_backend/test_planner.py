"""The planner's contract over the wrapper: what it passes to aiter plans the integers of the vectors."""

from __future__ import annotations

import pytest

from planlife.backends.aiter_backend import AiterBackend
from tests.aiter_backend.recording_aiter import RecordingAiter
from tests.planner_contract import PlannerContract


class TestPlanner(PlannerContract):
    @pytest.fixture
    def backend(self):
        return AiterBackend(library=RecordingAiter().library(), architecture_of=lambda device: "gfx942")

    def compile(self, backend, spec, rows, device):
        """Nothing: the fake compiles nothing, and vectors have thousands of rows."""
