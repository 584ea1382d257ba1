"""What aiter cannot serve is refused when the manager is made, all reasons at once, true on the platform (R30, R31)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from planlife import BackendUnavailableError, CapacityLadder, ConfigError, PlanManager, PlanSpec, Step
from planlife.aiter_library import architecture_name, describe
from planlife.backends.aiter_backend import AiterBackend, architecture_of
from planlife.configuration import DeviceMeant
from planlife.testing.aiter_machine import aiter_machine
from planlife.testing.fakes import FakeDevice
from planlife.torch_device import CpuDevice
from tests.aiter_backend.packed_world import PackedWorld
from tests.aiter_backend.recording_aiter import RecordingAiter, install

BF16 = PlanSpec(8, 1, 128, 16, max_context_tokens=4096, kv_layout="packed")
FNUZ = replace(BF16, kv_dtype="float8_e4m3fnuz", scales="per_tensor")
FN = replace(FNUZ, kv_dtype="float8_e4m3fn")

NEWER = ("pa_decode_nhd_max_query_length",)


def backend_on(architecture: str, **changes: Any) -> AiterBackend:
    library = RecordingAiter().library(**changes)
    return AiterBackend(library=library, architecture_of=lambda device: architecture)


def refuse(spec: PlanSpec, architecture: str = "gfx942", **settings: Any) -> list[str]:
    """By the double of a library, of G2 unless `settings` say otherwise."""
    with aiter_machine(architecture, **{"generation": "G2", **settings}):
        return list(AiterBackend().refuse_spec(spec, CpuDevice()))


def refuse_by(architecture: str = "gfx942", /, spec: PlanSpec = BF16, **changes: Any) -> list[str]:
    """By a library that checks nothing but has these functions."""
    return list(backend_on(architecture, **changes).refuse_spec(spec, CpuDevice()))


#: Real consumers' sites: (what, spec, architecture, library, what the refusal says or "").
VLLM = PlanSpec(
    16, 1, 256, 64, max_context_tokens=131_072, kv_dtype="float8_e4m3fn", scales="per_tensor", kv_layout="nhd"
)
MINIMAX = PlanSpec(8, 1, 128, 128, max_context_tokens=200_000, kv_dtype="float8_e4m3fn", scales="per_tensor",
                   kv_layout="packed")  # fmt: skip
QWEN = replace(MINIMAX, query_length=6, scales="per_token", page_size=16)
CONSUMERS = [
    ("vLLM, packed", replace(VLLM, kv_layout="packed"), "gfx950", (), ""),
    ("vLLM, nhd, newer library", VLLM, "gfx950", NEWER, ""),
    ("vLLM, nhd", VLLM, "gfx950", (), "reads no kv_layout='nhd' (it has no pa_decode_nhd_max_query_length)"),
    ("vLLM, nhd, MTP", replace(VLLM, query_length=3), "gfx950", NEWER, "for query_length up to 2, not 3"),
    ("vLLM, pages of 192", replace(VLLM, kv_layout="packed", page_size=192), "gfx950", (), "not of 192"),
    ("vLLM, e4m3fn on MI300X", replace(VLLM, kv_layout="packed"), "gfx942", (), "FP8 cache of gfx942 is"),
    ("SGLang, bf16", replace(BF16, page_size=64), "gfx942", (), ""),
    ("MiniMax-M3, dense", MINIMAX, "gfx950", (), ""),
    ("MiniMax-M3, sparse", replace(MINIMAX, max_partitions=8), "gfx950", (), ""),
    ("Qwen3.5, MTP-5", QWEN, "gfx950", (), ""),
    ("Qwen3.5, MTP-5, gfx1250", QWEN, "gfx1250", (), ""),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "architecture", "optional", "said"), [case[1:] for case in CONSUMERS],
                         ids=[case[0] for case in CONSUMERS])  # fmt: skip
def test_real_consumers_sites_are_served_or_refused_with_the_reason(spec, architecture, optional, said):
    reasons = refuse(spec, architecture, optional=optional)
    assert len(reasons) == bool(said) and said in "".join(reasons)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (replace(BF16, head_dim=96), "no head_dim 96 for a bfloat16 cache: it has multiples of 64 up to 1024"),
        (replace(BF16, head_dim=1088), "no head_dim 1088"),
        (replace(FNUZ, head_dim=192), "no head_dim 192 for a float8_e4m3fnuz cache: it has 64 and multiples of 128"),
        (replace(BF16, page_size=32), "pages of 16, 64, 128 tokens, not of 32; choose one of them"),
        (replace(BF16, kv_layout="hnd"), "no kv_layout='hnd'; use 'packed'"),
        (replace(BF16, kv_dtype="float16"), "no float16 cache; make it bfloat16 or float8_e4m3fnuz"),
        (replace(BF16, q_dtype="float16"), "no float16 query with a bfloat16 cache; make it bfloat16, as the cache"),
        (replace(FNUZ, q_dtype="float32"), "make it bfloat16 or float16"),
        (FN, "the FP8 cache of gfx942 is float8_e4m3fnuz, not float8_e4m3fn"),
        (replace(BF16, max_partitions=257), "max_partitions=257 is above the 256 compute units"),
        (replace(BF16, num_q_heads=2**16, head_dim=64), "65536 query heads per KV head with head_dim 64"),
        (replace(FNUZ, num_q_heads=16, query_length=48), "768 query rows per KV head with head_dim 128"),
        (replace(BF16, softmax_scale=1e-46), "softmax_scale=1e-46 is not finite and > 0 in float32"),
        (
            replace(FNUZ, num_q_heads=192 * 112, num_kv_heads=192, head_dim=512, workgroup_budget=192 * 256),
            "cannot index one row: its offsets are of 32 bits, and 192 KV heads x 256 slots x 112 query rows x head",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_a_limit_is_told_with_the_way_out(spec, said):
    (reason,) = refuse(spec)
    assert said in reason


@pytest.mark.parametrize(
    "spec",
    [
        replace(BF16, head_dim=64),
        replace(BF16, head_dim=1024),
        replace(FNUZ, head_dim=64),
        replace(FNUZ, head_dim=256, q_dtype="float16"),
        replace(FNUZ, page_size=128, scales="per_token"),
        replace(BF16, page_size=64, max_partitions=256, query_length=7),
        replace(BF16, num_q_heads=432, head_dim=64),
    ],
    ids=range(7),
)
def test_what_is_just_inside_the_limits_is_served(spec):
    assert refuse(spec) == []


@pytest.mark.parametrize(
    ("architecture", "device", "said"),
    [
        ("gfx90a", CpuDevice(), "for gfx942, gfx950, gfx1250, and this GPU is gfx90a; pass 'triton'"),
        ("", CpuDevice(), "for AMD GPUs, and cpu is none; pass 'torch'"),
        ("", FakeDevice("cuda:0", 132), "for AMD GPUs, and cuda:0 is none; pass 'triton'"),
    ],
)
def test_a_device_that_aiter_has_no_kernels_for_is_told_with_what_serves_it(architecture, device, said):
    """R31."""
    with aiter_machine(architecture):
        backend = AiterBackend(architecture_of=lambda device: architecture)
        (reason,) = backend.refuse_spec(BF16, device)
    assert said in reason


def test_a_device_that_torch_calls_no_amd_gpu_is_none(monkeypatch):
    assert architecture_of(CpuDevice()) == ""
    gpu = FakeDevice("cuda:0", 304)
    monkeypatch.setattr(torch.version, "hip", None)
    assert architecture_of(gpu) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert architecture_of(CpuDevice()) == ""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda name: type("", (), {"gcnArchName": "gfx942:sramecc+:xnack-"})
    )
    assert architecture_of(gpu) == "gfx942"  # positive control


def test_all_reasons_against_a_site_are_told_at_once():
    """C65."""
    reasons = refuse(replace(FN, head_dim=96, page_size=32, kv_layout="hnd", q_dtype="float32", max_partitions=300))
    for part in ("max_partitions=300", "float8_e4m3fnuz", "float32 query", "head_dim 96", "not of 32", "'hnd'"):
        assert len([reason for reason in reasons if part in reason]) == 1


def asking(answer: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A predicate with pa_decode's parameters, and what it was asked."""
    asked: list[dict[str, Any]] = []

    def can_use(
        output, query, key_cache, value_cache, context_lengths, block_tables, softmax_scale, query_length, *,
        compute_type, key_scale, value_scale, exp_sums, max_logits, temporary_output, sinks, sliding_window, work_plan,
        max_context_length,
    ):  # fmt: skip
        asked.append(locals())
        return answer(locals()) if callable(answer) else answer

    return can_use, asked


