"""How many classes are worth it: fitted ladders, what they pad, and what they take."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ..backends.base import Backend
from ..errors import BudgetTooSmallError
from ..ladder import CapacityLadder
from ..manager import PlanManager
from ..spec import PlanSpec
from .compare import num_cores
from .policy import fit_to, fitted_name

#: Below this many counts over all fits, a second process costs more than it saves.
_MIN_COUNTS_FOR_PROCESSES = 400_000


@dataclass(frozen=True)
class Choice:
    """One ladder over one log: rows summed over its steps, and what all its plans and their scratch take."""

    name: str
    classes: tuple[int, ...]
    padded_rows: int
    real_rows: int
    worst_case_bytes: int

    @property
    def padding_share(self) -> float:
        """Padded rows by real rows."""
        return self.padded_rows / self.real_rows if self.real_rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, and the share."""
        return {**asdict(self), "padding_share": self.padding_share}


class Fitter:
    """Ladders for one log. histogram: rows -> steps. sites: the specs whose bytes count."""

    def __init__(
        self,
        histogram: Mapping[int, int],
        max_rows: int,
        sites: Mapping[str, PlanSpec],
        *,
        ubatches: int = 1,
        backend: str | Backend = "torch",
        num_compute_units: int = 256,
    ) -> None:
        self._histogram = {rows: steps for rows, steps in histogram.items() if rows}
        self._max_rows = max_rows
        self._sites = dict(sites)
        self._ubatches = ubatches
        self._backend = backend
        self._num_compute_units = num_compute_units
        self.num_counts = len({*self._histogram, max_rows})

    def judge(self, name: str, ladder: CapacityLadder) -> Choice:
        """What a ladder pads and takes."""
        padded = sum(steps * (ladder.class_for(rows) - rows) for rows, steps in self._histogram.items())
        real = sum(steps * rows for rows, steps in self._histogram.items())
        return Choice(name, ladder.classes, padded, real, self._bytes(ladder))

    def _bytes(self, ladder: CapacityLadder) -> int:
        return PlanManager.estimate_bytes(
            self._sites,
            ladder=ladder,
            ubatches=self._ubatches,
            backend=self._backend,
            num_compute_units=self._num_compute_units,
        )

    def fit(self, num_classes: int) -> Choice:
        """The ladder of at most num_classes that pads the least. Raises ConfigError."""
        ladder = fit_to(self._histogram, num_classes, self._max_rows)
        return self.judge(fitted_name(ladder), ladder)

    def fit_bytes(self, budget_bytes: int, progress: Callable[[int], object] = lambda num_done: None) -> Choice:
        """The fitted ladder of the most classes whose plans and scratch all fit.

        Found by halving, as bytes rise with the classes but for roundings. progress(fits so far).

        Raises BudgetTooSmallError.
        """
        low, high = 0, self.num_counts + 1
        best: Choice | None = None
        num_fits = 0
        while high - low > 1:
            middle = (low + high) // 2
            choice = self.fit(middle)
            num_fits += 1
            progress(num_fits)
            if choice.worst_case_bytes <= budget_bytes:
                low, best = middle, choice
            else:
                high = middle
        if best is None:
            raise BudgetTooSmallError(
                f"budget_bytes={budget_bytes:,} holds not even one class of {self._max_rows} rows, which takes "
                f"{self.fit(1).worst_case_bytes:,} bytes. Raise it, or lower max_rows."
            )
        return best

    def curve(
        self, class_counts: Iterable[int] | None = None, progress: Callable[[int], object] = lambda num_done: None
    ) -> list[Choice]:
        """Fitted ladders of growing size: the Pareto front of classes against padding, and the memory they take.

        class_counts: powers of two and their halfway points up to the distinct counts unless given.
        """
        if class_counts is None:
            wanted = {count for exponent in range(16) for count in (1 << exponent, 3 << exponent >> 1)}
            class_counts = sorted(count for count in wanted if 0 < count <= min(self.num_counts, 512))
        wanted_counts = list(class_counts)
        choices = []
        with self._fits(wanted_counts) as ladders:
            for num_done, ladder in enumerate(ladders, 1):
                choices.append(self.judge(fitted_name(ladder), ladder))
                progress(num_done)
        return choices

    @contextmanager
    def _fits(self, class_counts: Sequence[int]) -> Iterator[Iterable[CapacityLadder]]:
        """The fitted ladder of each size, on all cores where there is enough to do."""
        fit = partial(fit_to, self._histogram, max_rows=self._max_rows)
        if self.num_counts * len(class_counts) < _MIN_COUNTS_FOR_PROCESSES:
            yield map(fit, class_counts)
            return
        num_processes = min(num_cores(), len(class_counts))
        # Spawned, not forked: torch may have started threads, which a fork would cut in the middle.
        with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
            yield pool.map(fit, class_counts)


def configuration_lines(ladder: CapacityLadder, query_length: int = 1) -> dict[str, str]:
    """What to paste where, by engine.

    query_length: tokens per sequence of a verify step. vLLM counts its sizes in tokens, the others in sequences.
    """
    rows = ladder.classes
    spaced = " ".join(map(str, rows))
    return {
        "planlife": f"CapacityLadder([{', '.join(map(str, rows))}])",
        "vLLM": f"--cudagraph-capture-sizes {' '.join(str(count * query_length) for count in rows)}",
        "SGLang": f"--cuda-graph-bs {spaced}",
        "ATOM": f'--cudagraph-capture-sizes "[{",".join(map(str, rows))}]"',
    }
