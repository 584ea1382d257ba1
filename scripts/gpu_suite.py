"""Runs tests/gpu on this machine's GPU, and says what ran on what.

torch, triton and aiter are never installed: they belong to the machine. What else the tests need and is missing goes
into a folder that is removed at the end. Exit status: pytest's, or 1 before anything else where there is no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parent.parent
#: What the tests import, and what has to come with it, which --no-deps leaves out: (module, distribution).
NEEDED: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("cachetools", "cachetools"): (),
    ("pytest", "pytest"): (
        ("iniconfig", "iniconfig"),
        ("packaging", "packaging"),
        ("pluggy", "pluggy"),
        ("pygments", "pygments"),
    ),
    ("hypothesis", "hypothesis"): (("sortedcontainers", "sortedcontainers"), ("attr", "attrs")),
}
_BEFORE_3_11 = (("exceptiongroup", "exceptiongroup"), ("tomli", "tomli"))

#: What `main` prints before each of its parts.
HEADINGS = ("== planlife doctor", "== pytest", "== summary")


def main(arguments: list[str]) -> int:
    refusal = why_no_gpu()
    if refusal:
        print(f"no GPU suite here: {refusal}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="planlife-gpu-") as folder:
        extras, results = Path(folder, "extras"), Path(folder, "results.xml")
        paths = [str(REPOSITORY), str(REPOSITORY / "scripts"), str(extras), os.environ.get("PYTHONPATH", "")]
        # Failures and skips in one line each, however narrow the terminal is.
        environ = {"COLUMNS": "160", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        distributions = missing()
        if distributions:
            print(f"== installing for this run only: {', '.join(distributions)}", flush=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            installed = subprocess.run([*pip, "--target", str(extras), *distributions], cwd=REPOSITORY)
            if installed.returncode:
                return installed.returncode
        print(HEADINGS[0], flush=True)
        doctor = "import gpu_suite; gpu_suite.print_doctor()"
        subprocess.run([sys.executable, "-c", doctor], cwd=REPOSITORY, env=environ)
        print(HEADINGS[1], flush=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", f"--junitxml={results}"]
        status = subprocess.run([*command, *with_tests(arguments)], cwd=REPOSITORY, env=environ).returncode
        print(HEADINGS[2], flush=True)
        print(summary(results.read_text(encoding="utf-8")) if results.exists() else "pytest wrote no results")
        print(verdict(status))
        return status


def with_tests(arguments: list[str]) -> list[str]:
    """pytest's arguments: the whole suite unless they name tests of their own."""
    names_tests = any(Path(REPOSITORY, one.partition("::")[0]).exists() for one in arguments if one[:1] != "-")
    return arguments if names_tests else [*arguments, "tests/gpu"]


def why_no_gpu() -> str:
    """Why the suite cannot run with this Python; "" if it can. Imports torch and nothing else."""
    try:
        import torch
    except Exception as error:  # a library of another build fails with whatever it likes
        return f"torch cannot be imported by {sys.executable} ({type(error).__name__}: {error})"
    if torch.cuda.is_available():
        return ""
    hip, cuda = torch.version.hip, torch.version.cuda
    if not (hip or cuda):
        return f"torch {torch.__version__} is a CPU build; take a container, or PYTHON=..., whose torch is for this GPU"
    built_for = f"ROCm {hip}" if hip else f"CUDA {cuda}"
    return f"torch {torch.__version__}, built for {built_for}, sees no GPU: is it visible to this container?"


def missing() -> list[str]:
    """Distributions to install. What comes with something is only missing where that is."""
    found = []
    for needed, others in NEEDED.items():
        if util.find_spec(needed[0]) is not None:
            continue
        with_it = (needed, *others, *(_BEFORE_3_11 if others and sys.version_info < (3, 11) else ()))
        found += [distribution for module, distribution in with_it if util.find_spec(module) is None]
    return list(dict.fromkeys(found))


def print_doctor() -> None:
    """What `planlife doctor` prints, without the libraries of the command line, about caches that aiter reads."""
    from planlife.doctor import diagnose

    print(diagnose(packed_sites()))


def packed_sites() -> Any:
    """A BF16 and an FP8 cache, of the FP8 that this GPU has."""
    import torch

    from planlife.backends.aiter_limits import FP8_OF_ARCHITECTURE
    from planlife.sites import DEFAULT_SITES, Sites

    name = getattr(torch.cuda.get_device_properties(0), "gcnArchName", "") if torch.cuda.is_available() else ""
    bf16 = replace(DEFAULT_SITES.specs["default"], kv_layout="packed")
    fp8 = replace(bf16, kv_dtype=FP8_OF_ARCHITECTURE.get(name.partition(":")[0], "float8_e4m3fn"), scales="per_tensor")
    return Sites({"bf16": bf16, "fp8": fp8}, dict.fromkeys(("bf16", "fp8"), DEFAULT_SITES.ladders["default"]))


def verdict(status: int) -> str:
    """The last line."""
    return f"exit status {status}: {'all that ran is right' if status == 0 else 'see above'}"


def summary(results: str) -> str:
    """Of pytest's JUnit file: counts by module and outcome, each reason for a skip with its count."""
    cases = [(_module(case), *_outcome(case)) for case in ElementTree.fromstring(results).iter("testcase")]
    by_module: dict[str, Counter[str]] = {}
    for module, outcome, _ in cases:
        by_module.setdefault(module, Counter())[outcome] += 1
    lines = [f"{module}: {_counts(found)}" for module, found in sorted(by_module.items())]
    reasons = Counter(reason for _, outcome, reason in cases if outcome == "skipped")
    lines += [f"skipped {count}: {reason}" for reason, count in reasons.most_common()]
    lines.append(f"all: {_counts(Counter(outcome for _, outcome, _ in cases))}")
    return "\n".join(lines)


def _module(case: ElementTree.Element) -> str:
    """ "test_cuda_device", of "tests.gpu.test_cuda_device" and of what is imported into it as a class alike."""
    names = case.get("classname", "").split(".")
    return next((name for name in names if name.startswith("test_")), case.get("name", "?"))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    """(outcome, reason)."""
    for kind, outcome in (("error", "failed"), ("failure", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return outcome, found.get("message", "")
    return "passed", ""


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if found[outcome])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
