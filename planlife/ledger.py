"""The accountant: how many bytes are resident, how many may be, how many ever were."""

from __future__ import annotations


class Ledger:
    """One sum for all of planlife's buffers on one device, in allocator blocks."""

    __slots__ = ("budget_bytes", "peak_bytes", "resident_bytes")

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self.peak_bytes = 0

    @property
    def room_bytes(self) -> int:
        return self.budget_bytes - self.resident_bytes

    def charge(self, num_bytes: int) -> None:
        """Count a buffer that was allocated. Whoever allocates has made room first."""
        assert num_bytes <= self.room_bytes, "a buffer was allocated before room was made for it"
        self.resident_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def credit(self, num_bytes: int) -> None:
        """Count a buffer that was freed."""
        assert num_bytes <= self.resident_bytes, "more bytes were freed than were resident"
        self.resident_bytes -= num_bytes
