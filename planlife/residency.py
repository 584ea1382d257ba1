"""Bringing plans and arenas into memory, and out of it: mint, rematerialise, evict, all or nothing."""

from __future__ import annotations

from typing import Any

from .backends.base import Backend
from .device import Device
from .errors import BudgetError, ConfigError, MintError
from .events import Announcer
from .item import Item, State
from .ledger import Ledger
from .plan import Arena, Plan
from .report import Counters
from .sizing import Sizing
from .store import Store, Tombstone


class NoRoomError(BudgetError):
    """Buffers do not fit; `code` is the short reason that a fallback route shows."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both, or it cannot cross a process boundary
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


class CompileError(Exception):
    """The backend refuses to compile a class. refusal: what it raised, for those who get no other answer."""

    def __init__(self, refusal: ConfigError | MintError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Residency:
    """Owns: every buffer of every plan and arena, and the code compiled for their classes.

    The caller holds the manager's lock around every method.
    """

    def __init__(
        self,
        device: Device,
        backend: Backend,
        sizing: Sizing,
        budget_bytes: int,
        counters: Counters,
        announcer: Announcer,
    ) -> None:
        self._device = device
        self._backend = backend
        self._sizing = sizing
        self._counters = counters
        self._announcer = announcer
        self._compiled: set[tuple[str, int]] = set()
        self.ledger = Ledger(budget_bytes)
        self.store = Store(self.ledger, device.free)
        self.num_pinning_graphs = 0
        self.num_calls = 0  #: planning calls so far: the clock of tombstones

    def materialise(self, plan: Plan, arena: Arena, for_whom: str, *, in_phase: bool) -> None:
        """Allocate what is missing of a call's pair and arena, evicting what is oldest; mint the plan if it is new.

        Victims are chosen first, evicted second, the new buffers allocated third, so that the budget holds meanwhile.
        A failure at any point leaves every item as it was; evicted ones come back without their content.
        Raises NoRoomError, CompileError.
        """
        items = _missing(plan, arena)
        names = " and ".join(map(str, items))
        need_bytes = sum(item.num_bytes for item in items)
        victims = self.store.choose_victims(need_bytes, keep=(plan, arena))
        if victims is None:
            raise NoRoomError(*self._no_room(names, need_bytes))
        is_new = plan.state is State.ABSENT
        order = list(self.store)
        tombstone = self.tombstone(f"evicted to make room for {plan} ({for_whom})")
        for victim in victims:
            self.store.evict(victim, tombstone)
        buffers: list[Any] = []
        contents: list[Any] = []
        stream = self._device.current_stream()
        try:
            for item in items:
                buffers.append(self._device.allocate(item.num_bytes))
            contents = [item.build(buffer) for item, buffer in zip(items, buffers, strict=True)]
            if is_new:
                self._compile(plan, in_phase=in_phase)
        except BaseException as error:
            contents.clear()
            while buffers:  # none is held while the victims come back: there may be room for one of both only
                self._device.free(buffers.pop(), stream)
            self._bring_back(victims, order)
            if isinstance(error, MemoryError):
                raise NoRoomError(
                    "out of memory",
                    f"the allocator has no {need_bytes:,} bytes for {names}: {error}. Take worst_case_bytes() off the "
                    "KV pool, or lower budget_bytes.",
                ) from error
            raise
        for item, buffer, content in zip(items, buffers, contents, strict=True):
            came_back = item.state is State.EVICTED
            self.store.place(item, buffer, content, stream)
            if came_back:
                self._counters.rematerialised += 1
                self._announcer.note("rematerialise", item, for_whom, num_bytes=item.num_bytes)
        for item in (plan, arena):  # an arena that was there is used by this call too
            self.store.touch(item)
        for victim in victims:
            self._count_eviction(victim, tombstone.reason)
        if is_new:
            self._count_mint(plan)

    def why_no_room(self, plan: Plan, arena: Arena) -> tuple[str, str] | None:
        """Of what `materialise` would raise for want of room in the budget, code and message; None where there is some.

        Changes nothing.
        """
        items = _missing(plan, arena)
        need_bytes = sum(item.num_bytes for item in items)
        if self.store.has_room(need_bytes, keep=(plan, arena)):
            return None
        return self._no_room(" and ".join(map(str, items)), need_bytes)

    def _no_room(self, names: str, need_bytes: int) -> tuple[str, str]:
        return (
            "no room in the budget",
            f"no room for {names}: it needs {need_bytes:,} bytes of a {self.ledger.budget_bytes:,} byte "
            f"budget, of which {self.store.pinned_bytes:,} bytes are pinned by {self.num_pinning_graphs} "
            f"graph{'s' * (self.num_pinning_graphs != 1)}. Release a graph or raise budget_bytes.",
        )

    def mint_what_fits(self, plan: Plan, arena: Arena) -> None:
        """Compile, and allocate only if nothing has to go for it. Raises NoRoomError, CompileError."""
        need_bytes = sum(item.num_bytes for item in _missing(plan, arena))
        if need_bytes <= self.ledger.room_bytes:
            self.materialise(plan, arena, "warm", in_phase=True)
        elif plan.state is State.ABSENT:
            self._compile(plan, in_phase=True)
            plan.move(State.EVICTED)
            self.store.tombstones[plan.key] = self.tombstone("compiled by warm(), which found no room for its buffers")
            self._count_mint(plan)

    def evict_down_to(self, target_bytes: int, reason: str) -> int:
        """Evict the oldest unpinned items until at most `target_bytes` are resident; returns the bytes freed."""
        freed_bytes = 0
        tombstone = self.tombstone(reason)
        for item in list(self.store):
            if self.ledger.resident_bytes <= target_bytes:
                break
            if item.state is State.RESIDENT:
                self.store.evict(item, tombstone)
                self._count_eviction(item, reason)
                freed_bytes += item.num_bytes
        return freed_bytes

    def require_resident(self, plan: Plan, arena: Arena) -> None:
        """Raises MintError unless both buffers are there: while recording, nothing can bring them."""
        if not (plan.is_resident and arena.is_resident):
            raise self._announcer.refuse(MintError(self.why_not_resident(plan, arena)))

    def why_not_resident(self, plan: Plan, arena: Arena) -> str:
        """Which buffer of a call is missing while recording, why, and the way out."""
        missing: Item = arena if plan.is_resident else plan
        if missing.state is State.ABSENT:
            what = f"{missing} was never minted"
        else:
            what = f"{missing} is not resident: {self.tombstone_of(missing)}"
        return (
            f"{what}, and this stream is recording, where nothing may be allocated or compiled. Call warm() or "
            "plan_for for this class before the recording."
        )

    def tombstone(self, reason: str) -> Tombstone:
        return Tombstone(reason, self.num_calls)

    def tombstone_of(self, item: Item) -> str:
        """What became of an item that is not resident, "" if there is nothing to tell."""
        return str(self.store.tombstones.get(item.key, ""))

    def _bring_back(self, victims: list[Item], order: list[Item]) -> None:
        """Undo evictions after a failed allocation, the order of use included; content is lost, so marks are too."""
        stream = self._device.current_stream()
        for victim in victims:
            buffer = None
            try:
                buffer = self._device.allocate(victim.num_bytes)
                content = victim.build(buffer)
            except Exception as error:
                if buffer is not None:
                    self._device.free(buffer, stream)
                self.store.tombstones[victim.key] = self.tombstone(f"could not be brought back: {error}")
                self._count_eviction(victim, "out of memory")
            else:
                self.store.place(victim, buffer, content, stream)
        self.store.reorder(order)

    def _compile(self, plan: Plan, *, in_phase: bool) -> None:
        """Once per class of a site, for all ubatches and all sites that use its plans: code is shared, buffers are
        not."""
        key = (plan.site, plan.class_rows)
        if key in self._compiled:
            return
        try:
            with self._device.relaxed():  # another thread may record: in a re-opened phase, or with on_miss="mint"
                num_compiles = sum(
                    self._backend.compile(spec, rows, self._device, least_rows)
                    for spec in plan.specs
                    for rows, least_rows in self._sizing.least_segment_rows(plan.site, plan.class_rows).items()
                )
        except (ConfigError, MintError) as error:
            raise CompileError(error) from error
        except MemoryError as error:
            raise NoRoomError(
                "out of memory",
                f"no memory to compile {plan}: {error}. Take worst_case_bytes() off the KV pool, and leave it what "
                "compiling takes.",
            ) from error
        self._compiled.add(key)
        self._counters.compiles += num_compiles
        if not in_phase:
            self._counters.compiles_after_seal += num_compiles

    def _count_mint(self, plan: Plan) -> None:
        self._counters.mints += 1
        self._announcer.note("mint", plan, num_bytes=plan.num_bytes)

    def _count_eviction(self, item: Item, reason: str) -> None:
        self._counters.evictions += 1
        self._announcer.note("evict", item, reason, num_bytes=item.num_bytes)


def _missing(plan: Plan, arena: Arena) -> list[Item]:
    """Of the two buffers of a call those that are not there."""
    return [item for item in (plan, arena) if not item.is_resident]
