"""Ways to choose which row counts have plans, and when they are made; each is a configuration of PlanManager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from ..ladder import CapacityLadder


def vllm_capture_sizes(max_rows: int) -> list[int]:
    """vLLM's default graph sizes: 1, 2, 4, then every 8 to 256 and every 16 to twice max_num_seqs, 512 at most."""
    most = min(2 * max_rows, 512)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most]


def sglang_capture_sizes(max_rows: int) -> list[int]:
    """SGLang's default graph sizes without speculation, up to a cuda_graph_max_bs of 512 or max_rows."""
    most = min(max_rows, 512)
    sizes = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32))
    return [size for size in sizes if size <= most]


def nano_capture_sizes(max_rows: int) -> list[int]:
    """nano-vllm's graph sizes, which engines built after its pattern share: 1, 2, 4, 8 and every 16 to 512."""
    most = min(max_rows, 512)
    return [size for size in (1, 2, 4, 8, *range(16, most + 1, 16)) if size <= most]


CAPTURE_SIZES: dict[str, Callable[[int], list[int]]] = {
    "vllm": vllm_capture_sizes,
    "sglang": sglang_capture_sizes,
    "nano-vllm": nano_capture_sizes,
}


@dataclass(frozen=True)
class Policy:
    """A configuration of PlanManager, and how the engine around it uses graphs.

    ladder: the classes. captured: those that a graph is captured for at start-up: its plans are pinned, and steps in
    these classes are replays. warm: all classes are minted at start-up; otherwise a class is minted by the first step
    that needs it (on_miss="mint"). budget_bytes: None = the worst case, so that nothing is ever evicted.
    trim_each_step: give everything back after every step, as an engine does that makes a new plan for each.
    """

    name: str
    ladder: CapacityLadder
    captured: tuple[int, ...] = ()
    warm: bool = True
    budget_bytes: int | None = None
    trim_each_step: bool = False
    note: str = ""


def standard_policies(
    histogram: Mapping[int, int],
    *,
    num_classes: int,
    engine: str = "vllm",
    max_rows: int | None = None,
    budget_bytes: int | None = None,
    capture: bool = True,
) -> list[Policy]:
    """The policies that `planlife simulate` puts side by side.

    histogram: rows -> steps of the log. max_rows: the most rows the engine may run, the log's largest count unless
    given. budget_bytes: of the ladder policies. capture: graphs are captured for the classes, and pin their plans.

    Raises ConfigError.
    """
    seen = max((rows for rows in histogram if rows), default=0)
    if not seen:
        raise ConfigError("there is nothing to plan: no step of the log has rows.")
    top = seen if max_rows is None else max_rows
    if top < seen:
        raise ConfigError(f"max_rows={top} is below the {seen} rows that a step of the log has.")
    every_count = CapacityLadder({*filter(None, histogram), top})
    of_engine, of_engine_captured = engine_ladder(engine, top)
    powers = CapacityLadder.powers_of_two(top)
    fitted = fit_to(histogram, num_classes, top)

    def on_ladder(name: str, ladder: CapacityLadder, captured: tuple[int, ...], note: str) -> Policy:
        return Policy(name, ladder, captured if capture else (), budget_bytes=budget_bytes, note=note)

    return [
        Policy(
            "plan per count",
            every_count,
            warm=False,
            note="one plan per distinct row count, made when it is first met, never evicted",
        ),
        Policy(
            "plan per step",
            every_count,
            warm=False,
            trim_each_step=True,
            note="a new plan for every step, given back after it",
        ),
        on_ladder("powers of two", powers, powers.classes, "1, 2, 4, ... and the most rows"),
        on_ladder(
            f"{engine} sizes",
            of_engine,
            of_engine_captured,
            f"{engine}'s default capture sizes; rows above the largest run eagerly in one class of the most rows",
        ),
        on_ladder(
            fitted_name(fitted),
            fitted,
            fitted.classes,
            "the ladder of so many classes with the fewest padded rows on this log",
        ),
    ]


def engine_ladder(engine: str, max_rows: int) -> tuple[CapacityLadder, tuple[int, ...]]:
    """(classes, captured ones) of an engine that keeps its default sizes and runs at most `max_rows`.

    Raises ConfigError.
    """
    if engine not in CAPTURE_SIZES:
        raise ConfigError(f"engine must be one of {', '.join(CAPTURE_SIZES)}, got {engine!r}.")
    sizes = CAPTURE_SIZES[engine](max_rows)
    holding_all = next((size for size in sizes if size >= max_rows), None)
    if holding_all is None:
        return CapacityLadder.from_capture_sizes(sizes, max_rows), tuple(sizes)
    ladder = CapacityLadder(size for size in sizes if size <= holding_all)
    return ladder, ladder.classes


def fit_to(histogram: Mapping[int, int], num_classes: int, max_rows: int) -> CapacityLadder:
    """The fitted ladder, with `max_rows` on top even where the log has no such step. Raises ConfigError."""
    weights = {rows: steps for rows, steps in histogram.items() if rows}
    weights.setdefault(max_rows, 0)
    return CapacityLadder.fit(weights, num_classes)


def fitted_name(ladder: CapacityLadder) -> str:
    """What a fitted ladder is called in tables."""
    return f"fitted, {len(ladder.classes)} class{'es' * (len(ladder.classes) != 1)}"
