"""The example builder decodes right, and the fault it warns of shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "metadata_builder.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("metadata_builder", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_example_builder_decodes_100_steps_right(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main()

    printed = capsys.readouterr().out
    assert printed.startswith("metadata_builder: 100 steps, ")
    assert printed.endswith(", 0 compiles after seal: ok\n")
    assert printed.count("\n") == 1


def test_a_draft_pass_that_keeps_the_targets_plan_is_found(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: Any, target: Any, draft_pass: int) -> Any:
        target.context_lens.add_((target.context_lens > 0).int())
        return target

    monkeypatch.setattr(example.DecodeMetadataBuilder, "prepare_mtp_decode", forgetful)

    assert not example.main(num_steps=2)
    assert "NOT OK" in capsys.readouterr().out
