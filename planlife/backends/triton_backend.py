"""The triton backend: planner, decode and sanitizer as our own kernels, with run-time row counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ambient import plain
from ..kernels.triton_decode import compile_decode, decode_into
from ..kernels.triton_planner import (
    IS_INTERPRETED,
    IS_MIXED,
    Sanitizer,
    Tables,
    plan_numbers,
    planner_for,
    prepare_planners,
)
from ..planner import default_workgroup_budget, spec_capacity
from ..spec import PlanSpec, check_int
from .torch_backend import TorchPlan, partials_bytes, refuse_numbers, scales_of_call, table_ends

#: The least that Triton compiles for; before it there is no bfloat16 either.
_LEAST_CAPABILITY = (8, 0)
_WORD_BYTES = 8


class TritonPlan(TorchPlan):
    """One table set as views of the manager's bytes: TorchPlan's, and behind them what the kernels need.

    Borrows: the buffer, whose views these are. Address-stable: refreshes write in place.
    """

    __slots__ = ("planner", "sanitizer")

    def __init__(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: torch.Tensor) -> None:
        super().__init__(spec, plan_rows, num_compute_units, buffer)
        planner = planner_for(plan_rows)
        start = _word_end(self.capacity, plan_rows)
        end = start + planner.workspace_bytes(plan_rows)
        with torch.inference_mode(False):
            workspace, ticket = buffer[start:end], buffer[end : end + _WORD_BYTES].view(torch.int64)
        tables = Tables(self.work_info, self.reduce_info, self.staged_lens, ticket, workspace)
        numbers = plan_numbers(spec, plan_rows, self.capacity, self.max_partitions)
        device = str(buffer.device)
        self.planner = planner(device, numbers, tables)
        self.sanitizer = Sanitizer(device, numbers, tables)


def _word_end(capacity: int, plan_rows: int) -> int:
    """Where TorchPlan's tables end, rounded up to the words behind them."""
    return -(-table_ends(capacity, plan_rows)[2] // _WORD_BYTES) * _WORD_BYTES


class TritonBackend:
    """planlife.backends.base.Backend over Triton: for GPUs, and for a CPU in Triton's interpreter, which is for tests.

    max_plan_rows: most rows of one table set, None = no limit; a limit makes larger classes segments.
    """

    name = "triton"

    def __init__(self, max_plan_rows: int | None = None) -> None:
        if max_plan_rows is not None:
            check_int("max_plan_rows", max_plan_rows, at_least=1)
        self.max_plan_rows = max_plan_rows

    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        return [*_refuse_device(device.name), *refuse_numbers(self.name, spec, device)]

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        return ()

    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        return default_workgroup_budget(device.num_compute_units)

    def excluded(self, device: Any) -> Mapping[str, str]:
        return {}

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        end = _word_end(spec_capacity(spec, plan_rows, num_compute_units), plan_rows)
        return end + planner_for(plan_rows).workspace_bytes(plan_rows) + _WORD_BYTES

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return partials_bytes(spec, plan_rows, num_compute_units)

    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        prepare_planners(device.name)
        compile_decode(spec, device.name)
        return 1  # per class, as on every backend: kernels know no row count, so most classes find all compiled

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> TritonPlan:
        return TritonPlan(spec, plan_rows, num_compute_units, buffer)

    def refresh(self, tables: TritonPlan, context_lens: torch.Tensor | None, num_rows: int) -> None:
        is_emptied = context_lens is None
        if context_lens is None or num_rows == 0:
            context_lens, num_rows = tables.staged_lens, 0  # an address, of which nothing is read
        tables.planner.plan(context_lens, num_rows, is_emptied=is_emptied)

    def decode(
        self,
        tables: TritonPlan,
        scratch: torch.Tensor,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        softmax_scale: float,
        key_scale: Any,
        value_scale: Any,
        sinks: Any,
        lse: Any,
    ) -> None:
        key_scale, value_scale = scales_of_call(tables.spec, key_scale, value_scale)
        decode_into(
            output,
            query,
            key_cache,
            value_cache,
            block_tables,
            float(softmax_scale),
            spec=tables.spec,
            work_info=tables.work_info,
            reduce_info=tables.reduce_info,
            scratch=scratch,
            key_scale=key_scale,
            value_scale=value_scale,
            sinks=sinks,
            lse=lse,
        )

    def sanitize(
        self, tables: TritonPlan, context_lens: torch.Tensor, num_rows: int, flags: torch.Tensor, max_tokens: int
    ) -> None:
        tables.sanitizer.compare(context_lens if num_rows else tables.staged_lens, num_rows, flags, max_tokens)


@plain
def _refuse_device(name: str) -> list[str]:
    """Why Triton, as it was imported, runs nothing on this device."""
    if IS_MIXED:
        return [
            "TRITON_INTERPRET was changed after something imported triton, so that half of it is interpreted; set it "
            "or unset it before anything imports triton, or pass 'torch'"
        ]
    if IS_INTERPRETED:
        if name == "cpu":
            return []
        return [f"TRITON_INTERPRET is set: kernels run on CPU tensors only; unset it to serve {name}"]
    if name == "cpu":
        return [
            "Triton compiles for GPUs; pass backend='torch', or, for tests, set TRITON_INTERPRET=1 before anything "
            "imports triton"
        ]
    if not name.startswith("cuda"):
        return [f"Triton compiles for GPUs, and {name} is none; pass 'torch'"]
    if torch.version.hip is None:
        if not torch.cuda.is_available():
            return [
                f"this torch {torch.__version__} reaches no GPU, and so not {name}; pass 'torch', or install its build "
                "for CUDA"
            ]
        capability = torch.cuda.get_device_capability(name)
        if capability < _LEAST_CAPABILITY:
            found, wanted = (".".join(map(str, version)) for version in (capability, _LEAST_CAPABILITY))
            return [f"{name} has compute capability {found}, and Triton compiles for {wanted} and up; pass 'torch'"]
    return []
