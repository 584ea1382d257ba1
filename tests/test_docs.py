"""The pages under docs/ do not rot: their code runs, and what they point at exists."""

from __future__ import annotations

import ast
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from planlife.testing.builder_suite import SCENARIOS, Unsupported, run_scenario

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


def code_of(page: Path) -> dict[str, Any]:
    """The names that a page's code defines, its blocks run in order as one module."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), names)
    return names


TESTING = code_of(DOCS / "testing.md")
TESTS_OF_THE_PAGE = sorted(name for name in TESTING if name.startswith("test_") and name != "test_my_builder")


def test_the_page_on_testing_has_tests() -> None:
    assert len(TESTS_OF_THE_PAGE) == 5


@pytest.mark.parametrize("name", TESTS_OF_THE_PAGE)
def test_a_test_on_the_page_about_testing_passes(name: str) -> None:
    TESTING[name]()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_builder_on_the_page_about_testing_passes_the_suite(scenario: str) -> None:
    try:
        TESTING["test_my_builder"](partial(run_scenario, scenario, num_steps=6))
    except Unsupported:
        assert scenario in ("ubatches", "dummies")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "testing.md"], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path) -> None:
    code_of(page)


def defined_tests(path: Path) -> set[str]:
    """Names that pytest would collect from a file: functions, classes, and Class::method."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}::{method.name}" for method in node.body if isinstance(method, ast.FunctionDef))
    return names


def missing_tests(text: str) -> list[str]:
    """Every `path::name` in `text` that is no test of this repository."""
    return [
        f"{path}::{name}"
        for path, name in re.findall(r"`([\w/]+\.py)::([\w:]+)`", text)
        if not (REPOSITORY / "tests" / path).is_file() or name not in defined_tests(REPOSITORY / "tests" / path)
    ]


def missing_names(text: str) -> list[str]:
    """Every dotted name in `text`, as in `planlife.spec.Step` or `planlife.Step(lens)`, that leads nowhere."""
    return [name for name in re.findall(r"`(planlife(?:\.\w+)+)(?:\(.*?\))?`", text) if not leads_somewhere(name)]


def leads_somewhere(dotted: str) -> bool:
    first, *names = dotted.split(".")
    found: Any = import_module(first)
    for index, name in enumerate(names):
        if not hasattr(found, name):
            try:
                import_module(".".join([first, *names[: index + 1]]))
            except ImportError:
                return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_points_at_exists(page: Path) -> None:
    text = page.read_text()
    assert missing_tests(text) == []
    assert missing_names(text) == []
    links = [link for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text) if not (page.parent / link).exists()]
    assert links == []


def test_a_page_that_points_at_nothing_is_found() -> None:
    """Positive control of the checks above."""
    text = "`test_docs.py::test_none` `none/test_it.py::test_it` `test_docs.py::test_what_a_page_points_at_exists`"
    assert missing_tests(text) == ["test_docs.py::test_none", "none/test_it.py::test_it"]
    text = "`planlife.manager.PlanManager.plan_for(step)` `planlife.manager.PlanManager.none` `planlife.none`"
    assert missing_names(text) == ["planlife.manager.PlanManager.none", "planlife.none"]


@pytest.mark.parametrize(("letter", "last"), [("R", 48), ("C", 84)])
def test_every_requirement_and_case_has_one_row(letter: str, last: int) -> None:
    rows = re.findall(rf"^\| ({letter}\d\d?) \|.*\|$", (DOCS / "requirements.md").read_text(), re.M)
    digits = 1 if letter == "R" else 2
    assert rows == [f"{letter}{number:0{digits}}" for number in range(1, last + 1)]


def test_a_row_names_a_test_or_says_what_is_missing() -> None:
    rows = re.findall(r"^\| [RC]\d\d? \|.*\|$", (DOCS / "requirements.md").read_text(), re.M)
    assert [row for row in rows if ".py::" not in row and "not yet" not in row] == []
