"""What the library does not look at, and the double does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planlife.testing.aiter_double import DoubleViolation, aiter_double, device_side

from .double_call import assert_right, fp8_of, front_of, lens_of, pa_decode, plan_of, valid_call


def test_a_stale_plan_is_a_violation_even_where_no_tile_changed(double):
    call = valid_call(double, (300, 17))
    pa_decode(**call)
    call["context_lengths"].copy_(lens_of(301, 17))
    with pytest.raises(DoubleViolation, match="not refreshed from these lengths"):
        pa_decode(**call)
    plan_of(call["context_lengths"], plan=call["work_plan"])
    pa_decode(**call)
    assert_right(call)


def test_a_stale_plan_answers_for_its_old_lengths():
    with aiter_double(num_cu=8, on_violation="record") as double:
        call = valid_call(double, (290, 17))
        call["context_lengths"].copy_(lens_of(300, 0))
        pa_decode(**call)
        assert_right(call, lens_of(290, 17))
        assert len(double.violations) == 1
        assert double.violations[0].startswith("the plan was not refreshed")


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        *(("work_info", (0, column), value) for column, value in ((0, 1), (1, 1), (2, 0), (3, 299))),
        ("work_info", (1, 1), 0),
        ("work_info", (0, 2), 2),
        ("work_info", (1, 2), 1),
        ("work_info", (8, 2), 3),
        ("reduce_info", (0, 0), 1),
        ("reduce_info", (0, 1), 1),
        ("reduce_info", (1, 1), 0),
        ("reduce_info", (2, 1), 1),
        ("reduce_info", (0, 1), -1),
    ],
)
def test_every_word_of_the_tables_is_compared_with_the_lengths(name, at, value):
    with aiter_double(num_cu=8, on_violation="record") as double:
        call = valid_call(double, (300, 17, 0))
        assert getattr(call["work_plan"], name)[at] != value
        pa_decode(**call)
        assert double.violations == []
        getattr(call["work_plan"], name)[at] = value
        pa_decode(**call)
        assert any("not refreshed" in text for text in double.violations)


def test_a_row_that_is_missing_from_both_tables_is_a_violation(double):
    call = valid_call(double, (300, 17))
    plan = call["work_plan"]
    plan.work_info[2] = plan.reduce_info[1, 1] = 0
    with pytest.raises(DoubleViolation, match="not refreshed"):
        pa_decode(**call)


def test_what_the_kernel_skips_may_be_anything(double):
    call = valid_call(double, (300, 17))
    call["work_plan"].work_info[3:, 0] = 7
    pa_decode(**call)
    assert_right(call)


def test_a_task_of_a_row_that_the_call_does_not_have_is_a_violation(double):
    call = valid_call(double, (300, 17))
    with pytest.raises(DoubleViolation, match="past the query"):
        pa_decode(**front_of(call, 1))
    call["work_plan"].work_info[2, 0] = -1
    with pytest.raises(DoubleViolation, match="past the query"):
        pa_decode(**call)


def test_lengths_beyond_the_promised_bound_and_pages_outside_the_cache_are_violations(double):
    call = valid_call(double, (300, 17))
    pa_decode(**call, max_context_length=300)
    with pytest.raises(DoubleViolation, match="max_context_length"):
        pa_decode(**call, max_context_length=288)
    for page in (-1, call["key_cache"].shape[0]):
        spoilt = call | {"block_tables": call["block_tables"].clone()}
        spoilt["block_tables"][1, 2:] = page  # entries past the row's own pages may be anything
        pa_decode(**spoilt)
        spoilt["block_tables"][1, 1] = page
        with pytest.raises(DoubleViolation, match="no page of the cache"):
            pa_decode(**spoilt)


def test_pages_before_the_window_may_be_anything(double):
    call = valid_call(double, (600,), sliding_window=20)
    call["block_tables"][0, :32] = -1  # tiles of 256 tokens are read from their beginning
    pa_decode(**call)
    assert double.violations == []
    call["block_tables"][0, 32] = -1
    with pytest.raises(DoubleViolation, match="no page"):
        pa_decode(**call)


@pytest.mark.parametrize("options", [{}, {"layout": "packed, plain V"}, {"kv": "bf16"}], ids=str)
def test_v_must_be_finite_to_the_end_of_a_rows_last_page(double, options):
    call = valid_call(double, (300, 17), **options)
    last = int(call["block_tables"][1, 1])
    unowned = int(call["block_tables"][1, 5])
    values = call["value_cache"]
    values[unowned] = float("nan")
    pa_decode(**call)
    assert not call["output"].isnan().any()
    own = valid_call(double, (300, 0), **options)
    own["value_cache"][int(own["block_tables"][1, 0])] = float("nan")  # an empty row has no page
    pa_decode(**own)
    own["value_cache"][int(own["block_tables"][0, 18])].view(-1)[0] = float("nan")  # a token of its own: its answer
    pa_decode(**own)
    assert own["output"].isnan().any()
    where = (last, 0, 0, 0, 5) if values.dim() == 5 else (last, 0, 0, 5)
    values[where] = float("nan")
    with pytest.raises(DoubleViolation, match="not finite"):
        pa_decode(**call)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_nan_of_an_fp8_tail_is_found_and_no_number(arch):
    with aiter_double(arch=arch, num_cu=8, on_violation="record") as double:
        call = valid_call(double, (17,))
        last = call["value_cache"][int(call["block_tables"][0, 1]), 0, 0, 0].view(torch.uint8)
        stands_for = torch.arange(256, dtype=torch.uint8).view(fp8_of(double)).float()
        assert stands_for.isnan().any()
        for byte in range(256):
            last[5] = byte
            pa_decode(**call)
            assert bool(double.violations) == bool(stands_for[byte].isnan()), byte
            double.violations.clear()


def test_tails_may_be_poisoned_where_that_is_said():
    with aiter_double(num_cu=8, finite_tails=False) as double:
        call = valid_call(double, (300, 17), kv="bf16")
        call["value_cache"][int(call["block_tables"][1, 1]), 0, 0, 0, 5] = float("nan")
        pa_decode(**call)
        assert not call["output"].isnan().any()


def test_queries_must_start_on_four_bytes_except_on_gfx1250():
    for arch in ("gfx942", "gfx1250"):
        with aiter_double(arch=arch, num_cu=8, on_violation="record") as double:
            call = valid_call(double)
            wide = torch.zeros(*call["query"].shape[:2], 65, dtype=torch.bfloat16)
            wide[..., :64] = call["query"]
            pa_decode(**call | {"query": wide[..., :64]})
            assert bool(double.violations) == (arch == "gfx942")
            assert_right(call)


def test_scratch_that_overlaps_within_a_call_is_a_violation(double):
    call = valid_call(double)
    with pytest.raises(DoubleViolation, match="overlap"):
        pa_decode(**call | {"exp_sums": call["max_logits"]})
    pa_decode(**call | {"exp_sums": call["max_logits"], "max_logits": call["exp_sums"]})  # nobody can tell


def test_live_plans_share_scratch_one_after_another_only_where_that_is_allowed():
    for is_private in (False, True):
        with aiter_double(num_cu=8, private_scratch=is_private, on_violation="record") as double:
            call, other = valid_call(double), valid_call(double)
            triple = {name: call[name] for name in ("exp_sums", "max_logits", "temporary_output")}
            pa_decode(**call)
            pa_decode(**call)
            assert double.violations == []
            pa_decode(**other | triple)
            assert bool(double.violations) == is_private
            del double.violations[:], call
            pa_decode(**other | triple)
            assert double.violations == []


def test_scratch_that_another_call_writes_meanwhile_is_a_violation(double, monkeypatch):
    call = valid_call(double)
    attend = device_side.attend_on_host

    def with_another_call_in_flight(*args: Any) -> None:
        attend(*args)
        call["exp_sums"].fill_(0)

    pa_decode(**call)
    monkeypatch.setattr(device_side, "attend_on_host", with_another_call_in_flight)
    with pytest.raises(DoubleViolation, match="overwritten"):
        pa_decode(**call)


def test_what_is_launched_bumps_no_version_and_serves_engines_in_and_out_of_inference_mode(double):
    call = valid_call(double, (300, 17))
    tables = (call["work_plan"].work_info, call["work_plan"].reduce_info, call["output"], call["exp_sums"])
    before = [table._version for table in tables]
    plan_of(call["context_lengths"], plan=call["work_plan"])
    pa_decode(**call)
    assert [table._version for table in tables] == before
    with torch.inference_mode():
        plan = plan_of(call["context_lengths"])
    plan_of(call["context_lengths"], plan=plan)
    pa_decode(**call | {"work_plan": plan})
    assert_right(call)
