"""Which aiter is installed, told by its signatures: when it is asked for, and never because planlife is imported."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from .errors import ConfigError, shown
from .spec import INT32_MAX

#: Names are taken from the module that defines them: the package exports `pa_decode` lazily, under its submodule's
#: name, so that an attribute of the package is sometimes the function and sometimes the module (ROCm/aiter#5949).
DEFINING_MODULE = "aiter.ops.flydsl.pa_decode"
#: Where tuned budgets are found, and in some texts prepare_pa_decode_plan.
TUNING_MODULE = "aiter.ops.flydsl.pa_decode_tuning"
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
_PREPARE_KEYWORDS = (
    "compute_type",
    "key_scale",
    "value_scale",
    "sliding_window",
    "max_partitions",
    "max_context_length",
)
_SHAPE_POSITIONALS = ("batch_size", "context_length", "query_length")
_SHAPE_KEYWORDS = (
    "num_query_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "dtype",
    "per_token",
    "trans_v",
    "window",
)
_NHD_KEYWORDS = ("kv_dtype", "head_dim", "block_size", "query_group_size")

#: Only older ones have these: before ROCm/aiter#5809 a plan was optional.
_BEFORE_PLANS_WERE_MANDATORY = ("max_context_partition_num", "ps", "tuned_file")

#: One with another head_dim for V, which has neither mandatory plans nor this contract.
_OF_TWO_HEAD_DIMS = "value_head_size"

#: What to tell whoever has none, and whoever has one that cannot be used.
WHERE_FROM = "it comes with the ROCm images (PyPI's aiter is another project)"
_UPGRADE = "upgrade aiter to one with ROCm/aiter#5809, together with the engine that calls it"
_INSTEAD = "install one whose plans are mandatory, as ROCm/aiter#5809 has them"
OTHERWISE = "or pass 'triton', 'torch' or 'auto'"


class BudgetCache(NamedTuple):
    """get_cached_budget of `TUNING_MODULE`, and make_shape and storage_key, which make its arguments."""

    get: Callable[..., Any]
    make_shape: Callable[..., Any]
    storage_key: Callable[..., Any]


@dataclass(frozen=True)
class AiterLibrary:
    """aiter's paged decode with work plans, as it is installed.

    plan, decode, plan_type: plan_pa_decode, pa_decode and the class PADecodePlan.
    can_use, workgroup_budget, nhd_max_query_length: can_use_flydsl_pa_decode, pa_decode_default_workgroup_budget and
        pa_decode_nhd_max_query_length; None where this aiter has none that can be asked as planlife would.
    budget_cache, prepare: what knows of tuned budgets, by `TUNING_MODULE`, and prepare_pa_decode_plan; None likewise.

    Raises ConfigError for what cannot be called, and for a plan_type that planlife cannot make plans by.
    """

    plan: Callable[..., Any]
    decode: Callable[..., Any]
    plan_type: type[Any]
    can_use: Callable[..., Any] | None = None
    workgroup_budget: Callable[..., Any] | None = None
    nhd_max_query_length: Callable[..., Any] | None = None
    budget_cache: BudgetCache | None = None
    prepare: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("plan", "decode", "can_use", "workgroup_budget", "nhd_max_query_length", "prepare"):
            function = getattr(self, name)
            if not callable(function) and (function is not None or name in ("plan", "decode")):
                raise ConfigError(f"{name} of an AiterLibrary must be a function of aiter's, got {describe(function)}.")
        if unfit := _unfit_plan_type(self.plan_type, is_ended_early=self.can_use is None):
            raise ConfigError(f"plan_type of an AiterLibrary {unfit}.")

    @property
    def has_text_of_gfx1250(self) -> bool:
        """Whether compute_type is the cache's unless given: of the text that has BF16 caches on gfx1250 alone."""
        compute_type = parameters_of(self.decode).get("compute_type")
        return compute_type is not None and compute_type.default is None

    @property
    def names_of_budgets(self) -> tuple[str, ...]:
        """The functions here that may tell another budget than the default."""
        known = {
            "get_cached_budget": self.budget_cache,
            "prepare_pa_decode_plan": self.prepare,
            "pa_decode_default_workgroup_budget": self.workgroup_budget,
        }
        return tuple(name for name, function in known.items() if function is not None)


