"""Which row counts a class is compiled for: those that its calls can have, and no others."""

from __future__ import annotations

from itertools import accumulate

import pytest

from planlife import CapacityLadder, PlanSpec
from planlife.sizing import Sizing
from planlife.testing.fakes import FakeBackend

SPEC = PlanSpec(8, 1, 64, 16, max_context_tokens=64)


def sizing_of(classes: list[int], limit: int | None) -> Sizing:
    backend = FakeBackend()
    backend.max_plan_rows = limit
    return Sizing({"a": SPEC}, {"a": CapacityLadder(classes)}, backend, 1, 8)


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("classes", [[5], [1, 2, 3], [2, 7, 16, 20], [9, 10]])
def test_the_fewest_rows_are_those_that_some_call_of_the_class_has(classes: list[int], limit: int | None) -> None:
    sizing, smaller = sizing_of(classes, limit), 0
    for class_rows in classes:
        sizes = sizing.segment_rows(class_rows)
        ends = list(accumulate(sizes))
        is_top = class_rows == classes[-1]
        found: dict[int, set[int]] = {}
        for rows in range(1 if is_top else smaller + 1, class_rows + 1):
            for size, end in zip(sizes, ends, strict=True):
                found.setdefault(size, set()).add(min(max(rows - (end - size), 0), size))
        wanted = {size: min(count for count in counts if count) for size, counts in found.items()}
        assert sizing.least_segment_rows("a", class_rows) == wanted
        smaller = class_rows
