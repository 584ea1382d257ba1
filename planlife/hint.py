"""What a user who has planlife off (`enabled=False`) is told: once per process, and only where plans would help."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from .backends.base import Backend
from .device import Device
from .events import logger
from .ladder import CapacityLadder
from .planner import TILE_TOKENS, spec_capacity
from .spec import PlanSpec

_lock = threading.Lock()
#: What this process was told; a list, so that a test can put an empty one in its place.
_told: list[str] = []


def reasons_against_plans(spec: PlanSpec, ladder: CapacityLadder, backend: Backend, device: Device) -> Sequence[str]:
    """Why plans would not help this site, if they were on; empty = they would.

    A plan helps where the rows of a batch differ in length and long rows can be split: it deals the tasks out by
    length. So it needs a kernel that may serve the site, two rows, and slots to deal. Whether a step has uneven rows,
    and whether calls bring sinks, is not known at construction.
    """
    if backend.name == "torch":
        return ("the torch backend is the reference: a plan makes it no faster",)
    reasons = list(backend.refuse_spec(spec, device))
    if ladder.max_rows == 1:
        reasons.append("one row is never uneven")
    if spec.max_context_tokens <= TILE_TOKENS:
        reasons.append(f"a context of at most {spec.max_context_tokens} tokens is one task, there is nothing to split")
    elif 0 < spec.sliding_window < spec.max_context_tokens:
        reasons.append(f"a window of {spec.sliding_window} keys bounds every row alike")
    elif all(spec_capacity(spec, rows, device.num_compute_units) <= rows for rows in ladder.classes if rows > 1):
        reasons.append("max_partitions or workgroup_budget leave one task to each row")
    return reasons


def tell_once_what_off_costs(
    specs: Mapping[str, PlanSpec], ladders: Mapping[str, CapacityLadder], backend: Backend, device: Device
) -> None:
    """Log one warning per process that plans are off where they would help (R34). Raises nothing."""
    if _told:
        return
    try:
        sites = [site for site in specs if not reasons_against_plans(specs[site], ladders[site], backend, device)]
    except Exception:
        # Off must work where a backend cannot even be asked.
        logger.debug("no hint: backend %s did not answer", backend.name, exc_info=True)
        return
    if not sites:
        return
    text = (
        f"planlife is off (enabled=False), and backend {backend.name} can serve {', '.join(map(repr, sites))} on "
        f"{device.name}: with enabled=True steps whose rows differ in length would be decoded by a work plan. "
        "This is said once per process."
    )
    with _lock:
        if _told:
            return
        _told.append(text)
    logger.warning("%s", text)
