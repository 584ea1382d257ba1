"""How many bytes each buffer takes, before any exists: arithmetic over the configuration, in allocator blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .backends.base import Backend
from .device import block_bytes
from .ladder import CapacityLadder
from .spec import PlanSpec

#: Sub-buffers of one allocation start at multiples of this, so that every view is as aligned as an allocation.
ALIGN_BYTES = 256


def align(num_bytes: int) -> int:
    """`num_bytes` rounded up to ALIGN_BYTES."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Sizing:
    """Byte formulas of one configuration; the same for planning memory, for allocating it and for estimates."""

    def __init__(
        self,
        sites: Mapping[str, PlanSpec],
        ladders: Mapping[str, CapacityLadder],
        backend: Backend,
        ubatches: int,
        num_compute_units: int,
        refused: Collection[str] = (),
    ) -> None:
        """sites: settled specs. refused: sites that are never minted, so that they take no bytes."""
        self._sites = sites
        self._served = {site: spec for site, spec in sites.items() if site not in refused}
        self._ladders = ladders
        self._backend = backend
        self._ubatches = ubatches
        self._num_compute_units = num_compute_units

    def segment_rows(self, class_rows: int) -> list[int]:
        """Rows of each table set of a class: one set, or full ones and a rest where the backend has a limit (R23)."""
        limit = self._backend.max_plan_rows
        if limit is None or class_rows <= limit:
            return [class_rows]
        full, rest = divmod(class_rows, limit)
        return [limit] * full + ([rest] if rest else [])

    def least_segment_rows(self, site: str, class_rows: int) -> dict[int, int]:
        """Rows of each kind of table set of a class -> the fewest that a call of the class decodes by one of them.

        Fewer rows ride a smaller class. The top class has no such bound: it takes the rest of more rows than it has.
        """
        classes = self._ladders[site].classes
        position = classes.index(class_rows)
        least = 1 if position in (0, len(classes) - 1) else classes[position - 1] + 1
        found: dict[int, int] = {}
        first_row = 0
        for rows in self.segment_rows(class_rows):
            found[rows] = min(found.get(rows, rows), max(least - first_row, 1))
            first_row += rows
        return found

    def tables_bytes(self, site: str, segment_rows: int) -> int:
        """One table set, as a sub-buffer."""
        return align(self._backend.table_bytes(self._sites[site], segment_rows, self._num_compute_units))

    def plan_bytes(self, site: str, class_rows: int) -> int:
        """The pair of table sets (eager and in-graph), all segments, one block."""
        return block_bytes(2 * sum(self.tables_bytes(site, rows) for rows in self.segment_rows(class_rows)))

    def arena_bytes(self, lane: str) -> int:
        """The lane's scratch: calls of a lane are serial, so the largest call decides (R21)."""
        return block_bytes(
            max(
                (
                    self._backend.scratch_bytes(spec, rows, self._num_compute_units)
                    for site, spec in self._served.items()
                    if spec.lane == lane
                    for class_rows in self._ladders[site].classes
                    for rows in self.segment_rows(class_rows)
                ),
                default=0,
            )
        )

    def lanes(self) -> list[str]:
        """Names of all lanes, in the order of their sites."""
        return list(dict.fromkeys(spec.lane for spec in self._sites.values()))

    def worst_case_bytes(self) -> int:
        """Everything resident at once: what a full warm-up takes (R19)."""
        plans = sum(
            self.plan_bytes(site, class_rows)
            for site, spec in self._served.items()
            if spec.plan_of is None
            for class_rows in self._ladders[site].classes
        )
        arenas = sum(self.arena_bytes(lane) for lane in self.lanes())
        return self._ubatches * (plans + arenas)

    def min_budget_bytes(self) -> int:
        """The largest need of one call: its pair and its arena."""
        return max(
            (
                self.plan_bytes(site, class_rows) + self.arena_bytes(spec.lane)
                for site, spec in self._served.items()
                for class_rows in self._ladders[site].classes
            ),
            default=0,
        )
