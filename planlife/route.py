"""Which route a step takes, and why: one pure answer for whoever needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from .backends.base import Backend
from .errors import BudgetError, MintError, PlanlifeError, RouteError
from .item import State
from .plan import Plan
from .residency import Residency
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

    route: "planned", "fallback" or "dummy"; or "refused", where plan_for raises `error`.
    plan: of the class that serves the step, of the top one where it is decoded in parts. why: off the planned route.
    """

    route: str
    why: Why | None = None
    plan: Plan | None = None
    error: PlanlifeError | None = None

    @property
    def reason(self) -> str:
        """Why it is not planned, "" if it is."""
        return str(self.error) if self.error is not None else self.why.text if self.why is not None else ""

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
                RouteError(
                    f"a dummy step of site {slot.site!r} was planned while recording: a graph would freeze its "
                    "zeros. Capture with real rows (length 0 is fine) and replay with the dummy step."
                )
            )
        return Decision("dummy", Why("dummy", "dummy step" if dummy else "no rows"))
    why = _why_never(rules, slot, rows, context_lens)
    plan: Plan | None = None
    if why is None:
        plan = slot.plans[slot.ladder.class_for(min(rows, slot.ladder.max_rows))]
        if plan.is_resident and slot.arena.is_resident:
            return Decision("planned", plan=plan)
        why, error = _why_not_now(rules, slot, plan, recording=recording, in_phase=in_phase)
        if error is not None:
            return _refused(error)
    if why is None:
        return Decision("planned", plan=plan)
    if recording and not rules.has_fallback:
        return _refused(
            MintError(
                f"site {slot.site!r} was planned for {rows} rows while this stream records, and no plan can be had "
                f"there: {why.text}. Warm the class in capture_phase() before recording, or configure fallback=."
            )
        )
    return Decision("fallback", why)


def _refused(error: PlanlifeError) -> Decision:
    return Decision("refused", error=error)


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


def _why_not_now(
    rules: Rules, slot: Slot, plan: Plan, *, recording: bool, in_phase: bool
) -> tuple[Why | None, PlanlifeError | None]:
    """What keeps a plan that is not resident from being brought, and what is raised where nobody may fall back."""
    residency = rules.residency
    if refusal := rules.refusal_of(plan):
        return Why("refused class", refusal), None
    if recording:
        text = residency.why_not_resident(plan, slot.arena)
        return Why("not resident while recording", text), None if rules.has_fallback else MintError(text)
    if plan.state is State.ABSENT and not in_phase and rules.on_miss != "mint":
        text = f"class {plan.class_rows} of site {slot.site!r} (ubatch {slot.ubatch}) was never minted"
        if rules.on_miss == "raise":
            return None, RouteError(f"{text}. Warm it inside capture_phase(), or choose another on_miss.")
        return Why("never minted", f"{text}; warm it inside capture_phase()"), None
    if no_room := residency.why_no_room(plan, slot.arena):
        return no_room_answer(no_room, rules.on_miss, in_phase=in_phase)
    return None, None


def no_room_answer(error: BudgetError, on_miss: str, *, in_phase: bool) -> tuple[Why | None, PlanlifeError | None]:
    """The fallback takes a step for which there is no room while serving, and with on_miss="raise" nobody does."""
    if in_phase or on_miss == "raise":
        return None, error
    code = getattr(error, "code", "no room in the budget")
    return Why(code, f"{code}: {error}", may_pass=True), None
