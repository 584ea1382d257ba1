"""What a simulation puts under the real PlanManager: bytes by a real backend's formulas, and nothing that computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..backends.base import Backend
from ..spec import PlanSpec
from ..testing.fakes import FakeBackend, FakeDevice


class Lengths:
    """Stands for a length tensor of so many rows. What a manager decides depends on no value in it."""

    __slots__ = ("_version", "address", "rows")

    def __init__(self, rows: int, address: int) -> None:
        self.rows = rows
        self.address = address
        self._version = 0

    def __getitem__(self, index: slice) -> Lengths:
        start, stop, _ = index.indices(self.rows)
        return Lengths(max(stop - start, 0), self.address + 4 * start)


class SimDevice(FakeDevice):
    """A FakeDevice that keeps no log: a simulation may run for millions of steps."""

    def __init__(self, num_compute_units: int) -> None:
        super().__init__("simulated", num_compute_units)
        self.low_water_bytes = 0

    def _account(self, event: str, change_bytes: int) -> None:
        self.live_bytes += change_bytes
        self.high_water_bytes = max(self.high_water_bytes, self.live_bytes)
        self.low_water_bytes = min(self.low_water_bytes, self.live_bytes)

    def inspect_lens(self, context_lens: Lengths) -> tuple[int, int, int | None]:
        return context_lens.rows, context_lens.address, context_lens._version


class SimBackend(FakeBackend):
    """Sizes and refusals of `sizes`; plans nothing."""

    def __init__(self, sizes: Backend) -> None:
        super().__init__(sizes.max_plan_rows)
        self.name = sizes.name
        self._sizes = sizes

    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        return self._sizes.refuse_spec(spec, device)

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        return ()

    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        return self._sizes.default_workgroup_budget(spec, device)

    def excluded(self, device: Any) -> Mapping[str, str]:
        return {}

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return self._sizes.table_bytes(spec, plan_rows, num_compute_units)

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return self._sizes.scratch_bytes(spec, plan_rows, num_compute_units)

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> Any:
        return None

    def refresh(self, tables: Any, context_lens: Any | None, num_rows: int) -> None:
        pass
