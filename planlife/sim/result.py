"""What a simulation found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ClassLine:
    """One class: the steps that rode it, their rows, the rows that it added, and how often its plan was not there."""

    class_rows: int
    steps: int = 0
    rows: int = 0
    padded_rows: int = 0
    misses: int = 0


@dataclass(frozen=True)
class PolicyResult:
    """One policy over one log. Times in microseconds.

    start, service: PlanManager's counters of the start-up (capture phase) and of serving. num_uncaptured: classes that
    had no room to be captured in. unshared_bytes: of the minted plans, if each had scratch of its own. stall_us: of
    compiles while serving. added_*: what planning adds to a step: the host's planning and refresh, compiles, buffers
    that come back, launching eagerly instead of replaying, and padded rows.
    """

    name: str
    note: str
    classes: tuple[int, ...]
    captured: tuple[int, ...]
    num_uncaptured: int
    budget_bytes: int
    worst_case_bytes: int
    peak_bytes: int
    resident_bytes: int
    unshared_bytes: int
    steps: int
    dummies: int
    real_rows: int
    padded_rows: int
    replays: int
    start: dict[str, int]
    service: dict[str, int]
    start_compile_us: float
    stall_us: float
    longest_stall_us: float
    added_p50_us: float
    added_p99_us: float
    added_max_us: float
    added_total_us: float
    span_us: int
    class_lines: tuple[ClassLine, ...] = field(repr=False)
    memory: list[dict[str, Any]] = field(repr=False)
    lifetimes: list[dict[str, Any]] = field(repr=False)

    @property
    def replay_share(self) -> float:
        return self.replays / self.steps if self.steps else 0.0

    @property
    def padding_share(self) -> float:
        """Padded rows by real rows."""
        return self.padded_rows / self.real_rows if self.real_rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, and the two shares."""
        return {**asdict(self), "replay_share": self.replay_share, "padding_share": self.padding_share}


def quantiles(weights: Mapping[float, int], shares: Sequence[float]) -> list[float]:
    """The least value that at least each share of the weight does not exceed; 0 where there is no weight."""
    total = sum(weights.values())
    found = []
    ascending = sorted(weights.items())
    for share in shares:
        passed = 0
        answer = 0.0
        for value, weight in ascending:
            passed += weight
            answer = value
            if passed >= share * total:
                break
        found.append(answer)
    return found
