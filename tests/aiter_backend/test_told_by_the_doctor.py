"""What the doctor says of aiter, per architecture and library: what is there, what is missing, what will happen.

Over the double, on a device without memory, so that a GPU of any name can be asked and constructed for. What it says is
compared with what PlanManager then does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from planlife import BackendUnavailableError, CapacityLadder, ConfigError, PlanManager, PlanSpec, RouteError, Step
from planlife.aiter_generation import NEWER_NAMES, tell_generation
from planlife.aiter_library import probe
from planlife.backends.aiter_backend import AiterBackend
from planlife.backends.aiter_plan import compile_bytes
from planlife.commands import planlife as command
from planlife.diagnosis import Diagnosis
from planlife.doctor import Machine, diagnose
from planlife.estimate import estimate
from planlife.sites import Sites, read_sites
from planlife.testing.aiter_double import GENERATIONS, STRANGERS
from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.fakes import FakeDevice
from planlife.torch_device import CpuDevice
from tests.aiter_backend.recording_aiter import RecordingAiter
from tests.aiter_backend.test_probe import default_plan
from tests.child_process import REPOSITORY
from tests.test_doctor import Torch, examine, h200, machine, mi300x, numa, sites, software, verdicts

NUM_CU = 304
FP8 = {"gfx942": "float8_e4m3fnuz"}
ARCHITECTURES = ("gfx942", "gfx950", "gfx1250", "gfx90a", "")
LIBRARIES = (*GENERATIONS, *STRANGERS)
TAKEN = ("G2", "G3", "G4", "newer")

#: What aiter serves there, by the contract: (architecture, generation) -> sites. Whatever is not here it refuses.
SERVED = {
    **{(arch, generation): {"bf16", "fp8"} for arch in ("gfx942", "gfx950") for generation in ("G2", "G3")},
    ("gfx942", "newer"): {"bf16", "fp8"},
    ("gfx950", "newer"): {"bf16", "fp8", "nhd"},
    **{("gfx1250", generation): {"fp8"} for generation in TAKEN},
    **{(arch, "G4"): {"fp8"} for arch in ("gfx942", "gfx950")},
    ("gfx1250", "G4"): {"bf16", "fp8"},
}
#: What makes aiter unfit for every site on an architecture.
AGAINST_ALL = {
    **{("gfx90a", generation): "are for gfx942, gfx950, gfx1250, and this GPU is gfx90a" for generation in TAKEN},
    **{("", generation): "aiter's kernels are for AMD GPUs, and meta is none" for generation in TAKEN},
}
#: What it says of a site that it could serve elsewhere.
AGAINST_SITE = {"nhd": "reads no kv_layout='nhd'", "bf16": "refuses calls of this site on gfx"}
#: What every library is that planlife does not take, by name.
UNFIT = {
    "G0": "plan_pa_decode of the aiter here does not take sliding_window, query_length",
    "G1a": "of before work plans were mandatory (its pa_decode takes max_context_partition_num, ps)",
    "G1b": "of before work plans were mandatory (its pa_decode takes max_context_partition_num, ps)",
    "G1c": "of before work plans were mandatory (its pa_decode takes max_context_partition_num)",
    "G1d": "of before work plans were mandatory (its pa_decode takes max_context_partition_num, tuned_file)",
    "pypi": "is not ROCm's kernel library: it has no aiter.ops, as PyPI's asyncio package",
    "fork without plans": "has no plan_pa_decode, pa_decode, PADecodePlan: it has flydsl_pa_decode instead",
    "fork with host plans": "has no plan_pa_decode: it has make_pa_decode_plan instead, as a fork does",
    "static only": "has no plan_pa_decode, PADecodePlan, so it is too old for work plans",
    "old flydsl": "flydsl >= 0.2.4 is required): pip install 'planlife[rocm]'",
}


def three_sites(arch: str) -> dict[str, PlanSpec]:
    """packed and NHD caches, FP8 of the architecture's kind."""
    bf16 = PlanSpec(8, 1, 128, 16, max_context_tokens=4096, kv_layout="packed")
    fp8 = replace(bf16, kv_dtype=FP8.get(arch, "float8_e4m3fn"), scales="per_token", query_length=6)
    return {
        "bf16": bf16,
        "fp8": replace(fp8, lane="b"),
        "nhd": replace(fp8, head_dim=256, page_size=64, kv_layout="nhd", scales="per_tensor", query_length=1),
    }


