"""The bytes of a configuration, taken apart: what each class and each lane takes before anything exists (R19)."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass

from .aiter_library import probe
from .backends.base import Backend
from .configuration import DeviceMeant, resolve_backend, settle_specs
from .device import Device
from .planner import default_workgroup_budget
from .sites import Sites
from .sizing import Sizing
from .spec import INT32_MAX, MAX_COMPUTE_UNITS, check_int


@dataclass(frozen=True)
class ClassBytes:
    """One plan of a class: its pair of table sets."""

    site: str
    class_rows: int
    plan_bytes: int


@dataclass(frozen=True)
class LaneBytes:
    """The scratch that all plans of a lane share."""

    lane: str
    sites: tuple[str, ...]
    arena_bytes: int


@dataclass(frozen=True)
class Estimate:
    """classes and lanes are of one ubatch: worst_case_bytes is ubatches times their sum.

    notes: where a manager on the device may take other bytes, and why.
    """

    backend: str
    num_compute_units: int
    ubatches: int
    worst_case_bytes: int
    min_budget_bytes: int
    classes: tuple[ClassBytes, ...]
    lanes: tuple[LaneBytes, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)


def estimate(
    sites: Sites,
    *,
    ubatches: int = 1,
    backend: str | Backend = "torch",
    num_compute_units: int = 256,
    device: Device | None = None,
    refused: Collection[str] = (),
) -> Estimate:
    """PlanManager.estimate_bytes of these sites with its parts.

    num_compute_units: of the device meant: a GPU's SM or CU count, 256 for the CPU device. device: instead of that,
    where there is one to ask: then these are a manager's bytes there. Without it they are too, unless `notes` says
    otherwise: an aiter may know a better workgroup_budget for a site that names none, and tell it of a device only.
    refused: sites that the backend does not serve there, so that they take no bytes.

    Raises ConfigError, BackendUnavailableError. Capture: n/a. Syncs: no. Allocates: no.
    """
    check_int("ubatches", ubatches, at_least=1, at_most=INT32_MAX)
    check_int("num_compute_units", num_compute_units, at_least=1, at_most=MAX_COMPUTE_UNITS)
    one = resolve_backend(backend)
    if device is not None:
        num_compute_units = device.num_compute_units
    specs = settle_specs(sites.specs, one, device or DeviceMeant(num_compute_units), refused)
    sizing = Sizing(specs, sites.ladders, one, ubatches, num_compute_units, refused)
    served = [site for site in specs if site not in refused]
    return Estimate(
        one.name,
        num_compute_units,
        ubatches,
        sizing.worst_case_bytes(),
        sizing.min_budget_bytes(),
        tuple(
            ClassBytes(site, class_rows, sizing.plan_bytes(site, class_rows))
            for site in served
            if specs[site].plan_of is None  # the others use the plans of one of these
            for class_rows in sites.ladders[site].classes
        ),
        tuple(
            LaneBytes(lane, tuple(site for site in served if specs[site].lane == lane), sizing.arena_bytes(lane))
            for lane in sizing.lanes()
        ),
        () if device is not None else _notes(sites, one, num_compute_units),
    )


def _notes(sites: Sites, backend: Backend, num_compute_units: int) -> tuple[str, ...]:
    library = probe().library if backend.name == "aiter" else None
    if library is None or not library.names_of_budgets:
        return ()
    specs = sites.specs
    unnamed = [site for site, spec in specs.items() if specs[spec.plan_of or site].workgroup_budget is None]
    if not unnamed:
        return ()
    return (
        f"{', '.join(unnamed)}: counted with workgroup_budget={default_workgroup_budget(num_compute_units)}, 2 x "
        f"compute units. This aiter has {', '.join(library.names_of_budgets)}, which a manager asks by its device and "
        "an estimate cannot, so that it may take more or fewer bytes there, as `planlife doctor` says on that machine. "
        "A site that names its workgroup_budget takes what is estimated.",
    )
