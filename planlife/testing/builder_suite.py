"""A suite that an engine runs on its own metadata builder: does every row decode its own step's work?

It captures graphs over the builder's sizes, decodes steps with changing lengths through them and eagerly, and compares
every row with the dense answer in FP64. A failure names the builder's method and step. What a wrong row decoded is
found by trying: its output is compared with the answer for every other length.

Everything runs in inference mode, as engines do: there tensors have no `_version`, and an owner kept over steps is not
forgiven. On a CPU the graphs are emulated; on a GPU they are CUDA graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..device import Graph
from ..events import Event
from ..manager import PlanManager
from ..spec import DTYPE_BYTES, PlanSpec
from .decode_table import lay_out, make_scale
from .reference import reference_decode

if TYPE_CHECKING:
    from .aiter_double import AiterDouble

#: Relative error of a row up to which it counts as right: BF16 outputs of contexts of this suite's lengths. One token
#: more or less of 600 changes a row by about 4 %.
ROW_ERROR = 1e-2

_LONGEST_TOKENS = 600
_NUM_LAYERS = 2
#: How each kind of scales is handed over: a name of decode_table's SCALE_FORMS.
_SCALE_FORMS = {"none": "none", "per_tensor": "device [1]", "per_token": "per token"}


class BuilderFailure(AssertionError):
    """The builder broke a rule; the message begins with its method and step."""


class Unsupported(Exception):
    """The adapter says that its builder has no such steps."""


class BuilderAdapter(ABC):
    """What the suite asks of a builder. `metadata` is whatever the builder returns; the suite hands it back only.

    Tensors that must keep their address (lengths above all) belong to the builder, as in the engine. The suite brings
    queries, caches, block tables and outputs.

    manager: the builder's; the suite's tensors are made on its device. spec: of the target's site. capture_rows: the
        graph sizes, as the engine captures them. draft_passes: how often prepare_mtp_decode follows a step. draft_spec:
        of the drafts' site, None if it is the target's. drafts_in_graph: the drafts of a step are recorded into its
        graph. num_ubatches: 2 or more for an engine with micro-batches, else 0. has_dummies: prepare_dummy is there.
        padding_tokens: the length that padded rows carry.
    """

    manager: PlanManager
    spec: PlanSpec
    capture_rows: Sequence[int]
    draft_passes: int = 0
    draft_spec: PlanSpec | None = None
    drafts_in_graph: bool = False
    num_ubatches: int = 0
    has_dummies: bool = False
    padding_tokens: int = 0

    @abstractmethod
    def build_for_capture(self, rows: int) -> Any:
        """Metadata of a graph of `rows` rows, made before its recording."""

    @abstractmethod
    def prepare_decode(self, lens: Sequence[int], rows: int) -> Any:
        """Metadata of a step of these lengths, padded to `rows`: the rows of the graph that replays, or those of
        `lens` for an eager step."""

    @abstractmethod
    def decode(self, metadata: Any, layer: int, *call: Any, **scales: Any) -> None:
        """One layer's attention, as the model runs it: `manager.pa_decode(plan, *call, **scales)`. A builder that plans
        while recording does so here, in its first layer. scales: key_scale and value_scale, where the cache has any."""

    @abstractmethod
    def context_lens(self, metadata: Any) -> torch.Tensor:
        """int32[rows]: the lengths that this metadata is planned from."""

    def prepare_mtp_decode(self, metadata: Any, draft_pass: int) -> Any:
        """Metadata of draft pass 1, 2, ...: the lengths of the step advance by one, in place."""
        raise NotImplementedError

    def build_ubatches_for_capture(self, rows: int) -> Sequence[Any]:
        """As build_for_capture: metadata of each micro-batch, of `rows` rows each."""
        raise NotImplementedError

    def prepare_ubatch_decode(self, lens: Sequence[Sequence[int]], rows: int) -> Sequence[Any]:
        """As prepare_decode: metadata of each micro-batch, padded to `rows` each. No layer runs in between."""
        raise NotImplementedError

    def prepare_dummy(self, rows: int) -> Any:
        """Metadata of an idle rank's step, or None if its layers do not run."""
        raise NotImplementedError

    def capture(self, body: Callable[[], None]) -> Graph:
        """Record `body` as the engine does."""
        with self.manager.graph() as graph:
            body()
        return graph

    def replay(self, graph: Graph, *metadata: Any) -> None:
        """Launch a graph as the engine does, for the metadata that was prepared last."""
        graph.replay()

    def close(self) -> None:
        """Called once at the end of each scenario, also of one that failed."""
        self.manager.close()


