"""What the manager tells the outside: one event per thing that happened, delivered outside every lock."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .errors import PlanlifeError

logger = logging.getLogger("planlife")

_Error = TypeVar("_Error", bound=PlanlifeError)

KINDS = ("mint", "evict", "rematerialise", "pin", "release", "fallback", "refuse", "stale", "seal")


@dataclass(frozen=True)
class Event:
    """kind: one of KINDS. subject: the plan, arena, graph, site, device or error it is about. reason: why, in words.

    details: numbers that belong to the kind: num_bytes of a plan or an arena, rows and recorded of a fallback.
    """

    kind: str
    subject: str
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class Announcer:
    """Collects events while the manager works and hands them to the hooks when it holds no lock."""

    def __init__(self, as_called: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """as_called: what a hook runs in, which is the caller's code (`Device.as_called`)."""
        self._as_called = as_called
        self.waiting: deque[Event] = deque()
        self._hooks: list[_Hook] = []

    def add_hook(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Returns a function that removes the hook again; removing twice is harmless."""
        entry = _Hook(callback)
        self._hooks.append(entry)  # in place: two threads may add at once

        def remove() -> None:
            with suppress(ValueError):
                self._hooks.remove(entry)

        return remove

    def note(self, kind: str, subject: object, reason: str = "", **details: Any) -> None:
        """An event happened; it is delivered at the next `deliver`."""
        self.waiting.append(Event(kind, str(subject), reason, details))

    def refuse(self, error: _Error) -> _Error:
        """A call is refused; the caller raises what it gets back."""
        self.note("refuse", type(error).__name__, str(error))
        return error

    def deliver(self) -> None:
        """Call the hooks. A hook that raises is logged and never breaks a step."""
        while self.waiting:
            try:
                event = self.waiting.popleft()
            except IndexError:  # another thread was faster
                return
            for hook in tuple(self._hooks):
                try:
                    with self._as_called():
                        hook(event)
                except Exception:
                    logger.exception("a planlife hook raised on %s of %s", event.kind, event.subject)


class _Hook:
    """Gives each registration an identity of its own: the same function may be added twice."""

    def __init__(self, callback: Callable[[Event], object]) -> None:
        self._callback = callback

    def __call__(self, event: Event) -> object:
        return self._callback(event)
