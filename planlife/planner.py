"""The work plan as plain integers: the formulas all backends share, and a host planner for tests and fakes.

Source of the formulas: aiter's FlyDSL pa_decode planner (docs/concepts.md, "The integers").
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from .errors import ConfigError
from .spec import PlanSpec, check_int

TILE_TOKENS = 256  #: a task covers whole tiles of this many tokens


_INT32_MAX = 2**31 - 1


def planned_window(sliding_window: int) -> int:
    """The window as the formulas take it: 0 (or -1) = none, and no wider than a length can be."""
    return min(max(sliding_window, 0), _INT32_MAX)


def default_workgroup_budget(num_cu: int) -> int:
    """Tasks to plan for where nobody knows better: 2 x compute units (R38)."""
    return 2 * num_cu


def plan_capacity(
    plan_rows: int, *, num_kv_heads: int, num_cu: int, max_partitions: int | None, workgroup_budget: int | None
) -> int:
    """Task slots of a table set: min(rows * M, max(rows, ceil(budget / kv_heads)))."""
    partitions = num_cu if max_partitions is None else max_partitions
    budget = default_workgroup_budget(num_cu) if workgroup_budget is None else workgroup_budget
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
    max_context_tokens: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """(work_info, reduce_info) as nested lists of ints.

    context_lens: one int per row, tokens, in int32; negative ones act as 0.
    sliding_window: 0 and -1 = none.
    max_context_tokens: longer rows get the tiles of rows of so many tokens; None = no bound.
    work_info[slot] = [row, begin tile, end tile, length]; reduce_info[row] = [first slot, number of slots].
    The length is the row's own, past max_context_tokens too. Slots past the last task are zeros.

    Raises ConfigError.
    """
    lens = [_check_length(row, length) for row, length in enumerate(context_lens)]
    if not lens:
        raise ConfigError("context_lens must have at least one row: a step without rows has no plan.")
    check_int("num_kv_heads", num_kv_heads, at_least=1)
    check_int("num_cu", num_cu, at_least=1)
    if max_partitions is not None:
        check_int("max_partitions (at most the compute units)", max_partitions, at_least=1, at_most=num_cu)
    if workgroup_budget is not None:
        check_int("workgroup_budget", workgroup_budget, at_least=1)
    check_int("sliding_window", sliding_window, at_least=-1)
    check_int("query_length", query_length, at_least=1)
    if max_context_tokens is not None:
        check_int("max_context_tokens", max_context_tokens, at_least=1)

    capacity = plan_capacity(
        len(lens),
        num_kv_heads=num_kv_heads,
        num_cu=num_cu,
        max_partitions=max_partitions,
        workgroup_budget=workgroup_budget,
    )
    partitions = num_cu if max_partitions is None else max_partitions
    window = planned_window(sliding_window)
    held = lens if max_context_tokens is None else [min(n, max_context_tokens) for n in lens]
    first_tiles = [max(n - (query_length - 1) - window, 0) // TILE_TOKENS if window else 0 for n in held]
    num_tiles = [-(-n // TILE_TOKENS) - first for n, first in zip(held, first_tiles, strict=True)]
    total_tiles = max(sum(num_tiles), 1)
    # Every active row has one slot of its own; the rest is shared in proportion to tiles. Rounding the
    # running sums, not the shares, keeps their total exact.
    spare_slots = capacity - sum(n > 0 for n in num_tiles)

    work_info = [[0, 0, 0, 0] for _ in range(capacity)]
    reduce_info = []
    slot = tiles_before = 0
    for row, (length, first, tiles) in enumerate(zip(lens, first_tiles, num_tiles, strict=True)):
        tiles_after = tiles_before + tiles
        shared = tiles_after * spare_slots // total_tiles - tiles_before * spare_slots // total_tiles
        tasks = min((tiles > 0) + shared, tiles, partitions)
        reduce_info.append([slot, tasks])
        for part in range(tasks):
            begin, end = first + part * tiles // tasks, first + (part + 1) * tiles // tasks
            work_info[slot + part] = [row, begin, end, length]
        slot += tasks
        tiles_before = tiles_after
    return work_info, reduce_info


def _check_length(row: int, length: object) -> int:
    """A length as a plain int >= 0; numpy ints are fine, a bool or a float is a mistake."""
    try:
        value = operator.index(length)  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None or isinstance(length, bool):
        raise ConfigError(f"context_lens[{row}] must be an int, got {length!r} ({type(length).__name__}).")
    if not -_INT32_MAX - 1 <= value <= _INT32_MAX:
        raise ConfigError(f"context_lens[{row}] must fit int32, got {value}.")
    return max(value, 0)
