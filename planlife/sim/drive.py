"""Drives a real PlanManager through a step log under one policy, and adds up what it does."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

from ..backends.base import Backend
from ..device import block_bytes
from ..errors import BudgetError, ConfigError
from ..events import Event, logger
from ..manager import PlanManager
from ..spec import PlanSpec, Step
from ..step_log import StepBlock
from .costs import Costs
from .fakes import Lengths, SimBackend, SimDevice
from .policy import Policy
from .result import ClassLine, PolicyResult, quantiles
from .timeline import Lifetime, MemoryLine

_PlanKey = tuple[str, int, int]  # site, class rows, ubatch


class Outcome(NamedTuple):
    """What one plan_for did beside a refresh."""

    is_miss: bool = False
    is_fallback: bool = False
    num_mints: int = 0
    num_compiles: int = 0
    num_allocations: int = 0
    num_rematerialised: int = 0
    num_evictions: int = 0


_HIT = Outcome()


class PolicyRun:
    """One policy over one log. Feed it the blocks in order, then `finish`.

    sites: a spec for each site of the log. sizes: the backend whose byte formulas count. num_layers: that launch a
    decode each. fold: drive the manager only where something may change, which is proven to give the same figures:

    - A step whose plan and scratch are resident is a hit: it refreshes, and makes them the most recently used. Between
      two other steps, only the order of last use is left of all hits; so each class is driven once, in that order,
      right before the next step that is not a hit. Where nothing can be evicted not even that is needed.
    - A step that leaves everything resident as it was (the fallback for want of room; a plan given back at once) comes
      out the same until something else changes.

    Raises ConfigError, BudgetError.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        sites: Mapping[str, PlanSpec],
        costs: Costs,
        sizes: Backend,
        ubatches: int = 1,
        num_compute_units: int = 256,
        num_layers: int = 32,
        fold: bool = True,
    ) -> None:
        self.policy = policy
        sharing = [site for site, spec in sites.items() if spec.plan_of is not None]
        if sharing:
            raise ConfigError(f"a simulation gives every site plans of its own: drop plan_of of {', '.join(sharing)}.")
        self._sites = dict(sites)
        self._costs = costs
        self._ubatches = ubatches
        self._num_layers = num_layers
        self._fold = fold
        self._device = SimDevice(num_compute_units)
        self._backend = SimBackend(sizes)
        self._manager = PlanManager(
            self._sites,
            ladder=policy.ladder,
            device=self._device,
            backend=self._backend,
            ubatches=ubatches,
            budget_bytes=policy.budget_bytes,
            on_miss="fallback" if policy.warm else "mint",
        )
        worst_case_bytes = self._manager.worst_case_bytes()
        self._may_evict = policy.budget_bytes is not None and policy.budget_bytes < worst_case_bytes
        self._keys = {
            f"{site}/{class_rows}/ub{ubatch}": (site, class_rows, ubatch)
            for site in self._sites
            for class_rows in policy.ladder.classes
            for ubatch in range(ubatches)
        }
        self._resident: set[_PlanKey] = set()
        self._arenas: set[tuple[str, int]] = set()
        self._live: set[_PlanKey] = set()  # resident, and its arena too
        self._recent: dict[_PlanKey, None] = {}  # hits that the manager was not asked for yet, last used last
        self._repeats: dict[_PlanKey, tuple[Outcome, int]] = {}
        self._tables: dict[tuple[str, int], list[_PlanKey | None]] = {}
        self._lengths: dict[int, Lengths] = {}
        self._captured: set[_PlanKey] = set()
        self._graphs: list[Any] = []
        self._step = 0
        self._now_us = 0
        self._owner = 0
        self._num_driven_hits = 0
        self._num_dummies = 0
        self._rows: Counter[int] = Counter()  # rows -> steps
        self._special: Counter[tuple[int, Outcome]] = Counter()  # those that were no hit
        self._folded: Counter[Outcome] = Counter()  # those that the manager was not asked for
        self._seen: Counter[str] = Counter()  # events of the call in progress
        self._line = MemoryLine()
        self._lifetimes: dict[_PlanKey, Lifetime] = {}
        self._num_uncaptured = 0
        self._manager.add_hook(self._heard)
        with _quiet():
            self._start_up()
        self._start = dict(self._manager.report().counters)

    def _start_up(self) -> None:
        """The capture phase of an engine: warm, then capture from large to small."""
        manager, policy = self._manager, self.policy
        with manager.capture_phase():
            if policy.warm:
                manager.warm()
            for class_rows in sorted(policy.captured, reverse=True):
                for site in self._sites:
                    for ubatch in range(self._ubatches):
                        self._capture(site, class_rows, ubatch)
        report = manager.report()
        # The events so far do not tell: a plan that warm() found no room for is minted all the same, without a buffer.
        self._resident.clear()
        self._lifetimes.clear()
        for plan in report.plans:
            if plan.state in ("resident", "pinned"):
                key = (plan.site, plan.class_rows, plan.ubatch)
                self._resident.add(key)
                lifetime = self._lifetime(key)
                lifetime.comes(0)
                if key in self._captured:
                    lifetime.pinned_since_us = 0
        self._arenas = {(arena.lane, arena.ubatch) for arena in report.arenas if arena.state in ("resident", "pinned")}
        self._settle_live()
        self._line.note(0, 0, report.resident_bytes, report.peak_bytes, report.resident_bytes)

    def _capture(self, site: str, class_rows: int, ubatch: int) -> None:
        self._owner += 1
        step = Step(self._lens(class_rows), site=site, ubatch=ubatch, owner=self._owner)
        try:
            self._manager.plan_for(step)  # brings back what an earlier class pushed out, where that can be
        except BudgetError:
            self._num_uncaptured += 1
            return
        with self._manager.graph() as graph:
            self._manager.plan_for(step)
        self._graphs.append(graph)
        self._captured.add((site, class_rows, ubatch))

    def _lens(self, rows: int) -> Lengths:
        lens = self._lengths.get(rows)
        if lens is None:
            lens = self._lengths[rows] = Lengths(rows, 1 << 20)
        return lens

    def _lifetime(self, key: _PlanKey) -> Lifetime:
        lifetime = self._lifetimes.get(key)
        if lifetime is None:
            lifetime = self._lifetimes[key] = Lifetime()
        return lifetime

    def _heard(self, event: Event) -> None:
        """An event of the manager: keep track of what is resident."""
        kind = event.kind
        if kind not in ("mint", "rematerialise", "evict"):
            return
        self._seen[kind] += 1
        key = self._keys.get(event.subject)
        if key is None:  # an arena: scratch/lane/ub0
            _, lane, ubatch = event.subject.split("/")
            arena = (lane, int(ubatch.removeprefix("ub")))
            (self._arenas.discard if kind == "evict" else self._arenas.add)(arena)
            self._settle_live()
            return
        lifetime = self._lifetime(key)
        if kind == "evict":
            self._resident.discard(key)
            self._live.discard(key)
            lifetime.goes(self._now_us)
        else:
            self._resident.add(key)
            lifetime.comes(self._now_us)
            self._live.add(key)
            arena = (self._sites[key[0]].lane, key[2])
            if arena not in self._arenas:  # the first buffer of an arena is no event: it comes with its first plan
                self._arenas.add(arena)
                self._settle_live()

    def _settle_live(self) -> None:
        self._live = {key for key in self._resident if (self._sites[key[0]].lane, key[2]) in self._arenas}

    def feed(self, block: StepBlock) -> None:
        """The next steps of the log. Raises ConfigError for rows, a site or a ubatch that the policy does not have."""
        rows = block.rows
        if not rows:
            return
        if max(rows) > self.policy.ladder.max_rows:
            raise ConfigError(
                f"policy {self.policy.name!r} has no class for {max(rows)} rows: its ladder ends at "
                f"{self.policy.ladder.max_rows}."
            )
        self._rows.update(rows)
        keys: Iterator[_PlanKey | None]
        if block.site is None and block.ubatch is None:
            keys = map(self._table(block.sites[0], 0).__getitem__, rows)
        else:
            nought = [0] * len(rows)
            columns = zip(rows, block.site or nought, block.ubatch or nought, strict=True)
            keys = (self._table(block.sites[site], ubatch)[count] for count, site, ubatch in columns)
        times = _Times(self._now_us, block.dt_us)
        with _quiet():
            previous, start = next(keys), 0
            for index, key in enumerate(keys, 1):
                if key is not previous:
                    self._run(previous, rows, start, index, times)
                    previous, start = key, index
            self._run(previous, rows, start, len(rows), times)
        self._step += len(rows)
        self._now_us = times.end_us

    def _table(self, site: str, ubatch: int) -> list[_PlanKey | None]:
        """rows -> key of the plan, None for no rows; one object per key, so that runs are told by identity."""
        table = self._tables.get((site, ubatch))
        if table is None:
            if site not in self._sites or ubatch >= self._ubatches:
                raise ConfigError(
                    f"the log has site {site!r}, ubatch {ubatch}; the simulation was given {', '.join(self._sites)} "
                    f"and {self._ubatches} ubatches."
                )
            table = [None]
            for class_rows in self.policy.ladder.classes:
                key = (site, class_rows, ubatch)
                table.extend([key] * (class_rows - len(table) + 1))
            self._tables[(site, ubatch)] = table
        return table

    def _run(self, key: _PlanKey | None, rows: list[int], start: int, end: int, times: _Times) -> None:
        """Steps [start, end) of a block: all of one class."""
        if key is None:
            self._num_dummies += end - start
            return
        if not self._fold:
            for index in range(start, end):
                self._drive(key, rows[index], index, times)
            return
        while start < end:
            if key in self._live:
                if self._may_evict:
                    self._recent.pop(key, None)
                    self._recent[key] = None
                return
            repeat = self._repeats.get(key)
            if repeat is not None:
                self._repeat(*repeat, rows[start:end], start, times)
                return
            self._drive(key, rows[start], start, times)
            start += 1

    def _repeat(self, outcome: Outcome, high_bytes: int, rows: list[int], start: int, times: _Times) -> None:
        self._folded[outcome] += len(rows)
        for count, num_steps in Counter(rows).items():
            self._special[(count, outcome)] += num_steps
        if outcome.num_evictions:
            live_bytes = self._device.live_bytes
            bucket = self._line.note(self._step + start, times.at(start), live_bytes, high_bytes, live_bytes)
            bucket.num_evictions += outcome.num_evictions * len(rows)

    def _drive(self, key: _PlanKey, rows: int, index: int, times: _Times) -> None:
        """Ask the manager for one step, after the hits before it whose order may matter."""
        for recent in self._recent:
            self._ask(recent, recent[1])
            self._num_driven_hits += 1
        self._recent.clear()
        device, seen = self._device, self._seen
        is_hit = key in self._resident
        was_empty = not self._resident and not self._arenas
        if key not in self._live:
            self._now_us = times.at(index)
        seen.clear()
        num_compiles, num_allocations = len(self._backend.compiled), device.num_allocations
        before_bytes = device.high_water_bytes = device.low_water_bytes = device.live_bytes
        plan = self._ask(key, rows)
        if self.policy.trim_each_step:
            self._manager.trim(0)
        outcome = Outcome(
            not is_hit,
            plan.route == "fallback",
            seen["mint"],
            len(self._backend.compiled) - num_compiles,
            device.num_allocations - num_allocations,
            seen["rematerialise"],
            seen["evict"],
        )
        self._num_driven_hits += is_hit
        if outcome == _HIT:
            return
        self._special[(rows, outcome)] += 1
        if outcome.num_allocations or outcome.num_evictions:
            bucket = self._line.note(
                self._step + index, self._now_us, device.low_water_bytes, device.high_water_bytes, device.live_bytes
            )
            bucket.num_evictions += outcome.num_evictions
            bucket.num_mints += outcome.num_mints
        leaves_all_as_it_was = was_empty and not self._resident and not self._arenas
        if (outcome.is_fallback and not outcome.num_allocations) or (leaves_all_as_it_was and not outcome.num_mints):
            self._repeats[key] = (outcome, max(before_bytes, device.high_water_bytes))
        elif not leaves_all_as_it_was:
            self._repeats.clear()

    def _ask(self, key: _PlanKey, rows: int) -> Any:
        site, _, ubatch = key
        self._owner += 1  # a new owner for every step: its lengths are new, so its plan is refreshed
        return self._manager.plan_for(Step(self._lens(rows), site=site, ubatch=ubatch, owner=self._owner))

    def finish(self) -> PolicyResult:
        """The figures; closes the manager."""
        policy, costs, ladder = self.policy, self._costs, self.policy.ladder
        with _quiet():
            for recent in self._recent:
                self._ask(recent, recent[1])
                self._num_driven_hits += 1
            self._recent.clear()
        report = self._manager.report()
        driven = {name: value - self._start[name] for name, value in report.counters.items()}
        if driven["hits"] != self._num_driven_hits:
            raise AssertionError("the simulation lost track of what is resident")
        planned = sum(self._rows.values()) - self._num_dummies
        service = dict(driven)
        for outcome, times in self._folded.items():
            service["misses"] += times * outcome.is_miss
            service["rematerialised"] += times * outcome.num_rematerialised
            service["evictions"] += times * outcome.num_evictions
            service["fallbacks"] += times * outcome.is_fallback
            service["refreshes"] += times * (not outcome.is_fallback)
        service["hits"] = planned - service["misses"]
        service["refreshes"] += service["hits"] - driven["hits"] - self._folded_hits()
        captured_classes = {class_rows for _, class_rows, _ in self._captured}
        specials: Counter[int] = Counter()
        added: Counter[float] = Counter()
        replays = padded = 0
        lines = {class_rows: ClassLine(class_rows) for class_rows in ladder.classes}

        def account(rows: int, outcome: Outcome, num_steps: int) -> None:
            nonlocal replays, padded
            class_rows = ladder.class_for(rows)
            is_replay = class_rows in captured_classes and not outcome.is_fallback
            pad = 0 if outcome.is_fallback else class_rows - rows
            replays += num_steps * is_replay
            padded += num_steps * pad
            line = lines[class_rows]
            line.steps += num_steps
            line.rows += num_steps * rows
            line.padded_rows += num_steps * pad
            line.misses += num_steps * outcome.is_miss
            added_us = (
                costs.plan_us
                + (0 if outcome.is_fallback else costs.refresh_us)
                + outcome.num_compiles * costs.compile_us
                + outcome.num_allocations * costs.allocate_us
                + (0 if is_replay else self._num_layers * costs.eager_layer_us)
                + pad * costs.padded_row_us
            )
            added[added_us] += num_steps

        for (rows, outcome), num_steps in self._special.items():
            specials[rows] += num_steps
            account(rows, outcome, num_steps)
        for rows, num_steps in self._rows.items():
            if rows and num_steps > specials[rows]:
                account(rows, _HIT, num_steps - specials[rows])
        p50, p99, most = quantiles(added, (0.5, 0.99, 1.0))
        compiles = service["compiles"]
        result = PolicyResult(
            name=policy.name,
            note=policy.note,
            classes=ladder.classes,
            captured=tuple(sorted(captured_classes)),
            num_uncaptured=self._num_uncaptured,
            budget_bytes=report.budget_bytes,
            worst_case_bytes=report.worst_case_bytes,
            peak_bytes=report.peak_bytes,
            resident_bytes=report.resident_bytes,
            unshared_bytes=self._unshared_bytes(),
            steps=planned,
            dummies=self._num_dummies,
            real_rows=sum(rows * num_steps for rows, num_steps in self._rows.items()),
            padded_rows=padded,
            replays=replays,
            start=dict(self._start),
            service=service,
            start_compile_us=self._start["compiles"] * costs.compile_us,
            stall_us=compiles * costs.compile_us,
            longest_stall_us=max((outcome.num_compiles for _, outcome in self._special), default=0) * costs.compile_us,
            added_p50_us=p50,
            added_p99_us=p99,
            added_max_us=most,
            added_total_us=sum(value * num_steps for value, num_steps in added.items()),
            span_us=self._now_us,
            class_lines=tuple(line for line in lines.values() if line.steps),
            memory=self._line.to_list(),
            lifetimes=self._bars(),
        )
        self._graphs.clear()
        self._manager.close()
        return result

    def _folded_hits(self) -> int:
        """Hits among the steps that repeated: a plan without its arena, for want of room. They refreshed nothing."""
        return sum(times for outcome, times in self._folded.items() if not outcome.is_miss)

    def _unshared_bytes(self) -> int:
        """What the minted plans would take if each kept scratch of its own, as engines' plan caches do."""
        total = 0
        for plan in self._manager.report().plans:
            spec = self._sites[plan.site]
            scratch = self._backend.scratch_bytes(spec, plan.class_rows, self._device.num_compute_units)
            total += plan.num_bytes + block_bytes(scratch)
        return total

    def _bars(self) -> list[dict[str, Any]]:
        bars = []
        for (site, class_rows, ubatch), lifetime in sorted(self._lifetimes.items()):
            lifetime.goes(self._now_us)
            bars.append(
                {
                    "site": site,
                    "class_rows": class_rows,
                    "ubatch": ubatch,
                    "pinned": lifetime.pinned_since_us is not None,
                    "bars_us": lifetime.bars,
                    "joined": lifetime.num_joined,
                }
            )
        return bars


class _Times:
    """When each step of a block started; summed up only where somebody asks."""

    def __init__(self, start_us: int, dt_us: list[int]) -> None:
        self._start_us = start_us
        self._dt_us = dt_us
        self._at_us: list[int] | None = None
        self.end_us = start_us + sum(dt_us)

    def at(self, index: int) -> int:
        if self._at_us is None:
            self._at_us = list(accumulate(self._dt_us, initial=self._start_us))[1:]
        return self._at_us[index]


@contextmanager
def _quiet() -> Iterator[None]:
    """A stall that is only simulated is nothing to warn the operator of."""
    thread = threading.get_ident()

    def is_ours(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_ours)
    try:
        yield
    finally:
        logger.removeFilter(is_ours)
