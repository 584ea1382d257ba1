"""A ladder serves every row count up to its top, and `fit` pads the least of all ladders."""

from __future__ import annotations

import copy
import math
import pickle
import random
import sys
from itertools import combinations
from types import FrameType
from typing import Any

import pytest

import planlife.ladder as ladder_module
from planlife.errors import CapacityError, ConfigError
from planlife.ladder import CapacityLadder

BUILDERS = {
    "powers_of_two": CapacityLadder.powers_of_two,
    "geometric": CapacityLadder.geometric,
    "geometric_by_2": lambda max_rows: CapacityLadder.geometric(max_rows, growth=2),
    "from_capture_sizes": lambda max_rows: CapacityLadder.from_capture_sizes([64, 1, 2, 96, 8, 8, 512], max_rows),
    "from_no_capture_sizes": lambda max_rows: CapacityLadder.from_capture_sizes([], max_rows),
    "fit": lambda max_rows: CapacityLadder.fit([max_rows, *range(1, max_rows, 7)], 4),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_every_count_has_a_class_and_the_top_is_exactly_max_rows(build):
    for max_rows in range(1, 1025):
        ladder = build(max_rows)
        assert ladder.max_rows == ladder.classes[-1] == max_rows
        assert list(ladder.classes) == sorted(set(ladder.classes))
        smaller = 0
        for class_rows in ladder.classes:  # between two classes every count rides the upper one
            for rows in (smaller + 1, class_rows):
                assert ladder.class_for(rows) == class_rows
            smaller = class_rows
        with pytest.raises(CapacityError):
            ladder.class_for(max_rows + 1)


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_count_rides_the_smallest_class_that_holds_it(build):
    for max_rows in (1, 2, 97, 100, 129, 1024):
        ladder = build(max_rows)
        for rows in range(1, max_rows + 1):
            assert ladder.class_for(rows) == min(c for c in ladder.classes if c >= rows)


@pytest.mark.parametrize("rows", [True, False, 0, -1, 1.0, "4", None, [4]])
def test_what_is_no_row_count_is_a_config_error_that_names_it(rows):
    ladder = CapacityLadder([4, 8])
    assert ladder.class_for(4) == 4
    with pytest.raises(ConfigError, match="rows must be") as caught:
        ladder.class_for(rows)
    assert repr(rows) in str(caught.value)


def test_above_the_top_the_error_says_what_was_asked_and_what_is_there():
    with pytest.raises(CapacityError, match=r"97 rows.*96.*max_rows >= 97"):
        CapacityLadder([32, 96]).class_for(97)


def test_classes_are_a_set_in_ascending_order():
    assert CapacityLadder([8, 1, 8, 4]).classes == (1, 4, 8)
    assert CapacityLadder(iter((2, 1))).classes == (1, 2)


@pytest.mark.parametrize("classes", [[], [0], [-1, 4], [True], [4.0], ["4"], "48", b"48", 4, None, [2**31]])
def test_bad_classes_are_refused(classes):
    with pytest.raises(ConfigError):
        CapacityLadder(classes)


def test_a_ladder_is_immutable_and_compares_by_its_classes():
    ladder = CapacityLadder([4, 1])
    for name in ("classes", "max_rows", "anything"):
        with pytest.raises(AttributeError):
            setattr(ladder, name, (1,))
    with pytest.raises(AttributeError):
        del ladder.classes
    assert ladder == CapacityLadder([1, 4])
    assert ladder != CapacityLadder([1, 5])
    assert ladder != (1, 4)
    assert hash(ladder) == hash(CapacityLadder([1, 4]))
    assert repr(ladder) == "CapacityLadder([1, 4])"
    assert eval(repr(ladder)) == ladder
    assert pickle.loads(pickle.dumps(ladder)) == copy.deepcopy(ladder) == copy.copy(ladder) == ladder


def test_powers_of_two_pad_below_twice_the_rows():
    assert CapacityLadder.powers_of_two(64).classes == (1, 2, 4, 8, 16, 32, 64)
    assert CapacityLadder.powers_of_two(100).classes == (1, 2, 4, 8, 16, 32, 64, 100)
    assert CapacityLadder.powers_of_two(1).classes == (1,)


@pytest.mark.parametrize("growth", [1.01, 1.1, 1.25, 1.5, 2, 3.7, 1e300, 10**400])
def test_a_geometric_ladder_pads_no_count_beyond_growth_and_no_class_could_be_spared(growth):
    for max_rows in (1, 2, 63, 100, 1024):
        ladder = CapacityLadder.geometric(max_rows, growth)
        assert all(ladder.class_for(rows) <= growth * rows for rows in range(1, max_rows + 1))
        lowest_served = [1, *(c + 1 for c in ladder.classes)]
        for lowest, next_class in zip(lowest_served, ladder.classes[1:], strict=False):
            assert next_class > growth * lowest  # without the class between, `lowest` would pad too much


def test_geometric_grows_by_a_quarter_unless_told():
    assert CapacityLadder.geometric(100) == CapacityLadder.geometric(100, 1.25) != CapacityLadder.geometric(100, 1.5)


@pytest.mark.parametrize("growth", [1, 1.0, 0.5, 0, -2, math.nan, math.inf, True, "2", None])
def test_a_growth_that_does_not_grow_is_refused(growth):
    with pytest.raises(ConfigError, match="growth"):
        CapacityLadder.geometric(64, growth)


@pytest.mark.parametrize("max_rows", [0, -1, True, 1.5, "8", None, 2**31])
def test_a_max_rows_that_is_no_count_is_refused(max_rows):
    for build in (
        CapacityLadder.powers_of_two,
        CapacityLadder.geometric,
        lambda max_rows: CapacityLadder.from_capture_sizes([1], max_rows),
    ):
        with pytest.raises(ConfigError, match="max_rows"):
            build(max_rows)


def test_the_largest_row_count_of_all_is_served():
    assert CapacityLadder.powers_of_two(2**31 - 1).class_for(2**30 + 1) == 2**31 - 1
    assert CapacityLadder.geometric(2**31 - 1).class_for(2**31 - 1) == 2**31 - 1


def test_capture_sizes_may_be_in_any_order_and_above_the_top():
    assert CapacityLadder.from_capture_sizes([512, 8, 1, 8, 256, 100], 100).classes == (1, 8, 100)
    assert CapacityLadder.from_capture_sizes([8, 4], 100).classes == (4, 8, 100)


@pytest.mark.parametrize("sizes", [[0], [-4], [True], [8.0], ["8"], "8", None, 8])
def test_bad_capture_sizes_are_refused(sizes):
    with pytest.raises(ConfigError):
        CapacityLadder.from_capture_sizes(sizes, 100)


def padding(ladder: CapacityLadder, histogram: dict[int, int]) -> int:
    return sum(weight * (ladder.class_for(rows) - rows) for rows, weight in histogram.items())


def least_padding_by_trial(histogram: dict[int, int], num_classes: int) -> int:
    *below, top = sorted(histogram)
    chosen = min(num_classes - 1, len(below))
    return min(padding(CapacityLadder([*some, top]), histogram) for some in combinations(below, chosen))


def test_fit_pads_as_little_as_the_best_of_all_ladders():
    chance = random.Random(0)
    for _ in range(1000):
        num_counts = chance.randint(1, 9)
        histogram = {
            chance.randint(1, chance.choice([12, 1000])): chance.choice([0, 0, 1, 2, chance.randint(0, 10**6)])
            for _ in range(num_counts)
        }
        num_classes = chance.randint(1, 10)
        ladder = CapacityLadder.fit(histogram, num_classes)
        assert len(ladder.classes) <= num_classes
        assert ladder.max_rows == max(histogram)
        assert padding(ladder, histogram) == least_padding_by_trial(histogram, num_classes)


def test_fit_takes_row_counts_as_well_as_a_histogram():
    counts = [3, 1, 3, 3, 8, 40, 41, 41]
    histogram = {1: 1, 3: 3, 8: 1, 40: 1, 41: 2}
    for num_classes in range(1, 7):
        fitted = CapacityLadder.fit(histogram, num_classes)
        assert CapacityLadder.fit(iter(counts), num_classes) == fitted
        assert CapacityLadder.fit({rows: 0.1 * weight for rows, weight in histogram.items()}, num_classes) == fitted


def test_fit_weighs_floats_without_rounding():
    # Doubles would add 1e17 + 1.0 to 1e17: then 7 would look as free as 8.
    assert CapacityLadder.fit({7: 1.0, 8: 2.0, 9: 1e17, 10: 0.0}, 3).classes == (8, 9, 10)
    assert CapacityLadder.fit({7: 2.0, 8: 1.0, 9: 1e17, 10: 0.0}, 3).classes == (7, 9, 10)


def test_fit_uses_no_more_classes_than_there_are_counts():
    assert CapacityLadder.fit([5, 9, 5], 64).classes == (5, 9)
    assert CapacityLadder.fit({5: 0, 9: 0}, 1).classes == (9,)


@pytest.mark.parametrize(
    ("histogram", "named"),
    [
        ({}, "empty"),
        ([], "empty"),
        ({0: 1}, "0"),
        ({-3: 1}, "-3"),
        ({True: 1}, "True"),
        ({2.0: 1}, "2.0"),
        ([1, "2"], "'2'"),
        ({4: -1}, "4 rows.*-1"),
        ({4: math.nan}, "4 rows.*nan"),
        ({4: math.inf}, "4 rows.*inf"),
        ({4: True}, "4 rows.*True"),
        ({4: "1"}, "4 rows.*'1'"),
        ({4: None}, "4 rows.*None"),
        ("44", "'44'"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_a_bad_histogram_is_refused_by_name(histogram, named):
    with pytest.raises(ConfigError, match=named):
        CapacityLadder.fit(histogram, 2)


@pytest.mark.parametrize("num_classes", [0, -1, True, 2.0, "2", None])
def test_a_bad_number_of_classes_is_refused(num_classes):
    with pytest.raises(ConfigError, match="num_classes"):
        CapacityLadder.fit([1, 2, 3], num_classes)


def lines_run_by_fit(histogram: dict[int, int], num_classes: int) -> int:
    """Lines of Python in ladder.py: what fitting costs, on any machine."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace if frame.f_code.co_filename == ladder_module.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ladder = CapacityLadder.fit(histogram, num_classes)
    finally:
        sys.settrace(before)
    assert len(ladder.classes) == num_classes
    return num_lines


def test_fitting_costs_steps_in_proportion_to_the_counts_not_to_their_square():
    def num_lines(num_counts: int) -> int:
        chance = random.Random(1)
        return lines_run_by_fit({rows: chance.randrange(1000) for rows in range(1, num_counts + 1)}, 8)

    assert num_lines(4_096) < 16 * num_lines(512)  # 8x the counts: 8 if linear, 64 if squared


@pytest.mark.parametrize("shape", ["even", "falling", "steep", "sparse"])
def test_many_distinct_counts_are_fitted_to_64_classes_in_a_few_passes(shape):
    chance = random.Random(2)
    num_counts = 4_096
    histogram = {
        "even": lambda: {rows: chance.randrange(1000) for rows in range(1, num_counts + 1)},
        "falling": lambda: {rows: 10**9 // rows for rows in range(1, num_counts + 1)},
        "steep": lambda: {rows: 2 ** max(0, 60 - rows // 8) for rows in range(1, num_counts + 1)},
        "sparse": lambda: {rows: chance.randrange(10**6) for rows in chance.sample(range(1, 2**31), num_counts)},
    }[shape]()
    assert lines_run_by_fit(histogram, 64) < num_counts * 20 * 40  # at most 20 passes of at most 40 lines a count


def test_fit_pads_as_little_as_a_table_over_all_numbers_of_classes():
    """Beyond what can be tried ladder by ladder: the recurrence written out, counting classes instead of pricing."""
    chance = random.Random(3)
    for _ in range(40):
        rows = sorted(chance.sample(range(1, 5000), chance.randint(2, 40)))
        weights = [chance.choice([0, 1, 1, chance.randint(0, 50), 10**9]) for _ in rows]
        histogram = dict(zip(rows, weights, strict=True))
        least = [[math.inf] * (len(rows) + 1) for _ in range(len(rows) + 1)]
        least[0][0] = 0
        for used, end in ((used, end) for used in range(1, len(rows) + 1) for end in range(1, len(rows) + 1)):
            padded = 0
            for start in range(end - 1, -1, -1):
                padded += weights[start] * (rows[end - 1] - rows[start])
                least[used][end] = min(least[used][end], least[used - 1][start] + padded)
        for num_classes in range(1, len(rows) + 1):
            ladder = CapacityLadder.fit(histogram, num_classes)
            assert len(ladder.classes) == num_classes
            assert padding(ladder, histogram) == least[num_classes][len(rows)]
