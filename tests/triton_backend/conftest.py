"""Every test here runs on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

import torch


@pytest.fixture
def device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"
