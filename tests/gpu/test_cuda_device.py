"""What only a GPU can show: work in flight, streams, its allocator, and that the host waits for none of it.

Over both backends that decode on a GPU.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from planlife import CapacityLadder, PlanManager, PlanSpec, StalePlanError, StepPlan
from planlife.backends.triton_backend import TritonBackend
from planlife.cuda_device import CudaDevice
from tests.eventually import EVENTUALLY_S

from ..lifecycle.world import BEFORE_REPLAY, IN_GRAPH, World, backend_name, both_styles, limited_backend, small_spec

LENS = [500, 3, 257, 64, 1, 0, 256, 17]
CYCLES_PER_MS = 1_500_000  # at least a millisecond on GPUs of up to 1.5 GHz; never less than half of one


@pytest.fixture(autouse=True, params=["triton", "torch"])
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "backend", request.param)


def gpu_world(**options: Any) -> World:
    return World(warm=True, **options)


#: So long that no host, however slow, is done with a test's few calls after half of it.
BUSY_MS = 1000


def delay(milliseconds: int) -> None:
    """The current stream does nothing for at least half as long."""
    torch.cuda._sleep(milliseconds * CYCLES_PER_MS)


@contextmanager
def without_waiting(*streams: torch.cuda.Stream) -> Iterator[None]:
    """What the device has queued on `streams` is still ahead when the body ends, and torch sees no synchronising call.

    What is queued takes half a second and more: where it is done by then, the host waited for it.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(stream.query() for stream in streams)


def poison() -> list[torch.Tensor]:
    """Blocks of every size that a small world uses, zeroed on a stream of their own: a table of zeros decodes zeros."""
    with torch.cuda.stream(torch.cuda.Stream()):
        blocks = [torch.zeros(1 << power, dtype=torch.uint8, device="cuda") for power in range(9, 23) for _ in range(8)]
    default = [torch.zeros(1 << power, dtype=torch.uint8, device="cuda") for power in range(9, 23) for _ in range(8)]
    return blocks + default


# Memory.


def settled_bytes() -> int:
    """What torch's allocator has given out. A block that two streams used counts until the next allocation looks."""
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("seed", range(20))
def test_worst_case_bytes_is_what_torchs_allocator_gives_and_close_returns_all_of_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C22: measured by torch's own statistics, in whatever state earlier tests left its segments."""
    monkeypatch.setattr(TritonBackend, "compile", lambda *call: 1)  # takes minutes, and nothing is launched here
    pick = random.Random(seed)
    sites = {
        f"site {index}": PlanSpec(
            8,
            pick.choice((1, 2, 8)),
            pick.choice((16, 64, 128)),
            pick.choice((1, 16)),
            max_context_tokens=pick.choice((64, 4096)),
            query_length=pick.choice((1, 2)),
            max_partitions=pick.choice((None, 1, 4)),
            workgroup_budget=pick.choice((None, 1, 304)),
            lane=pick.choice(("main", "draft")),
        )
        for index in range(pick.randint(1, 3))
    }
    ladder = CapacityLadder(pick.choices(range(1, 200), k=3))
    gpu_world().manager.close()  # the matrix library keeps a workspace from its first use on
    with PlanManager(
        sites,
        ladder=ladder,
        device="cuda",
        backend=limited_backend(pick.choice((None, 9))),
        ubatches=pick.randint(1, 3),
    ) as manager:
        before = settled_bytes()
        with manager.capture_phase():
            manager.warm()
        assert settled_bytes() - before == manager.worst_case_bytes() > 0
        manager.close()
        assert settled_bytes() == before


def segments_of(pool: tuple[int, int]) -> list[range]:
    return [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == pool
    ]


