"""Values through a manager, eager and replayed, against the dense answer: what no row may attend to is NaN."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, ConfigError, PlanManager, PlanSpec, Step
from planlife.planner import TILE_TOKENS, plan_tables
from planlife.testing import reference_decode
from planlife.testing.decode_table import LAYOUTS, lay_out

from . import world
from .world import IN_GRAPH, PAGE, Owner, World, both_styles, counters_of, limited_backend, row_errors

BF16_LAYOUTS = ("nhd", "hnd", "packed")
WINDOWS, QUERY_LENGTHS = (1, 255, 256, 257, 5000), range(1, 7)
#: (window, query length): enough where each pair costs much, as a compile does.
FEW_WINDOWS = {(1, 1), (257, 2), (256, 3), (255, 6), (5000, 6)}
EDGE_LENS = [1, 6, 255, 256, 257, 262, 0, 1030]


def make_spec(layout: str = "", **changes: Any) -> PlanSpec:
    """layout: "" for that of the worlds' kind."""
    kind = replace(World.kind, layout=layout or World.kind.layout)
    return kind.spec(**{"max_context_tokens": 1040, **changes})


class Served:
    """One layer of one site, with a manager: caches in a layout, where only what a row's window holds is a number,
    or as little more as the worlds' kind of cache allows.

    Entries of the block tables past a row's pages are -1, and rows behind the batch name pages far outside the pool.
    """

    def __init__(self, spec: PlanSpec, lens: list[int], layout: str = "", *, columns: int = 0, **options: Any) -> None:
        layout = layout or World.kind.layout
        self.kind = replace(World.kind, layout=layout, kv_dtype=spec.kv_dtype, scales=spec.scales)
        self.spec = spec
        self.generator = torch.Generator().manual_seed(0)
        rows, self.columns = len(lens), columns or -(-spec.max_context_tokens // PAGE)
        self.device = world.DEVICE
        options = {"ladder": CapacityLadder([rows]), "device": self.device, "backend": World.backend, **options}
        self.manager = PlanManager(spec, **options)
        with self.manager.capture_phase():
            self.manager.warm()
        self.lens = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.tables = torch.empty(rows + 2, self.columns, dtype=torch.int32, device=self.device)
        shape = (rows * spec.query_length, spec.num_q_heads, spec.head_dim)
        self.query = torch.randn(shape, generator=self.generator).to(self.device, getattr(torch, spec.q_dtype))
        self.output = torch.full_like(self.query, torch.nan)
        self.extras = self.kind.make_scales(spec, self.generator, self.device)
        self.set_lens(lens)
        self.make_caches()

    def set_lens(self, lens: list[int]) -> None:
        """Lengths, and pages of each row's own: the same ones whatever the lengths are."""
        self.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        tables = torch.full(self.tables.shape, -1, dtype=torch.int32)
        tables[len(lens) :] = 2**30
        for row, length in enumerate(lens):
            used = min(-(-length // PAGE), self.columns)
            tables[row, :used] = 1 + row * self.columns + torch.arange(used, dtype=torch.int32).flip(0)
        self.tables.copy_(tables)

    def make_caches(self) -> None:
        spec, window = self.spec, self.spec.sliding_window
        num_pages = 2 + len(self.lens) * self.columns
        scaled, tables = spec.scales == "per_token", self.tables.cpu()
        numbers = torch.full((2, num_pages, PAGE, spec.num_kv_heads, spec.head_dim), torch.nan)
        scales = torch.full((2, num_pages, spec.num_kv_heads, PAGE), torch.nan)
        if self.kind.finite_values:
            owned = tables[tables.ge(0) & tables.lt(num_pages)].long()
            numbers[1, owned] = torch.randn(numbers[1, owned].shape, generator=self.generator)
        for row, length in enumerate(self.lens.tolist()):
            first = max(length - (spec.query_length - 1) - window, 0) if window else 0
            for position in range(first, min(length, self.columns * PAGE)):
                page = tables[row, position // PAGE]
                token = torch.randn(numbers[:, 0, 0].shape, generator=self.generator)
                numbers[:, page, position % PAGE] = token
                scales[:, page, :, position % PAGE] = 0.5 + torch.rand(2, spec.num_kv_heads, generator=self.generator)
        self.nhd = tuple(numbers.to(self.device, getattr(torch, spec.kv_dtype)))
        self.keys, self.values = lay_out(*self.nhd, self.kind.layout)
        if scaled:
            self.extras = dict(zip(("key_scale", "value_scale"), scales.to(self.device), strict=True))

    def step(self) -> Step:
        self.owner = Owner()
        return Step(self.lens, owner=self.owner)

    def layer(self, plan: Any) -> torch.Tensor:
        scale = self.spec.head_dim**-0.5
        return self.manager.pa_decode(
            plan, self.output, self.query, self.keys, self.values, self.tables, scale, **self.extras
        )

    def eager(self) -> torch.Tensor:
        self.output.fill_(torch.nan)
        return self.layer(self.manager.plan_for(self.step())).clone()

    def capture(self, style: str = IN_GRAPH) -> Any:
        step = self.step()
        plan = None if style == IN_GRAPH else self.manager.plan_for(step)
        with self.manager.graph() as g:
            self.layer(plan or self.manager.plan_for(step))
        return g

    def replay(self, g: Any, style: str = IN_GRAPH) -> torch.Tensor:
        step = self.step()
        if style != IN_GRAPH:
            self.manager.plan_for(step)
        self.output.fill_(torch.nan)
        self.manager.replay(g, step)
        return self.output.clone()

    def expected(self, lens: torch.Tensor | None = None) -> torch.Tensor:
        lens = self.lens if lens is None else lens
        names = ("query_length", "sliding_window", "max_context_tokens")
        options = {name: getattr(self.spec, name) for name in names}
        scale = self.spec.head_dim**-0.5
        call = (self.query.cpu(), *self.nhd, self.tables.cpu(), lens.cpu(), scale)
        return reference_decode(*call, **options, **self.extras)

    def assert_right(self, output: torch.Tensor, expected: torch.Tensor | None = None) -> None:
        errors = row_errors(output, self.expected() if expected is None else expected, self.spec.query_length)
        assert (errors <= self.kind.row_bound).all(), errors

    def assert_right_both_ways(self) -> None:
        """Eager, and replayed in a graph that was captured over other lengths."""
        lens, tables = self.lens.clone(), self.tables.clone()
        self.assert_right(self.eager())
        self.lens.fill_(1)
        self.tables.fill_(-1)
        g = self.capture()
        self.lens.copy_(lens)
        self.tables.copy_(tables)
        self.assert_right(self.replay(g))


@pytest.mark.parametrize("query_length", QUERY_LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_of_any_width_equals_the_reference_and_skips_the_tiles_left_of_it(
    window: int, query_length: int
) -> None:
    """C39, R36: the union of the query tokens' windows is planned, no less and no tile more, in every layout."""
    for layout in World.kind.layouts:
        served = Served(make_spec(layout, sliding_window=window, query_length=query_length), EDGE_LENS, layout)
        served.assert_right_both_ways()
    native = served.manager.plan_for(served.step()).native
    for row, length in enumerate(EDGE_LENS):
        first_slot, num_slots = native.reduce_info[row].tolist()
        tasks = native.work_info[first_slot : first_slot + num_slots].tolist()
        tiles = [tile for _, begin, end, _ in tasks for tile in range(begin, end)]
        seen = range(max(length - (query_length - 1) - window, 0), length)
        assert tiles == sorted({token // TILE_TOKENS for token in seen})
    dense = plan_tables(EDGE_LENS, num_kv_heads=2, num_cu=256, workgroup_budget=24, query_length=query_length)
    assert (native.work_info.tolist() == dense[0]) == (window == 5000)  # control: a window does leave tiles out


def names_of_other_windows() -> list[str]:
    """Those that a suite with FEW_WINDOWS leaves out."""
    name = test_a_window_of_any_width_equals_the_reference_and_skips_the_tiles_left_of_it.__name__
    pairs = itertools.product(WINDOWS, QUERY_LENGTHS)
    return [f"{name}[{window}-{length}]" for window, length in pairs if (window, length) not in FEW_WINDOWS]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_decode_of_another_query_length_is_refused_before_any_launch(rows: int) -> None:
    """R36: rows, class and query rows must fit the plan's query length."""
    served = Served(make_spec(query_length=3, sliding_window=256), [300] * rows)
    plan = served.manager.plan_for(served.step())
    served.assert_right(served.layer(plan))  # positive control
    scale = served.spec.head_dim**-0.5
    for other in (1, 2, 4, 6):
        query = served.query[:1].repeat(rows * other, 1, 1)
        output = torch.full_like(query, torch.nan)
        with pytest.raises(ConfigError, match=r"query's (shape|row count) is"):
            served.manager.pa_decode(
                plan, output, query, served.keys, served.values, served.tables, scale, **served.extras
            )
        assert output.isnan().all()


def test_sites_of_other_windows_and_query_lengths_never_take_each_others_tables() -> None:
    """R36: the same lengths and owner, and still a refresh for each."""
    sites = {
        "dense": make_spec(),
        "window": make_spec(sliding_window=256),
        "other window": make_spec(sliding_window=255),
        "draft": make_spec(sliding_window=256, query_length=2),
    }
    served = Served(make_spec(), EDGE_LENS)
    with PlanManager(sites, ladder=CapacityLadder([8]), device=served.device, backend=World.backend) as manager:
        with manager.capture_phase():
            manager.warm()
        owner = Owner()
        plans = {site: manager.plan_for(Step(served.lens, owner=owner, site=site)) for site in sites}
        assert manager.report().counters["refreshes"] == len(sites)
        for site, spec in sites.items():
            setting = {"sliding_window": spec.sliding_window, "query_length": spec.query_length}
            wanted = plan_tables(EDGE_LENS, num_kv_heads=2, num_cu=256, workgroup_budget=24, **setting)
            assert plans[site].native.work_info.tolist() == wanted[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_six_query_tokens_of_group_eight_with_scales_per_token_are_served(layout: str) -> None:
    """C40: 48 query rows per KV head."""
    fp8 = {"kv_dtype": World.kind.fp8, "scales": "per_token"}
    served = Served(make_spec(layout, query_length=6, num_q_heads=16, **fp8), EDGE_LENS, layout)
    served.assert_right_both_ways()
    right = served.expected()
    served.extras["key_scale"].mul_(2)
    assert (row_errors(served.eager(), right, 6) > 1e-2).any()  # control: each token's own scale is read
    served.assert_right(served.eager())


@pytest.mark.parametrize("rows", [4097, 10_000])
def test_more_rows_than_a_backend_plans_at_once_are_served_in_segments(rows: int) -> None:
    """C41, R23."""
    lens = torch.randint(0, 5, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
    spec = make_spec(num_q_heads=1, num_kv_heads=1, max_context_tokens=16)
    served = Served(spec, lens, backend=limited_backend(4096))
    plan = served.manager.plan_for(served.step())
    wanted = [4096] * (rows // 4096) + [rows % 4096]
    assert (plan.native, [native.reduce_info.shape[0] for native in plan.segments]) == (None, wanted)
    expected = served.expected()
    served.assert_right(served.eager(), expected)
    served.lens.fill_(1)
    g = served.capture()
    served.lens.copy_(torch.tensor(lens))
    served.assert_right(served.replay(g), expected)
    assert (row_errors(served.output.roll(4096, 0), expected) > 1e-2).any()  # control: rows differ between segments


@both_styles
@pytest.mark.parametrize("above", ["the bound", "the table"])
def test_a_replayed_length_above_what_a_row_can_have_is_clamped_and_counted(style: str, above: str) -> None:
    """C55: nothing behind the bound or the table's last column is read, and the sanitizer says how many there were."""
    columns = 65 if above == "the bound" else 10
    limit = 250 if above == "the bound" else 10 * PAGE
    spec = make_spec(max_context_tokens=250 if above == "the bound" else 1040)
    served = Served(spec, [limit] * 6, columns=columns, sanitize="count")
    g = served.capture(style)
    served.lens.copy_(torch.tensor([1, limit, limit + 1, 2**31 - 1, 0, 300], dtype=torch.int32))
    for num_replays in (1, 2):
        served.assert_right(served.replay(g, style), served.expected(served.lens.clamp(max=limit)))
        counters = counters_of(served.manager)
        assert (counters["lengths_clamped"], counters["stale_detected"]) == (3 * num_replays, 0)
    served.lens.clamp_(max=limit)
    served.replay(g, style)
    assert counters_of(served.manager)["lengths_clamped"] == counters["lengths_clamped"]  # control


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_an_infinite_value_that_is_attended_comes_out_and_reaches_nothing_else(layout: str, infinity: float) -> None:
    """C60: no NaN of 0 x inf, whatever the arena held and however many tasks a row has."""
    served = Served(make_spec(layout), EDGE_LENS, layout)
    served.nhd[1][served.tables[7, 30], 3, 0, 1] = infinity
    served.nhd[1][served.tables[4, 0], 0, 1, 2] = infinity
    served.keys, served.values = lay_out(*served.nhd, layout)
    plan = served.manager.plan_for(served.step())
    assert plan.native.reduce_info[7, 1] > 1
    g = served.capture()
    for leftover in (torch.inf, -torch.inf, torch.nan):
        plan.slot.arena.buffer[: plan.slot.arena.buffer.numel() // 4 * 4].view(torch.float32).fill_(leftover)
        for output in (served.eager().cpu(), served.replay(g).cpu()):
            expected = served.expected()
            assert expected[7, :2, 1].eq(infinity).all() and expected[4, 2:, 2].eq(infinity).all()
            assert torch.equal(output.isinf(), expected.isinf())
            assert not output.isnan().any()
            assert torch.equal(output.double().sign()[expected.isinf()], expected.sign()[expected.isinf()])
            finite = ~expected.isinf()
            assert (output.double() - expected)[finite].abs().max() < 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tiny", [1e-20, 1e-30])
def test_one_token_is_exactly_its_value_whatever_the_key_scale(layout: str, tiny: float) -> None:
    """C61."""
    served = Served(make_spec(layout, kv_dtype=World.kind.fp8, scales="per_tensor"), [1, 1, 0, 1], layout)
    served.extras = {
        name: torch.tensor([one], device=served.device) for name, one in (("key_scale", tiny), ("value_scale", 1.0))
    }
    g = served.capture()
    values = torch.stack([served.nhd[1][served.tables[row, 0], 0].float() for row in (0, 1, 3)])
    for output in (served.eager(), served.replay(g)):
        assert torch.equal(output[[0, 1, 3]].float(), values.repeat_interleave(2, dim=1))
        assert not output[2].any()


def halves_of_one_row(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    joint = torch.cat([keys, values], dim=-1)
    return joint[..., : keys.shape[-1]], joint[..., keys.shape[-1] :]


def heads_outermost(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pool = torch.stack([keys, values]).permute(3, 0, 1, 2, 4).contiguous()
    return pool[:, 0].permute(1, 2, 0, 3), pool[:, 1].permute(1, 2, 0, 3)


@pytest.mark.parametrize("view", [halves_of_one_row, heads_outermost])
def test_caches_that_are_views_of_a_larger_pool_are_served_in_place(view: Any) -> None:
    """C62: a graph that was captured over the views sees what is written into the pool afterwards."""
    served = Served(make_spec(), EDGE_LENS)
    served.keys, served.values = view(*served.nhd)
    assert not (served.keys.is_contiguous() or served.values.is_contiguous())
    g = served.capture()
    served.assert_right(served.eager())
    served.keys.mul_(0.5)
    served.values.add_(1)
    for mine, pool in zip(served.nhd, (served.keys, served.values), strict=True):
        mine.copy_(pool)
    served.assert_right(served.eager())
    served.assert_right(served.replay(g))


def test_a_broadcast_block_axis_is_served_without_a_copy_of_the_pool() -> None:
    """C62: 2**30 pages of one page's memory; a copy would be a terabyte."""
    served = Served(make_spec(), [40, 16, 0, 3])
    page = [served.query.new_tensor(torch.randn(1, PAGE, 2, 16, generator=served.generator).tolist()) for _ in range(2)]
    served.keys, served.values = (one.expand(2**30, -1, -1, -1) for one in page)
    served.nhd = (served.keys, served.values)
    served.tables[served.tables > 0] = 2**30 - 1
    served.assert_right_both_ways()


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
@pytest.mark.parametrize("stray", [-1, 0, 2**31 - 1, -(2**31)])
def test_table_entries_that_belong_to_no_row_are_never_followed(layout: str, stray: int) -> None:
    """C81, C35: those of empty rows, past a row's pages, and whole rows behind the batch; tails of pages are NaN."""
    served = Served(make_spec(layout), EDGE_LENS, layout)
    for row, length in enumerate([*EDGE_LENS, 0, 0]):
        served.tables[row, -(-length // PAGE) :] = stray
    served.assert_right_both_ways()
    served.tables[2, 0] = served.tables[7, 64]  # control: a page that is followed does show, its tail is NaN
    assert served.eager()[2].isnan().any()
