"""The aiter backend: ROCm's FlyDSL planner and paged decode, called over the manager's bytes."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from ..aiter_library import PLAN_FIELDS, AiterLibrary, probe
from ..configuration import DeviceMeant
from ..errors import BackendUnavailableError, ConfigError, RouteError
from ..planner import default_workgroup_budget, spec_capacity
from ..sizing import align
from ..spec import DTYPE_BYTES, FP8_DTYPES, PlanSpec, check_int
from .aiter_sample import SampleCall, sink_dtypes
from .torch_backend import TorchPlan, count_differences, table_ends

# What aiter's host code checks since ROCm/aiter#5809. A library's own answer decides; these say why, with a way out.
#: plan_pa_decode: sequences of one plan.
MAX_PLAN_ROWS = 4096
#: pa_decode: the architectures that any text of it serves, and the only FP8 cache of each.
FP8_OF_ARCHITECTURE = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn", "gfx1250": "float8_e4m3fn"}
#: pa_decode: tokens of a page.
PAGE_SIZES = (16, 64, 128)
#: pa_decode: head dims are multiples of these by the cache's dtype, up to the largest; FP8 has 64 besides.
HEAD_DIM_STEP_BF16, HEAD_DIM_STEP_FP8, SMALL_HEAD_DIM_FP8, MAX_HEAD_DIM = 64, 128, 64, 1024
#: The reducer's indices: batch x (query rows per KV head x KV heads)^2 may not be above it.
MAX_REDUCER_INDICES = 2**30

#: pa_decode: bytes of a cache from which its code has wider addresses, or none of a buffer's.
WIDE_CACHE_BYTES = (2**31, 2**32)

#: Scales that are the same number in float32 are one kernel: the first that was given is passed.
_SAME_FLOAT32 = 1e-7
#: What a kernel can have a scale as: in float32, others are 0 or inf.
_LEAST_SCALE, _MOST_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_WORD_BYTES = 4


def architecture_of(device: Any) -> str:
    """ "gfx942", ... of an AMD GPU, "" for every other device. device: a planlife Device."""
    if torch.version.hip is None or not device.name.startswith("cuda"):
        return ""
    return str(torch.cuda.get_device_properties(device.name).gcnArchName).partition(":")[0]


class _Call:
    """What calls of one row count, with one arena, have in common: aiter's checks want exact shapes.

    A row has at most max_partitions tasks and they are packed, so the tables of fewer rows are the fronts of all.

    views: exp_sums, max_logits and temporary_output.

    Borrows: the arena, whose views go the moment it does, so that an eviction frees it.
    """

    __slots__ = ("num_rows", "plan", "scratch", "staged_lens", "views")

    def __init__(self, tables: AiterPlan, scratch: torch.Tensor, num_rows: int) -> None:
        spec = tables.spec
        heads, rows, dim = spec.num_kv_heads, spec.query_rows_per_kv_head, spec.head_dim
        self.num_rows = num_rows
        capacity = min(tables.capacity, num_rows * tables.max_partitions)
        end = heads * capacity * rows
        with torch.inference_mode(False):
            self.plan = tables.plan_of(tables.work_info[:capacity], tables.reduce_info[:num_rows])
            self.staged_lens = tables.staged_lens[:num_rows]
            # A view of `scratch` itself has it as its base, which on some torch keeps it: its end would not be seen.
            alias = scratch.data
            exp_sums, max_logits, output = (
                alias[start:stop] for start, stop in _scratch_parts(spec, tables.capacity, capacity)
            )
            stats = (one.view(torch.float32)[:end].view(heads, capacity, rows) for one in (exp_sums, max_logits))
            partials = output.view(tables.q_dtype)[: end * dim].view(heads, capacity, rows, dim)
            self.views: list[torch.Tensor] = [*stats, partials]
        self.scratch = weakref.ref(scratch, _clear(self.views))


def _clear(views: list[torch.Tensor]) -> Callable[[object], None]:
    return lambda _: views.clear()


def _scratch_parts(spec: PlanSpec, full_capacity: int, capacity: int) -> list[tuple[int, int]]:
    """(start, end) in bytes of exp_sums, max_logits and temporary_output. Starts, and so alignment, are the class's."""
    slots = spec.num_kv_heads * spec.query_rows_per_kv_head
    parts = []
    start = 0
    for slot_bytes in (4, 4, spec.head_dim * DTYPE_BYTES[spec.q_dtype]):
        parts.append((start, start + slots * capacity * slot_bytes))
        start = align(start + slots * full_capacity * slot_bytes)
    return parts


