"""What an operation costs in time. Measured elsewhere; every figure says where."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..errors import ConfigError


@dataclass(frozen=True)
class Costs:
    """Microseconds per operation, and where each figure is from.

    compile_us: a class that the planner was never compiled for, cold. allocate_us: one buffer that comes (back) into
    memory. refresh_us: one refresh launched from the host, before a replay or an eager step. plan_us: the host side of
    one plan_for that refreshes. eager_layer_us: what launching one layer's decode from the host costs more than
    replaying it. padded_row_us: one row more in the model.
    """

    name: str
    compile_us: float
    allocate_us: float
    refresh_us: float
    plan_us: float
    eager_layer_us: float
    padded_row_us: float
    source: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_us") and not (type(value) in (int, float) and 0 <= value < 1e12):
                raise ConfigError(f"{field.name} must be a number of microseconds in [0, 1e12), got {value!r}.")

    def with_changes(self, **changes: float) -> Costs:
        """The same with some figures given by the user, and a source that says so. Raises ConfigError."""
        known = [field.name for field in fields(self) if field.name.endswith("_us")]
        unknown = sorted(changes.keys() - set(known))
        if unknown:
            raise ConfigError(f"no cost {', '.join(unknown)}: there are {', '.join(known)}.")
        if not changes:
            return self
        values: dict[str, Any] = {
            **changes,
            "source": f"{self.source} Given by the user: {', '.join(sorted(changes))}.",
        }
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


_COMMON = (
    "plan_us: plan_for on a two-core CPU with the backend left out (`planlife bench simulate`). padded_row_us: 2 x 8e9 "
    "operations of an 8B model at 600 TFLOP/s are 27 us, hidden where the weights' read time dominates; 5 is taken."
)

COSTS = {
    costs.name: costs
    for costs in (
        Costs(
            "mi355x",
            compile_us=68_500,
            allocate_us=40,
            refresh_us=16,
            plan_us=7,
            eager_layer_us=30,
            padded_row_us=5,
            source="compile_us: 65-72 ms cold per new row count of aiter's planner on MI355X, its middle; with a warm "
            "disk cache 1.2-1.7 ms. refresh_us: 16 us for a steady refresh there. allocate_us, eager_layer_us: as on "
            "an H200. " + _COMMON,
        ),
        Costs(
            "h200",
            compile_us=190_000,
            allocate_us=40,
            refresh_us=29,
            plan_us=7,
            eager_layer_us=30,
            padded_row_us=5,
            source="compile_us: 163-220 ms cold per new row count of aiter's Triton planner on an H200 (1 to 64 rows), "
            "its middle. refresh_us: its eager call, 28-30 us of host time. allocate_us: torch.empty through the "
            "allocator thread, torch 2.11. eager_layer_us: an eager decode call of FlashInfer takes 27-62 us of host "
            "time, launched in a graph none. " + _COMMON,
        ),
    )
}
