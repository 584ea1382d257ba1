"""The merge of two partials against one softmax over all their keys, in FP64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import planlife
from planlife import ConfigError
from planlife.testing import EmulatedGraph, record

NOTHING = -math.inf
DTYPES = ("float32", "float16", "bfloat16")
#: Relative to the largest output: rounding of the partials and of the result.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
ROWS, HEADS, DIM = 6, 3, 8


class Keys:
    """One query's logits and values over some keys, by rows; rows may see no key at all."""

    def __init__(self, seed: int, *, num_keys: int = 5, shift: float = 0.0, empty: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(ROWS, HEADS, num_keys, generator=generator, dtype=torch.float64) * 3 + shift
        self.values = torch.randn(ROWS, HEADS, num_keys, DIM, generator=generator, dtype=torch.float64)
        self.logits[list(empty)] = NOTHING

    def attend(self, *others: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 (output, lse) over these keys and the others'."""
        logits = torch.cat([one.logits for one in (self, *others)], -1)
        values = torch.cat([one.values for one in (self, *others)], -2)
        weights = torch.softmax(logits, -1)
        lse = torch.logsumexp(logits, -1)
        output = torch.where((lse == NOTHING)[..., None], 0.0, (weights[..., None, :] @ values)[..., 0, :])
        return output, lse

    def partial(self, dtype: str = "float32", poison: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """As a decode leaves them, with `poison` where nothing was attended."""
        output, lse = self.attend()
        output[lse == NOTHING] = poison
        return output.to(getattr(torch, dtype)), lse.float()


def assert_right(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    output, lse = found
    tolerance = TOLERANCE[str(output.dtype).removeprefix("torch.")]
    torch.testing.assert_close(output.double(), wanted[0], rtol=0, atol=tolerance * wanted[0].abs().max().item())
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-6, atol=1e-6)
    assert (output[lse == NOTHING] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, 40.0, -40.0, 400.0, 3e4])
def test_two_partials_are_merged_as_one_softmax_over_all_keys(dtype: str, shift: float) -> None:
    one, other = Keys(0, shift=shift), Keys(1, shift=shift + 1)
    output, lse = planlife.merge(*one.partial(dtype), *other.partial(dtype))
    assert output.dtype == getattr(torch, dtype)
    assert lse.dtype == torch.float32
    wanted = one.attend(other)
    coarseness = max(torch.finfo(torch.float32).eps * abs(shift), 1e-6)  # of an lse of that size
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-6, atol=1e-6)
    atol = TOLERANCE[dtype] + 2 * coarseness
    torch.testing.assert_close(output.double(), wanted[0], rtol=0, atol=atol * wanted[0].abs().max().item())
    with pytest.raises(AssertionError):  # positive control
        torch.testing.assert_close(output.double(), one.attend()[0], rtol=0, atol=0.1)


def test_the_shares_are_as_exact_as_the_difference_of_the_lses() -> None:
    """A large lse has a coarse last bit: shares taken from the merged lse would not add up to one."""
    output = torch.ones(ROWS, HEADS, DIM)
    lse = torch.full((ROWS, HEADS), 30_000.0)
    for difference in (0.0, 0.5, 3.0):
        merged, _ = planlife.merge(output, lse, output, lse + difference)
        torch.testing.assert_close(merged, output, rtol=3e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_which_comes_first_does_not_change_a_bit(dtype: str) -> None:
    one, other = Keys(0, empty=(2,)).partial(dtype), Keys(1, shift=2.0, empty=(4,)).partial(dtype)
    for found, wanted in zip(planlife.merge(*one, *other), planlife.merge(*other, *one), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 7.0])
def test_what_an_empty_partial_holds_reaches_nothing(dtype: str, poison: float) -> None:
    """Row 1 is empty in one, row 2 in the other, row 3 in both."""
    one, other = Keys(0, empty=(1, 3)), Keys(1, empty=(2, 3))
    output, lse = planlife.merge(*one.partial(dtype, poison), *other.partial(dtype, poison))
    assert_right((output, lse), one.attend(other))
    assert torch.equal(output[1], other.partial(dtype)[0][1])
    assert torch.equal(output[2], one.partial(dtype)[0][2])
    assert torch.equal(lse[1], other.partial(dtype)[1][1])
    assert (output[3] == 0).all()
    assert (lse[3] == NOTHING).all()


def test_all_rows_empty_in_both_are_zeros() -> None:
    nothing = Keys(0, empty=tuple(range(ROWS))).partial(poison=math.nan)
    output, lse = planlife.merge(*nothing, *nothing)
    assert (output == 0).all()
    assert (lse == NOTHING).all()


@pytest.mark.parametrize("difference", [0.0, 1.0, 90.0, 104.0, 1000.0, 1e30])
def test_an_infinite_value_that_was_attended_survives_a_weight_that_underflows(difference: float) -> None:
    """C60: as in the decode, whose weights of attended tokens never become 0."""
    one, other = Keys(0).partial(), Keys(1).partial()
    one[0][0, 0, 0], one[0][0, 0, 1] = math.inf, -math.inf
    output, lse = planlife.merge(*one, other[0], other[1] + difference)
    assert output[0, 0, :2].tolist() == [math.inf, -math.inf]
    assert not output.isnan().any()
    assert output[0, 0, 2:].isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_values_do_not_overflow(dtype: str) -> None:
    largest = torch.finfo(getattr(torch, dtype)).max
    output = torch.full((ROWS, HEADS, DIM), largest * 0.99).to(getattr(torch, dtype))
    lse = torch.full((ROWS, HEADS), 2.0)
    merged, _ = planlife.merge(output, lse, output, lse + 1)
    torch.testing.assert_close(merged, output)


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_partials_agree_in_any_order(dtype: str) -> None:
    parts = [Keys(0, empty=(1,)), Keys(1, shift=3.0, empty=(1, 2)), Keys(2, shift=-2.0, num_keys=9)]
    wanted = parts[0].attend(*parts[1:])
    for first, second, third in itertools.permutations(part.partial(dtype) for part in parts):
        assert_right(planlife.merge(*planlife.merge(*first, *second), *third), wanted)
        assert_right(planlife.merge(*first, *planlife.merge(*second, *third)), wanted)


# --- out and out_lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("into", ["new", "own buffers", "the first pair", "the other pair", "views"])
def test_the_result_goes_where_it_was_asked_to(dtype: str, into: str) -> None:
    one, other = Keys(0, empty=(1,)), Keys(1, empty=(1, 2))
    first, second = one.partial(dtype, math.nan), other.partial(dtype, math.nan)
    kept = [tensor.clone() for tensor in (*first, *second)]
    wide = torch.full((ROWS, HEADS, 2 * DIM), math.nan, dtype=first[0].dtype)
    out, out_lse = {
        "new": (None, None),
        "own buffers": (torch.full_like(first[0], math.nan), torch.full_like(first[1], math.nan)),
        "the first pair": first,
        "the other pair": second,
        "views": (wide[..., ::2], torch.full((HEADS, ROWS), math.nan).T),
    }[into]
    output, lse = planlife.merge(*first, *second, out=out, out_lse=out_lse)
    assert_right((output, lse), one.attend(other))
    if out is not None:
        assert output is out
        assert lse is out_lse
        assert wide[..., 1::2].isnan().all()
    for tensor, before in zip((*first, *second), kept, strict=True):
        if tensor is not out and tensor is not out_lse:
            assert torch.equal(tensor.nan_to_num(9.0), before.nan_to_num(9.0))


def test_one_of_the_two_may_be_given_alone() -> None:
    one, other = Keys(0), Keys(1)
    out, out_lse = torch.full((ROWS, HEADS, DIM), math.nan), torch.full((ROWS, HEADS), math.nan)
    output, lse = planlife.merge(*one.partial(), *other.partial(), out=out)
    assert output is out
    assert_right((output, lse), one.attend(other))
    output, lse = planlife.merge(*one.partial(), *other.partial(), out_lse=out_lse)
    assert lse is out_lse
    assert_right((output, lse), one.attend(other))


@pytest.mark.parametrize("into", ["own buffers", "the first pair"])
def test_a_recorded_merge_reads_the_partials_of_its_replay(into: str) -> None:
    one, other = Keys(0).partial("bfloat16"), Keys(1).partial("bfloat16")
    out, out_lse = one if into == "the first pair" else [torch.full_like(tensor, math.nan) for tensor in one]
    graph = EmulatedGraph()
    with record(graph):
        planlife.merge(*one, *other, out=out, out_lse=out_lse)
    for seed in (3, 4):
        keys, others = Keys(seed, empty=(1, 2)), Keys(seed + 10, empty=(2, 3))
        for tensors, new in ((one, keys), (other, others)):
            for tensor, value in zip(tensors, new.partial("bfloat16", math.nan), strict=True):
                tensor.copy_(value)
        graph.replay()
        assert_right((out, out_lse), keys.attend(others))


def test_a_merge_builds_no_autograd_graph() -> None:
    one, other = Keys(0).partial(), Keys(1).partial()
    one[0].requires_grad_()
    output, lse = planlife.merge(*one, *other)
    assert not output.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("shape", [(0, HEADS, DIM), (ROWS, 1, 1)])
def test_no_rows_and_single_heads_are_merged_too(shape: tuple[int, ...]) -> None:
    output, lse = planlife.merge(torch.ones(shape), torch.zeros(shape[:2]), torch.ones(shape), torch.zeros(shape[:2]))
    torch.testing.assert_close(output, torch.ones(shape))
    torch.testing.assert_close(lse, torch.full(shape[:2], math.log(2)))


# --- refusals

GOOD: dict[str, Any] = {
    "output": torch.zeros(ROWS, HEADS, DIM),
    "lse": torch.zeros(ROWS, HEADS),
    "other_output": torch.zeros(ROWS, HEADS, DIM),
    "other_lse": torch.zeros(ROWS, HEADS),
}
OUTPUT, LSE = rf"float32\[{ROWS}, {HEADS}, {DIM}\] on cpu", rf"float32\[{ROWS}, {HEADS}\] on cpu"
BAD: list[tuple[str, Any, str]] = [
    ("output", torch.zeros(ROWS, DIM), rf"output is float32\[{ROWS}, {DIM}\] on cpu, wanted \[query rows, q_heads"),
    ("output", torch.zeros(ROWS, HEADS, DIM).double(), r"output is float64\[.*wanted .* of bfloat16, float16, float32"),
    ("output", None, r"output must be a tensor, got None"),
    ("lse", [1.0], r"lse must be a tensor, got \[1.0\]"),
    ("lse", torch.zeros(ROWS, HEADS).numpy(), r"lse must be a tensor, got array\("),
    ("other_output", torch.zeros(ROWS, HEADS, DIM).numpy(), r"other_output must be a tensor, got array\("),
    ("other_lse", None, r"other_lse must be a tensor, got None"),
    ("lse", torch.zeros(HEADS, ROWS), rf"lse is float32\[{HEADS}, {ROWS}\] on cpu, but output wants {LSE}"),
    ("lse", torch.zeros(ROWS, HEADS).half(), rf"lse is float16\[.*, but output wants {LSE}"),
    ("other_lse", torch.zeros(ROWS, HEADS, 1), rf"other_lse is float32\[{ROWS}, {HEADS}, 1\].*wants {LSE}"),
    ("other_lse", torch.zeros(ROWS, HEADS, device="meta"), rf"other_lse is .* on meta, but output wants {LSE}"),
    ("other_output", torch.zeros(ROWS, HEADS, 9), rf"other_output is float32\[.*9\] on cpu, but output is {OUTPUT}"),
    ("other_output", torch.zeros(ROWS, HEADS, DIM).half(), rf"other_output is float16\[.*, but output is {OUTPUT}"),
    ("other_output", torch.zeros(ROWS, HEADS, DIM, device="meta"), rf"other_output .* on meta, but output is {OUTPUT}"),
    ("out", torch.zeros(ROWS + 1, HEADS, DIM), rf"out is float32\[7, .*, but output is {OUTPUT}"),
    ("out", torch.zeros(ROWS, HEADS, DIM).bfloat16(), rf"out is bfloat16\[.*, but output is {OUTPUT}"),
    ("out", torch.zeros(1, HEADS, DIM).expand(ROWS, HEADS, DIM), r"out has strides \[0, \d+, 1\], which put several"),
    ("out_lse", torch.zeros(1, HEADS).expand(ROWS, HEADS), r"out_lse has strides \[0, 1\], which put several"),
    ("out_lse", torch.zeros(ROWS, HEADS).double(), rf"out_lse is float64\[.*, but output wants {LSE}"),
    ("out_lse", torch.zeros(1, HEADS), rf"out_lse is float32\[1, {HEADS}\] on cpu, but output wants {LSE}"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_partials_that_do_not_belong_together_are_refused_by_both_names(name: str, value: Any, message: str) -> None:
    buffers = {"out": torch.full((ROWS, HEADS, DIM), math.nan), "out_lse": torch.full((ROWS, HEADS), math.nan)}
    with pytest.raises(ConfigError, match=f"^merge: {message}"):
        planlife.merge(**{**GOOD, **buffers, name: value})
    assert all(buffer.isnan().all() for buffer in buffers.values())
    planlife.merge(**GOOD, **buffers)  # positive control
    assert not any(buffer.isnan().any() for buffer in buffers.values())
