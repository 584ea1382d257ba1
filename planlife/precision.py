"""How far a backend's decode is from the exact answer: the worst output row, by dtypes and by number of splits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .configuration import resolve_backend, resolve_device
from .errors import ConfigError
from .ladder import CapacityLadder
from .manager import PlanManager
from .spec import FP8_DTYPES, QUERY_DTYPES, Step
from .testing.decode_table import SCALE_FORMS, DecodeCase, DecodeInputs, decode_cases, row_errors

#: A row that is further off decodes something else: that is no matter of precision.
WRONG = 1e-2

_CAPS = (8, 16, 32, 64, 128, 256)
#: Long enough for a task per compute unit in one row, with short and empty rows beside it.
_SPLIT_LENS = (65_536, 257, 0, 4097, 20_000)
_SPLIT_CASES = (
    DecodeCase(q_dtype="float32", kv_dtype="float32"),
    DecodeCase(q_dtype="float32", kv_dtype="bfloat16", peaked=True),
    DecodeCase(),
    DecodeCase(kv_dtype="float8_e4m3fn", scales="device [1]"),
    DecodeCase(kv_dtype="float8_e4m3fn", scales="per token"),
)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PrecisionFigure:
    """Calls of one kind. worst_error: the largest ||out - exact|| / ||exact|| of an output row, inf where it has a NaN
    or an empty row is not zero. rounding: what rounding the exact answer to q_dtype costs at most."""

    q_dtype: str
    kv_dtype: str
    scales: str
    num_cases: int
    num_rows: int
    worst_error: float
    worst_case: str

    @property
    def rounding(self) -> float:
        return float(torch.finfo(getattr(torch, self.q_dtype)).eps) / 2


@dataclass(frozen=True)
class SplitFigure:
    """One call under one max_partitions, planned for 1 x and for 2 x as many workgroups as there are compute units.

    most_splits: tasks of the row that has most, under either. worst_error: as in PrecisionFigure, of either.
    largest_difference: of an output number between the two; relative_difference: of an output row, over the exact one.
    """

    q_dtype: str
    kv_dtype: str
    scales: str
    is_peaked: bool
    max_partitions: int
    most_splits: int
    worst_error: float
    relative_difference: float
    largest_difference: float


@dataclass(frozen=True)
class PrecisionReport:
    """What `measure_precision` found. refused: cases that the backend cannot take, with its reason."""

    backend: str
    device: str
    figures: tuple[PrecisionFigure, ...]
    splits: tuple[SplitFigure, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Something was measured, and no row is so far off that it decodes something else."""
        errors = [figure.worst_error for figure in self.figures] + [split.worst_error for split in self.splits]
        return bool(errors) and max(errors) <= WRONG

    def refused_by_reason(self) -> dict[str, list[str]]:
        """The cases of each reason."""
        cases: dict[str, list[str]] = {}
        for case, reason in self.refused:
            cases.setdefault(reason, []).append(case)
        return cases

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with `ok`."""
        return {**asdict(self), "ok": self.ok}


def measure_precision(
    *,
    backend: Any = "auto",
    device: str = "cpu",
    cases: Sequence[DecodeCase] | None = None,
    with_splits: bool = True,
    progress: Progress | None = None,
) -> PrecisionReport:
    """Run decode cases through a manager and compare every output row with the exact answer.

    backend, device: of PlanManager. cases: None = the whole table of `planlife.testing.decode_cases`.
    with_splits: also one long row under caps of 8 to 256 tasks. progress: called with (done, total, text).

    Runs torch on one CPU thread meanwhile: sums in one order on every machine, and small ops that do not wait.
    Raises BackendUnavailableError, ConfigError. Capture: no. Syncs: yes. Allocates: caches of some MiB, and scratch.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(backend, device, decode_cases() if cases is None else tuple(cases), with_splits, progress)
    finally:
        torch.set_num_threads(num_threads)


