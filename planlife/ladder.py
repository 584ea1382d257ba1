"""The capacity classes that plans exist for: a row count rides the smallest class that holds it (R17)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, NoReturn

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
        if type(growth) not in (int, float) or not 1 < growth < math.inf:
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

        Takes O(distinct counts x log num_classes) time for all but contrived weights. Raises ConfigError.
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

    The least padding is a convex function of the number of classes (the cost of a class is a Monge array). So classes
    are not counted but given a price, and the price is sought at which num_classes of them are the cheapest. Ladders
    with fewer and with more classes bound it: the price at which both cost the same gives a third one between them, or
    shows that none lies below their line. Each such step is one pass over the counts; 3 to 16 were seen to be needed.
    """
    at_price = _Pricing(rows, weights)
    few, many = _Priced(at_price.padding_of_one_class, [0, len(rows)]), _Priced(0, list(range(len(rows) + 1)))
    while few.num_classes < num_classes:
        # Padding is whole, so a whole price below the slope of the line still splits it where there is a ladder below.
        price = (few.padding - many.padding) // (many.num_classes - few.num_classes)
        between = at_price(price)
        if between.num_classes == few.num_classes:
            return [rows[end - 1] for end in _spliced(few.ends, many.ends, num_classes)[1:]]
        if between.num_classes <= num_classes:
            few = between
        else:
            many = between
    return [rows[end - 1] for end in few.ends[1:]]


class _Priced(NamedTuple):
    """A ladder by the counts that its classes end at. ends: indices into the counts, 0 first, all of them last."""

    padding: int
    ends: list[int]

    @property
    def num_classes(self) -> int:
        return len(self.ends) - 1


def _spliced(few: Sequence[int], many: Sequence[int], num_classes: int) -> list[int]:
    """The ends of a ladder of num_classes classes, from two that are cheapest at one price.

    Where a class of `few` spans one of `many`, swapping their upper ends costs nothing more (Monge). The start of
    `many` with the rest of `few` has as many classes as are wanted if the spanned class is `ahead` classes further on,
    and such a pair exists: the ends of `many`, so shifted, start beyond those of `few` and end before them.
    """
    ahead = num_classes - (len(few) - 1)
    i = next(i for i in range(len(few) - 1) if many[i + 1 + ahead] <= few[i + 1])
    return [*many[: i + ahead + 1], *few[i + 1 :]]


class _Pricing:
    """Finds the cheapest ladder when a class costs something; of equal ones, that of the fewest classes."""

    def __init__(self, rows: Sequence[int], weights: Sequence[int]) -> None:
        self._rows = rows
        self._weight_to = [0, *accumulate(weights)]
        self._filled_to = [0, *accumulate(count * weight for count, weight in zip(rows, weights, strict=True))]
        self.padding_of_one_class = rows[-1] * self._weight_to[-1] - self._filled_to[-1]
        #: Costs count in these, so that the rest can count classes.
        self._unit = len(rows) + 1

    def __call__(self, price: int) -> _Priced:
        """The cost of the first j counts is the least over i of
            cost[i] + rows[j-1] * (weight of counts i..j-1) - (weighted rows of counts i..j-1) + price,
        which for each i is a line in rows[j-1]. Slopes fall as i grows and lines are asked at rising rows, so the lower
        envelope is a stack with a pointer that only moves forward: one pass.
        """
        unit = self._unit
        price_and_one = price * unit + 1
        rows, weight_to, filled_to = self._rows, self._weight_to, self._filled_to
        starts = [0] * (len(rows) + 1)  # of the last class of the cheapest ladder up to each count
        line_of = [0]  # which i each line of the envelope stands for,
        fall = [0]  # its negated slope,
        height = [price_and_one]  # its value at 0 rows,
        wins_from = [0]  # and the row count from which it beats the line before it
        best = 0
        cost = 0
        for j, row in enumerate(rows, 1):
            last = len(line_of) - 1
            if best > last:
                best = last  # the line that won was dropped for the newest, which lies below it from there on
            while best < last and wins_from[best + 1] <= row:
                best += 1
            starts[j] = line_of[best]
            cost = height[best] - fall[best] * row + (row * weight_to[j] - filled_to[j]) * unit
            new_fall = weight_to[j] * unit
            new_height = cost + filled_to[j] * unit + price_and_one
            while line_of:
                gap = new_fall - fall[-1]
                if gap:
                    new_wins_from = -((height[-1] - new_height) // gap)
                    if new_wins_from > wins_from[-1]:
                        break
                elif new_height >= height[-1]:
                    new_wins_from = _MAX_ROWS + 1
                    break
                line_of.pop()
                fall.pop()
                height.pop()
                wins_from.pop()
                new_wins_from = 0
            if new_wins_from <= _MAX_ROWS:
                line_of.append(j)
                fall.append(new_fall)
                height.append(new_height)
                wins_from.append(new_wins_from)
        ends = [len(rows)]
        while ends[-1]:
            ends.append(starts[ends[-1]])
        ends.reverse()
        return _Priced(cost // unit - price * (len(ends) - 1), ends)
