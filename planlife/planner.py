"""The work plan as plain integers: the formulas that all backends share, and a host planner for tests and fakes.

Source of the formulas: aiter's FlyDSL pa_decode planner (docs/concepts.md, "The integers").
"""

from __future__ import annotations

from collections.abc import Sequence

from .spec import PlanSpec

TILE_TOKENS = 256  #: a task covers whole tiles of this many tokens


def plan_capacity(
    plan_rows: int, *, num_kv_heads: int, num_cu: int, max_partitions: int | None, workgroup_budget: int | None
) -> int:
    """Task slots of a table set: min(rows * M, max(rows, ceil(budget / kv_heads)))."""
    partitions = num_cu if max_partitions is None else max_partitions
    budget = 2 * num_cu if workgroup_budget is None else workgroup_budget
    return min(plan_rows * partitions, max(plan_rows, -(-budget // num_kv_heads)))


def spec_capacity(spec: PlanSpec, plan_rows: int, num_cu: int) -> int:
    """`plan_capacity` with a spec's numbers."""
    return plan_capacity(
        plan_rows,
        num_kv_heads=spec.num_kv_heads,
        num_cu=num_cu,
        max_partitions=spec.max_partitions,
        workgroup_budget=spec.workgroup_budget,
    )


def plan_tables(
    context_lens: Sequence[int],
    *,
    num_kv_heads: int,
    num_cu: int,
    max_partitions: int | None = None,
    workgroup_budget: int | None = None,
    sliding_window: int = 0,
    query_length: int = 1,
) -> tuple[list[list[int]], list[list[int]]]:
    """(work_info, reduce_info) as nested lists of ints.

    work_info[slot] = [row, begin tile, end tile, length]; reduce_info[row] = [first slot, number of slots]. Negative
    lengths act as 0; slots past the last task are zeros.
    """
    raise NotImplementedError
