"""The demo engine: every output is right in both styles, and each thing it checks can fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from planlife import BackendUnavailableError, ConfigError, PlanManager, StalePlanError, Step
from planlife.demo import DemoConfig, DemoResult, engine, run_demo
from planlife.demo.check import DenseCheck
from planlife.demo.config import CAPTURE_ROWS, HEAD_DIM, STYLES
from planlife.demo.kv_pool import KVPool, KVTokens
from planlife.demo.model import StepBuffers
from planlife.demo.scheduler import Arrival, Running, Scheduler, TokenSource, arrivals_from_trace
from planlife.testing import EmulatedGraph
from planlife.trace import Request

STEPS = 60
MAX_PROMPT_TOKENS = DemoConfig().max_prompt_tokens
#: One run each, beside the default one: every cache, layout and kind of scales, long and short drafts, wide windows.
KINDS = (
    DemoConfig(kv="fp8", layout="packed", mtp=5, max_steps=16),
    DemoConfig(kv="fp8", layout="packed", mtp=5, max_steps=16, style="in-graph"),
    DemoConfig(window=1024, max_steps=60),
    DemoConfig(window=1024, max_steps=60, style="in-graph"),
    DemoConfig(kv="fp8", scales="per_token", layout="packed", mtp=7, window=1, max_steps=16),
    DemoConfig(kv="fp8", scales="per_token", mtp=1, window=17, max_steps=16, style="in-graph"),
    DemoConfig(kv="fp8", layout="hnd", mtp=2, max_steps=16, style="in-graph"),
    DemoConfig(kv="fp16", layout="packed", max_steps=16),
    DemoConfig(kv="fp8_fnuz", layout="packed", mtp=1, max_steps=16),
)


def _name(config: DemoConfig) -> str:
    style, kind = config.style, f"{config.kv} {config.kv_scales} {config.layout}"
    return f"{style}, {kind}, mtp {config.mtp}, window {config.window}"


@pytest.fixture(scope="module")
def results() -> dict[str, DemoResult]:
    return {style: run_demo(DemoConfig(style=style, max_steps=STEPS)) for style in STYLES}


@pytest.mark.parametrize("style", STYLES)
def test_every_output_of_a_run_equals_dense_attention(results: dict[str, DemoResult], style: str) -> None:
    result = results[style]

    assert result.num_mismatches == 0, result.first_mismatch
    assert result.num_rows_compared > 1000
    assert 0 < result.largest_error < 1e-2
    assert result.ok


@pytest.mark.parametrize("style", STYLES)
def test_a_short_run_meets_every_kind_of_step(results: dict[str, DemoResult], style: str) -> None:
    counts = results[style].counts

    assert counts.steps == counts.replayed + counts.eager + counts.fallback + counts.dummy == STEPS
    assert counts.fallback == 0
    for kind in ("replayed", "eager", "dummy", "dummy_replayed", "verify", "ubatch", "recaptured", "tokens"):
        assert getattr(counts, kind) > 0, kind
    assert 0 < counts.dummy_replayed < counts.dummy
    assert 0 < counts.draft_passes_replayed < counts.draft_passes


@pytest.mark.parametrize("config", KINDS, ids=_name)
def test_every_kind_of_cache_draft_and_window_is_served_right(config: DemoConfig) -> None:
    result = run_demo(config)
    counts, shown = result.counts, dict(result.rows())

    assert result.ok, result.first_mismatch
    assert result.report.counters["compiles_after_seal"] == 0
    assert counts.fallback == 0
    assert counts.verify > 0 and counts.replayed > 0 and counts.eager > 0
    assert counts.draft_passes == counts.verify * config.mtp
    assert 0 < counts.draft_passes_replayed < counts.draft_passes
    assert 0 < counts.drafts_accepted < counts.drafts_verified
    assert 0 < result.num_rows_cut < result.num_rows_compared, "the window hid nothing: the run says nothing about it"
    assert config.layout in shown["KV cache"] and config.kv_scales in shown["KV cache"]
    assert shown["verify passes"].endswith(f"query length {config.mtp + 1}")


def test_drafts_are_accepted_unevenly_from_row_to_row_and_step_to_step() -> None:
    config = DemoConfig(mtp=5)
    scheduler = Scheduler([Arrival(0.0, 30, 64)] * 8, KVPool(config, num_pages=600), config)
    scheduler.advance()
    before, patterns = [request.num_tokens for request in scheduler.running], set()
    for _ in range(4):
        total = scheduler.accept(config.verify_tokens)
        after = [request.num_tokens for request in scheduler.running]
        kept = tuple(new - old for new, old in zip(after, before, strict=True))
        assert sum(kept) == total
        assert set(kept) <= set(range(1, config.verify_tokens + 1))
        assert len(set(kept)) > 1
        patterns.add(kept)
        before = after
    assert len(patterns) == 4


def test_the_lengths_of_a_verify_step_include_its_drafts() -> None:
    config = DemoConfig(mtp=5)
    request = Running(0, 30, 64, 8, 0, [1, 2, 3])
    batch = TokenSource(config).batch([request], query_length=config.verify_tokens)

    assert batch.context_lens == (36,)
    assert batch.positions[0].tolist() == [30, 31, 32, 33, 34, 35]
    assert batch.query_length == 6


@pytest.mark.parametrize("style", STYLES)
def test_the_figures_are_the_managers_own(results: dict[str, DemoResult], style: str) -> None:
    result = results[style]
    report = result.report
    counters = report.counters
    shown = dict(result.rows())

    assert counters["compiles_after_seal"] == 0
    assert counters["evictions"] > 0
    assert counters["rematerialised"] > 0
    assert 0 < report.resident_bytes <= report.peak_bytes <= report.worst_case_bytes == report.budget_bytes
    assert report.num_graphs > 0
    assert shown["plan bytes resident"] == f"{report.resident_bytes:,}"
    assert shown["refreshes"] == f"{counters['refreshes']:,}"
    assert shown["mismatches"] == "0"
    assert "first mismatch" not in shown


def test_a_run_repeats_itself_exactly() -> None:
    first, second = (run_demo(DemoConfig(max_steps=10, seed=3)) for _ in range(2))

    assert first.counts == second.counts
    assert first.largest_error == second.largest_error
    assert first.report.counters == second.report.counters


def test_progress_starts_at_one_never_falls_and_ends_at_the_total() -> None:
    calls: list[tuple[int, int, str]] = []

    run_demo(DemoConfig(max_steps=5), progress=lambda *call: calls.append(call))

    done = [call[0] for call in calls]
    assert done[0] == 1
    assert done == sorted(done)
    assert done[-1] == calls[-1][1]
    assert len({call[1] for call in calls}) == 1
    assert any("captured decode/12" in text for _, _, text in calls)
    assert any("step 0" in text for _, _, text in calls)


@pytest.mark.parametrize("style", STYLES)
def test_a_budget_too_small_for_all_graphs_still_serves_everything_right(style: str) -> None:
    with PlanManager(
        engine.site_specs(DemoConfig()), ladder=engine.CapacityLadder(engine.LADDER_ROWS), device="cpu", ubatches=2
    ) as manager:
        budget_bytes = manager.min_budget_bytes()

    result = run_demo(DemoConfig(style=style, max_steps=24, budget_bytes=budget_bytes))

    assert result.ok, result.first_mismatch
    assert result.num_graphs_refused > 0
    assert result.counts.fallback + result.counts.eager > 0
    assert result.report.peak_bytes <= budget_bytes < result.report.worst_case_bytes


def _eager_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CAPTURE_ROWS", dict.fromkeys(CAPTURE_ROWS, ()))


def _serve_the_previous_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that plans a row count once and then hands out what it has."""
    plan_for = PlanManager.plan_for
    previous: dict[tuple[Any, ...], Any] = {}

    def stale_plan_for(self: PlanManager, step: Any) -> Any:
        key = (step.key, len(step.context_lens), step.dummy)
        if key not in previous:
            previous[key] = plan_for(self, step)
        return previous[key]

    monkeypatch.setattr(PlanManager, "plan_for", stale_plan_for)


