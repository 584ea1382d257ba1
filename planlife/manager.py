"""PlanManager: the only module that knows ladder, store, ledger, plans, graphs, device and backend together."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from .backends.base import FLAG_CLAMPED, FLAG_STALE, NUM_FLAGS, Backend, call_check_of
from .call_check import CallChecker
from .configuration import (
    DeviceMeant,
    FallbackFn,
    check_choice,
    check_sites,
    resolve_backend,
    resolve_device,
    resolve_fallback,
    settle_specs,
    takes_lse,
)
from .device import Device, Graph, undisturbed
from .errors import (
    BudgetTooSmallError,
    ClosedError,
    ConfigError,
    MintError,
    PlanlifeError,
    RouteError,
    SecondStepError,
    StalePlanError,
)
from .events import Announcer, Event, logger
from .graph_book import GraphBook
from .graph_record import GraphRecord, Read
from .guard import Given, Match, check_foreign, check_planned, empties_lens, match, stale_eager
from .hint import tell_once_what_off_costs
from .identity import Singular
from .item import Item, State
from .ladder import CapacityLadder
from .plan import EMPTY, Arena, Mark, OffPlan, Pair, Plan, Segment, StepPlan, Tables, describe_owner
from .report import ArenaLine, Counters, MemoryReport, PlanLine, SiteLine
from .residency import CompileError, NoRoomError, Residency
from .route import Decision, Rules, Why, decide, route_of_site, why_without_room
from .sizing import Sizing
from .slot import Answers, Slot
from .spec import PlanSpec, Step, check_int
from .unserved import UNSERVED, refuse_unserved

_Error = TypeVar("_Error", bound=PlanlifeError)

ON_MISS = ("fallback", "raise", "mint")
SANITIZE = ("off", "count", "raise")


class PlanManager(Singular):
    """Owns every work plan and every scratch buffer of an engine's paged-decode calls on one device.

    sites: one PlanSpec (named "default"), or PlanSpecs by site name. ladder: one for all sites, or one per site.
    device: None = cuda if there is one, else cpu. backend: "auto", "aiter", "triton", "torch" or a Backend.
    ubatches: micro-batches that may be in flight together. budget_bytes: None = worst_case_bytes().
    enabled: False makes every plan_for the fallback and allocates nothing. fallback: "triton", "torch" or a callable
    (output, query, key_cache, value_cache, block_tables, context_lens, softmax_scale, *, spec, key_scale, value_scale,
    sinks), which also gets lse= where a call asks for it, and then writes all of it. on_miss: what a class that was
    never minted does outside a capture phase: "fallback", "raise" or "mint".
    sanitize: "off", "count" or "raise": compare the tables with the lengths at every decode, also inside graphs, and
    lengths with max_context_tokens and the block tables' columns.

    Raises ConfigError where the configuration can never work (BudgetTooSmallError, which is a BudgetError too, for a
    budget_bytes that holds not even one call), BackendUnavailableError where a named backend or device is not here.
    After close() whatever would plan, decode or change something raises ClosedError; with sanitize="raise" it may raise
    StalePlanError about an earlier decode.
    Threads: every method may be called from any thread, none from a __del__ or a finaliser. Two that decode at the same
    time need different ubatches or lanes: in one they would overwrite each other's scratch, which nothing detects.
    Allocates: no buffer before the first capture phase.
    """

    _ONE_ONLY = (
        "a PlanManager cannot be copied or pickled: graphs hold the addresses of its buffers. Give the object that "
        "holds it a __deepcopy__ or __getstate__ that leaves it out; each process makes its own."
    )

    def __init__(
        self,
        sites: PlanSpec | Mapping[str, PlanSpec],
        *,
        ladder: CapacityLadder | Mapping[str, CapacityLadder],
        device: Any = None,
        backend: str | Backend = "auto",
        ubatches: int = 1,
        budget_bytes: int | None = None,
        enabled: bool = True,
        fallback: str | FallbackFn | None = None,
        on_miss: str = "fallback",
        sanitize: str = "off",
    ) -> None:
        specs, ladders = check_sites(sites, ladder)
        check_int("ubatches", ubatches, at_least=1)
        check_choice("on_miss", on_miss, ON_MISS)
        check_choice("sanitize", sanitize, SANITIZE)
        if type(enabled) is not bool:
            raise ConfigError(f"enabled must be a bool, got {enabled!r}.")
        self._device: Device = resolve_device(device)
        self._backend: Backend = resolve_backend(backend, specs, self._device)
        self._fallback: FallbackFn | None = resolve_fallback(fallback, specs, self._device)
        self._fallback_takes_lse = self._fallback is not None and takes_lse(self._fallback)
        self._enabled = enabled
        self._sanitize = sanitize
        self._ubatches = ubatches
        refusals = {site: self._refusal(site, spec) for site, spec in specs.items()}
        refused = [site for site, refusal in refusals.items() if refusal]
        #: What plans are made by; a site that asks for a step, or falls back, sees its spec as it was given.
        self._settled = settle_specs(specs, self._backend, self._device, refused if enabled else specs)
        self._sizing = Sizing(self._settled, ladders, self._backend, ubatches, self._device.num_compute_units, refused)
        self._announcer = Announcer(self._device.as_called)
        self._events = self._announcer.waiting
        self._counters = Counters()
        self._residency = Residency(
            self._device, self._backend, self._sizing, self._check_budget(budget_bytes), self._counters, self._announcer
        )
        self._slots = self._make_slots(specs, ladders, refusals)
        self._answers = {key: Answers(slot) for key, slot in self._slots.items()}
        #: By (site, class): why the backend could not compile it, where the fallback takes its steps instead.
        self._refused_classes: dict[tuple[str, int], str] = {}
        self._rules = Rules(self._backend, self._fallback is not None, on_miss, self._residency, self._refused_classes)
        #: Steps whose end was seen so far: replays that were accepted, and eager tables that a recording read. A
        #: plan_for skips only what was planned since the last of them.
        self._epoch = 0

        self._lock = threading.RLock()
        self._num_phases = 0
        self._sealed = False
        self._closed = False
        self._logged_routes: set[tuple[Any, ...]] = set()

        self._check_call = call_check_of(self._backend)
        self._capture_id = self._device.capture_id
        self._current_stream = self._device.current_stream
        self._is_disturbed = self._device.is_disturbed
        self._flags = self._device.zeros_flags(NUM_FLAGS) if sanitize != "off" and enabled else None
        self._graphs = GraphBook(
            self._device,
            self._residency,
            self._counters,
            self._announcer,
            always_read=[] if self._flags is None else [self._flags],
        )
        self._released = self._graphs.gone
        if not enabled:
            tell_once_what_off_costs(specs, ladders, self._backend, self._device)

    def _check_budget(self, budget_bytes: int | None) -> int:
        if not self._enabled:
            return 0
        if budget_bytes is None:
            return self._sizing.worst_case_bytes()
        check_int("budget_bytes", budget_bytes, at_least=0)
        least = self._sizing.min_budget_bytes()
        if budget_bytes < least:
            raise BudgetTooSmallError(
                f"budget_bytes={budget_bytes:,} cannot hold the plan and the scratch of the largest call, which takes "
                f"{least:,} bytes. Raise budget_bytes to min_budget_bytes(), or lower the ladder's top class."
            )
        return budget_bytes

    def _make_slots(
        self, specs: Mapping[str, PlanSpec], ladders: Mapping[str, CapacityLadder], refusals: Mapping[str, str]
    ) -> dict[tuple[object, object], Slot]:
        token = object()
        arenas = {
            (lane, ubatch): Arena(lane, ubatch, self._sizing.arena_bytes(lane))
            for lane in self._sizing.lanes()
            for ubatch in range(self._ubatches)
        }
        #: By the site that plans are made for: this site first, then those that use its plans.
        readers = {
            owner: [owner, *(site for site in specs if self._settled[site].plan_of == owner and not refusals[site])]
            for owner in specs
            if self._settled[owner].plan_of is None
        }
        plans = {
            (owner, ubatch): self._make_plans(owner, ubatch, sites, ladders[owner])
            for owner, sites in readers.items()
            for ubatch in range(self._ubatches)
        }
        slots: dict[tuple[object, object], Slot] = {}
        for site, spec in specs.items():
            checker = CallChecker(site, spec, self._device)
            owner = self._settled[site].plan_of or site
            for ubatch in range(self._ubatches):
                slots[(site, ubatch)] = Slot(
                    token,
                    site,
                    ubatch,
                    spec,
                    ladders[site],
                    checker,
                    plans[(owner, ubatch)],
                    0 if refusals[site] else readers[owner].index(site),
                    arenas[(spec.lane, ubatch)],
                    refusals[site],
                )
        self._token = token
        return slots

    def _make_plans(self, owner: str, ubatch: int, sites: list[str], ladder: CapacityLadder) -> dict[int, Plan]:
        """The plans of one (site, ubatch) by class. sites: all that use them, the owner first."""
        specs = tuple(self._settled[site] for site in sites)
        return {
            class_rows: Plan(
                owner,
                class_rows,
                ubatch,
                specs,
                self._sizing.plan_bytes(owner, class_rows),
                self._pair_maker(owner, specs, class_rows),
            )
            for class_rows in ladder.classes
        }

    def _refusal(self, site: str, spec: PlanSpec) -> str:
        """Why the backend can never serve this site; refused outright where nothing else could take its calls."""
        if not self._enabled:
            return ""
        reasons = self._backend.refuse_spec(spec, self._device)
        route = route_of_site(reasons, has_fallback=self._fallback is not None)
        if route == "planned":
            return ""
        refusal = f"backend {self._backend.name} cannot serve site {site!r} on {self._device.name}: " + "; ".join(
            reasons
        )
        if route == "refused":
            raise ConfigError(f"{refusal}. No fallback is configured: pass fallback=, or change the site.")
        return refusal

    def _pair_maker(self, owner: str, specs: tuple[PlanSpec, ...], class_rows: int) -> Callable[[Any], Pair]:
        sizing, backend, num_cu = self._sizing, self._backend, self._device.num_compute_units

        def make_pair(buffer: Any) -> Pair:
            flavours = []
            offset = 0
            for _ in Pair.__slots__:
                views: list[list[Segment]] = [[] for _ in specs]
                first_row = 0
                for rows in sizing.segment_rows(class_rows):
                    num_bytes = sizing.tables_bytes(owner, rows)
                    part = buffer[offset : offset + num_bytes]
                    for spec, segments in zip(specs, views, strict=True):
                        native = backend.make_tables(spec, rows, num_cu, part)
                        segments.append(Segment(first_row, first_row + rows, native))
                    first_row += rows
                    offset += num_bytes
                flavours.append(Tables(tuple(map(tuple, views))))
            return Pair(*flavours)

        return make_pair

    @contextmanager
    def capture_phase(self) -> Iterator[PlanManager]:
        """The only place where plans are minted. Manager-wide: other threads may mint and capture meanwhile.

        Seals at its end, also when left by an exception: from then on nothing compiles, unless on_miss="mint". May be
        re-opened, and nested.

        Raises MintError while recording. Capture: no. Syncs: no. Allocates: no.
        """
        self._enter("capture_phase")
        if self._capture_id():
            raise self._refuse(
                MintError("capture_phase() was opened while this stream records; open it around the recording.")
            )
        with self._lock:
            self._num_phases += 1
            self._forget_fallbacks()
        try:
            yield self
        finally:
            with self._lock:
                self._num_phases -= 1
                if not self._num_phases:
                    self._sealed = True
                    self._announcer.note("seal", self._device.name)
            self._drain()

    @undisturbed
    def warm(self, rows: int | Iterable[int] | None = None) -> None:
        """Mint every class (or those of these row counts) of every site and ubatch, largest first.

        Under a budget below the worst case every class is compiled and what fits stays resident; nothing is evicted
        to make room. Each mint is all or nothing; an exception leaves those before it usable. A class that the backend
        cannot compile is the fallback's from then on, with an event and a warning; without a fallback its error is
        raised.

        Raises MintError outside a capture phase or while recording, ConfigError for what is no row count, CapacityError
        for rows beyond a ladder, BudgetError when the allocator has no memory; without a fallback, ConfigError or
        MintError for a class that the backend cannot compile.
        Capture: no. Syncs: as the backend's compiles do. Allocates: yes.
        """
        self._enter("warm")
        if self._capture_id():
            raise self._refuse(MintError("warm() was called while this stream records; warm before recording."))
        if not self._num_phases:
            raise self._refuse(
                MintError("warm() mints, and plans are minted only inside capture_phase(): open one around warm().")
            )
        if not self._enabled:
            return
        if isinstance(rows, (str, bytes)) or not (rows is None or isinstance(rows, (int, Iterable))):
            raise ConfigError(f"warm() takes row counts, got {rows!r}.")
        wanted = None if rows is None else [rows] if isinstance(rows, int) else list(rows)
        todo: list[tuple[Slot, Plan]] = []
        for slot in self._slots.values():
            classes = slot.ladder.classes if wanted is None else {slot.ladder.class_for(count) for count in wanted}
            if not slot.refusal:
                todo.extend((slot, slot.plans[class_rows]) for class_rows in classes)
        todo.sort(key=lambda pair: -pair[1].class_rows)
        try:
            for slot, plan in todo:
                with plan.lock, self._lock:
                    self._check_open("warm")  # a hook or another thread may have closed it meanwhile
                    if (plan.is_resident and slot.arena.is_resident) or self._rules.refusal_of(plan):
                        continue
                    try:
                        self._residency.mint_what_fits(plan, slot.arena)
                    except CompileError as error:
                        self._refuse_class(plan, error)
        finally:
            self._announcer.deliver()

    def plan_for(self, step: Step) -> StepPlan | OffPlan:
        """Class, route and reason of one step; finds or mints its plan and refreshes it if its content is stale.

        Call it from the metadata builder, once per step and site, before replaying (before-replay style) or inside the
        recording (in-graph style). Rows above the ladder's top are the fallback's; without one they are planned, and
        decoded in parts of the top class, in a graph only in the in-graph style.

        Raises ConfigError for a bad step, MintError / RouteError where a plan is missing and nothing may replace it,
        BudgetError without room in a capture phase or with on_miss="raise". Capture: yes, records the refresh into the
        in-graph tables.
        Syncs: no. Allocates: not on a hit; on a miss as `on_miss` says, never while recording.
        """
        if not self._enabled:
            return self._plan_off(step)
        if self._released:
            self._drain()
        try:
            answers = self._answers[step.key]
        except (AttributeError, KeyError):
            answers = None  # no Step, or of no site here: refused below
        if answers is not None:
            last = answers.last
            if last is not None and not step.dummy:
                mark = last.mark
                lens = step.context_lens
                if mark.lens is lens and mark.revision == step.revision:
                    pair = last.item.pair  # type: ignore[union-attr]
                    if pair is not None:
                        capture_id = self._capture_id()
                        if (
                            (pair.in_graph if capture_id else pair.eager).mark is mark
                            and mark.capture_id == capture_id
                            and (capture_id or mark.epoch == self._epoch)
                            and last.max_tokens == step.max_tokens
                            and mark.is_owned_by(step.owner)
                            and (
                                mark.version is None
                                or mark.version == (self._version_of(lens) if self._is_disturbed() else lens._version)
                            )
                        ):
                            answers.num_skipped += 1
                            return last
        return self._plan_for(step)

    def _version_of(self, lens: Any) -> Any:
        with self._device.undisturbed():
            return lens._version

    def _plan_off(self, step: Step) -> StepPlan | OffPlan:
        try:
            slot = self._slots.get(step.key)
        except AttributeError:
            slot = None  # no Step: refused by its type
        if slot is None or self._closed:
            self._enter("plan_for")
            slot = self._slot_of(step)
        if step.dummy:
            return self._plan_for(step)  # its lengths mean nothing: no fallback may read by them
        return OffPlan(slot, step.context_lens)

    def pa_decode(
        self,
        plan: StepPlan | OffPlan,
        output: Any,
        query: Any,
        key_cache: Any,
        value_cache: Any,
        block_tables: Any,
        softmax_scale: float,
        *,
        key_scale: Any = None,
        value_scale: Any = None,
        sinks: Any = None,
        lse: Any = None,
        sliding_window: Any = None,
        **unserved: Any,
    ) -> Any:
        """Paged decode of one layer by a step's plan.

        plan: what plan_for returned for this step. output, query: [R * query_length, num_q_heads, head_dim] on the
        device, R from the plan's rows to its class; rows beyond the plan's give exact zeros. key_cache, value_cache:
        as the site's kv_layout says. block_tables: int32[>= rows, max_pages]; entries of empty rows and past a row's
        pages may be anything. softmax_scale: finite, positive. key_scale, value_scale: FP8 caches only, both None is
        1.0 where there is one per tensor; a number, float32[1] or [], or per_token float32[pages, num_kv_heads,
        page_size] or [..., 1], which may hold anything where no row's token is. sinks: float[num_q_heads], a logit per
        head that every query token sees, with value 0. lse: float32[R * query_length, num_q_heads], contiguous, or
        None: filled with the natural log of the softmax's denominator over the scaled logits that each query token
        attended, the sink's among them, for `planlife.merge`, of whose two partials one may carry the sinks; -inf where
        nothing was attended.
        sliding_window: the layer's own, in any form that PlanSpec takes, which must be its site's; None is not checked,
        so a layer without a window passes 0 or -1. unserved: names of `planlife.unserved.UNSERVED`, which engines may
        pass through: other than neutral values are refused. Returns output.

        Raises ConfigError for tensors that are not the site's, StalePlanError if the lengths that were planned are
        gone, RouteError where nothing may serve the call, MintError while recording and BudgetError else if the plan
        was evicted since and cannot come back. Capture: yes. Syncs: no. Allocates: only to bring back what was evicted.
        """
        if self._released:
            self._drain()
        try:
            slot, item = plan.slot, plan.item
        except AttributeError:
            raise ConfigError(f"pa_decode takes the StepPlan of plan_for, got {type(plan).__name__}.") from None
        if slot.token is not self._token:
            raise self._refuse(
                RouteError(f"{plan!r} was made by another PlanManager; decode with the one that planned it.")
            )
        if sliding_window is not None:
            slot.checker.check_window(sliding_window)
        if unserved:
            self._refuse_unserved(slot.spec, unserved)
        # The arguments are spelled out twice: passing them on as a tuple costs a layer 0.2 us more.
        if item is None:
            extras = (softmax_scale, key_scale, value_scale, sinks, lse)
            call = (output, query, key_cache, value_cache, block_tables, *extras)
            try:
                self._decode_other(plan, call)
            finally:
                self._announcer.deliver()
            return output
        slot.checker.check(
            plan.rows, item.class_rows, output, query, key_cache, value_cache, block_tables, softmax_scale,
            key_scale, value_scale, sinks, lse, max_tokens=plan.max_tokens,
        )  # fmt: skip
        item.lock.acquire()  # `with` takes 0.1 us longer
        try:
            # The streams first: whoever evicts what is taken here then sees where it is used.
            stream = self._current_stream()
            is_ordered = item.stream == stream == slot.arena.stream
            pair = item.pair
            scratch = slot.arena.buffer
            if (
                not is_ordered
                or plan.captured
                or self._capture_id()
                or pair is None
                or scratch is None
                or (tables := pair.eager).mark is not plan.mark
                or len(segments := tables.views[slot.view]) > 1
            ):
                extras = (softmax_scale, key_scale, value_scale, sinks, lse)
                call = (output, query, key_cache, value_cache, block_tables, *extras)
                self._check_call(slot.spec, *call)
                self._decode_settled(plan, call)  # type: ignore[arg-type]
                return output
            plan.mark.is_used_eagerly = True  # type: ignore[union-attr]
            if self._flags is not None:
                self._sanitize_tables(tables, plan.mark, slot.spec, block_tables)  # type: ignore[arg-type]
            self._backend.decode(
                segments[0].native, scratch, output, query, key_cache, value_cache, block_tables, softmax_scale,
                key_scale, value_scale, sinks, lse,
            )  # fmt: skip
        finally:
            item.lock.release()
            if self._events:
                self._announcer.deliver()
        return output

    @staticmethod
    def _refuse_unserved(spec: PlanSpec, unserved: dict[str, Any]) -> None:
        for name in unserved:
            if name not in UNSERVED:
                raise TypeError(f"PlanManager.pa_decode() got an unexpected keyword argument {name!r}")
        refuse_unserved(unserved, spec)

    @undisturbed
    def _plan_for(self, step: Step) -> StepPlan:
        self._enter("plan_for")
        try:
            slot, (rows, address, version) = self._inspect(step)
            capture_id = self._capture_id()
            mark = Mark(step, step.context_lens, rows, address, version, capture_id, self._epoch)
            if step.dummy or rows == 0:
                decision = self._decide(slot, step, rows, recording=bool(capture_id))
                if decision.error is not None:
                    raise self._announcer.refuse(decision.error())
                mark.retire()  # no tables hold a dummy's lengths: its owner need not be held
                return StepPlan(slot, "dummy", decision.reason, rows, mark, None, False)
            answers = self._answers[(slot.site, slot.ubatch)]
            known = None if answers.may_ask_again else answers.last_fallback
            if (
                known is not None
                and known.max_tokens == step.max_tokens
                and known.mark.capture_id == capture_id
                and known.mark.allows_skip(self._epoch)
                and known.mark.difference(step, rows, address, version) is None
            ):
                return known  # decided once per step, also against us
            if rows > slot.ladder.max_rows:
                return self._plan_in_parts(slot, step, mark)
            return self._plan_in_class(slot, step, mark)
        finally:
            self._announcer.deliver()

    def _decide(self, slot: Slot, step: Step, rows: int, *, recording: bool) -> Decision:
        return decide(
            self._rules,
            slot,
            rows,
            step.context_lens,
            dummy=step.dummy,
            recording=recording,
            in_phase=bool(self._num_phases),
        )

    def _forget_fallbacks(self) -> None:
        """Something changed that may let a step that fell back be planned."""
        for answers in self._answers.values():
            answers.set_last_fallback(None)

    def _inspect(self, step: Step) -> tuple[Slot, tuple[int, int, int | None]]:
        """The slot of a step and (rows, address, version) of its lengths; a ConfigError for what can never be right."""
        slot = self._slot_of(step)
        lens = self._device.inspect_lens(step.context_lens)
        bound = slot.spec.max_context_tokens
        if step.max_tokens is not None and step.max_tokens > bound and not step.dummy:
            raise ConfigError(
                f"Step.max_tokens is {step.max_tokens:,}, and site {slot.site!r} was given max_context_tokens="
                f"{bound:,}: its plans would leave out what is behind that. Raise max_context_tokens, or serve this "
                "step elsewhere."
            )
        return slot, lens

    def _slot_of(self, step: Step) -> Slot:
        if not isinstance(step, Step):
            raise ConfigError(f"a planlife.Step is needed, got {type(step).__name__}.")
        slot = self._slots.get(step.key)
        if slot is not None:
            return slot
        if type(step.revision) is not int:
            raise ConfigError(f"Step.revision must be an int, got {step.revision!r}.")
        if type(step.dummy) is not bool:
            raise ConfigError(f"Step.dummy must be a bool, got {step.dummy!r}.")
        if step.max_tokens is not None:
            check_int("Step.max_tokens", step.max_tokens, at_least=0, way_out=" None leaves it unchecked.")
        sites = sorted({slot.site for slot in self._slots.values()})
        if type(step.site) is not str or step.site not in sites:
            raise ConfigError(f"no site {step.site!r}; this manager was given {', '.join(map(repr, sites))}.")
        raise ConfigError(
            f"ubatch must be an int in [0, {self._ubatches - 1}], got {step.ubatch!r}: this manager was configured "
            f"with ubatches={self._ubatches}."
        )

    def _plan_in_class(self, slot: Slot, step: Step, mark: Mark) -> StepPlan:
        plan = slot.plans[slot.ladder.class_for(mark.rows)]
        with plan.lock:
            with self._lock:
                was_resident = plan.is_resident
                why = self._make_resident(slot, plan, step, mark)
                if why is None and mark.capture_id:
                    self._graphs.pin(mark.capture_id, plan, slot.arena)
                self._count_lookup(was_resident, why)
                pair = plan.pair
                if why is None and pair is not None:
                    tables = pair.in_graph if mark.capture_id else pair.eager
                    found = tables.mark
                    is_same = found is not None and slot.spec.shared_lengths and self._is_same(found, step, mark)
                    if not (is_same or mark.capture_id):
                        self._order(plan)
            if why is not None or pair is None:
                return self._fall_back(slot, step, mark, why or Why("evicted", "evicted by another thread"))
            if found is not None and is_same:
                mark = found
                with self._lock:
                    self._counters.refreshes_skipped += 1
                refreshed = False
            else:
                self._refresh(tables, mark)
                refreshed = True
            captured = bool(mark.capture_id)
            step_plan = StepPlan(slot, "planned", "", mark.rows, mark, plan, captured, max_tokens=step.max_tokens)
            if mark.capture_id:
                with self._lock:
                    self._graphs.note_read(mark.capture_id, step_plan, refreshed=refreshed)
        self._log_route(slot, step_plan, "")
        if slot.spec.shared_lengths:
            self._answers[(slot.site, slot.ubatch)].last = step_plan
        return step_plan

    def _count_lookup(self, was_resident: bool, why: Why | None) -> None:
        """A plan_for found its plan resident, or not; a call that raised, or for which no plan is looked up, is
        neither. The manager's lock is held."""
        if why is not None and why.is_final:
            return
        if was_resident:
            self._counters.hits += 1
        else:
            self._counters.misses += 1

    def _is_same(self, found: Mark, step: Step, mark: Mark) -> bool:
        return (
            found.capture_id == mark.capture_id
            and found.allows_skip(self._epoch)
            and found.is_owned_by(step.owner)
            and found.difference(step, mark.rows, mark.address, mark.version) is None
        )

    def _plan_in_parts(self, slot: Slot, step: Step, mark: Mark) -> StepPlan:
        """More rows than the ladder and nobody else to take them: chunks of the top class, refreshed as they decode."""
        plan = slot.plans[slot.ladder.max_rows]
        with plan.lock, self._lock:
            was_resident = plan.is_resident
            why = self._make_resident(slot, plan, step, mark)
            self._count_lookup(was_resident, why)
            if why is None and plan.pair is not None:
                # What the tables hold was planned before this step: its parts must not take it for what came since.
                (plan.pair.in_graph if mark.capture_id else plan.pair.eager).set_mark(None)
        if why is not None:
            return self._fall_back(slot, step, mark, why)
        # Each part is refreshed as it decodes: these marks are compared as objects, so the owner need not be held.
        mark.retire()
        parts = []
        for first_row in range(0, mark.rows, plan.class_rows):
            lens = mark.lens[first_row : first_row + plan.class_rows]
            rows, address, version = self._device.inspect_lens(lens)
            part_mark = Mark(step, lens, rows, address, version, mark.capture_id)
            part_mark.retire()
            parts.append(StepPlan(slot, "planned", "", rows, part_mark, plan, bool(mark.capture_id), whole=mark))
        captured = bool(mark.capture_id)
        step_plan = StepPlan(
            slot, "planned", "", mark.rows, mark, None, captured, tuple(parts), max_tokens=step.max_tokens
        )
        self._log_route(slot, step_plan, "in parts")
        return step_plan

    def _fall_back(self, slot: Slot, step: Step, mark: Mark, why: Why) -> StepPlan:
        with self._lock:
            self._counters.fallbacks += 1
        recorded = bool(mark.capture_id)
        step_plan = StepPlan(slot, "fallback", why.text, mark.rows, mark, None, recorded, max_tokens=step.max_tokens)
        self._announcer.note("fallback", f"{slot.site}/ub{slot.ubatch}", why.text, rows=mark.rows, recorded=recorded)
        self._log_route(slot, step_plan, why.code)
        answers = self._answers[(slot.site, slot.ubatch)]
        answers.set_last_fallback(step_plan)
        answers.may_ask_again = why.may_pass
        return step_plan

    def _log_route(self, slot: Slot, plan: StepPlan, code: str) -> None:
        """Each distinct route once, with rows, class and reason (R37)."""
        key = (slot.site, plan.route, plan.class_rows, plan.captured, code)
        if key in self._logged_routes:
            return
        self._logged_routes.add(key)
        if plan.route == "planned":
            logger.info("site %s: %d rows planned in class %s", slot.site, plan.rows, plan.class_rows)
        else:
            logger.warning(
                "site %s: %d rows go to the fallback%s: %s",
                slot.site,
                plan.rows,
                ", recorded into a graph" if plan.captured else "",
                plan.reason,
            )

    def _refresh(self, tables: Tables, mark: Mark) -> None:
        """Launch the planner over the mark's lengths and publish the mark; a failed launch leaves no mark.

        The tables were taken and ordered under the manager's lock (`_order`).
        """
        tables.set_mark(None)
        lens = mark.lens
        for first_row, end_row, native in tables.views[0]:
            rows = min(mark.rows, end_row) - first_row
            if rows <= 0:
                self._backend.refresh(native, None, 0)
            elif first_row == 0 and rows == mark.rows:
                self._backend.refresh(native, lens, rows)
            else:
                self._backend.refresh(native, lens[first_row : first_row + rows], rows)
        tables.set_mark(mark)
        with self._lock:
            self._counters.refreshes += 1

    def _order(self, item: Item) -> None:
        """What the current stream launches next on this buffer runs after all that was launched on it before (C29).

        All uses of a buffer are in one order, whatever their streams: a refresh waits for the decodes of the step
        before too, and a freed block has one stream to wait for. A recording launches nothing: its replays are ordered.

        The manager's lock is held, since the buffer was taken: whoever evicts it then frees it behind this stream.
        """
        stream = self._current_stream()
        if item.stream != stream:
            self._device.order_after(item.stream)
            item.stream = stream

    @undisturbed
    def _decode_settled(self, plan: StepPlan, call: tuple[Any, ...]) -> None:
        """Decode by a class's tables where the marks alone do not say what is in them. `call` was checked.

        The plan's lock is held.
        """
        capture_id = self._capture_id()
        if capture_id:
            self._record_decode(plan, call, capture_id)
            return
        slot = plan.slot
        tables, scratch = self._settle(plan)
        plan.mark.is_used_eagerly = True
        if self._flags is not None:
            self._sanitize_tables(tables, plan.mark, slot.spec, call[4])
        for arguments in self._segment_calls(slot.spec.query_length, tables.views[slot.view], scratch, call):
            self._backend.decode(*arguments)

    def _record_decode(self, plan: StepPlan, call: tuple[Any, ...], capture_id: int) -> None:
        """Decode while recording. A call that is refused pins nothing, and is nothing that the graph reads."""
        item, slot = plan.item, plan.slot
        assert item is not None
        with self._lock:
            self._check_open("pa_decode")
            pinned = self._graphs.pin(capture_id, item, slot.arena)
            pair, scratch = item.pair, slot.arena.buffer
        assert pair is not None
        refreshed = False
        decoded_tokens: int | None = None
        table_tokens = call[4].shape[1] * slot.spec.page_size
        try:
            tables, refreshed = self._settle_recording(plan, item, pair, capture_id)
            for arguments in self._segment_calls(slot.spec.query_length, tables.views[slot.view], scratch, call):
                self._backend.decode(*arguments)
                decoded_tokens = table_tokens
            if self._flags is not None:  # behind the decode, which may refuse
                self._sanitize_tables(tables, plan.mark, slot.spec, call[4])
        except PlanlifeError:
            raise
        except BaseException:
            decoded_tokens = table_tokens  # a part of it may be in the graph
            raise
        finally:
            with self._lock:
                self._epoch += not plan.captured
                if refreshed or decoded_tokens is not None:
                    self._graphs.note_read(capture_id, plan, refreshed=refreshed, decoded_tokens=decoded_tokens)
                else:
                    self._graphs.unpin(capture_id, pinned)

    def _settle(self, plan: StepPlan) -> tuple[Tables, Any]:
        """(tables, scratch) to launch with outside of a recording: brings back, refreshes or refuses."""
        item, slot, mark = plan.item, plan.slot, plan.mark
        assert item is not None
        with self._lock:
            self._check_open("pa_decode")
            if plan.captured:
                raise self._announcer.refuse(
                    RouteError(
                        f"{plan!r} was made while capture {mark.capture_id} recorded; its tables belong to that "
                        "graph's replays. Call plan_for again for an eager step."
                    )
                )
            if not (item.is_resident and slot.arena.is_resident):
                self._materialise(slot, item, mark)
            self._order(item)
            self._order(slot.arena)
            pair, scratch = item.pair, slot.arena.buffer
        assert pair is not None
        found = pair.eager.mark
        if found is not mark and not (found is not None and found.is_same_step(mark)):
            self._check_unmoved(plan, mark, pair.eager)
            self._refresh(pair.eager, mark)
        return pair.eager, scratch

    def _settle_recording(self, plan: StepPlan, item: Plan, pair: Pair, capture_id: int) -> tuple[Tables, bool]:
        """(tables to record with, whether their refresh was recorded just now), or refuses."""
        slot, mark = plan.slot, plan.mark
        refreshed = False
        if plan.captured:
            tables = pair.in_graph
            if tables.mark is not mark:
                if mark.capture_id != capture_id:
                    raise self._stale(
                        f"capture {capture_id} would read the in-graph tables of {item} as capture {mark.capture_id} "
                        "refreshed them, and they were refreshed since. Call plan_for inside this recording."
                    )
                self._check_unmoved(plan, mark, tables)
                self._refresh(tables, mark)
                refreshed = True
        else:
            tables = pair.eager
            if not slot.spec.shared_lengths:
                raise self._announcer.refuse(
                    RouteError(
                        f"site {slot.site!r} has shared_lengths=False: each layer needs its own refresh, which a plan "
                        "made before the recording cannot give. Call plan_for per layer inside the recording."
                    )
                )
            read = self._graphs.eager_read_of(capture_id, item)
            if read is not None and read.mark is not mark:
                raise self._announcer.refuse(
                    SecondStepError(
                        f"capture {capture_id} reads {item} for a second step: both refreshes would precede the "
                        "replay, so the first step would decode the second one's work. Call plan_for in the recording."
                    )
                )
            if tables.mark is not mark:
                raise self._stale(
                    f"{item} holds other lengths than those this plan was made for "
                    f"({describe_owner(mark.held_owner())}, revision {mark.revision}), and a refresh of eager tables "
                    "must not be recorded. Call plan_for right before the recording, or inside it for each step.",
                    SecondStepError,
                )
        return tables, refreshed

    def _check_unmoved(self, plan: StepPlan, mark: Mark, tables: Tables) -> None:
        """Refuse to plan again from a length buffer that was written, or may have been, since this step's plan_for."""
        rows, address, version = self._device.inspect_lens(mark.lens)
        if (rows, address) != (mark.rows, mark.address):
            raise self._stale(
                f"{plan.item} must be planned again for {plan!r}, but its length tensor is another buffer since "
                f"plan_for ({mark.rows} rows at {mark.address:#x}, now {rows} at {address:#x}). Call plan_for again."
            )
        if version != mark.version:
            raise self._stale(
                f"{plan.item} must be planned again for {plan!r}, but its length buffer was written since plan_for "
                f"(version {mark.version}, now {version}). Call plan_for after every write to the lengths."
            )
        found = tables.mark
        if version is None and found is not None and found.address == mark.address:
            raise self._stale(
                f"{plan.item} must be planned again for {plan!r}, but its length buffer was planned since for another "
                "step, and an inference-mode tensor does not tell whether it was written meanwhile. Call plan_for "
                "again for the step that decodes next."
            )

    @staticmethod
    def _segment_calls(
        query_length: int, segments: tuple[Segment, ...], scratch: Any, call: tuple[Any, ...]
    ) -> list[tuple[Any, ...]]:
        """What `Backend.decode` gets, once per table set, each over its rows; they are serial and share the scratch."""
        output, query, key_cache, value_cache, block_tables, *extras, lse = call
        calls = []
        for first_row, end_row, native in segments:
            first, end = first_row * query_length, end_row * query_length
            chunk = output[first:end]
            if chunk.shape[0]:
                tables = block_tables[first_row:end_row]
                rest = (*extras, None if lse is None else lse[first:end])
                calls.append((native, scratch, chunk, query[first:end], key_cache, value_cache, tables, *rest))
        return calls

    @undisturbed
    def _decode_other(self, plan: StepPlan | OffPlan, call: tuple[Any, ...]) -> None:
        """Dummies, the fallback, and more rows than the ladder has."""
        self._enter("pa_decode")
        slot: Slot = plan.slot
        capture_id = self._capture_id()
        if plan.route == "dummy":
            if capture_id:
                raise self._announcer.refuse(
                    RouteError("a dummy step was decoded while recording: a graph would freeze its zeros.")
                )
            self._decode_nothing(slot, call)
            return
        rows, address, version = self._device.inspect_lens(plan.context_lens)
        if not rows:
            # Only with enabled=False, where plan_for does not look: else no rows are a dummy step too.
            self._decode_nothing(slot, call)
            return
        if plan.route == "fallback" and self._fallback is None:
            raise self._announcer.refuse(
                RouteError(
                    f"site {slot.site!r}: nothing can serve this call: {plan.reason}. Pass fallback= to the manager, "
                    "or serve steps whose plan_for answers route 'fallback' yourself."
                )
            )
        ladder = slot.ladder
        class_rows = ladder.class_for(rows) if rows <= ladder.max_rows else rows
        slot.checker.check(rows, class_rows, *call, max_tokens=plan.max_tokens)
        if plan.route == "fallback" and call[-1] is not None and not self._fallback_takes_lse:
            name = getattr(self._fallback, "__qualname__", self._fallback)
            raise self._announcer.refuse(
                RouteError(
                    f"site {slot.site!r}: this call asks for lse and goes to the fallback {name!r}, which does not "
                    "take it. Give it a keyword argument lse, which it writes whole, or pass fallback='torch'."
                )
            )
        if plan.parts:
            if capture_id and not plan.captured:
                raise self._announcer.refuse(
                    RouteError(
                        f"{plan!r} decodes in parts through one table set, which is refreshed for each part: that must "
                        "be recorded too. Call plan_for inside the recording, or raise the ladder's top class."
                    )
                )
            self._decode_parts(slot.spec.query_length, plan.parts, call)
            return
        is_refused = False
        try:
            self._decode_by_fallback(slot.spec, rows, plan.context_lens, call)
        except PlanlifeError:
            is_refused = True
            raise
        finally:
            if capture_id and not is_refused:
                mark = plan.mark
                if mark is None:
                    own_step = Step(plan.context_lens, site=slot.site, ubatch=slot.ubatch)
                    mark = Mark(own_step, plan.context_lens, rows, address, version, capture_id)
                with self._lock:
                    table_tokens = call[4].shape[1] * slot.spec.page_size
                    self._graphs.note_fallback(capture_id, plan, mark, table_tokens)

    def _decode_nothing(self, slot: Slot, call: tuple[Any, ...]) -> None:
        """Zeros, for an output of any number of rows."""
        output, *_, lse = call
        slot.checker.check_output(output)
        if lse is not None:
            slot.checker.check_lse(lse, output)
            self._device.fill(lse, -math.inf)
        self._device.fill(output, 0.0)

    def _decode_by_fallback(self, spec: PlanSpec, rows: int, context_lens: Any, call: tuple[Any, ...]) -> None:
        assert self._fallback is not None
        output, query, key_cache, value_cache, block_tables, softmax_scale, key_scale, value_scale, sinks, lse = call
        end = rows * spec.query_length
        asked = {}
        if lse is not None:
            # One that swallows it in its **keywords must not leave an earlier call's numbers behind.
            self._device.fill(lse[:end], math.nan)
            self._device.fill(lse[end:], -math.inf)
            asked["lse"] = lse[:end]
        if rows:
            of_rows = output[:end], query[:end], key_cache, value_cache, block_tables[:rows]
            scales = {"key_scale": key_scale, "value_scale": value_scale}
            with self._device.as_called():
                self._fallback(*of_rows, context_lens, softmax_scale, spec=spec, **scales, sinks=sinks, **asked)
        if output.shape[0] > end:
            self._device.fill(output[end:], 0.0)

    def _decode_parts(self, query_length: int, parts: tuple[StepPlan, ...], call: tuple[Any, ...]) -> None:
        """Chunks of the top class, one after another through its one table set: each is refreshed as it decodes."""
        output, query, key_cache, value_cache, block_tables, *extras, lse = call
        end_row = 0
        calls: list[tuple[StepPlan, Plan, tuple[Any, ...]]] = []
        for part in parts:
            first_row, end_row = end_row, end_row + part.rows
            first, end = first_row * query_length, end_row * query_length
            tables_of_part = block_tables[first_row:end_row]
            lse_of_part = None if lse is None else lse[first:end]
            part_call = (
                output[first:end], query[first:end], key_cache, value_cache, tables_of_part, *extras, lse_of_part,
            )  # fmt: skip
            item = part.item
            assert item is not None
            self._check_call(part.slot.spec, *part_call)
            calls.append((part, item, part_call))
        for part, item, part_call in calls:
            with item.lock:
                self._decode_settled(part, part_call)

    def _make_resident(self, slot: Slot, plan: Plan, step: Step, mark: Mark) -> Why | None:
        """Both buffers of one call are there, or why they are not; raises where falling back is not allowed.

        The manager's lock is held.
        """
        self._check_open("plan_for")  # again, under the lock: what is allocated after close() nobody gives back
        decision = self._decide(slot, step, mark.rows, recording=bool(mark.capture_id))
        if decision.error is not None:
            raise self._announcer.refuse(decision.error())
        self._residency.num_calls += decision.why is None or not decision.why.is_final
        if decision.why is not None:
            return decision.why
        if plan.is_resident and slot.arena.is_resident:
            self._residency.store.touch(plan)
            self._residency.store.touch(slot.arena)
            return None
        if plan.state is State.ABSENT and not self._num_phases:
            logger.warning(
                "class %s of site %r (ubatch %s) was never minted: minting it now, which stalls this step "
                "(on_miss='mint')",
                plan.class_rows,
                slot.site,
                slot.ubatch,
            )
        try:
            self._materialise(slot, plan, mark)
        except CompileError as error:
            return Why("refused class", self._refuse_class(plan, error))
        except NoRoomError as error:
            why = why_without_room(error.code, str(error), self._rules.on_miss, in_phase=bool(self._num_phases))
            if why is None:
                raise
            return why
        return None

    def _refuse_class(self, plan: Plan, error: CompileError) -> str:
        """The backend cannot compile a class: from now on it is the fallback's, for all ubatches; returns why.

        Raises what the backend raised where there is no fallback. The manager's lock is held.
        """
        if self._fallback is None:
            raise self._announcer.refuse(error.refusal) from error.refusal.__cause__
        which = f"class {plan.class_rows} of site {plan.site!r}"
        text = f"backend {self._backend.name} cannot compile {which}: {error.refusal}"
        self._refused_classes[(plan.site, plan.class_rows)] = text
        self._announcer.note("refuse", plan, text)
        logger.warning("%s The fallback takes its steps.", text)
        return text

    def _materialise(self, slot: Slot, plan: Plan, mark: Mark) -> None:
        try:
            self._residency.materialise(plan, slot.arena, f"{mark.rows} rows", in_phase=bool(self._num_phases))
        except NoRoomError as error:
            raise self._announcer.refuse(error) from error.__cause__

    @contextmanager
    def graph(self, g: Graph | None = None, pool: Any = None, **options: Any) -> Iterator[Graph]:
        """Record the body into a graph and pin what it touches; yields the graph.

        g: None makes one; a graph recorded before is reset first, and its pins go once its last replay is over.
        pool, options: as torch.cuda.graph takes. A body that raises leaves the graph empty and its pins gone. On a CPU
        the graph is a planlife EmulatedGraph.

        Raises RouteError while this stream records already, and what the body raises. Syncs, Allocates: as the graph
        type does.
        """
        self._enter("graph")
        if self._capture_id():
            raise self._refuse(RouteError("graph() was called while this stream records: captures do not nest."))
        is_known = g is not None and self._graphs.of(g) is not None
        if g is None:
            g = self._device.new_graph()
        # First: an option that does not exist must not cost the graph.
        recording = self._device.record(g, pool=pool, **options)
        if is_known:
            self._device.reset(g)
            with self._lock:
                self._graphs.unbind(g)
            self._drain()  # not a release: its last replay may be in flight, and then its pins stay until that is over
        try:
            with recording:
                with self._lock:
                    self._graphs.adopt(g)
                yield g
            with self._lock:
                self._graphs.end_recording(g)
        except BaseException:
            with self._lock:
                self._graphs.unbind(g)
            raise
        finally:
            self._drain()  # a capture that failed is gone by now, and takes its pins along

    def adopt(self, g: Graph) -> None:
        """Bind a capture that an engine opened itself to its graph object, so that guard, replay and release know it.

        Call it inside the recording, on any thread whose stream is in it, at any moment before its end: that is exact,
        whichever threads record, and harmless for a capture that touches no plan. Pins of an earlier capture into g go
        once its last replay is over.

        After the recording it confirms what is bound, and does nothing where the last capture touched no plan.

        Raises RouteError after a recording where nothing tells which capture g holds, or for an empty graph;
        ConfigError for what is no graph. Capture: yes. Syncs: no. Allocates: no.
        """
        self._enter("adopt")
        try:
            with self._lock:
                self._graphs.adopt(g)
        finally:
            self._announcer.deliver()

    @undisturbed
    def guard(self, g: Graph | StepPlan | OffPlan, *steps: Step) -> None:
        """Check that the next replay of g decodes the work of these steps; call it before g.replay(), on its stream.

        g: the graph object; or, for an engine that never sees its graphs, the StepPlan that pa_decode recorded, where
        exactly one live graph was recorded with it.

        Once per replay. Every plan that g reads needs a step of its site and ubatch, with the captured row count and
        route, and with the captured length buffer where a recorded op reads it; tables that g does not refresh itself
        must hold exactly the step's lengths, and g must not have been let replay on them before. A dummy step empties
        such tables instead, and writes zeros into the length buffers that g reads, on the current stream. The current
        stream waits, on the device, for what other streams were given of those plans.

        A step is known by its owner: under one owner for ever it takes a step for the one that an eager decode had
        before, if torch cannot see the lengths being written. replay() does not.

        Raises StalePlanError naming graph, plan, field, found and wanted, RouteError while recording or for a graph
        that this manager does not know, ConfigError for a bad step or what is no graph. A refusal changes nothing.
        Capture: no. Syncs: no. Allocates: no.
        """
        self._enter("guard")
        if isinstance(g, OffPlan):
            for step in steps:
                self._inspect(step)
            return  # planlife is off: the graph runs the fallback, over the lengths that are in the buffer then
        try:
            record, matches = self._match(g, steps, "guard")
            check_planned(record, matches)
            self._accept(record, matches)
        except StalePlanError as error:
            self._note_stale(error)
            raise
        finally:
            self._announcer.deliver()

    def _match(self, g: Graph | StepPlan, steps: tuple[Step, ...], what: str) -> tuple[GraphRecord, list[Match]]:
        """What a graph reads, with the step of each read; everything but the marks of eager tables was checked."""
        if self._capture_id():
            raise self._announcer.refuse(
                RouteError(f"{what}() was called while this stream records: a replay cannot be part of a graph.")
            )
        with self._lock:
            record = self._graphs.of_plan(g) if isinstance(g, StepPlan) else self._graphs.of(g)
            if record is None or record.released:
                raise self._announcer.refuse(
                    RouteError(
                        "this graph holds no pins here: it was released, reset, or captured without manager.graph() "
                        "and not adopted. Capture it through manager.graph(), or call adopt(g) inside your own "
                        "recording."
                    )
                )
            self._graphs.report_unread(record)
        given = [Given(step, *self._inspect(step)) for step in steps]
        matches = match(record, given, self._decision_of)
        check_foreign(record, matches)
        return record, matches

    def _decision_of(self, one: Given, read: Read) -> Decision:
        """What plan_for answered this very step, or would answer it where the read was planned."""
        slot, step = one.slot, one.step
        if not self._enabled:
            return Decision("fallback")
        known = self._answers[(slot.site, slot.ubatch)].known(step, one.rows, one.address, one.version)
        if known is not None:
            return Decision(known.route, Why("known", known.reason) if known.reason else None)
        with self._lock:
            return self._decide(slot, step, one.rows, recording=read.captured)

    def _accept(self, record: GraphRecord, matches: list[Match]) -> None:
        """Everything was checked: bring tables and marks to where the replay finds, and leaves, them."""
        # What can fail comes first: a mark must not tell of a replay that will not happen.
        with self._lock:
            for item in record.pinned:
                self._order(item)
        emptied: set[Tables] = set()
        for one in matches:
            if one.given.is_dummy:
                self._empty(record, one, emptied)
        refreshes: dict[Plan, int] = {}
        for read in record.reads.values():
            if read.plan is not None and read.captured:
                refreshes[read.plan] = refreshes.get(read.plan, 0) + read.refreshes
        for one in matches:
            plan = one.read.plan
            if plan is None:
                continue
            with plan.lock:
                tables = one.tables
                if not record.refreshes_itself(one.read):
                    mark = None if one.given.is_dummy else tables.mark
                    if mark is not None and record.capture_id not in mark.consumers:
                        mark.consumers += (record.capture_id,)
                elif refreshes[plan] == 1 and not one.given.is_dummy:
                    tables.set_mark(one.given.mark(record.capture_id, 0))
                else:
                    tables.set_mark(None)  # several refreshes, or zeros: whose lengths are the last is not known here
        with self._lock:
            self._epoch += 1

    def _empty(self, record: GraphRecord, one: Match, emptied: set[Tables]) -> None:
        """A dummy step must read nothing through its block tables, whatever is in the buffers that the graph reads.

        Also where the tables were emptied before: a sleep may have overwritten them.
        """
        read = one.read
        if empties_lens(record, read):
            self._device.empty_lens(read.mark.lens)
        if (read.foreign_mark or not empties_lens(record, read)) and one.tables not in emptied:
            assert read.plan is not None
            with read.plan.lock:
                self._refresh(one.tables, EMPTY)
            emptied.add(one.tables)

    @undisturbed
    def replay(self, g: Graph, *steps: Step) -> None:
        """Plan what is stale for these steps, guard, and g.replay() on the current stream: one call for a step.

        Tables that g refreshes itself need nothing. Each eager table set that g reads is refreshed, at most once, where
        it holds another step's lengths, or lengths that g was replayed for, or that an eager decode had before any
        graph: so a replay is right under an owner that lives for ever, too. A plan_for before it is not needed, and
        costs nothing.

        Raises what guard raises, but for tables that are only stale, and StalePlanError where two steps need different
        lengths in one table set, or with sanitize="raise" if a decode in g read stale tables or clamped a length.
        Capture: no. Syncs: no. Allocates: no.
        """
        self._enter("replay")
        try:
            record, matches = self._match(g, steps, "replay")
            for plan, given in stale_eager(record, matches):
                with plan.lock:
                    with self._lock:
                        self._order(plan)
                    assert plan.pair is not None, "a pinned plan lost its buffer"
                    mark = given.mark(0, self._epoch)
                    self._refresh(plan.pair.eager, mark)
            check_planned(record, matches)  # another thread may have planned meanwhile
            self._accept(record, matches)
            try:
                self._device.replay(g)
            except BaseException:
                record.forget_content()
                raise
        except StalePlanError as error:
            self._note_stale(error)
            raise
        finally:
            self._announcer.deliver()
        self._raise_flags()

    def release(self, g: Graph) -> None:
        """Promise that g is not replayed again: its pins go. Also automatic when g is reset or collected.

        Automatic is safer: the pins then wait for replays in flight, also for those on streams that no guard or replay
        was called on. release() does not: such replays must be over.

        Nothing happens for a graph that is not known here, or no longer. Raises ConfigError for what is no graph.
        Capture: yes. Syncs: no. Allocates: no.
        """
        self._drain()
        record = self._graphs.of(g)
        if record is not None:
            self._release(record, "released")
        self._announcer.deliver()

    def _release(self, record: GraphRecord, reason: str) -> None:
        with self._lock:
            if self._graphs.release(record, reason):
                self._forget_fallbacks()

    def _drain(self) -> None:
        """Settle what finalisers only queued."""
        with self._lock:
            if self._graphs.release_gone():
                self._forget_fallbacks()
        self._announcer.deliver()

    def worst_case_bytes(self) -> int:
        """Bytes of everything resident at once; what a full warm-up takes, never exceeded. 0 with enabled=False."""
        return self._sizing.worst_case_bytes() if self._enabled else 0

    def min_budget_bytes(self) -> int:
        """The largest need of one call, its pair of table sets and its arena: the least budget_bytes. 0 when off."""
        return self._sizing.min_budget_bytes() if self._enabled else 0

    @staticmethod
    def estimate_bytes(
        sites: PlanSpec | Mapping[str, PlanSpec],
        *,
        ladder: CapacityLadder | Mapping[str, CapacityLadder],
        ubatches: int = 1,
        backend: str | Backend = "torch",
        num_compute_units: int = 256,
    ) -> int:
        """worst_case_bytes() of a manager with these arguments, without a device.

        num_compute_units: of the device meant: a GPU's SM or CU count, 256 for the CPU device. More than that where the
        device makes the backend refuse a site: without a device nobody can ask, so its bytes are counted here.

        Raises ConfigError, BackendUnavailableError. Capture: n/a. Syncs: no. Allocates: no.
        """
        specs, ladders = check_sites(sites, ladder)
        check_int("ubatches", ubatches, at_least=1)
        check_int("num_compute_units", num_compute_units, at_least=1)
        resolved = resolve_backend(backend)
        settled = settle_specs(specs, resolved, DeviceMeant(num_compute_units))
        return Sizing(settled, ladders, resolved, ubatches, num_compute_units).worst_case_bytes()

    def trim(self, target_bytes: int) -> int:
        """Evict the least recently used plans and arenas until at most `target_bytes` are resident.

        What graphs pin stays. Returns the bytes freed.

        Raises ConfigError for what is no number of bytes. Capture: yes. Syncs: no. Allocates: no.
        """
        self._enter("trim")
        check_int("target_bytes", target_bytes, at_least=0)
        with self._lock:
            freed_bytes = self._residency.evict_down_to(target_bytes, f"trimmed to {target_bytes:,} bytes")
            self._forget_fallbacks()
        self._announcer.deliver()
        return freed_bytes

    def invalidate(self) -> None:
        """Drop all marks and keep all addresses: after sleep/wake, a weight reload, or a move of the KV cache.

        Capture: yes. Syncs: no. Allocates: no.
        """
        self._enter("invalidate")
        self._forget_fallbacks()
        for slot in self._slots.values():
            for plan in slot.plans.values():
                with plan.lock:
                    for tables in plan.pair or ():
                        tables.set_mark(None)

    def report(self) -> MemoryReport:
        """What is held and what was done. Works after close(). Capture: yes. Syncs: no. Allocates: no."""
        if not self._closed:
            self._drain()
            self._collect_flags(may_raise=False)
        with self._lock:
            counters = self._counters.to_dict()
            for answers in self._answers.values():
                counters["hits"] += answers.num_skipped
                counters["refreshes_skipped"] += answers.num_skipped
            plans = dict.fromkeys(plan for slot in self._slots.values() for plan in slot.plans.values())
            arenas = {slot.arena.key: slot.arena for slot in self._slots.values()}
            return MemoryReport(
                device=self._device.name,
                backend=self._backend.name,
                budget_bytes=self._residency.ledger.budget_bytes,
                worst_case_bytes=self.worst_case_bytes(),
                resident_bytes=self._residency.ledger.resident_bytes,
                pinned_bytes=self._residency.store.pinned_bytes,
                peak_bytes=self._residency.ledger.peak_bytes,
                num_graphs=len(self._graphs),
                sealed=self._sealed,
                closed=self._closed,
                sites=tuple(
                    SiteLine(site, spec.max_partitions, spec.workgroup_budget, spec.plan_of)
                    for site, spec in self._settled.items()
                ),
                plans=tuple(
                    PlanLine(
                        plan.site,
                        plan.class_rows,
                        plan.ubatch,
                        "refused" if refusal else plan.state.value,
                        plan.num_bytes,
                        plan.num_pins,
                        refusal or self._residency.tombstone_of(plan),
                    )
                    for plan in plans
                    if (refusal := self._rules.refusal_of(plan)) or plan.state is not State.ABSENT
                ),
                arenas=tuple(
                    ArenaLine(
                        lane,
                        int(ubatch.removeprefix("ub")),
                        arena.state.value,
                        arena.num_bytes,
                        arena.num_pins,
                        self._residency.tombstone_of(arena),
                    )
                    for (_, lane, ubatch), arena in arenas.items()
                    if arena.state is not State.ABSENT
                ),
                counters=counters,
                excluded=self._excluded(),
            )

    def _excluded(self) -> dict[str, str]:
        excluded = {
            "compiled code": "what the backend's compiler and loader keep per specialisation",
            **self._backend.excluded(self._device),
        }
        if self._flags is not None:
            excluded["sanitizer"] = f"{NUM_FLAGS * 8} bytes of counters"
        if self._fallback is not None:
            excluded["fallback"] = "whatever the fallback allocates while it runs"
        return excluded

    def add_hook(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        """Call `callback(event)` for every event, outside all locks; returns a function that removes it.

        An exception in the callback is logged and dropped. The callback may call the manager.
        Raises ConfigError for what cannot be called.
        """
        self._check_open("add_hook")
        if not callable(callback):
            raise ConfigError(f"add_hook takes a callable, got {callback!r}.")
        return self._announcer.add_hook(callback)

    def close(self) -> None:
        """Give every byte back. Idempotent. Live graphs lose their pins: they must not be replayed any more.

        Raises RouteError while this thread's stream records. Capture: no. Syncs: no. Allocates: no.
        """
        if self._closed:
            return
        if self._capture_id():
            raise self._refuse(RouteError("close() was called while this stream records; end the recording first."))
        self._drain()
        self._collect_flags(may_raise=False)
        with self._lock:
            self._closed = True
            for record in self._graphs.all():
                self._release(record, "the manager was closed")
            self._residency.evict_down_to(0, "the manager was closed")
            for answers in self._answers.values():
                answers.last = None
                answers.set_last_fallback(None)
            self._flags = None
        self._announcer.deliver()

    def __enter__(self) -> PlanManager:
        self._check_open("with")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _enter(self, what: str) -> None:
        """Every entry point: refuse after close, settle what happened meanwhile. Holds no lock: hooks are called."""
        self._check_open(what)
        if self._released:
            self._drain()
        if self._flags is not None and not self._capture_id():
            self._raise_flags()

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what} was called on a closed PlanManager; make a new one.")

    @undisturbed
    def _sanitize_tables(self, tables: Tables, mark: Mark, spec: PlanSpec, block_tables: Any) -> None:
        """Compare the tables with the lengths that are in the buffer now; recorded into the graph when recording."""
        max_tokens = min(spec.max_context_tokens, block_tables.shape[1] * spec.page_size)
        for first_row, end_row, native in tables.views[0]:
            rows = max(min(mark.rows, end_row) - first_row, 0)
            self._backend.sanitize(native, mark.lens[first_row : first_row + rows], rows, self._flags, max_tokens)
        if not self._capture_id():
            self._collect_flags(may_raise=True)

    def _raise_flags(self) -> None:
        """Raise what the sanitizer saw; the hooks hear of it first. Holds no lock."""
        try:
            self._collect_flags(may_raise=True)
        finally:
            self._announcer.deliver()

    def _refuse(self, error: _Error) -> _Error:
        """A call is refused where no lock is held and nothing else delivers; the caller raises what it gets back."""
        self._announcer.refuse(error)
        self._announcer.deliver()
        return error

    def _collect_flags(self, *, may_raise: bool) -> None:
        if self._flags is None:
            return
        words = self._device.read_flags(self._flags)
        stale, clamped = words[FLAG_STALE], words[FLAG_CLAMPED]
        if not (stale or clamped):
            return
        with self._lock:
            self._counters.lengths_clamped += clamped
            self._counters.stale_detected += stale
        wrong = []
        if stale:
            reason = f"the sanitizer saw {stale} decode(s) whose tables were not made from the lengths in the buffer"
            self._announcer.note("stale", self._device.name, reason)
            wrong.append(
                f"{reason}. Call plan_for after every write to the lengths, before the replay, for a step whose owner "
                "is new: under another step's owner, lengths that torch cannot see being written count as the same."
            )
        if clamped:
            wrong.append(
                f"the sanitizer saw {clamped} length(s) above max_context_tokens, or above what the block tables have "
                "columns for: what is behind that was left out. Raise max_context_tokens, pass wider block tables, or "
                "pass Step(max_tokens=), which is checked before a launch."
            )
        if wrong and may_raise and self._sanitize == "raise":
            raise StalePlanError(" ".join(wrong))

    def _stale(self, message: str, error: type[StalePlanError] = StalePlanError) -> StalePlanError:
        stale = error(message)
        self._note_stale(stale)
        return stale

    def _note_stale(self, error: StalePlanError) -> None:
        with self._lock:
            self._counters.stale_detected += 1
        self._announcer.note("stale", self._device.name, str(error))