def test_buffers_minted_inside_another_memory_pool_outlive_it() -> None:
    """C79: they were never in it."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        world = gpu_world()
        world.set_lens(LENS)
        world.manager.trim(0)
        plan = world.manager.plan_for(world.step())
        addresses = [plan.native.work_info.data_ptr(), plan.slot.arena.buffer.data_ptr()]
        inside = torch.zeros(1 << 20, device="cuda")
    theirs = segments_of(tuple(pool.id))
    assert any(inside.data_ptr() in segment for segment in theirs)  # positive control
    assert not any(address in segment for address in addresses for segment in theirs)
    world.query, world.output = world.query.clone(), world.output.clone()
    world.key_cache, world.value_cache = world.key_cache.clone(), world.value_cache.clone()
    world.lens, world.tables = world.lens.clone(), world.tables.clone()
    del inside, pool, plan
    for style in (BEFORE_REPLAY, IN_GRAPH):
        graph = world.capture(world.step(), style)
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())


# Graphs whose replays are in flight.


@pytest.mark.parametrize("num_replays", [0, 1, 3])
@pytest.mark.parametrize("end", ["collected", "reset"])
def test_a_graph_that_ends_while_replays_are_in_flight_keeps_what_they_read(end: str, num_replays: int) -> None:
    """C21: launched on a stream that the manager never saw; everything that may be evicted is, and overwritten."""
    world = gpu_world()
    world.set_lens(LENS)

    def layers(plan: StepPlan) -> None:
        delay(BUSY_MS)
        world.decode(plan)

    graph = world.capture(world.step(), IN_GRAPH, layers)
    world.set_lens(world.random_lens(8))
    expected = world.expected()
    unseen = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(unseen):
        for _ in range(num_replays):
            graph.replay()
    with without_waiting(*[unseen] * bool(num_replays)):
        if end == "reset":
            graph.reset()
        else:
            del graph
        freed_bytes = world.manager.trim(0)
        blocks = poison()
    if num_replays:
        assert world.manager.report().pinned_bytes
    torch.cuda.synchronize()
    if num_replays:
        world.assert_right(world.output, expected)
    world.settle()
    assert world.manager.report().pinned_bytes == 0
    assert freed_bytes + world.manager.trim(0) == world.manager.worst_case_bytes()
    assert world.manager.report().resident_bytes == 0
    del blocks


def test_a_graph_captured_again_keeps_what_its_replay_in_flight_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """R25: between the reset and the wait of torch.cuda.graph for the device another thread may evict and allocate."""
    world = gpu_world()
    world.set_lens(LENS)

    def layers(plan: StepPlan) -> None:
        delay(BUSY_MS)
        world.decode(plan)

    graph = world.capture(world.step(), IN_GRAPH, layers)
    world.set_lens(world.random_lens(8))
    expected = world.expected()
    unseen = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(unseen):
        graph.replay()
    device = world.manager._device
    real_record = device.record
    blocks: list[torch.Tensor] = []

    @contextmanager
    def record(g: torch.cuda.CUDAGraph, **options: Any) -> Iterator[torch.cuda.CUDAGraph]:
        world.manager.trim(0)  # as another thread, at the worst moment
        blocks.extend(poison())
        assert not unseen.query()
        with real_record(g, **options):
            yield g

    monkeypatch.setattr(device, "record", record)
    with world.manager.graph(graph):
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    world.assert_right(world.output, expected)
    world.settle()
    assert world.manager.report().pinned_bytes == 0


def test_without_its_pins_the_same_churn_does_overwrite_a_replay_in_flight() -> None:
    """The positive control of the test above: a promise (release) that the engine broke."""
    world = gpu_world()
    world.set_lens(LENS)

    def layers(plan: StepPlan) -> None:
        delay(BUSY_MS)
        world.decode(plan)

    graph = world.capture(world.step(), IN_GRAPH, layers)
    expected = world.expected()
    unseen = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(unseen):
        graph.replay()
    world.manager.release(graph)
    assert world.manager.trim(0) > 0
    blocks = poison()
    torch.cuda.synchronize()
    world.assert_wrong(world.output, expected)
    del blocks


def test_what_a_stream_was_given_finds_its_tables_after_an_eviction() -> None:
    """An eager decode behind a delay on a side stream; its buffers are evicted and overwritten meanwhile."""
    world = gpu_world()
    world.set_lens(LENS)
    expected = world.expected()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        plan = world.manager.plan_for(world.step())
        delay(BUSY_MS)
        world.decode(plan)
    with without_waiting(side):
        assert world.manager.trim(0) > 0
        blocks = poison()
    torch.cuda.synchronize()
    world.assert_right(world.output, expected)
    del blocks


# Streams.


@pytest.fixture(params=[True, False], ids=["ordered", "control: not ordered"])
def ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(CudaDevice, "order_after", lambda self, stream: None)
    return bool(request.param)


@pytest.fixture(params=["off", "count"], ids=["", "sanitized"])
def sanitized_world(request: pytest.FixtureRequest) -> World:
    return gpu_world(sanitize=request.param)


def check(world: World, ordered: bool, output: torch.Tensor, expected: torch.Tensor) -> None:
    torch.cuda.synchronize()
    (world.assert_right if ordered else world.assert_wrong)(output, expected)
    if ordered:
        assert world.counters()["stale_detected"] == 0


def test_a_decode_waits_for_the_refresh_of_another_stream(ordered: bool, sanitized_world: World) -> None:
    """C29: refreshed on A behind a delay, decoded on B at once."""
    world = sanitized_world
    world.set_lens([7] * 8)
    world.eager(world.step())
    world.set_lens(LENS)
    expected = world.expected()
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with without_waiting(a):
        with torch.cuda.stream(a):
            delay(BUSY_MS)
            plan = world.manager.plan_for(world.step())
        with torch.cuda.stream(b):
            world.decode(plan)
    check(world, ordered, world.output, expected)


def test_a_refresh_waits_for_the_decode_of_another_stream(ordered: bool, sanitized_world: World) -> None:
    """C29, the other way round: the next step is planned on A while this one's decode waits on B."""
    world = sanitized_world
    world.set_lens(LENS)
    expected = world.expected()
    next_lens = torch.full_like(world.lens, 1)
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(a):
        plan = world.manager.plan_for(world.step())
    torch.cuda.synchronize()
    with without_waiting(b):
        with torch.cuda.stream(b):
            delay(BUSY_MS)
            world.decode(plan)
        with torch.cuda.stream(a):
            world.manager.plan_for(world.step(lens=next_lens))
    check(world, ordered, world.output, expected)


