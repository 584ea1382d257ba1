"""Which aiter is installed, told by its signatures: asked once per process, and never because planlife is imported."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

#: Names are taken from the module that defines them: the package exports `pa_decode` lazily, under its submodule's
#: name, so that an attribute of the package is sometimes the function and sometimes the module (ROCm/aiter#5949).
DEFINING_MODULE = "aiter.ops.flydsl.pa_decode"
_PLANNER_FILE = Path("ops", "flydsl", "pa_decode.py")
#: What ROCm's aiter has and PyPI's package of that name has not.
_ROCMS_PACKAGE = "aiter.ops"

#: What planlife passes. Positional ones first, as pa_decode has them.
PLAN_KEYWORDS = ("max_partitions", "sliding_window", "query_length", "plan")
PLAN_FIELDS = ("work_info", "reduce_info", "num_kv_heads", "max_partitions", "sliding_window", "query_length")
DECODE_POSITIONALS = (
    "output",
    "query",
    "key_cache",
    "value_cache",
    "context_lengths",
    "block_tables",
    "softmax_scale",
    "query_length",
)
DECODE_KEYWORDS = (
    "compute_type",
    "key_scale",
    "value_scale",
    "exp_sums",
    "max_logits",
    "temporary_output",
    "sinks",
    "sliding_window",
    "work_plan",
    "max_context_length",
)
_BUDGET_KEYWORDS = ("kv_dtype", "head_dim", "block_size", "query_length", "query_group_size", "sliding_window")
_NHD_KEYWORDS = ("kv_dtype", "head_dim", "block_size", "query_group_size")

#: Only older ones have these: before ROCm/aiter#5809 a plan was optional.
_BEFORE_PLANS_WERE_MANDATORY = ("max_context_partition_num", "ps", "tuned_file")

#: What to tell whoever has none.
WHERE_FROM = "it comes with the ROCm images (PyPI's aiter is another project)"
_UPGRADE = "upgrade aiter to one with ROCm/aiter#5809, together with the engine that calls it"
_OTHERWISE = "or pass 'triton', 'torch' or 'auto'"


@dataclass(frozen=True)
class AiterLibrary:
    """aiter's paged decode with work plans, as it is installed.

    plan, decode, plan_type: plan_pa_decode, pa_decode and PADecodePlan.
    can_use, workgroup_budget, nhd_max_query_length: can_use_flydsl_pa_decode, pa_decode_default_workgroup_budget and
        pa_decode_nhd_max_query_length; None where this aiter has none that can be asked as planlife would.
    """

    plan: Callable[..., Any]
    decode: Callable[..., Any]
    plan_type: Callable[..., Any]
    can_use: Callable[..., Any] | None = None
    workgroup_budget: Callable[..., Any] | None = None
    nhd_max_query_length: Callable[..., Any] | None = None


class Probe(NamedTuple):
    """library: None where aiter cannot be used. reasons: why not, empty if it can."""

    library: AiterLibrary | None
    reasons: tuple[str, ...]


@cache
def probe() -> Probe:
    """What is installed in this process. Imports aiter if it is ROCm's."""
    module, reason = _find()
    return Probe(None, (reason,)) if module is None else read(module)


def _find() -> tuple[ModuleType | None, str]:
    """The defining module, or why there is none. What is not ROCm's is told by its files, without importing it."""
    module = sys.modules.get(DEFINING_MODULE)
    if module is not None:
        return module, ""
    for name in accumulate(DEFINING_MODULE.split("."), "{}.{}".format):
        if sys.modules.get(name, name) is None:
            blocked = f"importing {name} is blocked in this process (sys.modules[{name!r}] is None)"
            return None, f"{blocked}: take that entry away, {_OTHERWISE}"
    if "aiter" not in sys.modules:
        spec = util.find_spec("aiter")
        if spec is None:
            return None, f"'aiter' is not installed: {WHERE_FROM}; {_OTHERWISE[3:]}"
        # Without a file there is nothing to tell it by: an importer of its own brings it.
        has_files = spec.origin is not None
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        if has_files and not any((folder / "ops").is_dir() for folder in folders):
            return None, _not_rocms(spec.origin)
        if has_files and not any((folder / _PLANNER_FILE).is_file() for folder in folders):
            return None, f"the aiter here has no {DEFINING_MODULE}, and so no plan_pa_decode: {_UPGRADE}, {_OTHERWISE}"
    try:
        # Not `import a.b.c as m`, which takes an attribute of the package.
        return import_module(DEFINING_MODULE), ""
    except (Exception, SystemExit) as error:  # a library that cannot start may raise anything, or want to exit
        if isinstance(error, ModuleNotFoundError) and error.name == _ROCMS_PACKAGE:
            return None, _not_rocms(getattr(sys.modules.get("aiter"), "__file__", None))
        return None, _cannot_start("imported", error)