def a_gpu(arch: str) -> Machine:
    """A machine with one GPU of that architecture, "": NVIDIA's."""
    gpu = SimpleNamespace(**{**vars(mi300x(5)), "gcnArchName": arch}) if arch else h200(5)
    versions = {"torch": "2.13.0", "amd-aiter": "0.1.9", "flydsl": "0.2.4", "cachetools": "5.5.0", "triton": "3.9.0"}
    return machine(
        Torch(gpu, **({"hip": "7.0"} if arch else {"cuda": "12.8"})),
        files=numa(0),
        versions=versions,
        has_aiter=True,
        device=FakeDevice("meta", NUM_CU),
    )


@contextmanager
def library_on(arch: str, generation: str, **settings: Any) -> Iterator[Machine]:
    with aiter_machine(arch, device_type="meta", num_cu=NUM_CU, generation=generation, **settings):
        yield a_gpu(arch)


def made(spec: PlanSpec | dict[str, PlanSpec], backend: str, **options: Any) -> str:
    """The backend that a manager takes; its ladder is that of `sites`."""
    options = {"ladder": CapacityLadder([1, 4]), "device": FakeDevice("meta", NUM_CU), **options}
    with PlanManager(spec, backend=backend, **options) as manager:
        return manager.report().backend


def choice(found: Diagnosis, asked: str) -> tuple[str | None, tuple[str, ...], str]:
    (one,) = (one for one in found.choices if one.asked == asked)
    return one.takes, one.falls_back, one.error


every_machine = pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch or "no AMD GPU")
every_library = pytest.mark.parametrize("generation", LIBRARIES)


@every_machine
@every_library
def test_each_site_is_served_or_refused_as_the_contract_has_it_and_the_reasons_are_told(arch, generation):
    """R30-R32, C65."""
    specs = three_sites(arch)
    with library_on(arch, generation) as one:
        found = examine(one, sites(**specs))
    lines = [line.strip() for line in str(found).splitlines()]
    served = {site for site in specs if not verdicts(found, site)["aiter"]}
    assert served == {answer.site for answer in found.sites if answer.backends[0].conditions}
    assert served == SERVED.get((arch, generation), set())
    for site in specs:
        reasons = verdicts(found, site)["aiter"]
        assert set(reasons) <= set(lines)
        wanted = UNFIT.get(generation) or AGAINST_ALL.get((arch, generation)) or AGAINST_SITE.get(site)
        assert site in served or (wanted and wanted in "".join(reasons))
        assert all("pass '" in reason or "use 'packed'" in reason or "make" in reason for reason in reasons)


@every_machine
@every_library
def test_what_is_there_and_what_is_missing_is_one_story_in_row_section_and_verdicts(arch, generation):
    """R32, C44."""
    with library_on(arch, generation) as one:
        found = examine(one, sites(**three_sites(arch)))
        reasons = probe().reasons
    text, (version, note) = str(found), software(found)["aiter"]
    assert version == "0.1.9"
    assert ("planlife can use it" in note) == (generation in TAKEN) == (not reasons)
    assert all(reason in note for reason in reasons)
    unfit = [line for line in found.wrong if line.startswith("backend 'aiter' cannot be had")]
    assert unfit == [f"backend 'aiter' cannot be had: {reason}" for reason in reasons if arch]
    if generation in STRANGERS:
        assert found.aiter is None or found.aiter.name == ""
        assert "  has " not in text and "  lacks " not in text
        return
    assert found.aiter is not None and found.aiter.name == generation
    assert (
        f"aiter: generation {generation}, planner in {'FlyDSL' if generation in ('G3', 'G4', 'newer') else 'Triton'}"
        in text
    )
    assert ("kernel" in found.aiter.told_by) == (generation in ("G2", "G3"))  # the others have a sign of their own
    there = re.findall(r"^  (has|lacks) (\w+): ", text, re.M)
    has = "has" if generation == "newer" else "lacks"
    assert there == [(has, name) for name in NEWER_NAMES if generation in TAKEN]


@every_machine
@every_library
def test_a_manager_does_what_the_doctor_said_it_would(arch, generation):
    """backend="aiter" is made, or raises with the same reasons; "auto" takes the backend that was named."""
    with library_on(arch, generation) as one:
        for site, spec in three_sites(arch).items():
            found = examine(one, sites(**{site: spec}))
            reasons = verdicts(found, site)["aiter"]
            takes, _, error = choice(found, "aiter")
            if reasons:
                expected = ConfigError if generation in TAKEN else BackendUnavailableError
                assert takes is None and error.startswith(f"raises {expected.__name__}: ")
                with pytest.raises(expected) as caught:
                    made(spec, "aiter")
                assert all(reason in str(caught.value) for reason in reasons)
                named = examine(one, sites(**{site: spec}), backend="aiter")
                assert named.refused == (f"site {site}: backend aiter: {'; '.join(reasons)}",)
            else:
                assert (takes, error) == ("aiter", "") and made(spec, "aiter") == "aiter"
            assert choice(found, "auto") == (found.backend, (), "")
            assert made(spec, "auto") == found.backend
            assert (found.backend == "aiter") == (not reasons)
            assert (found.worst_case_bytes is not None) == (found.backend is not None)