class _Layer(NamedTuple):
    """One layer's caches, and what pa_decode takes by keyword with them: the scales of an FP8 cache."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    scales: dict[str, Any]


class _Batch(NamedTuple):
    """The suite's own tensors for one batch: addresses are as stable as a graph needs them.

    query: [rows * query_length, q_heads, head_dim]. outputs: one per layer, of the same shape.
    """

    spec: PlanSpec
    query: torch.Tensor
    outputs: list[torch.Tensor]
    block_tables: torch.Tensor


class _Capture(NamedTuple):
    """A graph, and per batch in it: its tensors, and the lengths that it captured (held, so the address stays taken).

    captured_lens: as they were then.
    """

    graph: Graph
    batches: list[_Batch]
    lens_buffers: list[torch.Tensor]
    captured_lens: list[list[int]]


class _World:
    """Caches, tables and queries for one adapter, and the comparison with the dense answer.

    Every row has pages of its own for the longest context of all, so that a row which decodes too much reads valid
    tokens, and is recognised by them.
    """

    def __init__(self, adapter: BuilderAdapter, seed: int) -> None:
        self.adapter = adapter
        self.device = torch.device(adapter.manager.report().device)
        self.generator = torch.Generator().manual_seed(seed)
        self.events: list[Event] = []
        adapter.manager.add_hook(self.events.append)
        for spec in (adapter.spec, adapter.draft_spec or adapter.spec):
            pack = 16 // DTYPE_BYTES[spec.kv_dtype]
            if spec.kv_layout == "packed" and (spec.page_size % pack or spec.head_dim % pack):
                raise ValueError(
                    f"a packed {spec.kv_dtype} cache has page_size and head_dim in multiples of {pack}, got "
                    f"{spec.page_size} and {spec.head_dim}. Give the builder a manager over such a cache for this test."
                )
        self.longest = min(adapter.spec.max_context_tokens - adapter.draft_passes, _LONGEST_TOKENS)
        page, num_rows = adapter.spec.page_size, max(adapter.capture_rows)
        columns = -(-(self.longest + adapter.draft_passes) // page)
        num_batches = max(adapter.num_ubatches, 1)
        pages = torch.randperm(num_batches * num_rows * columns, generator=self.generator, device="cpu").to(
            self.device, torch.int32
        )
        self.block_tables = pages.view(num_batches, num_rows, columns)
        self.caches: dict[PlanSpec, list[_Layer]] = {}

    def layers(self, spec: PlanSpec) -> list[_Layer]:
        if spec not in self.caches:
            self.caches[spec] = [self._layer(spec) for _ in range(_NUM_LAYERS)]
        return self.caches[spec]

    def _layer(self, spec: PlanSpec) -> _Layer:
        pages = self.block_tables.numel()
        shape = pages, spec.page_size, spec.num_kv_heads, spec.head_dim
        keys, values = (self._random(shape).to(getattr(torch, spec.kv_dtype)) for _ in range(2))
        key_cache, value_cache = (cache.to(self.device) for cache in lay_out(keys, values, spec.kv_layout))
        scales: dict[str, Any] = {}
        if spec.scales != "none":
            owned = torch.ones(shape[:2], dtype=torch.bool, device="cpu")  # every page is some row's
            for name in ("key_scale", "value_scale"):
                scale = make_scale(_SCALE_FORMS[spec.scales], owned, spec.num_kv_heads, self.generator)
                assert isinstance(scale, torch.Tensor)
                scales[name] = scale.to(self.device)
        return _Layer(key_cache, value_cache, scales)

    def _random(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.generator, device="cpu")

    def batch(self, spec: PlanSpec, rows: int, ubatch: int = 0) -> _Batch:
        shape = rows * spec.query_length, spec.num_q_heads, spec.head_dim
        query = torch.empty(shape, dtype=getattr(torch, spec.q_dtype), device=self.device)
        return _Batch(
            spec, query, [torch.empty_like(query) for _ in range(_NUM_LAYERS)], self.block_tables[ubatch, :rows]
        )

    def fill(self, batch: _Batch) -> None:
        """New queries; outputs that nobody writes are NaN."""
        batch.query.copy_(self._random(batch.query.shape))
        for output in batch.outputs:
            output.fill_(torch.nan)

    def random_lens(self, rows: int, at_least: int = 0) -> list[int]:
        """Uneven, some of them empty or at the edges of tiles."""
        lens = torch.randint(
            max(at_least, 1), self.longest + 1, (rows,), generator=self.generator, device="cpu"
        ).tolist()
        picks = torch.randint(0, 12, (rows,), generator=self.generator, device="cpu").tolist()
        edges = {0: 0, 1: 1, 2: 255, 3: 256, 4: 257}
        return [
            max(at_least, min(edges.get(pick, length), self.longest)) for pick, length in zip(picks, lens, strict=True)
        ]

    def random_rows(self, at_most: int) -> int:
        return int(torch.randint(1, at_most + 1, (), generator=self.generator, device="cpu"))

    def decode_layer(self, metadata: Any, layer: int, batch: _Batch) -> None:
        spec = batch.spec
        keys, values, scales = self.layers(spec)[layer]
        call = batch.outputs[layer], batch.query, keys, values, batch.block_tables, spec.head_dim**-0.5
        self.adapter.decode(metadata, layer, *call, **scales)

    def decode(self, metadata: Any, batch: _Batch) -> None:
        for layer in range(_NUM_LAYERS):
            self.decode_layer(metadata, layer, batch)

    def compare(self, where: str, batch: _Batch, lens: Sequence[int], others: Mapping[str, Sequence[int]]) -> None:
        """Every row of every layer against the dense answer for `lens`; `others` are lengths to recognise."""
        wanted_lens = torch.tensor(lens, dtype=torch.int32, device="cpu")
        for layer, output in enumerate(batch.outputs):
            wanted = self._reference(batch, layer, batch.query, batch.block_tables, wanted_lens)
            errors = _row_errors(output, wanted, batch.spec.query_length)
            for row, error in enumerate(errors.tolist()):
                if not error <= ROW_ERROR:
                    what = self._what_was_decoded(batch, layer, row, lens[row], error, others)
                    raise BuilderFailure(f"{where}: {what}")

    def _reference(
        self, batch: _Batch, layer: int, query: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor
    ) -> torch.Tensor:
        spec = batch.spec
        keys, values, scales = self.layers(spec)[layer]
        return reference_decode(
            query.cpu(),
            keys.cpu(),
            values.cpu(),
            tables.cpu(),
            lens,
            spec.head_dim**-0.5,
            query_length=spec.query_length,
            sliding_window=spec.sliding_window,
            kv_layout=spec.kv_layout,
            **scales,
        )

    def _what_was_decoded(
        self, batch: _Batch, layer: int, row: int, wanted: int, error: float, others: Mapping[str, Sequence[int]]
    ) -> str:
        """Which length's answer a wrong row is."""
        length = batch.spec.query_length
        found = batch.outputs[layer][row * length : (row + 1) * length]
        if found.isnan().all():
            return f"row {row} was not written, lengths say {wanted}"
        num_lens = self.longest + self.adapter.draft_passes + 1
        query = batch.query[row * length : (row + 1) * length].repeat(num_lens, 1, 1)
        tables = batch.block_tables[row : row + 1].expand(num_lens, -1)
        answers = self._reference(batch, layer, query, tables, torch.arange(num_lens, dtype=torch.int32, device="cpu"))
        errors = _row_errors(found.repeat(num_lens, 1, 1), answers, length)
        if not errors.min() <= ROW_ERROR:
            return (
                f"row {row} is {error:.2g} away from the answer for its {wanted} tokens, and is that of no other length"
            )
        decoded = int(errors.argmin())
        known = [name for name, lens in others.items() if row < len(lens) and lens[row] == decoded]
        hint = f" ({decoded} is what {' and '.join(known)} had)" if known else ""
        return f"row {row} decoded {decoded} tokens' work, lengths say {wanted}{hint}"


