"""Writes down what an engine plans, so that it can be simulated later: one line in the engine, no change elsewhere."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType

from .events import logger
from .manager import PlanManager
from .plan import Mark, OffPlan, StepPlan
from .spec import Step
from .step_log import StepLogWriter


class Recorder:
    """Notes every step that `manager.plan_for` answers outside captures, until close(); then plan_for is as before.

    A step that is planned again, by its next layer or for its replay, is one step, unless the lengths of its layers may
    differ (shared_lengths=False) or planlife is off. A file that cannot be written any
    more ends the recording with a log message and never the step. Threads: any. Owns: the step log.
    """

    def __init__(self, manager: PlanManager, path: str | os.PathLike[str]) -> None:
        self._manager = manager
        self._plan_for = manager.plan_for
        self._hidden = vars(manager).get("plan_for")  # another recorder's, which may still run
        self._lock = threading.Lock()
        self._writer: StepLogWriter | None = StepLogWriter(path)
        self._last_mark: dict[tuple[str, int], Mark | None] = {}
        self._previous_us: int | None = None
        manager.plan_for = self._note_and_plan  # type: ignore[method-assign]

    def _note_and_plan(self, step: Step) -> StepPlan | OffPlan:
        plan = self._plan_for(step)
        if self._writer is not None and not plan.captured:
            self._note(step, plan)
        return plan

    def _note(self, step: Step, plan: StepPlan | OffPlan) -> None:
        key = (plan.site, plan.ubatch)
        with self._lock:
            now_us = time.monotonic_ns() // 1000  # under the lock, or another thread's step may be noted as later
            if self._writer is None or _is_again(step, plan, self._last_mark.get(key)):
                return
            self._last_mark[key] = plan.mark
            rows = 0 if plan.route == "dummy" else plan.rows
            dt_us = 0 if self._previous_us is None else now_us - self._previous_us
            self._previous_us = now_us
            try:
                self._writer.add(dt_us, rows, plan.site, plan.ubatch)
            except OSError as error:
                logger.error("recording ended: the step log cannot be written: %s", error)
                self._writer.abandon()
                self._writer = None

    def close(self) -> None:
        """Write the rest of the log and let go of the manager. Idempotent. Raises OSError."""
        with self._lock:
            writer, self._writer = self._writer, None
        if vars(self._manager).get("plan_for") == self._note_and_plan:
            hidden = self._hidden
            while isinstance(below := getattr(hidden, "__self__", None), Recorder) and below._writer is None:
                hidden = below._hidden
            if hidden is None:
                del self._manager.plan_for
            else:
                self._manager.plan_for = hidden  # type: ignore[method-assign]
        if writer is not None:
            writer.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_again(step: Step, plan: StepPlan | OffPlan, last: Mark | None) -> bool:
    """Whether the step that was noted last, with this mark, is planned once more."""
    mark = plan.mark
    if mark is None or last is None:
        return False
    # A mark is one step's, as long as it lives; the manager holds the last one of each (site, ubatch) too. Dummies and
    # steps that fell back for want of room may get a new one each time they are asked for.
    return mark is last or (
        plan.route != "planned" and last.difference(step, mark.rows, mark.address, mark.version) is None
    )


def record(manager: PlanManager, path: str | os.PathLike[str] = "steps.jsonl.gz") -> Recorder:
    """Write a step log of everything `manager` plans from now on: `planlife simulate --trace` reads it.

    path: where to; gzip if it ends in .gz. Returns what close() ends; also a context manager.
    Costs a few microseconds per step while it records, and nothing otherwise.

    Raises OSError, ConfigError. Capture: yes; what is planned while recording a graph is not noted. Syncs: no.
    Allocates: host memory only.
    """
    return Recorder(manager, path)
