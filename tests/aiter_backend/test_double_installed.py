"""The double against an installed aiter: signatures anywhere; host checks, integers and caches on an AMD GPU."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from planlife.aiter_library import PLAN_FIELDS
from planlife.testing.aiter_double import GENERATIONS, AiterDouble
from planlife.testing.aiter_double.signatures import decode_signature, plan_signature

from .double_call import copy_of, decode_by, defining_module, num_compiled, valid_call
from .refused_calls import DECODE_FAULTS, PLAN_FAULTS, VALIDATE_FAULTS, is_another_call
from .test_double_signatures import generation_of


class Machine(NamedTuple):
    device: str
    arch: str
    num_cu: int


def machine() -> Machine | None:
    """Whose kernels an installed aiter launches."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Machine("cuda", properties.gcnArchName.partition(":")[0], properties.multi_processor_count)


@pytest.fixture(scope="module")
def library() -> ModuleType:
    try:
        module = defining_module()
    except ImportError as error:
        pytest.skip(f"no aiter with a FlyDSL decode here: {error}")
    if generation_of(module) not in GENERATIONS:
        pytest.fail(f"the installed aiter has {generation_of(module)}")
    return module


@pytest.fixture
def doubles(library: ModuleType) -> list[AiterDouble]:
    """This machine with each text of the installed generation that the double knows. Not installed for imports."""
    here = machine()
    if here is None:
        pytest.skip("an installed aiter runs on AMD GPUs only, and there is none here")
    if here.arch not in ("gfx942", "gfx950", "gfx1250"):
        pytest.skip(f"aiter's decode does not run on {here.arch}")
    settings = {"arch": here.arch, "num_cu": here.num_cu, "device_type": here.device, "on_violation": "record"}
    generation = generation_of(library)
    return [AiterDouble(generation=generation, native_bf16=native, **settings) for native in (True, False)]


def test_signatures_are_those_of_an_installed_aiter(library):
    name = generation_of(library)
    functions = {"plan_pa_decode": plan_signature, "pa_decode": decode_signature}
    has_max_batch = "max_batch_size" in inspect.signature(library.plan_pa_decode).parameters
    for function, signature in functions.items():
        options = {"with_max_batch_size": has_max_batch} if function == "plan_pa_decode" else {}
        ours = signature(GENERATIONS[name], **options).parameters.values()
        theirs = inspect.signature(getattr(library, function)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in theirs] == [(p.name, p.kind, p.default) for p in ours]
    fields = [field.name for field in dataclasses.fields(library.PADecodePlan)]
    assert fields == [field.name for field in dataclasses.fields(AiterDouble(generation=name).plan_class)]


def test_the_planner_makes_the_same_integers(library, doubles):
    double, device = doubles[0], machine().device
    generator = random.Random(0)
    for _ in range(300):
        rows = generator.choice((1, 2, 3, 8, 33))
        top = generator.choice((0, 300, 5000, 200_000, 2**31 - 1))
        lens = [generator.choice((0, -5, 256, 257, generator.randint(0, top))) for _ in range(rows)]
        lengths = torch.tensor(lens, dtype=torch.int32, device=device)
        options = {
            "max_partitions": generator.choice((None, 1, 7)),
            "workgroup_budget": generator.choice((None, 1, generator.randint(1, 4 * double.num_cu))),
            "sliding_window": generator.choice((0, 1, 256, generator.randint(1, 20_000), 2**40)),
            "query_length": generator.choice((1, 2, 4)),
        }
        kv_heads = generator.choice((1, 2))
        ours, theirs = (
            plan(lengths, kv_heads, **options) for plan in (double.functions["plan_pa_decode"], library.plan_pa_decode)
        )
        for field in PLAN_FIELDS:
            mine, its = getattr(ours, field), getattr(theirs, field)
            assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its, (field, lens, options)