@pytest.mark.parametrize("config", [DemoConfig(), *KINDS[::2]], ids=_name)
def test_a_stale_plan_shows_as_a_mismatch_where_nothing_guards_the_step(
    monkeypatch: pytest.MonkeyPatch, config: DemoConfig
) -> None:
    config = dataclasses.replace(config, max_steps=12)
    _eager_only(monkeypatch)
    control = run_demo(config)
    _serve_the_previous_plan(monkeypatch)

    result = run_demo(config)

    assert control.ok
    assert control.counts.replayed == 0
    assert result.num_mismatches > 0
    assert not result.ok
    assert dict(result.rows())["first mismatch"] == result.first_mismatch != ""


@pytest.mark.parametrize("config", [DemoConfig(), DemoConfig(style="in-graph"), *KINDS[:4]], ids=_name)
def test_a_stale_plan_is_refused_where_a_graph_would_replay_it(
    monkeypatch: pytest.MonkeyPatch, config: DemoConfig
) -> None:
    _serve_the_previous_plan(monkeypatch)

    with pytest.raises(StalePlanError):
        run_demo(dataclasses.replace(config, max_steps=12))


@pytest.mark.parametrize("site", ["dense", "window", "verify", "verify_window", "draft"])
def test_a_plan_that_is_one_token_behind_shows_at_its_site(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    plan_for = PlanManager.plan_for

    def plan_for_earlier(self: PlanManager, step: Any) -> Any:
        if step.site == site and not step.dummy:
            step = Step(step.context_lens - 1, site=site, ubatch=step.ubatch)
        return plan_for(self, step)

    _eager_only(monkeypatch)
    monkeypatch.setattr(PlanManager, "plan_for", plan_for_earlier)

    result = run_demo(DemoConfig(kv="fp8", layout="packed", mtp=5, max_steps=6))

    assert not result.ok
    assert (" draft 0," if site == "draft" else f" {site}/ub0,") in result.first_mismatch


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize("scales", ["per_tensor", "per_token"])
def test_a_scale_of_another_layer_shows_as_a_mismatch(monkeypatch: pytest.MonkeyPatch, scales: str, name: str) -> None:
    config = DemoConfig(kv="fp8", scales=scales, max_steps=2)
    assert run_demo(config).ok
    pa_decode = PlanManager.pa_decode
    pools: list[KVPool] = []
    make_pool = KVPool.__init__

    def remember(self: KVPool, *args: Any, **kwargs: Any) -> None:
        make_pool(self, *args, **kwargs)
        pools.append(self)

    def decode(self: PlanManager, *args: Any, **kwargs: Any) -> Any:
        (pool,) = pools
        (layer,) = (n for n in range(3) if pool.key[n].data_ptr() == args[3].data_ptr())
        others = dict(zip(("key_scale", "value_scale"), pool.scales_of((layer + 1) % 3), strict=True))
        return pa_decode(self, *args, **{**kwargs, name: others[name]})

    monkeypatch.setattr(KVPool, "__init__", remember)
    monkeypatch.setattr(PlanManager, "pa_decode", decode)
    assert run_demo(config).num_mismatches > 0


@pytest.mark.parametrize("only", ["eager", "replayed"])
def test_one_wrong_output_row_is_found(monkeypatch: pytest.MonkeyPatch, only: str) -> None:
    if only == "eager":
        _eager_only(monkeypatch)
    pa_decode = PlanManager.pa_decode

    def corrupt(self: PlanManager, plan: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        pa_decode(self, plan, output, *args, **kwargs)
        if plan.site == "verify_window":
            output[0, -1, -1].add_(0.5)
        return output

    monkeypatch.setattr(PlanManager, "pa_decode", corrupt)

    result = run_demo(DemoConfig(max_steps=12))

    assert not result.ok
    assert result.num_mismatches == result.counts.verify > 0
    assert "verify verify_window/ub0, output row 0 of" in result.first_mismatch


def test_a_padded_row_that_is_not_zero_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pa_decode = PlanManager.pa_decode

    def corrupt(self: PlanManager, plan: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        pa_decode(self, plan, output, *args, **kwargs)
        if plan.site == "draft" and output.shape[0] == 4:
            output[3:].add_(1e-6)
        return output

    monkeypatch.setattr(PlanManager, "pa_decode", corrupt)

    result = run_demo(DemoConfig(max_steps=6))

    assert "padding" in result.first_mismatch
    assert not result.ok


def test_a_class_that_was_forgotten_in_the_warm_up_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(PlanManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, on_miss="mint", **kwargs)

        def warm(self, rows: Any = None) -> None:
            super().warm(1)

    monkeypatch.setattr(engine, "PlanManager", Forgetful)
    _eager_only(monkeypatch)

    result = run_demo(DemoConfig(max_steps=12))

    assert result.report.counters["compiles_after_seal"] > 0
    assert result.num_mismatches == 0
    assert not result.ok


@pytest.mark.parametrize("style", STYLES)
def test_a_run_names_its_device_backend_and_graphs(results: dict[str, DemoResult], style: str) -> None:
    shown = dict(results[style].rows())

    assert shown["device"] == "cpu"
    assert shown["backend"] == "torch"
    assert shown["graphs are"] == f"{EmulatedGraph.__module__}.EmulatedGraph"
    assert shown["Triton's own count after seal"] == "not used"


def test_a_run_without_graphs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _eager_only(monkeypatch)

    assert dict(run_demo(DemoConfig(max_steps=1)).rows())["graphs are"] == "none"


@pytest.mark.parametrize("device", ["tpu", "cuda:x"])
def test_a_device_that_is_none_is_refused_before_anything_runs(device: str) -> None:
    progress: list[str] = []

    with pytest.raises((ConfigError, BackendUnavailableError), match=device):
        run_demo(DemoConfig(device=device), progress=lambda done, total, text: progress.append(text))

    assert progress == []


def test_a_run_that_compared_nothing_is_not_ok(results: dict[str, DemoResult]) -> None:
    good = results["in-graph"]

    assert not dataclasses.replace(good, num_rows_compared=0).ok


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"style": "piecewise"}, "style"),
        ({"max_steps": 0}, "max_steps"),
        ({"max_steps": True}, "max_steps"),
        ({"seed": -1}, "seed"),
        ({"num_layers": 1}, "num_layers"),
        ({"kv": "int4"}, "kv must be one of bf16, fp16, fp8, fp8_fnuz, got 'int4'"),
        ({"layout": "nhdx"}, "layout must be one of nhd, hnd, packed, got 'nhdx'"),
        ({"scales": "per_head", "kv": "fp8"}, "scales must be one of per_tensor, per_token, or None, got 'per_head'"),
        ({"scales": "per_token"}, "scales='per_token' does not go with kv='bf16'.* Leave scales out, or pass kv='fp8'"),
        ({"mtp": 0}, r"mtp must be in \[1, 7\], got 0"),
        ({"mtp": 8}, r"mtp must be in \[1, 7\], got 8"),
        ({"window": 0}, r"window must be in \[1, 8192\], got 0"),
        ({"window": True}, "window must be an int"),
        ({"budget_bytes": 0}, "budget_bytes"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"trace_path": 7}, "trace_path"),
        ({"device": 0}, "device"),
        ({"backend": "gluon"}, "backend must be one of auto, torch, triton, aiter, got 'gluon'"),
        ({"double": "gfx90a", "backend": "aiter"}, "double must be one of gfx942, gfx950, gfx1250, or None"),
        ({"double": "gfx942"}, "double='gfx942' does not go with backend='auto'.* Pass backend='aiter', or leave"),
        ({"aiter_generation": "G1d"}, "aiter_generation must be one of G2, G3, G4, newer, or None, got 'G1d'"),
        (
            {"backend": "aiter", "layout": "packed", "aiter_generation": "newer"},
            "aiter_generation='newer' does not go without a double: what is installed has the generation that it has",
        ),
        ({"memory_bytes": 2**63}, r"memory_bytes must be in \[1, 9223372036854775807\], got 9223372036854775808"),
        ({"budget_bytes": 2**63}, r"budget_bytes must be in \[1, 9223372036854775807\], got 9223372036854775808"),
    ],
)
def test_a_config_that_can_never_work_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DemoConfig(**change)


