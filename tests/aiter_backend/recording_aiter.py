"""A minimal aiter for tests of the wrapper: the public signatures, the planner's integers, real attention, every call.

It checks what decides about exact shapes and nothing else. Strictness is for the double of `planlife.testing`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from planlife import aiter_library
from planlife.kernels.torch_decode import decode_into
from planlife.kernels.torch_planner import plan_into
from planlife.spec import PlanSpec, dtype_name

PACKAGES = ("aiter", "aiter.ops", "aiter.ops.flydsl")


@dataclass(frozen=True)
class PADecodePlan:
    work_info: torch.Tensor
    reduce_info: torch.Tensor
    num_kv_heads: int
    max_partitions: int
    sliding_window: int = 0
    query_length: int = 1

    @property
    def capacity(self) -> int:
        return int(self.work_info.shape[0])

    def validate(self, batch_size: int, num_kv_heads: int, device: torch.device) -> None:
        is_packed = batch_size <= self.capacity <= batch_size * self.max_partitions
        if tuple(self.reduce_info.shape) != (batch_size, 2) or num_kv_heads != self.num_kv_heads or not is_packed:
            raise ValueError("plan")


class RecordingAiter:
    """Functions of the defining module, and what they were called with.

    num_calls: how many calls to remember, which keep their tensors.
    """

    def __init__(self, num_calls: int | None = None) -> None:
        self.plans: deque[dict[str, Any]] = deque(maxlen=num_calls)
        self.decodes: deque[dict[str, Any]] = deque(maxlen=num_calls)
        self.refusal: Exception | None = None

    def plan_pa_decode(
        self,
        context_lengths: torch.Tensor,
        num_kv_heads: int,
        *,
        max_partitions: int | None = None,
        workgroup_budget: int | None = None,
        sliding_window: int = 0,
        query_length: int = 1,
        plan: PADecodePlan | None = None,
    ) -> PADecodePlan:
        self.plans.append({name: value for name, value in locals().items() if name != "self"})
        if plan is None or workgroup_budget is not None:
            raise ValueError("plans are minted over the manager's bytes, and their budget is fixed")
        batch = context_lengths.shape[0]
        found = (max_partitions, sliding_window, num_kv_heads, (batch, 2))
        if found != (plan.max_partitions, plan.sliding_window, plan.num_kv_heads, tuple(plan.reduce_info.shape)):
            raise ValueError("must match the reused plan")
        plan_into(
            plan.work_info,
            plan.reduce_info,
            context_lengths,
            max_partitions=plan.max_partitions,
            sliding_window=sliding_window,
            query_length=query_length,
        )
        return plan

    def pa_decode(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        context_lengths: torch.Tensor,
        block_tables: torch.Tensor,
        softmax_scale: float,
        query_length: int,
        *,
        context_partition_size: int = 256,
        compute_type: torch.dtype = torch.bfloat16,
        query_scale: Any = None,
        key_scale: Any = None,
        value_scale: Any = None,
        exp_sums: torch.Tensor | None = None,
        max_logits: torch.Tensor | None = None,
        temporary_output: torch.Tensor | None = None,
        alibi_slopes: Any = None,
        sinks: torch.Tensor | None = None,
        sliding_window: int = 0,
        work_plan: PADecodePlan,
        max_context_length: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        batch = context_lengths.shape[0]
        work_plan.validate(batch, work_plan.num_kv_heads, query.device)
        self.decodes.append(given)
        if self.refusal is not None:
            raise self.refusal
        plan = work_plan
        heads = plan.num_kv_heads
        if query.shape[0] != batch * query_length or output.shape != query.shape or block_tables.shape[0] != batch:
            raise ValueError("batch")
        if compute_type != key_cache.dtype:
            raise NotImplementedError("compute_type")
        layout = "packed" if key_cache.dim() == 5 else "nhd"
        page, dim = key_cache.shape[3 if layout == "packed" else 1], query.shape[2]
        if type(max_context_length) is not int or not 0 <= max_context_length <= block_tables.shape[1] * page:
            raise ValueError("max_context_length")
        rows = query_length * query.shape[1] // heads
        stats = (heads, plan.capacity, rows)
        wanted = [(exp_sums, stats, torch.float32), (max_logits, stats, torch.float32)]
        wanted.append((temporary_output, (*stats, dim), query.dtype))
        for scratch, shape, dtype in wanted:
            if (
                scratch is None
                or tuple(scratch.shape) != shape
                or scratch.dtype != dtype
                or not scratch.is_contiguous()
            ):
                raise ValueError("scratch")
        kind = "none" if key_scale is None else "per_tensor" if key_scale.numel() == 1 else "per_token"
        spec = PlanSpec(
            query.shape[1],
            heads,
            dim,
            page,
            max_context_tokens=max(max_context_length, query_length),
            q_dtype=query.dtype,
            kv_dtype=dtype_name(key_cache.dtype),
            kv_layout=layout,
            scales=kind,
            query_length=query_length,
            sliding_window=sliding_window,
        )
        decode_into(
            output,
            query,
            key_cache,
            value_cache,
            block_tables,
            softmax_scale,
            spec=spec,
            work_info=plan.work_info,
            reduce_info=plan.reduce_info,
            scratch=torch.empty(heads * plan.capacity * rows * (8 + 4 * dim), dtype=torch.uint8, device=query.device),
            key_scale=key_scale,
            value_scale=value_scale,
            sinks=sinks,
        )

    def module(self, **changes: Any) -> ModuleType:
        """The defining module; changes: other names, None takes one away."""
        module = ModuleType(aiter_library.DEFINING_MODULE)
        names = {"plan_pa_decode": self.plan_pa_decode, "pa_decode": self.pa_decode, "PADecodePlan": PADecodePlan}
        for name, value in {**names, **changes}.items():
            if value is not None:
                setattr(module, name, value)
        return module

    def library(self, **changes: Any) -> aiter_library.AiterLibrary:
        library, reasons = aiter_library.read(self.module(**changes))
        assert library is not None, reasons
        return library


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Callable[[], None]:
    """Make `module` importable, and let the process ask anew. Returns what forgets the answer."""
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, aiter_library.DEFINING_MODULE, module)
    # As the lazy export leaves it when it was used first: the attribute is the function.
    sys.modules["aiter.ops.flydsl"].pa_decode = getattr(module, "pa_decode", None)  # type: ignore[attr-defined]
    aiter_library.probe.cache_clear()
    return aiter_library.probe.cache_clear
