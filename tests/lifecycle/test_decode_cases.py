"""Decode calls of every kind through a manager, against the exact answer; and that the table is what it says."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, Step, spec
from planlife.testing import DecodeCase, DecodeInputs, decode_cases, reference_decode, row_errors
from planlife.testing.decode_table import AXES, LAYOUTS, NUMBERS, ROW_BOUNDS, SCALE_FORMS, combinations

from . import world
from .world import World, backend_name, fallback_name, new_device

CASES = decode_cases()
NUM_CU = 256
#: Options that rule each other out; the others go with anything.
EXCLUSIVE = ("layout", "kv_dtype", "scales", "page_size")


def held(names: tuple[str, ...]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset((name, getattr(case, name)) for name in names) for case in CASES}


def missing() -> list[frozenset[tuple[str, Any]]]:
    """Pairs that no case holds, and combinations of NUMBERS that none holds although it holds their pairs."""
    pairs = [
        goal for names in itertools.combinations(AXES, 2) for goal in combinations(names) if goal not in held(names)
    ]
    numbers = [goal for goal in combinations(NUMBERS) if goal not in held(NUMBERS)]
    return pairs + [goal for goal in numbers if not any(pair <= goal for pair in pairs)]


def is_refused(case: DecodeCase) -> bool:
    """Whether the library itself refuses such a call, at construction or at the decode."""
    try:
        with PlanManager(case.spec(), ladder=CapacityLadder([1]), device="cpu"):
            pass
        DecodeInputs.of(case).decode()
    except ConfigError:
        return True
    return False


def test_a_pair_is_missing_only_where_the_library_refuses_every_call_that_has_it() -> None:
    for goal in missing():
        assert {name for name, _ in goal} <= set(EXCLUSIVE), f"no case holds {dict(goal)}"
        others = [name for name in EXCLUSIVE if name not in dict(goal)]
        for values in itertools.product(*(AXES[name] for name in others)):
            case = DecodeCase(lens=(1,), **dict(goal), **dict(zip(others, values, strict=True)))
            assert is_refused(case), f"no case holds {dict(goal)}, and a decode of {case} works"


def test_a_table_that_lost_a_case_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control of the test above: each case holds a pair that no other has."""
    complete = missing()
    for index in range(0, len(CASES), 7):
        monkeypatch.setattr(f"{__name__}.CASES", CASES[:index] + CASES[index + 1 :])
        assert len(missing()) > len(complete)
        monkeypatch.undo()


def test_the_axes_have_everything_that_the_library_knows_and_both_ends_of_each_range() -> None:
    assert set(AXES) == {field.name for field in dataclasses.fields(DecodeCase)}
    assert set(AXES["q_dtype"]) == set(spec.QUERY_DTYPES)
    assert set(AXES["kv_dtype"]) == set(spec.DTYPE_BYTES)
    assert {SCALE_FORMS[form] for form in AXES["scales"]} == set(spec.SCALE_KINDS)
    assert {LAYOUTS[name][0] for name in AXES["layout"]} == set(spec.KV_LAYOUTS)
    for name, least, most in (("page_size", 1, 256), ("head_dim", 64, 512), ("group", 1, 16), ("query_length", 1, 8)):
        assert (min(AXES[name]), max(AXES[name])) == (least, most)
    longest = max(max(lens) for lens in AXES["lens"])
    assert {0, 1, 256} < set(AXES["sliding_window"]) and max(AXES["sliding_window"]) > longest
    assert any(0 in lens for lens in AXES["lens"]) and any(0 < n < 8 for lens in AXES["lens"] for n in lens)
    assert AXES["sinks"] == (False, True)


