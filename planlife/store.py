"""Which items are resident, who goes first, and what became of those that left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from cachetools import LRUCache

from .item import Item, ItemKey, State
from .ledger import Ledger


@dataclass(frozen=True)
class Tombstone:
    """Why an item is not resident any more."""

    reason: str
    at_call: int  #: the manager's count of slow plan_for calls when it happened

    def __str__(self) -> str:
        return f"{self.reason} (at planning call {self.at_call})"


class Store:
    """Resident items, least recently used first, under the ledger's budget; pinned ones are out of reach.

    Owns: the items' residency. tombstones: why an item is not resident, by key. Buffers are allocated by the caller,
    between `choose_victims` and `place`.
    """

    def __init__(self, ledger: Ledger, free: Callable[[Any, int], None]) -> None:
        self._ledger = ledger
        self._free = free
        # Keeps the order only; the byte rule is the ledger's, since pinned items count there and not here.
        self._evictable: LRUCache[ItemKey, Item] = LRUCache(maxsize=inf)
        self._pinned: dict[ItemKey, Item] = {}
        self._evictable_bytes = 0
        self.tombstones: dict[ItemKey, Tombstone] = {}

    def __iter__(self) -> Iterator[Item]:
        yield from self._by_age()
        yield from self._pinned.values()

    @property
    def pinned_bytes(self) -> int:
        return sum(item.num_bytes for item in self._pinned.values())

    def touch(self, item: Item) -> None:
        """`item` was just used."""
        self._evictable.get(item.key)

    def has_room(self, need_bytes: int, keep: Collection[Item] = ()) -> bool:
        """Whether `need_bytes` fit, if all is evicted that is neither pinned nor in `keep`. Looks at no other item."""
        kept_bytes = sum(item.num_bytes for item in keep if item.key in self._evictable)
        return need_bytes <= self._ledger.room_bytes + self._evictable_bytes - kept_bytes

    def choose_victims(self, need_bytes: int, keep: Collection[Item] = ()) -> list[Item] | None:
        """The oldest items whose eviction makes room for `need_bytes`; None if pins (and `keep`) leave none.

        Changes nothing, the order included.
        """
        missing_bytes = need_bytes - self._ledger.room_bytes
        if missing_bytes <= 0:
            return []
        victims = []
        for item in self._by_age():
            if item in keep:
                continue
            victims.append(item)
            missing_bytes -= item.num_bytes
            if missing_bytes <= 0:
                return victims
        return None

    def place(self, item: Item, buffer: Any, content: Any, stream: int) -> None:
        """`item` has its buffer now, allocated for `stream`, and what it built of it."""
        item.attach(buffer, content, stream)
        self._ledger.charge(item.num_bytes)
        item.move(State.RESIDENT)
        self._admit(item)
        self.tombstones.pop(item.key, None)

    def reorder(self, items: list[Item]) -> None:
        """Make `items` the order of use again, oldest first, as far as they are here; others stay older."""
        for item in items:
            if item.key in self._evictable:
                self._evictable[item.key] = self._evictable.pop(item.key)

    def evict(self, item: Item, tombstone: Tombstone) -> None:
        """Free the buffer of a resident item that no graph pins."""
        item.move(State.EVICTED)
        self._withdraw(item)
        self._ledger.credit(item.num_bytes)
        self.tombstones[item.key] = tombstone
        self._free(item.detach(), item.stream)

    def pin(self, item: Item) -> None:
        """One more graph reads `item`."""
        if item.num_pins == 0:
            item.move(State.PINNED)
            self._pinned[item.key] = self._withdraw(item)
        item.num_pins += 1

    def unpin(self, item: Item) -> None:
        """One graph less; the last one makes the item evictable again, as just used."""
        item.num_pins -= 1
        if item.num_pins == 0:
            item.move(State.RESIDENT)
            self._admit(self._pinned.pop(item.key))

    def _admit(self, item: Item) -> None:
        self._evictable[item.key] = item
        self._evictable_bytes += item.num_bytes

    def _withdraw(self, item: Item) -> Item:
        self._evictable_bytes -= item.num_bytes
        return self._evictable.pop(item.key)

    def _by_age(self) -> list[Item]:
        """Oldest first. cachetools shows its order only by giving items up, so they are put back in that order."""
        items = []
        while self._evictable:
            items.append(self._evictable.popitem()[1])
        for item in items:
            self._evictable[item.key] = item
        return items
