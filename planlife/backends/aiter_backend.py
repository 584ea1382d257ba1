"""The aiter backend: ROCm's FlyDSL planner and paged decode, called over the manager's bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from ..aiter_library import PLAN_FIELDS, AiterLibrary, architecture_name, describe, probe, require_library
from ..ambient import plain
from ..configuration import DeviceMeant
from ..errors import BackendUnavailableError, ConfigError, RouteError
from ..kernels.torch_write import overwrite
from ..planner import default_workgroup_budget
from ..spec import PlanSpec, check_int
from ..torch_device import is_out_of_memory
from .aiter_budget import known_budget
from .aiter_limits import (
    FP8_OF_ARCHITECTURE,
    MAX_PLAN_ROWS,
    WIDE_CACHE_BYTES,
    check_reducer,
    explain_refusal,
    refuse_always,
    refuse_compile,
)
from .aiter_plan import (
    AiterPlan,
    RowCountViews,
    is_unsafe_with_plain_v,
    reads_query_by_words,
    scratch_bytes,
    table_bytes,
)
from .aiter_sample import SampleCall
from .aiter_scales import (
    cache_scales_on_device,
    check_cache_scales,
    check_softmax_scales,
    compiled_softmax_scale,
    scales_to_compile,
)
from .torch_backend import count_differences

#: What aiter's host code raises, its choice of a schedule included, before it compiles or launches anything.
_HOST_CHECKS = (TypeError, ValueError, NotImplementedError, AssertionError)
_WORD_BYTES = 4


def architecture_of(device: Any) -> str:
    """ "gfx942", ... of an AMD GPU, "" for every other device. device: a planlife Device."""
    if torch.version.hip is None or not device.name.startswith("cuda"):
        return ""
    return architecture_name(torch.cuda.get_device_properties(device.name).gcnArchName)


class AiterBackend:
    """planlife.backends.base.Backend over ROCm's aiter, for AMD GPUs.

    max_plan_rows: most rows of one table set, at most aiter's own limit; larger classes become segments.
    softmax_scales: those that pa_decode will be called with, which aiter compiles in, besides the PlanSpec's own; () =
        that one, 1/sqrt(head_dim) where a PlanSpec names none.
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
        self._softmax_scales = check_softmax_scales(softmax_scales)
        if library is None:
            library, reasons = probe()
            if library is None:
                raise BackendUnavailableError("; ".join(reasons) + ".")
        self._library = require_library(library)
        self._architecture_of = architecture_of or _architecture_by_torch
        #: (device, settled spec, rows, capacity) whose every variant ran once.
        self._compiled: set[tuple[str, PlanSpec, int, int]] = set()

    @plain
    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        try:
            architecture = architecture_name(self._architecture_of(device) or "")
        except Exception as error:  # whatever a driver raises is a reason
            return [f"the architecture of {device.name} cannot be had ({describe(error)}); pass 'triton' or 'torch'"]
        if not architecture:
            way_out = "'torch'" if device.name == "cpu" else "'triton'"
            return [f"aiter's kernels are for AMD GPUs, and {device.name} is none; pass {way_out}"]
        reasons = refuse_always(spec, device)
        refusal = None if reasons else self._ask_library(spec, device, architecture)
        uncompiled = refuse_compile(self._library, spec, architecture, device.num_compute_units)
        if refusal == "":
            # There its schedule itself counts, and a predicate has asked it.
            is_counted = architecture == "gfx1250" and self._library.can_use is not None
            return () if is_counted else tuple(uncompiled)
        known = [*explain_refusal(self._library, spec, architecture, torch.device(device.name)), *uncompiled]
        return [*reasons, *known] if known or not refusal else [refusal]

    def _ask_library(self, spec: PlanSpec, device: Any, architecture: str) -> str | None:
        """What this aiter says against calls of this site, as far as its host code decides; "": nothing.

        None: nobody could be asked, because the device has no room for the tensors of one call.
        """
        with device.relaxed():
            try:
                sample = SampleCall(spec, 1, device.name)
                buffer, scratch = self._sample_buffers(spec, 1, device)
            except Exception:  # a backend that raises is no answer
                return None
            asked, says = self._ask_about(spec, device, sample, buffer, scratch)
        if not says:
            return ""
        # Which texts read BF16 caches, and where, no signature tells.
        fp8 = FP8_OF_ARCHITECTURE.get(architecture) if spec.kv_dtype == "bfloat16" else None
        way_out = f"make the cache {fp8}, " if fp8 else ""
        return (
            f"this aiter's {asked} refuses calls of this site on {architecture} ({says}); {way_out}upgrade aiter, or "
            "pass 'triton'"
        )

    def _ask_about(
        self, spec: PlanSpec, device: Any, sample: SampleCall, buffer: torch.Tensor, scratch: torch.Tensor
    ) -> tuple[str, str]:
        """Who was asked last about a call of one row, and what it says against it; "": nothing.

        The planner is asked, then the predicate where there is one, else pa_decode itself. What would launch gets a
        plan at which its host checks end.
        """
        can_use = self._library.can_use
        asked = "PADecodePlan"
        try:
            tables = self.make_tables(spec, 1, device.num_compute_units, buffer)
            views = RowCountViews(tables, scratch, 1)
            ending_plan = _ending_plan(self._library.plan_type, views.plan)
            asked = "plan_pa_decode"
            with suppress(_EndOfHostChecks):
                self._call_planner(tables, ending_plan)
        except Exception as error:  # whatever a library raises is its answer
            return asked, describe(error)
        if can_use is None:
            asked, views.plan = "pa_decode", ending_plan
        else:
            asked = "can_use_flydsl_pa_decode"
        says = ""
        for caches in sample.caches:
            tensors = sample.call(1, caches)
            scales = scales_to_compile(spec, self._softmax_scales)[0], caches.key_scale, caches.value_scale
            try:
                is_served = _call_decode(
                    can_use or self._library.decode, tables, views, *tensors, tensors[-1].shape[1], *scales, None
                )
                if is_served is True or can_use is None:
                    return asked, ""
                says = says or ("without a reason" if is_served is False else f"it answers {describe(is_served)}")
            except _EndOfHostChecks:
                return asked, ""
            except Exception as error:
                says = says or describe(error)  # the first form's: the others are rarer, and their words say that
        return asked, says

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        return ()

    @plain
    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        default = default_workgroup_budget(device.num_compute_units)
        if not self._library.names_of_budgets or isinstance(device, DeviceMeant):
            return default
        architecture = architecture_name(self._architecture_of(device) or "")
        (softmax_scale, *_) = scales_to_compile(spec, self._softmax_scales)
        return known_budget(self._library, spec, device, architecture, softmax_scale) or default

    def excluded(self, device: Any) -> Mapping[str, str]:
        return {
            "compiling": "while a class is minted: another table set and scratch of it, and query, output and block "
            "tables of one call; planlife doctor says how many bytes"
        }

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return table_bytes(spec, plan_rows, num_compute_units)

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        return scratch_bytes(spec, plan_rows, num_compute_units)

    @plain
    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        """Runs planner and decode over empty rows, once for every row count that a call of this class may have.

        What aiter compiles depends on rows and capacity by thresholds that are its own, and is asked for by calls.
        Besides: with each form of V; with sinks of each dtype and without; and with caches of each size that is
        addressed otherwise, which sinks have nothing to do with. Takes `compile_bytes` while it runs.

        Raises ConfigError for a class that aiter's reducer cannot index (R47), or that aiter refuses or cannot compile,
        and MemoryError.
        """
        check_reducer(spec, plan_rows, device.num_compute_units)
        try:
            self._run_class(spec, plan_rows, device, least_rows)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(str(error)) from error
        return 1  # per class, as on every backend

    def _run_class(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int) -> None:
        sample = SampleCall(spec, plan_rows, device.name, (0, *WIDE_CACHE_BYTES))
        buffer, scratch = self._sample_buffers(spec, plan_rows, device)
        tables = self.make_tables(spec, plan_rows, device.num_compute_units, buffer)
        self.refresh(tables, torch.zeros(plan_rows, dtype=torch.int32, device=device.name), plan_rows)
        if self._call_planner(tables, tables.plan) is not tables.plan:
            raise ConfigError(
                "aiter's plan_pa_decode(plan=...) made another plan: the one it was given is not refreshed."
            )
        for num_rows in range(least_rows, plan_rows + 1):
            key = (device.name, spec, num_rows, tables.capacity_of(num_rows))
            if key not in self._compiled:
                self._run_variants(tables, scratch, sample, num_rows)
                self._compiled.add(key)

    def _run_variants(self, tables: AiterPlan, scratch: torch.Tensor, sample: SampleCall, num_rows: int) -> None:
        """Calls of one row count in every form. Some may not go: this aiter does not take them, or cannot compile them,
        and says so again to an engine that has them."""
        refusals: list[str] = []  # texts: an exception would hold this frame, and all that it holds
        num_run = 0
        for softmax_scale in tables.softmax_scales:
            for caches, sinks in sample.variants:
                scales = softmax_scale, caches.key_scale, caches.value_scale
                try:
                    self.decode(tables, scratch, *sample.call(num_rows, caches), *scales, sinks, None)
                    num_run += 1
                except ConfigError as error:
                    refusals.append(str(error))
                except Exception as error:  # of what it compiles, which its host checks say nothing of
                    if isinstance(error, MemoryError) or is_out_of_memory(error):
                        raise
                    plan_rows = tables.reduce_info.shape[0]
                    refusals.append(
                        f"aiter cannot compile a class of {plan_rows} rows: calls of {num_rows} rows fail "
                        f"({describe(error)}). Give the manager backend='triton', or fallback='triton' for what aiter "
                        "cannot compile."
                    )
        if not num_run:
            raise ConfigError(refusals[0])

    def _sample_buffers(self, spec: PlanSpec, plan_rows: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a table set and of its scratch."""
        num_cu = device.num_compute_units
        buffer, scratch = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=device.name)
            for num_bytes in (self.table_bytes(spec, plan_rows, num_cu), self.scratch_bytes(spec, plan_rows, num_cu))
        )
        return buffer, scratch

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> AiterPlan:
        scales = scales_to_compile(spec, self._softmax_scales)
        architecture = self._architecture_at(buffer.device)
        return AiterPlan(self._library, spec, plan_rows, num_compute_units, buffer, scales, architecture)

    def _architecture_at(self, device: torch.device) -> str:
        return architecture_name(self._architecture_of(DeviceMeant(0, str(device))) or "")

    @plain
    def refresh(self, tables: AiterPlan, context_lens: torch.Tensor | None, num_rows: int) -> None:
        # Always staged: alignment and batch are compile keys of the planner.
        if context_lens is None:
            tables.lens_and_emptied.zero_()
            tables.emptied.fill_(1)
        else:
            # Clamped: aiter knows no other bound on what it reads than a row's length.
            lens, staged = context_lens[:num_rows], tables.staged_lens[:num_rows]
            torch.clamp(lens, 0, tables.spec.max_context_tokens, out=staged)
            tables.lens_and_emptied[num_rows:].zero_()
        try:
            self._call_planner(tables, tables.plan)
        except _HOST_CHECKS as error:
            raise ConfigError(
                f"aiter's plan_pa_decode refuses these tables: {error}. Give the manager backend='triton'."
            ) from error

    def _call_planner(self, tables: AiterPlan, plan: Any) -> Any:
        spec = tables.spec
        return self._library.plan(
            tables.staged_lens,
            spec.num_kv_heads,
            max_partitions=tables.max_partitions,
            sliding_window=spec.sliding_window,
            query_length=spec.query_length,
            plan=plan,
        )

    @plain
    def check_call(
        self,
        spec: PlanSpec,
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
        """See `base.call_check_of`. What aiter's own host checks say of these tensors, only a call of it tells."""
        _check_lse(lse)
        compiled_softmax_scale({scale: scale for scale in scales_to_compile(spec, self._softmax_scales)}, softmax_scale)
        architecture = self._architecture_at(query.device)
        if reads_query_by_words(architecture):
            _check_words(query)
        if is_unsafe_with_plain_v(spec, architecture):
            _check_v(value_cache)
        check_cache_scales(key_scale, value_scale)
        # As many rows as the first table set of the call gets: a single one is always one block.
        num_rows = min(query.shape[0] // spec.query_length, self.max_plan_rows or MAX_PLAN_ROWS)
        if not block_tables[:num_rows].is_contiguous():
            raise ConfigError(
                f"block_tables' strides are {list(block_tables.stride())}, and aiter reads only contiguous ones. Pass "
                "the engine's whole table, or a contiguous copy."
            )

    @plain
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
            _check_lse(lse)
        compiled_scale = tables.softmax_scales.get(softmax_scale)
        if compiled_scale is None:
            compiled_scale = compiled_softmax_scale(tables.softmax_scales, softmax_scale)
        length = tables.query_length
        num_query_rows = query.shape[0]
        num_rows = num_query_rows // length
        num_table_rows, num_columns = block_tables.shape
        if num_table_rows != num_rows:
            num_rows = min(num_rows, num_table_rows)
            if not num_rows:  # a segment behind the last row that has tables
                overwrite(output, 0.0)
                return
            block_tables = block_tables[:num_rows]
        views = tables.last_views
        if views is None or views.num_rows != num_rows or views.scratch() is not scratch:
            views = tables.last_views = RowCountViews(tables, scratch, num_rows)
        if tables.reads_query_by_words and (query.data_ptr() % _WORD_BYTES or not query.is_contiguous()):
            _check_words(query)
        if tables.is_unsafe_with_plain_v:
            _check_v(value_cache)
        if tables.has_scales and not (type(key_scale) is type(value_scale) is torch.Tensor):
            key_scale, value_scale = cache_scales_on_device(tables, key_scale, value_scale)
        end = num_rows * length
        if end == num_query_rows:
            behind = None
        else:  # rows without a block table have no tasks
            behind, output, query = output[end:], output[:end], query[:end]
        try:
            _call_decode(
                self._library.decode, tables, views, output, query, key_cache, value_cache, block_tables, num_columns,
                compiled_scale, key_scale, value_scale, sinks,
            )  # fmt: skip
        except _HOST_CHECKS as error:
            raise ConfigError(
                f"aiter's pa_decode refuses this call: {error}. It launched nothing. Pass what it asks for, or give "
                "the manager backend='triton'."
            ) from error
        if behind is not None:
            overwrite(behind, 0.0)

    @plain
    def sanitize(
        self, tables: AiterPlan, context_lens: torch.Tensor, num_rows: int, flags: torch.Tensor, max_tokens: int
    ) -> None:
        is_live = tables.emptied[0] == 0
        count_differences(tables, context_lens, num_rows, flags, max_tokens, is_live, tables.max_tokens)


def _architecture_by_torch(device: Any) -> str:
    return architecture_of(device)  # looked up when it is asked


def _call_decode(
    function: Callable[..., Any],
    tables: AiterPlan,
    views: RowCountViews,
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
    exp_sums, max_logits, temporary_output = views.partials
    return function(
        output, query, key_cache, value_cache, views.staged_lens, block_tables, softmax_scale, tables.query_length,
        compute_type=tables.compute_type,
        key_scale=key_scale,
        value_scale=value_scale,
        exp_sums=exp_sums,
        max_logits=max_logits,
        temporary_output=temporary_output,
        sinks=sinks,
        sliding_window=tables.sliding_window,
        work_plan=views.plan,
        # A constant of the site: aiter chooses kernels by it, and refuses what the tables have no columns for.
        max_context_length=(
            tables.max_tokens if num_columns >= tables.max_columns else num_columns * tables.page_size
        ),
    )  # fmt: skip


class _EndOfHostChecks(Exception):
    """Everything that pa_decode checks of a site, it has checked."""


def _ending_plan(plan_type: Any, plan: Any) -> Any:
    """A plan like this one, which pa_decode validates last of all and before it compiles anything."""

    def validate(*args: Any, **keywords: Any) -> None:
        raise _EndOfHostChecks

    fields = {name: getattr(plan, name) for name in PLAN_FIELDS}
    return type(plan_type.__name__, (plan_type,), {"validate": validate})(**fields)


def _check_lse(lse: object) -> None:
    if lse is not None:
        raise RouteError(
            "aiter's pa_decode gives no log-sum-exps, and this call asks for lse. Call it without, or give the manager "
            "backend='triton'."
        )


def _check_v(value_cache: torch.Tensor) -> None:
    if value_cache.dim() == 4:
        raise ConfigError(
            "value_cache is 4-D: for pages of 16 tokens and float16 queries a page fault of aiter's kernel is reported "
            "there on gfx1250, which ends the process. Pass V as [pages, kv_heads, page/x, head_dim, x], make the "
            "queries bfloat16, or give the manager backend='triton'."
        )


def _check_words(query: torch.Tensor) -> None:
    """These kernels load 16-bit rows of the query by 4-byte words, and do not check that they start at one."""
    # The stride of a single row, or of a single head, is never taken.
    if any(stride % 2 for extent, stride in zip(query.shape[:-1], query.stride(), strict=False) if extent > 1):
        raise ConfigError(
            f"query's strides are {list(query.stride())}: aiter reads its rows by 4-byte words here, so that all but "
            "the last must be even. Pass a contiguous one."
        )
    if query.data_ptr() % _WORD_BYTES:
        raise ConfigError(
            "query starts between two 4-byte words, by which aiter reads its rows here. Pass a copy, or a view that "
            "starts at an even element."
        )
