"""The error tree. A message says what was asked, what is true, and the way out, with the numbers."""

from __future__ import annotations


class PlanlifeError(Exception):
    """Base of every error that planlife raises on purpose."""


class ConfigError(PlanlifeError, ValueError):
    """A value the caller passed can never work: wrong type, shape, range, name or combination."""


class CapacityError(PlanlifeError, ValueError):
    """The ladder, or `warm`, was asked for more rows than its top class."""


class BudgetError(PlanlifeError, MemoryError):
    """The buffers do not fit: into the byte budget, beside what graphs pin, or into the allocator."""


class BudgetTooSmallError(ConfigError, BudgetError):
    """A byte budget that not even one call fits into, whatever is evicted: known at construction."""


class MintError(PlanlifeError, RuntimeError):
    """A plan would have to be minted or materialised where that is forbidden (while recording, outside a phase)."""


class StalePlanError(PlanlifeError, RuntimeError):
    """The tables do not hold the work of the step at hand."""


class RouteError(PlanlifeError, RuntimeError):
    """Nothing may serve this call here: no fallback, a dummy while recording, a plan of another capture, ..."""


class SecondStepError(StalePlanError, RouteError):
    """A recording reads a plan for a step that its tables no longer hold: one graph cannot read one plan for two."""


class ClosedError(PlanlifeError, RuntimeError):
    """The manager was closed."""


class BackendUnavailableError(PlanlifeError, ImportError):
    """A backend or device was asked for by name and cannot be used here."""


#: Of a value in a message: a block table that is a list would fill a log.
_MOST_LETTERS = 200


def is_tensor(value: object) -> bool:
    """Whether this is a tensor, told without torch. A numpy array or number, which has a device too, is none."""
    return hasattr(value, "device") and hasattr(value, "stride")


def shown(value: object) -> str:
    """A value as a message names it, cut off where it is long; a tensor by its device: printing would read it back."""
    if is_tensor(value):
        return f"a tensor on {value.device}"  # type: ignore[attr-defined]
    text = repr(value)
    text = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."
    return f"{text} ({type(value).__name__})"
