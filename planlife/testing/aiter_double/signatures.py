"""What aiter's paged decode looks like from outside, generation by generation, and how libraries that are not it look.

Read from public sources of ROCm/aiter; facts only. A generation is told by its signatures, so these are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter, Signature

import torch

_NO_DEFAULT = Parameter.empty
_DECODE_POSITIONAL = (
    "output",
    "query",
    "key_cache",
    "value_cache",
    "context_lengths",
    "block_tables",
    "softmax_scale",
    "query_length",
)

#: Optional newer names, each there or not (`aiter_double(optional=...)`). max_batch_size is a parameter of the planner.
OPTIONAL = (
    "can_use_flydsl_pa_decode",
    "get_cached_budget",
    "max_batch_size",
    "pa_decode_default_workgroup_budget",
    "pa_decode_nhd_max_query_length",
    "prepare_pa_decode_plan",
)


@dataclass(frozen=True)
class Generation:
    """plan_defaults, decode_defaults: the parameters with defaults, in order."""

    plan_defaults: dict[str, object]
    decode_defaults: dict[str, object]
    requires_plan: bool = False
    bf16_caches: str = "none"  # where it takes them: "none", "cdna" (gfx942 and gfx950), "gfx1250"
    planner: str = "triton"  # or "flydsl": what is compiled per what
    caps_by_cu: bool = True  # False: max_partitions is bounded by 256 on every device
    has_window: bool = True


_FIRST_LIMIT = 256
_DECODE = {
    "context_partition_size": 256,
    "compute_type": torch.bfloat16,
    "query_scale": None,
    "key_scale": None,
    "value_scale": None,
    "exp_sums": None,
    "max_logits": None,
    "temporary_output": None,
    "alibi_slopes": None,
    "sinks": None,
    "sliding_window": 0,
}
_EXPLICIT = {"max_context_partition_num": _NO_DEFAULT, **_DECODE}
_INFERRED = {"max_context_partition_num": None, **_DECODE}
_PLANNED = {**_DECODE, "work_plan": _NO_DEFAULT, "max_context_length": None}
#: None: what the cache's dtype says.
_TYPED_BY_CACHE = {**_PLANNED, "compute_type": None}
_PLAN_0: dict[str, object] = {"max_partitions": _FIRST_LIMIT, "workgroup_budget": None, "plan": None}
_PLAN_1A: dict[str, object] = {
    "max_partitions": _FIRST_LIMIT,
    "workgroup_budget": None,
    "sliding_window": 0,
    "query_length": 1,
    "plan": None,
}
_PLAN_1B: dict[str, object] = {
    "max_partitions": None,
    "workgroup_budget": None,
    "sliding_window": 0,
    "total_context_length": None,
    "query_length": 1,
    "plan": None,
}
_PLAN: dict[str, object] = {**_PLAN_1A, "max_partitions": None}

GENERATIONS = {
    "G0": Generation(_PLAN_0, {**_EXPLICIT, "ps": True, "work_plan": None}, caps_by_cu=False, has_window=False),
    "G1a": Generation(_PLAN_1A, {**_EXPLICIT, "ps": True, "work_plan": None}, caps_by_cu=False),
    "G1b": Generation(_PLAN_1B, {**_INFERRED, "ps": True, "work_plan": None}, caps_by_cu=False),
    "G1c": Generation(_PLAN, {**_EXPLICIT, "work_plan": None}),
    "G1d": Generation(_PLAN, {**_INFERRED, "work_plan": None, "tuned_file": None, "max_context_length": None}),
    "G2": Generation(_PLAN, _PLANNED, requires_plan=True, bf16_caches="cdna"),
    "G3": Generation(_PLAN, _PLANNED, requires_plan=True, bf16_caches="cdna", planner="flydsl"),
    "G4": Generation(_PLAN, _TYPED_BY_CACHE, requires_plan=True, bf16_caches="gfx1250", planner="flydsl"),
    # Not announced by anybody: a library that has moved on. Both functions take a parameter nobody knows.
    "newer": Generation(
        {**_PLAN, "task_order": None},
        {**_PLANNED, "task_order": None},
        requires_plan=True,
        bf16_caches="cdna",
        planner="flydsl",
    ),
}

#: Names of aiter.ops.flydsl.pa_decode in libraries that have the module and no plans; None: no such module at all.
STRANGERS: dict[str, tuple[str, ...] | None] = {
    "pypi": None,  # PyPI's aiter: asynchronous iterators
    "fork without plans": (
        "flydsl_pa_decode",
        "flydsl_pa_decode_partials",
        "flydsl_pa_decode_recommended_splits",
        "flydsl_pa_decode_supported",
    ),
    "fork with host plans": ("PADecodePlan", "make_pa_decode_plan", "pa_decode"),
    "static only": ("get_recommended_splits", "pa_decode"),
    "old flydsl": (),  # importing aiter.ops.flydsl raises ImportError
}


def plan_signature(generation: Generation, *, with_max_batch_size: bool) -> Signature:
    """Of plan_pa_decode."""
    defaults = dict(generation.plan_defaults)
    if with_max_batch_size:
        defaults["max_batch_size"] = None
    return _signature(("context_lengths", "num_kv_heads"), defaults, Parameter.KEYWORD_ONLY)


def decode_signature(generation: Generation, *, with_plan: bool = True) -> Signature:
    """Of pa_decode, or of the predicate that is asked with the same arguments (with_plan False: work_plan optional)."""
    defaults = dict(generation.decode_defaults)
    if not with_plan:
        defaults["work_plan"] = None
    kind = Parameter.KEYWORD_ONLY if generation.requires_plan else Parameter.POSITIONAL_OR_KEYWORD
    return _signature(_DECODE_POSITIONAL, defaults, kind)


def _signature(positional: tuple[str, ...], defaults: dict[str, object], kind: object) -> Signature:
    required = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
    others = [Parameter(name, kind, default=default) for name, default in defaults.items()]  # type: ignore[arg-type]
    return Signature([*required, *others])


def prepare_signature(is_in_tuning: bool) -> Signature:
    """Of prepare_pa_decode_plan, in either of its homes."""
    defaults: dict[str, object] = {
        "compute_type": torch.bfloat16,
        "key_scale": None,
        "value_scale": None,
        "sinks": None,
        "sliding_window": 0,
        "max_partitions": None,
        "max_context_length": None,
        **({"tune": False, "config_dir": None} if is_in_tuning else {}),
    }
    return _signature(_DECODE_POSITIONAL[1:], defaults, Parameter.KEYWORD_ONLY)


#: Of get_cached_budget, and of what makes its arguments.
CACHED_BUDGET_SIGNATURE = _signature(("shape", "architecture", "num_cu"), {"storage_key": None}, Parameter.KEYWORD_ONLY)
STORAGE_KEY_SIGNATURE = _signature(("query", "key", "value", "key_scale", "value_scale"), {}, Parameter.KEYWORD_ONLY)
SHAPE_SIGNATURE = _signature(
    ("batch_size", "context_length", "query_length"),
    {
        **dict.fromkeys(("num_query_heads", "num_kv_heads", "head_dim"), _NO_DEFAULT),
        "page_size": 128,
        "dtype": "bfloat16",
        "kv_dtype": "fp8",
        "per_token": True,
        "trans_v": True,
        "window": 0,
    },
    Parameter.KEYWORD_ONLY,
)
_CACHE_SHAPE: dict[str, object] = dict.fromkeys(("kv_dtype", "head_dim", "block_size"), _NO_DEFAULT)
NHD_SIGNATURE = _signature(("device",), {**_CACHE_SHAPE, "query_group_size": _NO_DEFAULT}, Parameter.KEYWORD_ONLY)
BUDGET_SIGNATURE = _signature(
    ("device",),
    {**_CACHE_SHAPE, "query_length": _NO_DEFAULT, "query_group_size": _NO_DEFAULT, "sliding_window": 0},
    Parameter.KEYWORD_ONLY,
)