@pytest.mark.parametrize("generation", TAKEN)
def test_asking_aiter_plans_decodes_and_compiles_nothing(generation):
    with aiter_machine("gfx942", device_type="meta", num_cu=NUM_CU, generation=generation) as double:
        found = examine(a_gpu("gfx942"), sites(**three_sites("gfx942")))
        assert found.backend is not None and found.aiter is not None  # it was asked
        assert (double.compiles, double.refreshes, double.decodes, double.violations) == (0, 0, 0, [])


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_library_whose_text_has_no_bf16_cache_is_told_although_its_signatures_are_the_same(arch):
    with library_on(arch, "G3", native_bf16=False) as one:
        found = examine(one, sites(**three_sites(arch)))
        (reason,) = verdicts(found, "bf16")["aiter"]
        assert f"this aiter's pa_decode refuses calls of this site on {arch}" in reason
        assert verdicts(found, "fp8")["aiter"] == ()
        with pytest.raises(ConfigError, match=re.escape(reason)):
            made(three_sites(arch)["bf16"], "aiter")
        assert made(three_sites(arch)["fp8"], "aiter") == "aiter"


@every_library
def test_with_a_fallback_what_aiter_refuses_falls_back_as_the_doctor_said(generation):
    """R32: auto goes on, and so does a fallback, where the backend itself is here."""
    specs = three_sites("gfx942")
    with library_on("gfx942", generation) as one:
        found = examine(one, sites(**specs), fallback="torch")
        takes, falls_back, error = choice(found, "aiter")
        if generation not in TAKEN:
            assert takes is None and error == "raises BackendUnavailableError: backend aiter cannot be used here"
            with pytest.raises(BackendUnavailableError):
                made(specs, "aiter", fallback=lambda *call, **options: None)
            return
        refused = tuple(site for site in specs if site not in SERVED["gfx942", generation])
        assert (takes, falls_back, error) == ("aiter", refused, "") and "nhd" in refused
        device = FakeDevice("meta", NUM_CU)
        options = {"device": device, "fallback": lambda *call, **options: None, "backend": "aiter"}
        with PlanManager(specs, ladder=CapacityLadder([1, 4]), **options) as manager:
            refusals = {slot.site: slot.refusal for slot in manager._slots.values()}
        assert tuple(site for site, refusal in refusals.items() if refusal) == falls_back
        assert f'backend="aiter": takes aiter; by the fallback: {", ".join(refused)}' in str(found)
        assert choice(found, "auto")[0] == found.backend == made(specs, "auto", fallback=options["fallback"])


@pytest.mark.parametrize("generation", TAKEN)
def test_the_conditions_of_a_served_site_are_what_calls_then_meet(generation):
    spec = replace(three_sites("gfx942")["bf16"], max_context_tokens=64)
    with aiter_machine("gfx1250" if generation == "G4" else "gfx942", generation=generation):
        one = sites(one=spec)
        found = examine(machine(), one, backend="aiter")
        (answer,) = found.sites
        (aiter,) = (one for one in answer.backends if one.name == "aiter")
        scale, minting, lse = aiter.conditions
        num_bytes = compile_bytes(spec, one.ladders["one"].max_rows, CpuDevice().num_compute_units)
        assert minting.startswith(f"minting takes up to {num_bytes:,} bytes beside the budget while it compiles")
        assert all(one.conditions == () for one in answer.backends if one.name != "aiter")
        assert all(f"    {line}\n" in str(found) for line in aiter.conditions)
        query = torch.randn(1, 8, 128).to(torch.bfloat16)
        cache = torch.zeros(2, 1, 16, 16, 8, dtype=torch.bfloat16)
        call = (torch.empty_like(query), query, cache, cache.view(2, 1, 2, 128, 8), torch.ones(1, 4, dtype=torch.int32))
        with PlanManager(spec, ladder=CapacityLadder([1]), device="cpu", backend="aiter") as manager:
            with manager.capture_phase():
                manager.warm()
            plan = manager.plan_for(Step(torch.tensor([3], dtype=torch.int32)))
            manager.pa_decode(plan, *call, 128**-0.5)  # positive control
            compiled_in = re.search(r"compiled in as ([\d.]+)", scale)
            assert compiled_in is not None
            with pytest.raises(ConfigError, match=re.escape(f"they were compiled for {compiled_in[1]}")):
                manager.pa_decode(plan, *call, 0.1)
            assert lse.startswith("calls with lse= are refused")
            with pytest.raises(RouteError, match="gives no log-sum-exps"):
                manager.pa_decode(plan, *call, 128**-0.5, lse=torch.empty(1, 8))


