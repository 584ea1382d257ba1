"""What a manager holds and has done, as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """Whole-life counts.

    hits, misses: plan_for calls that found their plan resident (whether they refreshed or skipped), or did not.
    fallbacks: plan_for calls, not layers. releases: graphs that are gone. stale_detected: refusals, and what the
    sanitizer saw. lengths_clamped: seen by the sanitizer only.
    """

    mints: int = 0
    compiles: int = 0
    compiles_after_seal: int = 0
    refreshes: int = 0
    refreshes_skipped: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rematerialised: int = 0
    releases: int = 0
    fallbacks: int = 0
    stale_detected: int = 0
    lengths_clamped: int = 0

    def to_dict(self) -> dict[str, int]:
        """All counts by name."""
        return asdict(self)


@dataclass(frozen=True)
class SiteLine:
    """One site, with the numbers that its plans are made by: None where the site is never planned.

    plan_of: the site whose plans it uses.
    """

    site: str
    max_partitions: int | None
    workgroup_budget: int | None
    plan_of: str | None


@dataclass(frozen=True)
class PlanLine:
    """One minted plan, or one that the backend could not compile, whose steps are the fallback's (state "refused").

    num_bytes: the block it takes when resident. note: what became of it if it is not.
    """

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
    sites: tuple[SiteLine, ...]
    plans: tuple[PlanLine, ...]
    arenas: tuple[ArenaLine, ...]
    counters: dict[str, int]
    excluded: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """All fields by name; sites, plans and arenas as dicts."""
        return asdict(self)

    def to_json(self) -> str:
        """to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = [
            f"planlife on {self.device}, backend {self.backend}"
            + (", closed" if self.closed else ", sealed" if self.sealed else ""),
            f"  resident {self.resident_bytes:,} of {self.budget_bytes:,} bytes budget "
            f"(worst case {self.worst_case_bytes:,}, peak {self.peak_bytes:,}), "
            f"{self.pinned_bytes:,} pinned by {self.num_graphs} graph{'s' * (self.num_graphs != 1)}",
        ]
        for site in self.sites:
            if site.workgroup_budget is None:
                lines.append(f"  site {site.site}: never planned")
            else:
                lines.append(
                    f"  site {site.site}: plans for {site.workgroup_budget:,} tasks, {site.max_partitions:,} per row"
                    + (f", shared with {site.plan_of}" if site.plan_of else "")
                )
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
