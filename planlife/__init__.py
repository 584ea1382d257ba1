"""The life of a GPU work plan in LLM serving: mint, refresh, pin, evict, replay."""

from .errors import (
    BackendUnavailableError,
    BudgetError,
    BudgetTooSmallError,
    CapacityError,
    ClosedError,
    ConfigError,
    MintError,
    PlanlifeError,
    RouteError,
    SecondStepError,
    StalePlanError,
)
from .ladder import CapacityLadder
from .manager import PlanManager
from .merge import merge
from .plan import OffPlan, StepPlan
from .recorder import Recorder, record
from .report import MemoryReport
from .spec import PlanSpec, Step

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "BudgetError",
    "BudgetTooSmallError",
    "CapacityError",
    "CapacityLadder",
    "ClosedError",
    "ConfigError",
    "MemoryReport",
    "MintError",
    "OffPlan",
    "PlanManager",
    "PlanSpec",
    "PlanlifeError",
    "Recorder",
    "RouteError",
    "SecondStepError",
    "StalePlanError",
    "Step",
    "StepPlan",
    "merge",
    "record",
]
