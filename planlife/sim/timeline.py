"""Bytes and plans over time, in memory that does not grow with the length of what is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_BUCKETS = 1024
MAX_BARS = 64


@dataclass(slots=True)
class Bucket:
    """Some consecutive steps. start_us: of the first that was noted in it."""

    start_us: int
    min_bytes: int
    max_bytes: int
    last_bytes: int
    num_evictions: int = 0
    num_mints: int = 0


class MemoryLine:
    """The lowest and highest bytes of equally many steps each; twice as many steps per bucket whenever it is full."""

    def __init__(self) -> None:
        self.steps_per_bucket = 1
        self.buckets: dict[int, Bucket] = {}

    def note(self, step: int, now_us: int, low_bytes: int, high_bytes: int, last_bytes: int) -> Bucket:
        """Something happened in `step`, during which the bytes went from low to high, and it left last_bytes."""
        while step // self.steps_per_bucket >= MAX_BUCKETS:
            self._halve()
        index = step // self.steps_per_bucket
        bucket = self.buckets.get(index)
        if bucket is None:
            bucket = self.buckets[index] = Bucket(now_us, low_bytes, high_bytes, last_bytes)
        else:
            bucket.min_bytes = min(bucket.min_bytes, low_bytes)
            bucket.max_bytes = max(bucket.max_bytes, high_bytes)
            bucket.last_bytes = last_bytes
        return bucket

    def _halve(self) -> None:
        self.steps_per_bucket *= 2
        merged: dict[int, Bucket] = {}
        for index, bucket in self.buckets.items():
            into = merged.get(index // 2)
            if into is None:
                merged[index // 2] = bucket
                continue
            into.min_bytes = min(into.min_bytes, bucket.min_bytes)
            into.max_bytes = max(into.max_bytes, bucket.max_bytes)
            into.last_bytes = bucket.last_bytes
            into.num_evictions += bucket.num_evictions
            into.num_mints += bucket.num_mints
        self.buckets = merged

    def to_list(self) -> list[dict[str, Any]]:
        """The buckets in order of time."""
        return [
            {
                "t_us": bucket.start_us,
                "min_bytes": bucket.min_bytes,
                "max_bytes": bucket.max_bytes,
                "last_bytes": bucket.last_bytes,
                "evictions": bucket.num_evictions,
                "mints": bucket.num_mints,
            }
            for bucket in self.buckets.values()
        ]


class Lifetime:
    """When one plan was resident. Bars: [from, to) in microseconds; the shortest gaps close when there are too many."""

    __slots__ = ("_since_us", "bars", "num_joined", "pinned_since_us")

    def __init__(self) -> None:
        self.bars: list[tuple[int, int]] = []
        self.num_joined = 0
        self.pinned_since_us: int | None = None
        self._since_us: int | None = None

    def comes(self, now_us: int) -> None:
        self._since_us = now_us

    def goes(self, now_us: int) -> None:
        if self._since_us is None:
            return
        self.bars.append((self._since_us, now_us))
        self._since_us = None
        if len(self.bars) > MAX_BARS:
            gaps = sorted(range(1, len(self.bars)), key=lambda i: self.bars[i][0] - self.bars[i - 1][1])
            closing = set(gaps[: MAX_BARS // 2])
            joined: list[tuple[int, int]] = []
            for i, (start_us, end_us) in enumerate(self.bars):
                if i in closing:
                    joined[-1] = (joined[-1][0], end_us)
                else:
                    joined.append((start_us, end_us))
            self.num_joined += len(self.bars) - len(joined)
            self.bars = joined