def test_classes_beyond_a_plan_of_aiter_are_told_as_segments_and_those_beyond_its_reducer_as_refused():
    """R23, R47."""
    wide = replace(
        three_sites("gfx942")["fp8"], num_q_heads=16, head_dim=256, query_length=4, max_partitions=256,
        workgroup_budget=140_000, max_context_tokens=64,
    )  # fmt: skip
    one = sites(dense=three_sites("gfx942")["bf16"], wide=wide)
    one.ladders.update(dense=CapacityLadder([4096, 8193]), wide=CapacityLadder([8, 4096]))
    with library_on("gfx942", "G3") as here:
        found = examine(here, one)
        by_site = {answer.site: answer.backends[0].conditions for answer in found.sites}
        assert "classes above 4096 rows are decoded in segments: 8193 in 3" in by_site["dense"]
        assert not any("reducer" in line for line in by_site["dense"])
        (told,) = (line for line in by_site["wide"] if "reducer" in line)
        assert told.startswith("warming the classes 4096 is refused: aiter's reducer takes 511 rows of this shape")
        with PlanManager(one.specs, ladder=one.ladders, device=FakeDevice("meta", NUM_CU), backend="aiter") as manager:
            assert [len(manager._sizing.segment_rows(rows)) for rows in (4096, 8193)] == [1, 3]
        most = int(re.search(r"max_plan_rows=(\d+)", told)[1])
    with aiter_machine("gfx942"):
        backend = AiterBackend(max_plan_rows=most)
        with pytest.raises(ConfigError, match=f"max_plan_rows={most}"):
            backend.compile(wide, most + 1, SimpleNamespace(name="cpu", num_compute_units=NUM_CU))


@pytest.mark.parametrize(("softmax_scale", "origin"), [(None, "1/sqrt(head_dim)"), (0.5, "the site's")])
def test_the_softmax_scale_that_is_compiled_in_is_told_with_its_origin(softmax_scale, origin):
    spec = replace(three_sites("gfx942")["bf16"], softmax_scale=softmax_scale)
    with library_on("gfx942", "G3") as one:
        conditions = examine(one, sites(one=spec)).sites[0].backends[0].conditions
        assert any(f"compiled in as {softmax_scale or 1 / math.sqrt(128)} ({origin})" in line for line in conditions)
        assert not verdicts(examine(one, sites(one=spec)), "one")["torch"]


def test_a_newer_function_that_cannot_be_called_as_announced_is_told_as_of_no_use():
    fake = RecordingAiter()
    with library_on("gfx950", "newer") as one:
        nhd = probe().library.nhd_max_query_length
        found = examine(one)
    changes = {"can_use_flydsl_pa_decode": lambda shape: True, "pa_decode_nhd_max_query_length": nhd}
    told = tell_generation(fake.module(**changes), fake.library(**changes))
    assert told.unusable_names == ("can_use_flydsl_pa_decode",)
    assert told.newer_names == ("can_use_flydsl_pa_decode", "pa_decode_nhd_max_query_length")
    found = replace(found, aiter=told)
    decides = NEWER_NAMES["can_use_flydsl_pa_decode"][1]
    assert f"  has can_use_flydsl_pa_decode, which cannot be called as announced: {decides}\n" in str(found)
    assert "  has pa_decode_nhd_max_query_length: it tells" in str(found)


@pytest.mark.parametrize("generation", [one for one in TAKEN if one != "G4"])  # has BF16 on gfx1250 only
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_sites_that_the_page_asks_about_are_served(arch, generation):
    example = read_sites(REPOSITORY / "examples" / "aiter_sites.json")
    with library_on(arch, generation) as one:
        found = examine(one, example, backend="aiter")
        assert found.refused == () and found.worst_case_bytes is not None
        assert verdicts(examine(one))["aiter"] != ()  # what is asked about without a file


def test_a_planner_that_nothing_tells_is_left_open():
    told = tell_generation(RecordingAiter().module(), RecordingAiter().library())
    assert (told.name, told.planner, told.has_mandatory_plans) == ("G2 or G3", "", True)
    with library_on("gfx950", "G3") as one:
        text = str(replace(examine(one), aiter=told))
    assert "aiter: generation G2 or G3 (pa_decode cannot be called without work_plan); from no file\n" in text
    assert "  lacks max_batch_size: " in text


