"""The double of aiter's planned decode: as strict as the library on the host, and strict where that is silent."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import make_dataclass
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import Signature
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ...aiter_library import architecture_name
from ...emulated_graph import current_capture_id, launch
from ...planner import plan_capacity
from . import compile_keys, device_side, signatures
from .host_checks import (
    FIRST_PARTITION_LIMIT,
    CheckedCall,
    Library,
    check_decode,
    check_scratch,
    check_window_and_length,
    require,
    scratch_of,
)
from .signatures import GENERATIONS, OPTIONAL, STRANGERS

_ROOT = "aiter.ops.flydsl"
MODULE = f"{_ROOT}.pa_decode"
#: Where get_cached_budget is, with what makes its arguments, and in some texts prepare_pa_decode_plan.
TUNING_MODULE = f"{_ROOT}.pa_decode_tuning"
#: Where the planner and its plan are defined; `pa_decode` only imports them.
PLANNER_MODULE = f"{_ROOT}.kernels.pa_decode_plan"
_MAX_ROWS = 4096
_MAX_ROWS_OF_GFX1250 = 81_792
#: The library keeps so many reducers, the last ones that it was asked for. Plans and tiles it keeps for good.
MOST_REDUCERS = 256
_TOKENS = 1 << 23  # float32 holds each of them, and one more


class DoubleViolation(Exception):
    """A call that the real library takes, and that is wrong all the same."""


class AiterDouble:
    """One library on one machine, and what was done with it.

    arch, num_cu: the machine. generation: a name of GENERATIONS or STRANGERS.
    optional: names of OPTIONAL that this library has; None = all of them in "newer", else none.
    device_type: "cpu" or "cuda", whose tensors count as the GPU's.
    native_bf16: whether those of G2, G3 and "newer" take BF16 caches on gfx942 and gfx950. G4 never does.
    on_violation: "raise" or "record".
    finite_tails: whether V must be finite behind a row's last token; False for tests that poison what no row owns.
    tuned_budgets: by rows, what was tuned offline, which get_cached_budget and prepare_pa_decode_plan tell.
    prepares_in_tuning: whether prepare_pa_decode_plan is in `TUNING_MODULE`, as in newer texts, and not in `MODULE`.
    private_scratch: whether live plans must not share scratch, even one after another.
    refresh_delay_cycles: on a GPU, how long a refresh leaves poison in the tables, so that a decode that is not ordered
        behind it is caught.

    Attributes besides: `violations`, messages, also of those that were not raised; `refreshes`, `decodes`, and
    `plans_made`, how often each was done; `functions`, the library's by name.

    Raises ValueError for settings that are none.

    Owns: fault counters on each GPU. Graphs recorded through it write them, so it must outlive them.
    """

    def __init__(
        self,
        *,
        arch: str = "gfx942",
        num_cu: int = 304,
        generation: str = "G3",
        optional: Collection[str] | None = None,
        device_type: str = "cpu",
        native_bf16: bool = True,
        on_violation: str = "raise",
        finite_tails: bool = True,
        private_scratch: bool = False,
        tuned_budgets: Mapping[int, int] | None = None,
        prepares_in_tuning: bool = False,
        refresh_delay_cycles: int = 200_000,
    ) -> None:
        if generation not in GENERATIONS and generation not in STRANGERS:
            raise ValueError(f"generation must be one of {[*GENERATIONS, *STRANGERS]}, got {generation!r}.")
        if optional is None:
            optional = OPTIONAL if generation == "newer" else ()
        if unknown := set(optional) - set(OPTIONAL):
            raise ValueError(f"optional must be among {OPTIONAL}, got {sorted(unknown)}.")
        if on_violation not in ("raise", "record"):
            raise ValueError(f"on_violation must be 'raise' or 'record', got {on_violation!r}.")
        arch = architecture_name(arch)  # as aiter takes the features off
        self.arch, self.num_cu, self.generation = arch, num_cu, generation
        self.optional = frozenset(optional)
        self._compiled: list[tuple[Any, ...]] = []
        self._kept: dict[tuple[Any, ...], None] = {}
        self._reducers: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        self._tuned_budgets, self._prepares_in_tuning = dict(tuned_budgets or {}), prepares_in_tuning
        self.violations: list[str] = []
        self.refreshes = self.decodes = self.plans_made = 0
        self._raises = on_violation == "raise"
        self._finite_tails, self._private_scratch = finite_tails, private_scratch
        self._delay_cycles = refresh_delay_cycles
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._counters: dict[torch.device, torch.Tensor] = {}
        self._scratch_users: list[tuple[int, int, int, weakref.ref[torch.Tensor]]] = []
        self._text = GENERATIONS.get(generation, GENERATIONS["G3"])
        self.library = Library(
            arch=arch,
            num_cu=num_cu,
            device_type=device_type,
            generation=generation,
            requires_plan=self._text.requires_plan,
            caps_by_cu=self._text.caps_by_cu,
            bf16_caches=self._bf16_caches(native_bf16),
            infers_compute_type=self._text.decode_defaults["compute_type"] is None,
            takes_nhd="pa_decode_nhd_max_query_length" in self.optional,
            finite_numbers="pa_decode_default_workgroup_budget" in self.optional,
        )
        self.plan_class = _plan_class(self.library, self._text.has_window)
        self.functions = self._functions()

    @property
    def compiles(self) -> int:
        """How many specialisations were compiled, those again that were forgotten in between."""
        return len(self._compiled)

    @property
    def compiled(self) -> tuple[tuple[Any, ...], ...]:
        """Their keys, in the order of compiling: ("plan" | "tile" | "reduce", ...)."""
        return tuple(self._compiled)

    def check(self) -> None:
        """Judge what decodes on GPUs, and replays of graphs, have found since the last check.

        Raises DoubleViolation. Capture: no. Syncs: yes.
        """
        for device, counter in self._counters.items():
            found = counter.tolist()
            counter.zero_()
            self._judge([n > 0 for n in found], f" ({sum(found)} times on {device})")

    def _bf16_caches(self, native_bf16: bool) -> str:
        taken = self._text.bf16_caches
        # Of G2 and G3 there are texts with BF16 caches, and texts with gfx1250, and none with both.
        return "none" if taken == "cdna" and (not native_bf16 or self.arch == "gfx1250") else taken

    def _plan(self, **given: Any) -> Any:
        c = SimpleNamespace(**{"sliding_window": 0, "query_length": 1, "total_context_length": None, **given})
        if "task_order" in given:
            require(c.task_order is None, ValueError, "task_order is for libraries that nobody has seen yet")
        window = check_window_and_length(c.sliding_window, c.query_length)
        total = c.total_context_length
        require(total is None or total >= 0, ValueError, "total_context_length must be non-negative")
        lengths, kv_heads, plan = c.context_lengths, c.num_kv_heads, c.plan
        ok = lengths.device.type == self.library.device_type and lengths.dtype == torch.int32
        require(ok, ValueError, "context_lengths must be a CUDA int32 tensor")
        require(
            lengths.ndim == 1 and lengths.is_contiguous(), ValueError, "context_lengths must be a contiguous vector"
        )
        rows, most_rows = lengths.numel(), self._most_rows(given.get("max_batch_size"))
        require(1 <= rows <= most_rows, ValueError, f"plans have batches in [1, {most_rows}], got {rows}")
        require(kv_heads >= 1, ValueError, "num_kv_heads must be positive")
        if self.generation == "G1b":
            require(plan is None or isinstance(plan, self.plan_class), TypeError, "plan must be a PADecodePlan")
        limit, cap = self.library.partition_limit, c.max_partitions
        if cap is None:
            cap = limit if plan is None else plan.max_partitions
        require(1 <= cap <= limit, ValueError, f"max_partitions must be in [1, {limit}], got {cap}")
        if plan is None:
            budget = self._default_budget(rows, kv_heads, total, window, c.query_length)
            budget = budget if c.workgroup_budget is None else c.workgroup_budget
            require(budget >= 1, ValueError, f"workgroup_budget must be positive, got {budget}")
            # Neither a tensor's extent nor a kernel's constant may be a float.
            require(isinstance(cap, int), TypeError, f"max_partitions must be an int, got {cap!r}")
            plan = self._new_plan(lengths, kv_heads, cap, budget, window, c.query_length)
        else:
            require(c.workgroup_budget is None, ValueError, "workgroup_budget is fixed when reusing a plan")
            require(total is None, ValueError, "total_context_length is only used when creating a plan")
            require(cap == plan.max_partitions, ValueError, "max_partitions must match the reused plan")
            if self._text.has_window:
                require(window == plan.sliding_window, ValueError, "sliding_window must match the reused plan")
                ok = window == 0 or c.query_length == plan.query_length
                require(ok, ValueError, "query_length must match the reused plan")
        plan.validate(rows, kv_heads, lengths.device)
        pointers = (lengths.data_ptr(), plan.work_info.data_ptr(), plan.reduce_info.data_ptr())
        self._compile(
            compile_keys.plan_key(self._text.planner, rows, plan.capacity, cap, window, c.query_length, pointers),
            lengths,
        )
        self.refreshes += 1
        launch(
            device_side.refresh,
            *(plan.work_info, plan.reduce_info, lengths, cap, window, c.query_length, self._delay_cycles),
        )
        return plan

    def _decode(self, **given: Any) -> None:
        c = SimpleNamespace(**given)
        if "task_order" in given:
            require(c.task_order is None, ValueError, "task_order is for libraries that nobody has seen yet")
        call = check_decode(self.library, c, self.plan_class)
        self._compile(compile_keys.tile_key(call.shape), c.query)
        check_scratch(c, call.shape)
        compile_keys.check_tile(call.shape)  # its code is made by its first launch
        self._check_allocations(c, call)
        scratch = self._scratch(c, call)
        partials = scratch[2]
        key = compile_keys.reduce_key(
            call.shape, call.shape.query_dtype, call.sink_dtype, partials.data_ptr(), partials.stride()
        )
        self._compile(key, c.query)
        self._check_memory(c, scratch)
        self.decodes += 1
        launch(
            self._decode_and_judge,
            *(call, c.output, c.query, c.key_cache, c.value_cache, c.context_lengths, c.block_tables),
            call.shape.head_dim**-0.5 if c.softmax_scale is None else float(c.softmax_scale),
            *(c.work_plan.work_info, c.work_plan.reduce_info, scratch, c.key_scale, c.value_scale, c.sinks),
            *(next(self._tokens) % _TOKENS, self._finite_tails),
        )

    def _can_use(self, **given: Any) -> bool:
        c = SimpleNamespace(**given)
        if c.work_plan is None:  # asked before there is a plan: about everything else
            window = c.sliding_window if isinstance(c.sliding_window, int) else 0
            c.work_plan = _AnyPlan(self.plan_class, max(window, 0), c.query_length)
        try:
            call = check_decode(self.library, c, (self.plan_class, _AnyPlan))  # type: ignore[arg-type]
            compile_keys.tile_key(call.shape)
        except (TypeError, ValueError, NotImplementedError, AttributeError):
            return False
        return True

    def _prepare(self, **given: Any) -> Any:
        c = SimpleNamespace(**given)
        require(not _is_recording(c.query), RuntimeError, "prepare_pa_decode_plan must run before graph capture")
        plan = self.functions["plan_pa_decode"]
        budget = self._tuned_budgets.get(c.context_lengths.numel(), 2 * self.num_cu)
        made = None
        for one in dict.fromkeys((2 * self.num_cu, budget)):  # the default always, for its checks
            made = plan(
                c.context_lengths,
                c.key_cache.shape[1],
                max_partitions=self.num_cu if c.max_partitions is None else c.max_partitions,
                workgroup_budget=one,
                sliding_window=c.sliding_window,
                query_length=c.query_length,
            )
        return made

    def _cached_budget(self, shape: Any, architecture: str, num_cu: int, storage_key: Any) -> int:
        require(architecture == self.arch and num_cu == self.num_cu, ValueError, "of another machine")
        return self._tuned_budgets.get(shape["batch_size"], 2 * num_cu)

    def _shape(self, **given: Any) -> dict[str, Any]:
        c = SimpleNamespace(**given)
        ok = c.page_size in (16, 64, 128) and c.dtype in ("bfloat16", "float16") and type(c.per_token) is bool
        require(ok and c.kv_dtype in ("fp8", "bfloat16"), ValueError, "no shape that is tuned")
        is_bf16 = c.kv_dtype == "bfloat16"
        require(not is_bf16 or (c.trans_v and not c.per_token), ValueError, "BF16 caches: vectorized V and no scales")
        return given

    def _storage_key(self, **tensors: Any) -> tuple[Any, ...]:
        return tuple(None if tensor is None else tensor.stride() for tensor in tensors.values())

    def _nhd_max_query_length(self, device: Any, **shape: Any) -> int:
        return 32 // shape["query_group_size"] if self._is_nhd_shape(**shape) else 0

    def _shape_budget(self, device: Any, *, query_length: int, sliding_window: int, **shape: Any) -> int:
        fits = query_length * shape["query_group_size"] <= 32 and sliding_window <= 0
        return self.num_cu if fits and self._is_nhd_shape(**shape) else 2 * self.num_cu

    def _is_nhd_shape(self, *, kv_dtype: Any, head_dim: int, block_size: int, query_group_size: int) -> bool:
        is_fp8 = kv_dtype in (torch.float8_e4m3fn, "fp8")
        return self.arch == "gfx950" and is_fp8 and (head_dim, block_size) == (256, 64)

    def _most_rows(self, max_batch_size: int | None) -> int:
        if max_batch_size is None:
            return _MAX_ROWS
        ok = self.arch == "gfx1250" and 1 <= max_batch_size <= _MAX_ROWS_OF_GFX1250
        require(ok, ValueError, f"max_batch_size is for gfx1250, at most {_MAX_ROWS_OF_GFX1250}, got {max_batch_size}")
        return max(max_batch_size, _MAX_ROWS)

    def _default_budget(self, rows: int, kv_heads: int, total: int | None, window: int, query_length: int) -> int:
        budget = 2 * self.num_cu
        if total is None:
            return budget
        average = -(-total // rows)
        if window > 0:
            average = min(average, window + query_length - 1 + 255)
        floor = 1
        if query_length > 1:
            count = max(1, -(-(-(-average // 256) * query_length) // 256))
            floor = min(FIRST_PARTITION_LIMIT, 1 << (count - 1).bit_length())
        return max(budget, rows * kv_heads * floor)

    def _new_plan(
        self, lengths: torch.Tensor, kv_heads: int, cap: int, budget: int, window: int, query_length: int
    ) -> Any:
        rows, device = lengths.numel(), lengths.device
        if _is_recording(lengths):
            self._violate("a plan was made while recording: the graph owns its tables, and no refresh reaches them")
        capacity = plan_capacity(
            rows, num_kv_heads=kv_heads, num_cu=self.num_cu, max_partitions=cap, workgroup_budget=budget
        )
        work_info = torch.empty((capacity, 4), dtype=torch.int32, device=device)
        reduce_info = torch.empty((rows, 2), dtype=torch.int32, device=device)
        if lengths.is_cuda:
            self._counter(device)  # here, and not in the first decode: that may be recorded
        self.plans_made += 1
        window_fields = (window, query_length) if self._text.has_window else ()
        return self.plan_class(work_info, reduce_info, kv_heads, cap, *window_fields)

    def _compile(self, key: tuple[Any, ...], on: torch.Tensor) -> None:
        with self._lock:
            kept = self._reducers if key[0] == "reduce" else self._kept
            is_known = key in kept
            kept[key] = None
            if kept is self._reducers:
                self._reducers.move_to_end(key)
                if len(self._reducers) > MOST_REDUCERS:
                    self._reducers.popitem(last=False)
            if is_known:
                return
            self._compiled.append(key)
        if _is_recording(on):
            self._violate(f"first use of a compile key while recording: {key}")

    def _check_allocations(self, c: SimpleNamespace, call: CheckedCall) -> None:
        if not _is_recording(c.query):
            return
        missing = [name for name in scratch_of(call.shape, c.output.dtype) if getattr(c, name) is None]
        if call.scales != "none":
            scales = ("key_scale", "value_scale")
            missing += [name for name in scales if not isinstance(getattr(c, name), torch.Tensor)]
        if missing:
            self._violate(f"allocation while recording: {', '.join(missing)} must be tensors that exist before")

    def _scratch(self, c: SimpleNamespace, call: CheckedCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """max_logits, exp_sums and temporary_output: those given, and those that the library would allocate."""
        logits, sums, partials = (
            torch.empty(size, dtype=dtype, device=c.query.device) if getattr(c, name) is None else getattr(c, name)
            for name, (size, dtype) in scratch_of(call.shape, c.output.dtype).items()
        )
        return logits, sums, partials

    def _check_memory(self, c: SimpleNamespace, scratch: tuple[torch.Tensor, ...]) -> None:
        strides = [stride for stride, extent in zip(c.query.stride()[:2], c.query.shape, strict=False) if extent > 1]
        if self.library.arch != "gfx1250" and (c.query.data_ptr() % 4 or any(stride % 2 for stride in strides)):
            self._violate(
                f"query rows must start on 4 bytes: so must the first, and even strides, got {c.query.stride()}"
            )
        plan = c.work_plan
        written = sorted(map(_extent, (*scratch, plan.work_info, plan.reduce_info, c.output)))
        if any(right[0] < left[1] for left, right in itertools.pairwise(written)):
            self._violate("scratch, plan tables and output of one call overlap")
        if not self._private_scratch:
            return
        own = plan.work_info.data_ptr()
        self._scratch_users = [user for user in self._scratch_users if user[3]() is not None]
        for begin, end in map(_extent, scratch):
            if any(
                begin < other_end and other < end and table != own for other, other_end, table, _ in self._scratch_users
            ):
                self._violate("two live plans share scratch")
            self._scratch_users.append((begin, end, own, weakref.ref(plan.work_info)))

    def _decode_and_judge(self, call: CheckedCall, output: torch.Tensor, *rest: Any) -> None:
        found = device_side.decode(call, output, *rest)
        if output.is_cuda:
            with torch.inference_mode():
                self._counter(output.device).add_(found)
        else:
            self._judge(found.tolist(), "")

    def _counter(self, device: torch.device) -> torch.Tensor:
        if device not in self._counters:
            with torch.inference_mode(False):
                self._counters[device] = torch.zeros(len(device_side.FAULTS), dtype=torch.int64, device=device)
        return self._counters[device]

    def _judge(self, found: list[bool], where: str) -> None:
        texts = [text + where for text, is_found in zip(device_side.FAULTS, found, strict=True) if is_found]
        if texts:
            self._violate("; ".join(texts))

    def _violate(self, message: str) -> None:
        self.violations.append(message)
        if self._raises:
            raise DoubleViolation(message)

    def _functions(self) -> dict[str, Callable[..., Any]]:
        if self.generation in STRANGERS:
            return {}
        text = self._text
        plan = signatures.plan_signature(text, with_max_batch_size="max_batch_size" in self.optional)
        made = {
            "plan_pa_decode": _bound(self._plan, plan, "plan_pa_decode", PLANNER_MODULE),
            "pa_decode": _bound(self._decode, signatures.decode_signature(text), "pa_decode"),
        }
        for name, function, signature in (
            ("can_use_flydsl_pa_decode", self._can_use, signatures.decode_signature(text, with_plan=False)),
            ("prepare_pa_decode_plan", self._prepare, signatures.prepare_signature(self._prepares_in_tuning)),
            ("pa_decode_nhd_max_query_length", self._nhd_max_query_length, signatures.NHD_SIGNATURE),
            ("pa_decode_default_workgroup_budget", self._shape_budget, signatures.BUDGET_SIGNATURE),
        ):
            if name in self.optional:
                made[name] = _bound(function, signature, name, self._home_of(name))
        if "get_cached_budget" in self.optional:
            made |= {
                "get_cached_budget": _bound(
                    self._cached_budget, signatures.CACHED_BUDGET_SIGNATURE, "get_cached_budget", TUNING_MODULE
                ),
                "make_shape": _bound(self._shape, signatures.SHAPE_SIGNATURE, "make_shape", TUNING_MODULE),
                "storage_key": _bound(
                    self._storage_key, signatures.STORAGE_KEY_SIGNATURE, "storage_key", TUNING_MODULE
                ),
            }
        return made

    def _home_of(self, name: str) -> str:
        return TUNING_MODULE if name == "prepare_pa_decode_plan" and self._prepares_in_tuning else MODULE

    def _contents(self) -> dict[str, dict[str, Any]]:
        """Module name -> what is in it."""
        if self.generation == "pypi":
            return {"aiter": dict.fromkeys(("aiter", "anext", "azip"), _stranger)}
        chip = {"get_gfx_runtime": lambda: self.arch, "get_gfx": lambda: self.arch, "get_cu_num": lambda: self.num_cu}
        found: dict[str, dict[str, Any]] = {
            **{name: {} for name in ("aiter", "aiter.jit", "aiter.jit.utils", "aiter.ops", f"{_ROOT}.kernels")},
            "aiter.jit.utils.chip_info": chip,
            _ROOT: {},
        }
        if self.generation in STRANGERS:
            found[MODULE] = dict.fromkeys(STRANGERS[self.generation] or (), _stranger)
            return found
        planner_kernel = "compile_pa_decode_plan" if self._text.planner == "flydsl" else "_plan_pa_decode"
        planner = {"PADecodePlan": self.plan_class, "plan_pa_decode": self.functions["plan_pa_decode"]}
        found[PLANNER_MODULE] = {planner_kernel: _stranger, **planner}
        tuning = {name: one for name, one in self.functions.items() if one.__module__ == TUNING_MODULE}
        found[MODULE] = {name: one for name, one in self.functions.items() if name not in tuning} | planner
        if tuning:
            found[TUNING_MODULE] = tuning
        return found


@contextmanager
def aiter_double(**settings: Any) -> Iterator[AiterDouble]:
    """Put a double in aiter's place for imports, and take it away again. planlife sees both, whatever it saw before.

    settings: as AiterDouble takes them.

    Leaving it judges what decodes on GPUs have found. Raises ValueError, DoubleViolation.
    """
    double = AiterDouble(**settings)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "aiter"}
    finder = _Finder(double)
    sys.meta_path.insert(0, finder)
    try:
        yield double
        double.check()
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
            del sys.modules[name]
        sys.modules.update(hidden)


class _Finder(MetaPathFinder, Loader):
    """Real imports, so that the order in which names come into being is the real one too."""

    def __init__(self, double: AiterDouble) -> None:
        self._double = double
        self._modules = double._contents()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None  # the double's packages have no path on which another finder could find it
        is_package = fullname == "aiter" or any(name.startswith(f"{fullname}.") for name in self._modules)
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name == _ROOT and self._double.generation == "old flydsl":
            raise ImportError("flydsl >= 0.2.4 is required")
        if name == MODULE and PLANNER_MODULE in self._modules:
            import_module(PLANNER_MODULE)  # as the library's own imports do
        vars(module).update(self._modules[name])
        if name == _ROOT:
            # The package exports two names lazily, one of them that of its own submodule: which of both an attribute
            # is depends on what was imported first.
            def export(attribute: str) -> Any:
                if attribute in ("pa_decode", "prepare_pa_decode_plan") and attribute in self._double.functions:
                    module.__dict__[attribute] = self._double.functions[attribute]
                    return module.__dict__[attribute]
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

            module.__dict__["__getattr__"] = export


class _AnyPlan:
    """Stands for the plan where the predicate is asked without one."""

    max_partitions = capacity = 1

    def __init__(self, plan_class: type, window: int, query_length: int) -> None:
        self.sliding_window, self.query_length = window, query_length

    def validate(self, batch_size: int, num_kv_heads: int, device: torch.device) -> None:
        self.capacity = batch_size


def _bound(function: Callable[..., Any], signature: Signature, name: str, module: str = MODULE) -> Callable[..., Any]:
    """`function` behind exactly this signature: what it does not name is a TypeError."""

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**bound.arguments)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__module__ = module
    return call


def _plan_class(library: Library, has_window: bool) -> Any:
    fields: list[Any] = [
        *(("work_info", torch.Tensor), ("reduce_info", torch.Tensor), ("num_kv_heads", int), ("max_partitions", int))
    ]
    if has_window:
        fields += [("sliding_window", int, 0), ("query_length", int, 1)]

    def validate(self: Any, batch_size: int, num_kv_heads: int, device: torch.device) -> None:
        require(self.num_kv_heads == num_kv_heads, ValueError, "plan KV head count does not match the cache")
        limit = library.partition_limit
        require(1 <= self.max_partitions <= limit, ValueError, f"plan max_partitions must be in [1, {limit}]")
        if has_window:
            ok = self.sliding_window >= 0 and self.query_length >= 1
            require(ok, ValueError, "invalid plan sliding_window or query_length")
        work, reduce = self.work_info, self.reduce_info
        require(tuple(reduce.shape) == (batch_size, 2), ValueError, "reduce_info must have shape [batch_size, 2]")
        require(work.ndim == 2 and work.shape[1] == 4, ValueError, "work_info must have shape [capacity, 4]")
        ok = batch_size <= work.shape[0] <= batch_size * self.max_partitions
        require(ok, ValueError, "plan capacity must be in [batch, batch * max_partitions]")
        for tensor in (work, reduce):
            ok = tensor.device == device and tensor.dtype == torch.int32
            require(ok, ValueError, "plan metadata must be int32 on the query device")
            require(tensor.is_contiguous(), ValueError, "plan metadata must be contiguous")

    namespace: dict[str, Any] = {
        "validate": validate,
        "capacity": property(lambda self: self.work_info.shape[0]),
        "__module__": PLANNER_MODULE,
    }
    if library.generation == "G1b":
        namespace["num_partitions"] = property(lambda self: self.reduce_info[:, 1])
    made = make_dataclass("PADecodePlan", fields, frozen=True, namespace=namespace)
    made.__module__ = PLANNER_MODULE
    return made


def _is_recording(tensor: torch.Tensor) -> bool:
    return torch.cuda.is_current_stream_capturing() if tensor.is_cuda else current_capture_id() != 0


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses [first byte, behind the last)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + ((last + 1) * tensor.element_size() if math.prod(tensor.shape) else 0)


def _stranger(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("this library's own function is not part of the double")