def test_a_memory_that_the_device_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cpu has no room for the .* KV pages that memory_bytes=.*Lower memory_bytes"):
        run_demo(DemoConfig(memory_bytes=2**63 - 1))


def test_a_memory_that_leaves_no_room_for_the_kv_pool_is_refused_before_anything_is_allocated() -> None:
    progress: list[str] = []

    with pytest.raises(ConfigError, match="memory_bytes to at least"):
        run_demo(DemoConfig(memory_bytes=1 << 19), progress=lambda done, total, text: progress.append(text))

    assert progress == []


def test_requests_that_are_too_long_are_folded_and_counted() -> None:
    requests = [
        Request(0.0, 10, 5),
        Request(1.0, MAX_PROMPT_TOKENS, 64),
        Request(2.0, MAX_PROMPT_TOKENS + 1, 5),
        Request(3.0, 0, 0),
        Request(4.0, 3 * MAX_PROMPT_TOKENS + 7, 1000),
    ]

    arrivals, num_clipped = arrivals_from_trace(requests, DemoConfig(max_steps=100))

    assert [arrival.prompt_tokens for arrival in arrivals] == [10, MAX_PROMPT_TOKENS, 1, 1, 7]
    assert [arrival.output_tokens for arrival in arrivals] == [5, 64, 5, 1, 64]
    assert num_clipped == 2
    assert [arrival.step for arrival in arrivals] == sorted(arrival.step for arrival in arrivals)


