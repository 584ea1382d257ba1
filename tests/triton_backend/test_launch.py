"""A prepared kernel launches whatever its arguments' values are, and nothing else launches."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton: pip install 'planlife[triton]'")
tl = triton.language

from planlife.errors import MintError  # noqa: E402
from planlife.kernels.triton_launch import Kernel  # noqa: E402
from planlife.testing import EmulatedGraph, record  # noqa: E402


def _scale(source, target, addend, count: tl.int32, stride: tl.int64, factor: tl.float32, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    value = tl.load(source + index * stride, mask, 0).to(tl.float32) * factor
    if addend is not None:
        value += tl.load(addend + index, mask, 0)
    tl.store(target + index, value, mask)


DTYPES = (torch.int32, torch.float32, None)


@pytest.fixture
def scale() -> Kernel:
    return Kernel(_scale)


def test_a_kernel_is_compiled_once_for_each_device_dtypes_and_constants(scale, device):
    assert scale.prepare(device, *DTYPES, BLOCK=8)
    assert not scale.prepare(device, *DTYPES, BLOCK=8)
    assert scale.prepare(device, *DTYPES, BLOCK=16)
    assert scale.prepare(device, torch.int64, torch.float32, None, BLOCK=8)
    assert scale.prepare(device, torch.int32, torch.float32, torch.float32, BLOCK=8)
    assert scale.prepare(device, *DTYPES, BLOCK=8, num_warps=1)


def test_a_launch_takes_any_counts_strides_and_alignments(scale, device):
    scale.prepare(device, *DTYPES, BLOCK=8)
    launch = scale.prepared(device, *DTYPES, BLOCK=8)
    for count in (0, 1, 2, 16, 33):
        for stride in (1, 2, 3, 16):
            for offset in (0, 1, 4):
                source = torch.arange(600, dtype=torch.int32, device=device)[offset:]
                target = torch.full((64,), -1.0, device=device)
                launch((5, 1, 1), source, target[offset:], None, count, stride, 0.5)
                expected = torch.full((64,), -1.0)
                expected[offset : offset + count] = (offset + torch.arange(count) * stride) * 0.5
                assert target.tolist() == expected.tolist(), (count, stride, offset)


def test_a_kernel_that_was_not_prepared_cannot_be_launched(scale, device):
    scale.prepare(device, *DTYPES, BLOCK=8)
    scale.prepared(device, *DTYPES, BLOCK=8)
    for dtypes, constants in ((DTYPES, {"BLOCK": 16}), ((torch.int64, *DTYPES[1:]), {"BLOCK": 8})):
        with pytest.raises(MintError, match="_scale was not compiled"):
            scale.prepared(device, *dtypes, **constants)


def test_an_optional_pointer_is_a_kernel_of_its_own(scale, device):
    dtypes = (torch.int32, torch.float32, torch.float32)
    scale.prepare(device, *dtypes, BLOCK=8)
    target, ones = torch.zeros(8, device=device), torch.ones(8, device=device)
    scale.prepared(device, *dtypes, BLOCK=8)(
        (1, 1, 1), torch.arange(8, dtype=torch.int32, device=device), target, ones, 8, 1, 2.0
    )
    assert target.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


@pytest.mark.parametrize(("dtypes", "constants"), [(DTYPES, {}), (DTYPES[:2], {"BLOCK": 8})])
def test_a_forgotten_dtype_or_constant_is_named(scale, device, dtypes, constants):
    with pytest.raises(TypeError, match="source, target, addend, and the constants BLOCK"):
        scale.prepare(device, *dtypes, **constants)


def _untyped_after_number(count: tl.int32, source): ...
def _bool_number(source, is_last: bool): ...
def _constant_first(BLOCK: tl.constexpr, source): ...


@pytest.mark.parametrize("function", [_untyped_after_number, _bool_number, _constant_first])
def test_parameters_that_could_be_specialised_on_are_refused(function):
    with pytest.raises(TypeError, match="pointers without annotation, numbers as"):
        Kernel(function)


def _run_in_graph(device, body):
    """(graph, replay) of `body`, recorded."""
    if device == "cpu":
        graph = EmulatedGraph()
        with record(graph):
            body()
        return graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def test_a_recorded_launch_runs_at_each_replay_and_not_before(scale, device):
    scale.prepare(device, *DTYPES, BLOCK=8)
    launch = scale.prepared(device, *DTYPES, BLOCK=8)
    source = torch.arange(8, dtype=torch.int32, device=device)
    target = torch.full((8,), -1.0, device=device)
    graph = _run_in_graph(device, lambda: launch((1, 1, 1), source, target, None, 8, 1, 2.0))
    assert target.tolist() == [-1.0] * 8
    for addend in (0, 5):
        source += addend
        graph.replay()
        assert target.tolist() == [2.0 * (addend + i) for i in range(8)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="an emulated graph is what refuses it")
def test_a_recorded_launch_does_not_keep_its_tensors_alive(scale, device):
    scale.prepare(device, *DTYPES, BLOCK=8)
    launch = scale.prepared(device, *DTYPES, BLOCK=8)
    tensors = [torch.ones(8, dtype=torch.int32), torch.zeros(8)]
    graph = _run_in_graph(device, lambda: launch((1, 1, 1), *tensors, None, 8, 1, 2.0))
    graph.replay()
    tensors.clear()
    gc.collect()  # the interpreter leaves cycles
    with pytest.raises(RuntimeError, match="was freed"):
        graph.replay()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_nothing_compiles_after_prepare(scale, device, monkeypatch):
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info))
    scale.prepare(device, *DTYPES, BLOCK=32)
    assert len(compiled) <= 1  # none where another test compiled it
    compiled.clear()
    launch = scale.prepared(device, *DTYPES, BLOCK=32)
    source, target = (torch.zeros(100, dtype=dtype, device=device) for dtype in DTYPES[:2])
    for count in range(17):
        launch((1, 1, 1), source[count:], target[count:], None, count, count, 1.0)
    assert compiled == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_a_launch_runs_on_its_own_device_whatever_the_current_one_is(scale):
    dtypes = DTYPES
    scale.prepare("cuda:1", *dtypes, BLOCK=8)
    launch = scale.prepared("cuda:1", *dtypes, BLOCK=8)
    source = torch.ones(8, dtype=torch.int32, device="cuda:1")
    target = torch.zeros(8, device="cuda:1")
    with torch.cuda.device(0):
        launch((1, 1, 1), source, target, None, 8, 1, 2.0)
        assert torch.cuda.current_device() == 0
    assert target.tolist() == [2.0] * 8


def test_a_kernel_that_needs_too_much_of_the_device_is_refused_each_time_it_is_prepared(scale, monkeypatch):
    """Specs that differ in nothing a kernel knows meet the same compiled kernel, which Triton keeps."""
    compiled = object.__new__(triton.compiler.CompiledKernel)
    compiled.__dict__.update(src=None, module=None, _module_pid=None, function=None, _run=None)
    compiled.metadata = SimpleNamespace(shared=1 << 20)
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        launcher_cls=lambda src, metadata: None,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 1 << 16}),
    )
    monkeypatch.setattr(triton.compiler.compiler, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(scale, "is_interpreted", False)
    monkeypatch.setattr(scale, "_function", SimpleNamespace(warmup=lambda *args, **options: compiled))
    for _ in range(3):
        with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
            scale.prepare("cuda:7", *DTYPES, BLOCK=8)
        with pytest.raises(MintError):
            scale.prepared("cuda:7", *DTYPES, BLOCK=8)
