"""What a backend must do for the manager. A backend owns no buffer: it is handed bytes and makes views of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from ..device import require_members
from ..spec import PlanSpec

#: One table set as the backend sees it. torch, triton and aiter's have `.work_info int32[capacity, 4]` and
#: `.reduce_info int32[rows, 2]`.
NativePlan = Any

#: Words of the sanitizer's counters (int64 each).
FLAG_STALE, FLAG_CLAMPED = 0, 1
NUM_FLAGS = 2


class Backend(Protocol):
    """Planner and decode of one library. Every method but `refuse_*`, `*_bytes` and `compile` may run while a stream
    records: no host read, no data-dependent shape, no `Device.allocate`."""

    name: str
    #: Most rows of one table set; None = no limit. Larger classes become segments (R23).
    max_plan_rows: int | None

    def refuse_spec(self, spec: PlanSpec, device: Any) -> Sequence[str]:
        """Reasons why this backend can never serve `spec` on `device`, each with its way out; empty = it can."""
        ...

    def refuse_step(self, spec: PlanSpec, context_lens: Any) -> Sequence[str]:
        """Reasons against this one step; asked once per step, with the tensor the kernel will get. Empty = it can."""
        ...

    def default_workgroup_budget(self, spec: PlanSpec, device: Any) -> int:
        """Tasks to plan for where `spec` says None (R38); asked once, when a manager is made.

        device: in an estimate nothing is known of it but num_compute_units.
        """
        ...

    def excluded(self, device: Any) -> Mapping[str, str]:
        """What it makes the process hold on `device` beside the byte budget, by name, for `report().excluded`."""
        ...

    def table_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        """Bytes of one table set (tables and staged lengths) for `plan_rows` rows.

        Dense specs that differ in query heads, query_length or cache have tables of the same bytes: sites may share
        them (`PlanSpec.plan_of`), each through a `make_tables` of its own.
        """
        ...

    def scratch_bytes(self, spec: PlanSpec, plan_rows: int, num_compute_units: int) -> int:
        """Bytes of the partial results of one decode call for `plan_rows` rows."""
        ...

    def compile(self, spec: PlanSpec, plan_rows: int, device: Any, least_rows: int = 1) -> int:
        """Prepare everything that is specialised for this class; returns how many specialisations were made.

        least_rows: the fewest rows that a call decodes by these tables: fewer ride a smaller class.

        Called inside `device.relaxed()`, so that it kills no capture of another thread.

        Raises ConfigError or MintError for a class that it cannot compile, here or anywhere, with the way out: where
        there is a fallback, that takes the class's steps. MemoryError where the device has none left. Other exceptions
        are faults, and go to the caller.
        """
        ...

    def make_tables(self, spec: PlanSpec, plan_rows: int, num_compute_units: int, buffer: Any) -> NativePlan:
        """Views of `buffer` (uint8[table_bytes]) as one table set, which may come before `compile`. Contents stay
        undefined until `refresh`, which comes after it."""
        ...

    def refresh(self, tables: NativePlan, context_lens: Any | None, num_rows: int) -> None:
        """Plan `num_rows` lengths (None: all rows empty) into `tables`: rows behind them and negative ones read as 0,
        tiles end at max_context_tokens, every word of both tables is written. The causal edges of a longer row's query
        tokens come from its whole length where the kernels can tell it from what they may read."""
        ...

    def decode(
        self,
        tables: NativePlan,
        scratch: Any,
        output: Any,
        query: Any,
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        softmax_scale: float,
        key_scale: Any,
        value_scale: Any,
        sinks: Any,
        lse: Any,
    ) -> None:
        """Decode query [R * query_length, q_heads, D], R <= plan rows, into `output` of the same shape by the tasks
        in `tables`, with partials in `scratch` (uint8[>= scratch_bytes], the lane's arena). Rows without tasks get
        exact zeros and none of their block table entries is used as an index.

        lse: None, or float32[R * query_length, q_heads], contiguous, to be written whole: the natural log-sum-exp of
        the scaled logits that each query token attended, the sink's among them; -inf where it attended nothing."""
        ...

    def sanitize(self, tables: NativePlan, context_lens: Any, num_rows: int, flags: Any, max_tokens: int) -> None:
        """Add 1 to flags[FLAG_STALE] if `tables` were not made from the lengths that are in `context_lens` now (rows
        behind them: from 0), unless `refresh` emptied them on purpose (None); add to flags[FLAG_CLAMPED] the number of
        lengths above `max_tokens`: what a row of this decode can have, by max_context_tokens and its block tables."""
        ...


def call_check_of(backend: Backend) -> Callable[..., None]:
    """A backend's `check_call(spec, output, ..., sinks, lse)`, with the arguments of `decode`; optional.

    It raises what `decode` would, as far as spec and arguments tell: the manager asks before it refreshes, brings back
    or pins anything for a call. `decode` itself raises a PlanlifeError only before it launches anything.
    """
    check: Callable[..., None] = getattr(backend, "check_call", _refuse_nothing)
    return check


def _refuse_nothing(spec: PlanSpec, *call: Any) -> None:
    """For backends whose `decode` takes all that the manager's own checks let pass."""


def require_backend(backend: object) -> Backend:
    """`backend` if it is an object with all of Backend's members, else a ConfigError that names the missing ones."""
    require_members("backend", backend, Backend)
    return cast(Backend, backend)
