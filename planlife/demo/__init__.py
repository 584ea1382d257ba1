"""A toy continuous-batching engine that serves a request trace on planlife and compares every output."""

from .config import DemoConfig
from .engine import run_demo
from .result import DemoResult

__all__ = ["DemoConfig", "DemoResult", "run_demo"]
