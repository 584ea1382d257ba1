"""What a demo run may be asked for, and the fixed sizes of its toy model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import ConfigError
from ..spec import check_int

STYLES = ("before-replay", "in-graph")

NUM_Q_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 32
PAGE_SIZE = 16
MAX_CONTEXT_TOKENS = 1024
WINDOW_TOKENS = 128
VERIFY_TOKENS = 4  #: one token to keep and three drafts
DRAFT_PASSES = VERIFY_TOKENS - 1
MAX_ROWS = 16
MAX_PAGES_PER_ROW = MAX_CONTEXT_TOKENS // PAGE_SIZE

#: Rows that plans exist for, and rows that graphs are captured for. Engines capture less than they may
#: schedule: 13 to 16 rows fit no graph here and run eagerly.
LADDER_ROWS = (1, 2, 4, 8, 12, 16)
CAPTURE_ROWS = {"decode": (1, 2, 4, 8, 12), "ubatch": (8,), "verify": (4, 8), "draft": (4, 8)}


@dataclass(frozen=True)
class DemoConfig:
    """One demo run.

    style: "before-replay" (plan_for outside the graph, before each replay) or "in-graph" (plan_for recorded).
    trace_path: a request trace that `planlife.trace.read_trace` reads; None = the packaged sample.
    max_steps: engine steps to serve; a verify step with its draft passes is one.
    seed: of the queries, keys, values and of how many drafts a verify step accepts.
    num_layers: attention layers of the target model, full attention and sliding window by turns.
    budget_bytes: for plans and scratch; None = the worst case.
    memory_bytes: what plans, scratch and the KV pool share.
    device: as torch writes it.

    Raises ConfigError.
    """

    style: str = "before-replay"
    trace_path: str | os.PathLike[str] | None = None
    max_steps: int = 600
    seed: int = 0
    num_layers: int = 2
    budget_bytes: int | None = None
    memory_bytes: int = 8 << 20
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ConfigError(f"style must be one of {', '.join(STYLES)}, got {self.style!r}.")
        if self.trace_path is not None and not isinstance(self.trace_path, (str, os.PathLike)):
            raise ConfigError(f"trace_path must be a path or None, got {self.trace_path!r}.")
        check_int("max_steps", self.max_steps, at_least=1)
        check_int("seed", self.seed, at_least=0, at_most=2**63 - 1)
        check_int("num_layers", self.num_layers, at_least=2, at_most=64)
        if self.budget_bytes is not None:
            check_int("budget_bytes", self.budget_bytes, at_least=1)
        check_int("memory_bytes", self.memory_bytes, at_least=1)
        if type(self.device) is not str:
            raise ConfigError(f"device must be a string such as 'cpu' or 'cuda:0', got {self.device!r}.")
