"""What the store keeps: something with a buffer, and the one table of moves between its states."""

from __future__ import annotations

from enum import Enum
from typing import Any


class State(Enum):
    ABSENT = "absent"  #: never minted
    RESIDENT = "resident"  #: minted, has its buffer, may be evicted
    PINNED = "pinned"  #: resident, and at least one graph reads it
    EVICTED = "evicted"  #: minted (its code is compiled), has no buffer


#: From -> to. Minting without room compiles only: ABSENT -> EVICTED. Nothing goes back to ABSENT: a state is moved only
#: once its buffer is in place, so a failed mint has moved nothing.
MOVES: dict[State, frozenset[State]] = {
    State.ABSENT: frozenset({State.RESIDENT, State.EVICTED}),
    State.RESIDENT: frozenset({State.PINNED, State.EVICTED}),
    State.PINNED: frozenset({State.RESIDENT}),
    State.EVICTED: frozenset({State.RESIDENT}),
}

ItemKey = tuple[Any, ...]


class Item:
    """Owns: its buffer, while resident. Address-stable: from mint or rematerialisation until eviction.

    Subclasses make what they need of the buffer in `build` and publish it in `attach`.
    """

    __slots__ = ("buffer", "key", "num_bytes", "num_pins", "state", "stream")

    def __init__(self, key: ItemKey, num_bytes: int) -> None:
        self.key = key
        self.num_bytes = num_bytes
        self.num_pins = 0
        self.state = State.ABSENT
        self.buffer: Any = None
        self.stream = 0  #: where the buffer was last used, or allocated: later uses elsewhere are ordered after it

    @property
    def is_resident(self) -> bool:
        return self.state is State.RESIDENT or self.state is State.PINNED

    def move(self, to: State) -> None:
        """The only place where a state changes."""
        if to not in MOVES[self.state]:
            raise AssertionError(f"{self}: no move from {self.state.value} to {to.value}")
        self.state = to

    def build(self, buffer: Any) -> Any:
        """What this item makes of its buffer; may fail, and changes nothing."""
        return None

    def attach(self, buffer: Any, content: Any, stream: int) -> None:
        """Publish the buffer, what `build` made of it, and the stream it was allocated for."""
        self.stream = stream
        self.buffer = buffer

    def detach(self) -> Any:
        """Give up the buffer; work in flight that took it into a local keeps it alive."""
        buffer, self.buffer = self.buffer, None
        return buffer

    def __str__(self) -> str:
        return "/".join(str(part) for part in self.key)
