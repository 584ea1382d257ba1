"""Who goes first: the least recently used, and nobody is looked at who does not have to go."""

from __future__ import annotations

from typing import Any

from planlife.item import Item
from planlife.ledger import Ledger
from planlife.store import Store, Tombstone


def store_of(*names: str, budget_bytes: int = 1000) -> tuple[Store, dict[str, Item]]:
    store = Store(Ledger(budget_bytes), lambda buffer, stream: None)
    items = {name: Item((name,), 10) for name in names}
    for item in items.values():
        store.place(item, object(), None, 0)
    return store, items


def names_of(items: Any) -> str:
    return "".join(map(str, items))


def test_victims_are_the_least_recently_used_without_those_to_keep() -> None:
    store, items = store_of(*"abcdef", budget_bytes=60)
    store.touch(items["a"])
    store.pin(items["b"])
    assert names_of(store.choose_victims(20, keep=(items["c"],)) or []) == "de"
    assert names_of(store) == "cdefab"
    assert store.choose_victims(60) is None
    assert names_of(store.choose_victims(50) or []) == "cdefa"


def test_victims_that_come_back_are_the_oldest_again_in_their_order() -> None:
    store, items = store_of(*"abcdef", budget_bytes=60)
    victims = store.choose_victims(20, keep=(items["b"],)) or []
    order = store.oldest_through(victims[-1])
    assert (names_of(victims), names_of(order)) == ("ac", "abc")
    for victim in victims:
        store.evict(victim, Tombstone("gone", 0))
    store.place(items["c"], object(), None, 0)  # a did not come back
    store.make_oldest(order)
    assert names_of(store) == "bcdef"


def test_choosing_looks_at_no_more_items_than_have_to_go() -> None:
    looked_at = []

    class Watched(Item):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name == "num_bytes":
                looked_at.append(self)
            return super().__getattribute__(name)

    store = Store(Ledger(1000), lambda buffer, stream: None)
    for index in range(100):
        store.place(Watched((index,), 10), object(), None, 0)
    looked_at.clear()
    assert len(store.choose_victims(20) or []) == 2
    assert len(set(looked_at)) == 2