def row_bound(case: DecodeCase) -> float:
    """The rounding of the output, and on a GPU that of the weights, which take a bfloat16 cache's type."""
    on_tensor_cores = world.DEVICE != "cpu" and backend_name() == "triton" and case.q_dtype != "float32"
    return ROW_BOUNDS["bfloat16" if on_tensor_cores and case.kv_dtype == "bfloat16" else case.q_dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_row_of_every_case_is_as_exact_as_its_dtype(case: DecodeCase) -> None:
    inputs = DecodeInputs.of(case, device=world.DEVICE)
    output, plan = inputs.decode(backend=World.backend)
    assert plan.route == "planned"
    errors = row_errors(output, inputs.expected)
    assert (errors <= row_bound(case)).all(), f"relative error per output row: {errors.tolist()}"
    padding = inputs.num_rows * case.query_length
    assert len(errors) > padding and (output[padding:] == 0).all()


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_the_fallback_is_as_exact(case: DecodeCase) -> None:
    errors = DecodeInputs.of(case, device=world.DEVICE).errors(enabled=False, fallback=fallback_name())
    assert (errors <= row_bound(case)).all(), f"relative error per output row: {errors.tolist()}"


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_one_token_more_or_less_is_far_beyond_the_bound(case: DecodeCase) -> None:
    """Positive control: the bounds are tight enough to see one token, in every kind of call."""
    inputs = DecodeInputs.of(case)
    wrong = inputs.context_lens - 1
    found = reference_decode(
        inputs.query,
        *inputs.nhd,
        inputs.block_tables,
        wrong,
        inputs.softmax_scale,
        query_length=case.query_length,
        sliding_window=case.sliding_window,
        sinks=inputs.sinks,
        key_scale=1.0 if inputs.key_scale is None else inputs.key_scale,
        value_scale=1.0 if inputs.value_scale is None else inputs.value_scale,
    )[: inputs.num_rows * case.query_length]
    seen = inputs.expected.flatten(1).norm(dim=1) > 0
    # A token that peaked logits hide is worth nothing: such rows may stay within the bound.
    is_off = row_errors(found, inputs.expected)[seen] > ROW_BOUNDS[case.q_dtype]
    assert is_off.any() if case.peaked else is_off.all()


@pytest.mark.parametrize(
    ("poisoned", "what"),
    [("key_cache", "an unowned page"), ("value_cache", "a tail"), ("key_scale", "a scale"), ("block_tables", "a row")],
)
def test_what_no_row_owns_is_poisoned(poisoned: str, what: str) -> None:
    case = DecodeCase(kv_dtype="float8_e4m3fn", scales="per token", layout="packed", lens=(300, 0, 17))
    inputs = DecodeInputs.of(case)
    tensor = getattr(inputs, poisoned)
    if poisoned == "block_tables":
        used = -(-inputs.context_lens // case.page_size)
        strays = torch.cat([row[n:] for row, n in zip(tensor, [*used.tolist(), 0, 0], strict=True)])
        assert set(strays.tolist()) == {-1, 0x7F7F7F7F, 0, -(2**31)}
        assert not (torch.cat([row[:n] for row, n in zip(tensor, used.tolist(), strict=False)]) == 0).any()
        return
    bad_tokens = tensor.float().isnan()
    num_owned = sum(case.lens) * case.head_dim if "cache" in poisoned else sum(case.lens)
    assert int((~bad_tokens).sum()) == num_owned, what
    assert bad_tokens.any()


def test_a_decode_that_writes_beside_its_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from planlife.backends.torch_backend import TorchBackend

    decode = TorchBackend.decode

    def careless(self: Any, tables: Any, scratch: Any, output: torch.Tensor, *rest: Any) -> None:
        decode(self, tables, scratch, output, *rest)
        output.as_strided((1,), (1,), output.storage_offset() + output.numel()).zero_()

    inputs = DecodeInputs.of(DecodeCase())
    inputs.decode()
    monkeypatch.setattr(TorchBackend, "decode", careless)
    with pytest.raises(AssertionError, match="outside its output"):
        inputs.decode()


@pytest.mark.parametrize(
    ("name", "bias", "no_number"), [("float8_e4m3fn", 7, (0x7F, 0xFF)), ("float8_e4m3fnuz", 8, (0x80,))]
)
def test_the_reference_reads_every_fp8_byte_as_its_format_says(
    name: str, bias: int, no_number: tuple[int, ...]
) -> None:
    """The exact answer takes torch's word for what a byte means; here it is worked out from the bits."""
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        meant = mantissa / 8 * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - bias)
        cache = torch.tensor([byte], dtype=torch.uint8).view(getattr(torch, name)).view(1, 1, 1, 1)
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        key = torch.zeros(1, 1, 1, 1)
        found = reference_decode(torch.ones(1, 1, 1), key, cache, table, lens, 1.0).item()
        assert found != found if byte in no_number else found == (-meant if sign else meant), hex(byte)


LONG_ROW = 15
LONG_LENS = (*[257] * LONG_ROW, 200_000, *[257] * 16)


def plan_long_row(manager: PlanManager, lens: torch.Tensor) -> tuple[Any, list[list[int]], list[int]]:
    """(plan, tasks of the long row, number of tasks of each row); no row has a gap, or tasks that differ by a tile."""
    with manager.capture_phase():
        manager.warm()
    plan = manager.plan_for(Step(lens))
    assert plan.native is not None
    work_info, reduce_info = plan.native.work_info.tolist(), plan.native.reduce_info.tolist()
    for row, (first, count) in enumerate(reduce_info):
        tasks = work_info[first : first + count]
        tiles = [end - begin for _, begin, end, _ in tasks]
        assert {task[0] for task in tasks} == {row}
        assert max(tiles) - min(tiles) <= 1
        assert [0, *itertools.accumulate(tiles)] == [tasks[0][1], *(task[2] for task in tasks)]
        assert sum(tiles) == -(-LONG_LENS[row] // 256)
    first, count = reduce_info[LONG_ROW]
    return plan, work_info[first : first + count], [count for _, count in reduce_info]


def test_a_sequence_of_200_000_tokens_is_spread_over_the_whole_budget() -> None:
    """C43: among 31 of 257 tokens, through a manager with one task per compute unit."""
    spec = PlanSpec(2, 1, 16, 256, max_context_tokens=200_000, workgroup_budget=NUM_CU)
    inputs = DecodeInputs(spec, LONG_LENS, device=world.DEVICE)
    options = {"device": new_device(NUM_CU), "backend": World.backend}
    with PlanManager(spec, ladder=CapacityLadder([len(LONG_LENS)]), **options) as manager:
        plan, tasks, num_tasks = plan_long_row(manager, inputs.context_lens)
        assert sum(num_tasks) == len(plan.native.work_info) == NUM_CU, "a slot is idle"
        assert len(tasks) > 0.8 * NUM_CU
        assert max(end - begin for _, begin, end, _ in tasks) == 4  # of 782: none owns the critical path
        query = inputs.query[: len(LONG_LENS)]
        output = torch.full_like(query, torch.nan)
        inputs.decode_into(output, query, manager, plan)
    errors = row_errors(output, inputs.expected)
    assert (errors <= ROW_BOUNDS["bfloat16"]).all(), f"relative error per output row: {errors.tolist()}"


def test_with_more_slots_than_compute_units_a_long_row_has_a_task_for_each_unit() -> None:
    spec = PlanSpec(2, 1, 16, 256, max_context_tokens=200_000)  # the default budget: two slots per unit
    options = {"device": new_device(NUM_CU), "backend": World.backend}
    with PlanManager(spec, ladder=CapacityLadder([len(LONG_LENS)]), **options) as manager:
        lens = torch.tensor(LONG_LENS, dtype=torch.int32, device=world.DEVICE)
        plan, tasks, num_tasks = plan_long_row(manager, lens)
        assert len(plan.native.work_info) == 2 * NUM_CU
    assert len(tasks) == NUM_CU
    assert max(end - begin for _, begin, end, _ in tasks) == 4
    assert set(num_tasks) - {NUM_CU} <= {1, 2}


def test_a_case_without_rows_is_zeros_throughout() -> None:
    """R42: an idle rank's step, whose output is padded to the class."""
    output, plan = DecodeInputs.of(DecodeCase(lens=())).decode()
    assert plan.route == "dummy" and len(output) and not output.any()
    assert DecodeInputs.of(DecodeCase(lens=())).errors().tolist() == [0.0] * len(output)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"layout": "NHD"}, "layout must be one of nhd, hnd, packed"),
        ({"scales": "per_token"}, "scales must be one of none, host number"),
        ({"layout": "packed", "page_size": 4}, "multiples of 8, got 4 and 64"),
        ({"layout": "packed", "head_dim": 60}, "multiples of 8, got 16 and 60"),
    ],
)
def test_options_that_no_tensors_can_be_made_of_are_refused_by_name(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodeInputs.of(DecodeCase(**option))


@pytest.mark.parametrize(("name", "value"), [("layout", "NHD"), ("scales", "per_token")])
def test_inputs_of_a_spec_name_a_wrong_form_too(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be one of"):
        DecodeInputs(DecodeCase().spec(), (5,), **{name: value})