def test_where_aiter_has_a_predicate_it_decides_and_limits_only_explain():
    """R28."""
    yes, asked = asking(True)
    wide = replace(BF16, page_size=32)
    assert refuse_by(spec=wide, can_use_flydsl_pa_decode=yes) == []
    assert len(asked) == 1 and asked[0]["key_cache"].shape == (1, 1, 16, 32, 8)
    no, _ = asking(False)
    said = "this aiter's can_use_flydsl_pa_decode refuses calls of this site on gfx942 (without a reason)"
    assert said in refuse_by(can_use_flydsl_pa_decode=no)[0]
    assert "not of 32" in refuse_by(spec=wide, can_use_flydsl_pa_decode=no)[0]


@pytest.mark.parametrize("num_axes", [4, 5])
def test_the_predicate_is_asked_with_a_whole_call_and_either_form_of_v_is_enough(num_axes):
    only_one, asked = asking(lambda call: call["value_cache"].dim() == num_axes)
    assert refuse_by(spec=replace(FNUZ, query_length=6), can_use_flydsl_pa_decode=only_one) == []
    call = asked[0]
    assert call["compute_type"] is torch.float8_e4m3fnuz and call["query"].shape == (6, 8, 128)
    assert call["work_plan"].reduce_info.shape == (1, 2) and call["exp_sums"].shape == (1, 256, 48)
    assert type(call["max_context_length"]) is int


