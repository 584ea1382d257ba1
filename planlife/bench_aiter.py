"""What planlife adds to a layer over aiter: `PlanManager.pa_decode` beside a bare call of `pa_decode`, in turn."""

from __future__ import annotations

import operator
import statistics
from dataclasses import dataclass, replace
from timeit import Timer
from typing import Any

import torch

from .aiter_library import AiterLibrary, probe
from .backends.aiter_backend import AiterBackend, architecture_of
from .backends.aiter_limits import FP8_OF_ARCHITECTURE
from .ladder import CapacityLadder
from .manager import PlanManager
from .spec import DTYPE_BYTES, PlanSpec, Step, check_int
from .torch_device import resolve_device

_ROWS, NUM_LAYERS, _PAGES = 8, 4, 8
_IDLE_ARCHITECTURE = "gfx942"


@dataclass(frozen=True)
class WrapperFigure:
    """Host microseconds of one layer's call, round by round.

    writes_us: of the launches that put scales given as numbers where aiter reads them, 0 for all other scales.
    spared_us: of the tensors that aiter's pa_decode makes of such numbers, where an idle one makes none; else 0.
    """

    call: str
    wrapped_us: tuple[float, ...]
    bare_us: tuple[float, ...]
    writes_us: tuple[float, ...]
    spared_us: tuple[float, ...]

    @property
    def added_us(self) -> float:
        """Of the fastest rounds, which nothing else on the machine has disturbed."""
        return min(self.wrapped_us) - min(self.bare_us)

    @property
    def added_median_us(self) -> float:
        """Median over the rounds, each against the bare calls beside it."""
        return float(statistics.median(map(operator.sub, self.wrapped_us, self.bare_us)))

    @property
    def added_to_aiter_us(self) -> float:
        """added_us less what aiter would have done in the bare call."""
        return self.added_us - min(self.spared_us)


@dataclass(frozen=True)
class WrapperReport:
    """library: whose pa_decode was called."""

    library: str
    device: str
    figures: tuple[WrapperFigure, ...]


def measure_wrapper(
    *, device: str = "cpu", num_rounds: int = 301, calls_per_round: int = 50
) -> tuple[list[WrapperReport], str]:
    """Time both calls over a pa_decode that returns at once, and over the installed aiter where it serves `device`.

    Returns the reports, and why the installed one is not among them ("" if it is).
    Raises ConfigError, BackendUnavailableError. Capture: no. Syncs: on a GPU, between rounds. Allocates: a few MiB.
    """
    check_int("num_rounds", num_rounds, at_least=1)
    check_int("calls_per_round", calls_per_round, at_least=1)
    here = resolve_device(device)
    idle = AiterLibrary(plan_nothing, decode_nothing, IdlePlan)
    reports = [
        _measure("a pa_decode that returns at once", idle, _IDLE_ARCHITECTURE, here, num_rounds, calls_per_round)
    ]
    installed, reasons = probe()
    architecture = architecture_of(here)
    if installed is None:
        return reports, "; ".join(reasons)
    if architecture not in FP8_OF_ARCHITECTURE:
        return reports, f"aiter is installed, and its kernels are not for {architecture or here.name}"
    reports.append(_measure("the installed aiter", installed, architecture, here, num_rounds, calls_per_round))
    return reports, ""


def _measure(
    name: str, library: AiterLibrary, architecture: str, device: Any, num_rounds: int, calls_per_round: int
) -> WrapperReport:
    backend = AiterBackend(library=library, architecture_of=lambda device: architecture)
    bf16 = PlanSpec(8, 1, 128, 16, max_context_tokens=1024, kv_layout="packed")
    fp8 = replace(bf16, kv_dtype=FP8_OF_ARCHITECTURE[architecture], scales="per_tensor")
    figures = []
    for call, spec, kind in (
        ("BF16", bf16, "none"),
        ("FP8, tensor scales", fp8, "tensor"),
        ("FP8, number scales", fp8, "number"),
        ("FP8, per token", replace(fp8, scales="per_token"), "per_token"),
    ):
        if backend.refuse_spec(spec, device):
            continue  # this aiter has no such cache here
        with PlanManager(spec, ladder=CapacityLadder([_ROWS]), device=device, backend=backend) as manager:
            with manager.capture_phase():
                manager.warm()
            figures.append(_time(call, manager, library, spec, kind, device.name, num_rounds, calls_per_round))
    return WrapperReport(name, device.name, tuple(figures))


#: Of layer {i}, as an engine writes it: bare, with what a call needs at hand, and through the manager.
_BARE = (
    "decode(output{i}, query{i}, key_cache{i}, value_cache{i}, lengths, tables, scale, 1, compute_type=compute_type, "
    "key_scale=key_scale{i}, value_scale=value_scale{i}, exp_sums=exp_sums, max_logits=max_logits, "
    "temporary_output=temporary_output, work_plan=work_plan, max_context_length=max_context_length)"
)
_WRAPPED = (
    "wrapped(plan, output{i}, query{i}, key_cache{i}, value_cache{i}, tables, scale, key_scale=key_scale{i}, "
    "value_scale=value_scale{i})"
)
_WRITES = "write_key(key_scale{i}); write_value(value_scale{i})"
_SPARED = "tensor([key_scale{i}], dtype=float32, device=device); tensor([value_scale{i}], dtype=float32, device=device)"


