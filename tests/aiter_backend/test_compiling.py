"""What minting a class runs ahead: what it takes, what it keeps, and what comes of a call that does not compile."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from planlife import BudgetError, CapacityLadder, ConfigError, PlanManager, PlanSpec, Step
from planlife.backends import aiter_sample
from planlife.backends.aiter_backend import AiterBackend
from planlife.backends.aiter_plan import compile_bytes
from planlife.testing.aiter_machine import aiter_machine
from planlife.torch_device import CpuDevice

from .packed_world import PackedWorld
from .recording_aiter import PADecodePlan, RecordingAiter

BF16 = PlanSpec(8, 1, 64, 16, max_context_tokens=512, kv_layout="packed")
FP8 = replace(BF16, head_dim=128, kv_dtype="float8_e4m3fnuz", scales="per_tensor")


@pytest.fixture
def aiter() -> Iterator[RecordingAiter]:
    fake = RecordingAiter(num_calls=1)
    yield fake
    fake.refusal = None  # whose traceback keeps buffers, as what it remembers does
    fake.plans.clear()
    fake.decodes.clear()


def backend_over(aiter: RecordingAiter, **changes: Any) -> AiterBackend:
    return AiterBackend(library=aiter.library(**changes), architecture_of=lambda device: "gfx942")


def manager_over(aiter: RecordingAiter, spec: PlanSpec = BF16, **options: Any) -> PlanManager:
    return PlanManager(spec, ladder=CapacityLadder([1, 4]), device="cpu", backend=backend_over(aiter), **options)


def warm(manager: PlanManager) -> None:
    with manager.capture_phase():
        manager.warm()


class UnknownError(Exception):
    """What a compiler raises is nowhere written."""


@pytest.mark.parametrize("error", [AssertionError, NotImplementedError, UnknownError])
def test_a_class_that_does_not_compile_names_itself_and_is_the_fallbacks(aiter, error):
    manager = manager_over(aiter)
    aiter.refusal = error("LDS")
    with pytest.raises(ConfigError, match=r"LDS.*backend='triton'"):
        warm(manager)
    assert manager.report().resident_bytes == 0
    aiter.refusal = None
    with_fallback = manager_over(aiter, fallback="torch")
    aiter.refusal = error("LDS")
    warm(with_fallback)
    assert {line.state for line in with_fallback.report().plans} == {"refused"}
    assert with_fallback.plan_for(Step(torch.ones(3, dtype=torch.int32))).route == "fallback"
    aiter.refusal = None
    warm(manager)  # positive control
    assert {line.state for line in manager.report().plans} == {"resident"}


def test_an_unknown_exception_of_a_compile_says_rows_and_kind(aiter):
    manager = manager_over(aiter)
    aiter.refusal = UnknownError("no tile")
    said = (
        r"^aiter cannot compile a class of 4 rows: calls of 1 rows fail \(UnknownError: no tile\)\. Give the manager "
        r"backend='triton', or fallback='triton' for what aiter cannot compile\.$"
    )
    with pytest.raises(ConfigError, match=said):
        warm(manager)


@pytest.mark.parametrize("error", [AssertionError, TypeError, UnknownError])
@pytest.mark.parametrize("refuses", ["a plain V", "float32 sinks"])
def test_a_form_that_does_not_compile_keeps_nobody_from_the_others(error, refuses):
    class Choosy(RecordingAiter):
        def decides(self, given: dict[str, Any]) -> None:
            sinks = given["sinks"]
            is_plain = given["value_cache"].dim() == 4
            if is_plain if refuses == "a plain V" else sinks is not None and sinks.dtype == torch.float32:
                raise error("no kernel for this form")

    aiter = Choosy(num_calls=1)

    def pa_decode(*call: Any, **keywords: Any) -> None:
        RecordingAiter.pa_decode(aiter, *call, **keywords)
        aiter.decides(aiter.decodes[-1])

    pa_decode.__signature__ = inspect.signature(aiter.pa_decode)  # type: ignore[attr-defined]
    world = PackedWorld(FP8, backend_over(aiter, pa_decode=pa_decode))
    output = world.decode(world.plan([300, 17]))
    world.assert_right(output)
    assert {line.state for line in world.manager.report().plans} == {"resident"}
    if error is not UnknownError:  # which may be anything, also what a launch found
        form = {"sinks": torch.zeros(8)} if refuses == "float32 sinks" else {}
        if form:
            with pytest.raises(ConfigError, match="refuses this call: no kernel for this form"):
                world.decode(world.plan([300, 17]), **form)


def test_no_class_of_which_a_form_is_refused_keeps_the_tensors_of_its_calls():
    """An exception that is kept holds the frames that it went through."""
    with aiter_machine("gfx942", generation="G3"):  # which takes no plain V of BF16
        manager = PlanManager(BF16, ladder=CapacityLadder([2, 4]), device="cpu", backend="aiter")
        gc.collect()
        gc.disable()
        try:
            before = len(aiter_sample._described)
            warm(manager)
            assert len(aiter_sample._described) == before
        finally:
            gc.enable()


@pytest.mark.parametrize("raises", [torch.cuda.OutOfMemoryError, MemoryError])
def test_no_memory_for_a_compile_is_a_budget_error_and_falls_back_in_service(aiter, raises):
    manager = manager_over(aiter, fallback="torch", on_miss="mint")
    aiter.refusal = raises("injected")
    with pytest.raises(BudgetError, match="no memory to compile default/4/ub0: injected"):
        warm(manager)
    step = Step(torch.ones(3, dtype=torch.int32))
    plan = manager.plan_for(step)
    assert plan.route == "fallback" and plan.reason.startswith("out of memory")
    aiter.refusal = None
    assert manager.plan_for(Step(torch.ones(3, dtype=torch.int32))).route == "planned"


@pytest.mark.parametrize(
    "spec", [BF16, FP8, replace(FP8, query_length=3, scales="per_token")], ids=["bf16", "fp8", "3"]
)
def test_what_compiling_a_class_takes_is_told_before(spec, monkeypatch):
    taken: list[int] = []
    zeros = torch.zeros

    def counting(*shape: Any, **options: Any) -> torch.Tensor:
        made = zeros(*shape, **options)
        taken.append(made.nbytes)
        return made

    device = CpuDevice(num_compute_units=12)
    with aiter_machine("gfx942", generation="G3", num_cu=12):
        backend = AiterBackend()
        settled = replace(spec, max_partitions=12, workgroup_budget=24)
        monkeypatch.setattr(torch, "zeros", counting)
        backend.compile(settled, 64, device)
        monkeypatch.undo()
        pages = sum(one.nbytes for one in aiter_sample.SampleCall(settled, 1, "cpu").caches[0][:2])
        beyond = sum(taken) - compile_bytes(settled, 64, 12)
        assert 0 < beyond <= 4 * pages
        assert "compiling" in backend.excluded(device)


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, AssertionError, AttributeError, RuntimeError])
def test_what_the_planner_has_against_a_site_is_told_when_the_manager_is_made(aiter, error):
    def plan_pa_decode(*call: Any, **keywords: Any) -> Any:
        raise error("max_partitions must be in [1, 100], got 256")

    plan_pa_decode.__signature__ = inspect.signature(aiter.plan_pa_decode)  # type: ignore[attr-defined]
    (reason,) = backend_over(aiter, plan_pa_decode=plan_pa_decode).refuse_spec(BF16, CpuDevice())
    assert reason.startswith(f"this aiter's plan_pa_decode refuses calls of this site on gfx942 ({error.__name__}: max")


def test_an_aiter_that_counts_fewer_compute_units_than_torch_is_refused_and_told_the_way_out():
    """CU masks and partition modes."""
    with aiter_machine("gfx942", generation="G3", num_cu=100):
        device = CpuDevice(num_compute_units=256)
        (reason,) = AiterBackend().refuse_spec(FP8, device)
        assert "plan_pa_decode" in reason and "[1, 100]" in reason
        assert list(AiterBackend().refuse_spec(replace(FP8, max_partitions=100), device)) == []


def test_a_plan_type_that_raises_is_a_reason(aiter):
    class Strange(PADecodePlan):
        def __init__(
            self, work_info, reduce_info, num_kv_heads, max_partitions, sliding_window=0, query_length=1
        ) -> None:
            raise ZeroDivisionError("no plan")

    (reason,) = backend_over(aiter, PADecodePlan=Strange).refuse_spec(BF16, CpuDevice())
    assert reason.startswith(
        "this aiter's PADecodePlan refuses calls of this site on gfx942 (ZeroDivisionError: no plan"
    )


def test_an_architecture_that_a_driver_does_not_tell_is_a_reason(aiter):
    def fails(device: Any) -> str:
        raise RuntimeError("HIP error: no device")

    (reason,) = AiterBackend(library=aiter.library(), architecture_of=fails).refuse_spec(BF16, CpuDevice())
    assert reason.startswith(
        "the architecture of cpu cannot be had (RuntimeError: HIP error: no device); pass 'triton'"
    )


def test_what_the_planner_has_against_tables_in_service_has_a_name(aiter):
    fails = []

    def plan_pa_decode(*call: Any, **keywords: Any) -> Any:
        if fails:
            raise ValueError("must match the reused plan")
        return RecordingAiter.plan_pa_decode(aiter, *call, **keywords)

    plan_pa_decode.__signature__ = inspect.signature(aiter.plan_pa_decode)  # type: ignore[attr-defined]
    world = PackedWorld(BF16, backend_over(aiter, plan_pa_decode=plan_pa_decode))
    fails.append(True)
    with pytest.raises(ConfigError, match="aiter's plan_pa_decode refuses these tables: must match the reused plan"):
        world.plan([300])
    fails.clear()
    world.assert_right(world.decode(world.plan([300, 17])))
