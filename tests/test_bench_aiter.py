"""The aiter bench times the wrapper beside the call that it wraps, and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from click.testing import CliRunner

from planlife import bench_aiter
from planlife.commands import planlife as command
from planlife.errors import ConfigError
from planlife.testing.aiter_double import GENERATIONS
from planlife.testing.aiter_double.signatures import decode_signature, plan_signature
from planlife.testing.aiter_machine import aiter_machine

CALLS = ["BF16", "FP8, tensor scales", "FP8, number scales", "FP8, per token"]


def parameters(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in signature.parameters.values()]


def test_what_returns_at_once_has_the_librarys_signature() -> None:
    """Binding so many keywords is a part of the price, on both sides."""
    real = GENERATIONS["G3"]
    assert parameters(inspect.signature(bench_aiter.decode_nothing)) == parameters(decode_signature(real))
    plan = plan_signature(real, with_max_batch_size=False)
    assert parameters(inspect.signature(bench_aiter.plan_nothing)) == parameters(plan)


def test_every_kind_of_scale_is_timed_wrapped_and_bare_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    signature = inspect.signature(bench_aiter.decode_nothing)

    def decode(*args: Any, **kwargs: Any) -> None:
        given.append(signature.bind(*args, **kwargs).arguments)

    decode.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(bench_aiter, "decode_nothing", decode)
    rounds, calls = 3, 2
    (report,), left_out = bench_aiter.measure_wrapper(num_rounds=rounds, calls_per_round=calls)
    assert "not installed" in left_out and [figure.call for figure in report.figures] == CALLS
    for figure in report.figures:
        assert len(figure.wrapped_us) == len(figure.bare_us) == len(figure.writes_us) == rounds
        assert min(figure.bare_us) > 0 and figure.added_us == min(figure.wrapped_us) - min(figure.bare_us)
        assert bool(min(figure.writes_us)) == (figure.call == "FP8, number scales")
        assert bool(min(figure.spared_us)) == (figure.call == "FP8, number scales")
        assert figure.added_to_aiter_us == figure.added_us - min(figure.spared_us)
    # The tables are the bench's: those of the warm-up are the backend's own.
    timed = [call for call in given if call["context_lengths"].tolist() == [100] * 8]
    per_side = len(CALLS) * rounds * calls * bench_aiter.NUM_LAYERS
    numbers = [call for call in timed if isinstance(call.get("key_scale"), float)]
    assert len(timed) == 2 * per_side and len(numbers) == per_side / len(CALLS)
    wanted = {"compute_type", "work_plan", "exp_sums", "max_logits", "temporary_output", "max_context_length"}
    assert all(wanted <= set(call) for call in timed)


def test_an_installed_aiter_is_timed_where_it_serves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with aiter_machine("gfx950") as double:
        monkeypatch.setattr(bench_aiter, "architecture_of", lambda device: "gfx950")
        reports, left_out = bench_aiter.measure_wrapper(num_rounds=1, calls_per_round=1)
        assert left_out == "" and [report.library for report in reports][1] == "the installed aiter"
        assert [figure.call for figure in reports[1].figures] == CALLS and double.decodes > 2 * len(CALLS)
        monkeypatch.setattr(bench_aiter, "architecture_of", lambda device: "gfx90a")
        reports, left_out = bench_aiter.measure_wrapper(num_rounds=1, calls_per_round=1)
        assert len(reports) == 1 and "not for gfx90a" in left_out
    with aiter_machine("gfx942", native_bf16=False):
        monkeypatch.setattr(bench_aiter, "architecture_of", lambda device: "gfx942")
        reports, _ = bench_aiter.measure_wrapper(num_rounds=1, calls_per_round=1)
        assert [figure.call for figure in reports[1].figures] == CALLS[1:]  # what it does not serve is left out


def test_the_command_prints_every_figure_and_why_no_installed_aiter_is_among_them() -> None:
    result = CliRunner().invoke(command, ["bench", "aiter", "--rounds", "30", "--calls", "1"])
    assert result.exit_code == 0, result.output
    for text in (
        *CALLS,
        "added to aiter",
        "launches",
        "aiter's own",
        "Not measured over an installed aiter: 'aiter' is not",
    ):
        assert text in result.output
    assert CliRunner().invoke(command, ["bench", "aiter", "--rounds", "29"]).exit_code == 2


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, None])
def test_bad_counts_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="num_rounds"):
        bench_aiter.measure_wrapper(num_rounds=bad)
    with pytest.raises(ConfigError, match="calls_per_round"):
        bench_aiter.measure_wrapper(calls_per_round=bad)