def require_library(library: object) -> AiterLibrary:
    """`library` if it is an AiterLibrary, else a ConfigError."""
    if not isinstance(library, AiterLibrary):
        raise ConfigError(
            f"library must be an AiterLibrary, or None for the installed one, got {describe(library)}. "
            "planlife.aiter_library.read makes one of an imported module."
        )
    return library


class Probe(NamedTuple):
    """library: None where aiter cannot be used. reasons: why not, empty if it can."""

    library: AiterLibrary | None
    reasons: tuple[str, ...]


class _Prober:
    """Asks, and keeps what stays true: a library as long as its module is the imported one, and an import that failed.

    Such an import is not tried again for each manager: it takes seconds, and runs code twice that registers things
    once, so that a second attempt fails of the first. Once somebody else has imported it, it is looked at all the same.
    What is told by files, by a module without what is needed, or before an import has ended, is asked anew.
    """

    def __init__(self) -> None:
        self.cache_clear()

    def cache_clear(self) -> None:
        """Forget everything."""
        # Each a pair in one attribute: another thread sees both of it or none.
        self._found: tuple[object, Probe] | None = None
        self._failed: tuple[object, Probe] | None = None

    def __call__(self) -> Probe:
        """What is installed in this process. Imports aiter if it is ROCm's, or waits for who does so already."""
        found, failed = self._found, self._failed
        imported = sys.modules.get(DEFINING_MODULE)
        if imported is None:
            if reason := _blocked() or _told_by_files():
                return Probe(None, (reason,))
            if failed is not None and failed[0] == _what_fails():
                return failed[1]
        elif found is not None and found[0] is imported:
            return found[1]
        try:
            # Not `import a.b.c as m`, which takes an attribute of the package. It waits for another thread's import.
            module = import_module(DEFINING_MODULE)
        except (Exception, SystemExit) as error:  # a library that cannot start may raise anything, or want to exit
            failure = Probe(None, (_why_not_imported(error),))
            what = _what_fails()
            self._failed = None if what is None else (what, failure)
            return failure
        if getattr(attribute_of(module, "__spec__"), "_initializing", False):
            # This thread imports it, further up, or Python broke a deadlock of imports.
            return Probe(None, (f"{DEFINING_MODULE} is still being imported: ask when that is over, {OTHERWISE}",))
        answer = read(module)
        if answer.library is not None:
            self._found = module, answer
        return answer


#: What is installed in this process.
probe = _Prober()


def _what_fails() -> object:
    """The package whose module cannot be imported, or where a package is that cannot; None where nothing tells."""
    package = sys.modules.get("aiter")
    if package is not None:
        return package
    spec = util.find_spec("aiter")
    return None if spec is None else spec.origin


def _blocked() -> str:
    for name in accumulate(DEFINING_MODULE.split("."), "{}.{}".format):
        if sys.modules.get(name, name) is None:
            blocked = f"importing {name} is blocked in this process (sys.modules[{name!r}] is None)"
            return f"{blocked}: take that entry away, {OTHERWISE}"
    return ""


def _told_by_files() -> str:
    """Why what is not imported yet is not ROCm's, or too old: without importing it. "": nothing tells that."""
    package = sys.modules.get("aiter")
    if package is not None:
        return _no_package(_namespace_folders(package))
    try:
        spec = util.find_spec("aiter")
    except Exception as error:  # a finder of somebody's
        return _cannot_start("looked for", error)
    if spec is None:
        return f"'aiter' is not installed: {WHERE_FROM}; {OTHERWISE[3:]}"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if spec.origin is None:
        # Without any files there is nothing to tell it by: an importer of its own brings it.
        return _no_package(folders)
    if not any((folder / "ops").is_dir() for folder in folders):
        return _not_rocms(spec.origin)
    if not any((folder / _PLANNER_FILE).is_file() for folder in folders):
        return f"the aiter here has no {DEFINING_MODULE}, and so no plan_pa_decode: {_UPGRADE}, {OTHERWISE}"
    return ""


