"""The torch backend: planner and decode in tensor ops. The semantic reference, and the default on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ambient import plain
from ..errors import ConfigError
from ..kernels.torch_decode import decode_into
from ..kernels.torch_planner import plan_into
from ..planner import default_workgroup_budget, spec_capacity
from ..spec import DTYPE_BYTES, INT32_MAX, PlanSpec, check_int
from .base import FLAG_CLAMPED, FLAG_STALE

#: In staged_lens: the tables were emptied on purpose, whatever the length buffer says.
EMPTIED = -1
_ALIGN_BYTES = 16


class TorchPlan:
    """One table set as views of the manager's bytes.

    work_info: int32[capacity, 4]. reduce_info: int32[plan_rows, 2]. staged_lens: int32[plan_rows].

    Borrows: the buffer, whose views these are. Address-stable: refreshes write in place.
    """

    __slots__ = ("capacity", "max_partitions", "reduce_info", "spec", "staged_lens", "work_info")

    def __init__(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: torch.Tensor) -> None:
        self.spec = spec
        self.capacity = spec_capacity(spec, plan_rows, num_compute_units)
        self.max_partitions = num_compute_units if spec.max_partitions is None else spec.max_partitions
        work_end, reduce_end, lens_end = table_ends(self.capacity, plan_rows)
        # In inference mode view(dtype) makes an inference tensor, which no step outside that mode could refresh.
        with torch.inference_mode(False):
            self.work_info = buffer[: self.capacity * 16].view(torch.int32).view(self.capacity, 4)
            self.reduce_info = buffer[work_end : work_end + plan_rows * 8].view(torch.int32).view(plan_rows, 2)
            self.staged_lens = buffer[reduce_end:lens_end].view(torch.int32)


def table_ends(capacity: int, plan_rows: int) -> tuple[int, int, int]:
    """Where work_info, reduce_info and staged_lens end; each starts aligned."""
    work_end = capacity * 16
    reduce_end = work_end + -(-plan_rows * 8 // _ALIGN_BYTES) * _ALIGN_BYTES
    return work_end, reduce_end, reduce_end + plan_rows * 4


def refuse_numbers(backend: str, spec: PlanSpec, device: Any) -> list[str]:
    """What the numbers of a spec rule out on a device, whichever of our own kernels decode it."""
    reasons = []
    pack = 16 // DTYPE_BYTES[spec.kv_dtype]
    if spec.kv_layout == "packed" and (spec.head_dim % pack or spec.page_size % pack):
        reasons.append(
            f"the {backend} backend does not read kv_layout='packed' with head_dim {spec.head_dim} and page_size "
            f"{spec.page_size}: a packed {spec.kv_dtype} cache has both in multiples of {pack}; use 'nhd' or 'hnd'"
        )
    if spec.max_partitions is not None and spec.max_partitions > device.num_compute_units:
        reasons.append(
            f"max_partitions={spec.max_partitions} is above the {device.num_compute_units} compute units "
            f"of {device.name}; pass at most that, or None"
        )
    return reasons


def partials_bytes(spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
    """Bytes of float32 maxima, sums and outputs of every slot of a table set."""
    slots = spec.num_kv_heads * spec_capacity(spec, plan_rows, num_compute_units)
    return slots * spec.query_rows_per_kv_head * (8 + 4 * spec.head_dim)


def scales_of_call(spec: PlanSpec, key_scale: Any, value_scale: Any) -> tuple[Any, Any]:
    """Scales as kernels take them: numbers as floats, and 1.0 where an FP8 cache with one per tensor is given none.

    Raises ConfigError unless scales are given where the spec has them, and only there.
    """
    if key_scale is None and value_scale is None and spec.scales == "per_tensor":
        return 1.0, 1.0
    for what, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (scale is None) != (spec.scales == "none"):
            found = "None" if scale is None else "given"
            raise ConfigError(f"{what} is {found}, but a {spec.kv_dtype} cache takes scales={spec.scales!r}.")
    return _as_host_float(key_scale), _as_host_float(value_scale)


class TorchBackend:
    """planlife.backends.base.Backend over plain tensor ops, for any device of torch.

    max_plan_rows: most rows of one table set, None = no limit; a limit makes larger classes segments.
    """

    name = "torch"

    def __init__(self, max_plan_rows: int | None = None) -> None:
        if max_plan_rows is not None:
            check_int("max_plan_rows", max_plan_rows, at_least=1)
        self.max_plan_rows = max_plan_rows

    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        return refuse_numbers(self.name, spec, device)

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        return ()

    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        return default_workgroup_budget(device.num_compute_units)

    def excluded(self, device: Any) -> Mapping[str, str]:
        if not device.name.startswith("cuda"):
            return {}
        return {
            "matrix products": "what torch keeps for its BLAS library from the first one on, about 32 MiB of cuBLAS"
        }

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return table_ends(spec_capacity(spec, plan_rows, num_compute_units), plan_rows)[2]

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return partials_bytes(spec, plan_rows, num_compute_units)

    @plain
    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        if device.name.startswith("cuda"):
            # The first matrix product on a device loads its library, which a recording stream refuses.
            one = torch.ones(1, 1, 1, dtype=torch.float32, device=device.name)
            torch.matmul(one, one)
        return 1

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> TorchPlan:
        return TorchPlan(spec, plan_rows, num_compute_units, buffer)

    def refresh(self, tables: TorchPlan, context_lens: torch.Tensor | None, num_rows: int) -> None:
        staged, spec = tables.staged_lens, tables.spec
        if context_lens is None:
            num_rows = 0
        else:
            staged[:num_rows].copy_(context_lens[:num_rows].clamp_min(0))
        staged[num_rows:].zero_()
        plan_into(
            tables.work_info,
            tables.reduce_info,
            staged,
            max_partitions=tables.max_partitions,
            sliding_window=spec.sliding_window,
            query_length=spec.query_length,
            max_context_tokens=spec.max_context_tokens,
        )
        if context_lens is None:
            staged.fill_(EMPTIED)

    def decode(
        self,
        tables: TorchPlan,
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
        spec = tables.spec
        key_scale, value_scale = scales_of_call(spec, key_scale, value_scale)
        decode_into(
            output,
            query,
            key_cache,
            value_cache,
            block_tables,
            float(softmax_scale),
            spec=spec,
            work_info=tables.work_info,
            reduce_info=tables.reduce_info,
            scratch=scratch,
            key_scale=key_scale,
            value_scale=value_scale,
            sinks=sinks,
            lse=lse,
        )

    def sanitize(
        self, tables: TorchPlan, context_lens: torch.Tensor, num_rows: int, flags: torch.Tensor, max_tokens: int
    ) -> None:
        is_live = (tables.staged_lens != EMPTIED).all()
        count_differences(tables, context_lens, num_rows, flags, max_tokens, is_live)


def count_differences(
    tables: TorchPlan,
    context_lens: torch.Tensor,
    num_rows: int,
    flags: torch.Tensor,
    max_tokens: int,
    is_live: torch.Tensor,
    longest_planned: int = INT32_MAX,
) -> None:
    """`Backend.sanitize` in tensor ops.

    is_live: bool[]: the tables were not emptied on purpose. longest_planned: what longer rows are in the tables.
    """
    lens = context_lens[:num_rows]
    wanted = torch.zeros_like(tables.staged_lens)
    wanted[:num_rows].copy_(lens.clamp(0, longest_planned))
    first_slots, num_slots = tables.reduce_info.to(torch.int64).unbind(1)
    # Not staged_lens: the tables are what a decode reads. An empty last row may start one slot past them.
    in_tables = tables.work_info[:, 3][first_slots.clamp(0, tables.capacity - 1)]
    planned = torch.where(num_slots > 0, in_tables, 0)
    flags[FLAG_STALE].add_((planned != wanted).any() & is_live)
    flags[FLAG_CLAMPED].add_((lens > max_tokens).sum())


def _as_host_float(scale: Any) -> torch.Tensor | float | None:
    """A host number as a float; a tensor as it is, because converting it would read it back."""
    return scale if scale is None or isinstance(scale, torch.Tensor) else float(scale)