def _cannot_start(what: str, error: BaseException) -> str:
    # As a package of its own: aiter's modules and folders of that name are in most messages.
    repair = "pip install 'planlife[rocm]'" if re.search(r"(?<![./\\\w])flydsl\b", str(error), re.I) else "repair that"
    return f"{DEFINING_MODULE} cannot be {what} here ({type(error).__name__}: {error}): {repair}, {_OTHERWISE}"


def _not_rocms(origin: str | None) -> str:
    where = "'aiter' that was imported" if origin is None else f"'aiter' in {origin}"
    return (
        f"the {where} is PyPI's asyncio package of that name, not ROCm's kernel library: pip uninstall aiter; ROCm's "
        f"comes with the ROCm images; {_OTHERWISE}"
    )


def read(module: ModuleType) -> Probe:
    """The library in an imported module, or everything that planlife misses in it."""
    names = ("plan_pa_decode", "pa_decode", "PADecodePlan")
    try:
        found: list[Any] = [getattr(module, name, None) for name in names]
    except Exception as error:  # a name that is exported lazily imports what it needs
        return Probe(None, (_cannot_start("read", error),))
    missing = [name for name, one in zip(names, found, strict=True) if not callable(one)]
    if missing:
        fork = [name for name in ("flydsl_pa_decode", "make_pa_decode_plan") if attribute_of(module, name) is not None]
        kind = f": it has {', '.join(fork)} instead, as a fork does" if fork else ", so it is too old for work plans"
        return Probe(None, (f"the aiter here has no {', '.join(missing)}{kind}; {_UPGRADE}, {_OTHERWISE}",))
    plan, decode, plan_type = found
    reasons = [
        *_misfits("plan_pa_decode", plan, ("context_lengths", "num_kv_heads"), PLAN_KEYWORDS),
        *(_older(decode) or _misfits("pa_decode", decode, DECODE_POSITIONALS, DECODE_KEYWORDS)),
        *_misfits("PADecodePlan", plan_type, (), PLAN_FIELDS),
    ]
    if reasons:
        return Probe(None, tuple(f"{reason}, {_OTHERWISE}" for reason in reasons))

    def optional(name: str, positionals: Sequence[str], keywords: Sequence[str]) -> Callable[..., Any] | None:
        function = attribute_of(module, name)
        return function if callable(function) and not _misfits(name, function, positionals, keywords) else None

    library = AiterLibrary(
        plan,
        decode,
        plan_type,
        optional("can_use_flydsl_pa_decode", DECODE_POSITIONALS, DECODE_KEYWORDS),
        optional("pa_decode_default_workgroup_budget", ("device",), _BUDGET_KEYWORDS),
        optional("pa_decode_nhd_max_query_length", ("device",), _NHD_KEYWORDS),
    )
    return Probe(library, ())


def _older(decode: Callable[..., Any]) -> list[str]:
    """Why this pa_decode is of before plans were mandatory."""
    parameters = parameters_of(decode)
    found = [name for name in _BEFORE_PLANS_WERE_MANDATORY if name in parameters]
    work_plan = parameters.get("work_plan")
    if found or (work_plan is not None and work_plan.default is not inspect.Parameter.empty):
        sign = f"takes {', '.join(found)}" if found else "has a default for work_plan"
        return [f"the aiter here is of before work plans were mandatory (its pa_decode {sign}): {_UPGRADE}"]
    return []


def attribute_of(module: object, name: str) -> Any:
    """What a module has under that name; None where it has nothing, or where that cannot be had."""
    try:
        return getattr(module, name, None)
    except Exception:  # a lazy export raises whatever its own import does
        return None


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """By name; none where they cannot be read."""
    try:
        return inspect.signature(function).parameters
    except Exception:  # of an object with a __signature__ of its own, anything
        return {}


def _misfits(name: str, function: Callable[..., Any], positionals: Sequence[str], keywords: Sequence[str]) -> list[str]:
    """Why a function cannot be called as planlife calls it. More parameters are fine while they have defaults."""
    parameters = parameters_of(function)
    by_name = {
        one.name
        for one in parameters.values()
        if one.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    lacking = [wanted for wanted in keywords if wanted not in by_name and not takes_any]
    if tuple(parameters)[: len(positionals)] != tuple(positionals):
        lacking.insert(0, f"({', '.join(positionals)}) in front")
    if lacking:
        return [f"the {name} of the aiter here does not take {', '.join(lacking)}: {_UPGRADE}"]
    more = [
        one.name
        for one in parameters.values()
        if one.name not in positionals
        and one.name not in keywords
        and one.default is inspect.Parameter.empty
        and one.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    if more:
        return [
            f"the {name} of the aiter here needs {', '.join(more)}, which this planlife does not know: upgrade planlife"
        ]
    return []


def ask_count(function: Callable[..., Any], *args: Any, **keywords: Any) -> int | None:
    """What one of the newer functions counts; None where it gives no count >= 1.

    They are called as announced, and what is released may answer otherwise, or not for every shape.
    """
    try:
        count = operator.index(function(*args, **keywords))
    except Exception:  # whatever a library raises, nobody is stopped by a number that was only better
        return None
    return count if count >= 1 else None
