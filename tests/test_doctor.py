"""What the doctor finds on machines that are not this one: MI300X, H200, CPU only, and broken in every probe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import planlife
from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, aiter_library, configuration
from planlife.configuration import BACKENDS, backend_reasons
from planlife.doctor import Diagnosis, Machine, diagnose
from planlife.errors import BackendUnavailableError
from planlife.estimate import estimate
from planlife.sites import DEFAULT_SITES, Sites
from planlife.testing import FakeBackend, FakeDevice
from planlife.torch_device import CpuDevice

GIB = 1 << 30
REQUIREMENTS = (
    "torch>=2.4",
    "cachetools>=5.3",
    'triton>=3.0; extra == "triton"',
    'flydsl>=0.2.4; extra == "rocm"',
    'prometheus-client>=0.20; extra == "metrics"',
    'planlife[cli]; extra == "test"',
    'ruff>=0.6; extra == "dev"',
)
CPU_VERSIONS = {"torch": "2.13.0+cpu", "triton": "3.9.0", "cachetools": "5.5.0", "prometheus-client": "0.21"}


class Torch:
    """As much of torch as the doctor asks: properties by index, and what is free of each."""

    def __init__(self, *gpus: SimpleNamespace, cuda: str | None = None, hip: str | None = None) -> None:
        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=cuda, hip=hip)
        self.cuda = SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_device_properties=lambda index: gpus[index],
            mem_get_info=lambda index: (gpus[index].free, gpus[index].total_memory),
        )


def h200(bus: int = 0x1B) -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=140 * GIB,
        free=139 * GIB,
        pci_domain_id=0,
        pci_bus_id=bus,
        pci_device_id=0,
    )


def mi300x(bus: int = 5) -> SimpleNamespace:
    return SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        multi_processor_count=304,
        total_memory=192 * GIB,
        free=190 * GIB,
        pci_domain_id=0,
        pci_bus_id=bus,
        pci_device_id=0,
    )


def machine(
    torch: Any = None,
    *,
    environ: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
    has_aiter: bool = False,
    device: Any = None,
    cpus: range = range(8),
) -> Machine:
    """A machine without surprises: CPU only unless told."""

    def version(name: str) -> str:
        known = CPU_VERSIONS if versions is None else versions
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    def read_text(path: str) -> str:
        if path not in (files or {}):
            raise FileNotFoundError(2, "No such file or directory", path)
        return (files or {})[path]

    return Machine(
        environ=environ or {},
        version=version,
        requirements=lambda: REQUIREMENTS,
        has_module=lambda name: has_aiter and name == "aiter",
        import_torch=lambda: torch or Torch(),
        read_text=read_text,
        allowed_cpus=lambda: set(cpus),
        resolve_device=lambda wish: device or CpuDevice(),
    )


def examine(one: Machine, sites: Sites = DEFAULT_SITES, **arguments: Any) -> Diagnosis:
    found = diagnose(sites, machine=one, **arguments)
    assert json.loads(found.to_json()).keys() == {field.name for field in fields(Diagnosis)}
    return found


def software(found: Diagnosis) -> dict[str, tuple[str | None, str]]:
    return {one.name: (one.version, one.note) for one in found.software}


def verdicts(found: Diagnosis, site: str = "default") -> dict[str, tuple[str, ...]]:
    (answer,) = (one for one in found.sites if one.site == site)
    return {verdict.name: verdict.reasons for verdict in answer.backends}


def numa(*nodes_of_gpus: int, buses: tuple[int, ...] = (5, 6, 7, 8)) -> dict[str, str]:
    """/sys of a machine with two nodes of four CPUs; -1 is what the kernel writes where the firmware does not tell."""
    return {
        "/sys/devices/system/node/online": "0-1\n",
        "/sys/devices/system/node/node0/cpulist": "0-3\n",
        "/sys/devices/system/node/node1/cpulist": "4,5-7\n",
        **{
            f"/sys/bus/pci/devices/0000:{bus:02x}:00.0/numa_node": f"{node}\n"
            for bus, node in zip(buses, nodes_of_gpus, strict=False)
        },
    }


TOO_MANY = PlanSpec(8, 1, 128, 16, max_context_tokens=4096, max_partitions=512)
PACKED = PlanSpec(8, 1, 36, 12, max_context_tokens=4096, max_partitions=512, kv_layout="packed")


def sites(**specs: PlanSpec) -> Sites:
    return Sites(specs, dict.fromkeys(specs, CapacityLadder([1, 4])))


def test_a_cpu_only_machine_is_well_and_torch_serves_it() -> None:
    found = examine(machine())
    assert (found.platform, found.gpus, found.driver, found.device, found.backend) == ("cpu", (), None, "cpu", "torch")
    assert (found.wrong, found.refused, found.notes) == ((), (), ())
    assert software(found)["planlife"] == (planlife.__version__, "")
    assert software(found)["torch"] == ("2.13.0", "CPU build")
    assert software(found)["aiter"] == (None, "for AMD GPUs only")
    assert verdicts(found)["torch"] == ()


def test_an_mi300x_is_told_by_arch_units_memory_driver_and_node() -> None:
    files = {**numa(0, 1), "/sys/module/amdgpu/version": "6.10.5\n"}
    found = examine(
        machine(
            Torch(mi300x(5), mi300x(6), hip="6.4.43482"),
            environ={"ROCR_VISIBLE_DEVICES": "2,5"},
            files=files,
            device=FakeDevice("cuda:0", 304),
        )
    )
    assert (found.platform, found.driver, found.numa_nodes, found.cpu_nodes) == (
        "rocm",
        "amdgpu 6.10.5",
        (0, 1),
        (0, 1),
    )
    first, second = found.gpus
    assert (first.index, first.physical, first.arch, first.num_compute_units) == (0, "2", "gfx942", 304)
    assert (first.total_bytes, first.free_bytes) == (192 * GIB, 190 * GIB)
    assert (first.pci_address, first.numa_node) == ("0000:05:00.0", 0)
    assert (second.index, second.physical, second.numa_node) == (1, "5", 1)
    assert software(found)["torch"] == ("2.13.0", "built for ROCm 6.4.43482")
    assert found.wrong == ()


def test_an_h200_whose_device_is_refused_is_seen_and_refused_with_all_reasons() -> None:
    """C65: the absence of a backend and the refusal of the device are told together."""

    def refuse(wish: Any) -> Any:
        raise BackendUnavailableError("libcudart.so cannot be loaded. Put it on the loader's path.")

    driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"
    seen = machine(Torch(h200(), cuda="12.8"), files={"/proc/driver/nvidia/version": driver, **numa()})
    found = examine(replace(seen, resolve_device=refuse))
    (gpu,) = found.gpus
    assert (gpu.name, gpu.arch, gpu.num_compute_units, gpu.physical) == ("NVIDIA H200", "sm_90", 132, None)
    assert found.driver == "NVIDIA 570.124.06"
    assert (found.device, found.backend) == (None, None)
    assert found.refused == ("libcudart.so cannot be loaded. Put it on the loader's path.",)
    absent, refused = verdicts(found)["aiter"]
    assert "is not installed" in absent and "cannot be loaded" in refused
    assert "device" not in absent  # the way out of a missing backend is another one, on the GPU too
    (answer,) = found.sites
    assert [len(fallback.reasons) for fallback in answer.fallbacks] == [1, 1]
    assert verdicts(found)["torch"] == ("libcudart.so cannot be loaded. Put it on the loader's path",)
    assert examine(seen, device="cpu").refused == ()  # positive control: the way out


def test_both_variables_of_rocm_cut_twice_is_wrong_and_one_is_not() -> None:
    """R46."""
    gpus = [mi300x(bus) for bus in (5, 6)]
    both = {"ROCR_VISIBLE_DEVICES": "0,1,4,5", "HIP_VISIBLE_DEVICES": "0,1,4,5"}
    found = examine(machine(Torch(*gpus, hip="6.4"), environ=both, files=numa(0, 1)))
    (line,) = found.wrong
    assert "2 of its 4 are left" in line
    assert [gpu.physical for gpu in found.gpus] == ["0", "1"]
    alone = {"ROCR_VISIBLE_DEVICES": "0,1"}
    assert examine(machine(Torch(*gpus, hip="6.4"), environ=alone, files=numa(0, 1))).wrong == ()


def test_variables_that_name_more_devices_than_torch_sees_are_told() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,7"}
    found = examine(machine(Torch(h200(5), cuda="12.8"), environ=environ, files=numa(0)))
    assert "the variables name 2 devices and torch sees 1" in found.wrong[0]
    assert found.gpus[0].physical is None  # which of the two it is, nobody said
    fits = examine(machine(Torch(h200(5), h200(6), cuda="12.8"), environ=environ, files=numa(0, 0)))
    assert fits.wrong == () and [gpu.physical for gpu in fits.gpus] == ["0", "7"]


def test_gpus_without_a_numa_node_are_told_on_a_machine_with_several() -> None:
    gpus = [mi300x(bus) for bus in (5, 6, 7)]
    found = examine(machine(Torch(*gpus, hip="6.4"), files=numa(0, -1, -1)))
    (line,) = found.wrong
    assert "2 NUMA nodes" in line and "GPU 1, 2:" in line
    assert [gpu.numa_node for gpu in found.gpus] == [0, None, None]
    assert examine(machine(Torch(*gpus, hip="6.4"), files=numa(0, 1, 1))).wrong == ()
    one_node = {**numa(-1, -1, -1), "/sys/devices/system/node/online": "0\n"}
    assert examine(machine(Torch(*gpus, hip="6.4"), files=one_node)).wrong == ()


def test_a_process_bound_to_another_node_than_its_gpus_is_told() -> None:
    gpus = [mi300x(bus) for bus in (5, 6)]
    found = examine(machine(Torch(*gpus, hip="6.4"), files=numa(0, 1), cpus=range(4)))
    (line,) = found.wrong
    assert "bound to the CPUs of NUMA node 0" in line and "GPU 1 is on node 1" in line and "GPU 0" not in line
    assert found.cpu_nodes == (0,)
    for cpus, nodes in ((range(8), (0, 1)), (range(4), (0, 0))):  # positive controls: not bound; bound to theirs
        assert examine(machine(Torch(*gpus, hip="6.4"), files=numa(*nodes), cpus=cpus)).wrong == ()
    nowhere = examine(machine(Torch(*gpus, hip="6.4"), files=numa(0, 1), cpus=range(90, 91)))
    assert nowhere.wrong == ()  # CPUs of no node that /sys lists: bound to which, nothing tells


def test_a_cpu_build_beside_a_driver_is_wrong() -> None:
    files = {"/sys/module/amdgpu/version": "6.10.5"}
    assert "CPU build, and the machine has the driver amdgpu 6.10.5" in examine(machine(files=files)).wrong[0]
    assert examine(machine(Torch(mi300x(), hip="6.4"), files=files)).wrong == ()


def test_a_gpu_build_that_sees_no_gpu_is_wrong_only_where_a_driver_is_loaded() -> None:
    files = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n"}
    found = examine(machine(Torch(cuda="12.8"), files=files))
    assert "sees none, although the driver NVIDIA 550.54.15 is loaded" in found.wrong[0]
    assert examine(machine(Torch(cuda="12.8"))).wrong == ()
    hidden = examine(machine(Torch(cuda="12.8"), files=files, environ={"CUDA_VISIBLE_DEVICES": ""}))
    assert len(hidden.wrong) == 1 and "leaves no device" in hidden.wrong[0]


def an_aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, planner: str | None = None, has_ops: bool) -> None:
    """Put an `aiter` on the path, and let the process ask anew; importing its front is told."""
    folder = tmp_path / "aiter"
    (folder / "ops" / "flydsl").mkdir(parents=True) if has_ops else folder.mkdir()
    (folder / "__init__.py").write_text("" if planner is not None else "raise SystemExit('imported')")
    if planner is not None:
        for inner in ("ops", "ops/flydsl"):
            (folder / inner / "__init__.py").write_text("")
        (folder / "ops" / "flydsl" / "pa_decode.py").write_text(planner)
    monkeypatch.syspath_prepend(str(tmp_path))
    aiter_library.probe.cache_clear()


@pytest.fixture
def no_aiter_stays() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.mark.usefixtures("no_aiter_stays")
def test_pypis_aiter_is_told_from_rocms_without_importing_either(tmp_path: Path, monkeypatch: Any) -> None:
    an_aiter(tmp_path, monkeypatch, has_ops=False)
    versions = {**CPU_VERSIONS, "aiter": "0.13.20240203"}
    one = machine(Torch(mi300x(), hip="6.4"), versions=versions, has_aiter=True)
    found = examine(one)
    version, note = software(found)["aiter"]
    assert version == "0.13.20240203" and "it has no aiter.ops, as PyPI's asyncio package" in note
    assert found.aiter is None
    (line,) = found.wrong
    assert "pip uninstall aiter" in line and str(tmp_path) in line
    elsewhere = examine(machine(versions=versions, has_aiter=True))  # there nobody misses ROCm's
    assert software(elsewhere)["aiter"] == software(found)["aiter"] and elsewhere.wrong == ()


@pytest.mark.usefixtures("no_aiter_stays")
@pytest.mark.parametrize(
    ("planner", "generation", "said"),
    [
        ("def flydsl_pa_decode(): ...\n", "unknown", "has no plan_pa_decode, pa_decode, PADecodePlan"),
        ("def plan_pa_decode(lengths): ...\ndef pa_decode(work_plan): ...\n", "G0", "has no PADecodePlan"),
        ("raise OSError('no device')", None, "cannot be imported here (OSError: no device)"),
        (None, None, "has no aiter.ops.flydsl.pa_decode, and so no plan_pa_decode"),
    ],
)
def test_an_aiter_that_does_not_plan_is_told_by_what_it_lacks_and_wrong_only_on_rocm(
    planner: str | None, generation: str | None, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """R32: by the name of the missing function, in the row and in the verdict alike."""
    an_aiter(tmp_path, monkeypatch, planner=planner, has_ops=True)
    versions = {**CPU_VERSIONS, "amd-aiter": "0.1.5"}
    found = examine(machine(versions=versions, has_aiter=True))
    version, note = software(found)["aiter"]
    assert version == "0.1.5" and said in note and found.wrong == ()
    assert f"planlife cannot use it: {'; '.join(verdicts(found)['aiter'])}" in note
    assert (f"generation {generation}" in note) == (generation is not None) == (found.aiter is not None)
    on_rocm = examine(machine(Torch(mi300x(), hip="6.4"), versions=versions, has_aiter=True))
    assert [said in line for line in on_rocm.wrong] == [True]


def test_a_missing_extra_comes_with_the_line_that_installs_it_where_it_has_a_use() -> None:
    """R31: a remedy that is none on the platform at hand is not told."""
    none = {"cachetools": "5.5.0"}
    cpu = software(examine(machine(versions=none)))
    assert cpu["prometheus-client"] == (None, "pip install 'planlife[metrics]'")
    assert cpu["triton"] == (None, "") and "pip" not in cpu["flydsl"][1]
    rocm = software(examine(machine(Torch(mi300x(), hip="6.4"), versions=none)))
    assert rocm["flydsl"] == (None, "pip install 'planlife[rocm]'")
    assert rocm["triton"] == (None, "") and "ROCm images" in rocm["aiter"][1]
    cuda = software(examine(machine(Torch(h200(), cuda="12.8"), versions=none)))
    assert cuda["triton"] == (None, "pip install 'planlife[triton]'") and "pip" not in cuda["flydsl"][1]
    assert "ruff" not in cpu and "planlife[cli]" not in cpu
    there = software(examine(machine(Torch(h200(), cuda="12.8"))))  # positive control
    assert there["triton"] == ("3.9.0", "") and there["prometheus-client"] == ("0.21", "")


def test_torch_for_rocm_brings_its_triton_under_another_name() -> None:
    found = examine(machine(Torch(mi300x(), hip="6.4"), versions={"pytorch-triton-rocm": "3.3.1", "cachetools": "6.0"}))
    assert software(found)["triton"] == ("3.3.1", "")


def test_an_old_library_is_wrong_and_the_least_version_is_not() -> None:
    old = examine(
        machine(Torch(h200(), cuda="12.8"), versions={**CPU_VERSIONS, "triton": "2.3.1", "cachetools": "5.2"})
    )
    assert "triton 2.3.1 is older than 3.0: pip install 'planlife[triton]'" in old.wrong
    assert "cachetools 5.2 is older than 5.3: pip install 'cachetools>=5.3'" in old.wrong
    least = {**CPU_VERSIONS, "triton": "3.0.0", "cachetools": "5.3"}
    assert examine(machine(Torch(h200(), cuda="12.8"), versions=least)).wrong == ()


def test_a_torch_that_does_not_load_has_its_version_and_an_old_one_is_not_replaced_by_pips_build() -> None:
    def fail() -> Any:
        raise ImportError("libamdhip64.so: cannot open shared object file")

    broken = examine(replace(machine(versions={**CPU_VERSIONS, "torch": "2.3.0"}), import_torch=fail))
    assert software(broken)["torch"] == ("2.3.0", "") and broken.platform == "unknown"
    assert any("libamdhip64.so" in line for line in broken.wrong)
    assert "torch 2.3.0 is older than 2.4: install a torch >= 2.4 built for this machine" in broken.wrong
    assert not any("older" in line for line in examine(replace(machine(), import_torch=fail)).wrong)  # control


def test_a_planlife_that_is_only_on_the_path_is_a_note() -> None:
    def not_installed() -> Any:
        raise PackageNotFoundError("planlife")

    found = examine(replace(machine(), requirements=not_installed))
    assert "only on the path" in found.notes[0] and found.wrong == ()


@pytest.mark.parametrize(
    "probe", ["version", "requirements", "has_module", "import_torch", "read_text", "allowed_cpus", "resolve_device"]
)
def test_a_probe_that_raises_becomes_a_line(probe: str) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError(f"{probe} is\nbroken")

    one = machine(Torch(h200(5), cuda="12.8"), files=numa(0))
    assert examine(one).wrong == ()  # positive control
    found = examine(replace(one, **{probe: fail}))
    assert any(f"OSError: {probe} is broken" in line for line in (*found.wrong, *found.refused))
    assert all("\n" not in line for line in (*found.wrong, *found.refused))
    assert found.software[0].version == planlife.__version__


@pytest.mark.parametrize("call", ["is_available", "device_count", "get_device_properties", "mem_get_info"])
def test_a_call_of_torch_that_raises_becomes_a_line(call: str) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("CUDA driver version is insufficient")

    torch = Torch(h200(5), cuda="12.8")
    setattr(torch.cuda, call, fail)
    found = examine(machine(torch, files=numa(0)))
    assert any("CUDA driver version is insufficient" in line for line in found.wrong)
    assert bool(found.gpus) == (call == "mem_get_info")


def test_a_torch_without_cuda_or_pci_addresses_costs_only_what_it_would_have_told() -> None:
    torch = Torch(hip="6.4")
    del torch.cuda
    found = examine(machine(torch))
    assert found.backend == "torch" and "no attribute 'cuda'" in found.wrong[0]
    gpu = mi300x()
    del gpu.pci_bus_id
    (seen,) = examine(machine(Torch(gpu, hip="6.4"))).gpus
    assert (seen.arch, seen.pci_address, seen.numa_node) == ("gfx942", None, None)


@pytest.mark.parametrize(
    "path",
    [
        "/sys/devices/system/node/online",
        "/sys/devices/system/node/node1/cpulist",
        "/sys/bus/pci/devices/0000:05:00.0/numa_node",
    ],
)
def test_a_file_of_the_kernel_that_makes_no_sense_is_a_line(path: str) -> None:
    one = Torch(mi300x(5), hip="6.4")
    assert examine(machine(one, files=numa(0))).wrong == ()  # positive control
    found = examine(machine(one, files={**numa(0), path: "zero"}))
    assert any("invalid literal" in line for line in found.wrong)
    assert len(found.gpus) == 1


def test_a_broken_backend_is_a_line_and_the_others_still_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    real = configuration._make_backend
    monkeypatch.setattr(configuration, "_make_backend", lambda name: 1 // 0 if name == "torch" else real(name))
    one = DEFAULT_SITES.specs["default"]
    found = examine(machine(), sites(default=one, other=one))
    assert len([line for line in found.wrong if line.startswith("asking backend torch failed: ZeroDivision")]) == 1
    assert "asking backend torch failed" in verdicts(found)["torch"][0]
    assert "is not installed" in verdicts(found)["aiter"][0]
    assert found.refused != () and found.worst_case_bytes is None


def test_all_reasons_against_a_site_are_told_at_once_and_are_the_managers_own() -> None:
    """C65."""
    found = examine(machine(), sites(packed=PACKED, good=replace(TOO_MANY, max_partitions=None)))
    reasons = verdicts(found, "packed")["torch"]
    assert len(reasons) == 2 and "packed" in reasons[0] and "256 compute units" in reasons[1]
    assert verdicts(found, "good")["torch"] == ()
    with pytest.raises(ConfigError) as caught:
        PlanManager(PACKED, ladder=CapacityLadder([1, 4]), device="cpu")
    assert all(reason in str(caught.value) for reason in reasons)


def test_a_site_that_nobody_serves_is_refused_and_a_fallback_that_can_take_it_is_enough() -> None:
    one = sites(wide=TOO_MANY)
    assert "site wide: backend torch" in examine(machine(), one).refused[0]
    assert examine(machine(), one, fallback="torch").refused == ()
    assert "fallback torch" in examine(machine(), sites(packed=PACKED), fallback="torch").refused[0]


@pytest.mark.parametrize("is_absent", [False, True])
def test_what_each_choice_comes_to_is_what_a_manager_does(is_absent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fallback that cannot take the site, with one that is not here at all, and without one."""
    if is_absent:
        monkeypatch.setattr(configuration, "_triton_absence", lambda: ("no triton",))
    else:
        monkeypatch.setattr(configuration, "_triton_absence", lambda: ())
    cases = [(PACKED, None), (PACKED, "torch"), (TOO_MANY, "torch"), (DEFAULT_SITES.specs["default"], "triton")]
    seen = set()
    for spec, fallback in cases:
        found = examine(machine(), sites(one=spec), fallback=fallback)
        assert [choice.asked for choice in found.choices] == ["auto", *BACKENDS]
        for choice in found.choices:
            options: dict[str, Any] = {"backend": choice.asked, "fallback": fallback, "device": "cpu"}
            try:
                with PlanManager({"one": spec}, ladder=CapacityLadder([1, 4]), **options) as manager:
                    outcome = (manager.report().backend, "")
            except (BackendUnavailableError, ConfigError) as error:
                outcome = (None, type(error).__name__)
            assert (choice.takes, choice.error.partition(":")[0].removeprefix("raises ")) == outcome, choice
            seen.add(outcome[1])
    assert seen == {"", "BackendUnavailableError", "ConfigError"}


