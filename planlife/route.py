"""Which route a step takes, and why: one pure answer for whoever needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from .backends.base import Backend
from .errors import MintError, PlanlifeError, RouteError
from .item import State
from .plan import Plan
from .residency import NoRoomError, Residency
from .slot import Slot


class Why(NamedTuple):
    """Why a step is not planned. code: without the numbers of the case, so that each kind is logged once."""

    code: str
    text: str
    may_pass: bool = False  #: memory may be there at the next call: the same step may ask again
    is_final: bool = False  #: no plan is looked up: it holds whatever is minted


class Rules(NamedTuple):
    """What a manager decides by.

    refused_classes: by (site, class rows), why the backend could not compile that class.
    """

    backend: Backend
    has_fallback: bool
    on_miss: str
    residency: Residency
    refused_classes: Mapping[tuple[str, int], str]

    def refusal_of(self, plan: Plan) -> str:
        """Why the backend could not compile a plan's class, "" if it could, or was not asked."""
        return self.refused_classes.get((plan.site, plan.class_rows), "")


class Decision(NamedTuple):
    """The answer for one step.

    route: "planned", "fallback" or "dummy"; or "refused", where plan_for raises what `error` makes: an exception that
    a frame holds would keep the callers' frames alive until a garbage collection.
    plan: of the class that serves the step, of the top one where it is decoded in parts. why: off the planned route.
    """

    route: str
    why: Why | None = None
    plan: Plan | None = None
    error: Callable[[], PlanlifeError] | None = None

    @property
    def reason(self) -> str:
        """Why it is not planned, "" if it is."""
        return str(self.error()) if self.error is not None else self.why.text if self.why is not None else ""

    def __str__(self) -> str:
        return f"{self.route} ({self.reason})" if self.reason else self.route


def route_of_site(refusals: Collection[str], *, has_fallback: bool) -> str:
    """Whose a site's steps are: "planned", by the backend; "fallback", where that refuses the site; else "refused"."""
    return "planned" if not refusals else "fallback" if has_fallback else "refused"


def decide(
    rules: Rules, slot: Slot, rows: int, context_lens: Any, *, dummy: bool, recording: bool, in_phase: bool
) -> Decision:
    """Route, class and reason of a step of `rows` rows, from the state that the manager is in now.

    recording: whether plan_for is asked, or was, by a stream that records. in_phase: inside a capture phase.
    What only trying can tell is not foreseen: a compile that is refused, an allocator without memory.

    Changes nothing. The caller holds the manager's lock.
    """
    if dummy or rows == 0:
        if recording:
            return _refused(
                RouteError,
                f"a dummy step of site {slot.site!r} was planned while recording: a graph would freeze its "
                "zeros. Capture with real rows (length 0 is fine) and replay with the dummy step.",
            )
        return Decision("dummy", Why("dummy", "dummy step" if dummy else "no rows"))
    why = _why_never(rules, slot, rows, context_lens)
    plan: Plan | None = None
    if why is None:
        plan = slot.plans[slot.ladder.class_for(min(rows, slot.ladder.max_rows))]
        if plan.is_resident and slot.arena.is_resident:
            return Decision("planned", plan=plan)
        now = _decide_now(rules, slot, plan, recording=recording, in_phase=in_phase)
        if now.route != "fallback":
            return now
        why = now.why
    assert why is not None
    if recording and not rules.has_fallback:
        return _refused(
            MintError,
            f"site {slot.site!r} was planned for {rows} rows while this stream records, and no plan can be had "
            f"there: {why.text}. Warm the class in capture_phase() before recording, or configure fallback=.",
        )
    return Decision("fallback", why)


def _refused(kind: type[PlanlifeError], *arguments: str) -> Decision:
    return Decision("refused", error=partial(kind, *arguments))


def _why_never(rules: Rules, slot: Slot, rows: int, context_lens: Any) -> Why | None:
    """What rules out a plan for this step, whatever is minted."""
    if slot.refusal:
        return Why("refused", slot.refusal, is_final=True)
    reasons = rules.backend.refuse_step(slot.spec, context_lens)
    if reasons:
        text = f"backend {rules.backend.name} cannot take this step: " + "; ".join(reasons)
        return Why("refused step", text, is_final=True)
    if rows > slot.ladder.max_rows and rules.has_fallback:
        return Why("beyond ladder", f"more rows than the ladder's top class {slot.ladder.max_rows}", is_final=True)
    return None


def _decide_now(rules: Rules, slot: Slot, plan: Plan, *, recording: bool, in_phase: bool) -> Decision:
    """Of a step that a plan could serve, which is not resident: whether it can be brought."""
    residency = rules.residency
    if refusal := rules.refusal_of(plan):
        return Decision("fallback", Why("refused class", refusal))
    if recording:
        text = residency.why_not_resident(plan, slot.arena)
        if not rules.has_fallback:
            return _refused(MintError, text)
        return Decision("fallback", Why("not resident while recording", text))
    if plan.state is State.ABSENT and not in_phase and rules.on_miss != "mint":
        text = f"class {plan.class_rows} of site {slot.site!r} (ubatch {slot.ubatch}) was never minted"
        if rules.on_miss == "raise":
            return _refused(RouteError, f"{text}. Warm it inside capture_phase(), or choose another on_miss.")
        return Decision("fallback", Why("never minted", f"{text}; warm it inside capture_phase()"))
    if no_room := residency.why_no_room(plan, slot.arena):
        why = why_without_room(*no_room, rules.on_miss, in_phase=in_phase)
        return _refused(NoRoomError, *no_room) if why is None else Decision("fallback", why)
    return Decision("planned", plan=plan)


def why_without_room(code: str, text: str, on_miss: str, *, in_phase: bool) -> Why | None:
    """Why the fallback takes a step for which there is no room; None in a capture phase, and with on_miss="raise",
    where nobody does."""
    return None if in_phase or on_miss == "raise" else Why(code, f"{code}: {text}", may_pass=True)
