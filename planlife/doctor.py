"""What is installed, what is visible, and what each backend says about each site: gathered, not printed.

Every question to the machine goes through `Machine`, and one that raises becomes a line of `Diagnosis.wrong`.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any, TypeVar

from . import __version__, aiter_library
from .aiter_generation import AiterGeneration, imported_generation
from .configuration import (
    BACKENDS,
    FALLBACKS,
    absence_reasons,
    auto_backend,
    backend_reasons,
    check_choice,
    fallback_absence_reasons,
    fallback_reasons,
    resolve_device,
)
from .device import Device
from .diagnosis import Choice, Diagnosis, Gpu, SiteAnswer, Software, Verdict
from .errors import BackendUnavailableError, ConfigError, PlanlifeError
from .estimate import estimate
from .ladder import CapacityLadder
from .route import route_of_site
from .sites import Sites
from .spec import INT32_MAX, PlanSpec, check_int
from .visibility import read_visibility

_Answer = TypeVar("_Answer")

#: Names under which a module's distribution may be installed.
_DISTRIBUTIONS = {"triton": ("triton", "pytorch-triton-rocm", "pytorch-triton"), "aiter": ("amd-aiter", "aiter")}
_DEVELOPERS_EXTRAS = ("test", "dev")
#: Extras that only one platform has a use for; torch for ROCm brings its own Triton.
_EXTRAS_OF_A_PLATFORM = {"triton": "cuda", "rocm": "rocm"}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:>=([\d.]+))?\s*(?:;\s*extra\s*==\s*[\"']([\w-]+)[\"'])?")


@dataclass(frozen=True)
class Machine:
    """What the doctor asks of process and machine. Tests hand in another; any of these may raise.

    version: of a distribution by name, else PackageNotFoundError. requirements: of the installed planlife.
    has_module: whether a top-level module could be imported, without doing it. read_text: of a file in /proc or /sys.
    """

    environ: Mapping[str, str]
    version: Callable[[str], str]
    requirements: Callable[[], Sequence[str]]
    has_module: Callable[[str], bool]
    import_torch: Callable[[], Any]
    read_text: Callable[[str], str]
    allowed_cpus: Callable[[], Set[int]]
    resolve_device: Callable[[Any], Device]

    @classmethod
    def here(cls) -> Machine:
        """This process on this machine."""
        return cls(
            environ=os.environ,
            version=metadata.version,
            requirements=lambda: metadata.requires("planlife") or [],
            has_module=lambda name: util.find_spec(name) is not None,
            import_torch=lambda: import_module("torch"),
            read_text=lambda path: Path(path).read_text(encoding="utf-8", errors="replace"),
            allowed_cpus=lambda: os.sched_getaffinity(0),
            resolve_device=resolve_device,
        )


def diagnose(
    sites: Sites,
    *,
    device: Any = None,
    backend: str = "auto",
    fallback: str | None = None,
    ubatches: int = 1,
    machine: Machine | None = None,
) -> Diagnosis:
    """Ask everything. The arguments are PlanManager's; machine: None = this one.

    Imports torch, and aiter where that is ROCm's. Raises ConfigError for arguments that mean nothing. Capture: no.
    Syncs: no. Allocates: a context on each GPU; where aiter can be used, for a moment the tensors to ask it with.
    """
    check_choice("backend", backend, ("auto", *BACKENDS))
    if fallback is not None:
        check_choice("fallback", fallback, FALLBACKS)
    check_int("ubatches", ubatches, at_least=1, at_most=INT32_MAX)
    return _Examination(machine or Machine.here()).of(sites, device, backend, fallback, ubatches)


class _Examination:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._notes: list[str] = []
        self._wrong: list[str] = []
        self._refused: list[str] = []
        self._generation: AiterGeneration | None = None

    def of(self, sites: Sites, device: Any, backend: str, fallback: str | None, ubatches: int) -> Diagnosis:
        torch = self._ask("importing torch", None, self._machine.import_torch)
        kind = self._ask("what torch is built for", "unknown", _platform, torch)
        software = self._software(torch, kind)
        driver = self._driver()
        gpus = self._gpus(torch, kind, driver)
        numa_nodes, cpu_nodes = self._numa(gpus)
        asked, refusal = self._device(device)
        chosen = self._choose(backend, sites, asked)

        def bytes_of(part: Sites, refused: Collection[str] = ()) -> tuple[int | None, int | None]:
            if chosen is None or asked is None or absence_reasons(chosen):
                return None, None
            try:
                what = estimate(part, ubatches=ubatches, backend=chosen, device=asked, refused=refused)
            except Exception as error:
                self._wrong.append(f"the bytes of backend {chosen} failed: {_one_line(error)}")
                return None, None
            return what.worst_case_bytes, what.min_budget_bytes

        answers = []
        for site, spec in sites.specs.items():
            backends = tuple(
                verdict
                if verdict.reasons
                else replace(verdict, conditions=self._conditions(verdict.name, site, sites, asked))
                for verdict in self._verdicts(
                    "backend", BACKENDS, absence_reasons, backend_reasons, spec, asked, refusal
                )
            )
            fallbacks = self._verdicts(
                "fallback", FALLBACKS, fallback_absence_reasons, fallback_reasons, spec, asked, refusal
            )
            answers.append(SiteAnswer(site, backends, fallbacks, *bytes_of(_alone(sites, site))))
        refused = [one.site for one in answers if chosen is None or _reasons(one.backends, chosen)]
        is_served = len(refused) < len(answers)
        worst_case_bytes, min_budget_bytes = bytes_of(sites, refused) if is_served else (None, None)
        if asked is not None:
            self._refuse_what_cannot_work(answers, backend, chosen, fallback)
        return Diagnosis(
            software,
            self._generation,
            kind,
            driver,
            gpus,
            numa_nodes,
            cpu_nodes,
            asked.name if asked else None,
            chosen,
            tuple(answers),
            () if asked is None else self._choices(answers, self._choose("auto", sites, asked), fallback),
            worst_case_bytes,
            min_budget_bytes,
            tuple(self._notes),
            tuple(dict.fromkeys(self._wrong)),  # a probe that is asked for each site fails for each
            tuple(self._refused),
        )

    def _ask(self, what: str, otherwise: _Answer, probe: Callable[..., _Answer], *arguments: object) -> _Answer:
        """The probe's answer; one that raises becomes a line, and the answer is `otherwise`."""
        try:
            return probe(*arguments)
        except Exception as error:
            self._wrong.append(f"{what} failed: {_one_line(error)}")
            return otherwise

    def _version(self, name: str) -> str | None:
        for distribution in _DISTRIBUTIONS.get(name, (name,)):
            try:
                return self._machine.version(distribution)
            except metadata.PackageNotFoundError:
                continue
        return None

    def _software(self, torch: Any, kind: str) -> tuple[Software, ...]:
        found = {
            "planlife": Software("planlife", __version__),
            "python": Software("python", platform.python_version()),
            "torch": self._ask("the version of torch", None, _torch_software, torch) or self._installed("torch"),
            "aiter": self._ask("looking for aiter", Software("aiter", None), self._aiter, kind),
        }
        for name in ("triton", "flydsl", "cachetools"):
            found[name] = self._installed(name)
        if kind != "rocm" and found["flydsl"].version is None:
            found["flydsl"] = replace(found["flydsl"], note="for AMD GPUs only")
        requirements: Sequence[tuple[str, str, str]] = ()
        requirements = self._ask("reading planlife's requirements", requirements, self._requirements)
        for package, at_least, extra in requirements:
            if package == "planlife" or extra in _DEVELOPERS_EXTRAS:
                continue
            if _EXTRAS_OF_A_PLATFORM.get(extra, kind) != kind:
                continue
            one = found.setdefault(package, self._installed(package))
            if package == "torch":  # pip would take a build for other devices
                way_out = f"install a torch >= {at_least} built for this machine"
            else:
                way_out = f"pip install 'planlife[{extra}]'" if extra else f"pip install '{package}>={at_least}'"
            if one.version is None:
                found[package] = replace(one, note=way_out)
            elif _release(one.version) < _release(at_least):
                self._wrong.append(f"{package} {one.version} is older than {at_least}: {way_out}")
        return tuple(found.values())

    def _installed(self, name: str) -> Software:
        return Software(name, self._ask(f"the version of {name}", None, self._version, name))

    def _requirements(self) -> Sequence[tuple[str, str, str]]:
        """(package, least version, extra) of each requirement."""
        try:
            lines = self._machine.requirements()
        except metadata.PackageNotFoundError:
            self._notes.append("planlife is not installed, only on the path: what its extras need is not known")
            return ()
        matches = (_REQUIREMENT.match(line) for line in lines)
        return [(match[1], match[2] or "", match[3] or "") for match in matches if match]

    def _aiter(self, kind: str) -> Software:
        """By its signatures, where it can be imported, and else by why not: as backend="aiter" would be told."""
        is_there = self._ask("looking for aiter", True, self._machine.has_module, "aiter")
        library, reasons = aiter_library.probe()
        self._generation = imported_generation(library)
        if not is_there and self._generation is None:
            return Software("aiter", None, aiter_library.WHERE_FROM if kind == "rocm" else "for AMD GPUs only")
        if kind == "rocm":  # elsewhere nobody misses it
            self._wrong.extend(f"backend 'aiter' cannot be had: {reason}" for reason in reasons)
        told = [f"ROCm's, generation {self._generation.name or 'unknown'}"] if self._generation else []
        told.append("planlife can use it" if library is not None else f"planlife cannot use it: {'; '.join(reasons)}")
        return Software("aiter", self._version("aiter") or "of unknown version", "; ".join(told))

    def _text(self, path: str) -> str | None:
        """A file in /proc or /sys; None where there is none, which says nothing is wrong."""
        try:
            return self._machine.read_text(path)
        except FileNotFoundError:
            return None

    def _driver(self) -> str | None:
        """The kernel driver's version, of whichever vendor's is loaded."""
        for vendor, path in (("NVIDIA", "/proc/driver/nvidia/version"), ("amdgpu", "/sys/module/amdgpu/version")):
            text = self._ask(f"reading {path}", None, self._text, path)
            if text is None:
                continue
            number = re.search(r"\d+(?:\.\d+)+", text)
            return f"{vendor} {number[0] if number else text.strip()}"
        return None

    def _gpus(self, torch: Any, kind: str, driver: str | None) -> tuple[Gpu, ...]:
        visible = read_visibility(self._machine.environ, kind)
        self._notes.extend(visible.notes)
        self._wrong.extend(visible.wrong)
        if torch is None or kind not in ("cuda", "rocm"):
            if driver and kind == "cpu":
                self._wrong.append(
                    f"this torch is a CPU build, and the machine has the driver {driver}: install a torch for its GPUs"
                )
            return ()
        count = self._ask("counting GPUs", 0, _num_gpus, torch)
        if not count and driver and not visible.wrong:
            self._wrong.append(
                f"torch is built for GPUs and sees none, although the driver {driver} is loaded: compare its version "
                "with what torch is built for, and see whether this process may open the device files"
            )
        if count and visible.physical is not None and len(visible.physical) != count:
            self._wrong.append(
                f"the variables name {len(visible.physical)} devices and torch sees {count}: some are not on this "
                "machine, or not in this container"
            )
        physical = visible.physical if visible.physical is not None and len(visible.physical) == count else None
        found = (self._ask(f"GPU {index}", None, self._gpu, torch, kind, index, physical) for index in range(count))
        return tuple(gpu for gpu in found if gpu is not None)

    def _gpu(self, torch: Any, kind: str, index: int, physical: tuple[str, ...] | None) -> Gpu:
        properties = torch.cuda.get_device_properties(index)
        if kind == "rocm":
            arch = aiter_library.architecture_name(properties.gcnArchName)
        else:
            arch = f"sm_{properties.major}{properties.minor}"
        no_memory: tuple[int | None, int | None] = (None, None)
        free_bytes, _ = self._ask(f"the free memory of GPU {index}", no_memory, torch.cuda.mem_get_info, index)
        address = _pci_address(properties)
        node = self._ask(f"the NUMA node of {address}", None, self._numa_node, address) if address else None
        return Gpu(
            index,
            None if physical is None else physical[index],
            str(properties.name),
            arch,
            int(properties.multi_processor_count),
            int(properties.total_memory),
            free_bytes,
            address,
            node,
        )

    def _numa_node(self, address: str) -> int | None:
        text = self._text(f"/sys/bus/pci/devices/{address}/numa_node")
        node = -1 if text is None else int(text)
        return node if node >= 0 else None  # -1: the firmware does not tell

    def _nodes(self) -> tuple[int, ...]:
        return _ranges(self._text("/sys/devices/system/node/online") or "")

    def _cpus_of(self, node: int) -> Set[int]:
        return set(_ranges(self._text(f"/sys/devices/system/node/node{node}/cpulist") or ""))

    def _numa(self, gpus: Sequence[Gpu]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(nodes of the machine, nodes of the CPUs that this process may use), and what does not fit the GPUs."""
        nodes: tuple[int, ...] = ()
        nodes = self._ask("the NUMA nodes", nodes, self._nodes)
        if not nodes:
            return (), ()  # not Linux, or a kernel without NUMA
        none: Set[int] = frozenset()
        allowed = self._ask("the CPUs of this process", none, self._machine.allowed_cpus)
        cpus = [self._ask(f"the CPUs of NUMA node {node}", none, self._cpus_of, node) for node in nodes]
        ours = tuple(node for node, of_node in zip(nodes, cpus, strict=True) if allowed & of_node)
        if len(nodes) == 1:
            return nodes, ours
        lost = [gpu.index for gpu in gpus if gpu.numa_node is None]
        if lost:
            self._wrong.append(
                f"the machine has {len(nodes)} NUMA nodes, and nothing tells that of GPU {_listed(lost)}: a launcher "
                "that binds ranks by it puts them all on one node. Give it the nodes by hand"
            )
        if ours:
            far = [f"GPU {gpu.index} is on node {gpu.numa_node}" for gpu in gpus if gpu.numa_node not in (None, *ours)]
            if far:
                self._wrong.append(
                    f"this process is bound to the CPUs of NUMA node {_listed(ours)}, and {', '.join(far)}: bind it to "
                    "the node of the GPU that it uses"
                )
        return nodes, ours

    def _device(self, device: Any) -> tuple[Device | None, str]:
        """The device that a manager would get, or why it would get none."""
        try:
            return self._machine.resolve_device(device), ""
        except PlanlifeError as error:
            refusal = _one_line(error, with_type=False)
        except Exception as error:
            refusal = f"device={device!r} failed: {_one_line(error)}"
        self._refused.append(refusal)
        return None, refusal.rstrip(".")

    def _choose(self, backend: str, sites: Sites, device: Device | None) -> str | None:
        if backend != "auto":
            return backend
        if device is None:
            return None
        return self._ask("choosing a backend", None, auto_backend, sites.specs, device)

    def _verdicts(
        self,
        what: str,
        names: Sequence[str],
        absence: Callable[[str], Sequence[str]],
        ask: Callable[[str, PlanSpec, Device], Sequence[str]],
        spec: PlanSpec,
        device: Device | None,
        refusal: str,
    ) -> tuple[Verdict, ...]:
        verdicts = []
        for name in names:
            try:
                reasons = [*absence(name), refusal] if device is None else ask(name, spec, device)
            except Exception as error:
                reasons = [f"asking {what} {name} failed: {_one_line(error)}"]
                self._wrong.extend(reasons)
            verdicts.append(Verdict(name, tuple(reasons)))
        return tuple(verdicts)

    def _conditions(self, name: str, site: str, sites: Sites, device: Device | None) -> tuple[str, ...]:
        """What holds for calls of a site that the backend of that name serves."""
        none: tuple[str, ...] = ()
        if name != "aiter" or device is None:
            return none
        asked = sites.specs[site], sites.ladders[site], device
        return self._ask("the conditions of aiter", none, _aiter_conditions, *asked)

    def _choices(self, answers: Sequence[SiteAnswer], auto: str | None, fallback: str | None) -> tuple[Choice, ...]:
        """In the order in which PlanManager looks: the backend is there, the fallback takes all, each site is taken."""
        choices = []
        for asked in ("auto", *BACKENDS):
            name = auto if asked == "auto" else asked
            if name is None:
                continue  # "choosing a backend failed" is among what is wrong
            refused = tuple(one.site for one in answers if _reasons(one.backends, name))
            lost = [one.site for one in answers if fallback is not None and _reasons(one.fallbacks, fallback)]
            missing = [f"backend {name}"] if self._is_absent(name) else []
            missing += [f"fallback {fallback}"] if fallback is not None and self._is_absent(fallback) else []
            error = ""
            if missing:
                error = f"raises {BackendUnavailableError.__name__}: {missing[0]} cannot be used here"
            elif lost:
                error = f"raises {ConfigError.__name__}: fallback {fallback} cannot serve {', '.join(lost)}"
            elif route_of_site(refused, has_fallback=fallback is not None) == "refused":
                error = f"raises {ConfigError.__name__}: {name} cannot serve {', '.join(refused)}, without a fallback"
            choices.append(Choice(asked, None if error else name, error, () if error else refused))
        return tuple(choices)

    def _is_absent(self, name: str) -> bool:
        return self._ask(f"looking for {name}", True, lambda: bool(absence_reasons(name)))

    def _refuse_what_cannot_work(
        self, answers: Sequence[SiteAnswer], backend: str, chosen: str | None, fallback: str | None
    ) -> None:
        """A named backend and a named fallback must take every site; of "auto" and a fallback one must."""
        for one in answers:
            against = _reasons(one.backends, chosen) if chosen else ("none could be chosen",)
            against_fallback = _reasons(one.fallbacks, fallback) if fallback else ()
            if against_fallback:
                self._refused.append(f"site {one.site}: fallback {fallback}: {'; '.join(against_fallback)}")
            has_fallback = backend == "auto" and fallback is not None
            if route_of_site(against, has_fallback=has_fallback) == "refused":
                self._refused.append(f"site {one.site}: backend {chosen or backend}: {'; '.join(against)}")


def _platform(torch: Any) -> str:
    if torch is None:
        return "unknown"
    return "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"


def _aiter_conditions(spec: PlanSpec, ladder: CapacityLadder, device: Device) -> tuple[str, ...]:
    # Imported here: it needs torch, which may be what is missing.
    from .backends.aiter_limits import conditions

    return conditions(spec, ladder.classes, device.num_compute_units)


def _num_gpus(torch: Any) -> int:
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _torch_software(torch: Any) -> Software | None:
    if torch is None:
        return None
    hip, cuda = torch.version.hip, torch.version.cuda
    built_for = f"built for ROCm {hip}" if hip else f"built for CUDA {cuda}" if cuda else "CPU build"
    return Software("torch", str(torch.__version__), built_for)


def _release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0): enough to compare with a least version."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return tuple(numbers + [0] * (3 - len(numbers)))


def _pci_address(properties: Any) -> str | None:
    """ "0000:1b:00.0", where this torch tells it."""
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _ranges(text: str) -> tuple[int, ...]:
    """ "0-2,5" -> (0, 1, 2, 5), as /sys writes sets."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _one_line(error: Exception, *, with_type: bool = True) -> str:
    return aiter_library.describe(error) if with_type else " ".join(str(error).split())


def _reasons(verdicts: Sequence[Verdict], name: str) -> tuple[str, ...]:
    return next(one.reasons for one in verdicts if one.name == name)


def _alone(sites: Sites, site: str) -> Sites:
    """One site with plans of its own, which have the numbers of those that it would share."""
    spec = sites.specs[site]
    owner = spec if spec.plan_of is None else sites.specs[spec.plan_of]
    own = replace(spec, plan_of=None, max_partitions=owner.max_partitions, workgroup_budget=owner.workgroup_budget)
    return Sites({site: own}, {site: sites.ladders[site]})
