"""The table of decode cases over the double: what aiter serves is right, and the rest is refused when the double would.

Whether a call is served is asked of the double past the wrapper, with the call's own tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planlife import CapacityLadder, ConfigError, PlanManager
from planlife.backends.aiter_backend import AiterBackend
from planlife.backends.aiter_plan import is_unsafe_with_plain_v
from planlife.spec import FP8_DTYPES
from planlife.testing import DecodeCase, DecodeInputs, decode_cases, row_errors
from planlife.testing.aiter_double import OPTIONAL
from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.decode_table import AXES, ROW_BOUNDS, can_meet
from planlife.torch_device import resolve_device

from .double_call import refusal_by_the_double

CASES = decode_cases()
#: (architecture, generation, optional functions). Without its predicate nobody tells the wrapper what is served.
WITHOUT_PREDICATE = tuple(name for name in OPTIONAL if name != "can_use_flydsl_pa_decode")
MACHINES = (
    ("gfx942", "G2", ()),
    ("gfx942", "G3", ()),
    ("gfx950", "G3", ()),
    ("gfx1250", "G3", ()),
    ("gfx942", "newer", OPTIONAL),
    ("gfx950", "newer", OPTIONAL),
    ("gfx950", "newer", WITHOUT_PREDICATE),
    ("gfx1250", "G4", ()),
    ("gfx1250", "newer", OPTIONAL),
    ("gfx1250", "newer", WITHOUT_PREDICATE),
)
on_each_machine = pytest.mark.parametrize(
    "machine",
    MACHINES,
    ids=lambda one: f"{one[0]} {one[1]}" + ", without its predicate" * (one[2] == WITHOUT_PREDICATE),
)

#: Calls that are served where their FP8 type is; their neighbours are at the limits.
BASES = (
    DecodeCase(layout="packed", lens=(3,)),
    *(
        DecodeCase(kv_dtype=kv_dtype, scales=scales, layout=layout, lens=(3,))
        for kv_dtype in FP8_DTYPES
        for scales, layout in (("device [1]", "packed"), ("per token", "packed, plain V"))
    ),
    DecodeCase(kv_dtype="float8_e4m3fn", scales="device [1]", page_size=64, head_dim=256, layout="nhd", lens=(3,)),
)
#: Beside those of AXES: just inside and just outside of what some text serves.
MORE = {
    "page_size": (32,),
    "head_dim": (192, 320, 640, 1024, 1088, 1152),
    "group": (32, 33, 64),
    "max_partitions": (256, 257),
}


def neighbours() -> Iterator[DecodeCase]:
    """The bases with any one option changed."""
    for base in BASES:
        for name in AXES.keys() - {"lens"}:
            for value in (*AXES[name], *MORE.get(name, ())):
                case = replace(base, **{name: value})
                if can_meet(frozenset(vars(case).items())):
                    yield case


ASKED = tuple(dict.fromkeys((*CASES, *neighbours())))


def machine_of(arch: str, generation: str, optional: tuple[str, ...]) -> Any:
    return aiter_machine(arch, generation=generation, optional=optional, finite_tails=False)


@cache
def inputs_of(case: DecodeCase) -> DecodeInputs:
    return DecodeInputs.of(case)


def refusal_of(case: DecodeCase) -> str:
    return refusal_by_the_double(inputs_of(case))


def differences(backend: AiterBackend) -> list[str]:
    """Calls that one of wrapper and double refuses and the other does not."""
    device = resolve_device("cpu")
    found = []
    for case in ASKED:
        reasons, refusal = backend.refuse_spec(case.spec(), device), refusal_of(case)
        if "5-D value_cache" in refusal:  # the form of V is the call's: the site is what it is with the other form
            refusal = refusal_of(replace(case, layout="packed"))
        if bool(reasons) != bool(refusal):
            found.append(f"{case}: the wrapper says {list(reasons)}, the double {refusal!r}")
    return found


@on_each_machine
def test_the_wrapper_refuses_what_the_double_refuses_and_nothing_else(machine: Any) -> None:
    with machine_of(*machine):
        found = differences(AiterBackend())
        refused = [case for case in ASKED if refusal_of(case)]
    assert 0 < len(refused) < len(ASKED)  # positive control: the double does tell them apart
    assert found == []


@pytest.mark.parametrize("reasons", [[], ["a reason"]], ids=["less", "more"])
def test_a_wrapper_that_refuses_more_or_less_is_found(reasons: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AiterBackend, "refuse_spec", lambda *args: reasons)
    with machine_of("gfx942", "G3", ()):
        assert differences(AiterBackend())


def served_here(cases: Sequence[DecodeCase]) -> list[DecodeCase]:
    return [case for case in cases if not refusal_of(case)]


@on_each_machine
def test_a_case_of_the_table_is_right_or_refused_with_the_reason(machine: Any) -> None:
    with machine_of(*machine) as double:
        served = served_here(CASES)
        assert len(served) >= 4
        for case in CASES:
            if case in served and is_reported_to_fault(case, machine[0]):
                with pytest.raises(ConfigError, match="page fault"):
                    decode_right(case)
                continue
            if case in served:
                decode_right(case)
                continue
            if "5-D value_cache" in refusal_of(case):  # the form of V is the call's, and not the site's
                with pytest.raises(ConfigError, match="5-D value_cache"):
                    inputs_of(case).decode(backend="aiter")
                continue
            reasons = AiterBackend().refuse_spec(case.spec(), resolve_device("cpu"))
            with pytest.raises(ConfigError) as caught:
                PlanManager(case.spec(), ladder=CapacityLadder([4]), device="cpu", backend="aiter")
            assert all(reason in str(caught.value) for reason in reasons)
        assert double.violations == []


def is_reported_to_fault(case: DecodeCase, architecture: str) -> bool:
    return case.layout == "packed, plain V" and is_unsafe_with_plain_v(case.spec(), architecture)


def decode_right(case: DecodeCase) -> None:
    inputs = inputs_of(case)
    output, plan = inputs.decode(backend="aiter")
    assert plan.route == "planned", plan.reason
    errors = row_errors(output, inputs.expected)
    assert (errors <= ROW_BOUNDS[case.q_dtype]).all(), f"{case}: {errors.tolist()}"
    padding = inputs.num_rows * case.query_length
    assert len(errors) > padding and (output[padding:] == 0).all()


#: What stands in for an option that aiter has on no GPU.
_SERVED = {
    "layout": {"nhd": "packed", "hnd": "packed, plain V"},
    "page_size": {1: 16, 256: 128},
    "kv_dtype": {"float16": "bfloat16", "float32": "bfloat16"},
}


def as_aiter_reads(case: DecodeCase) -> DecodeCase:
    """The case with the nearest options that aiter serves."""
    case = replace(case, **{name: by.get(getattr(case, name), getattr(case, name)) for name, by in _SERVED.items()})
    if case.kv_dtype == "bfloat16":
        return replace(case, q_dtype="bfloat16", layout="packed")
    return replace(case, q_dtype="bfloat16") if case.q_dtype == "float32" else case


#: All of the table's cases, on a GPU that has their cache.
NEAREST = tuple(dict.fromkeys(map(as_aiter_reads, CASES)))


def architecture_for(case: DecodeCase) -> str:
    return "gfx942" if case.kv_dtype == "float8_e4m3fnuz" else "gfx950"


@pytest.mark.parametrize("case", NEAREST, ids=str)
def test_the_nearest_case_that_aiter_reads_is_as_exact_as_its_dtype(case: DecodeCase) -> None:
    with machine_of(architecture_for(case), "G3", ()) as double:
        decode_right(case)
        assert double.violations == []


@pytest.mark.parametrize(("generation", "optional"), [("G2", ()), ("newer", OPTIONAL)])
@pytest.mark.parametrize("case", NEAREST[::4], ids=str)
def test_other_generations_are_as_exact(case: DecodeCase, generation: str, optional: tuple[str, ...]) -> None:
    with machine_of(architecture_for(case), generation, optional) as double:
        decode_right(case)
        assert double.violations == []


@pytest.mark.parametrize("case", [case for case in NEAREST if case.kv_dtype == "float8_e4m3fn"][::2], ids=str)
def test_the_newest_gpu_is_as_exact(case: DecodeCase) -> None:
    if is_reported_to_fault(case, "gfx1250"):
        case = replace(case, layout="packed")
    with machine_of("gfx1250", "newer", OPTIONAL) as double:
        decode_right(case)
        assert double.violations == []
