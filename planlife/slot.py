"""What belongs to one (site, ubatch): its plans, its scratch, and what was last decided for it."""

from __future__ import annotations

from .call_check import CallChecker
from .ladder import CapacityLadder
from .plan import Arena, Plan, StepPlan
from .spec import PlanSpec, Step


class Slot:
    """The plans of one (site, ubatch) by class, and its lane's arena.

    The plans may be another site's (`PlanSpec.plan_of`); `view` says which of their tables' views is this site's.

    It references no StepPlan, which references it: a dropped manager gives its buffers back without a collection, also
    where an engine runs with garbage collection off.
    """

    __slots__ = ("arena", "checker", "ladder", "plans", "refusal", "site", "spec", "token", "ubatch", "view")

    def __init__(
        self,
        token: object,
        site: str,
        ubatch: int,
        spec: PlanSpec,
        ladder: CapacityLadder,
        checker: CallChecker,
        plans: dict[int, Plan],
        view: int,
        arena: Arena,
        refusal: str,
    ) -> None:
        self.token = token  #: the manager's: a plan of another manager is told by it
        self.site = site
        self.ubatch = ubatch
        self.spec = spec
        self.ladder = ladder
        self.checker = checker
        self.plans = plans
        self.view = view
        self.arena = arena
        self.refusal = refusal  #: why the backend can never serve this site, "" if it can


class Answers:
    """The last decisions of one slot."""

    __slots__ = ("last", "last_fallback", "may_ask_again", "num_skipped", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.last: StepPlan | None = None  #: the last planned step, for skipping
        self.last_fallback: StepPlan | None = None  #: the last step that fell back, so that its layers agree
        self.may_ask_again = False  #: it fell back for want of memory, which may have come since
        self.num_skipped = 0  #: plan_for calls answered by `last`

    def set_last_fallback(self, plan: StepPlan | None) -> None:
        """Remember what fell back; the one before lets go of an owner that had to be held strongly."""
        old, self.last_fallback = self.last_fallback, plan
        if old is not None:
            old.mark.retire()

    def known(self, step: Step, rows: int, address: int, version: int | None) -> StepPlan | None:
        """What was answered for exactly this step, if it is still remembered."""
        last = self.last
        if last is not None and (last.tables is None or last.tables.mark is not last.mark):
            last = None  # planned again since, or evicted
        for plan in (self.last_fallback, last):
            if plan is not None and plan.mark.difference(step, rows, address, version) is None:
                return plan
        return None