@pytest.mark.parametrize("how", ["replay", "guard"])
def test_a_replay_waits_for_the_refresh_of_another_stream(ordered: bool, how: str, sanitized_world: World) -> None:
    """C29: before-replay style, planned on A, replayed on B."""
    world = sanitized_world
    world.set_lens([7] * 8)
    graph = world.capture(world.step(), BEFORE_REPLAY)
    world.set_lens(LENS)
    expected = world.expected()
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    step = world.step()
    torch.cuda.synchronize()
    with without_waiting(a):
        with torch.cuda.stream(a):
            delay(BUSY_MS)
            world.manager.plan_for(step)
        with torch.cuda.stream(b):
            if how == "replay":
                world.manager.replay(graph, step)
            else:
                world.manager.guard(graph, step)
                graph.replay()
    check(world, ordered, world.output, expected)


@both_styles
def test_a_capture_on_a_side_stream_of_a_worker_thread_is_seen_there_and_only_there(style: str) -> None:
    """C28."""
    world = gpu_world()
    world.set_lens(LENS)
    step = world.step()
    seen: list[int] = []
    made: list[Any] = []

    def capture() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(side):
            plan = world.manager.plan_for(step) if style == BEFORE_REPLAY else None
            with world.manager.graph(stream=side) as graph:
                seen.append(world.manager._device.capture_id())
                seen.append(world.elsewhere(world.manager._device.capture_id))
                world.decode(plan or world.manager.plan_for(step))
        made.append(graph)

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join(EVENTUALLY_S)
    assert seen[0] > 0 and seen[1] == 0
    assert world.manager.report().pinned_bytes
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(made[0], world.step(), style), world.expected())


def test_a_stream_that_records_meanwhile_is_not_waited_for() -> None:
    """Warmed up on the capture stream, decoded elsewhere while it records: an event there would be recorded."""
    world = gpu_world()
    world.set_lens(LENS)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        world.eager(world.step())
    total = torch.zeros(1, device="cuda")

    def eager() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            world.decode(world.manager.plan_for(world.step()))

    with world.manager.graph(stream=side) as graph:
        total.add_(1)
        world.elsewhere(eager)
        total.add_(1)
    torch.cuda.synchronize()
    world.assert_right(world.output, world.expected())
    graph.replay()
    assert total.tolist() == [2]


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@both_styles
def test_everything_works_while_another_device_is_current(style: str) -> None:
    """C84."""
    with torch.cuda.device(1):
        world = World(device="cuda:1", warm=True)
        assert PlanManager(world.sites, ladder=CapacityLadder([1]), device="cuda").report().device == "cuda:1"
    world.set_lens(LENS)
    assert torch.cuda.current_device() == 0
    graph = world.capture(world.step(), style)
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())
        world.assert_right(world.eager(world.step()), world.expected())
    world.manager.trim(0)
    world.assert_right(world.eager(world.step()), world.expected())


# The host waits for nothing.


