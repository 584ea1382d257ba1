"""What a decode call must look like, checked before any launch. Knows tensors by their attributes only."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from numbers import Real
from typing import Any

from .device import Device, undisturbed
from .errors import ConfigError, is_tensor, shown
from .spec import BYTE_DTYPES, DTYPE_BYTES, FP8_DTYPES, QUERY_DTYPES, PlanSpec, dtype_name, window_tokens
from .unserved import MLA, NON_UNIFORM, Unserved

#: Caches are remembered one by one: a model has tens of them. An engine that makes new views for every call
#: would fill the memory with dead ones, so it starts afresh at this many.
_MAX_REMEMBERED_CACHES = 1024

_Ref = Callable[[], object]


def _nothing() -> None:
    """A reference to no object."""


class CallChecker:
    """Checks the tensors of one site's calls, and remembers what passed.

    Every layer of every step asks, with tensors that mostly passed before. They are remembered by identity,
    through weak references, so that a recycled id is not taken for the object that had it; new query and cache
    objects pass on the attributes of the last ones.

    Borrows: nothing; remembered tensors may die.
    """

    __slots__ = (
        "_cache_attributes",
        "_caches",
        "_device",
        "_is_disturbed",
        "_is_per_token",
        "_q_dtype",
        "_queries",
        "_scale",
        "_scale_attributes",
        "_tables",
        "_wanted",
        "site",
        "spec",
    )

    def __init__(self, site: str, spec: PlanSpec, device: Device) -> None:
        self.site = site
        self.spec = spec
        self._device = device
        self._is_disturbed = device.is_disturbed
        self._is_per_token = spec.scales == "per_token"
        self._q_dtype = device.dtype(spec.q_dtype)
        #: Shape after the pages, of K and of each form that V may have.
        self._wanted = _cache_shapes(spec)
        #: Of each layer, by its key cache: both caches and the scales that it was called with last.
        self._caches: dict[int, tuple[_Ref, _Ref, _Ref, _Ref]] = {}
        self._cache_attributes: object = None  # of the last pair that passed in full
        self._scale_attributes: object = None  # the same of scales, which a cache's pages belong to
        #: The last block tables that passed, their rows, and what they have columns for.
        self._tables: tuple[_Ref, int, int] = (_nothing, 0, 0)
        #: The last query and output that passed in full, their rows, shape and device.
        self._queries: tuple[_Ref, _Ref, int, object, object] = (_nothing, _nothing, -1, None, None)
        self._scale: float | None = None

    def check(
        self,
        plan_rows: int,
        class_rows: int,
        output: Any,
        query: Any,
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        softmax_scale: Any,
        key_scale: Any,
        value_scale: Any,
        sinks: Any,
        lse: Any,
        *,
        max_tokens: int | None = None,
    ) -> None:
        """Refuse a call that the kernels cannot take as it is.

        output, query: q_dtype[R * query_length, q_heads, head_dim], last axis contiguous, R in [plan_rows,
            class_rows].
        key_cache, value_cache: kv_dtype in the spec's layout, last axis contiguous. As many pages each; a packed V may
            have fewer, which block tables then stay below.
        block_tables: int32[>= plan_rows, >= 1].
        softmax_scale, and host numbers as scales: finite and > 0. Scales on the device are not read. Of FP8 caches with
            scales="per_tensor" both may be None, which is 1.0.
        lse: None, or float32[R * query_length, q_heads], contiguous.
        max_tokens: the step's longest length, which the block tables must have columns for; None: not known.

        Raises ConfigError. Capture: yes. Syncs: no. Allocates: no.
        """
        query_ref, output_ref, rows, shape, device = self._queries
        if not (
            plan_rows <= rows <= class_rows
            and (
                # A reference that died gives None, which must not pass for a tensor that was remembered.
                (query_ref() is query is not None and output_ref() is output is not None)
                or (
                    self._are_like(shape, device, output, query)
                    if self._is_disturbed()
                    else self._look_alike(shape, device, output, query)
                )
            )
        ):
            self._check_queries(plan_rows, class_rows, output, query)
        caches = self._caches.get(id(key_cache))
        if caches is None or caches[0]() is not key_cache or caches[1]() is not value_cache or value_cache is None:
            caches = self._remember_caches(key_cache, value_cache)
        tables_ref, table_rows, table_tokens = self._tables
        if (
            tables_ref() is not block_tables
            or block_tables is None
            or table_rows < plan_rows
            or (max_tokens is not None and table_tokens < max_tokens)
        ):
            self._check_tables(plan_rows, block_tables, max_tokens)
        # The type comes first: comparing a device tensor would read it back.
        if type(softmax_scale) is not float or softmax_scale != self._scale:
            self._check_softmax_scale(softmax_scale)
        if self._is_per_token or key_scale is not None or value_scale is not None:
            _, _, key_scale_ref, value_scale_ref = caches
            if (
                key_scale_ref() is not key_scale
                or value_scale_ref() is not value_scale
                or key_scale is None
                or value_scale is None
            ):
                self._remember_scales(caches, key_cache, key_scale, value_scale)
        if sinks is not None:
            self._check_sinks(sinks)
        if lse is not None:
            self.check_lse(lse, query)

    def _look_alike(self, shape: object, device: object, output: Any, query: Any) -> bool:
        """Whether query and output have the attributes that passed in full."""
        return (
            getattr(query, "shape", None) == shape
            and getattr(output, "shape", None) == shape
            and query.dtype is self._q_dtype
            and output.dtype is self._q_dtype
            and query.device == device
            and output.device == device
            and (query.is_contiguous() or query.stride()[-1] == 1)
            and (output.is_contiguous() or (output.stride()[-1] == 1 and 0 not in output.stride()))
        )

    @undisturbed
    def _are_like(self, *looks: Any) -> bool:
        return self._look_alike(*looks)

    def check_output(self, output: Any) -> None:
        """Refuse what cannot be the output of a dummy step, of any row count. Raises ConfigError."""
        self._check_placed("output", output, self.spec.q_dtype)
        if tuple(output.shape)[1:] != (self.spec.num_q_heads, self.spec.head_dim):
            raise self._refuse(
                "output's shape", list(output.shape), f"[any, {self.spec.num_q_heads}, {self.spec.head_dim}]"
            )

    def check_window(self, sliding_window: Any) -> None:
        """Refuse the window of a layer that is not this site's, in any form that engines have. Raises ConfigError."""
        wanted = self.spec.sliding_window
        if window_tokens(sliding_window, self.spec.query_length) != wanted:
            raise self._refuse(
                "sliding_window",
                shown(sliding_window),
                f"{wanted or '0, all keys'}: its plans are made for that. Make a site per window, and plan a step of "
                "the layer's own site",
            )

    def _refuse(self, what: str, found: object, wanted: str, because: Unserved | None = None) -> ConfigError:
        reason = "" if because is None else f" {because}."
        return ConfigError(f"site {self.site!r}: {what} is {found}, wanted {wanted}.{reason}")

    def _check_placed(self, what: str, tensor: Any, wanted: str) -> None:
        if not is_tensor(tensor):
            raise self._refuse(what, shown(tensor), "a tensor")
        if str(tensor.device) != self._device.name:
            raise self._refuse(f"{what}'s device", tensor.device, f"the manager's, {self._device.name}")
        if tensor.dtype != self._device.dtype(wanted):
            is_fp8_as_bytes = wanted in FP8_DTYPES and dtype_name(tensor.dtype) in BYTE_DTYPES
            view = f": take {what}.view(torch.{wanted}), which reads the same bytes" if is_fp8_as_bytes else ""
            raise self._refuse(f"{what}'s dtype", tensor.dtype, f"{wanted}{view}")

    def _check_last_axis(self, what: str, tensor: Any) -> None:
        if tensor.stride()[-1] != 1:
            raise self._refuse(f"{what}'s last stride", tensor.stride()[-1], "1 (a contiguous last axis)")

    @undisturbed
    def _check_queries(self, plan_rows: int, class_rows: int, output: Any, query: Any) -> None:
        spec = self.spec
        for what, tensor in (("query", query), ("output", output)):
            self._check_placed(what, tensor, spec.q_dtype)
        shape = tuple(query.shape)
        length = spec.query_length
        if len(shape) != 3 or shape[1:] != (spec.num_q_heads, spec.head_dim) or shape[0] % length:
            is_ragged = shape[1:] == (spec.num_q_heads, spec.head_dim)
            raise self._refuse(
                "query's shape",
                list(shape),
                f"[rows * {length}, {spec.num_q_heads}, {spec.head_dim}]",
                NON_UNIFORM if is_ragged else None,
            )
        rows = shape[0] // length
        if not plan_rows <= rows <= class_rows:
            raise self._refuse(
                "query's row count",
                f"{rows} ({shape[0]} query rows of query_length {length})",
                f"{plan_rows} to {class_rows}: the plan's rows to those of its class",
            )
        if tuple(output.shape) != shape:
            is_mla = len(output.shape) == 3 and tuple(output.shape)[:-1] == shape[:-1]
            raise self._refuse("output's shape", list(output.shape), f"query's, {list(shape)}", MLA if is_mla else None)
        for what, tensor in (("query", query), ("output", output)):
            self._check_last_axis(what, tensor)
        if is_broadcast(output):
            raise self._refuse("output's strides", list(output.stride()), "memory of its own for each number")
        self._queries = (weakref.ref(query), weakref.ref(output), rows, query.shape, query.device)

    @undisturbed
    def _remember_caches(self, key_cache: Any, value_cache: Any) -> tuple[_Ref, _Ref, _Ref, _Ref]:
        attributes = _attributes(key_cache), _attributes(value_cache)
        if attributes != self._cache_attributes:
            self._check_caches(key_cache, value_cache)
            self._cache_attributes = attributes
        if len(self._caches) >= _MAX_REMEMBERED_CACHES:
            self._caches.clear()
        caches = (weakref.ref(key_cache), weakref.ref(value_cache), _nothing, _nothing)
        self._caches[id(key_cache)] = caches
        return caches

    def _check_caches(self, key_cache: Any, value_cache: Any) -> None:
        spec = self.spec
        for what, cache, wanted in (
            ("key_cache", key_cache, self._wanted[:1]),
            ("value_cache", value_cache, self._wanted[1:]),
        ):
            self._check_placed(what, cache, spec.kv_dtype)
            shape = tuple(cache.shape)
            if shape[1:] not in wanted or shape[0] < 1:
                is_mla = (
                    cache is value_cache
                    and spec.kv_layout != "packed"
                    and shape[1:-1] == wanted[0][:-1]
                    and shape[-1] != spec.head_dim
                )
                raise self._refuse(
                    f"{what}'s shape",
                    list(shape),
                    " or ".join(f"[pages, {', '.join(map(str, s))}]" for s in wanted)
                    + f" (kv_layout {spec.kv_layout!r}, page_size {spec.page_size}, num_kv_heads "
                    f"{spec.num_kv_heads}, head_dim {spec.head_dim})",
                    MLA if is_mla else None,
                )
            self._check_last_axis(what, cache)
        num_pages, num_value_pages = key_cache.shape[0], value_cache.shape[0]
        # K and V of one block of memory, packed: V starts some pages behind K, so that its view has those fewer.
        may_be_fewer = spec.kv_layout == "packed"
        if num_value_pages > num_pages or (num_value_pages < num_pages and not may_be_fewer):
            at_most = "at most " if may_be_fewer else ""
            raise self._refuse("value_cache's page count", num_value_pages, f"{at_most}key_cache's, {num_pages}")

    @undisturbed
    def _check_tables(self, plan_rows: int, block_tables: Any, max_tokens: int | None) -> None:
        self._check_placed("block_tables", block_tables, "int32")
        shape = tuple(block_tables.shape)
        if len(shape) != 2 or shape[0] < plan_rows or shape[1] < 1:
            raise self._refuse(
                "block_tables' shape", list(shape), f"[at least the plan's {plan_rows} rows, at least 1 page]"
            )
        table_tokens = shape[1] * self.spec.page_size
        if max_tokens is not None and max_tokens > table_tokens:
            raise self._refuse(
                "block_tables' columns",
                f"{shape[1]} pages of {self.spec.page_size} tokens, {table_tokens:,} in all",
                f"as many as the step's max_tokens, {max_tokens:,}, takes",
            )
        self._tables = (weakref.ref(block_tables), shape[0], table_tokens)

    def _check_softmax_scale(self, softmax_scale: Any) -> None:
        self._check_number("softmax_scale", softmax_scale)
        self._scale = float(softmax_scale)

    def _check_number(self, what: str, value: Any) -> None:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise self._refuse(what, shown(value), "a number on the host")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            raise self._refuse(what, value, "finite and > 0")

    @undisturbed
    def _remember_scales(
        self, caches: tuple[_Ref, _Ref, _Ref, _Ref], key_cache: Any, key_scale: Any, value_scale: Any
    ) -> None:
        attributes = key_cache.shape[0], _attributes(key_scale), _attributes(value_scale)
        if None in attributes or attributes != self._scale_attributes:
            self._check_scales(key_cache.shape[0], key_scale, value_scale)
            self._scale_attributes = attributes
        self._caches[id(key_cache)] = (*caches[:2], _reference(key_scale), _reference(value_scale))

    def _check_scales(self, num_pages: int, key_scale: Any, value_scale: Any) -> None:
        spec = self.spec
        for what, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
            if spec.scales == "none":
                if scale is not None:
                    raise self._refuse(what, shown(scale), f"None: a {spec.kv_dtype} cache has no scales")
            elif scale is None:
                # Both None, of a cache with scales per tensor, is 1.0, and does not come here.
                raise self._refuse(what, None, f"a {spec.scales} scale: the cache is {spec.kv_dtype}")
            elif is_tensor(scale):
                self._check_placed(what, scale, "float32")
                self._check_scale_shape(num_pages, what, scale)
            elif spec.scales == "per_token":
                raise self._refuse(what, shown(scale), "a float32 tensor with one scale per token")
            else:
                self._check_number(what, scale)

    def _check_scale_shape(self, num_pages: int, what: str, scale: Any) -> None:
        shape = tuple(scale.shape)
        if self.spec.scales == "per_tensor":
            if shape not in ((), (1,)):
                raise self._refuse(f"{what}'s shape", list(shape), "[] or [1], one scale for the whole cache")
            return
        wanted = (num_pages, self.spec.num_kv_heads, self.spec.page_size)
        if shape not in (wanted, (*wanted, 1)):
            raise self._refuse(f"{what}'s shape", list(shape), f"{list(wanted)} or {[*wanted, 1]}, one scale per token")
        if scale.stride()[2] != 1 and self.spec.page_size > 1:
            raise self._refuse(f"{what}'s stride over tokens", scale.stride()[2], "1 (a contiguous token axis)")

    @undisturbed
    def check_lse(self, lse: Any, query: Any) -> None:
        """Refuse what cannot take the log-sum-exps of that query's rows, or output's. Raises ConfigError."""
        self._check_placed("lse", lse, "float32")
        wanted = (query.shape[0], self.spec.num_q_heads)
        if tuple(lse.shape) != wanted:
            raise self._refuse("lse's shape", list(lse.shape), f"{list(wanted)}, one per query row and query head")
        if not lse.is_contiguous():
            raise self._refuse("lse's contiguity", False, "True: backends write it as one block")

    @undisturbed
    def _check_sinks(self, sinks: Any) -> None:
        if not is_tensor(sinks) or tuple(sinks.shape) != (self.spec.num_q_heads,):
            found = list(sinks.shape) if is_tensor(sinks) else shown(sinks)
            raise self._refuse("sinks' shape", found, f"[{self.spec.num_q_heads}], one logit per query head")
        if str(sinks.device) != self._device.name:
            raise self._refuse("sinks' device", sinks.device, f"the manager's, {self._device.name}")
        if dtype_name(sinks.dtype) not in QUERY_DTYPES:
            raise self._refuse("sinks' dtype", sinks.dtype, f"one of {', '.join(QUERY_DTYPES)}")


def is_broadcast(tensor: Any) -> bool:
    """Whether several numbers of this tensor lie in one place, as expand() makes them: nothing may be written there."""
    return any(not stride and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _reference(scale: Any) -> _Ref:
    """Gives a scale back: a tensor while it lives. Numbers cannot be referred to weakly, and cost nothing to keep."""
    return weakref.ref(scale) if is_tensor(scale) else lambda: scale


def _attributes(tensor: Any) -> object:
    """All that a cache check depends on; None, which passes nothing, for what is no tensor."""
    try:
        return tensor.shape, tensor.dtype, tensor.device, tensor.stride()
    except (AttributeError, TypeError):
        return None


def _cache_shapes(spec: PlanSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes behind the page axis: of K, then each that V may have."""
    heads, page, dim = spec.num_kv_heads, spec.page_size, spec.head_dim
    if spec.kv_layout == "nhd":
        return ((page, heads, dim),) * 2
    if spec.kv_layout == "hnd":
        return ((heads, page, dim),) * 2
    pack = 16 // DTYPE_BYTES[spec.kv_dtype]  # 16 bytes of one token lie together
    return (heads, dim // pack, page, pack), (heads, page // pack, dim, pack), (heads, dim, page)
