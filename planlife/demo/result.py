"""What a demo run measured."""

from __future__ import annotations

from dataclasses import dataclass

from ..report import MemoryReport
from .config import DemoConfig


@dataclass
class StepCounts:
    """What ran. replayed, eager, fallback and dummy add up to the steps."""

    replayed: int = 0
    eager: int = 0
    fallback: int = 0
    dummy: int = 0
    dummy_replayed: int = 0
    verify: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    draft_passes: int = 0
    draft_passes_replayed: int = 0
    ubatch: int = 0
    recaptured: int = 0
    tokens: int = 0

    @property
    def steps(self) -> int:
        return self.replayed + self.eager + self.fallback + self.dummy


@dataclass(frozen=True)
class DoubleCounts:
    """What the double of aiter was, and what it saw. Its compile keys and violations are its own count.

    num_decodes: calls, those that graphs recorded among them.
    """

    arch: str
    generation: str
    num_decodes: int
    num_compile_keys: int
    num_compile_keys_after_seal: int
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.num_decodes > 0 and self.num_compile_keys_after_seal == 0 and not self.violations

    def rows(self) -> list[tuple[str, str]]:
        num_before = self.num_compile_keys - self.num_compile_keys_after_seal
        rows = [
            ("aiter", f"a double ({self.generation}, as on a {self.arch}): torch ops behind the library's checks"),
            ("its compile keys after seal", f"{self.num_compile_keys_after_seal:,} ({num_before:,} before)"),
            ("its violations", f"{len(self.violations):,}"),
        ]
        if self.violations:
            rows.append(("first violation", self.violations[0]))
        return rows


@dataclass(frozen=True)
class DemoResult:
    """One finished run. `report` is the manager's own at the end of serving, before it was closed."""

    config: DemoConfig
    counts: StepCounts
    report: MemoryReport
    num_graphs: int
    num_graphs_refused: int
    graph_kind: str  #: the class of the graphs
    #: As Triton counts them; None where another backend served.
    num_triton_compiles: int | None
    num_triton_compiles_after_seal: int | None
    double: DoubleCounts | None  #: of aiter; None where what ran is what is installed
    num_requests: int
    num_finished: int
    num_clipped: int
    kv_pool_bytes: int
    num_rows_compared: int
    num_rows_cut: int
    num_mismatches: int
    first_mismatch: str
    largest_error: float
    startup_seconds: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Outputs were compared, none was off, serving compiled nothing, and a double had nothing to object."""
        num_compiles = self.report.counters["compiles_after_seal"] + (self.num_triton_compiles_after_seal or 0)
        is_right = self.num_rows_compared > 0 and self.num_mismatches == 0 and num_compiles == 0
        return is_right and (self.double is None or self.double.ok)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the final table."""
        config, counts, report = self.config, self.counts, self.report
        counters = report.counters
        num_refused = self.num_graphs_refused
        refused = f" ({num_refused} size{'s' * (num_refused != 1)} refused for lack of room)" if num_refused else ""
        triton = "not used"
        if self.num_triton_compiles is not None and self.num_triton_compiles_after_seal is not None:
            num_before = self.num_triton_compiles - self.num_triton_compiles_after_seal
            triton = f"{self.num_triton_compiles_after_seal:,} ({num_before:,} before)"
        rows = [
            ("device", report.device),
            ("backend", report.backend),
            *(self.double.rows() if self.double else ()),
            ("capture style", config.style),
            ("KV cache", f"{config.kv_dtype}, {config.layout}, scales {config.kv_scales}"),
            ("sliding window", f"{config.window:,} tokens; it cut {self.num_rows_cut:,} output rows"),
            ("graphs captured", f"{self.num_graphs:,}{refused}"),
            ("graphs are", self.graph_kind or "none"),
            ("captured again in service", f"{counts.recaptured:,}"),
            ("steps", f"{counts.steps:,}"),
            ("steps replayed", f"{counts.replayed:,}"),
            ("steps eager", f"{counts.eager:,}"),
            ("steps on the fallback", f"{counts.fallback:,} ({counters['fallbacks']:,} plans, drafts included)"),
            ("dummy steps", f"{counts.dummy:,} ({counts.dummy_replayed:,} replayed)"),
            ("verify passes", f"{counts.verify:,}, query length {config.verify_tokens}"),
            ("draft tokens accepted", f"{counts.drafts_accepted:,} of {counts.drafts_verified:,}"),
            ("draft passes", f"{counts.draft_passes:,} ({counts.draft_passes_replayed:,} replayed)"),
            ("steps in two ubatches", f"{counts.ubatch:,}"),
            ("tokens", f"{counts.tokens:,}"),
            ("requests finished", f"{self.num_finished:,} of {self.num_requests:,}"),
            ("requests folded or cut to fit", f"{self.num_clipped:,} of {self.num_requests:,}"),
            ("mints", f"{counters['mints']:,}"),
            ("compiles", f"{counters['compiles']:,}"),
            ("compiles after seal", f"{counters['compiles_after_seal']:,}"),
            ("Triton's own count after seal", triton),
            ("refreshes", f"{counters['refreshes']:,}"),
            ("refreshes skipped", f"{counters['refreshes_skipped']:,}"),
            ("evictions", f"{counters['evictions']:,}"),
            ("rematerialised", f"{counters['rematerialised']:,}"),
            ("plan bytes resident", f"{report.resident_bytes:,}"),
            ("plan bytes budget", f"{report.budget_bytes:,}"),
            ("plan bytes worst case", f"{report.worst_case_bytes:,}"),
            ("plan bytes peak", f"{report.peak_bytes:,}"),
            ("KV pool bytes", f"{self.kv_pool_bytes:,}"),
            ("output rows compared", f"{self.num_rows_compared:,}"),
            ("largest relative error", f"{self.largest_error:.2e}"),
            ("mismatches", f"{self.num_mismatches:,}"),
            ("seconds", f"{self.seconds:.1f} ({self.startup_seconds:.1f} to start up)"),
        ]
        if self.first_mismatch:
            rows.append(("first mismatch", self.first_mismatch))
        return rows