class AiterPlan(TorchPlan):
    """One table set as views of the manager's bytes: TorchPlan's, a word that says they were emptied, two for scales.

    plan: aiter's PADecodePlan over the whole tables, which refreshes write in place.

    Borrows: the buffer, whose views these are. Address-stable: refreshes write in place.
    """

    __slots__ = (
        "call",
        "compute_type",
        "emptied",
        "key_word",
        "lens_and_emptied",
        "max_columns",
        "max_tokens",
        "page_size",
        "plan",
        "plan_type",
        "q_dtype",
        "query_length",
        "sink_dtypes",
        "sliding_window",
        "softmax_scales",
        "value_word",
    )

    def __init__(
        self,
        library: AiterLibrary,
        spec: PlanSpec,
        plan_rows: int,
        num_compute_units: int,
        buffer: torch.Tensor,
        softmax_scales: Iterable[float],
    ) -> None:
        super().__init__(spec, plan_rows, num_compute_units, buffer)
        self.plan_type = library.plan_type
        self.q_dtype = getattr(torch, spec.q_dtype)
        self.compute_type = getattr(torch, spec.kv_dtype)  # aiter's default is bfloat16, for every cache
        self.query_length, self.sliding_window = spec.query_length, spec.sliding_window
        self.sink_dtypes = sink_dtypes(spec)
        self.max_tokens, self.page_size = spec.max_context_tokens, spec.page_size
        self.max_columns = -(-spec.max_context_tokens // spec.page_size)
        self.softmax_scales = {scale: scale for scale in softmax_scales}
        _, lens_start, lens_end = table_ends(self.capacity, plan_rows)
        with torch.inference_mode(False):
            self.lens_and_emptied = buffer[lens_start : lens_end + _WORD_BYTES].view(torch.int32)
            self.emptied = self.lens_and_emptied[plan_rows:]
            words = buffer[lens_end + _WORD_BYTES : lens_end + 3 * _WORD_BYTES].view(torch.float32)
            self.key_word, self.value_word = words[:1], words[1:]
        self.plan = self.plan_of(self.work_info, self.reduce_info)
        self.call: _Call | None = None

    def plan_of(self, work_info: torch.Tensor, reduce_info: torch.Tensor) -> Any:
        """aiter's plan over these tables."""
        spec = self.spec
        return self.plan_type(
            work_info=work_info,
            reduce_info=reduce_info,
            num_kv_heads=spec.num_kv_heads,
            max_partitions=self.max_partitions,
            sliding_window=spec.sliding_window,
            query_length=spec.query_length,
        )


def _check_scales(scales: Any) -> tuple[float, ...]:
    """As Python's floats, which aiter's keys of compiled code hold. Raises ConfigError."""
    if not isinstance(scales, Iterable):
        raise ConfigError(f"softmax_scales must be a sequence of numbers, such as [0.0625], got {scales!r}.")
    found = []
    for scale in scales:
        is_number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not (is_number and _LEAST_SCALE <= scale <= _MOST_SCALE):
            raise ConfigError(f"softmax_scales must be numbers on the host, finite and > 0 in float32, got {scale!r}.")
        found.append(float(scale))
    return tuple(dict.fromkeys(found))


class AiterBackend:
    """planlife.backends.base.Backend over ROCm's aiter, for AMD GPUs.

    max_plan_rows: most rows of one table set, at most aiter's own limit; larger classes become segments.
    softmax_scales: those that pa_decode will be called with, which aiter compiles in; () = 1/sqrt(head_dim).
    library: None = the installed one. architecture_of: of a Device; None = as torch tells.

    Raises ConfigError, BackendUnavailableError where aiter cannot be used. It gives no log-sum-exps.
    """

    name = "aiter"
    max_plan_rows: int | None

    def __init__(
        self,
        max_plan_rows: int = MAX_PLAN_ROWS,
        *,
        softmax_scales: Sequence[float] = (),
        library: AiterLibrary | None = None,
        architecture_of: Callable[[Any], str] | None = None,
    ) -> None:
        self.max_plan_rows = check_int("max_plan_rows", max_plan_rows, at_least=1, at_most=MAX_PLAN_ROWS)
        self._softmax_scales = _check_scales(softmax_scales)
        if library is None:
            library, reasons = probe()
            if library is None:
                raise BackendUnavailableError("; ".join(reasons) + ".")
        self._library = library
        self._architecture_of = architecture_of or _architecture_by_torch
        #: (device, settled spec, rows, capacity) whose every variant ran once.
        self._compiled: set[tuple[str, PlanSpec, int, int]] = set()

    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        architecture = self._architecture_of(device)
        if not architecture:
            way_out = "'torch'" if device.name == "cpu" else "'triton'"
            return [f"aiter's kernels are for AMD GPUs, and {device.name} is none; pass {way_out}"]
        reasons = _refuse_always(spec, device)
        refusal = None if reasons else self._ask(spec, device, architecture)
        if refusal == "":
            return ()
        known = _explain(self._library, spec, architecture, torch.device(device.name))
        return [*reasons, *known] if known or not refusal else [refusal]

    def _ask(self, spec: PlanSpec, device: Any, architecture: str) -> str | None:
        """What this aiter says against a call of this site with one row, as far as its host code decides; "": nothing.

        Its predicate is asked where it has one, else pa_decode itself, with a plan at which its host checks end.
        None: nobody could be asked, because the device has no room for the tensors of one call.
        """
        can_use = self._library.can_use
        name = "pa_decode" if can_use is None else "can_use_flydsl_pa_decode"
        scale = self._scales_of(spec)[0]
        says = ""
        with device.relaxed():
            try:
                sample = SampleCall(spec, 1, device.name)
                tables, scratch = self._sample_tables(spec, 1, device)
            except Exception:  # a backend that raises is no answer
                return None
            call = _Call(tables, scratch, 1)
            if can_use is None:
                call.plan = _ending_plan(self._library.plan_type, call.plan)
            for caches in sample.caches:
                output, query, key_cache, value_cache, block_tables = sample.call(1, caches)
                try:
                    is_served = _call(
                        can_use or self._library.decode, tables, call, output, query, key_cache, value_cache,
                        block_tables, block_tables.shape[1], scale, caches.key_scale, caches.value_scale, None,
                    )  # fmt: skip
                except _EndOfHostChecks:
                    return ""
                except Exception as error:  # whatever a library raises is its answer
                    says = f"{type(error).__name__}: {error}"
                else:
                    if is_served is True or can_use is None:
                        return ""
                    says = "without a reason" if is_served is False else f"it answers {is_served!r}"
        # Which texts read BF16 caches, and where, no signature tells.
        fp8 = FP8_OF_ARCHITECTURE.get(architecture) if spec.kv_dtype == "bfloat16" else None
        way_out = f"make the cache {fp8}, " if fp8 else ""
        return (
            f"this aiter's {name} refuses calls of this site on {architecture} ({says}); {way_out}upgrade aiter, or "
            "pass 'triton'"
        )

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        return ()

    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        budget = None
        if self._library.workgroup_budget is not None and not isinstance(device, DeviceMeant):
            budget = _count_by(
                self._library.workgroup_budget,
                torch.device(device.name),
                kv_dtype=getattr(torch, spec.kv_dtype),
                head_dim=spec.head_dim,
                block_size=spec.page_size,
                query_length=spec.query_length,
                query_group_size=spec.group_size,
                sliding_window=spec.sliding_window,
            )
        return budget or default_workgroup_budget(device.num_compute_units)

    def excluded(self, device: Any) -> Mapping[str, str]:
        return {}

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return table_ends(spec_capacity(spec, plan_rows, num_compute_units), plan_rows)[2] + 3 * _WORD_BYTES

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        capacity = spec_capacity(spec, plan_rows, num_compute_units)
        return _scratch_parts(spec, capacity, capacity)[-1][1]

    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        """Runs planner and decode over empty rows, once for every row count that a call of this class may have.

        What aiter compiles depends on rows and capacity by thresholds that are its own, and is asked for by calls.
        Besides: with each form of V; with sinks of either dtype and without; and with caches of each size that is
        addressed otherwise, which sinks have nothing to do with. Takes query, output and block tables of the class
        while it runs.

        Raises ConfigError for a class that aiter's reducer cannot index (R47), or that aiter refuses.
        """
        _check_reducer(spec, plan_rows)
        sample = SampleCall(spec, plan_rows, device.name, (0, *WIDE_CACHE_BYTES))
        tables, scratch = self._sample_tables(spec, plan_rows, device)
        self.refresh(tables, torch.zeros(plan_rows, dtype=torch.int32, device=device.name), plan_rows)
        if self._plan(tables) is not tables.plan:
            raise ConfigError(
                "aiter's plan_pa_decode(plan=...) made another plan: the one it was given is not refreshed."
            )
        for num_rows in range(least_rows, plan_rows + 1):
            capacity = min(tables.capacity, num_rows * tables.max_partitions)
            key = (device.name, spec, num_rows, capacity)
            if key not in self._compiled:
                self._run_variants(tables, scratch, sample, num_rows)
                self._compiled.add(key)
        return 1  # per class, as on every backend

    def _run_variants(self, tables: AiterPlan, scratch: torch.Tensor, sample: SampleCall, num_rows: int) -> None:
        refusals = []
        num_run = 0
        for softmax_scale in tables.softmax_scales:
            for caches, sinks in sample.variants:
                call = (*sample.call(num_rows, caches), softmax_scale, caches.key_scale, caches.value_scale, sinks)
                try:
                    self.decode(tables, scratch, *call, None)
                    num_run += 1
                except ConfigError as error:
                    refusals.append(error)  # a form of V or sinks that this aiter does not take
                except AssertionError as error:  # of what it compiles, which its host checks say nothing of
                    raise ConfigError(
                        f"aiter cannot compile a class of {num_rows} rows: {error or 'assert'}."
                    ) from error
        if not num_run:
            raise refusals[0]

    def _sample_tables(self, spec: PlanSpec, plan_rows: int, device: Any) -> tuple[AiterPlan, torch.Tensor]:
        num_cu = device.num_compute_units
        buffer, scratch = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=device.name)
            for num_bytes in (self.table_bytes(spec, plan_rows, num_cu), self.scratch_bytes(spec, plan_rows, num_cu))
        )
        return self.make_tables(spec, plan_rows, num_cu, buffer), scratch

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> AiterPlan:
        return AiterPlan(self._library, spec, plan_rows, num_compute_units, buffer, self._scales_of(spec))

    def _scales_of(self, spec: PlanSpec) -> tuple[float, ...]:
        return self._softmax_scales or (_default_softmax_scale(spec),)

    def refresh(self, tables: AiterPlan, context_lens: torch.Tensor | None, num_rows: int) -> None:
        # Always staged: alignment and batch are compile keys of the planner.
        if context_lens is None:
            tables.lens_and_emptied.zero_()
            tables.emptied.fill_(1)
        else:
            lens, staged = context_lens[:num_rows], tables.staged_lens[:num_rows]
            torch.clamp(lens, 0, tables.spec.max_context_tokens, out=staged)
            tables.lens_and_emptied[num_rows:].zero_()
        self._plan(tables)

    def _plan(self, tables: AiterPlan) -> Any:
        spec = tables.spec
        return self._library.plan(
            tables.staged_lens,
            spec.num_kv_heads,
            max_partitions=tables.max_partitions,
            sliding_window=spec.sliding_window,
            query_length=spec.query_length,
            plan=tables.plan,
        )

    def decode(
        self,
        tables: AiterPlan,
        scratch: torch.Tensor,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        softmax_scale: float,
        key_scale: Any,
        value_scale: Any,
        sinks: Any,
        lse: Any,
    ) -> None:
        if lse is not None:
            raise RouteError(
                "aiter's pa_decode gives no log-sum-exps, and this call asks for lse. Call it without, or give the "
                "manager backend='triton'."
            )
        if sinks is not None and sinks.dtype not in tables.sink_dtypes:
            compiled = " and ".join(map(str, tables.sink_dtypes))
            raise ConfigError(
                f"sinks' dtype is {sinks.dtype}, and aiter's reducer was compiled for {compiled}. Convert them once, "
                "when the model is loaded."
            )
        known_scale = tables.softmax_scales.get(softmax_scale)
        if known_scale is None:
            known_scale = _known_scale(tables, softmax_scale)
        length = tables.query_length
        num_query_rows = query.shape[0]
        num_rows = num_query_rows // length
        num_table_rows, num_columns = block_tables.shape
        if num_table_rows != num_rows:
            num_rows = min(num_rows, num_table_rows)
            if not num_rows:  # a segment behind the last row that has tables
                _zero(output)
                return
            block_tables = block_tables[:num_rows]
        call = tables.call
        if call is None or call.num_rows != num_rows or call.scratch() is not scratch:
            call = tables.call = _Call(tables, scratch, num_rows)
        if not (query.is_contiguous() and output.is_contiguous()):
            _check_strides(query, output)
        if key_scale is not None and not (type(key_scale) is type(value_scale) is torch.Tensor):
            key_scale, value_scale = _on_device(tables, key_scale, value_scale)
        end = num_rows * length
        if end == num_query_rows:
            behind = None
        else:  # rows without a block table have no tasks
            behind, output, query = output[end:], output[:end], query[:end]
        try:
            _call(
                self._library.decode, tables, call, output, query, key_cache, value_cache, block_tables, num_columns,
                known_scale, key_scale, value_scale, sinks,
            )  # fmt: skip
        except (TypeError, ValueError, NotImplementedError) as error:  # its host checks, before anything is launched
            raise ConfigError(
                f"aiter's pa_decode refuses this call: {error}. Nothing was launched. Pass what it asks for, or give "
                "the manager backend='triton'."
            ) from error
        if behind is not None:
            _zero(behind)

    def sanitize(
        self, tables: AiterPlan, context_lens: torch.Tensor, num_rows: int, flags: torch.Tensor, max_tokens: int
    ) -> None:
        count_differences(tables, context_lens, num_rows, flags, max_tokens, tables.emptied[0] == 0)