def _time(
    call: str,
    manager: PlanManager,
    library: AiterLibrary,
    spec: PlanSpec,
    kind: str,
    device: str,
    num_rounds: int,
    calls_per_round: int,
) -> WrapperFigure:
    lengths = torch.full((_ROWS,), 100, dtype=torch.int32, device=device)
    is_number = kind == "number"
    words = torch.zeros(2, dtype=torch.float32, device=device)
    names: dict[str, Any] = {
        **_bare_names(library, spec, lengths, device),
        "wrapped": manager.pa_decode,
        "plan": manager.plan_for(Step(lengths, owner=manager)),
        "write_key": words[:1].fill_,
        "write_value": words[1:].fill_,
        "tensor": torch.tensor,
        "float32": torch.float32,
        "device": words.device,
    }
    for index in range(NUM_LAYERS):
        names |= {f"{name}{index}": value for name, value in _layer_names(spec, kind, index, device).items()}
    timers = [
        Timer("; ".join(statement.format(i=index) for index in range(NUM_LAYERS)), globals=names)
        for statement in (_WRAPPED, _BARE, *((_WRITES, _SPARED) if is_number else ("pass", "pass")))
    ]
    rounds: list[list[float]] = [[] for _ in timers]
    for _ in range(num_rounds):
        for samples, timer in zip(rounds, timers, strict=True):
            samples.append(timer.timeit(calls_per_round) / (calls_per_round * NUM_LAYERS) * 1e6)
            if words.is_cuda:
                torch.cuda.synchronize(words.device)  # so that no round waits for another's launches
    wrapped, bare, writes, spared = map(tuple, rounds)
    nothing = (0.0,) * num_rounds
    is_spared = is_number and library.decode is decode_nothing
    return WrapperFigure(call, wrapped, bare, writes if is_number else nothing, spared if is_spared else nothing)


def _layer_names(spec: PlanSpec, kind: str, index: int, device: str) -> dict[str, Any]:
    """What a layer has of its own."""
    kv_dtype = getattr(torch, spec.kv_dtype)
    heads, page, dim, pack = spec.num_kv_heads, spec.page_size, spec.head_dim, 16 // DTYPE_BYTES[spec.kv_dtype]
    query = torch.zeros(_ROWS, spec.num_q_heads, dim, dtype=torch.bfloat16, device=device)
    scales: list[Any] = [None, None]
    if kind == "number":
        scales = [0.5 + index, 1.25 + index]  # as layers have them: none like another
    elif kind != "none":
        shape = (1,) if kind == "tensor" else (_PAGES, heads, page)
        scales = [torch.ones(shape, dtype=torch.float32, device=device) for _ in range(2)]
    return {
        "output": torch.zeros_like(query),
        "query": query,
        "key_cache": torch.zeros(_PAGES, heads, dim // pack, page, pack, dtype=kv_dtype, device=device),
        "value_cache": torch.zeros(_PAGES, heads, page // pack, dim, pack, dtype=kv_dtype, device=device),
        "key_scale": scales[0],
        "value_scale": scales[1],
    }


def _bare_names(library: AiterLibrary, spec: PlanSpec, lengths: torch.Tensor, device: str) -> dict[str, Any]:
    """What all layers share: a plan and scratch as an engine has them that calls aiter itself."""
    plan = library.plan(lengths, spec.num_kv_heads)
    stats = (spec.num_kv_heads, plan.work_info.shape[0], spec.query_rows_per_kv_head)
    return {
        "decode": library.decode,
        "lengths": lengths,
        "tables": torch.zeros(_ROWS, spec.max_context_tokens // spec.page_size, dtype=torch.int32, device=device),
        "scale": spec.head_dim**-0.5,
        "compute_type": getattr(torch, spec.kv_dtype),
        "exp_sums": torch.empty(stats, dtype=torch.float32, device=device),
        "max_logits": torch.empty(stats, dtype=torch.float32, device=device),
        "temporary_output": torch.empty(*stats, spec.head_dim, dtype=torch.bfloat16, device=device),
        "work_plan": plan,
        "max_context_length": spec.max_context_tokens,
    }


@dataclass(frozen=True)
class IdlePlan:
    """PADecodePlan's fields."""

    work_info: torch.Tensor
    reduce_info: torch.Tensor
    num_kv_heads: int
    max_partitions: int
    sliding_window: int = 0
    query_length: int = 1


def plan_nothing(
    context_lengths: torch.Tensor,
    num_kv_heads: int,
    *,
    max_partitions: int | None = None,
    workgroup_budget: int | None = None,
    sliding_window: int = 0,
    query_length: int = 1,
    plan: IdlePlan | None = None,
) -> IdlePlan:
    """plan_pa_decode, with tables that stay as they are."""
    if plan is not None:
        return plan
    rows, device = context_lengths.shape[0], context_lengths.device
    work_info, reduce_info = (torch.zeros(rows, columns, dtype=torch.int32, device=device) for columns in (4, 2))
    return IdlePlan(work_info, reduce_info, num_kv_heads, max_partitions or 1, sliding_window, query_length)


def decode_nothing(
    output: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    context_lengths: Any,
    block_tables: Any,
    softmax_scale: float,
    query_length: int,
    *,
    context_partition_size: int = 256,
    compute_type: Any = torch.bfloat16,
    query_scale: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    exp_sums: Any = None,
    max_logits: Any = None,
    temporary_output: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    sliding_window: int = 0,
    work_plan: Any,
    max_context_length: int | None = None,
) -> None:
    """pa_decode, which returns at once."""
