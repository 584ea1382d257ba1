"""The scenarios of lengths past the bound over the Triton backend on a CPU, and its fallback; on a GPU: tests/gpu."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from ..lifecycle.test_past_the_bound import *  # noqa: F403
from ..lifecycle.test_past_the_bound import names_of_other_sites
from ..lifecycle.world import World
from .test_lifecycle import interpreted

pytestmark = interpreted
_TABLE = "test_query_tokens_past_the_columns_of_the_block_table_see_the_keys_that_it_has"
NOT_HERE = dict.fromkeys(
    (*names_of_other_sites(), *(f"{_TABLE}[{site}-before replay]" for site in ("1-0", "4-0", "4-100"))),
    "the interpreter takes seconds for each; a GPU runs them all",
)


@pytest.fixture(autouse=True)
def _over_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "backend", "triton")