def _measure(
    backend: Any, device: str, cases: Sequence[DecodeCase], with_splits: bool, progress: Progress | None
) -> PrecisionReport:
    here = resolve_device(device)
    num_units = here.num_compute_units
    backend = resolve_backend(backend, {"default": DecodeCase().spec()}, here)
    caps = sorted({min(cap, num_units) for cap in _CAPS})
    split_runs = [(case, cap) for case in _SPLIT_CASES for cap in caps] if with_splits else []
    total, done = len(cases) + len(split_runs), 0

    def step(text: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total, text)

    errors: dict[tuple[str, str, str], list[tuple[float, int, str]]] = {}
    refused: dict[str, str] = {}
    for case in cases:
        try:
            found = DecodeInputs.of(case, device=device).errors(backend=backend)
        except ConfigError as reason:
            refused[str(case)] = str(reason)
        else:
            kind = (case.q_dtype, case.kv_dtype, SCALE_FORMS[case.scales])
            errors.setdefault(kind, []).append((_worst(found), found.numel(), str(case)))
        step(str(case))
    figures = []
    for kind in sorted(errors, key=_rank):
        worst, _, where = max(errors[kind])
        figures.append(
            PrecisionFigure(*kind, len(errors[kind]), sum(rows for _, rows, _ in errors[kind]), worst, where)
        )

    splits = []
    inputs: dict[DecodeCase, DecodeInputs] = {}
    for case, cap in split_runs:
        if str(case) not in refused:
            try:
                if case not in inputs:
                    inputs[case] = _long_inputs(case, device)
                splits.append(_measure_splits(case, inputs[case], cap, num_units, backend, device))
            except ConfigError as reason:
                refused[str(case)] = str(reason)
        step(f"at most {cap} splits of {case.q_dtype} over {case.kv_dtype}")
    return PrecisionReport(backend.name, device, tuple(figures), tuple(splits), tuple(refused.items()))


def rounded_up(error: float) -> str:
    """`error` to two digits, never below it."""
    if not 0 < error < math.inf:
        return str(error) if error else "0"
    unit = 10.0 ** (math.floor(math.log10(error)) - 1)
    return f"{math.ceil(error / unit) * unit:.1e}"


def _rank(kind: tuple[str, str, str]) -> tuple[int, bool, str, str]:
    q_dtype, kv_dtype, scales = kind
    return QUERY_DTYPES.index(q_dtype), kv_dtype in FP8_DTYPES, kv_dtype, scales


def _worst(errors: torch.Tensor) -> float:
    return float(errors.nan_to_num(nan=math.inf).max())


def _long_inputs(case: DecodeCase, device: str) -> DecodeInputs:
    spec = case.spec(max_context_tokens=max(_SPLIT_LENS))
    return DecodeInputs(spec, _SPLIT_LENS, scales=case.scales, peaked=case.peaked, layout=case.layout, device=device)


def _measure_splits(
    case: DecodeCase, inputs: DecodeInputs, cap: int, num_units: int, backend: Any, device: str
) -> SplitFigure:
    outputs, most_splits = [], 0
    query = inputs.query[: len(_SPLIT_LENS)]
    for budget in (num_units, 2 * num_units):
        spec = case.spec(max_context_tokens=max(_SPLIT_LENS), max_partitions=cap, workgroup_budget=budget)
        ladder = CapacityLadder([len(_SPLIT_LENS)])
        with PlanManager(spec, ladder=ladder, device=device, backend=backend) as manager:
            with manager.capture_phase():
                manager.warm()
            plan = manager.plan_for(Step(inputs.context_lens))
            output = torch.full_like(query, torch.nan)
            inputs.decode_into(output, query, manager, plan)
            if plan.native is not None:
                most_splits = max(most_splits, int(plan.native.reduce_info[:, 1].max()))
        outputs.append(output.to("cpu", torch.float64))
    difference = outputs[0] - outputs[1]
    norm = inputs.expected.flatten(1).norm(dim=1)
    return SplitFigure(
        case.q_dtype,
        case.kv_dtype,
        SCALE_FORMS[case.scales],
        case.peaked,
        cap,
        most_splits,
        max(_worst(row_errors(output, inputs.expected)) for output in outputs),
        _worst((difference.flatten(1).norm(dim=1) / norm)[norm > 0]),
        _worst(difference.abs()),
    )