@pytest.mark.parametrize("name", ["aiter"])
def test_a_backend_that_has_to_serve_and_cannot_is_refused_whatever_the_fallback(name: str) -> None:
    found = examine(machine(), backend=name, fallback="torch")
    assert name in found.refused[0] and found.worst_case_bytes is None and found.wrong == ()
    assert examine(machine(), backend="torch").refused == ()  # positive control
    with pytest.raises(BackendUnavailableError) as caught:
        PlanManager(DEFAULT_SITES.specs, ladder=DEFAULT_SITES.ladders, device="cpu", backend=name, fallback="torch")
    assert str(caught.value) in {reason + "." for reason in verdicts(found)[name]}


def test_the_bytes_are_the_managers() -> None:
    two = sites(good=replace(TOO_MANY, max_partitions=None), small=replace(TOO_MANY, max_partitions=4, head_dim=64))
    found = examine(
        machine(), Sites({**two.specs, "bad": PACKED}, {**two.ladders, "bad": CapacityLadder([4])}), ubatches=2
    )
    with PlanManager(two.specs, ladder=two.ladders, device="cpu", ubatches=2) as manager:
        assert found.worst_case_bytes == manager.worst_case_bytes()
        assert found.min_budget_bytes == manager.min_budget_bytes()
    for answer in found.sites[:2]:
        alone = {answer.site: two.specs[answer.site]}
        with PlanManager(alone, ladder=CapacityLadder([1, 4]), device="cpu", ubatches=2) as manager:
            assert answer.worst_case_bytes == manager.worst_case_bytes()
            assert answer.min_budget_bytes == manager.min_budget_bytes()