def _row_errors(output: torch.Tensor, wanted: torch.Tensor, query_length: int) -> torch.Tensor:
    """float64[rows]: the distance relative to the answer's norm; an empty row is right only if it is exactly 0."""
    rows = output.shape[0] // query_length
    wanted = wanted.reshape(rows, -1)
    difference = (output.to("cpu", torch.float64).reshape(rows, -1) - wanted).norm(dim=1)
    norm = wanted.norm(dim=1)
    return torch.where(norm > 0, difference / norm, torch.where(difference == 0, 0.0, torch.inf))


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Whatever the builder or planlife raises in here failed at `where`."""
    try:
        yield
    except (BuilderFailure, NotImplementedError):
        raise
    except Exception as error:
        raise BuilderFailure(f"{where}: {type(error).__name__}: {error}") from error


class _Run:
    """One scenario on one adapter."""

    def __init__(self, adapter: BuilderAdapter, seed: int, double: AiterDouble | None = None) -> None:
        self.adapter = adapter
        self.manager = adapter.manager
        self.world = _World(adapter, seed)
        self._double = double
        self._num_violations = len(double.violations) if double else 0
        self._num_decodes = double.decodes if double else 0
        self._num_keys_at_seal = double.compiles if double else 0
        self.manager.add_hook(self._note_seal)
        self.last: dict[str, list[int]] = {}  # lengths that a wrong row may have decoded, by what they were

    def _counters(self) -> tuple[int, int]:
        """(plan_for calls that wanted a plan, refreshes)."""
        counters = self.manager.report().counters
        return counters["hits"] + counters["misses"] + counters["fallbacks"], counters["refreshes"]

    def _note_seal(self, event: Event) -> None:
        if event.kind == "seal" and self._double:
            self._num_keys_at_seal = self._double.compiles

    def _check_events(self, where: str) -> None:
        """Nothing fell back, and aiter's double has nothing against what ran."""
        if self._double and len(self._double.violations) > self._num_violations:
            raise BuilderFailure(f"{where}: aiter's double objects: {self._double.violations[self._num_violations]}")
        for event in self.world.events:
            if event.kind == "fallback":
                raise BuilderFailure(f"{where}: took the fallback: {event.reason}")
        self.world.events.clear()

    def check_planned(self, where: str, before: tuple[int, int], num_steps: int, *, eager: bool) -> None:
        """Each step was planned, once, and nothing fell back."""
        self._check_events(where)
        calls, refreshes = (now - then for now, then in zip(self._counters(), before, strict=True))
        if eager and calls < num_steps:
            raise BuilderFailure(
                f"{where}: plan_for was called {calls} times, wanted {num_steps}: the layers decoded by an older plan, "
                "or without one."
            )
        if self.adapter.spec.shared_lengths and refreshes > num_steps:
            raise BuilderFailure(
                f"{where}: refreshed {refreshes} times, wanted at most {num_steps}: the {_NUM_LAYERS} layers of a step "
                "share one refresh if its Step has an owner (a new object for each step); micro-batches need their own "
                "ubatch index."
            )

    def check_lens(
        self, where: str, metadata: Any, lens: Sequence[int], rows: int, padding: Sequence[int]
    ) -> list[int]:
        """The builder's lengths say what the step is; returns them, padded rows included."""
        buffer = self.adapter.context_lens(metadata)
        found: list[int] = buffer.tolist()
        if len(found) != rows:
            raise BuilderFailure(f"{where}: context_lens has {len(found)} rows, wanted {rows}: the padded batch.")
        for row, length in enumerate(found):
            if row < len(lens) and length != lens[row]:
                raise BuilderFailure(f"{where}: context_lens[{row}] is {length}, wanted {lens[row]}.")
            if row >= len(lens) and length not in padding:
                raise BuilderFailure(
                    f"{where}: context_lens[{row}] is {length}, wanted {padding[0]}: the row is padding."
                )
        return found

    @staticmethod
    def check_address(where: str, lens: torch.Tensor, captured: torch.Tensor) -> None:
        if lens.data_ptr() != captured.data_ptr():
            raise BuilderFailure(
                f"{where}: the lengths are at {lens.data_ptr():#x}, and the graph captured those at "
                f"{captured.data_ptr():#x}. Keep one length buffer and write each step's lengths into it."
            )

    def capture(self, rows: int) -> _Capture:
        where, metadata, batch = self.warm_up(rows)
        return self._capture(where, [metadata], [batch])

    def warm_up(self, rows: int) -> tuple[str, Any, _Batch]:
        """Build the metadata of a size, and decode with it eagerly; engines build it more than once."""
        where = f"build_for_capture({rows})"
        with _named(where):
            self.adapter.build_for_capture(rows)
            metadata = self.adapter.build_for_capture(rows)
        batch = self.world.batch(self.adapter.spec, rows)
        self._warm_up(where, [metadata], [batch])
        return where, metadata, batch

    def capture_ubatches(self, rows: int) -> _Capture:
        ubatches = range(self.adapter.num_ubatches)
        where = f"build_ubatches_for_capture({rows})"
        with _named(where):
            metadata = list(self.adapter.build_ubatches_for_capture(rows))
        batches = [self.world.batch(self.adapter.spec, rows, ubatch) for ubatch in ubatches]
        self._warm_up(where, metadata, batches)
        return self._capture(where, metadata, batches)

    def _warm_up(self, where: str, metadata: list[Any], batches: list[_Batch]) -> None:
        for batch in batches:
            self.world.fill(batch)
        with _named(f"{where}, warm-up"):
            self._decode_interleaved(metadata, batches)
        self._check_events(f"{where}, warm-up")

    def _capture(self, where: str, metadata: list[Any], batches: list[_Batch]) -> _Capture:
        """With the metadata of the warm-up: a mark that it left must not keep the refresh out of the graph (R4)."""
        adapter, world = self.adapter, self.world
        with _named(f"{where}, context_lens"):
            buffers = [adapter.context_lens(one) for one in metadata]
        lens = [buffer.tolist() for buffer in buffers]
        drafts = range(1, adapter.draft_passes + 1) if adapter.drafts_in_graph and len(batches) == 1 else ()
        drafts_of = [world.batch(adapter.draft_spec or adapter.spec, buffers[0].shape[0]) for _ in drafts]

        def body() -> None:
            self._decode_interleaved(metadata, batches)
            draft_metadata = metadata[0]
            for draft_pass, batch in zip(drafts, drafts_of, strict=True):
                draft_metadata = adapter.prepare_mtp_decode(draft_metadata, draft_pass)
                world.decode(draft_metadata, batch)

        with _named(f"{where}, recording"):
            graph = adapter.capture(body)
        self._check_pins(where, len(batches))
        return _Capture(graph, [*batches, *drafts_of], buffers, lens)

    def _check_pins(self, where: str, num_plans: int) -> None:
        """The graph reads a plan of each micro-batch: one that reads none has recorded another kernel (R3)."""
        pinned = {event.subject for event in self.world.events if event.kind == "pin"}
        self._check_events(f"{where}, recording")
        num_found = sum(not subject.startswith("scratch/") for subject in pinned)
        if num_found < num_plans:
            raise BuilderFailure(
                f"{where}: the graph reads {num_found} plans, wanted {num_plans}. What it recorded decodes without "
                "the plan, or with another micro-batch's."
            )

    def _decode_interleaved(self, metadata: list[Any], batches: list[_Batch]) -> None:
        """Micro-batches take turns by layer, as they do when they overlap."""
        for layer in range(_NUM_LAYERS):
            for one, batch in zip(metadata, batches, strict=True):
                self.world.decode_layer(one, layer, batch)

    def step(self, number: int, capture: _Capture | None, *, drafts: bool = False) -> None:
        """One decode step, through the graph or eagerly, with its draft passes."""
        adapter, world = self.adapter, self.world
        spec = adapter.spec
        graph_rows = capture.batches[0].query.shape[0] // spec.query_length if capture else None
        num_rows = world.random_rows(graph_rows or max(adapter.capture_rows))
        in_graph = bool(capture and len(capture.batches) > 1)
        lens = world.random_lens(num_rows, at_least=spec.query_length if drafts or in_graph else 0)
        rows = graph_rows or num_rows
        how = f"replay of the {rows} row graph" if capture else "eager"
        where = f"prepare_decode, step {number} ({how})"
        before = self._counters()
        with _named(where):
            metadata = adapter.prepare_decode(lens, rows)
        all_lens = self.check_lens(where, metadata, lens, rows, (adapter.padding_tokens,))
        if capture:
            self._replay(where, capture, [metadata], [all_lens], before)
        else:
            self._decode_eagerly(where, spec, metadata, rows, all_lens, before)
        self.last = {"the step before": all_lens}
        if drafts and not in_graph:
            self._draft(number, metadata, lens, rows, capture)

    def _decode_eagerly(
        self, where: str, spec: PlanSpec, metadata: Any, rows: int, lens: list[int], before: tuple[int, int]
    ) -> None:
        """All layers of one batch outside a graph, compared, and planned exactly once."""
        batch = self.world.batch(spec, rows)
        self.world.fill(batch)
        with _named(where):
            self.world.decode(metadata, batch)
        self.world.compare(where, batch, lens, self.last)
        self.check_planned(where, before, 1, eager=True)

    def _replay(
        self, where: str, capture: _Capture, metadata: list[Any], lens: list[list[int]], before: tuple[int, int]
    ) -> None:
        """Launch, and compare every batch of the graph: micro-batches, or a step and the drafts in its graph."""
        adapter, world = self.adapter, self.world
        for one, captured in zip(metadata, capture.lens_buffers, strict=True):
            self.check_address(where, adapter.context_lens(one), captured)
        for batch in capture.batches:
            world.fill(batch)
        with _named(where):
            adapter.replay(capture.graph, *metadata)
        others = {**dict(zip(_names("build_for_capture", metadata), capture.captured_lens, strict=True)), **self.last}
        for index, batch in enumerate(capture.batches):
            if index < len(metadata):
                siblings = {f"ubatch {other}": lens[other] for other in range(len(lens)) if other != index}
                name = f"{where}, ubatch {index}" if len(metadata) > 1 else where
                world.compare(name, batch, lens[index], {**siblings, **others})
            else:
                draft_pass = index
                final = adapter.context_lens(metadata[0]).tolist()  # engines differ in whether padding advances too
                advanced = [
                    length + draft_pass if length or end else 0 for length, end in zip(lens[0], final, strict=True)
                ]
                name = f"prepare_mtp_decode, draft pass {draft_pass} of {where}"
                world.compare(name, batch, advanced, {"the pass before": [n - 1 for n in advanced]})
        self.check_planned(where, before, len(metadata), eager=False)

    def _draft(self, number: int, metadata: Any, lens: list[int], rows: int, capture: _Capture | None) -> None:
        """Draft passes: eagerly after an eager step, and through its graph after a replay if the graph fits them."""
        adapter = self.adapter
        spec = adapter.draft_spec or adapter.spec
        through_graph = capture if adapter.draft_spec is None and adapter.spec.query_length == 1 else None
        before_lens = [*lens, *[adapter.padding_tokens] * (rows - len(lens))]
        for draft_pass in range(1, adapter.draft_passes + 1):
            where = f"prepare_mtp_decode, draft pass {draft_pass} of step {number}"
            before = self._counters()
            with _named(where):
                metadata = adapter.prepare_mtp_decode(metadata, draft_pass)
            advanced = [length + draft_pass for length in lens]
            padding = (adapter.padding_tokens, adapter.padding_tokens + draft_pass)
            all_lens = self.check_lens(where, metadata, advanced, rows, padding)
            self.last = {"the pass before": before_lens}
            if through_graph:
                self._replay(where, through_graph, [metadata], [all_lens], before)
            else:
                self._decode_eagerly(where, spec, metadata, rows, all_lens, before)
            before_lens = all_lens
        self.last = {"the last draft pass": before_lens}

    def ubatch_step(self, number: int, capture: _Capture | None) -> None:
        """One step in micro-batches: all are prepared before any decodes."""
        adapter, world = self.adapter, self.world
        ubatches = range(adapter.num_ubatches)
        if capture:
            rows = capture.batches[0].query.shape[0] // adapter.spec.query_length
            lens = [world.random_lens(world.random_rows(rows)) for _ in ubatches]
            how = f"replay of the graph of {rows} rows each"
        else:
            # Equal row counts: one class, where sharing a plan would go unnoticed by shapes.
            rows = max(adapter.capture_rows) // len(ubatches) or 1
            lens = [world.random_lens(rows) for _ in ubatches]
            how = "eager"
        where = f"prepare_ubatch_decode, step {number} ({how})"
        before = self._counters()
        with _named(where):
            metadata = list(adapter.prepare_ubatch_decode(lens, rows))
        all_lens = [
            self.check_lens(
                f"{where}, ubatch {ubatch}", metadata[ubatch], lens[ubatch], rows, (adapter.padding_tokens,)
            )
            for ubatch in ubatches
        ]
        if capture:
            self._replay(where, capture, metadata, all_lens, before)
        else:
            batches = [world.batch(adapter.spec, rows, ubatch) for ubatch in ubatches]
            for batch in batches:
                world.fill(batch)
            with _named(where):
                self._decode_interleaved(metadata, batches)
            for ubatch, batch in enumerate(batches):
                siblings = {f"ubatch {other}": all_lens[other] for other in ubatches if other != ubatch}
                world.compare(f"{where}, ubatch {ubatch}", batch, all_lens[ubatch], {**siblings, **self.last})
            self.check_planned(where, before, len(metadata), eager=True)
        self.last = {f"the step before, ubatch {ubatch}": all_lens[ubatch] for ubatch in ubatches}

    def dummy_step(self, number: int, rows: int) -> None:
        where = f"prepare_dummy, step {number}"
        before = self._counters()
        batch = self.world.batch(self.adapter.spec, rows)
        self.world.fill(batch)
        with _named(where):
            metadata = self.adapter.prepare_dummy(rows)
            if metadata is not None:
                self.world.decode(metadata, batch)
        if self._counters()[1] != before[1]:
            raise BuilderFailure(f"{where}: it refreshed a plan with its made-up lengths. Pass Step(..., dummy=True).")
        if metadata is not None and any(bool(output.count_nonzero()) for output in batch.outputs):
            raise BuilderFailure(f"{where}: its layers wrote something else than zeros.")

    def finish(self) -> None:
        """Serving compiled nothing (R20), by aiter's own keys too where its double counts them."""
        compiles = self.manager.report().counters["compiles_after_seal"]
        if compiles:
            raise BuilderFailure(f"{compiles} specialisations were compiled after the capture phase: warm every class.")
        if self._double is None:
            return
        self._double.check()
        self._check_events("the scenario")
        if self._double.decodes == self._num_decodes:
            raise BuilderFailure(
                f"aiter's double decoded nothing: the manager's backend is {self.manager.report().backend!r}. "
                "Give it backend='aiter'."
            )
        num_new = self._double.compiles - self._num_keys_at_seal
        if num_new:
            first = self._double.compiled[-num_new]
            raise BuilderFailure(f"aiter would have compiled {num_new} kernels after the capture phase: {first}.")


