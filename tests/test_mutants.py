"""scripts/mutants.py can take out each guard that it names: a table that rots would prove nothing on the GPU."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = runpy.run_path(str(ROOT / "scripts" / "mutants.py"))
GUARDS = MUTANTS["GUARDS"]
TESTS = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_each_guard_is_where_the_table_says_and_its_tests_exist(guard: Any) -> None:
    assert (ROOT / guard.file).read_text("utf-8").count(guard.text) == 1
    assert guard.without != guard.text
    for test in filter(None, (guard.gpu, guard.cpu)):
        path, *_, name = test.split("::")
        assert (ROOT / "tests" / path).is_file()
        assert any(f"def {name}(" in text for text in TESTS.values()), name


def test_a_guard_whose_text_moved_is_an_error_that_names_it(tmp_path: Path) -> None:
    moved = GUARDS[0]._replace(text="no such line\n")
    with pytest.raises(SystemExit, match=f"{moved.name}: its text is 0 times in {moved.file}"):
        MUTANTS["copy_without"](moved, tmp_path)


def test_a_copy_has_everything_but_the_guard(tmp_path: Path) -> None:
    guard = GUARDS[0]
    MUTANTS["copy_without"](guard, tmp_path)
    mine, copied = (root.joinpath(guard.file).read_text("utf-8") for root in (ROOT, tmp_path))
    assert copied == mine.replace(guard.text, guard.without) != mine
    assert (tmp_path / "tests" / "conftest.py").is_file()