@pytest.mark.parametrize("sanitize", ["off", "count"])
def test_no_call_waits_for_the_device(sanitize: str) -> None:
    """C30: behind a second of delay, evictions and rematerialisations included."""
    world = gpu_world(sanitize=sanitize)
    world.set_lens(LENS)
    graphs = {style: world.capture(world.step(), style) for style in (BEFORE_REPLAY, IN_GRAPH)}
    steps = {rows: world.step(rows) for rows in (8, 4, 2)}

    def work() -> None:
        for step in steps.values():
            world.decode(world.manager.plan_for(step))
        for graph in graphs.values():
            world.manager.plan_for(steps[8])
            world.manager.replay(graph, steps[8])
        world.manager.trim(0)
        world.decode(world.manager.plan_for(steps[4]))
        world.manager.report()

    work()
    torch.cuda.synchronize()
    delay(2 * BUSY_MS)
    with without_waiting(torch.cuda.current_stream()):
        work()
    assert world.counters()["stale_detected"] == 0


def test_a_stale_decode_is_told_by_a_call_soon_after() -> None:
    """C30 with C52: the counters arrive when the device has caught up, and are asked for by every call."""
    world = gpu_world(sanitize="raise")
    world.set_lens(LENS)
    graph = world.capture(world.step(), BEFORE_REPLAY)
    world.manager.plan_for(world.step())
    world.set_lens([length + 1 for length in LENS])
    graph.replay()
    with pytest.raises(StalePlanError, match="sanitizer saw 1 decode"):
        for _ in range(3):
            world.manager.plan_for(world.step())
            torch.cuda.synchronize()
    for _ in range(3):  # once
        world.manager.plan_for(world.step())
        torch.cuda.synchronize()


# Captures.


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_another_thread_may_plan_bring_back_evict_and_drop_graphs_while_this_one_records(mode: str) -> None:
    """C72, C67: in each mode. In global mode CUDA itself refuses a thread's first matrix product, and that a graph is
    destroyed on a thread that is not planlife's."""
    world = gpu_world()
    world.set_lens(LENS)
    other_output = torch.full_like(world.output, torch.nan)
    old, theirs = ([world.capture(world.step(), IN_GRAPH)] for _ in range(2))

    def meddle(may_drop: bool) -> None:
        if may_drop:
            theirs.clear()
        gc.collect()
        for rows in (4, 2, 4):
            plan = world.manager.plan_for(world.step(rows))
            if mode != "global":
                world.decode(plan, output=other_output[:rows])
            assert world.manager.trim(0) > 0

    world.elsewhere(lambda: meddle(may_drop=False))
    torch.cuda.synchronize()
    with world.manager.graph(capture_error_mode=mode) as graph:
        plan = world.manager.plan_for(world.step())
        world.decode(plan)
        world.elsewhere(lambda: meddle(may_drop=mode != "global"))
        old.clear()
        gc.collect()
        world.decode(plan)
    torch.cuda.synchronize()
    if mode != "global":
        world.assert_right(other_output[:4], world.expected(world.query[:4], world.lens[:4]))
    for _ in range(2):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step()), world.expected())


@pytest.mark.parametrize(("mode", "head_dim"), [("global", 32), ("thread_local", 48), ("relaxed", 80)])
def test_another_thread_may_compile_and_load_code_while_this_one_records(mode: str, head_dim: int) -> None:
    """A mint in service, of a site whose kernels were never loaded: each mode has its own."""
    sites = {"default": small_spec(), "late": replace(small_spec(), head_dim=head_dim)}
    world = World(sites=sites, on_miss="mint")
    world.set_lens(LENS)
    with world.manager.capture_phase():
        world.decode(world.manager.plan_for(world.step()))
    plans = []
    with world.manager.graph(capture_error_mode=mode) as graph:
        plan = world.manager.plan_for(world.step())
        world.decode(plan)
        world.elsewhere(lambda: plans.append(world.manager.plan_for(world.step(site="late"))))
        world.decode(plan)
    assert [late.route for late in plans] == ["planned"]
    assert world.manager.report().counters["compiles_after_seal"] == 1
    world.set_lens(world.random_lens(8))
    world.assert_right(world.replay(graph, world.step()), world.expected())


def a_host_read(world: World) -> None:
    world.output.sum().item()


def a_swallowed_host_read(world: World) -> None:
    with pytest.raises(RuntimeError):
        world.output.sum().item()