def _names(where: str, metadata: Sequence[Any]) -> list[str]:
    return [where] if len(metadata) == 1 else [f"{where}, ubatch {ubatch}" for ubatch in range(len(metadata))]


def _replayed(run: _Run, num_steps: int) -> None:
    """Every graph, right after its capture and then in turn."""
    captures = _capture_all(run)
    for number in range(1, num_steps + 1):
        run.step(number, captures[number % len(captures)])


def _eager(run: _Run, num_steps: int) -> None:
    """Without graphs, but after a capture phase: an eager engine warms up too (R8)."""
    with run.manager.capture_phase():
        for rows in run.adapter.capture_rows:
            run.warm_up(rows)
    for number in range(1, num_steps + 1):
        run.step(number, None)


def _drafts(run: _Run, num_steps: int) -> None:
    """Every step is followed by its draft passes."""
    if not run.adapter.draft_passes:
        raise Unsupported("draft_passes is 0")
    captures = _capture_all(run)
    for number in range(1, num_steps + 1):
        capture = None if number % 2 else captures[number // 2 % len(captures)]
        run.step(number, capture, drafts=True)


def _ubatches(run: _Run, num_steps: int) -> None:
    """Micro-batches in flight together, eagerly and in one graph."""
    captures = _capture_ubatches(run)
    for number in range(1, num_steps + 1):
        run.ubatch_step(number, None if number % 2 else captures[number // 2 % len(captures)])


def _dummies(run: _Run, num_steps: int) -> None:
    """A dummy step before every real one."""
    if not run.adapter.has_dummies:
        raise Unsupported("has_dummies is False")
    captures = _capture_all(run)
    for number in range(1, num_steps + 1):
        run.dummy_step(number, max(run.adapter.capture_rows))
        run.step(number, None if number % 2 else captures[number // 2 % len(captures)])


def _mixed(run: _Run, num_steps: int) -> None:
    """All of it, in turn, on one builder."""
    adapter = run.adapter
    captures = _capture_all(run)
    ub_captures = _capture_ubatches(run) if adapter.num_ubatches else []
    for number in range(1, num_steps + 1):
        capture = captures[number % len(captures)]
        kind = number % 5
        if kind == 1 and ub_captures:
            run.ubatch_step(number, ub_captures[number % len(ub_captures)] if number % 2 else None)
        elif kind == 3 and adapter.has_dummies:
            run.dummy_step(number, max(adapter.capture_rows))
        else:
            run.step(number, None if kind == 2 else capture, drafts=bool(adapter.draft_passes) and kind != 4)


def _capture_all(run: _Run) -> list[_Capture]:
    with run.manager.capture_phase():
        return [run.capture(rows) for rows in sorted(run.adapter.capture_rows, reverse=True)]


def _capture_ubatches(run: _Run) -> list[_Capture]:
    """The two largest graphs, halved."""
    if run.adapter.num_ubatches < 2:
        raise Unsupported("num_ubatches is below 2")
    sizes = sorted({rows // run.adapter.num_ubatches for rows in run.adapter.capture_rows} - {0}, reverse=True)
    with run.manager.capture_phase():
        return [run.capture_ubatches(rows) for rows in sizes[:2]]


_SCENARIOS: dict[str, Callable[[_Run, int], None]] = {
    "replayed": _replayed,
    "eager": _eager,
    "drafts": _drafts,
    "ubatches": _ubatches,
    "dummies": _dummies,
    "mixed": _mixed,
}
SCENARIOS = tuple(_SCENARIOS)


def run_scenario(
    name: str,
    factory: Callable[[], BuilderAdapter],
    *,
    num_steps: int = 72,
    seed: int = 0,
    double: AiterDouble | None = None,
) -> None:
    """Make a builder, run one of SCENARIOS on it, close it.

    double: the one of aiter that the builder's manager decodes by (`planlife.testing.aiter_machine`), best with
        on_violation="record". What it objects to is the builder's failure, and so is a kernel that it would have
        compiled after the capture phase.

    Raises BuilderFailure where the builder breaks a rule, Unsupported where it has no such steps.
    """
    with torch.inference_mode():
        with _named("the factory"):
            adapter = factory()
        try:
            run = _Run(adapter, seed, double)
            _SCENARIOS[name](run, num_steps)
            run.finish()
        finally:
            adapter.close()


def check_builder(
    factory: Callable[[], BuilderAdapter], *, num_steps: int = 72, seed: int = 0, double: AiterDouble | None = None
) -> list[str]:
    """Run every scenario that the builder has steps for, each on a builder of its own; returns their names.

    double: as for `run_scenario`.

    Raises BuilderFailure.
    """
    done = []
    for name in SCENARIOS:
        try:
            run_scenario(name, factory, num_steps=num_steps, seed=seed, double=double)
        except Unsupported:
            continue
        done.append(name)
    return done