@pytest.mark.parametrize("arguments", [{"backend": "cudnn"}, {"fallback": "aiter"}, {"ubatches": 0}])
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        diagnose(DEFAULT_SITES, machine=machine(), **arguments)


def test_this_machine_is_examined_without_a_probe_that_fails() -> None:
    found = examine(Machine.here(), device="cpu")
    assert [line for line in found.wrong if " failed: " in line] == []
    assert (found.device, found.refused) == ("cpu", ())
    assert software(found)["torch"][0] is not None


class Able:
    """A backend that serves what it was told to."""

    max_plan_rows = None

    def __init__(self, name: str, head_dims: set[int]) -> None:
        self.name, self.head_dims = name, head_dims

    def refuse_spec(self, spec: PlanSpec, device: Any) -> list[str]:
        return [] if spec.head_dim in self.head_dims else [f"{self.name} has no head_dim {spec.head_dim}"]


def test_auto_takes_the_first_backend_that_serves_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    able = {"aiter": {128}, "triton": {128, 64}, "torch": {128, 64, 36}}
    monkeypatch.setattr(configuration, "absence_reasons", lambda name: ())
    monkeypatch.setattr(configuration, "_make_backend", lambda name: Able(name, able[name]))
    gpu = FakeDevice("cuda:0", 304)
    for dims, name in (([128], "aiter"), ([128, 64], "triton"), ([128, 36], "torch"), ([7], "torch")):
        specs = {str(dim): replace(TOO_MANY, head_dim=dim) for dim in dims}
        assert configuration.auto_backend(specs, gpu) == name
        assert configuration.resolve_backend("auto", specs, gpu).name == name
        assert configuration.auto_backend(specs, CpuDevice()) == "torch"  # where triton would be interpreted
    assert [len(backend_reasons(name, replace(TOO_MANY, head_dim=64), gpu)) for name in BACKENDS] == [1, 0, 0]