def test_requests_that_all_arrive_at_once_are_all_served() -> None:
    arrivals, _ = arrivals_from_trace([Request(0.0, 8, 4)] * 3, DemoConfig(max_steps=100))

    assert [arrival.step for arrival in arrivals] == [0.0, 0.0, 0.0]


def test_an_idle_gap_is_served_as_dummies_and_then_skipped(tmp_path: Any) -> None:
    trace = tmp_path / "gap.csv"
    trace.write_text("timestamp_ms,input_tokens,output_tokens\n0,20,2\n900000,20,64\n")
    texts: list[str] = []

    result = run_demo(DemoConfig(max_steps=80, trace_path=trace), progress=lambda done, total, text: texts.append(text))

    kinds = [text.split()[2].rstrip(",") for text in texts if text.startswith("step")]
    gap = kinds.index("dummy")
    assert gap > 0
    assert kinds[gap : gap + 2] == ["dummy", "dummy"]
    assert kinds[gap + 2] != "dummy"
    assert result.num_finished == 2
    assert result.ok
    assert texts[-1] == "served"


def _dims() -> dict[str, int]:
    return {"num_cache_rows": 3, "max_context_tokens": 40, "num_kv_heads": 2, "head_dim": 4}


def _check_with_history() -> tuple[DenseCheck, torch.Tensor, torch.Tensor]:
    check = DenseCheck(num_layers=2, **_dims())
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(80, 2, 4, generator=generator).bfloat16() for _ in range(2))
    rows = torch.tensor([0] * 40 + [2] * 40)
    check.record(1, rows, torch.arange(40).repeat(2), key, value)
    return check, key.double().view(2, 40, 2, 4), value.double().view(2, 40, 2, 4)


