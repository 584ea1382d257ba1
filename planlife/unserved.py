"""What no backend serves: one table of names, why not, and what to do instead.

A cap that is silently left out gives fluent, wrong text, so each is refused by its name, at the earliest moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, shown

if TYPE_CHECKING:
    from .spec import PlanSpec


@dataclass(frozen=True)
class Unserved:
    """A kind of attention that the decode kernels do not have."""

    feature: str
    why: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.feature} not served: {self.why}. {self.way_out}"


_OWN_KERNEL = "Leave these layers to the engine's own kernel, and give planlife the sites that do without"

SOFT_CAP = Unserved("a logits soft cap is", "no decode kernel bends the logits before the softmax", _OWN_KERNEL)
ALIBI = Unserved("ALiBi is", "no decode kernel adds a bias by distance to the logits", _OWN_KERNEL)
MLA = Unserved(
    "MLA (values of another head_dim than the keys) is",
    "query, output, caches and partials have one head_dim",
    "Leave these layers to the engine's MLA kernel",
)
NON_UNIFORM = Unserved(
    "non-uniform query lengths (or another than the site's) are",
    "all rows of a site have its one query_length, by which each query token finds its causal edge",
    "Pad a row's query tokens in front, where their output is ignored, or make a site and a step per query length",
)
NON_CAUSAL = Unserved(
    "non-causal attention (encoder or cross attention) with query_length > 1 or a window is",
    "a query token sees the keys up to its own place at the end of its row, within the site's window, and there is no "
    "other mask",
    "Give each query token a row of its own over the same pages, in a site with query_length=1 and no window: there a "
    "row sees all its keys. Leave what has a window to the engine's own kernel",
)


@dataclass(frozen=True)
class _Name:
    """One name that engines have for something unserved, and the values of it that ask for nothing (None besides)."""

    asks_for: Unserved
    neutral: str
    is_neutral: Callable[[Any, PlanSpec], bool]


def _never(value: Any, spec: PlanSpec) -> bool:
    return False


def _is_zero(value: Any, spec: PlanSpec) -> bool:
    return isinstance(value, Real) and value == 0  # by its type first: a tensor would be read back


def _sees_all(spec: PlanSpec) -> bool:
    """Whether a query token sees all keys of its row: then causal attention is the same as any other."""
    return spec.query_length == 1 and not spec.sliding_window


_ALL_KEYS = "with query_length=1 and no window also"

#: Attention in which a query token sees all keys, as engines name it (vLLM, SGLang).
_NON_CAUSAL_TYPES = ("encoder", "encoder_only", "encoder_decoder", "decoder_bidirectional")


def _is_served_type(value: Any, spec: PlanSpec) -> bool:
    kind = getattr(value, "value", value)  # engines have strings, or enums of them
    return kind == "decoder" or (kind in _NON_CAUSAL_TYPES and _sees_all(spec))


_NO_OFFSETS = "None (leave it out where all rows have the site's query_length)"

#: What PlanSpec and pa_decode take only to refuse it.
UNSERVED: Mapping[str, _Name] = {
    "logits_soft_cap": _Name(SOFT_CAP, "0 or None", _is_zero),
    "alibi_slopes": _Name(ALIBI, "None", _is_zero),
    "value_head_dim": _Name(
        MLA, "head_dim or None", lambda value, spec: isinstance(value, Real) and value in (0, spec.head_dim)
    ),
    "query_length": _Name(
        NON_UNIFORM,
        "one int, the site's for all its rows",
        lambda value, spec: type(value) is int and value == spec.query_length,
    ),
    "query_start_loc": _Name(NON_UNIFORM, _NO_OFFSETS, _never),
    "cu_seqlens_q": _Name(NON_UNIFORM, _NO_OFFSETS, _never),
    "causal": _Name(
        NON_CAUSAL,
        f"True or None; {_ALL_KEYS} False",
        lambda value, spec: value is True or (value is False and _sees_all(spec)),
    ),
    "attn_type": _Name(
        NON_CAUSAL, f"'decoder' or None; {_ALL_KEYS} {', '.join(map(repr, _NON_CAUSAL_TYPES))}", _is_served_type
    ),
}


def refuse_unserved(given: Mapping[str, Any], spec: PlanSpec) -> None:
    """ConfigError for the first of `given`, whose names are in UNSERVED, that asks a site for what nobody serves."""
    for name, value in given.items():
        known = UNSERVED[name]
        if value is not None and not known.is_neutral(value, spec):
            raise ConfigError(f"{name} must be {known.neutral}, got {shown(value)}: {known.asks_for}.")


def is_several(query_length: object) -> bool:
    """Whether this is a query length per row, and not one that is merely of a wrong type."""
    return isinstance(query_length, (list, tuple)) or bool(getattr(query_length, "shape", ()))
