"""Which items are resident, who goes first, and what became of those that left."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

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
        #: Least recently used first. The byte rule is the ledger's: pinned items count there and are not here.
        self._evictable: OrderedDict[ItemKey, Item] = OrderedDict()
        self._pinned: dict[ItemKey, Item] = {}
        self.tombstones: dict[ItemKey, Tombstone] = {}

    def __iter__(self) -> Iterator[Item]:
        yield from self._evictable.values()
        yield from self._pinned.values()

    @property
    def pinned_bytes(self) -> int:
        return sum(item.num_bytes for item in self._pinned.values())

    def touch(self, item: Item) -> None:
        """`item` was just used."""
        if item.key in self._evictable:
            self._evictable.move_to_end(item.key)

    def choose_victims(self, need_bytes: int, keep: Collection[Item] = ()) -> list[Item] | None:
        """The oldest items whose eviction makes room for `need_bytes`; None if pins (and `keep`) leave none.

        Changes nothing, the order included.
        """
        missing_bytes = need_bytes - self._ledger.room_bytes
        if missing_bytes <= 0:
            return []
        victims = []
        for item in self._evictable.values():
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
        self._evictable[item.key] = item
        self.tombstones.pop(item.key, None)

    def oldest_through(self, item: Item) -> list[Item]:
        """The items that no graph pins, oldest first, from the oldest to `item`, which is one of them."""
        items = []
        for older in self._evictable.values():
            items.append(older)
            if older is item:
                break
        return items

    def make_oldest(self, items: list[Item]) -> None:
        """Make `items` the oldest again, in this order, as far as they are here."""
        for item in reversed(items):
            if item.key in self._evictable:
                self._evictable.move_to_end(item.key, last=False)

    def evict(self, item: Item, tombstone: Tombstone) -> None:
        """Free the buffer of a resident item that no graph pins."""
        item.move(State.EVICTED)
        del self._evictable[item.key]
        self._ledger.credit(item.num_bytes)
        self.tombstones[item.key] = tombstone
        self._free(item.detach(), item.stream)

    def pin(self, item: Item) -> None:
        """One more graph reads `item`."""
        if item.num_pins == 0:
            item.move(State.PINNED)
            self._pinned[item.key] = self._evictable.pop(item.key)
        item.num_pins += 1

    def unpin(self, item: Item) -> None:
        """One graph less; the last one makes the item evictable again, as just used."""
        item.num_pins -= 1
        if item.num_pins == 0:
            item.move(State.RESIDENT)
            self._evictable[item.key] = self._pinned.pop(item.key)