def test_a_library_of_no_known_generation_is_not_given_the_name_of_one():
    told = tell_generation(RecordingAiter().module(pa_decode=default_plan), None)
    assert (told.name, told.has_mandatory_plans) == ("", False)
    assert "no mandatory work_plan" in told.told_by


@pytest.mark.parametrize("name", [name for name in NEWER_NAMES if name != "prepare_pa_decode_plan"])
def test_a_library_with_one_newer_name_is_newer_and_with_none_it_is_its_planners_generation(name):
    with library_on("gfx950", "G3", optional=(name,)) as one:
        found = examine(one)
        assert found.aiter is not None and found.aiter.newer_names == (name,)
        assert found.aiter.name == "newer" and name in found.aiter.told_by
    with library_on("gfx950", "G2", optional=("prepare_pa_decode_plan",)) as one:  # some of the first texts have it
        found = examine(one)
        assert found.aiter is not None and found.aiter.name == "G2"


@pytest.mark.parametrize(("arch", "generation"), [("gfx950", "newer"), ("gfx942", "G1b"), ("gfx90a", "G3"), ("", "G3")])
def test_the_command_prints_this_text_and_its_status_is_whether_aiter_serves(monkeypatch, tmp_path, arch, generation):
    spec = asdict(three_sites(arch)["fp8"])
    fields = {name: value for name, value in spec.items() if value is not None}
    path = tmp_path / "sites.json"
    path.write_text(json.dumps({"fp8": {**fields, "ladder": [1, 4]}}))
    with library_on(arch, generation) as one:
        monkeypatch.setattr(Machine, "here", lambda: one)
        result = CliRunner().invoke(command, ["doctor", "--sites", str(path), "--backend", "aiter"])
        found = examine(one, sites(fp8=three_sites(arch)["fp8"]), backend="aiter")
    assert result.output == f"{found}\n"
    assert result.exit_code == (1 if verdicts(found, "fp8")["aiter"] else 0)
    assert result.exit_code == (("fp8" not in SERVED.get((arch, generation), set())) * 1)


def test_without_an_aiter_the_row_says_where_it_comes_from_and_nothing_else_is_said():
    found = examine(a_gpu_without_aiter())
    assert software(found)["aiter"] == (None, "it comes with the ROCm images (PyPI's aiter is another project)")
    assert found.aiter is None and found.wrong == () and "aiter: generation" not in str(found)
    assert "is not installed" in verdicts(found)["aiter"][0]


def a_gpu_without_aiter() -> Machine:
    return replace(a_gpu("gfx942"), has_module=lambda name: False)


#: aiter knows a smaller budget for it where it has pa_decode_default_workgroup_budget, on gfx950 alone.
NHD = PlanSpec(8, 1, 256, 64, max_context_tokens=4096, kv_dtype="float8_e4m3fn", scales="per_tensor", kv_layout="nhd")


def test_doctor_and_manager_have_the_same_bytes_and_an_estimate_says_where_it_may_have_others():
    ladder = CapacityLadder([1, 64, 256])
    one = Sites({"default": NHD}, {"default": ladder})
    with aiter_machine("gfx950", generation="newer") as double:
        with PlanManager(NHD, ladder=ladder, device="cpu", backend="aiter") as manager:
            bytes_taken = manager.worst_case_bytes()
            assert manager.report().sites[0].workgroup_budget == double.num_cu
        found = diagnose(one, device="cpu", backend="aiter")
        assert found.worst_case_bytes == found.sites[0].worst_case_bytes == bytes_taken
        guess = estimate(one, backend="aiter", num_compute_units=double.num_cu)
        assert guess.worst_case_bytes > bytes_taken
        (note,) = guess.notes
        assert note.startswith(f"default: counted with workgroup_budget={2 * double.num_cu}, 2 x compute units. ")
        result = CliRunner().invoke(command, ["estimate", "--backend", "aiter"])
        assert "note: default: counted with workgroup_budget=512, 2 x compute units. This aiter has" in result.output

        named = replace(NHD, workgroup_budget=double.num_cu)
        exact = estimate(Sites({"default": named}, one.ladders), backend="aiter", num_compute_units=double.num_cu)
        assert (exact.worst_case_bytes, exact.notes) == (bytes_taken, ())
        assert estimate(one, num_compute_units=double.num_cu).notes == ()  # of torch
    with aiter_machine("gfx950", generation="G3") as double:  # which has no such function
        assert estimate(one, backend="aiter", num_compute_units=double.num_cu).notes == ()
