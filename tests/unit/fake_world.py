"""A manager over the fakes, with persistent engine buffers: every rule of policy and memory in milliseconds.

The fake decode writes, per query row, the length that the tables hold: what was decoded can be read off the output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from planlife import CapacityLadder, MemoryReport, PlanManager, PlanSpec, Step, StepPlan
from planlife.testing import FakeBackend, FakeDevice, FakeTensor

MAX_TOKENS = 4096
POISON = "poison"


class Owner:
    """A step's metadata object."""


def spec(**changes: Any) -> PlanSpec:
    fields: dict[str, Any] = {"max_context_tokens": MAX_TOKENS, **changes}
    return PlanSpec(4, 1, 16, 16, **fields)


def live_lens_fallback(output: FakeTensor, *call: Any, **extras: Any) -> None:
    """A fallback that reads the lengths that are in the buffer when it runs, as a dense kernel does."""
    output.write(list(call[4].values))


class FakeWorld:
    """One manager, one length buffer per ubatch, and inputs that every decode may share."""

    def __init__(
        self,
        *,
        sites: PlanSpec | Mapping[str, PlanSpec] | None = None,
        rows: int = 8,
        device: FakeDevice | None = None,
        backend: FakeBackend | None = None,
        **options: Any,
    ) -> None:
        self.rows = rows
        self.sites = dict(sites) if isinstance(sites, Mapping) else {"default": sites or spec()}
        self.device = device or FakeDevice()
        self.backend = backend or FakeBackend()
        self.options = {"ladder": CapacityLadder.powers_of_two(rows), **options}
        self.manager = self.new_manager()
        self.lens = [FakeTensor(rows) for _ in range(self.options.get("ubatches", 1))]

    def new_manager(self) -> PlanManager:
        return PlanManager(self.sites, device=self.device, backend=self.backend, **self.options)

    def warm(self, rows: int | Sequence[int] | None = None) -> None:
        with self.manager.capture_phase():
            self.manager.warm(rows)

    def step(self, lens: Sequence[int], *, owner: object = Ellipsis, ubatch: int = 0, **fields: Any) -> Step:
        """A step over the persistent buffer of its ubatch, after these lengths were written into it."""
        buffer = self.lens[ubatch][: len(lens)]
        buffer.write(list(lens))
        # An engine keeps a step's metadata while it may still be used.
        self.owner = Owner() if owner is Ellipsis else owner
        return Step(buffer, owner=self.owner, ubatch=ubatch, **fields)

    def call(self, rows: int, site: str | None = None) -> dict[str, Any]:
        """What a layer passes to pa_decode besides the plan; the output is poisoned."""
        one = self.sites[site or next(iter(self.sites))]
        shape = (rows * one.query_length, one.num_q_heads, one.head_dim)
        cache = (4, one.page_size, one.num_kv_heads, one.head_dim)
        return {
            "output": FakeTensor(shape, one.q_dtype, values=[POISON] * shape[0]),
            "query": FakeTensor(shape, one.q_dtype),
            "key_cache": FakeTensor(cache, one.kv_dtype),
            "value_cache": FakeTensor(cache, one.kv_dtype),
            "block_tables": FakeTensor((max(rows, 1), -(-one.max_context_tokens // one.page_size))),
            "softmax_scale": 0.25,
        }

    def decode(self, plan: StepPlan, rows: int | None = None) -> list[Any]:
        """What the output holds after the decode, one value per query row."""
        call = self.call(plan.rows if rows is None else rows, plan.site)
        output: FakeTensor = self.manager.pa_decode(plan, **call)
        return output.values

    def run(self, lens: Sequence[int], **fields: Any) -> list[Any]:
        """plan_for and one decode of a fresh step."""
        return self.decode(self.manager.plan_for(self.step(lens, **fields)))

    @property
    def counters(self) -> dict[str, int]:
        return self.manager.report().counters

    def states(self) -> dict[str, str]:
        """The state of each plan and arena that was ever minted, by name."""
        report = self.manager.report()
        return {
            **{f"{line.site}/{line.class_rows}/ub{line.ubatch}": line.state for line in report.plans},
            **{f"scratch/{line.lane}/ub{line.ubatch}": line.state for line in report.arenas},
        }

    def assert_bytes_add_up(self) -> MemoryReport:
        """The ledger, the report's lines and the device's own count agree, within the budget."""
        report = self.manager.report()
        lines = [*report.plans, *report.arenas]
        assert report.resident_bytes == sum(line.num_bytes for line in lines if line.state in ("resident", "pinned"))
        assert report.pinned_bytes == sum(line.num_bytes for line in lines if line.state == "pinned")
        assert all((line.num_pins > 0) == (line.state == "pinned") for line in lines), report
        assert report.resident_bytes == self.device.live_bytes
        assert self.device.high_water_bytes <= report.budget_bytes
        return report


class Captured:
    """A graph of one layer's decode of a step, and the tensors that the engine keeps for it."""

    def __init__(self, world: FakeWorld, step: Step, *, in_graph: bool = False, g: Any = None) -> None:
        self.call = world.call(step.context_lens.shape[0], step.site)
        manager = world.manager
        plan = None if in_graph else manager.plan_for(step)
        with manager.graph(g) as self.g:
            manager.pa_decode(manager.plan_for(step) if plan is None else plan, **self.call)

    @property
    def output(self) -> list[Any]:
        return self.call["output"].values
