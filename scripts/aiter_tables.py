"""The tables of docs/aiter.md, asked of planlife over the double of aiter: what is told, served, and printed."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gpu_suite

from planlife import PlanSpec
from planlife.aiter_generation import NEWER_NAMES, AiterGeneration, imported_generation
from planlife.aiter_library import Probe, probe
from planlife.backends.aiter_limits import FP8_OF_ARCHITECTURE
from planlife.configuration import backend_reasons
from planlife.doctor import diagnose
from planlife.testing.aiter_double import GENERATIONS, STRANGERS
from planlife.testing.aiter_machine import aiter_machine
from planlife.torch_device import CpuDevice

_STRANGERS = {
    "pypi": "PyPI's `aiter`",
    "fork without plans": "a fork with a decode of its own",
    "fork with host plans": "a fork with plans on the host",
    "static only": "ROCm's, before plans",
    "old flydsl": "ROCm's, with FlyDSL below 0.2.4",
}

_BF16 = PlanSpec(8, 1, 128, 16, max_context_tokens=4096, kv_layout="packed")
_FP8 = replace(_BF16, kv_dtype="float8_e4m3fn", scales="per_tensor")
#: FP8 stands for that of the architecture.
_CACHES = {
    "packed, BF16": _BF16,
    "packed, BF16, with a sliding window": replace(_BF16, sliding_window=1024),
    "packed, BF16, float16 queries": replace(_BF16, q_dtype="float16"),
    "packed, BF16, `head_dim=192`": replace(_BF16, head_dim=192),
    "packed, FP8, scales per tensor": _FP8,
    "packed, FP8, scales per token, `query_length=6`": replace(_FP8, scales="per_token", query_length=6),
    "packed, FP8, float16 queries": replace(_FP8, q_dtype="float16"),
    "packed, FP8, `head_dim=256`, pages of 64": replace(_FP8, head_dim=256, page_size=64),
    "packed, FP16": replace(_BF16, q_dtype="float16", kv_dtype="float16"),
    "packed, pages of 32": replace(_BF16, page_size=32),
    "packed, BF16, `head_dim=96`": replace(_BF16, head_dim=96),
    "NHD, FP8, `head_dim=256`, pages of 64": replace(_FP8, kv_layout="nhd", head_dim=256, page_size=64),
    "NHD, BF16": replace(_BF16, kv_layout="nhd"),
    "HND, BF16": replace(_BF16, kv_layout="hnd"),
}

#: One case of each kind, for the form of the summary.
_RESULTS = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_cuda_device" name="a"/><testcase classname="tests.gpu.test_cuda_device" name="b"/>
<testcase classname="tests.gpu.test_cuda_device" name="c"><skipped message="needs two GPUs"/></testcase>
<testcase classname="tests.gpu.test_lifecycle_on_cuda" name="d"/>
</testsuite></testsuites>"""


def versions() -> str:
    """Each generation and each stranger: what tells it, and what planlife does."""
    rows = ["| library | told by | planner | planlife |", "|---|---|---|---|"]
    for name in (*GENERATIONS, *STRANGERS):
        told, (library, reasons) = _pypi() if name == "pypi" else _over_the_double(name)
        sign = told.told_by if told else "the import" if name != "pypi" else "its files, not imported"
        what = "takes it" if library else f"refuses it: {'; '.join(map(_without_way_out, reasons))}"
        rows.append(_row(_STRANGERS.get(name, name), sign, told.planner if told else "", what))
    return "\n".join(rows)


def _over_the_double(generation: str) -> tuple[AiterGeneration | None, Probe]:
    with aiter_machine("gfx950", generation=generation):
        found = probe()
        return imported_generation(found.library), found


def _pypi() -> tuple[AiterGeneration | None, Probe]:
    """A package of that name without kernels, on disk: by its files it is told."""
    with tempfile.TemporaryDirectory() as folder, _nothing_imported():
        Path(folder, "aiter").mkdir()
        Path(folder, "aiter", "__init__.py").touch()
        sys.path.insert(0, folder)
        try:
            _, reasons = probe()
        finally:
            sys.path.remove(folder)
        return None, Probe(None, tuple(reason.replace(folder, "…") for reason in reasons))


@contextmanager
def _nothing_imported() -> Iterator[None]:
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "aiter"}
    probe.cache_clear()
    try:
        yield
    finally:
        sys.modules.update(hidden)
        probe.cache_clear()


def _without_way_out(reason: str) -> str:
    return re.split(r"[:;,] (?=upgrade|repair|pip uninstall|or pass)", reason)[0]


def newer_names() -> str:
    """What came with or after mandatory plans."""
    rows = ["| name | where it is there | where it is not |", "|---|---|---|"]
    rows += [_row(f"`{name}`", *what) for name, what in NEWER_NAMES.items()]
    return "\n".join(rows)


def caches() -> str:
    """Kinds of cache by architecture and generation: served or not."""
    columns = [
        (arch, generations) for arch in FP8_OF_ARCHITECTURE for generations in (("G2", "G3"), ("G4",), ("newer",))
    ]
    heads = [f"{arch}, {' and '.join(generations)}" for arch, generations in columns]
    rows = [_row("cache", *heads), f"|{'---|' * (len(heads) + 1)}"]
    for what, spec in _CACHES.items():
        cells = []
        for arch, generations in columns:
            one = replace(spec, kv_dtype=FP8_OF_ARCHITECTURE[arch]) if spec.scales != "none" else spec
            answers = {_is_served(one, arch, generation) for generation in generations}
            if len(answers) > 1:
                raise AssertionError(f"{what} on {arch}: {generations} differ, and the table has one column for them")
            cells.append("served" if answers.pop() else "refused")
        rows.append(_row(what, *cells))
    return "\n".join(rows)


def _is_served(spec: PlanSpec, arch: str, generation: str) -> bool:
    with aiter_machine(arch, generation=generation):
        return not backend_reasons("aiter", spec, CpuDevice())


def first_run() -> str:
    """What scripts/test-gpu prints, as far as it is the same on every machine."""
    with aiter_machine("gfx942", generation="G3"):
        text = str(diagnose(gpu_suite.packed_sites(), device="cpu", backend="aiter"))
    aiter = text[text.index("aiter: generation") : text.index("  backend triton")].rstrip()
    place = aiter.partition("; from ")[2].partition("\n")[0]
    aiter = aiter.replace(place, "…/aiter/ops/flydsl/pa_decode.py")  # there it is a file
    doctor, pytest, summary = gpu_suite.HEADINGS
    counts = gpu_suite.summary(_RESULTS)
    return f"```\n{doctor}\n…\n{aiter}\n…\n{pytest}\n…\n{summary}\n{counts}\n{gpu_suite.verdict(0)}\n```"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