def _zero(output: torch.Tensor) -> None:
    """Whatever mode it was made in: to aiter's kernels, which write the rest of it, that is all one."""
    with torch.inference_mode():
        output.zero_()


def _architecture_by_torch(device: Any) -> str:
    return architecture_of(device)  # looked up when it is asked


def _call(
    function: Callable[..., Any],
    tables: AiterPlan,
    call: _Call,
    output: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    num_columns: int,
    softmax_scale: float,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Any:
    """pa_decode, or its predicate. The keywords are spelled out: to pass them on as a dict costs a layer 0.8 us."""
    exp_sums, max_logits, temporary_output = call.views
    return function(
        output, query, key_cache, value_cache, call.staged_lens, block_tables, softmax_scale, tables.query_length,
        compute_type=tables.compute_type,
        key_scale=key_scale,
        value_scale=value_scale,
        exp_sums=exp_sums,
        max_logits=max_logits,
        temporary_output=temporary_output,
        sinks=sinks,
        sliding_window=tables.sliding_window,
        work_plan=call.plan,
        # A constant of the site: aiter chooses kernels by it, and refuses what the tables have no columns for.
        max_context_length=(
            tables.max_tokens if num_columns >= tables.max_columns else num_columns * tables.page_size
        ),
    )  # fmt: skip


def _count_by(function: Callable[..., Any], *args: Any, **keywords: Any) -> int | None:
    """What one of the newer functions counts; None where it gives no count >= 1.

    They are called as announced, and what is released may answer otherwise, or not for every shape.
    """
    try:
        count = operator.index(function(*args, **keywords))
    except Exception:  # whatever a library raises, nobody is stopped by a number that was only better
        return None
    return count if count >= 1 else None


class _EndOfHostChecks(Exception):
    """Everything that pa_decode checks of a site, it has checked."""


def _ending_plan(plan_type: Any, plan: Any) -> Any:
    """A plan like this one, which pa_decode validates last of all and before it compiles anything."""

    def validate(*args: Any, **keywords: Any) -> None:
        raise _EndOfHostChecks

    fields = {name: getattr(plan, name) for name in PLAN_FIELDS}
    return type(plan_type.__name__, (plan_type,), {"validate": validate})(**fields)


def _known_scale(tables: AiterPlan, softmax_scale: float) -> float:
    """The scale that was compiled and is the same number to a kernel."""
    for compiled in tuple(tables.softmax_scales.values()):
        if math.isclose(softmax_scale, compiled, rel_tol=_SAME_FLOAT32):
            tables.softmax_scales[softmax_scale] = compiled
            return compiled
    compiled_ones = ", ".join(map(str, dict.fromkeys(tables.softmax_scales.values())))
    raise ConfigError(
        f"softmax_scale is {softmax_scale}, and aiter's kernels have it compiled in: they were compiled for "
        f"{compiled_ones}. Pass backend=AiterBackend(softmax_scales=[...]), of planlife.backends.aiter_backend, with "
        "all that the model has."
    )


def _on_device(tables: AiterPlan, key_scale: Any, value_scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as tensors. aiter would allocate for a number and copy it from the host, which no recording allows.

    A number is written into the plan's own words by each call, in the order of its launches: layers may differ. What
    the words hold is not remembered: a graph may write them unseen, and who sleeps and wakes a GPU loses them.
    """
    is_key_tensor, is_value_tensor = isinstance(key_scale, torch.Tensor), isinstance(value_scale, torch.Tensor)
    if not (is_key_tensor or _LEAST_SCALE <= key_scale <= _MOST_SCALE):
        raise _beyond_float32("key_scale", key_scale)
    if not (is_value_tensor or _LEAST_SCALE <= value_scale <= _MOST_SCALE):
        raise _beyond_float32("value_scale", value_scale)
    if not (is_key_tensor or is_value_tensor) and key_scale == value_scale:
        word = tables.key_word.fill_(float(key_scale))  # one launch is enough
        return word, word
    return (
        key_scale if is_key_tensor else tables.key_word.fill_(float(key_scale)),
        value_scale if is_value_tensor else tables.value_word.fill_(float(value_scale)),
    )


def _beyond_float32(what: str, scale: Any) -> ConfigError:
    return ConfigError(f"{what} is {scale}, and aiter takes float32, in which that is not finite and > 0.")


def _check_strides(query: torch.Tensor, output: torch.Tensor) -> None:
    """aiter reads and writes 16-bit rows by 4-byte words, and does not check that they start at one."""
    for what, tensor in (("query", query), ("output", output)):
        # The stride of a single row, or of a single head, is never taken.
        if any(stride % 2 for extent, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if extent > 1):
            raise ConfigError(
                f"{what}'s strides are {list(tensor.stride())}: aiter reads rows by 4-byte words, so that all but the "
                "last must be even. Pass a contiguous one."
            )


def _check_reducer(spec: PlanSpec, plan_rows: int) -> None:
    most = _most_reducer_rows(spec)
    if plan_rows > most:
        raise ConfigError(
            f"a class of {plan_rows} rows is too large for aiter's reducer: rows x (query rows per KV head x "
            f"num_kv_heads)^2 = {plan_rows} x ({spec.query_rows_per_kv_head} x {spec.num_kv_heads})^2 is above 2^30. "
            f"Pass backend=AiterBackend(max_plan_rows={most}), which makes segments, or lower the ladder's top class."
        )


def _default_softmax_scale(spec: PlanSpec) -> float:
    """What a site's kernels are compiled for where nobody names others."""
    return 1 / math.sqrt(spec.head_dim)


def _most_reducer_rows(spec: PlanSpec) -> int:
    """Rows of one table set that aiter's reducer can index (R47)."""
    return MAX_REDUCER_INDICES // (spec.query_rows_per_kv_head * spec.num_kv_heads) ** 2


def conditions(spec: PlanSpec, classes: Sequence[int]) -> tuple[str, ...]:
    """What holds for calls of a site that aiter serves, by a backend that was given nothing else, in sentences."""
    found = []
    segments = [f"{rows} in {-(-rows // MAX_PLAN_ROWS)}" for rows in classes if rows > MAX_PLAN_ROWS]
    if segments:
        found.append(f"classes above {MAX_PLAN_ROWS} rows are decoded in segments: {', '.join(segments)}")
    most = _most_reducer_rows(spec)
    too_large = [str(rows) for rows in classes if min(rows, MAX_PLAN_ROWS) > most]
    if too_large:
        found.append(
            f"warming the classes {', '.join(too_large)} is refused: aiter's reducer takes {most} rows of this shape; "
            f"pass backend=AiterBackend(max_plan_rows={most}), which makes segments"
        )
    found.append(
        f"softmax_scale is compiled in as {_default_softmax_scale(spec)} (1/sqrt(head_dim)), and calls with another "
        "one are refused: pass backend=AiterBackend(softmax_scales=[...]) where the model has others"
    )
    found.append("calls with lse= are refused: aiter gives no log-sum-exps, backend='triton' does")
    return tuple(found)


def _refuse_always(spec: PlanSpec, device: Any) -> list[str]:
    """What no call's arguments tell aiter's predicate."""
    reasons = []
    if spec.max_partitions is not None and spec.max_partitions > device.num_compute_units:
        reasons.append(
            f"max_partitions={spec.max_partitions} is above the {device.num_compute_units} compute units "
            f"of {device.name}; pass at most that, or None"
        )
    if not _most_reducer_rows(spec):
        reasons.append(
            f"aiter's reducer does not hold {spec.query_rows_per_kv_head} query rows per KV head on "
            f"{spec.num_kv_heads} KV heads: their product is above 2^15; split the heads over more ranks"
        )
    return reasons


def _explain(library: AiterLibrary, spec: PlanSpec, architecture: str, device: torch.device) -> list[str]:
    """What aiter's host checks have against a site, as far as we know them, each with its way out."""
    reasons = []
    if architecture not in FP8_OF_ARCHITECTURE:
        served = ", ".join(FP8_OF_ARCHITECTURE)
        reasons.append(f"aiter's work plans are for {served}, and this GPU is {architecture}; pass 'triton'")
    is_fp8 = spec.kv_dtype in FP8_DTYPES
    fp8 = FP8_OF_ARCHITECTURE.get(architecture)
    if is_fp8 and fp8 not in (None, spec.kv_dtype):
        reasons.append(f"the FP8 cache of {architecture} is {fp8}, not {spec.kv_dtype}; make the cache {fp8}")
    if not is_fp8 and spec.kv_dtype != "bfloat16":
        reasons.append(f"aiter reads no {spec.kv_dtype} cache; make it bfloat16 or {fp8 or 'FP8'}")
    if spec.q_dtype == "float32" or (not is_fp8 and spec.q_dtype != "bfloat16"):
        allowed = "bfloat16 or float16" if is_fp8 else "bfloat16, as the cache"
        reasons.append(f"aiter takes no {spec.q_dtype} query with a {spec.kv_dtype} cache; make it {allowed}")
    step = HEAD_DIM_STEP_FP8 if is_fp8 else HEAD_DIM_STEP_BF16
    is_small_fp8 = is_fp8 and spec.head_dim == SMALL_HEAD_DIM_FP8
    if (spec.head_dim % step and not is_small_fp8) or spec.head_dim > MAX_HEAD_DIM:
        also = f"{SMALL_HEAD_DIM_FP8} and " if is_fp8 else ""
        reasons.append(
            f"aiter has no head_dim {spec.head_dim} for a {spec.kv_dtype} cache: it has {also}multiples of {step} up "
            f"to {MAX_HEAD_DIM}; pass 'triton'"
        )
    if spec.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        reasons.append(f"aiter reads pages of {sizes} tokens, not of {spec.page_size}; choose one of them")
    if spec.kv_layout == "hnd":
        reasons.append("aiter reads no kv_layout='hnd'; use 'packed', or pass 'triton'")
    elif spec.kv_layout == "nhd":
        reasons.extend(_refuse_nhd(library, spec, architecture, device))
    return reasons


def _refuse_nhd(library: AiterLibrary, spec: PlanSpec, architecture: str, device: torch.device) -> list[str]:
    if library.nhd_max_query_length is None:
        return [
            "this aiter reads no kv_layout='nhd' (it has no pa_decode_nhd_max_query_length); use 'packed', upgrade "
            "aiter, or pass 'triton'"
        ]
    longest = _count_by(
        library.nhd_max_query_length,
        device,
        kv_dtype=getattr(torch, spec.kv_dtype),
        head_dim=spec.head_dim,
        block_size=spec.page_size,
        query_group_size=spec.group_size,
    )
    if not longest:
        return [
            f"aiter reads no kv_layout='nhd' of {spec.kv_dtype}, head_dim {spec.head_dim}, page_size {spec.page_size} "
            f"and {spec.group_size} query heads per KV head on {architecture}; use 'packed', or pass 'triton'"
        ]
    if spec.query_length > longest:
        return [
            f"aiter reads this kv_layout='nhd' for query_length up to {longest}, not {spec.query_length}; use "
            "'packed', or pass 'triton'"
        ]
    return []
