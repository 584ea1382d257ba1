"""Requests into batches: what arrives when, who runs, which pages they own, and what each step is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .. import trace
from .config import HEAD_DIM, MAX_OUTPUT_TOKENS, MAX_ROWS, NUM_KV_HEADS, NUM_Q_HEADS, PAGE_SIZE, DemoConfig
from .kv_pool import KVPool, KVTokens
from .model import Batch

_BUSY_ROWS = 6
_IDLE_STEPS = 2  #: of an idle gap that are served as dummies; the rest is skipped


@dataclass(frozen=True)
class Arrival:
    """One request as the toy model can take it."""

    step: float
    prompt_tokens: int
    output_tokens: int


def arrivals_from_trace(requests: Sequence[trace.Request], config: DemoConfig) -> tuple[list[Arrival], int]:
    """The arrivals of about `config.max_steps` steps, and how many of them had to be made smaller.

    Prompts beyond `config.max_prompt_tokens` are folded (modulo, so that lengths stay uneven), outputs are cut at
    MAX_OUTPUT_TOKENS. The clock is scaled so that _BUSY_ROWS rows are busy on average; bursts stay bursts.
    """
    outputs = [min(max(request.output_tokens, 1), MAX_OUTPUT_TOKENS) for request in requests]
    tokens_per_step = 1 + config.mtp / 8  # every fourth step verifies, half of its drafts hold
    per_step = _BUSY_ROWS * tokens_per_step * len(outputs) / sum(outputs)
    count = min(len(requests), MAX_ROWS + int(config.max_steps * per_step))
    span_seconds = requests[count - 1].arrival_seconds
    steps_per_second = count / per_step / span_seconds if span_seconds else 0.0
    arrivals = []
    num_clipped = 0
    for request, output in zip(requests[:count], outputs, strict=False):
        prompt = max(request.input_tokens, 1)
        folded = (prompt - 1) % config.max_prompt_tokens + 1
        num_clipped += prompt != folded or request.output_tokens > output
        arrivals.append(Arrival(request.arrival_seconds * steps_per_second, folded, output))
    return arrivals, num_clipped


@dataclass
class Running:
    """A request that holds a row and pages. num_tokens, draft_tokens: in the target's and draft's cache."""

    cache_row: int
    num_tokens: int
    tokens_left: int
    committed_pages: int
    draft_tokens: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StepShape:
    """How a step runs: its kind, and whether it may take a graph."""

    kind: str  # "decode" | "ubatch" | "verify" | "dummy"
    may_replay: bool


class Scheduler:
    """Requests join and leave between steps. One is admitted when all the pages it can ever need fit."""

    def __init__(self, arrivals: Sequence[Arrival], pool: KVPool, config: DemoConfig) -> None:
        self._waiting = deque(arrivals)
        self._pool = pool
        self._lookahead_tokens = config.lookahead_tokens
        self._clock = 0.0
        self._idle_steps = 0
        self._free_rows = deque(range(MAX_ROWS))
        self._choices = random.Random(config.seed)
        self.running: list[Running] = []
        self.num_finished = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.running)

    def advance(self) -> list[Running]:
        """Move the clock by a step and admit what has arrived and fits. Returns the newly admitted."""
        self._clock += 1
        if not self.running and self._idle_steps == _IDLE_STEPS and self._waiting:
            self._clock = max(self._clock, self._waiting[0].step)
        admitted = []
        while self._waiting and self._waiting[0].step <= self._clock and self._free_rows:
            arrival = self._waiting[0]
            most_tokens = arrival.prompt_tokens + arrival.output_tokens + self._lookahead_tokens
            num_pages = -(-most_tokens // PAGE_SIZE)
            committed = sum(request.committed_pages for request in self.running)
            if committed + num_pages > self._pool.num_usable_pages:
                break
            self._waiting.popleft()
            request = Running(self._free_rows.popleft(), arrival.prompt_tokens, arrival.output_tokens, num_pages)
            self.running.append(request)
            admitted.append(request)
        self._idle_steps = 0 if self.running else self._idle_steps + 1
        return admitted

    def shape(self, step: int) -> StepShape:
        """What step number `step` is. By its number alone, so that a short run meets every kind."""
        if not self.running or step % 15 == 9:
            return StepShape("dummy", may_replay=step % 2 == 0)
        kind = ("decode", "verify", "ubatch", "decode")[step % 4]
        if kind == "ubatch" and len(self.running) < 2:
            kind = "decode"
        return StepShape(kind, may_replay=step % 5 != 3)

    def grow(self, request: Running, num_tokens: int) -> None:
        """Give `request` the pages that `num_tokens` tokens need."""
        missing = -(-num_tokens // PAGE_SIZE) - len(request.pages)
        if missing > 0:
            request.pages += self._pool.allocate(missing)

    def accept(self, num_offered: int) -> int:
        """Each running request keeps 1..num_offered of the tokens it just computed, each another number, so that
        lengths grow unevenly. Returns their sum."""
        num_accepted = 0
        for request in self.running:
            accepted = self._choices.randint(1, num_offered)
            request.num_tokens += accepted
            request.tokens_left -= accepted
            num_accepted += accepted
        return num_accepted

    def retire(self) -> None:
        """Let go of the requests that have all their tokens, with their pages and rows."""
        for request in self.running:
            if request.tokens_left <= 0:
                self._pool.release(request.pages)
                self._free_rows.append(request.cache_row)
                self.num_finished += 1
        self.running = [request for request in self.running if request.tokens_left > 0]


class TokenSource:
    """Seeded random queries, keys and values on the device, as the model's and the cache's dtypes hold them."""

    def __init__(self, config: DemoConfig) -> None:
        self._config = config
        self._generator = torch.Generator(config.device).manual_seed(config.seed)

    def draw(self, layers: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, KVTokens]:
        """query q_dtype[calls, tokens, q_heads, D], and keys and values, for a call of each of `layers`.

        A token's key leans towards its own query: the newest token weighs as in a real model, and a length
        off by one shows.
        """
        query = self._normal(len(layers), num_tokens, NUM_Q_HEADS)
        group_mean = query.view(len(layers), num_tokens, NUM_KV_HEADS, -1, HEAD_DIM).mean(3)
        key = self._normal(len(layers), num_tokens, NUM_KV_HEADS) + group_mean
        value = self._normal(len(layers), num_tokens, NUM_KV_HEADS)
        return query.to(getattr(torch, self._config.q_dtype)), KVTokens.store(key, value, layers, self._config)

    def _normal(self, num_calls: int, num_tokens: int, num_heads: int) -> torch.Tensor:
        shape = (num_calls, num_tokens, num_heads, HEAD_DIM)
        return torch.randn(shape, generator=self._generator, device=self._config.device)

    def batch(self, requests: Sequence[Running], *, query_length: int) -> Batch:
        """The next `query_length` tokens of each request, for each layer of the target."""
        context_lens = tuple(request.num_tokens + query_length for request in requests)
        ends = torch.tensor(context_lens)
        positions = (ends[:, None] + torch.arange(-query_length, 0)).flatten()
        layers = range(self._config.num_layers)
        return self._batch(requests, context_lens, positions.expand(len(layers), -1), layers)

    def draft_batch(self, requests: Sequence[Running]) -> Batch:
        """One token per request and draft pass; the lengths are those of the first pass."""
        context_lens = tuple(request.num_tokens + 1 for request in requests)
        passes = self._config.mtp
        positions = torch.tensor(context_lens) - 1 + torch.arange(passes)[:, None]
        return self._batch(requests, context_lens, positions, [self._config.num_layers] * passes)

    def _batch(
        self, requests: Sequence[Running], context_lens: tuple[int, ...], positions: torch.Tensor, layers: Sequence[int]
    ) -> Batch:
        query, new = self.draw(layers, positions.shape[1])
        return Batch(
            context_lens=context_lens,
            pages=tuple(tuple(request.pages) for request in requests),
            cache_rows=tuple(request.cache_row for request in requests),
            positions=positions,
            query=query,
            new=new,
        )
