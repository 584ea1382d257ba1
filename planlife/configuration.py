"""From what a user passes to what the manager works with: names to objects, one value to one per site."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any, NamedTuple

from . import aiter_library
from .aiter_library import OTHERWISE, describe
from .backends.base import Backend, require_backend
from .device import Device, require_device
from .errors import BackendUnavailableError, ConfigError
from .ladder import CapacityLadder
from .spec import PlanSpec

FallbackFn = Callable[..., Any]

#: Names of backends, in the order in which "auto" prefers them; names of fallbacks.
BACKENDS = ("aiter", "triton", "torch")
FALLBACKS = ("triton", "torch")

#: The oldest that the kernels were run with.
_LEAST_TRITON = (3, 6)
_TRITON_WAY_OUT = (
    "pip install 'planlife[triton]' for a GPU, or pass 'torch'; on a CPU Triton only runs in its interpreter "
    "(TRITON_INTERPRET=1), for tests"
)

#: What sites that share plans have in common: tables and what may be written into them depend on nothing else.
_SHARED_FIELDS = ("num_kv_heads", "max_context_tokens", "sliding_window", "shared_lengths")
#: Numbers that a site takes over from the one whose plans it uses.
_INHERITED_FIELDS = ("max_partitions", "workgroup_budget")


class DeviceMeant(NamedTuple):
    """What an estimate knows of a device that is not here."""

    num_compute_units: int
    name: str = "a device that is not here"


def check_choice(what: str, value: object, known: tuple[str, ...]) -> None:
    """ConfigError unless `value` is one of `known`."""
    if value not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}, got {value!r}.")


def check_sites(
    sites: PlanSpec | Mapping[str, PlanSpec], ladder: CapacityLadder | Mapping[str, CapacityLadder]
) -> tuple[dict[str, PlanSpec], dict[str, CapacityLadder]]:
    """Specs and ladders by site name. Raises ConfigError."""
    specs, ladders = _by_site(sites, ladder)
    for site, spec in specs.items():
        if spec.plan_of is not None:
            _check_sharing(site, spec.plan_of, specs, ladders)
    return specs, ladders


def _by_site(
    sites: PlanSpec | Mapping[str, PlanSpec], ladder: CapacityLadder | Mapping[str, CapacityLadder]
) -> tuple[dict[str, PlanSpec], dict[str, CapacityLadder]]:
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


def _check_sharing(site: str, owner: str, specs: Mapping[str, PlanSpec], ladders: Mapping[str, CapacityLadder]) -> None:
    """ConfigError unless `site` can use the plans of `owner`."""
    if owner == site or owner not in specs:
        others = ", ".join(repr(name) for name in specs if name != site) or "none"
        raise ConfigError(f"plan_of of site {site!r} must name another site (here: {others}), got {owner!r}.")
    spec, target = specs[site], specs[owner]
    if target.plan_of is not None:
        raise ConfigError(
            f"site {site!r} wants the plans of {owner!r}, which uses those of {target.plan_of!r}: name that site."
        )
    found = [(name, getattr(spec, name), getattr(target, name)) for name in _SHARED_FIELDS]
    found += [
        (name, getattr(spec, name), getattr(target, name))
        for name in _INHERITED_FIELDS
        if getattr(spec, name) is not None
    ]
    found.append(("ladder", ladders[site].classes, ladders[owner].classes))
    for name, own, other in found:
        if own != other:
            way_out = "leave it None to take the other's" if name in _INHERITED_FIELDS else "make them the same"
            raise ConfigError(
                f"site {site!r} cannot use the plans of {owner!r}: {name} is {own} here and {other} there; {way_out}, "
                "or drop plan_of."
            )
    if spec.sliding_window:
        raise ConfigError(
            f"site {site!r} cannot use the plans of {owner!r}: sliding_window is {spec.sliding_window}, and a windowed "
            "plan is bound to its window and query_length; drop plan_of."
        )


def settle_specs(
    specs: Mapping[str, PlanSpec], backend: Backend, device: Any, refused: Collection[str] = ()
) -> dict[str, PlanSpec]:
    """The specs that plans are made by: with numbers where max_partitions and workgroup_budget were None.

    device: as for `Backend.default_workgroup_budget`. refused: sites that are never planned, which have no numbers;
    what would share their plans has plans of its own.
    """
    settled = {}
    for site, spec in specs.items():
        plan_of = None if spec.plan_of in refused else spec.plan_of
        owner = spec if plan_of is None else specs[plan_of]
        partitions = budget = None
        if site not in refused:
            partitions, budget = owner.max_partitions, owner.workgroup_budget
            partitions = device.num_compute_units if partitions is None else partitions
            budget = backend.default_workgroup_budget(owner, device) if budget is None else budget
        settled[site] = replace(spec, max_partitions=partitions, workgroup_budget=budget, plan_of=plan_of)
    return settled


def resolve_device(device: Any) -> Device:
    """None, a name or a torch.device by torch; anything else must be a Device itself.

    Raises BackendUnavailableError for a CUDA device, else ConfigError.
    """
    if device is not None and not isinstance(device, str) and type(device).__module__ != "torch":
        return require_device(device)
    # Imported here: the lifecycle itself needs no torch.
    from . import torch_device

    return torch_device.resolve_device(device)


def absence_reasons(name: str) -> Sequence[str]:
    """Why the backend of that name is not here at all, whatever the site; empty = it is. ConfigError for no name."""
    check_choice("backend", name, BACKENDS)
    if name == "torch":
        return ()
    if name == "triton":
        return _triton_absence()
    return aiter_library.probe().reasons


def _triton_absence() -> Sequence[str]:
    wanted = ".".join(map(str, _LEAST_TRITON))
    try:
        import triton
    except Exception as error:  # a library of another build fails with whatever it likes, and is not here either
        return (
            f"'triton' needs the package triton >= {wanted}, which cannot be imported here "
            f"({describe(error)}); {_TRITON_WAY_OUT}",
        )
    version = getattr(triton, "__version__", None)  # a folder of that name can be imported too
    if version is None:
        return (
            f"'triton' needs the package triton >= {wanted}, and what is imported under its name is another thing "
            f"({triton!r}); {_TRITON_WAY_OUT}",
        )
    found = re.match(r"(\d+)\.(\d+)", str(version))
    if found is None or tuple(map(int, found.groups())) < _LEAST_TRITON:
        return (f"'triton' needs the package triton >= {wanted}, and {version} is here; upgrade it",)
    return ()


def backend_reasons(name: str, spec: PlanSpec, device: Device) -> Sequence[str]:
    """Everything against the backend of that name for `spec` on `device`; empty = it can serve it."""
    if absence := absence_reasons(name):
        return absence
    try:
        return _make_backend(name).refuse_spec(spec, device)
    except Exception as error:
        if name != "aiter":
            raise  # by our own code, whose fault is no answer
        # By a library that nobody has seen yet, or by a driver: "auto" goes on.
        return (
            f"aiter cannot be asked about this site on {device.name} ({describe(error)}): repair that, {OTHERWISE}",
        )


def auto_backend(specs: Mapping[str, PlanSpec], device: Device) -> str:
    """What "auto" means: on a CPU torch, else the first of BACKENDS that can serve every site, else torch."""
    if device.name == "cpu":
        return "torch"
    able = (name for name in BACKENDS if not any(backend_reasons(name, spec, device) for spec in specs.values()))
    return next(able, "torch")


def _make_backend(name: str) -> Backend:
    """The backend of a name without absence_reasons."""
    if name == "aiter":
        from .backends.aiter_backend import AiterBackend

        return AiterBackend()
    if name == "triton":
        from .backends.triton_backend import TritonBackend

        return TritonBackend()
    from .backends.torch_backend import TorchBackend

    return TorchBackend()


def resolve_backend(
    backend: str | Backend, specs: Mapping[str, PlanSpec] | None = None, device: Device | None = None
) -> Backend:
    """A Backend, or the one of that name; "auto" for these sites on this device, without a device torch.

    Raises BackendUnavailableError for those that are not here, else ConfigError.
    """
    if not isinstance(backend, str):
        return require_backend(backend)
    check_choice("backend", backend, ("auto", *BACKENDS))
    if backend == "auto":
        backend = "torch" if specs is None or device is None else auto_backend(specs, device)
    if absence := absence_reasons(backend):
        raise BackendUnavailableError("; ".join(absence) + ".")
    return _make_backend(backend)


def fallback_absence_reasons(name: str) -> Sequence[str]:
    """Why the fallback of that name is not here at all, whatever the site; empty = it is. ConfigError for no name."""
    check_choice("fallback", name, FALLBACKS)
    return absence_reasons(name)


def fallback_reasons(name: str, spec: PlanSpec, device: Device) -> Sequence[str]:
    """Everything against the fallback of that name for `spec` on `device`; empty = it can serve it."""
    one_task_each = replace(spec, max_partitions=None)  # a cap is not for what makes one task of each row
    return fallback_absence_reasons(name) or _make_backend(name).refuse_spec(one_task_each, device)


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
    """A callable, or the one of that name, which must be able to take every site (R30) and is compiled for them here.

    Raises ConfigError, BackendUnavailableError for "triton" where it is not here.
    """
    if fallback is None or callable(fallback):
        return fallback
    if fallback not in FALLBACKS:
        raise ConfigError(f"fallback must be None, 'triton', 'torch' or a callable, got {fallback!r}.")
    if absence := fallback_absence_reasons(fallback):
        raise BackendUnavailableError("; ".join(absence) + ".")
    for site, spec in specs.items():
        reasons = fallback_reasons(fallback, spec, device)
        if reasons:
            raise ConfigError(
                f"fallback={fallback!r} cannot serve site {site!r}: {'; '.join(reasons)}. Pass a callable that can, "
                "or None."
            )
    from .backends.dense_fallback import DenseFallback

    dense_fallback = DenseFallback(_make_backend(fallback))
    dense_fallback.prepare(specs.values(), device)
    return dense_fallback
