"""Which generation of aiter's planned decode an imported module is, told by its signatures; for people, not for calls.

What planlife can call is decided by `aiter_library.read` alone. The generations are those of docs/aiter.md.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from .aiter_library import (
    DECODE_KEYWORDS,
    DECODE_POSITIONALS,
    DEFINING_MODULE,
    PLAN_KEYWORDS,
    AiterLibrary,
    attribute_of,
    function_of,
    parameters_of,
    tuning_module,
)

#: What the first generation with mandatory plans takes; more is newer.
_KNOWN_OF_DECODE = {*DECODE_POSITIONALS, *DECODE_KEYWORDS, "context_partition_size", "query_scale", "alibi_slopes"}
_KNOWN_OF_PLAN = {*PLAN_KEYWORDS, "context_lengths", "num_kv_heads", "workgroup_budget"}

#: By what its own kernel is called. The integers are the same.
_PLANNERS = {"compile_pa_decode_plan": "FlyDSL", "_plan_pa_decode": "Triton"}
#: The first two with mandatory plans have the same signatures.
_BY_PLANNER = {"Triton": "G2", "FlyDSL": "G3"}
_UNTOLD = "G2 or G3"

#: What came with or after mandatory plans, and what planlife does (with it, without it).
#: max_batch_size is a parameter of plan_pa_decode, the others are functions.
NEWER_NAMES = {
    "can_use_flydsl_pa_decode": (
        "it decides which sites are served",
        "pa_decode's own host checks decide which sites are served",
    ),
    "max_batch_size": (
        "aiter plans more than 4,096 rows at once on gfx1250; planlife makes segments of 4,096 all the same",
        "planlife makes segments of 4,096 rows",
    ),
    "pa_decode_default_workgroup_budget": (
        "it says how many tasks a site's plans have",
        "plans have 2 tasks for each compute unit",
    ),
    "pa_decode_nhd_max_query_length": (
        "it tells which kv_layout='nhd' caches aiter reads",
        "aiter reads no kv_layout='nhd' cache",
    ),
    "get_cached_budget": ("a budget that was tuned for a site is the site's", "no budget is tuned offline"),
    "prepare_pa_decode_plan": (
        "where budgets were tuned, planlife asks it for one; plans and scratch are its own",
        "planlife does not need it",
    ),
}
#: Those that planlife calls, and where `AiterLibrary` has them.
_FIELDS = {
    "can_use_flydsl_pa_decode": "can_use",
    "pa_decode_default_workgroup_budget": "workgroup_budget",
    "pa_decode_nhd_max_query_length": "nhd_max_query_length",
    "get_cached_budget": "budget_cache",
    "prepare_pa_decode_plan": "prepare",
}
#: Some of the first texts with mandatory plans have it: it tells nothing.
_TELLS_NOTHING = "prepare_pa_decode_plan"


@dataclass(frozen=True)
class AiterGeneration:
    """What an imported aiter.ops.flydsl.pa_decode looks like.

    name: "G0", "G1a" to "G1d", "G2" to "G4", "newer", or "" for a library without plan_pa_decode and pa_decode.
    told_by: the signs. planner: "Triton", "FlyDSL", or "" where nothing tells. place: the file, or what brought it.
    newer_names: which of NEWER_NAMES are there. unusable_names: those of them that planlife would call and cannot.
    """

    name: str
    told_by: str
    planner: str
    place: str
    newer_names: tuple[str, ...]
    unusable_names: tuple[str, ...]

    @property
    def has_mandatory_plans(self) -> bool:
        return self.name in (*_BY_PLANNER.values(), _UNTOLD, "G4", "newer")


def imported_generation(library: AiterLibrary | None) -> AiterGeneration | None:
    """Of the aiter that this process has imported, None if it has none. Imports nothing.

    library: what `aiter_library.probe` made of it.
    """
    module = sys.modules.get(DEFINING_MODULE)
    return None if module is None else tell_generation(module, library)


def tell_generation(module: ModuleType, library: AiterLibrary | None) -> AiterGeneration:
    """Of a defining module that was imported, and what planlife can call of it. Raises nothing."""
    plan, decode = (attribute_of(module, name) for name in ("plan_pa_decode", "pa_decode"))
    tuning = tuning_module(module)
    newer_names = tuple(
        name
        for name in NEWER_NAMES
        if function_of(name, module, tuning) or (name == "max_batch_size" and name in parameters_of(plan))
    )
    planner, planner_sign = _planner(module, plan)
    if callable(plan) and callable(decode):
        name, sign = _tell(parameters_of(plan), parameters_of(decode), newer_names, planner)
        signs = [sign, planner_sign if name in _BY_PLANNER.values() else ""]
    else:
        name = ""
        missing = [one for one, found in (("plan_pa_decode", plan), ("pa_decode", decode)) if not callable(found)]
        signs = [f"it has no {', '.join(missing)}"]
    unusable = [one for one, field in _FIELDS.items() if library is not None and getattr(library, field) is None]
    return AiterGeneration(
        name,
        "; ".join(filter(None, signs)),
        planner,
        _place(module),
        newer_names,
        tuple(one for one in newer_names if one in unusable),
    )


def _tell(
    plan: Mapping[str, inspect.Parameter],
    decode: Mapping[str, inspect.Parameter],
    newer_names: tuple[str, ...],
    planner: str,
) -> tuple[str, str]:
    """(name, sign)."""
    work_plan = decode.get("work_plan")
    is_mandatory = (
        work_plan is not None
        and work_plan.kind is inspect.Parameter.KEYWORD_ONLY
        and work_plan.default is inspect.Parameter.empty
        and "max_context_partition_num" not in decode
    )
    if is_mandatory:
        mandatory = "pa_decode cannot be called without work_plan"
        parameters = sorted({*(decode.keys() - _KNOWN_OF_DECODE), *(plan.keys() - _KNOWN_OF_PLAN)})
        more = list(dict.fromkeys([*parameters, *(name for name in newer_names if name != _TELLS_NOTHING)]))
        if more:
            return "newer", f"{mandatory}, and it has {', '.join(more)}"
        if decode["compute_type"].default is None:
            return "G4", f"{mandatory}, and its compute_type is the cache's unless given"
        return _BY_PLANNER.get(planner, _UNTOLD), mandatory
    if "tuned_file" in decode:
        return "G1d", "pa_decode takes tuned_file"
    if "total_context_length" in plan:
        return "G1b", "plan_pa_decode takes total_context_length"
    if "sliding_window" not in plan:
        return "G0", "plan_pa_decode takes no sliding_window"
    if "ps" in decode:
        return "G1a", "pa_decode takes ps"
    if "max_context_partition_num" in decode:
        return "G1c", "pa_decode takes max_context_partition_num, and no ps"
    return "", "its pa_decode takes no mandatory work_plan, and is of no generation that planlife knows"


def _planner(module: ModuleType, plan: object) -> tuple[str, str]:
    """(planner, sign): looked for in the module and in the one that defines plan_pa_decode."""
    name = attribute_of(plan, "__module__")
    defined_in = sys.modules.get(name) if isinstance(name, str) else None
    for kernel, planner in _PLANNERS.items():
        if attribute_of(module, kernel) is not None or attribute_of(defined_in, kernel) is not None:
            return planner, f"{kernel} is its planner's kernel"
    return "", ""


def _place(module: ModuleType) -> str:
    file = attribute_of(module, "__file__")
    if isinstance(file, str) and file:
        return file
    loader = attribute_of(module, "__loader__")
    return f"no file, brought by {type(loader).__module__}" if loader is not None else "no file"