def test_a_site_is_asked_about_where_no_capture_of_another_thread_minds():
    """The call's tensors are allocated for it, and the library may load code."""

    class Guarded(CpuDevice):
        is_relaxed = False

        @contextmanager
        def relaxed(self) -> Iterator[None]:
            self.is_relaxed = True
            yield
            self.is_relaxed = False

    device = Guarded()
    can_use, asked = asking(lambda call: device.is_relaxed)
    assert list(backend_on("gfx942", can_use_flydsl_pa_decode=can_use).refuse_spec(BF16, device)) == []
    assert len(asked) == 1 and not device.is_relaxed


def test_what_no_call_tells_the_predicate_is_refused_beside_it():
    yes, asked = asking(True)
    (reason,) = refuse_by(spec=replace(BF16, max_partitions=257), can_use_flydsl_pa_decode=yes)
    assert "above the 256 compute units" in reason
    assert asked == []


def test_a_predicate_that_raises_is_a_reason_and_not_an_exception():
    fails, _ = asking(lambda call: 1 // 0)
    (reason,) = refuse_by(can_use_flydsl_pa_decode=fails)
    assert "can_use_flydsl_pa_decode refuses calls of this site on gfx942 (ZeroDivisionError: " in reason


@pytest.mark.parametrize("ends", ["raises", "answers"])
def test_of_the_forms_that_v_may_have_the_first_ones_words_are_told(ends):
    """The others are rarer, and a library says of them that they are another form."""

    def of_call(call):
        if ends == "raises":
            raise NotImplementedError("no such pages" if call["value_cache"].dim() == 5 else "V must be 5-D")
        return "no such pages" if call["value_cache"].dim() == 5 else "V must be 5-D"

    fails, asked = asking(of_call)
    (reason,) = refuse_by(can_use_flydsl_pa_decode=fails)
    assert len(asked) == 2 and "no such pages" in reason and "5-D" not in reason


@pytest.mark.parametrize("answer", [None, 1, (False, "no BF16"), (True, ""), "no", np.array([1, 2])], ids=repr)
def test_only_true_is_a_yes_of_a_predicate_and_any_other_answer_is_told(answer):
    other, _ = asking(answer)
    (reason,) = refuse_by(can_use_flydsl_pa_decode=other)
    assert f"refuses calls of this site on gfx942 (it answers {describe(answer)})" in reason


def test_a_library_without_a_predicate_is_asked_by_its_own_host_checks_which_launch_and_compile_nothing():
    for generation in ("G2", "G3"):
        with aiter_machine("gfx942", generation=generation) as double:
            assert list(AiterBackend().refuse_spec(FNUZ, CpuDevice())) == []
            assert list(AiterBackend().refuse_spec(replace(FNUZ, page_size=32), CpuDevice()))
            assert (double.decodes, double.compiles, double.plans_made) == (0, 0, 0)


def test_what_one_text_serves_and_another_does_not_is_told_by_the_library_and_auto_goes_on():
    """Texts of one generation differ in their architectures and caches, and no signature says so."""
    (reason,) = refuse(BF16, native_bf16=False)
    assert "this aiter's pa_decode refuses calls of this site on gfx942 (ValueError: key_cache must be" in reason
    (reason,) = refuse(BF16, "gfx1250")
    assert "on gfx1250 (ValueError: key_cache must be" in reason
    assert refuse(FN, "gfx1250") == []  # positive control
    with (
        aiter_machine("gfx942", native_bf16=False),
        PlanManager(BF16, ladder=CapacityLadder([2]), device="cpu") as manager,
    ):
        assert manager.report().backend == "torch"
        with pytest.raises(ConfigError, match="key_cache must be"):
            PlanManager(BF16, ladder=CapacityLadder([2]), device="cpu", backend="aiter")


def test_an_architecture_that_a_library_does_not_serve_is_told_in_its_own_words():
    def of_two(*arguments, **keywords):
        raise NotImplementedError("pa_decode only supports gfx942 and gfx950, got gfx1250")

    of_two.__signature__ = inspect.signature(RecordingAiter().pa_decode)
    (reason,) = refuse_by("gfx1250", spec=FN, pa_decode=of_two)
    assert "refuses calls of this site on gfx1250 (NotImplementedError: pa_decode only supports gfx942" in reason
    assert "upgrade aiter, or pass 'triton'" in reason


def test_where_nobody_can_be_asked_the_known_limits_decide():
    """A device without room for one call, or one that is only meant."""
    gpu = FakeDevice("cuda:63", 304)
    assert list(backend_on("gfx942").refuse_spec(BF16, gpu)) == []
    (reason,) = backend_on("gfx942").refuse_spec(replace(BF16, page_size=32), gpu)
    assert "not of 32" in reason


def test_the_predicate_is_not_asked_in_steps():
    """C64: a site is decided once; over ten steps of layers nobody asks again."""
    can_use, asked = asking(True)
    fake = RecordingAiter()
    backend = AiterBackend(
        library=fake.library(can_use_flydsl_pa_decode=can_use), architecture_of=lambda device: "gfx942"
    )
    spec = replace(BF16, max_context_tokens=64)
    world = PackedWorld(spec, backend, rows=2)
    num_asked = len(asked)
    for _ in range(10):
        plan = world.plan([20, 3])
        for _ in range(5):
            world.decode(plan)
    assert len(asked) == num_asked == 1


@pytest.mark.parametrize(
    ("enabled", "fallback", "outcome"),
    [(True, None, "refused"), (True, "torch", "fallback"), (False, None, "fallback"), (False, "torch", "fallback")],
)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950", "gfx1250", "gfx90a"])
def test_an_impossible_site_is_refused_at_start_up_unless_something_else_takes_it(
    architecture, enabled, fallback, outcome
):
    """R30-R32: platform x opt-in x fallback."""
    options = {"ladder": CapacityLadder([2]), "device": "cpu", "enabled": enabled, "fallback": fallback}
    spec = replace(BF16, page_size=32)
    with aiter_machine(architecture, generation="G2"):
        options["backend"] = AiterBackend()
        if outcome == "refused":
            with pytest.raises(ConfigError, match="(?s)backend aiter cannot serve.*not of 32; choose.*pass fallback="):
                PlanManager(spec, **options)
            return
        with PlanManager(spec, **options) as manager:
            plan = manager.plan_for(Step(torch.ones(2, dtype=torch.int32)))
            assert plan.route == "fallback"
            assert ("not of 32" in plan.reason) == enabled


def test_auto_takes_aiter_before_the_others_and_only_where_it_serves_every_site():
    ladder = CapacityLadder([2])
    with aiter_machine("gfx942", device_type="meta", num_cu=304):
        gpu_options = {"ladder": ladder, "device": FakeDevice("meta", 304)}
        with PlanManager(BF16, **gpu_options) as manager:
            assert manager.report().backend == "aiter"
        with PlanManager({"a": BF16, "b": replace(BF16, page_size=32)}, **gpu_options) as manager:
            assert manager.report().backend != "aiter"
        with PlanManager(BF16, ladder=ladder, device="cpu") as manager:
            assert manager.report().backend == "torch"


def test_a_backend_over_an_aiter_that_is_not_there_is_not_made(monkeypatch):
    install(monkeypatch, RecordingAiter().module(plan_pa_decode=None))
    with pytest.raises(BackendUnavailableError, match="has no plan_pa_decode"):
        AiterBackend()


@pytest.mark.parametrize(
    "options",
    [
        {"max_plan_rows": 0},
        {"max_plan_rows": 4097},
        *(
            {"softmax_scales": [scale]}
            for scale in (0.0, -1, "1", True, float("nan"), 10**400, 1e39, 1e-46, torch.ones(()))
        ),
        {"softmax_scales": 0.0625},
        {"softmax_scales": "0.0625"},
    ],
    ids=str,
)
def test_options_that_aiter_cannot_have_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        AiterBackend(library=RecordingAiter().library(), **options)


def test_the_budget_of_a_shape_is_the_librarys_where_it_knows_one():
    """R38."""
    asked = []

    def budget(device, *, kv_dtype, head_dim, block_size, query_length, query_group_size, sliding_window=0):
        asked.append((str(device), kv_dtype, head_dim, block_size, query_length, query_group_size, sliding_window))
        return 7

    device = CpuDevice(num_compute_units=304)
    assert backend_on("gfx950").default_workgroup_budget(VLLM, device) == 608
    knowing = backend_on("gfx950", pa_decode_default_workgroup_budget=budget)
    assert knowing.default_workgroup_budget(VLLM, device) == 7
    assert asked == [("cpu", torch.float8_e4m3fn, 256, 64, 1, 16, 0)]
    assert knowing.default_workgroup_budget(VLLM, DeviceMeant(100)) == 200  # an estimate has no device to ask about


def answering(answer: Any) -> Any:
    """Stands for both newer functions that count something."""

    def count(
        device, *, kv_dtype, head_dim, block_size, query_group_size, query_length=1, sliding_window=0
    ):  # fmt: skip
        if isinstance(answer, Exception):
            raise answer
        return answer

    return count


NO_COUNTS = [None, 0, -5, 3.7, float("nan"), "12", NotImplementedError("no such shape"), KeyError("bf16")]


@pytest.mark.parametrize("answer", NO_COUNTS, ids=repr)
def test_a_newer_function_that_gives_no_count_is_as_if_it_were_not_there(answer):
    """They were announced: what is released may answer otherwise, or not for every shape."""
    changes = {
        "pa_decode_default_workgroup_budget": answering(answer),
        "pa_decode_nhd_max_query_length": answering(answer),
    }
    device = CpuDevice(num_compute_units=304)
    assert backend_on("gfx950", **changes).default_workgroup_budget(VLLM, device) == 608
    no, _ = asking(False)
    (reason,) = refuse_by("gfx950", spec=VLLM, can_use_flydsl_pa_decode=no, **changes)
    assert "aiter reads no kv_layout='nhd' of float8_e4m3fn" in reason
    for count in (7, np.int64(7), torch.tensor(7)):  # positive control
        knowing = backend_on("gfx950", pa_decode_default_workgroup_budget=answering(count))
        assert knowing.default_workgroup_budget(VLLM, device) == 7


@pytest.mark.parametrize("name", ["gfx942", "gfx942:sramecc+:xnack-"])
def test_an_architecture_may_be_named_with_its_features(name):
    with aiter_machine(name, generation="G3") as double:
        assert double.arch == "gfx942"
        assert list(AiterBackend().refuse_spec(FNUZ, CpuDevice())) == []
        # With the name that the limits know, so that they can say why.
        (reason,) = AiterBackend().refuse_spec(FN, CpuDevice())
        assert reason.startswith("the FP8 cache of gfx942 is float8_e4m3fnuz")
    assert architecture_name(name) == "gfx942"