class Strange(Able):
    """A backend over what raises where it is asked."""

    def refuse_spec(self, spec: PlanSpec, device: Any) -> list[str]:
        raise RuntimeError("HIP error: no device")


def test_auto_goes_on_where_aiter_cannot_be_asked_and_hides_no_fault_of_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends: dict[str, Able] = {"aiter": Strange("aiter", set()), "triton": Able("triton", {128})}
    monkeypatch.setattr(configuration, "absence_reasons", lambda name: ())
    monkeypatch.setattr(configuration, "_make_backend", backends.__getitem__)
    gpu, spec = FakeDevice("cuda:0", 304), replace(TOO_MANY, head_dim=128)
    assert configuration.auto_backend({"default": spec}, gpu) == "triton"
    (reason,) = backend_reasons("aiter", spec, gpu)
    assert reason.startswith("aiter cannot be asked about this site on cuda:0 (RuntimeError: HIP error: no device): ")
    assert "pass 'triton'" in reason
    backends["triton"] = Strange("triton", set())
    with pytest.raises(RuntimeError, match="HIP error"):
        configuration.auto_backend({"default": spec}, gpu)


def test_a_manager_with_auto_gets_the_backend_that_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    able = {name: FakeBackend(spec_reasons=["not this site"] if name == "aiter" else ()) for name in BACKENDS}
    monkeypatch.setattr(configuration, "absence_reasons", lambda name: ())
    monkeypatch.setattr(configuration, "_make_backend", lambda name: able[name])
    with PlanManager(TOO_MANY, ladder=CapacityLadder([4]), device=FakeDevice("cuda:0", 304)):
        pass
    assert [bool(able[name].calls["table_bytes"]) for name in BACKENDS] == [False, True, False]


def test_sites_that_share_plans_are_counted_once_and_each_alone_in_full() -> None:
    target = replace(TOO_MANY, max_partitions=4)
    both = sites(target=target, draft=replace(target, max_partitions=None, query_length=2, plan_of="target"))
    found = examine(machine(), both)
    with PlanManager(both.specs, ladder=both.ladders, device="cpu") as manager:
        assert (found.worst_case_bytes, found.min_budget_bytes) == (
            manager.worst_case_bytes(),
            manager.min_budget_bytes(),
        )
    parts = estimate(both)
    assert {one.site for one in parts.classes} == {"target"}
    assert sum(one.plan_bytes for one in parts.classes) + parts.lanes[0].arena_bytes == found.worst_case_bytes
    alone = sites(draft=replace(target, query_length=2))
    with PlanManager(alone.specs, ladder=alone.ladders, device="cpu") as manager:
        assert found.sites[1].worst_case_bytes == manager.worst_case_bytes()