def raised_by(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """(exception, message)."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_the_planner_refuses_the_same_calls_in_the_same_order(library, doubles):
    double, device = doubles[0], machine().device
    lengths = torch.tensor([300, 17], dtype=torch.int32, device=device)
    functions = (double.functions["plan_pa_decode"], library.plan_pa_decode)
    plans = [plan(lengths, 1, max_partitions=8, workgroup_budget=16) for plan in functions]

    def refused(*faults: dict[str, Any]) -> list[tuple[str, str]]:
        call = {"context_lengths": lengths, "num_kv_heads": 1}
        for fault in faults:
            call |= fault
        if "max_partitions" in call:  # the table's faults are of a machine with 8 compute units
            call["max_partitions"] += double.num_cu - 8
        given = (call.pop("context_lengths").to(device), call.pop("num_kv_heads"))
        return [raised_by(function, *given, plan=plan, **call) for function, plan in zip(functions, plans, strict=True)]

    singles = [refused(fault) for fault, _ in PLAN_FAULTS]
    for at, (later, _) in enumerate(PLAN_FAULTS):
        assert singles[at][0][0] == singles[at][1][0] != "nothing", (later, singles[at])
        for (earlier, _), single in zip(PLAN_FAULTS[:at], singles, strict=False):
            if not later.keys() & earlier.keys():
                assert refused(later, earlier) == single, (later, earlier)
    for fault, _ in VALIDATE_FAULTS:
        given = {
            name: value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
            for name, value in fault.items()
        }
        if "max_partitions" in given:
            given["max_partitions"] += double.num_cu - 8
        ours, theirs = (raised_by(copy_of(plan, **given).validate, *(2, 1, lengths.device)) for plan in plans)
        assert ours[0] == theirs[0] == "ValueError", (fault, ours, theirs)


def test_decode_refuses_the_same_calls_in_the_same_order(library, doubles):
    here = machine()
    call = valid_call(doubles[0], device=here.device)
    theirs_of: dict[tuple[int, ...], tuple[str, str]] = {}
    changes: list[dict[str, Any]] = []
    with torch.device(here.device):  # what the faults make is on the GPU, as the rest
        for _, spoil, _, _ in DECODE_FAULTS:
            changes.append(spoil(call))

    def refused(function: Callable[..., Any], plan_class: Any, *indices: int) -> tuple[str, str]:
        given = dict(call)
        for index in reversed(indices):
            given |= changes[index]
        if isinstance(given["work_plan"], type(call["work_plan"])):
            given["work_plan"] = copy_of(given["work_plan"], plan_class)
        return raised_by(decode_by, function, given)

    pairs = [(at,) for at in range(len(changes))]
    for at, earlier in enumerate(changes):
        for other in range(at + 1, len(changes)):
            later = changes[other]
            if not (earlier.keys() & later.keys() or is_another_call(earlier) or is_another_call(later)):
                pairs.append((at, other))
    for pair in pairs:
        theirs_of[pair] = refused(library.pa_decode, library.PADecodePlan, *pair)
        if len(pair) == 2:
            singles = (theirs_of[pair[:1]], theirs_of[pair[1:]])
            assert theirs_of[pair] in singles, pair
    # Which row of two is named tells the text: the double knows two, and the library is one of them throughout.
    misfits = []
    for double in doubles:
        ours_of = {pair: refused(double.functions["pa_decode"], double.plan_class, *pair) for pair in pairs}
        named = {
            pair: [theirs_of[pair] == theirs_of[(at,)] for at in pair]
            == [ours_of[pair] == ours_of[(at,)] for at in pair]
            for pair in pairs
            if len(pair) == 2
        }
        misfits.append([pair for pair in pairs if ours_of[pair][0] != theirs_of[pair][0] or not named.get(pair, True)])
    assert not min(misfits, key=len), [(pair, theirs_of[pair]) for pair in min(misfits, key=len)[:5]]


def test_what_is_a_new_kernel_to_the_double_is_one_to_the_library(library, doubles):
    """By the sizes of the library's caches, which are private: skipped where they are elsewhere."""
    here, double = machine(), doubles[0]
    kernels = "aiter.ops.flydsl.kernels."
    try:
        planner = importlib.import_module(f"{kernels}pa_decode_plan").compile_pa_decode_plan
        tile = importlib.import_module(f"{kernels}pa_decode_kernel")._PA_DECODE_TILE_CACHE
        reducer = importlib.import_module(f"{kernels}pa_decode_reduce").compile_pa_decode_ps_reduce
        if here.arch == "gfx1250":
            tile = importlib.import_module(f"{kernels}pa_decode.gfx1250")._CACHE
    except (ImportError, AttributeError) as error:
        pytest.skip(f"the installed aiter keeps its kernels elsewhere: {error}")
    for cache_clear in (planner.cache_clear, tile.clear, reducer.cache_clear):
        cache_clear()

    def sizes() -> tuple[int, ...]:
        return planner.cache_info().currsize, len(tile), reducer.cache_info().currsize

    def ours() -> tuple[int, ...]:
        return tuple(num_compiled(double, kind) for kind in ("plan", "tile", "reduce"))

    tuned = {"head_dim": 128, "page": 128, "scales": "per_token", "group": 16, "query_length": 4}
    for shape in ({}, tuned, {"head_dim": 128}):
        for lens in ((300,), (300, 17), (17,) * 16):
            for options in ({}, {"max_partitions": 3}, {"sliding_window": 300}, {"workgroup_budget": 40}):
                before, ours_before = sizes(), ours()
                call = valid_call(double, lens, device=here.device, **shape, **options)
                plan = copy_of(call["work_plan"], double.plan_class)
                windowed = {"sliding_window": call["sliding_window"], "query_length": call["query_length"]}
                double.functions["plan_pa_decode"](call["context_lengths"], 1, plan=plan, **windowed)
                decode_by(library.pa_decode, call)
                decode_by(double.functions["pa_decode"], call | {"work_plan": plan})
                grown = [after - since for after, since in zip(sizes(), before, strict=True)]
                expected = [after - since for after, since in zip(ours(), ours_before, strict=True)]
                assert grown == expected, (lens, shape, options)
