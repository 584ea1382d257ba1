"""Scales in the forms that aiter takes: of the softmax as compiled floats, of FP8 caches as float32 on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch

from ..errors import ConfigError
from ..spec import PlanSpec
from .aiter_plan import AiterPlan

#: Scales that are the same number in float32 are one kernel: the first that was given is passed.
_SAME_FLOAT32 = 1e-7
#: What a kernel can have a scale as: in float32, others are 0 or inf.
SCALES_OF_FLOAT32 = _LEAST_SCALE, _MOST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def own_softmax_scale(spec: PlanSpec) -> float:
    """What a site's kernels are compiled for where nobody names others."""
    return 1 / math.sqrt(spec.head_dim) if spec.softmax_scale is None else spec.softmax_scale


def scales_to_compile(spec: PlanSpec, softmax_scales: Iterable[float]) -> tuple[float, ...]:
    """Of one site. softmax_scales: those that were named for all, which stand for 1/sqrt(head_dim) too."""
    others = tuple(softmax_scales)
    own = () if others and spec.softmax_scale is None else (own_softmax_scale(spec),)
    return tuple(dict.fromkeys((*own, *others)))


def check_softmax_scales(scales: Any) -> tuple[float, ...]:
    """As Python's floats, which aiter's keys of compiled code hold. Raises ConfigError."""
    if not isinstance(scales, Iterable):
        raise ConfigError(f"softmax_scales must be a sequence of numbers, such as [0.0625], got {scales!r}.")
    found = []
    for scale in scales:
        is_number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not (is_number and _LEAST_SCALE <= scale <= _MOST_SCALE):
            raise ConfigError(f"softmax_scales must be numbers on the host, finite and > 0 in float32, got {scale!r}.")
        found.append(float(scale))
    return tuple(dict.fromkeys(found))


def compiled_softmax_scale(softmax_scales: dict[float, float], softmax_scale: float) -> float:
    """The scale that was compiled and is the same number to a kernel. softmax_scales: as of an AiterPlan."""
    for compiled in tuple(softmax_scales.values()):
        if math.isclose(softmax_scale, compiled, rel_tol=_SAME_FLOAT32):
            softmax_scales[softmax_scale] = compiled
            return compiled
    compiled_ones = ", ".join(map(str, dict.fromkeys(softmax_scales.values())))
    raise ConfigError(
        f"softmax_scale is {softmax_scale}, and aiter's kernels have it compiled in: they were compiled for "
        f"{compiled_ones}. Pass PlanSpec(softmax_scale={softmax_scale}) for this site, or, where one site has several, "
        "backend=AiterBackend(softmax_scales=[...]), of planlife.backends.aiter_backend, with all of them."
    )


def check_cache_scales(key_scale: Any, value_scale: Any) -> None:
    """ConfigError for a number that float32 does not have."""
    for what, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if not (scale is None or isinstance(scale, torch.Tensor) or _LEAST_SCALE <= scale <= _MOST_SCALE):
            raise ConfigError(f"{what} is {scale}, and aiter takes float32, in which that is not finite and > 0.")


#: What both are where a call of an FP8 cache gives none, as aiter has it.
_NO_SCALE = 1.0


def cache_scales_on_device(tables: AiterPlan, key_scale: Any, value_scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as tensors. aiter would allocate for a number and copy it from the host, which no recording allows.

    A number is written into the plan's own words by each call, in the order of its launches: layers may differ. What
    the words hold is not remembered: a graph may write them unseen, and who sleeps and wakes a GPU loses them.
    Both None: 1.0.
    """
    if key_scale is None and value_scale is None:
        key_scale = value_scale = _NO_SCALE
    check_cache_scales(key_scale, value_scale)
    is_key_tensor, is_value_tensor = isinstance(key_scale, torch.Tensor), isinstance(value_scale, torch.Tensor)
    if not (is_key_tensor or is_value_tensor) and key_scale == value_scale:
        word = tables.key_word.fill_(float(key_scale))  # one launch is enough
        return word, word
    return (
        key_scale if is_key_tensor else tables.key_word.fill_(float(key_scale)),
        value_scale if is_value_tensor else tables.value_word.fill_(float(value_scale)),
    )