def an_exception(world: World) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fail", [a_host_read, a_swallowed_host_read, an_exception])
@pytest.mark.parametrize("shares_pool", [False, True])
def test_after_a_failed_capture_torch_is_as_it_was(fail: Callable[[World], None], shares_pool: bool) -> None:
    """C73: stream, allocator and random generator; nothing is pinned, and the next captures are right."""
    world = gpu_world()
    world.set_lens(LENS)
    step = world.step()
    first = world.capture(step, IN_GRAPH)
    options = {"pool": first.pool()} if shares_pool else {}
    stream = torch.cuda.current_stream()
    pinned = world.manager.report().pinned_bytes
    graph = world.new_graph()
    with pytest.raises((RuntimeError, ZeroDivisionError)), world.manager.graph(graph, **options):
        world.decode(world.manager.plan_for(step))
        torch.rand(3, device="cuda")
        fail(world)
    assert world.manager.report().pinned_bytes == pinned
    assert world.manager.report().num_graphs == 1
    assert world.is_empty(graph)
    assert torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").sum().item() > 0
    block = torch.zeros(1 << 20, device="cuda")
    assert any(block.data_ptr() in segment for segment in segments_of((0, 0)))
    with world.manager.graph(graph, **options):
        world.decode(world.manager.plan_for(step))
    for one in (first, graph):
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(one, world.step()), world.expected())


def poison_plan(plan: StepPlan) -> None:
    """What its refresh and decode must overwrite: integers that name no row, partial results that are NaN."""
    plan.native.work_info.fill_(0x7F7F7F7F)
    plan.native.reduce_info.fill_(0x7F7F7F7F)
    plan.slot.arena.buffer.fill_(0xFF)


def test_2000_replays_with_changing_lengths_equal_eager_steps() -> None:
    """Bit for bit with the Triton backend; the torch backend's matrix products add up in any order. The replay's tables
    and the arena are poisoned before each."""
    world = gpu_world()
    world.set_lens(LENS)
    plans: list[StepPlan] = []

    def layers(plan: StepPlan) -> None:
        plans.append(plan)
        world.decode(plan)

    graph = world.capture(world.step(), IN_GRAPH, layers)
    bound = 0.0 if backend_name() == "triton" else 1e-2
    world.tables[:] = torch.randperm(world.tables.shape[1], generator=world.generator) + 1
    lens = torch.randint(0, 500, (2000, 8), generator=world.generator).to("cuda", torch.int32)
    is_right = torch.ones((), dtype=torch.bool, device="cuda")
    for index in range(2000):
        world.lens.copy_(lens[index])
        poison_plan(plans[0])
        replayed = world.replay(graph, world.step()).float()
        eager = world.eager(world.step()).float()
        is_right.logical_and_(((replayed - eager).norm(dim=(1, 2)) <= bound * eager.norm(dim=(1, 2))).all())
    assert bool(is_right)
    world.assert_right(world.output, world.expected())


def test_50_graphs_that_share_one_arena_replay_right_in_any_order() -> None:
    """Two styles, five classes; every tenth goes meanwhile."""
    world = gpu_world(ladder=CapacityLadder([1, 2, 4, 6, 8]), rows=8)
    world.set_lens(LENS)
    pick = random.Random(50)
    graphs = {}
    pool = torch.cuda.graph_pool_handle()
    for index in range(50):
        rows, style = pick.randint(1, 8), pick.choice((BEFORE_REPLAY, IN_GRAPH))
        step = world.step(rows)
        plan = world.manager.plan_for(step)
        with world.manager.graph(pool=pool) as graph:
            world.decode(plan if style == BEFORE_REPLAY else world.manager.plan_for(step))
        graphs[index] = (graph, rows, style)
    assert len(world.manager.report().arenas) == 1
    for number in range(100):
        index = pick.choice(list(graphs))
        graph, rows, style = graphs[index]
        world.set_lens(world.random_lens(rows))
        plan.slot.arena.buffer.fill_(0xFF)
        output = world.replay(graph, world.step(rows), style)
        world.assert_right(output[:rows], world.expected()[:rows])
        if number % 10 == 0:
            del graphs[index]
            world.manager.trim(0)


@both_styles
def test_allocator_churn_between_capture_and_replay_changes_nothing(style: str) -> None:
    """Blocks of all sizes come and go, segments are given back, and other managers are warmed up and closed."""
    world = gpu_world()
    world.set_lens(LENS)
    graph = world.capture(world.step(), style)
    pick = random.Random(0)
    held: list[torch.Tensor] = []
    for _ in range(12):
        held += poison()
        pick.shuffle(held)
        del held[: len(held) // 2]
        other = gpu_world(seed=1)
        other.set_lens([1] * 8)
        other.eager(other.step())
        if pick.random() < 0.5:
            other.manager.close()
        del other
        world.manager.trim(0)
        torch.cuda.empty_cache()
        world.set_lens(world.random_lens(8))
        world.assert_right(world.replay(graph, world.step(), style), world.expected())
