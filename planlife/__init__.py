"""The life of a GPU work plan in LLM serving: mint, refresh, pin, evict, replay."""

from .errors import (
    BackendUnavailableError,
    BudgetError,
    CapacityError,
    ClosedError,
    ConfigError,
    MintError,
    PlanlifeError,
    RouteError,
    StalePlanError,
)
from .ladder import CapacityLadder
from .manager import PlanManager
from .plan import StepPlan
from .report import MemoryReport
from .spec import PlanSpec, Step

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "BudgetError",
    "CapacityError",
    "CapacityLadder",
    "ClosedError",
    "ConfigError",
    "MemoryReport",
    "MintError",
    "PlanManager",
    "PlanSpec",
    "PlanlifeError",
    "RouteError",
    "StalePlanError",
    "Step",
    "StepPlan",
]
