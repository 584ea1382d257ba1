"""The triton backend: planner, decode and sanitizer as our own kernels, with run-time row counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.triton_planner import Sanitizer, Tables, plan_numbers, planner_for
from ..planner import spec_capacity
from ..spec import PlanSpec
from .torch_backend import TorchPlan, table_ends


class TritonPlan(TorchPlan):
    """One table set as views of the manager's bytes: TorchPlan's, and behind them what the kernels need.

    Borrows: the buffer, whose views these are. Address-stable: refreshes write in place.
    """

    __slots__ = ("planner", "sanitizer")

    def __init__(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: torch.Tensor) -> None:
        super().__init__(spec, plan_rows, num_compute_units, buffer)
        start = _tables_bytes(self.capacity, plan_rows)
        end = start + planner_for(plan_rows).workspace_bytes(plan_rows)
        with torch.inference_mode(False):
            workspace, ticket = buffer[start:end], buffer[end : end + 8].view(torch.int64)
        tables = Tables(self.work_info, self.reduce_info, self.staged_lens, ticket, workspace)
        numbers = plan_numbers(spec, plan_rows, self.capacity, self.max_partitions)
        device = str(buffer.device)
        self.planner = planner_for(plan_rows)(device, numbers, tables)
        self.sanitizer = Sanitizer(device, numbers, tables)


def _tables_bytes(capacity: int, plan_rows: int) -> int:
    """Bytes of TorchPlan's tables, rounded up for the int64 words behind them."""
    return -(-table_ends(capacity, plan_rows)[2] // 8) * 8


class TritonBackend:
    """planlife.backends.base.Backend over Triton, for GPUs; in Triton's interpreter, for a CPU's tests."""

    name = "triton"
    max_plan_rows = None

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        return ()

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        capacity = spec_capacity(spec, plan_rows, num_compute_units)
        return _tables_bytes(capacity, plan_rows) + planner_for(plan_rows).workspace_bytes(plan_rows) + 8

    def compile(self, spec: PlanSpec, plan_rows: int, device: Any) -> int:
        planner_for(plan_rows).prepare(device.name, plan_rows)
        Sanitizer.prepare(device.name)
        return 1

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> TritonPlan:
        return TritonPlan(spec, plan_rows, num_compute_units, buffer)

    def refresh(self, tables: TritonPlan, context_lens: torch.Tensor | None, num_rows: int) -> None:
        if context_lens is None or num_rows == 0:
            # No row is read, but a kernel needs an address.
            tables.planner.plan(tables.staged_lens, 0, is_emptied=context_lens is None)
        else:
            tables.planner.plan(context_lens, num_rows, is_emptied=False)

    def sanitize(self, tables: TritonPlan, context_lens: torch.Tensor, num_rows: int, flags: torch.Tensor) -> None:
        tables.sanitizer.compare(context_lens if num_rows else tables.staged_lens, num_rows, flags)
