"""The fallbacks that have names: a backend's decode with one task per row, planned on the fly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..ambient import plain
from ..kernels.torch_write import overwrite
from ..spec import PlanSpec
from .base import Backend

_CHUNK_ROWS = 1024  # rows that are decoded at a time: the scratch stays bounded


class DenseFallback:
    """Decodes without a plan of the manager's. backend: one whose `compile` does not depend on the rows.

    Owns nothing between calls.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @plain
    def prepare(self, specs: Iterable[PlanSpec], device: Any) -> None:
        """Compile what calls with these specs need, so that none compiles. Capture: no. Syncs: may."""
        with device.relaxed():
            for spec in specs:
                self._backend.compile(_one_task_each(spec), _CHUNK_ROWS, device)

    @plain
    def __call__(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        softmax_scale: float,
        *,
        spec: PlanSpec,
        key_scale: Any,
        value_scale: Any,
        sinks: Any,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Decode context_lens: int32[rows]; the other tensors as for `PlanManager.pa_decode`.

        Query rows behind are zeroed, and their lse is -inf.

        Raises ConfigError. Capture: yes. Syncs: no. Allocates: tables and scratch, for the call only (R26).
        """
        backend, spec = self._backend, _one_task_each(spec)
        num_rows, length = context_lens.shape[0], spec.query_length
        for start in range(0, num_rows, _CHUNK_ROWS):
            rows = slice(start, min(start + _CHUNK_ROWS, num_rows))
            query_rows = slice(rows.start * length, rows.stop * length)
            plan_rows = rows.stop - rows.start
            tables, scratch = (
                torch.empty(num_bytes, dtype=torch.uint8, device=query.device)
                for num_bytes in (backend.table_bytes(spec, plan_rows, 1), backend.scratch_bytes(spec, plan_rows, 1))
            )
            plan = backend.make_tables(spec, plan_rows, 1, tables)
            backend.refresh(plan, context_lens[rows], plan_rows)
            backend.decode(
                plan,
                scratch,
                output[query_rows],
                query[query_rows],
                key_cache,
                value_cache,
                block_tables[rows],
                softmax_scale,
                key_scale,
                value_scale,
                sinks,
                None if lse is None else lse[query_rows],
            )
        overwrite(output[num_rows * length :], 0.0)
        if lse is not None:
            overwrite(lse[num_rows * length :], -torch.inf)


def _one_task_each(spec: PlanSpec) -> PlanSpec:
    return replace(spec, max_partitions=1)
