"""From what a user passes to what the manager works with: names to objects, one value to one per site."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

from .backends.base import Backend, require_backend
from .device import Device, require_device
from .errors import BackendUnavailableError, ConfigError
from .ladder import CapacityLadder
from .spec import PlanSpec

FallbackFn = Callable[..., Any]


def check_choice(what: str, value: object, known: tuple[str, ...]) -> None:
    """ConfigError unless `value` is one of `known`."""
    if value not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}, got {value!r}.")


def check_sites(
    sites: PlanSpec | Mapping[str, PlanSpec], ladder: CapacityLadder | Mapping[str, CapacityLadder]
) -> tuple[dict[str, PlanSpec], dict[str, CapacityLadder]]:
    """Specs and ladders by site name. Raises ConfigError."""
    specs = {"default": sites} if isinstance(sites, PlanSpec) else dict(sites) if isinstance(sites, Mapping) else None
    if not specs or not all(type(site) is str and isinstance(spec, PlanSpec) for site, spec in specs.items()):
        raise ConfigError(f"sites must be a PlanSpec, or a non-empty mapping of names to PlanSpecs, got {sites!r}.")
    if isinstance(ladder, CapacityLadder):
        return specs, dict.fromkeys(specs, ladder)
    if not isinstance(ladder, Mapping) or not all(isinstance(one, CapacityLadder) for one in ladder.values()):
        raise ConfigError(f"ladder must be a CapacityLadder, or a mapping of site names to them, got {ladder!r}.")
    if set(ladder) != set(specs):
        raise ConfigError(
            f"ladder must name the same sites as sites: {', '.join(specs)}, got {', '.join(map(repr, ladder))}."
        )
    return specs, dict(ladder)


def resolve_device(device: Any) -> Device:
    """None, a name or a torch.device by torch; anything else must be a Device itself.

    Raises BackendUnavailableError for a CUDA device, else ConfigError.
    """
    if device is not None and not isinstance(device, str) and type(device).__module__ != "torch":
        return require_device(device)
    # Imported here: the lifecycle itself needs no torch.
    from . import torch_device

    return torch_device.resolve_device(device)


def resolve_backend(backend: str | Backend) -> Backend:
    """A Backend, or the one of that name; BackendUnavailableError for those that are not here, else ConfigError."""
    if isinstance(backend, str):
        if backend in ("triton", "aiter"):
            raise BackendUnavailableError(
                f"backend={backend!r} is not part of this release; pass backend='torch' (or 'auto') and device='cpu'."
            )
        check_choice("backend", backend, ("auto", "aiter", "triton", "torch"))
        from .backends.torch_backend import TorchBackend

        return TorchBackend()
    return require_backend(backend)


def takes_lse(fallback: FallbackFn) -> bool:
    """Whether a fallback can be asked for the log-sum-exps. One whose signature cannot be read cannot."""
    try:
        parameters = signature(fallback).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        one.kind is Parameter.VAR_KEYWORD
        or (one.name == "lse" and one.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD))
        for one in parameters
    )


def resolve_fallback(
    fallback: str | FallbackFn | None, specs: Mapping[str, PlanSpec], device: Device
) -> FallbackFn | None:
    """A callable, or the one of that name, which must be able to take every site (R30).

    Raises ConfigError, BackendUnavailableError for "triton".
    """
    if fallback is None or callable(fallback):
        return fallback
    if fallback == "triton":
        raise BackendUnavailableError("fallback='triton' is not part of this release; pass 'torch' or a callable.")
    if fallback != "torch":
        raise ConfigError(f"fallback must be None, 'triton', 'torch' or a callable, got {fallback!r}.")
    from .backends.torch_backend import TorchBackend, dense_fallback

    for site, spec in specs.items():
        reasons = TorchBackend().refuse_spec(replace(spec, max_partitions=None), device)  # it makes one of each row
        if reasons:
            raise ConfigError(
                f"fallback='torch' cannot serve site {site!r}: {'; '.join(reasons)}. Pass a callable that can, or None."
            )
    return dense_fallback
