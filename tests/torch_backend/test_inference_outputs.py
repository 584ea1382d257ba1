"""What a caller's output was made in is all one: every route writes it, as a kernel does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, Step, merge

SPEC = PlanSpec(4, 2, 32, 16, max_context_tokens=64)


def made_in_inference_mode(*shape: int, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.full(shape, torch.nan, **options)


def requiring_grad(*shape: int, **options: Any) -> torch.Tensor:
    return torch.full(shape, torch.nan, requires_grad=True, **options)


def plain(*shape: int, **options: Any) -> torch.Tensor:
    return torch.full(shape, torch.nan, **options)


made = pytest.mark.parametrize("make", [plain, made_in_inference_mode, requiring_grad])


@made
@pytest.mark.parametrize("route", ["planned", "dummy", "fallback"])
@pytest.mark.parametrize("in_a_graph", [False, True])
def test_an_output_is_written_whatever_mode_it_was_made_in(make: Any, route: str, in_a_graph: bool) -> None:
    if route == "dummy" and in_a_graph:
        pytest.skip("dummies are refused while recording")
    ladder = CapacityLadder([2 if route == "fallback" else 3])
    kv = torch.randn(2, 4, 16, 2, 32).to(torch.bfloat16)
    query = torch.randn(3, 4, 32).to(torch.bfloat16)
    tables = torch.arange(4, dtype=torch.int32).expand(3, 4)
    output, lse = make(3, 4, 32, dtype=torch.bfloat16), make(3, 4)
    lens = torch.tensor([5, 60, 7][: 3 if route == "fallback" else 2], dtype=torch.int32)
    step = Step(lens, dummy=route == "dummy")
    with PlanManager(SPEC, ladder=ladder, device="cpu", backend="torch", fallback="torch") as manager:
        with manager.capture_phase():
            manager.warm()
        plan = manager.plan_for(step)
        assert plan.route == route

        def decode() -> None:
            manager.pa_decode(plan, output, query, *kv, tables, 32**-0.5, lse=lse)

        if in_a_graph:
            with manager.graph() as g:
                decode()
            assert output.detach().isnan().all()
            manager.replay(g, step)
        else:
            before = None if output.is_inference() else output._version
            decode()
            assert before is None or output._version > before
    rows = 0 if route == "dummy" else lens.shape[0]
    assert not output.detach().isnan().any() and output.detach()[:rows].any(-1).all()
    assert (output.detach()[rows:] == 0).all() and (lse.detach()[rows:] == -torch.inf).all()
    assert lse.detach()[:rows].isfinite().all()


@made
def test_a_merge_is_written_whatever_mode_its_place_was_made_in(make: Any) -> None:
    parts = torch.randn(2, 3, 4, 32)
    lse = torch.randn(2, 3, 4)
    out, out_lse = make(3, 4, 32), make(3, 4)
    merge(parts[0], lse[0], parts[1], lse[1], out=out, out_lse=out_lse)
    wanted = merge(parts[0], lse[0], parts[1], lse[1])
    torch.testing.assert_close((out.detach(), out_lse.detach()), wanted)
    assert not wanted[0].is_inference()
