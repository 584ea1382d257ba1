"""The limits that the wrapper knows are the library's: of the double in each generation, and of an installed aiter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from planlife import ConfigError, PlanSpec
from planlife.aiter_library import AiterLibrary, probe
from planlife.backends import aiter_backend
from planlife.backends.aiter_backend import AiterBackend, architecture_of
from planlife.backends.aiter_limits import (
    FP8_OF_ARCHITECTURE,
    HEAD_DIM_STEP_BF16,
    HEAD_DIM_STEP_FP8,
    MAX_HEAD_DIM,
    MAX_PLAN_ROWS,
    PAGE_SIZES,
    SMALL_HEAD_DIM_FP8,
)
from planlife.spec import FP8_DTYPES
from planlife.testing import DecodeInputs
from planlife.testing.aiter_machine import aiter_machine
from planlife.torch_device import CpuDevice, resolve_device

from .double_call import SCALE_FORM, refusal_by_the_double

DOUBLES = [
    (generation, architecture)
    for generation in ("G2", "G3", "G4", "newer")
    for architecture in ("gfx942", "gfx950", "gfx1250")
]


@dataclass
class Here:
    """A library on a machine."""

    library: AiterLibrary
    architecture: str
    device: Any

    def backend(self) -> AiterBackend:
        return AiterBackend(library=self.library, architecture_of=lambda device: self.architecture)

    @property
    def fp8(self) -> PlanSpec:
        fp8 = FP8_OF_ARCHITECTURE[self.architecture]
        return PlanSpec(8, 1, 128, 16, max_context_tokens=256, kv_layout="packed", kv_dtype=fp8, scales="per_tensor")

    @property
    def bf16(self) -> PlanSpec:
        return replace(self.fp8, kv_dtype="bfloat16", scales="none")


@pytest.fixture(params=[*(f"{generation} on {arch}" for generation, arch in DOUBLES), "installed"])
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    if request.param == "installed":
        library, reasons = probe()
        if library is None:
            pytest.skip("; ".join(reasons))
        device = resolve_device(None)
        if architecture_of(device) not in FP8_OF_ARCHITECTURE:
            pytest.skip(f"aiter's work plans are not for {device.name}")
        yield Here(library, architecture_of(device), device)
        return
    generation, _, architecture = request.param.split()
    with aiter_machine(architecture, generation=generation):
        library, reasons = probe()
        assert library is not None, reasons
        yield Here(library, architecture, CpuDevice())


def site_limits(here: Here) -> list[tuple[str, PlanSpec, PlanSpec]]:
    """(what, just inside, just outside) of each constant that is about a site."""
    fp8, bf16 = here.fp8, here.bf16
    step, small, top = HEAD_DIM_STEP_FP8, SMALL_HEAD_DIM_FP8, MAX_HEAD_DIM
    other_fp8 = next(dtype for dtype in FP8_DTYPES if dtype != fp8.kv_dtype)
    found = [
        ("FP8_OF_ARCHITECTURE", fp8, replace(fp8, kv_dtype=other_fp8)),
        *(
            ("PAGE_SIZES", replace(fp8, page_size=size), replace(fp8, page_size=other))
            for size, other in zip(PAGE_SIZES, (32, 48, 256), strict=True)
        ),
        ("HEAD_DIM_STEP_FP8", replace(fp8, head_dim=2 * step), replace(fp8, head_dim=step + 64)),
        ("SMALL_HEAD_DIM_FP8", replace(fp8, head_dim=small), replace(fp8, head_dim=small // 2)),
        ("MAX_HEAD_DIM, FP8", replace(fp8, head_dim=top), replace(fp8, head_dim=top + step)),
        ("query dtype, FP8", replace(fp8, q_dtype="float16"), replace(fp8, q_dtype="float32")),
    ]
    if not here.backend().refuse_spec(bf16, here.device):  # not every text has BF16 caches
        is_as_fp8 = here.architecture == "gfx1250"
        step = HEAD_DIM_STEP_FP8 if is_as_fp8 else HEAD_DIM_STEP_BF16
        other_query, no_query = ("float16", "float32") if is_as_fp8 else ("bfloat16", "float16")
        found += [
            ("HEAD_DIM_STEP_BF16", replace(bf16, head_dim=3 * step), replace(bf16, head_dim=3 * step + step // 2)),
            ("MAX_HEAD_DIM, BF16", replace(bf16, head_dim=top), replace(bf16, head_dim=top + step)),
            ("query dtype, BF16", replace(bf16, q_dtype=other_query), replace(bf16, q_dtype=no_query)),
        ]
    return found


def test_what_is_just_outside_is_refused_by_the_library_itself_and_explained_and_what_is_inside_by_neither(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, explain = here.backend(), aiter_backend.explain_refusal
    said: dict[str, list[str]] = {}

    def explained(*arguments: Any) -> list[str]:
        said["explanation"] = explain(*arguments)
        return []  # the library has the word

    monkeypatch.setattr(aiter_backend, "explain_refusal", explained)
    for what, inside, outside in site_limits(here):
        assert backend.refuse_spec(inside, here.device) == (), what
        assert explain(here.library, inside, here.architecture, torch.device(here.device.name)) == [], what
        (refusal,) = backend.refuse_spec(outside, here.device)
        assert "refuses calls of this site" in refusal, what
        assert len(said["explanation"]) == 1, what


def test_a_plan_takes_as_many_rows_and_partitions_as_the_wrapper_asks_for_and_no_more(here: Here) -> None:
    def plan(rows: int, max_partitions: int) -> Any:
        lens = torch.zeros(rows, dtype=torch.int32, device=here.device.name)
        return here.library.plan(lens, 1, max_partitions=max_partitions)

    num_cu = here.device.num_compute_units
    assert plan(MAX_PLAN_ROWS, num_cu).reduce_info.shape == (MAX_PLAN_ROWS, 2)
    for rows, max_partitions in ((MAX_PLAN_ROWS + 1, num_cu), (1, num_cu + 1)):
        with pytest.raises(ValueError):  # noqa: PT011 - in the library's own words
            plan(rows, max_partitions)
    (reason,) = here.backend().refuse_spec(replace(here.fp8, max_partitions=num_cu + 1), here.device)
    assert f"max_partitions={num_cu + 1} is above" in reason
    assert here.backend().refuse_spec(replace(here.fp8, max_partitions=num_cu), here.device) == ()


@pytest.mark.parametrize("generation", ["G2", "G3", "G4", "newer"])
@pytest.mark.parametrize("architecture", [*FP8_OF_ARCHITECTURE, "gfx90a", "gfx1201"])
def test_the_architectures_are_those_that_a_library_serves(generation: str, architecture: str) -> None:
    spec = PlanSpec(
        8, 1, 128, 16, max_context_tokens=256, kv_layout="packed", scales="per_tensor",
        kv_dtype=FP8_OF_ARCHITECTURE.get(architecture, "float8_e4m3fn"),
    )  # fmt: skip
    with aiter_machine(architecture, generation=generation, finite_tails=False):
        refusals = AiterBackend().refuse_spec(spec, CpuDevice())
        refusal = refusal_of(spec)
    assert bool(refusals) == bool(refusal) == (architecture not in FP8_OF_ARCHITECTURE)


def refusal_of(spec: PlanSpec) -> str:
    """What the library says to a call of this site with one row; empty if it takes it."""
    try:
        inputs = DecodeInputs(spec, (1,), layout=spec.kv_layout, scales=SCALE_FORM[spec.scales])
    except ConfigError as error:
        return f"no such cache: {error}"
    return refusal_by_the_double(inputs)


def random_spec(draw: random.Random) -> PlanSpec:
    """Most fields are right in most draws: a spec that is wrong in all ways tells nothing."""

    def mostly(right: Any, *others: Any) -> Any:
        return right if draw.random() < 0.75 else draw.choice(others)

    kv_dtype = draw.choice(("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"))
    kv_dtype = mostly(kv_dtype, "float16", "float32")
    heads, query_length = draw.choice((1, 2, 3)), draw.choice((1, 2, 5))
    scales = draw.choice(("per_tensor", "per_token")) if kv_dtype in FP8_DTYPES else "none"
    return PlanSpec(
        heads * draw.choice((1, 2, 16)),
        heads,
        mostly(draw.choice((64, 128, 256)), 8, 32, 72, 96, 192, 320, 384, 1024, 1088, 1152),
        mostly(draw.choice(PAGE_SIZES), 1, 8, 32, 96, 256),
        max_context_tokens=max(draw.choice((1, 16, 300)), query_length),
        kv_layout=mostly("packed", "nhd", "hnd"),
        kv_dtype=kv_dtype,
        q_dtype=mostly("bfloat16", "float16", "float32"),
        scales=scales,
        query_length=query_length,
        sliding_window=draw.choice((0, 0, 1, 700)),
        max_partitions=mostly(None, 1, 12, 13),
    )


@pytest.mark.parametrize(("generation", "architecture"), DOUBLES)
def test_a_random_site_is_refused_exactly_when_the_library_does_not_take_its_call(
    generation: str, architecture: str
) -> None:
    draw = random.Random(f"{generation}/{architecture}")
    device = CpuDevice(num_compute_units=12)
    outcomes = set()
    with aiter_machine(architecture, generation=generation, num_cu=12, finite_tails=False):
        backend = AiterBackend()
        for number in range(300):
            spec = random_spec(draw)
            refusals = backend.refuse_spec(spec, device)
            refusal = refusal_of(spec)
            outcomes.add(not refusal)
            assert bool(refusals) == bool(refusal), f"draw {number}: {spec}: {refusals}; the library: {refusal!r}"
    assert outcomes == {True, False}
