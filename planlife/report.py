"""What a manager holds and has done, as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


class Counters:
    """Whole-life counts. `hits` is a plan_for that found its plan resident, whether it refreshed or skipped."""

    NAMES = (
        "mints",
        "compiles",
        "compiles_after_seal",
        "refreshes",
        "refreshes_skipped",
        "hits",
        "misses",
        "evictions",
        "rematerialised",
        "releases",
        "fallbacks",
        "stale_detected",
        "lengths_clamped",
    )
    __slots__ = NAMES

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, 0)

    mints: int
    compiles: int
    compiles_after_seal: int
    refreshes: int
    refreshes_skipped: int
    hits: int
    misses: int
    evictions: int
    rematerialised: int
    releases: int
    fallbacks: int
    stale_detected: int
    lengths_clamped: int

    def to_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.NAMES}


@dataclass(frozen=True)
class PlanLine:
    """One minted plan. num_bytes: the block it takes when resident. note: what became of it if it is not."""

    site: str
    class_rows: int
    ubatch: int
    state: str
    num_bytes: int
    num_pins: int
    note: str = ""


@dataclass(frozen=True)
class ArenaLine:
    """One lane's scratch."""

    lane: str
    ubatch: int
    state: str
    num_bytes: int
    num_pins: int
    note: str = ""


@dataclass(frozen=True)
class MemoryReport:
    """Bytes in allocator blocks; `resident_bytes` is the sum over resident plans and arenas.

    excluded: bytes planlife causes that no budget of ours bounds, with what they are.
    """

    device: str
    backend: str
    budget_bytes: int
    worst_case_bytes: int
    resident_bytes: int
    pinned_bytes: int
    peak_bytes: int
    num_graphs: int
    sealed: bool
    closed: bool
    plans: tuple[PlanLine, ...]
    arenas: tuple[ArenaLine, ...]
    counters: dict[str, int]
    excluded: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = [
            f"planlife on {self.device}, backend {self.backend}"
            + (", closed" if self.closed else ", sealed" if self.sealed else ""),
            f"  resident {self.resident_bytes:,} of {self.budget_bytes:,} bytes budget "
            f"(worst case {self.worst_case_bytes:,}, peak {self.peak_bytes:,}), "
            f"{self.pinned_bytes:,} pinned by {self.num_graphs} graph{'s' * (self.num_graphs != 1)}",
        ]
        for plan in self.plans:
            lines.append(
                f"  plan {plan.site}/{plan.class_rows}/ub{plan.ubatch}: {plan.state}, {plan.num_bytes:,} bytes"
                + (f", {plan.num_pins} pin{'s' * (plan.num_pins != 1)}" if plan.num_pins else "")
                + (f" - {plan.note}" if plan.note else "")
            )
        for arena in self.arenas:
            lines.append(
                f"  scratch {arena.lane}/ub{arena.ubatch}: {arena.state}, {arena.num_bytes:,} bytes"
                + (f", {arena.num_pins} pin{'s' * (arena.num_pins != 1)}" if arena.num_pins else "")
                + (f" - {arena.note}" if arena.note else "")
            )
        lines.append("  " + ", ".join(f"{name} {value:,}" for name, value in self.counters.items()))
        lines.extend(f"  not counted: {name}: {text}" for name, text in self.excluded.items())
        return "\n".join(lines)
