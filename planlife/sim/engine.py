"""A continuous-batching engine, as far as row counts and times go: requests in, steps out."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from heapq import heappop, heappush
from typing import Any

from ..errors import ConfigError
from ..spec import check_int
from ..step_log import MAX_BLOCK_STEPS, StepBlock
from ..trace import Request


@dataclass(frozen=True)
class StepTimes:
    """How long a step takes: a line in what it computes. Microseconds.

    step_us: reading the weights and everything else that every step does. row_us: per decode row.
    context_token_us: per token of KV that the decode rows read. prefill_token_us: per prompt token.

    The defaults are arithmetic, not a measurement: an 8B model in BF16 (16 GB of weights, 128 KiB of KV per token) at
    4.3 TB/s and 600 TFLOP/s, which is about an H200. Give those of your engine.
    """

    step_us: float = 3_800
    row_us: float = 5
    context_token_us: float = 0.03
    prefill_token_us: float = 27

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not 0 <= value < 1e9:
                raise ConfigError(f"{field.name} must be a number of microseconds in [0, 1e9), got {value!r}.")
        if not self.step_us >= 1:
            raise ConfigError(
                f"step_us must be >= 1, got {self.step_us!r}: a step takes time, or no request ever ends."
            )


@dataclass(frozen=True)
class Engine:
    """An engine's limits.

    max_rows: most sequences that decode or prefill together. kv_tokens: tokens that the KV pool holds, None = any; a
    request is admitted when all its tokens fit, and keeps them to its end. max_context_tokens: of one request, prompt
    and output; None = any. prefill_tokens: most prompt tokens that one
    step computes beside its decode rows; longer prompts are chunked. draft_tokens, acceptance: speculative tokens per
    verify step, and how probable it is that one holds if those before it did. speedup: arrivals come this much faster
    than in the trace. seed: of the acceptance.

    Raises ConfigError.
    """

    max_rows: int = 256
    kv_tokens: int | None = None
    max_context_tokens: int | None = None
    prefill_tokens: int = 2048
    draft_tokens: int = 0
    acceptance: float = 0.7
    speedup: float = 1.0
    seed: int = 0
    times: StepTimes = StepTimes()

    def __post_init__(self) -> None:
        check_int("max_rows", self.max_rows, at_least=1, at_most=1 << 20)
        for name in ("kv_tokens", "max_context_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        check_int("prefill_tokens", self.prefill_tokens, at_least=1)
        check_int("draft_tokens", self.draft_tokens, at_least=0, at_most=64)
        check_int("seed", self.seed, at_least=0)
        for name, least, most in (("acceptance", 0.0, 1.0), ("speedup", 1e-6, 1e6)):
            value = getattr(self, name)
            if type(value) not in (int, float) or not least <= value <= most:
                raise ConfigError(f"{name} must be a number in [{least:g}, {most:g}], got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass
class EngineRun:
    """What became of the requests. busy_us: time inside steps; span_us: from the first arrival to the last token."""

    num_requests: int = 0
    num_too_long: int = 0
    num_steps: int = 0
    num_prefill_only_steps: int = 0
    peak_rows: int = 0
    peak_kv_tokens: int = 0
    busy_us: float = 0.0
    span_us: float = 0.0
    waited_us: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass(slots=True)
class _Prompt:
    """A request that was admitted and computes its prompt."""

    tokens_left: int
    input_tokens: int
    output_tokens: int


def run_engine(requests: Iterable[Request], engine: Engine, run: EngineRun | None = None) -> Iterator[StepBlock]:
    """The decode steps of an engine that serves `requests`, in blocks; memory grows with what runs at once only.

    run: is filled meanwhile. A request that is longer than the KV pool or the longest context is left out and counted.
    A step without decode rows plans nothing and is not among the steps; its time is. Whatever policy plans the steps,
    they are the same: what a policy adds to their time is told apart and does not move arrivals against steps.
    """
    run = EngineRun() if run is None else run
    times, chance = engine.times, random.Random(engine.seed)
    pool_tokens = engine.kv_tokens or math.inf
    longest_tokens = min(pool_tokens, engine.max_context_tokens or math.inf)
    arrivals = iter(requests)
    next_request = next(arrivals, None)
    waiting: deque[tuple[float, Request]] = deque()
    prompts: deque[_Prompt] = deque()
    ends: list[tuple[int, int, float]] = []  # decode step after which a request is done, its KV tokens, tokens a step
    clock_us = previous_us = 0.0
    num_rows = kv_tokens = num_decoded = 0
    context_tokens = tokens_per_step = 0.0
    dt_us: list[int] = []
    rows: list[int] = []
    while True:
        while (
            next_request is not None and (arrived_us := next_request.arrival_seconds * 1e6 / engine.speedup) <= clock_us
        ):
            waiting.append((arrived_us, next_request))
            run.num_requests += 1
            next_request = next(arrivals, None)
        while waiting and num_rows + len(prompts) < engine.max_rows:
            arrived_us, request = waiting[0]
            need_tokens = request.input_tokens + request.output_tokens
            if need_tokens > longest_tokens:
                run.num_too_long += 1
            elif kv_tokens + need_tokens > pool_tokens:
                break
            else:
                kv_tokens += need_tokens
                run.waited_us += clock_us - arrived_us
                prompts.append(_Prompt(request.input_tokens, request.input_tokens, request.output_tokens))
            waiting.popleft()
        run.peak_kv_tokens = max(run.peak_kv_tokens, kv_tokens)
        if not (num_rows or prompts):
            if next_request is None:
                break
            clock_us = next_request.arrival_seconds * 1e6 / engine.speedup
            continue
        budget = engine.prefill_tokens
        prefilled: list[_Prompt] = []
        while prompts and budget > 0:
            chunk = min(prompts[0].tokens_left, budget)
            prompts[0].tokens_left -= chunk
            budget -= chunk
            if prompts[0].tokens_left:
                break
            prefilled.append(prompts.popleft())
        step_us = (
            times.step_us
            + times.row_us * num_rows
            + times.context_token_us * context_tokens
            + times.prefill_token_us * (engine.prefill_tokens - budget)
        )
        if num_rows:
            start_us = int(clock_us)
            dt_us.append(start_us - int(previous_us) if run.num_steps else 0)
            rows.append(num_rows)
            previous_us = start_us
            run.num_steps += 1
            num_decoded += 1
            context_tokens += tokens_per_step
            run.peak_rows = max(run.peak_rows, num_rows)
            if len(rows) >= MAX_BLOCK_STEPS:
                yield StepBlock(dt_us, rows)
                dt_us, rows = [], []
        else:
            run.num_prefill_only_steps += 1
        clock_us += step_us
        run.busy_us += step_us
        run.span_us = clock_us
        while ends and ends[0][0] <= num_decoded:
            _, held_tokens, rate = heappop(ends)
            num_rows -= 1
            kv_tokens -= held_tokens
            context_tokens -= held_tokens
            tokens_per_step -= rate
        for prompt in prefilled:
            held_tokens = prompt.input_tokens + prompt.output_tokens
            num_verify = _num_steps(prompt.output_tokens - 1, engine, chance)  # the prompt's step gives the first token
            if num_verify <= 0:
                kv_tokens -= held_tokens
                continue
            # Drafts that hold come unevenly; their mean is what the step times need.
            rate = prompt.output_tokens / num_verify
            heappush(ends, (num_decoded + num_verify, held_tokens, rate))
            num_rows += 1
            context_tokens += prompt.input_tokens
            tokens_per_step += rate
        if not num_rows:
            context_tokens = tokens_per_step = 0.0  # sums of fractions drift
    if rows:
        yield StepBlock(dt_us, rows)


def _num_steps(num_tokens: int, engine: Engine, chance: random.Random) -> int:
    """Decode or verify steps for so many tokens: each gives one, and as many drafts as hold in a row."""
    if not engine.draft_tokens:
        return num_tokens
    num_steps, draw, acceptance = 0, chance.random, engine.acceptance
    while num_tokens > 0:
        num_steps += 1
        num_tokens -= 1
        for _ in range(engine.draft_tokens):
            if draw() >= acceptance:
                break
            num_tokens -= 1
    return num_steps