@pytest.mark.parametrize("window", [0, 5])
def test_the_comparison_itself_agrees_with_attention_written_out(window: int) -> None:
    check, key, value = _check_with_history()
    lens, query_length = (33, 4), 3
    query = torch.randn(6, 6, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = torch.zeros(6, 6, 4, dtype=torch.float64)
    for token in range(6):
        row, p = divmod(token, query_length)
        end = lens[row] - query_length + 1 + p
        begin = max(0, end - window) if window else 0
        for head in range(6):
            k, v = (cache[row, begin:end, head // 3] for cache in (key, value))
            weights = (k @ query[token, head].double() / 4**0.5).exp()
            wanted[token, head] = (weights[:, None] * v).sum(0) / weights.sum()

    def compare(output: Any) -> int:
        before = check.num_mismatches
        check.compare("here", 1, output, query, cache_rows=(0, 2), context_lens=lens, window_tokens=window)
        return check.num_mismatches - before

    assert compare(wanted) == 0
    assert check.largest_error < 1e-12
    assert compare(wanted + 0.1) == 6
    one_off = wanted.clone()
    one_off[4, 2] = torch.nan
    assert compare(one_off) == 1
    assert check.num_rows_compared == 18


def test_what_is_found_is_the_same_however_seldom_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for max_pending in (1, 3, 1000):
        monkeypatch.setattr("planlife.demo.check._MAX_PENDING", max_pending)
        check = DenseCheck(num_layers=1, **_dims())
        for call in range(5):
            output = torch.zeros(4, 2, 4)
            output[call - 1 :, 0, 0] = 0.25 * call if call else torch.nan
            check.compare_zeros(f"call {call}", output)
        found.append((check.num_rows_compared, check.num_mismatches, check.first_mismatch))

    assert found == [(20, 1 + 4 + 3 + 2 + 1, "call 0, output row 3 of 4: off by nan")] * 3


@pytest.mark.parametrize("scales", [None, "per_token"])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed"])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "fp8_fnuz"])
def test_pages_are_recycled_oldest_first_and_hold_nan_while_nobody_owns_them(
    kv: str, layout: str, scales: str | None
) -> None:
    config = DemoConfig(kv=kv, layout=layout, scales=None if kv == "bf16" else scales)
    pool = KVPool(config, num_pages=6)
    pages = pool.allocate(2)
    new = KVTokens.store(*torch.ones(2, 1, 32, 2, HEAD_DIM), [0], config)
    slots = torch.tensor(pages).repeat_interleave(16) * 16 + torch.arange(16).repeat(2)
    parts = (new.key, new.value, new.key_scale, new.value_scale)
    pool.write(0, slots, *(part[0] for part in parts if part is not None))
    per_token = pool.scales_of(0) if config.kv_scales == "per_token" else ()
    for tensor in (pool.key[0], pool.value[0], *per_token):
        assert not tensor[pages].float().isnan().any()
        assert tensor[0].float().isnan().all()

    pool.release(pages)

    assert pages == [1, 2]
    for tensor in (pool.key, pool.value, *(pool.scales_of(slice(None)) if per_token else ())):
        assert tensor.float().isnan().all()
    assert pool.allocate(4) == [3, 4, 5, 1]
    with pytest.raises(RuntimeError, match="2 KV pages asked for, 1 of 6 free"):
        pool.allocate(2)


@pytest.mark.parametrize("scales", [None, "per_token"])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "fp8_fnuz"])
def test_a_page_with_finite_tails_holds_none_but_large_numbers_while_somebody_owns_it(
    kv: str, scales: str | None
) -> None:
    config = DemoConfig(kv=kv, layout="packed", scales=None if kv == "bf16" else scales)
    pool = KVPool(config, num_pages=5, finite_tails=True)
    pages = pool.allocate(2)
    per_token = pool.scales_of(slice(None)) if config.kv_scales == "per_token" else ()

    for owned in (0, *pages):
        for tensor in (pool.key, pool.value, *per_token):
            assert tensor[:, owned].float().isfinite().all()
        assert pool.value[:, owned].float().min() > 200
    for tensor in (pool.key, pool.value, *per_token):
        assert tensor[:, 3:].float().isnan().all()
    pool.release(pages)
    for tensor in (pool.key, pool.value, *per_token):
        assert tensor[:, pages].float().isnan().all()


@pytest.mark.parametrize("scales", ["per_tensor", "per_token"])
def test_what_an_fp8_cache_stands_for_is_what_was_stored_to_three_bits(scales: str) -> None:
    """The comparison takes these numbers for the truth, so that its tolerance is the kernel's alone."""
    key, value = torch.randn(2, 2, 50, 2, 32, generator=torch.Generator().manual_seed(0))
    stored = KVTokens.store(key, value, [0, 1], DemoConfig(kv="fp8", scales=scales))

    assert stored.key.dtype == stored.value.dtype == torch.float8_e4m3fn
    for call in range(2):
        for meant, exact in zip(stored.meant(call), (key[call], value[call]), strict=True):
            error = (meant - exact).norm(dim=-1) / exact.norm(dim=-1)
            assert 0 < error.max() < 2**-4
    if scales == "per_tensor":
        assert stored.key_scale is not None and stored.key_scale[0, 0, 0] != stored.key_scale[1, 0, 0]


def test_rows_behind_a_batch_have_no_length_and_whatever_tables_were_there() -> None:
    def request(tokens: int, pages: list[int]) -> Running:
        return Running(0, tokens, 1, len(pages), 0, pages)

    config = DemoConfig(kv="fp8", scales="per_token")
    source = TokenSource(config)
    buffers = StepBuffers(config, num_rows=3, query_length=1, num_calls=2)
    buffers.load(source.batch([request(3, [5]), request(17, [2, 4])], query_length=1))
    buffers.load(source.batch([request(16, [1, 3])], query_length=1))

    assert buffers.context_lens.tolist() == [17, 0, 0]
    assert buffers.block_tables[0, :3].tolist() == [1, 3, -1]
    assert buffers.block_tables[1, :2].tolist() == [2, 4]
    assert buffers.slots.tolist() == [[3 * 16, 0, 0]] * 2
    assert buffers.key_scale is not None and buffers.value_scale is not None
    for inputs in (buffers.query, buffers.key, buffers.value, buffers.key_scale, buffers.value_scale):
        assert not inputs[:, 0].float().isnan().any()
        assert inputs[:, 1:].float().isnan().all()
    assert buffers.output.isnan().all()
    assert torch.equal(buffers.active, torch.tensor([1, 0, 0], dtype=torch.int32))


@pytest.mark.parametrize(("load", "page"), [("load_dummy", -1), ("load_capture", 0)])
def test_a_batch_extends_the_tables_that_a_dummy_or_a_capture_left(load: str, page: int) -> None:
    config = DemoConfig()
    batch = TokenSource(config).batch([Running(0, 16, 1, 2, 0, [1, 3])], query_length=1)
    buffers = StepBuffers(config, num_rows=2, query_length=1, num_calls=2)
    buffers.load_dummy(5) if load == "load_dummy" else buffers.load_capture()
    assert (buffers.block_tables == page).all()
    buffers.load(batch)

    assert buffers.block_tables[0, :2].tolist() == [1, 3]
    assert (buffers.block_tables[0, 2:] == page).all() and (buffers.block_tables[1] == page).all()


def test_a_run_leaves_torchs_thread_count_as_it_was() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        run_demo(DemoConfig(max_steps=1))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_requests_wait_while_the_pool_cannot_hold_all_their_pages() -> None:
    most_rows = {}
    for memory_bytes in (2_000_000, 16 << 20):
        rows = []
        result = run_demo(
            DemoConfig(max_steps=45, memory_bytes=memory_bytes),
            progress=lambda done, total, text, rows=rows: rows.append(text),  # type: ignore[misc]
        )
        assert result.ok
        most_rows[memory_bytes] = max(int(text.split()[3]) for text in rows if "rows" in text and "dummy" not in text)

    assert 1 <= most_rows[2_000_000] < most_rows[16 << 20]