def _namespace_folders(package: ModuleType) -> list[Path]:
    """Where Python found folders for an imported package and no file; [] for every other package."""
    if attribute_of(package, "__file__") is not None:
        return []
    return [Path(str(folder)) for folder in attribute_of(package, "__path__") or ()]


def _no_package(folders: Sequence[Path]) -> str:
    """What folders without an __init__.py are; "" without folders, and where they have the planner all the same."""
    if not folders or any((folder / _PLANNER_FILE).is_file() for folder in folders):
        return ""
    inner = next((folder / "aiter" for folder in folders if (folder / "aiter" / "ops").is_dir()), None)
    kind = (
        "which has no __init__.py and is no package"
        if inner is None
        else f"a checkout of ROCm's, whose package is {inner}: install that, or put {inner.parent} on the path"
    )
    return (
        f"the 'aiter' found here is only a folder, {', '.join(map(str, folders))}, {kind}; where another one is "
        f"installed, take the folder's parent off the path (sys.path), which is often the working directory; "
        f"{OTHERWISE}"
    )


def _why_not_imported(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == _ROCMS_PACKAGE:
        return _not_rocms(attribute_of(sys.modules.get("aiter"), "__file__"))
    return _cannot_start("imported", error)


def _cannot_start(what: str, error: BaseException) -> str:
    text = describe(error)
    # As a package of its own: aiter's modules and folders of that name are in most messages.
    repair = "pip install 'planlife[rocm]'" if re.search(r"(?<![./\\\w])flydsl\b", text, re.I) else "repair that"
    return f"{DEFINING_MODULE} cannot be {what} here ({text}): {repair}, {OTHERWISE}"


def _not_rocms(origin: str | None) -> str:
    where = "'aiter' that was imported" if origin is None else f"'aiter' in {origin}"
    return (
        f"the {where} is not ROCm's kernel library: it has no aiter.ops, as PyPI's asyncio package of that name has "
        "none; pip uninstall aiter where it is that one, else take it off the path (sys.path); ROCm's comes with the "
        f"ROCm images; {OTHERWISE}"
    )


def _unfit_plan_type(plan_type: object, *, is_ended_early: bool) -> str:
    """Why planlife can make no plans by it; "" if it can.

    is_ended_early: whether pa_decode itself is asked what it takes, by a subclass whose validate ends the call.
    """
    if not isinstance(plan_type, type):
        return f"must be a class, got {describe(plan_type)}"
    if is_ended_early:
        try:
            type(plan_type.__name__, (plan_type,), {})
        except Exception as error:
            return f"must be a class that can be derived from, and {plan_type.__name__} cannot ({describe(error)})"
    return ""


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
        return Probe(None, (f"the aiter here has no {', '.join(missing)}{kind}; {_UPGRADE}, {OTHERWISE}",))
    plan, decode, plan_type = found

    tuning = tuning_module(module)

    def optional(name: str, positionals: Sequence[str], keywords: Sequence[str]) -> Callable[..., Any] | None:
        function = function_of(name, module, tuning)
        return function if function is None or not _misfits(name, function, positionals, keywords) else None

    can_use = optional("can_use_flydsl_pa_decode", DECODE_POSITIONALS, DECODE_KEYWORDS)
    unfit = _unfit_plan_type(plan_type, is_ended_early=can_use is None)
    reasons = [
        *_misfits("plan_pa_decode", plan, ("context_lengths", "num_kv_heads"), PLAN_KEYWORDS),
        *(_older(decode) or _misfits("pa_decode", decode, DECODE_POSITIONALS, DECODE_KEYWORDS)),
        *([f"the PADecodePlan of the aiter here {unfit}: {_UPGRADE}"] if unfit else []),
        *([] if unfit else _misfits("PADecodePlan", plan_type, (), PLAN_FIELDS)),
    ]
    if reasons:
        return Probe(None, tuple(f"{reason}, {OTHERWISE}" for reason in reasons))

    library = AiterLibrary(
        plan,
        decode,
        plan_type,
        can_use,
        optional("pa_decode_default_workgroup_budget", ("device",), _BUDGET_KEYWORDS),
        optional("pa_decode_nhd_max_query_length", ("device",), _NHD_KEYWORDS),
        _budget_cache(tuning),
        optional("prepare_pa_decode_plan", DECODE_POSITIONALS[1:], _PREPARE_KEYWORDS),
    )
    return Probe(library, ())


def tuning_module(module: ModuleType) -> ModuleType | None:
    """`TUNING_MODULE` of the aiter that this defining module is of; None where it has none that can be imported."""
    if sys.modules.get(DEFINING_MODULE) is not module:
        return None
    try:
        return import_module(TUNING_MODULE)
    except (Exception, SystemExit):  # it needs more of FlyDSL than pa_decode, and nobody needs it
        return None


def function_of(name: str, module: object, tuning: object) -> Callable[..., Any] | None:
    """A function that some texts have in the one module and some in the other."""
    for home in (module, tuning):
        if callable(function := attribute_of(home, name)):
            return cast(Callable[..., Any], function)
    return None


def _budget_cache(tuning: ModuleType | None) -> BudgetCache | None:
    get, make_shape, storage_key = (
        attribute_of(tuning, name) for name in ("get_cached_budget", "make_shape", "storage_key")
    )
    is_there = (
        _takes(get, 3, "storage_key")
        and _takes(storage_key, 5)
        and callable(make_shape)
        and not _misfits("make_shape", make_shape, _SHAPE_POSITIONALS, _SHAPE_KEYWORDS)
    )
    return BudgetCache(get, make_shape, storage_key) if is_there else None


def _takes(function: Any, num_positionals: int, *keywords: str) -> bool:
    try:
        inspect.signature(function).bind(*range(num_positionals), **dict.fromkeys(keywords))
    except Exception:  # no function, or one that cannot be called so
        return False
    return True


def _older(decode: Callable[..., Any]) -> list[str]:
    """Why this pa_decode is of before plans were mandatory, or beside them."""
    parameters = parameters_of(decode)
    found = [name for name in _BEFORE_PLANS_WERE_MANDATORY if name in parameters]
    work_plan = parameters.get("work_plan")
    if found or (work_plan is not None and work_plan.default is not inspect.Parameter.empty):
        if _OF_TWO_HEAD_DIMS in parameters:
            return [
                f"the aiter here is of another contract (its pa_decode takes {_OF_TWO_HEAD_DIMS}, for V of another "
                f"head_dim than the keys, and its plans are not mandatory): {_INSTEAD}"
            ]
        sign = f"takes {', '.join(found)}" if found else "has a default for work_plan"
        return [f"the aiter here is of before work plans were mandatory (its pa_decode {sign}): {_UPGRADE}"]
    return []


def describe(thing: object) -> str:
    """In one line "ValueError: what it says" of an exception, every other thing as `shown` names it. Raises nothing.

    A strange library's answers and exceptions may have no text that can be had.
    """
    is_error = isinstance(thing, BaseException)
    name = type(thing).__name__
    try:
        text = " ".join((str(thing) if is_error else shown(thing)).split())
    except Exception as error:
        return f"{name}, whose text cannot be had ({type(error).__name__})"
    if not is_error:
        return text
    return f"{name}: {text}" if text else name


def architecture_name(gcn_arch_name: object) -> str:
    """ "gfx942" of "gfx942:sramecc+:xnack-", as drivers and torch write it with its features."""
    return str(gcn_arch_name).partition(":")[0]


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
    """What one of the newer functions counts; None where it gives no count in [1, 2**31 - 1].

    They are called as announced, and what is released may answer otherwise, or not for every shape.
    """
    try:
        answer = function(*args, **keywords)
        count = 0 if isinstance(answer, bool) else operator.index(answer)
    except Exception:  # whatever a library raises, nobody is stopped by a number that was only better
        return None
    return count if 1 <= count <= INT32_MAX else None
