"""The capacity classes that plans exist for: a row count rides the smallest class that holds it (R17)."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NoReturn

from .errors import CapacityError, ConfigError
from .spec import check_int

_MAX_ROWS = 2**31 - 1  # rows are counted in int32 tables


class CapacityLadder:
    """An ascending set of row counts. Immutable; equal and hashed by its classes: ranks compare them (R45).

    classes: row counts in [1, 2**31 - 1], any order, duplicates are one class. The largest is `max_rows`.

    Raises ConfigError. Capture: n/a. Syncs: no. Allocates: no.
    """

    __slots__ = ("classes", "max_rows")

    classes: tuple[int, ...]
    max_rows: int

    def __init__(self, classes: Iterable[int]) -> None:
        ascending = tuple(sorted(set(_check_counts("a class", classes))))
        if not ascending:
            raise ConfigError("a ladder needs at least one class, got none.")
        object.__setattr__(self, "classes", ascending)
        object.__setattr__(self, "max_rows", ascending[-1])

    @classmethod
    def powers_of_two(cls, max_rows: int) -> CapacityLadder:
        """1, 2, 4, ... and max_rows on top: no count is padded to twice its rows. Raises ConfigError."""
        check_int("max_rows", max_rows, at_least=1, at_most=_MAX_ROWS)
        return cls([*(1 << exponent for exponent in range((max_rows - 1).bit_length())), max_rows])

    @classmethod
    def geometric(cls, max_rows: int, growth: float = 1.25) -> CapacityLadder:
        """The fewest classes that pad no count beyond growth x its rows. Raises ConfigError."""
        check_int("max_rows", max_rows, at_least=1, at_most=_MAX_ROWS)
        if type(growth) not in (int, float) or not (growth > 1 and math.isfinite(growth)):
            raise ConfigError(f"growth must be a finite number > 1, got {growth!r}.")
        classes: list[int] = []
        smallest_unserved = 1
        while (bound := growth * smallest_unserved) < max_rows:
            classes.append(math.floor(bound))
            smallest_unserved = classes[-1] + 1
        return cls([*classes, max_rows])

    @classmethod
    def from_capture_sizes(cls, sizes: Iterable[int], max_rows: int) -> CapacityLadder:
        """An engine's graph sizes up to max_rows, and max_rows itself, so that the ladder has no hole.

        sizes: any order, with duplicates; none at all for an engine that runs eagerly. Raises ConfigError.
        """
        check_int("max_rows", max_rows, at_least=1, at_most=_MAX_ROWS)
        return cls([*(size for size in _check_counts("a capture size", sizes) if size < max_rows), max_rows])

    @classmethod
    def fit(cls, rows_histogram: Mapping[int, float] | Iterable[int], num_classes: int) -> CapacityLadder:
        """The ladder of at most num_classes with the least sum(weight * (class - rows)), exactly.

        rows_histogram: rows -> weight (steps or seconds spent there, finite, >= 0), or each step's row count.
            A count of weight 0 is served too. The largest count becomes max_rows.

        Takes O(num_classes x distinct counts) time. Raises ConfigError.
        """
        check_int("num_classes", num_classes, at_least=1)
        if isinstance(rows_histogram, Mapping):
            histogram = dict(rows_histogram)
            _check_counts("rows of a histogram", histogram)
        else:
            histogram = dict(Counter(_check_counts("rows of a histogram", rows_histogram)))
        if not histogram:
            raise ConfigError("a ladder cannot be fitted to an empty histogram: give at least one row count.")
        rows = sorted(histogram)
        weights = _whole_weights(rows, histogram)
        return cls(rows if num_classes >= len(rows) else _least_padding(rows, weights, num_classes))

    def class_for(self, rows: int) -> int:
        """The smallest class that holds `rows`: total on 1..max_rows.

        Raises CapacityError above the top, ConfigError for anything else that is not such a count.
        """
        if type(rows) is int and 0 < rows <= self.max_rows:
            return self.classes[bisect_left(self.classes, rows)]
        self._refuse(rows)

    def _refuse(self, rows: int) -> NoReturn:
        check_int("rows", rows, at_least=1)
        raise CapacityError(
            f"no class for {rows} rows: the top of the ladder is {self.max_rows}. Build it with "
            f"max_rows >= {rows}, or split the batch."
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a CapacityLadder is immutable; make a new one instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a CapacityLadder is immutable; {name} cannot be deleted")

    def __reduce__(self) -> tuple[type[CapacityLadder], tuple[tuple[int, ...]]]:
        return CapacityLadder, (self.classes,)

    def __eq__(self, other: object) -> bool:
        return self.classes == other.classes if isinstance(other, CapacityLadder) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.classes)

    def __repr__(self) -> str:
        return f"CapacityLadder({list(self.classes)})"


def _check_counts(what: str, counts: Iterable[int]) -> list[int]:
    if isinstance(counts, (str, bytes)) or not isinstance(counts, Iterable):
        raise ConfigError(f"row counts must come as an iterable of ints, got {counts!r}.")
    return [check_int(what, count, at_least=1, at_most=_MAX_ROWS) for count in counts]


def _whole_weights(rows: Sequence[int], histogram: Mapping[int, float]) -> list[int]:
    """The weights, ascending by rows and scaled to ints: sums of ints have no rounding to tip a choice."""
    ratios: list[tuple[int, int]] = []
    for count in rows:
        weight = histogram[count]
        if type(weight) is bool or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ConfigError(f"the weight of {count} rows must be a finite number >= 0, got {weight!r}.")
        ratios.append(weight.as_integer_ratio())
    scale = max(denominator for _, denominator in ratios)  # powers of two: the largest is a multiple of each
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _least_padding(rows: Sequence[int], weights: Sequence[int], num_classes: int) -> list[int]:
    """The classes of the cheapest ladder with exactly num_classes < len(rows) of them.

    cost[j] of the first j counts under k classes is the least over i of
        cost_before[i] + rows[j-1] * (weight of counts i..j-1) - (weighted rows of counts i..j-1),
    which for each i is a line in rows[j-1]. Slopes fall as i grows and lines are asked at rising rows, so
    the lower envelope is a stack with a pointer that only moves forward: O(len(rows)) per class.

    A new line is never below the envelope at the last row that was asked (one class more never costs more), so it can
    take the place of the line that won there, but pops none before it: the pointer stays on the stack.
    """
    num_counts = len(rows)
    weight_to = [0, *accumulate(weights)]
    filled_to = [0, *accumulate(count * weight for count, weight in zip(rows, weights, strict=True))]
    one_class = [0, *(rows[j] * weight_to[j + 1] - filled_to[j + 1] for j in range(num_counts))]
    cost = one_class
    choices: list[array[int]] = []
    for num_used in range(2, num_classes + 1):
        choice = array("i", bytes(4 * (num_counts + 1)))
        next_cost = [0] * (num_counts + 1)
        line_of: list[int] = []  # which i each line of the envelope stands for,
        fall: list[int] = []  # its negated slope,
        height: list[int] = []  # its value at 0 rows,
        wins_from: list[int] = []  # and the row count from which it beats the line before it
        best = 0
        for j in range(num_used, num_counts + 1):
            i = j - 1
            new_height = cost[i] + filled_to[i]
            new_fall = weight_to[i]
            new_wins_from = 0
            while line_of:
                gap = new_fall - fall[-1]
                rise = new_height - height[-1]
                if gap:
                    new_wins_from = -(-rise // gap)
                    if new_wins_from > wins_from[-1]:
                        break
                elif rise >= 0:
                    new_wins_from = _MAX_ROWS + 1
                    break
                line_of.pop()
                fall.pop()
                height.pop()
                wins_from.pop()
                new_wins_from = 0
            if new_wins_from <= _MAX_ROWS:
                line_of.append(i)
                fall.append(new_fall)
                height.append(new_height)
                wins_from.append(new_wins_from)
            row = rows[i]
            last = len(line_of) - 1
            while best < last and wins_from[best + 1] <= row:
                best += 1
            choice[j] = line_of[best]
            next_cost[j] = height[best] - fall[best] * row + one_class[j]
        cost = next_cost
        choices.append(choice)
    classes = [rows[-1]]
    end = num_counts
    for choice in reversed(choices):
        end = choice[end]
        classes.append(rows[end - 1])
    return classes
