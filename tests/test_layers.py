"""Imports run one way, low to high, and the core runs without torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

from .child_process import REPOSITORY, run_python

#: Low to high: a module imports from its own layer and from those before it. "kernels" is the whole folder.
LAYERS = (
    ("errors", "identity", "spec", "unserved", "device"),
    ("planner", "ladder", "ledger", "store", "report", "events", "item", "aiter_library", "aiter_generation"),
    ("plan", "call_check", "graph_record", "sizing", "residency", "backends.base"),
    ("slot", "graph_book", "configuration", "merge", "hint"),
    ("route",),
    ("guard",),
    ("manager",),
    ("ambient", "emulated_graph", "torch_device", "kernels", "backends", "cuda_runtime", "cuda_device", "trace_file"),
    (
        "trace",
        "testing",
        "demo",
        "bench",
        "bench_aiter",
        "bench_device",
        "sites",
        "estimate",
        "visibility",
        "diagnosis",
        "doctor",
        "precision",
    ),
    ("step_log", "recorder", "sim"),
    ("options", "sim_commands", "commands", "cli", "__main__"),
)
CORE = {module for layer in LAYERS[:7] for module in layer}

#: Device and backend are picked by name, when a manager is made; tensor ops are loaded by the first merge.
LAZY_UPWARDS = {"configuration": ("torch_device", "backends"), "merge": ("ambient", "kernels")}

OUTSIDE_THE_CORE = {"torch", "triton", "aiter", "flydsl", "numpy", "click", "rich"}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((REPOSITORY / "planlife").rglob("*.py"))}
MODULES = sorted(FILES.keys() - {"planlife"})  # the package's front re-exports from everywhere


def layer_of(module: str) -> int:
    """The layer of the longest entry that is `module` or a folder above it."""
    inner = module.removeprefix("planlife.")
    entries = {entry: index for index, layer in enumerate(LAYERS) for entry in layer}
    while inner:
        if inner in entries:
            return entries[inner]
        inner = inner.rpartition(".")[0]
    raise AssertionError(f"{module} is in no layer: add it to the table")


def imports(module: str, source: str) -> Iterator[tuple[str, bool]]:
    """(imported module, whether on import). Function bodies run later, TYPE_CHECKING blocks never."""
    is_package = module in FILES and FILES[module].name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]

    def walk(node: ast.AST, on_import: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, on_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                origin = resolve_name("." * child.level + (child.module or ""), package)
                for alias in child.names:
                    inner = f"{origin}.{alias.name}"
                    yield (inner if inner in FILES else origin), on_import
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            else:
                later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, on_import and not later)

    yield from walk(ast.parse(source), True)


def violations(module: str, source: str) -> list[str]:
    own_layer = layer_of(module)
    inner = module.removeprefix("planlife.")
    found = []
    for imported, on_import in imports(module, source):
        if imported.partition(".")[0] in OUTSIDE_THE_CORE:
            if inner in CORE and on_import:
                found.append(f"{module} belongs to the core and imports {imported}")
        elif imported.partition(".")[0] == "planlife" and imported != "planlife":
            allowed = not on_import and imported.split(".")[1] in LAZY_UPWARDS.get(inner, ())
            if layer_of(imported) > own_layer and not allowed:
                found.append(f"{module} imports {imported}, which is above it")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_layer_and_lower(module):
    assert violations(module, FILES[module].read_text("utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("planlife.ladder", "import torch"),
        ("planlife.store", "if True:\n    import torch.cuda"),
        ("planlife.manager", "from torch import Tensor"),
        ("planlife.manager", "from .torch_device import TorchDevice"),
        ("planlife.manager", "def f():\n    from .torch_device import TorchDevice"),
        ("planlife.configuration", "def f():\n    from . import cli"),
        ("planlife.ladder", "from .manager import PlanManager"),
        ("planlife.ladder", "def f():\n    from .manager import PlanManager"),
        ("planlife.backends.base", "import planlife.manager"),
        ("planlife.backends.torch_backend", "from ..demo import engine"),
        ("planlife.trace", "from . import cli"),
    ],
)
def test_the_walk_finds_an_import_that_runs_upwards(module, source):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("planlife.configuration", "def f():\n    import torch\n    from .torch_device import TorchDevice"),
        ("planlife.manager", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("planlife.manager", "from . import ladder\nfrom .backends.base import Backend"),
        ("planlife.backends.torch_backend", "import torch\nfrom ..manager import PlanManager"),
        ("planlife.cli", "from .commands import planlife"),
    ],
)
def test_the_walk_lets_what_runs_downwards_pass(module, source):
    assert violations(module, source) == []


def test_importing_planlife_leaves_torch_and_the_command_lines_libraries_out():
    code = (
        "import sys, planlife, planlife.manager\n"
        f"print(sorted({OUTSIDE_THE_CORE!r} & sys.modules.keys()))\n"
        "import torch\n"
        f"print(sorted({{'torch'}} & sys.modules.keys()))\n"
    )
    run = run_python("-c", code)
    assert run.stdout.splitlines() == ["[]", "['torch']"], run.stderr
