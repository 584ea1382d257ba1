"""What a demo run may be asked for, and the fixed sizes of its toy model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import ConfigError
from ..spec import FP8_DTYPES, INT64_MAX, KV_LAYOUTS, SCALE_KINDS, check_int

STYLES = ("before-replay", "in-graph")
BACKENDS = ("auto", "torch", "triton", "aiter")
#: What the double of aiter may be for: GPUs, and texts of the library.
DOUBLES = ("gfx942", "gfx950", "gfx1250")
AITER_GENERATIONS = ("G2", "G3", "G4", "newer")
#: KV caches by the name that they go by: the dtype of the cache, and of the queries over it.
KV_DTYPES = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp16": ("float16", "float16"),
    "fp8": ("float8_e4m3fn", "bfloat16"),
    "fp8_fnuz": ("float8_e4m3fnuz", "bfloat16"),
}
FP8_SCALES = tuple(kind for kind in SCALE_KINDS if kind != "none")

NUM_Q_HEADS = 4
NUM_KV_HEADS = 2
#: The smallest that every backend takes.
HEAD_DIM = 64
PAGE_SIZE = 16
MAX_OUTPUT_TOKENS = 64
#: What the packaged trace is made for. A wide window gets longer contexts, or it would cut nothing.
SAMPLE_CONTEXT_TOKENS = 1024
_MAX_DRAFTS = 7
_MAX_WINDOW_TOKENS = 8192
MAX_ROWS = 16

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
    kv: "bf16", "fp16", "fp8" (e4m3fn, with scales) or "fp8_fnuz" (e4m3fnuz, which is the FP8 of gfx942).
    scales: of an FP8 cache, "per_tensor" or "per_token"; None = per_tensor for FP8, and what other caches have.
    layout: "nhd", "hnd" or "packed".
    mtp: draft tokens that a verify step looks at, so its query length is one more.
    window: tokens that the layers with a sliding window see.
    budget_bytes: for plans and scratch; None = the worst case.
    memory_bytes: what plans, scratch and the KV pool share.
    backend: "auto", "torch", "triton" or "aiter"; auto is torch on a CPU, and on a GPU aiter or triton where one can
        serve the demo.
    double: a GPU of DOUBLES that `device` is taken for, with the strict double of aiter: torch ops behind the
        library's checks, for machines without such a GPU. None = what is installed.
    aiter_generation: of AITER_GENERATIONS, the text of aiter that the double has; None = G3.
    device: as torch writes it. On a CPU graphs are emulated.

    Raises ConfigError.
    """

    style: str = "before-replay"
    trace_path: str | os.PathLike[str] | None = None
    max_steps: int = 600
    seed: int = 0
    num_layers: int = 2
    kv: str = "bf16"
    scales: str | None = None
    layout: str = "nhd"
    mtp: int = 3
    window: int = 128
    budget_bytes: int | None = None
    memory_bytes: int = 16 << 20
    backend: str = "auto"
    double: str | None = None
    aiter_generation: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        choices = {"style": STYLES, "kv": tuple(KV_DTYPES), "layout": KV_LAYOUTS, "backend": BACKENDS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        for name, known in (("double", DOUBLES), ("aiter_generation", AITER_GENERATIONS), ("scales", FP8_SCALES)):
            if getattr(self, name) is not None and getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, or None, got {getattr(self, name)!r}.")
        if self.double is not None and self.backend != "aiter":
            raise ConfigError(
                f"double={self.double!r} does not go with backend={self.backend!r}: the double is of aiter. "
                "Pass backend='aiter', or leave double out."
            )
        if self.aiter_generation is not None and self.double is None:
            raise ConfigError(
                f"aiter_generation={self.aiter_generation!r} does not go without a double: what is installed has the "
                f"generation that it has. Pass double='gfx942', or leave aiter_generation out."
            )
        if self.scales is not None and not self.is_fp8:
            raise ConfigError(
                f"scales={self.scales!r} does not go with kv={self.kv!r}: only FP8 caches have scales. "
                f"Leave scales out, or pass kv='fp8'."
            )
        if self.trace_path is not None and not isinstance(self.trace_path, (str, os.PathLike)):
            raise ConfigError(f"trace_path must be a path or None, got {self.trace_path!r}.")
        check_int("max_steps", self.max_steps, at_least=1)
        check_int("seed", self.seed, at_least=0, at_most=2**63 - 1)
        check_int("num_layers", self.num_layers, at_least=2, at_most=64)
        check_int("mtp", self.mtp, at_least=1, at_most=_MAX_DRAFTS)
        check_int("window", self.window, at_least=1, at_most=_MAX_WINDOW_TOKENS)
        if self.budget_bytes is not None:
            check_int("budget_bytes", self.budget_bytes, at_least=1, at_most=INT64_MAX)
        check_int("memory_bytes", self.memory_bytes, at_least=1, at_most=INT64_MAX)
        if type(self.device) is not str:
            raise ConfigError(f"device must be a string such as 'cpu' or 'cuda:0', got {self.device!r}.")

    @property
    def kv_dtype(self) -> str:
        return KV_DTYPES[self.kv][0]

    @property
    def q_dtype(self) -> str:
        return KV_DTYPES[self.kv][1]

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype in FP8_DTYPES

    @property
    def double_generation(self) -> str:
        """The text of aiter that a double has."""
        return self.aiter_generation or "G3"

    @property
    def kv_scales(self) -> str:
        """What PlanSpec calls scales: "none" for caches that have none."""
        return "none" if not self.is_fp8 else self.scales or FP8_SCALES[0]

    @property
    def verify_tokens(self) -> int:
        """Query tokens of a verify step: one to keep, and the drafts."""
        return self.mtp + 1

    @property
    def max_context_tokens(self) -> int:
        return max(SAMPLE_CONTEXT_TOKENS, -(-2 * self.window // PAGE_SIZE) * PAGE_SIZE)

    @property
    def max_pages_per_row(self) -> int:
        return self.max_context_tokens // PAGE_SIZE

    @property
    def lookahead_tokens(self) -> int:
        """A verify step may accept more than was asked for, and drafts run ahead of what is accepted."""
        return self.verify_tokens + self.mtp

    @property
    def max_prompt_tokens(self) -> int:
        return self.max_context_tokens - MAX_OUTPUT_TOKENS - self.lookahead_tokens
