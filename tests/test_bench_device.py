"""`planlife bench device`: refusals without a GPU, and what is printed of what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from planlife import bench_device
from planlife.bench_device import SHAPES, Cost, DecodeRate, DeviceReport, measure_device
from planlife.commands import planlife as command
from planlife.errors import BackendUnavailableError, ConfigError

REPORT = DeviceReport(
    device="cuda:3",
    gpu="A GPU [of] ours",
    backend="triton",
    l2_bytes=50 << 20,
    roofs={"copy": 2e12, "sum": 4e12},
    host=(Cost("plan_for, skipped", "nothing else", (1.0, 3.0, 2.5), "one torch op", 5.0),),
    refreshes=(Cost("refresh, 8 rows", "one more", (2.0,), "one torch op", 1.0),),
    decodes=(DecodeRate("short", 264, 1_000_000, 200, (0.5, 0.4, 4.5)),),
    sanitizer=(Cost("eager step, count", "host time", (30.0,), "sanitize='off'", 20.0),),
    left_out="skew: too long",
)


def test_a_cpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"device='cpu'.*pass 'cuda'.*planlife bench host"):
        measure_device(device="cpu")
    result = CliRunner().invoke(command, ["bench", "device", "--device", "cpu"])
    assert result.exit_code == 2
    assert result.stdout == "" and "planlife bench host" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_where_there_is_no_gpu_the_refusal_says_where_to_run_it() -> None:
    with pytest.raises(BackendUnavailableError, match="sees none here: run it where there is one"):
        measure_device()
    result = CliRunner().invoke(command, ["bench", "device"])
    assert result.exit_code == 1
    assert "planlife bench host" in result.stderr


@pytest.mark.parametrize("bad", [0, True, 1.5])
def test_bad_numbers_of_samples_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="num_samples"):
        measure_device(num_samples=bad)  # type: ignore[arg-type]


def test_ratios_and_rates_are_of_medians() -> None:
    (cost,), (rate,) = REPORT.host, REPORT.decodes
    assert (cost.median_us, cost.ratio) == (2.5, 0.5)
    assert rate.bytes_per_second == pytest.approx(1_000_000 / 0.5e-6)
    assert REPORT.roof_bytes_per_second == 4e12


def test_what_is_printed_stands_beside_its_peer_and_what_it_includes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(**options: object) -> DeviceReport:
        asked.append(options)
        return REPORT

    monkeypatch.setattr(bench_device, "measure_device", measure)
    shown = CliRunner().invoke(command, ["bench", "device", "--backend", "torch", "--device", "cuda:3"])
    assert shown.exit_code == 0, shown.output
    assert (asked[0]["backend"], asked[0]["device"]) == ("torch", "cuda:3")
    lines = [" ".join(line.replace("|", " ").split()) for line in shown.output.splitlines()]
    assert "triton on cuda:3, A GPU [of] ours, L2 50.0 MiB" in lines
    assert "plan_for, skipped 2.50 1.00 3.00 one torch op 5.00 0.50" in lines
    assert "plan_for, skipped: nothing else." in lines
    assert "eager step, count 30.00 30.00 30.00 sanitize='off' 20.00 1.50" in lines
    assert "short 264 1,000,000 200 0.50 0.40 4.50 2.00 0.50" in lines
    assert "Left out: skew: too long." in lines
    assert any("copy 2.00, sum 4.00" in line for line in lines)


def test_the_json_has_every_sample_and_what_follows_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_device, "measure_device", lambda **options: REPORT)
    found = json.loads(CliRunner().invoke(command, ["bench", "device", "--json"]).stdout)
    names = {field.name for field in dataclasses.fields(DeviceReport)}
    assert found.keys() == names | {"roof_bytes_per_second"}
    assert found["host"][0]["samples_us"] == [1.0, 3.0, 2.5]
    assert found["host"][0]["ratio"] == 0.5
    assert found["decodes"][0]["of_roof"] == pytest.approx(0.5)


def test_the_shapes_are_those_of_the_baselines() -> None:
    assert {shape.name: (len(shape.lens), sum(shape.lens)) for shape in SHAPES} == {
        "uniform8k": (32, 32 * 8192),
        "skew": (32, 200_003 + 31 * 257),
        "skew-gqa": (32, 200_003 + 31 * 257),
        "short": (8, 8 * 257),
    }
    assert {shape.name: shape.kv_bytes for shape in SHAPES}["uniform8k"] == 32 * 8192 * 2 * 128 * 2
    for shape in SHAPES:
        assert shape.spec().max_context_tokens >= max(shape.lens)
