"""The core of the CPU's scenarios, styles, guards, marks and evictions, on CUDA graphs with the torch backend."""

from __future__ import annotations

from ..lifecycle.test_capture_styles import *  # noqa: F403
from ..lifecycle.test_guard import *  # noqa: F403
from ..lifecycle.test_memory_and_values import *  # noqa: F403
from ..lifecycle.test_refresh_and_marks import *  # noqa: F403
from ..lifecycle.test_refresh_and_marks import gc_off  # noqa: F401
from .test_lifecycle_on_cuda import NOT_HERE  # noqa: F401

BACKEND = "torch"
