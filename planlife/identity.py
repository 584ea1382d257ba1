"""Objects of which there is one: a copy would be something else, and another process has no use for one."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, TypeVar

_Self = TypeVar("_Self")


class Singular:
    """Neither copied nor pickled: a TypeError, as Python has it for what cannot be, that says what to do instead."""

    __slots__ = ()

    #: The message.
    _ONE_ONLY: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise TypeError(self._ONE_ONLY)


class Shared(Singular):
    """A copy, also a deep one, is the object itself; pickling is a TypeError."""

    __slots__ = ()

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self
