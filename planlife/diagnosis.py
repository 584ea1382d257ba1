"""What the doctor found, as values and as the text that `planlife doctor` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from .aiter_generation import NEWER_NAMES, AiterGeneration


@dataclass(frozen=True)
class Software:
    """version: None = not installed. note: what it is built for, or what to install."""

    name: str
    version: str | None
    note: str = ""


@dataclass(frozen=True)
class Gpu:
    """One visible device; None is what nobody could tell.

    index: as torch counts. physical: as the machine counts, where variables renumber. arch: "sm_90", "gfx942".
    """

    index: int
    physical: str | None
    name: str
    arch: str
    num_compute_units: int
    total_bytes: int
    free_bytes: int | None
    pci_address: str | None
    numa_node: int | None


@dataclass(frozen=True)
class Verdict:
    """What one backend, or one named fallback, says of a site.

    reasons: everything against; empty = it can serve the site. conditions: what holds for calls where it does.
    """

    name: str
    reasons: tuple[str, ...]
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteAnswer:
    """worst_case_bytes, min_budget_bytes: of this site alone with the chosen backend; None if that is not here."""

    site: str
    backends: tuple[Verdict, ...]
    fallbacks: tuple[Verdict, ...]
    worst_case_bytes: int | None
    min_budget_bytes: int | None


@dataclass(frozen=True)
class Choice:
    """What PlanManager(backend=asked) does with these sites on this device.

    takes: the backend whose plans it makes; None where it is not made, and `error` is raised. falls_back: sites that
    the fallback decodes.
    """

    asked: str
    takes: str | None
    error: str
    falls_back: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found; str() is the report.

    aiter: what the imported one looks like, None where none can be imported.

    platform: what torch is built for: "cuda", "rocm", "cpu", or "unknown" where there is no torch to ask.
    device: the one that the sites were asked about, None if it is refused. backend: the chosen one, which "auto" is
    resolved to. choices: what "auto" and each backend by name would come to. worst_case_bytes, min_budget_bytes: of all
    sites that the chosen one serves together.
    numa_nodes: of the machine. cpu_nodes: of the CPUs that this process may run on.
    notes: what is worth knowing. wrong: what is wrong with the machine or its settings. refused: what was asked for
    and cannot work.
    """

    software: tuple[Software, ...]
    aiter: AiterGeneration | None
    platform: str
    driver: str | None
    gpus: tuple[Gpu, ...]
    numa_nodes: tuple[int, ...]
    cpu_nodes: tuple[int, ...]
    device: str | None
    backend: str | None
    sites: tuple[SiteAnswer, ...]
    choices: tuple[Choice, ...]
    worst_case_bytes: int | None
    min_budget_bytes: int | None
    notes: tuple[str, ...]
    wrong: tuple[str, ...]
    refused: tuple[str, ...]

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def exact_bytes(num_bytes: int | None) -> str:
    """ "4,325,376 bytes (4.1 MiB)"."""
    return "?" if num_bytes is None else f"{num_bytes:,} bytes ({human_bytes(num_bytes)})"


def human_bytes(num_bytes: int | None) -> str:
    """ "4.1 MiB"."""
    if num_bytes is None:
        return "?"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _lines(found: Diagnosis) -> Iterator[str]:
    """Not wrapped: a line is a fact, and can be searched for."""
    yield from _software_lines(found)
    yield from _gpu_lines(found)
    if found.aiter is not None:
        yield from _aiter_lines(found.aiter)
    for site in found.sites:
        yield from _site_lines(site, found.backend)
    yield ""
    yield f"device: {found.device or 'refused'}, backend: {found.backend or 'none'}"
    yield from map(_choice_line, found.choices)
    if found.worst_case_bytes is not None:
        yield (
            f"all sites that it serves: worst case {exact_bytes(found.worst_case_bytes)}, "
            f"smallest budget {exact_bytes(found.min_budget_bytes)}"
        )
    for label, lines in (("note", found.notes), ("wrong", found.wrong), ("cannot work", found.refused)):
        yield from (f"{label}: {line}" for line in lines)


def _software_lines(found: Diagnosis) -> Iterator[str]:
    rows = [(one.name, one.version or "missing", one.note) for one in found.software]
    rows.append(("driver", found.driver or "none loaded", ""))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, version, note in rows:
        yield f"{name:<{widths[0]}}  {version:<{widths[1]}}  {note}".rstrip()


def _gpu_lines(found: Diagnosis) -> Iterator[str]:
    for gpu in found.gpus:
        physical = "" if gpu.physical is None else f" (physical {gpu.physical})"
        yield (
            f"GPU {gpu.index}{physical}: {gpu.name}, {gpu.arch}, {gpu.num_compute_units} SMs or CUs, "
            f"{human_bytes(gpu.free_bytes)} of {human_bytes(gpu.total_bytes)} free, PCI {gpu.pci_address or '?'}, "
            f"NUMA node {'?' if gpu.numa_node is None else gpu.numa_node}"
        )
    if not found.gpus:
        yield "GPUs: none visible"
    if len(found.numa_nodes) > 1:
        yield f"NUMA nodes: {len(found.numa_nodes)}; this process may run on {', '.join(map(str, found.cpu_nodes))}"


def _aiter_lines(aiter: AiterGeneration) -> Iterator[str]:
    yield ""
    planner = f", planner in {aiter.planner}" if aiter.planner else ""
    yield f"aiter: generation {aiter.name or 'unknown'}{planner} ({aiter.told_by}); from {aiter.place}"
    if aiter.has_mandatory_plans:
        for name, (with_it, without_it) in NEWER_NAMES.items():
            if name in aiter.unusable_names:
                yield f"  has {name}, which cannot be called as announced: {without_it}"
            elif name in aiter.newer_names:
                yield f"  has {name}: {with_it}"
            else:
                yield f"  lacks {name}: {without_it}"


def _site_lines(site: SiteAnswer, chosen: str | None) -> Iterator[str]:
    yield ""
    yield f"site {site.site}"
    for kind, verdicts in (("backend", site.backends), ("fallback", site.fallbacks)):
        for verdict in verdicts:
            mark = " (chosen)" if kind == "backend" and verdict.name == chosen else ""
            yield f"  {kind} {verdict.name}{mark}: {'cannot serve it' if verdict.reasons else 'can serve it'}"
            yield from (f"    {line}" for line in (*verdict.reasons, *verdict.conditions))
    if site.worst_case_bytes is not None:
        yield (
            f"  alone: worst case {exact_bytes(site.worst_case_bytes)}, "
            f"smallest budget {exact_bytes(site.min_budget_bytes)}"
        )


def _choice_line(choice: Choice) -> str:
    if choice.takes is None:
        return f'backend="{choice.asked}": {choice.error}'
    rest = f"; by the fallback: {', '.join(choice.falls_back)}" if choice.falls_back else ""
    return f'backend="{choice.asked}": takes {choice.takes}{rest}'
