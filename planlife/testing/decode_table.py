"""Decode calls of every kind a backend may be asked for, poisoned outside what they own, with their exact answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..ambient import plain
from ..configuration import check_choice
from ..errors import ConfigError
from ..ladder import CapacityLadder
from ..manager import PlanManager
from ..plan import OffPlan, StepPlan
from ..spec import DTYPE_BYTES, FP8_DTYPES, PlanSpec, Step
from .reference import reference_decode

#: By the name that a test shows: kv_layout, and whether V is stored as 4-D [pages, kv_heads, head_dim, page].
LAYOUTS = {
    "nhd": ("nhd", False),
    "hnd": ("hnd", False),
    "packed": ("packed", False),
    "packed, plain V": ("packed", True),
}
#: How scales are handed over, by the name that a test shows, and what PlanSpec calls it.
SCALE_FORMS = {
    "none": "none",
    "host number": "per_tensor",
    "device scalar": "per_tensor",
    "device [1]": "per_tensor",
    "per token": "per_token",
    "per token, 4-D": "per_token",
}
#: Largest relative error of an output row that rounding explains where everything inside is FP32: half a unit in the
#: last place of the output, and the sums.
ROW_BOUNDS = {"float32": 3e-6, "float16": 2**-11 + 3e-6, "bfloat16": 2**-8 + 3e-6}

#: The byte of an FP8 type that is no number; it has no infinity.
FP8_NAN = {"float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80}
_GARBAGE_PAGES = (-1, 0x7F7F7F7F, 0, -(2**31))
_PADDED_ROWS = 2


@dataclass(frozen=True)
class DecodeCase:
    """One decode call, by its options. `DecodeInputs` are its tensors.

    layout: a name of LAYOUTS. scales: a name of SCALE_FORMS. group: query heads per KV head.
    peaked: logits so far apart that few tokens have all the weight.
    lens: tokens of each row.
    """

    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    scales: str = "none"
    layout: str = "nhd"
    page_size: int = 16
    head_dim: int = 64
    group: int = 1
    num_kv_heads: int = 1
    query_length: int = 1
    sliding_window: int = 0
    sinks: bool = False
    peaked: bool = False
    max_partitions: int | None = None
    lens: tuple[int, ...] = (300, 1, 257)

    def spec(self, **changed: Any) -> PlanSpec:
        """The call site. Raises ConfigError for options that do not go together."""
        check_choice("layout", self.layout, tuple(LAYOUTS))
        check_choice("scales", self.scales, tuple(SCALE_FORMS))
        options: dict[str, Any] = {
            "max_context_tokens": max((*self.lens, self.query_length)) + 5,
            "q_dtype": self.q_dtype,
            "kv_dtype": self.kv_dtype,
            "kv_layout": LAYOUTS[self.layout][0],
            "scales": SCALE_FORMS[self.scales],
            "query_length": self.query_length,
            "sliding_window": self.sliding_window,
            "max_partitions": self.max_partitions,
            "workgroup_budget": 64,
            **changed,
        }
        return PlanSpec(self.group * self.num_kv_heads, self.num_kv_heads, self.head_dim, self.page_size, **options)

    def __str__(self) -> str:
        return (
            f"{self.q_dtype} over {self.kv_dtype}, {self.layout}, scales {self.scales}, page {self.page_size}, "
            f"head_dim {self.head_dim}, {self.group} x {self.num_kv_heads} heads, query {self.query_length}, "
            f"window {self.sliding_window}{', sinks' * self.sinks}{', peaked' * self.peaked}, "
            f"parts {self.max_partitions}, lens {list(self.lens)}"
        )


#: What `decode_cases` combines. Rows that are empty, shorter than the query, and at page and tile edges.
AXES: dict[str, tuple[Any, ...]] = {
    "q_dtype": ("bfloat16", "float16", "float32"),
    "kv_dtype": ("bfloat16", "float16", "float32", *FP8_DTYPES),
    "scales": tuple(SCALE_FORMS),
    "layout": tuple(LAYOUTS),
    "page_size": (1, 16, 64, 128, 256),
    "head_dim": (64, 128, 256, 512),
    "group": (1, 3, 8, 16),
    "num_kv_heads": (1, 2),
    "query_length": (1, 2, 5, 8),
    "sliding_window": (0, 1, 255, 256, 257, 2000),
    "sinks": (False, True),
    "peaked": (False, True),
    "max_partitions": (None, 1, 3),
    "lens": ((300, 1, 257), (0, 513, 0, 17, 0), (1030, 0, 5)),
}
#: Every combination of these is in the table too, not only every pair: they say how numbers are rounded.
NUMBERS = ("q_dtype", "kv_dtype", "scales")

_Goal = frozenset[tuple[str, Any]]


def can_meet(goal: _Goal) -> bool:
    """Whether a case may have these options: FP8 caches have scales and others none, and a packed page holds 16 bytes'
    worth of tokens at the least."""
    chosen = dict(goal)
    is_fp8 = {chosen["kv_dtype"] in FP8_DTYPES} if "kv_dtype" in chosen else set()
    is_fp8 |= {chosen["scales"] != "none"} if "scales" in chosen else set()
    is_packed = LAYOUTS[chosen.get("layout", "nhd")][0] == "packed"
    return len(is_fp8) < 2 and not (is_packed and chosen.get("page_size") == 1)


def _is_late(goal: _Goal) -> bool:
    """A plain V of other than FP8, which came to the table when its figures were published: such cases follow."""
    chosen = dict(goal)
    is_fp8 = chosen.get("kv_dtype", "float8_e4m3fn") in FP8_DTYPES and chosen.get("scales") != "none"
    return chosen.get("layout") == "packed, plain V" and not is_fp8


def combinations(names: tuple[str, ...]) -> Iterator[_Goal]:
    """Every choice of a value for each of these axes, possible or not."""
    for values in itertools.product(*(AXES[name] for name in names)):
        yield frozenset(zip(names, values, strict=True))


@lru_cache(maxsize=1)
def decode_cases() -> tuple[DecodeCase, ...]:
    """Cases that hold every pair of values of AXES which can meet, and every such combination of NUMBERS.

    Found greedily, the same on every machine.
    """
    wanted = (*itertools.combinations(AXES, 2), NUMBERS)
    goals = dict.fromkeys(goal for names in wanted for goal in combinations(names) if can_meet(goal))
    late = [goal for goal in goals if _is_late(goal)]
    for goal in late:
        del goals[goal]
    cases = _cases_of(goals, lambda goal: can_meet(goal) and not _is_late(goal))
    return tuple(cases + _cases_of(dict.fromkeys(late), can_meet))


def _cases_of(goals: dict[_Goal, None], may_meet: Callable[[_Goal], bool]) -> list[DecodeCase]:
    """Cases that hold every one of the goals, which are used up."""
    by_item: dict[tuple[str, Any], set[_Goal]] = {}
    for goal in goals:
        for item in goal:
            by_item.setdefault(item, set()).add(goal)
    cases = []
    # The larger goals first: the pairs fill the cases up.
    order = sorted(goals, key=lambda goal: -len(goal))
    for first in order:
        if first not in goals:
            continue
        case = dict(first)
        for name, values in AXES.items():
            if name not in case:
                case[name] = max(
                    (value for value in values if may_meet(frozenset((*case.items(), (name, value))))),
                    key=lambda value: sum(
                        goal in goals and goal <= {*case.items(), (name, value)}
                        for goal in by_item.get((name, value), ())
                    ),
                )
        for goal in [goal for goal in goals if goal <= case.items()]:
            del goals[goal]
        cases.append(DecodeCase(**{field.name: case[field.name] for field in fields(DecodeCase)}))
    return cases


@plain
def lay_out(keys: torch.Tensor, values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of "nhd" caches in a layout of LAYOUTS."""
    kv_layout, plain = LAYOUTS[layout]
    if kv_layout == "nhd":
        return keys.clone(), values.clone()
    if kv_layout == "hnd":
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    pages, page, heads, dim = keys.shape
    pack = 16 // keys.element_size()
    keys = keys.view(pages, page, heads, dim // pack, pack).permute(0, 2, 3, 1, 4)
    if plain:
        return keys.contiguous(), values.permute(0, 2, 3, 1).contiguous()
    values = values.view(pages, page // pack, pack, heads, dim).permute(0, 3, 1, 4, 2)
    return keys.contiguous(), values.contiguous()


@plain
def row_errors(output: torch.Tensor, expected: torch.Tensor, query_length: int = 1) -> torch.Tensor:
    """float64[rows]: ||output - expected|| / ||expected||, NaN where the output has one; an empty row must be zeros.

    output: [R * query_length, ...], expected: the same or fewer rows; the rows behind it must be zeros.
    """
    rows, width = output.shape[0] // query_length, query_length * math.prod(output.shape[1:])
    found = output.to("cpu", torch.float64).reshape(rows, width)
    wanted = expected.reshape(expected.shape[0] // query_length, width)  # no -1: there may be no rows
    if wanted.shape[0] < rows:
        wanted = torch.cat([wanted, wanted.new_zeros(rows - wanted.shape[0], wanted.shape[1])])
    difference, norm = (found - wanted).norm(dim=1), wanted.norm(dim=1)
    return torch.where(norm > 0, difference / norm, torch.where(difference == 0, 0.0, torch.inf))


@plain
def make_scale(
    form: str, owned: torch.Tensor, num_kv_heads: int, generator: torch.Generator | None = None
) -> torch.Tensor | float | None:
    """A scale in a form of SCALE_FORMS, NaN for tokens that `owned` bool[pages, page] leaves out; None without.

    It is on the generator's device; without one, where `owned` is.
    """
    if form == "none":
        return None
    device = owned.device if generator is None else generator.device
    one = torch.rand(1, generator=generator, dtype=torch.float32, device=device) + 0.25
    if form == "host number":
        return one.item()
    if SCALE_FORMS[form] == "per_tensor":
        return one if form == "device [1]" else one[0]
    shape = owned.shape[0], num_kv_heads, owned.shape[1]
    per_token = torch.rand(shape, generator=generator, dtype=torch.float32, device=device) + 0.25
    per_token.masked_fill_(~owned[:, None].to(device), torch.nan)
    return per_token[..., None] if form == "per token, 4-D" else per_token


class DecodeInputs:
    """The tensors of one decode call, and its exact answer.

    Whatever no row owns is poisoned: pages and tails with NaN and, where the dtype has it, infinity; their scales with
    NaN; table entries past a row's pages, and those of empty and padded rows, with page numbers that do not exist or
    that hold NaN; the queries of padded rows with NaN.

    query: q_dtype[class_rows * query_length, q_heads, head_dim]. context_lens: int32[rows].
    block_tables: int32[class_rows, columns].
    nhd: K and V as "nhd" caches on the CPU, from which key_cache and value_cache were laid out.

    Owns: all of it.
    """

    @plain
    def __init__(
        self,
        spec: PlanSpec,
        lens: tuple[int, ...],
        *,
        layout: str = "nhd",
        scales: str = "none",
        sinks: bool = False,
        peaked: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        check_choice("layout", layout, tuple(LAYOUTS))
        check_choice("scales", scales, tuple(SCALE_FORMS))
        pack = 16 // DTYPE_BYTES[spec.kv_dtype]
        if spec.kv_layout == "packed" and (spec.page_size % pack or spec.head_dim % pack):
            raise ConfigError(
                f"a packed {spec.kv_dtype} cache has page_size and head_dim in multiples of {pack}, got "
                f"{spec.page_size} and {spec.head_dim}; pass such, or another layout."
            )
        self.spec = spec
        self.device = device
        self.num_rows, self.class_rows = len(lens), len(lens) + _PADDED_ROWS
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self.softmax_scale = 1 / math.sqrt(spec.head_dim)
        self.context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        tables, owned = self._make_tables(lens)
        self.block_tables = tables.to(device)
        self.nhd = self._make_cache(owned), self._make_cache(owned)
        self.key_cache, self.value_cache = (cache.to(device) for cache in lay_out(*self.nhd, layout))
        query = self._normal(self.class_rows * spec.query_length, spec.num_q_heads, spec.head_dim)
        query[self.num_rows * spec.query_length :] = torch.nan
        self.query = (query * (8 if peaked else 1)).to(device, getattr(torch, spec.q_dtype))
        self.key_scale, self.value_scale = (
            scale.to(device) if isinstance(scale, torch.Tensor) else scale
            for scale in (make_scale(scales, owned, spec.num_kv_heads, self._generator) for _ in range(2))
        )
        self.sinks = (self._normal(spec.num_q_heads) * 3).to(device) if sinks else None

    @classmethod
    def of(cls, case: DecodeCase, *, device: str = "cpu", seed: int = 0, **changed: Any) -> DecodeInputs:
        """The tensors of a case; `changed` are options of its spec. Raises ConfigError."""
        return cls(
            case.spec(**changed),
            case.lens,
            layout=case.layout,
            scales=case.scales,
            sinks=case.sinks,
            peaked=case.peaked,
            device=device,
            seed=seed,
        )

    @cached_property
    @plain
    def expected(self) -> torch.Tensor:
        """float64[rows * query_length, q_heads, head_dim], on the CPU: the exact answer."""
        num_tokens = self.num_rows * self.spec.query_length
        return reference_decode(
            self.query[:num_tokens],
            *self.nhd,
            self.block_tables.cpu(),
            self.context_lens,
            self.softmax_scale,
            query_length=self.spec.query_length,
            sliding_window=self.spec.sliding_window,
            key_scale=1.0 if self.key_scale is None else self.key_scale,
            value_scale=1.0 if self.value_scale is None else self.value_scale,
            sinks=self.sinks,
        )

    def decode(self, **manager_options: Any) -> tuple[torch.Tensor, StepPlan | OffPlan]:
        """`decode_with` a manager made for it. manager_options: of PlanManager, such as backend and fallback."""
        ladder = CapacityLadder([self.class_rows])
        with PlanManager(self.spec, ladder=ladder, device=self.device, **manager_options) as manager:
            with manager.capture_phase():
                manager.warm()
            return self.decode_with(manager)

    @plain
    def decode_with(self, manager: PlanManager) -> tuple[torch.Tensor, StepPlan | OffPlan]:
        """(output, plan) of one eager step, in buffers that other work has used before.

        output: q_dtype[class_rows * query_length, q_heads, head_dim].

        Raises ConfigError where the backend refuses the site; AssertionError if it wrote outside the output.
        """
        # An earlier step with tasks in every row, and partial results that are NaN throughout.
        longest = torch.full((self.class_rows,), self.spec.max_context_tokens, dtype=torch.int32, device="cpu")
        manager.plan_for(Step(longest.to(self.device)))
        guarded = self.query.new_full((self.query.shape[0] + 2, *self.query.shape[1:]), torch.nan)
        output = guarded[1:-1]
        plan = manager.plan_for(Step(self.context_lens))
        for query in (torch.full_like(self.query, torch.nan), self.query):
            output.fill_(torch.nan)
            self.decode_into(output, query, manager, plan)
        if not guarded[[0, -1]].isnan().all():
            raise AssertionError("the decode wrote outside its output")
        return output, plan

    @plain
    def decode_into(
        self, output: torch.Tensor, query: torch.Tensor, manager: PlanManager, plan: StepPlan | OffPlan
    ) -> None:
        """One pa_decode, with everything but its query and output as it is here."""
        manager.pa_decode(
            plan,
            output,
            query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.softmax_scale,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            sinks=self.sinks,
        )

    def errors(self, **manager_options: Any) -> torch.Tensor:
        """float64[class_rows * query_length]: the relative error of each output row, as `row_errors`."""
        return row_errors(self.decode(**manager_options)[0], self.expected)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def _make_tables(self, lens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(block_tables, bool[pages, page]: which tokens a row owns). Page 0 belongs to nobody."""
        page_size = self.spec.page_size
        counts = [-(-length // page_size) for length in lens]
        num_pages = sum(counts) + 3
        order = torch.randperm(num_pages - 1, generator=self._generator, device="cpu") + 1
        columns = -(-self.spec.max_context_tokens // page_size)
        garbage = torch.tensor(_GARBAGE_PAGES, dtype=torch.int32, device="cpu")
        tables = garbage.repeat(-(-self.class_rows * columns // len(garbage)))[: self.class_rows * columns]
        tables = tables.view(self.class_rows, columns).clone()
        owned = torch.zeros(num_pages, page_size, dtype=torch.bool, device="cpu")
        pages = torch.split(order, [*counts, num_pages - 1 - sum(counts)])
        for row, (length, count, own) in enumerate(zip(lens, counts, pages, strict=False)):
            tables[row, :count] = own.to(torch.int32)
            tokens = torch.zeros(count * page_size, dtype=torch.bool, device="cpu")
            tokens[:length] = True
            owned[own] = tokens.view(count, page_size)
        return tables, owned

    def _make_cache(self, owned: torch.Tensor) -> torch.Tensor:
        shape = (*owned.shape, self.spec.num_kv_heads, self.spec.head_dim)
        cache = self._normal(*shape).to(getattr(torch, self.spec.kv_dtype))
        if self.spec.kv_dtype in FP8_NAN:
            cache.view(torch.uint8)[~owned] = FP8_NAN[self.spec.kv_dtype]
        else:
            cache[~owned] = torch.nan
            cache[:, 1::2][~owned[:, 1::2]] = torch.inf
        return cache
