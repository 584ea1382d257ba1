"""Tests that start a Python of their own start one that finds what theirs does."""

from __future__ import annotations

from .child_process import run_python


def test_a_child_imports_what_its_parent_can_wherever_that_was_found(tmp_path, monkeypatch):
    (tmp_path / "found_by_the_parent.py").write_text("import planlife, os; print(os.environ['ALSO'])")
    code = "import found_by_the_parent"
    assert "No module named 'found_by_the_parent'" in run_python("-c", code, ALSO="said").stderr
    monkeypatch.syspath_prepend(tmp_path)
    assert run_python("-c", code, ALSO="said").stdout == "said\n"
