"""Scenarios of the lifecycle over the Triton backend in a manager, and the names by which it is had."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from planlife import BackendUnavailableError, CapacityLadder, ConfigError, PlanManager, PlanSpec, emulated_graph  # noqa: E402
from planlife.backends import triton_backend  # noqa: E402
from planlife.backends.triton_backend import TritonBackend  # noqa: E402
from planlife.testing.fakes import FakeDevice  # noqa: E402
from tests.child_process import run_python  # noqa: E402
from tests.lifecycle import test_ambient_modes, test_capture_styles, test_dummies, test_refresh_and_marks  # noqa: E402
from tests.lifecycle.world import World, small_spec  # noqa: E402

interpreted = pytest.mark.skipif(
    not triton_backend.IS_INTERPRETED, reason="its worlds are on a CPU, and Triton is not interpreted here"
)


@interpreted
class TestScenarios:
    """Tests of tests/lifecycle that do not care who decodes."""

    @pytest.fixture(autouse=True)
    def _over_triton(self, monkeypatch):
        monkeypatch.setattr(World, "backend", "triton")

    test_lengths_of_now = staticmethod(test_capture_styles.test_a_replay_decodes_the_lengths_of_now)
    test_foreign_refresh = staticmethod(test_refresh_and_marks.test_a_foreign_refresh_is_never_mistaken_for_ones_own)
    test_emptied_on_purpose = staticmethod(test_dummies.test_the_sanitizer_knows_tables_that_were_emptied_on_purpose)

    @pytest.mark.parametrize(
        ("mode", "part"),
        [
            ("autocast to bfloat16", "in graph"),
            ("refusing function mode", "in graph"),
            ("refusing function mode", "fallback and dummy"),
        ],
    )
    def test_ambient_modes(self, mode, part):
        test_ambient_modes.test_a_mode_of_the_callers_changes_no_result(mode, part)


@interpreted
def test_a_class_past_the_limit_of_a_table_set_is_served_in_segments():
    world = World(
        rows=5, ladder=CapacityLadder([5]), backend=TritonBackend(max_plan_rows=2), warm=True, sanitize="count"
    )
    world.set_lens([300, 0, 17, 256, 1])
    world.assert_right(world.eager(world.step()), world.expected())
    world.lens[4] = 2
    world.assert_right(world.eager(world.step()), world.expected())
    assert world.counters()["stale_detected"] == 0


@interpreted
def test_the_fallback_named_triton_takes_what_the_ladder_does_not():
    sites = {"default": small_spec(max_partitions=4)}  # of a plan's rows; the fallback's have one task each
    world = World(rows=5, ladder=CapacityLadder([2]), sites=sites, backend="torch", fallback="triton", warm=True)
    world.set_lens([300, 0, 17, 256, 1])
    step = world.step()
    assert world.manager.plan_for(step).route == "fallback"
    world.assert_right(world.eager(step), world.expected())


@interpreted
def test_auto_on_a_cpu_is_torch_and_triton_is_had_by_its_name():
    for name, found in (("auto", "torch"), ("triton", "triton")):
        with World(backend=name).manager as manager:
            assert manager.report().backend == found


def test_auto_on_a_gpu_is_triton_where_it_refuses_no_site(monkeypatch):
    device = FakeDevice()
    device.name = "cuda:0"
    monkeypatch.setattr(triton_backend, "_refuse_device", lambda name: [])
    sites = {"main": small_spec(), "odd": small_spec()}
    with PlanManager(sites, ladder=CapacityLadder([2]), device=device) as manager:
        assert manager.report().backend == "triton"
    monkeypatch.setattr(TritonBackend, "refuse_spec", lambda self, spec, device: ["no"] * (spec is sites["odd"]))
    with PlanManager(sites, ladder=CapacityLadder([2]), device=device) as manager:
        assert manager.report().backend == "torch"


def managers(**options: Any) -> PlanManager:
    return PlanManager(small_spec(), **{"ladder": CapacityLadder([2]), "device": "cpu", **options})


@pytest.mark.parametrize("options", [{"backend": "triton"}, {"fallback": "triton"}], ids=str)
def test_a_missing_or_old_triton_is_named_with_the_way_out(monkeypatch, options):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(BackendUnavailableError, match=r"triton >= 3.6, and 3.5.1 is here; upgrade it"):
        managers(**options)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        BackendUnavailableError, match=r"triton >= 3.6, which cannot be imported here .*planlife\[triton"
    ):
        managers(**options)


def test_a_cpu_without_the_interpreter_is_refused_with_the_way_out():
    """In a process of its own: Triton decides when it is imported."""
    code = (
        "from tests.triton_backend.test_lifecycle import managers\n"
        "from planlife import ConfigError\n"
        "for options in ({'backend': 'triton'}, {'backend': 'torch', 'fallback': 'triton'}):\n"
        "    try: managers(**options)\n"
        "    except ConfigError as error: print('set TRITON_INTERPRET=1' in str(error), type(error).__name__)\n"
    )
    run = run_python("-c", code, TRITON_INTERPRET="0")
    assert run.stdout.splitlines() == ["True ConfigError"] * 2, run.stderr


@interpreted
def test_a_gpu_is_refused_while_kernels_are_interpreted():
    device = FakeDevice()
    device.name = "cuda:0"
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set: kernels run on CPU tensors only"):
        managers(backend="triton", device=device)


def test_a_gpu_that_triton_does_not_compile_for_is_refused(monkeypatch):
    monkeypatch.setattr(triton_backend, "IS_INTERPRETED", False)
    monkeypatch.setattr(torch.version, "hip", None)
    device = FakeDevice()
    device.name = "cuda:0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (7, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="reaches no GPU, and so not cuda:0"):
        managers(backend="triton", device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    other = FakeDevice()
    other.name = "meta"
    with pytest.raises(ConfigError, match="Triton compiles for GPUs, and meta is none"):
        managers(backend="triton", device=other)
    with pytest.raises(ConfigError, match="cuda:0 has compute capability 7.5, and Triton compiles for 8.0 and up"):
        managers(backend="triton", device=device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: (8, 0))
    managers(backend="triton", device=device).close()


def test_a_site_that_the_kernels_cannot_read_is_refused_like_any_backends(monkeypatch):
    monkeypatch.setattr(triton_backend, "_refuse_device", lambda name: [])
    for changes, found in (
        ({"kv_layout": "packed", "page_size": 4}, "the triton backend does not read kv_layout='packed'"),
        ({"max_partitions": 4096}, "max_partitions=4096 is above"),
    ):
        fields = {"max_context_tokens": 640, "page_size": 16, **changes}
        spec = PlanSpec(4, 2, 16, fields.pop("page_size"), **fields)
        with pytest.raises(ConfigError, match=found):
            PlanManager(spec, ladder=CapacityLadder([2]), device=FakeDevice(), backend="triton")


@interpreted
@pytest.mark.parametrize("sanitize", ["off", "count"])
def test_a_step_in_service_runs_no_tensor_operation_besides_its_launches(monkeypatch, sanitize):
    """C30: what no operation does neither allocates nor waits. The sanitizer takes views of lengths."""
    world = World(backend="triton", warm=True, sanitize=sanitize)
    world.set_lens([300, 0, 17, 256])
    world.eager(world.step(4))
    step, operations, launches = world.step(4), [], []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations.append(function)
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(emulated_graph, "launch", lambda launch, *args: launches.append(launch))
    output, query, tables = world.output[:4], world.query[:4], world.tables[:4]
    with Operations():
        for _layer in range(3):
            world.decode(world.manager.plan_for(step), query, output, tables)
    # One refresh; decode and merge, and the sanitizer, of each layer.
    assert len(launches) == 1 + 3 * (2 if sanitize == "off" else 3)
    assert set(operations) <= ({torch.ops.aten.slice.Tensor} if sanitize == "count" else set())
    with Operations():
        output.clone()  # the positive control
    assert torch.ops.aten.clone.default in operations
