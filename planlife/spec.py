"""What is fixed about a call site (`PlanSpec`) and what varies per forward (`Step`). No torch in here."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, InitVar, dataclass
from numbers import Real
from typing import Any

from .errors import ConfigError, shown
from .identity import Shared
from .unserved import NON_CAUSAL, is_several, refuse_unserved

#: Bytes per element of the dtypes that queries and KV caches may have.
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1}
QUERY_DTYPES = ("bfloat16", "float16", "float32")
FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz")
#: As engines keep FP8 caches, which says nothing of their format.
BYTE_DTYPES = ("uint8", "int8")
_KEPT_AS_BYTES = (
    " An FP8 cache that is kept as bytes has the format that was written into it: name that, and hand pa_decode a "
    "view, such as cache.view(torch.float8_e4m3fn)."
)
KV_LAYOUTS = ("nhd", "hnd", "packed")
SCALE_KINDS = ("none", "per_tensor", "per_token")
#: Lengths, page numbers and extents are int32 in tables and kernels.
INT32_MAX = 2**31 - 1
#: The default budget is 2 tasks for each.
MAX_COMPUTE_UNITS = INT32_MAX // 2
#: Bytes are int64 where memory is asked for, and so is a window for aiter, which takes wider ones than any length.
INT64_MAX = 2**63 - 1


def dtype_name(dtype: object) -> str:
    """`torch.bfloat16` or "bfloat16" -> "bfloat16"; the core keeps names only."""
    return str(dtype).removeprefix("torch.")


def check_int(what: str, value: object, *, at_least: int, at_most: int | None = None, way_out: str = "") -> int:
    """`value` if it is a plain int in range, else a ConfigError that names it. A bool is not an int here."""
    if type(value) is not int:
        raise ConfigError(f"{what} must be an int, got {value!r} ({type(value).__name__}).{way_out}")
    if value < at_least or (at_most is not None and value > at_most):
        bounds = f">= {at_least}" if at_most is None else f"in [{at_least}, {at_most}]"
        raise ConfigError(f"{what} must be {bounds}, got {value}.{way_out}")
    return value


_WINDOW_FORMS = (
    " Wanted is the number of keys that a query token sees, itself included, or (keys before, keys after) as "
    "flash-attn has it; 0, -1 or None sees all keys."
)


def window_tokens(value: object, query_length: object) -> int:
    """Keys that a query token sees, itself included, 0 = all: of a `sliding_window` in any form that engines have.

    None, -1, 0: all. (keys before, keys after): -1 = all; none are after the last query token, and causal attention
    sees none after the others.

    Raises ConfigError for what is none of these.
    """
    if value is None or (type(value) is int and value == -1):
        return 0
    if not isinstance(value, (tuple, list)):
        return check_int("sliding_window", value, at_least=0, at_most=INT64_MAX, way_out=_WINDOW_FORMS)
    if len(value) != 2:
        raise ConfigError(f"sliding_window must be one int or (keys before, keys after), got {value!r}.{_WINDOW_FORMS}")
    before, after = value
    check_int("sliding_window's keys before", before, at_least=-1, at_most=INT64_MAX - 1, way_out=_WINDOW_FORMS)
    check_int("sliding_window's keys after", after, at_least=-1, way_out=_WINDOW_FORMS)
    if after > 0 and query_length != 1:
        raise ConfigError(
            f"sliding_window's keys after must be 0 or -1 with query_length {query_length}, got {after}: {NON_CAUSAL}."
        )
    return before + 1 if before >= 0 else 0


def positive_number(value: object) -> float | None:
    """A number on the host as a float; None for everything else, and for what is not finite and > 0."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if 0 < number < math.inf else None


@dataclass(frozen=True)
class PlanSpec:
    """One call site: what all its layers and steps have in common.

    num_q_heads, num_kv_heads, head_dim, page_size: local to this rank; num_q_heads is a multiple of num_kv_heads.
    max_context_tokens: the longest context, MTP tokens included, that any step or replay may carry (R7). No key
        past it is read: of a longer row, query tokens that end within it are exact and those past it see the keys up
        to it; on aiter none of such a row's tokens is exact.
    q_dtype, kv_dtype: torch dtypes or their names; kept as names.
    kv_layout: "nhd" [pages, page, kv_heads, D], "hnd" [pages, kv_heads, page, D], "packed": K [pages, kv_heads,
        D/x, page, x], V [pages, kv_heads, page/x, D, x], or of FP8 also [pages, kv_heads, D, page], x = 16 bytes.
    scales: "none" for 16- and 32-bit caches; "per_tensor" or "per_token" for FP8 caches.
    query_length: query tokens per row (MTP verify: draft tokens + 1). Token p of Q sees keys
        [max(0, L-Q+1+p-W), max(0, L-Q+1+p)), L the row's length, W the window.
    sliding_window: keys a query token sees, itself included; 0, -1 or None = all. At most 2**63 - 1. Also (keys before,
        keys after), as flash-attn has it: (W - 1, 0), (-1, -1). Kept as the int.
    max_partitions: most tasks per row, at most the device's compute units; None = all of them (R39).
    workgroup_budget: tasks to plan for over all KV heads; None = the backend's default, 2 x compute units unless it
        knows better for this site (R38). `report().sites` shows the numbers in use.
    softmax_scale: what this site's pa_decode is called with; None = 1/sqrt(head_dim). aiter compiles it in, and a call
        with another one is refused there; the torch and Triton backends take any with each call. Finite and > 0.
    shared_lengths: False if layers of one step may differ in lengths: then every plan_for refreshes (R14).
    lane: sites of one lane run one after another and share scratch; sites in flight together need different lanes.
    plan_of: another site whose dense plans this one uses as its own (R48): a draft and its target of another
        query_length. Both have the same num_kv_heads, max_context_tokens, shared_lengths and ladder and no window;
        max_partitions and workgroup_budget are that site's; each has a softmax_scale of its own. They take turns on
        one set of tables, which a refresh for either overwrites: sites that can be in flight together must not share
        plans, whatever their lanes. A lane of its own gives a site separate scratch.
    logits_soft_cap, alibi_slopes, value_head_dim, causal, attn_type: what no backend serves, named as engines do, so
        that their attributes can be passed straight through. Neutral values (None, 0, value_head_dim == head_dim,
        causal=True, attn_type="decoder") pass and are not kept, and so does non-causal or cross attention with
        query_length 1 and no window: a row sees all its keys. Others are refused with the reason.

    Raises ConfigError. Capture: n/a. Syncs: no. Allocates: no.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    _: KW_ONLY
    max_context_tokens: int
    q_dtype: Any = "bfloat16"
    kv_dtype: Any = "bfloat16"
    kv_layout: str = "nhd"
    scales: str = "none"
    query_length: int = 1
    sliding_window: Any = 0
    max_partitions: int | None = None
    workgroup_budget: int | None = None
    softmax_scale: float | None = None
    shared_lengths: bool = True
    lane: str = "main"
    plan_of: str | None = None
    logits_soft_cap: InitVar[Any] = None
    alibi_slopes: InitVar[Any] = None
    value_head_dim: InitVar[Any] = None
    causal: InitVar[Any] = None
    attn_type: InitVar[Any] = None

    def __post_init__(
        self, logits_soft_cap: Any, alibi_slopes: Any, value_head_dim: Any, causal: Any, attn_type: Any
    ) -> None:
        given = {
            "logits_soft_cap": logits_soft_cap,
            "alibi_slopes": alibi_slopes,
            "value_head_dim": value_head_dim,
            "causal": causal,
            "attn_type": attn_type,
            "query_length": self.query_length if is_several(self.query_length) else None,
        }
        object.__setattr__(self, "sliding_window", window_tokens(self.sliding_window, self.query_length))
        refuse_unserved(given, self)
        object.__setattr__(self, "q_dtype", dtype_name(self.q_dtype))
        object.__setattr__(self, "kv_dtype", dtype_name(self.kv_dtype))
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "page_size", "query_length"):
            check_int(name, getattr(self, name), at_least=1, at_most=INT32_MAX)
        for name in ("max_partitions", "workgroup_budget"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1, at_most=INT32_MAX, way_out=" None takes the default.")
        if self.softmax_scale is not None:
            scale = positive_number(self.softmax_scale)
            if scale is None:
                raise ConfigError(
                    f"softmax_scale must be a number on the host, finite and > 0, got {shown(self.softmax_scale)}. "
                    "None is 1/sqrt(head_dim)."
                )
            object.__setattr__(self, "softmax_scale", scale)
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and {self.num_kv_heads}."
            )
        check_int("max_context_tokens", self.max_context_tokens, at_least=1, at_most=INT32_MAX)
        if self.max_context_tokens < self.query_length:
            raise ConfigError(
                f"max_context_tokens must cover query_length, got {self.max_context_tokens} < {self.query_length}."
            )
        for name, known in (
            ("q_dtype", QUERY_DTYPES),
            ("kv_dtype", tuple(DTYPE_BYTES)),
            ("kv_layout", KV_LAYOUTS),
            ("scales", SCALE_KINDS),
        ):
            if getattr(self, name) not in known:
                way_out = _KEPT_AS_BYTES if name == "kv_dtype" and self.kv_dtype in BYTE_DTYPES else ""
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.{way_out}")
        if (self.kv_dtype in FP8_DTYPES) != (self.scales != "none"):
            raise ConfigError(
                f"scales={self.scales!r} does not go with kv_dtype={self.kv_dtype}: FP8 caches take per_tensor or "
                "per_token scales, other caches take none."
            )
        if type(self.shared_lengths) is not bool:
            raise ConfigError(f"shared_lengths must be a bool, got {self.shared_lengths!r}.")
        if type(self.lane) is not str or not self.lane:
            raise ConfigError(f"lane must be a non-empty string, got {self.lane!r}.")
        if self.plan_of is not None and (type(self.plan_of) is not str or not self.plan_of):
            raise ConfigError(f"plan_of must be the name of a site, or None, got {self.plan_of!r}.")

    @property
    def group_size(self) -> int:
        """Query heads per KV head (GQA)."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def query_rows_per_kv_head(self) -> int:
        """Query rows that one KV head of one sequence serves: query_length x group."""
        return self.query_length * self.group_size


_NO_KEY = (None, None)


class Step(Shared):
    """One forward of the model, as far as a plan is concerned. Immutable.

    context_lens: int32[rows], on the manager's device, contiguous; tokens per row, MTP tokens included, 0 = empty.
    site: which PlanSpec of the manager.
    owner: an object, or a number, that is new for each step: the engine's metadata of this step, or a step counter.
        Compared by identity (a plain int by value), never with ==. None: always refresh.
    revision: raised by a draft pass that advances the lengths in place.
    ubatch: micro-batch index, 0 <= ubatch < manager's ubatches.
    dummy: an idle rank's or padding step: touches no plan, output is zeros. Zero rows mean the same.
    max_tokens: the longest of these lengths, where the engine knows it on the host. Checked against
        `max_context_tokens` and against the columns of the block tables before anything is launched; None: unchecked.

    A copy, also a deep one, is the Step itself: its owner counts by identity, and its lengths are the buffer that was
    planned. It cannot be pickled (TypeError).

    Raises nothing: the manager checks, so that its message can name what it was configured with.
    """

    __slots__ = ("__weakref__", "context_lens", "dummy", "key", "max_tokens", "owner", "revision", "site", "ubatch")

    _ONE_ONLY = (
        "a Step cannot be pickled: its owner counts by identity, and its lengths are a buffer of this process. Send "
        "the numbers, and make a Step where plan_for is called."
    )

    context_lens: Any
    site: str
    owner: object
    revision: int
    ubatch: int
    dummy: bool
    max_tokens: int | None
    #: What plan_for looks up. A bool equals an int as a dict key and in a comparison of marks, so a step with a field
    #: of the wrong type gets a key that nobody has.
    key: tuple[object, object]

    def __init__(
        self,
        context_lens: Any,
        *,
        site: str = "default",
        owner: object = None,
        revision: int = 0,
        ubatch: int = 0,
        dummy: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        _set_lens(self, context_lens)
        _set_site(self, site)
        _set_owner(self, owner)
        _set_revision(self, revision)
        _set_ubatch(self, ubatch)
        _set_dummy(self, dummy)
        _set_max_tokens(self, max_tokens)
        is_right = type(site) is str and type(ubatch) is int and type(revision) is int and type(dummy) is bool
        is_right = is_right and (max_tokens is None or (type(max_tokens) is int and max_tokens >= 0))
        _set_key(self, (site, ubatch) if is_right else _NO_KEY)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Step is immutable; make a new one instead of setting {name}")

    def __repr__(self) -> str:
        return (
            f"Step(site={self.site!r}, ubatch={self.ubatch!r}, revision={self.revision!r}, "
            f"owner={type(self.owner).__name__}, dummy={self.dummy!r})"
        )


# The slots' own setters: an immutable Step costs no more to make than a mutable one.
_set_lens = vars(Step)["context_lens"].__set__
_set_site = vars(Step)["site"].__set__
_set_owner = vars(Step)["owner"].__set__
_set_revision = vars(Step)["revision"].__set__
_set_ubatch = vars(Step)["ubatch"].__set__
_set_dummy = vars(Step)["dummy"].__set__
_set_max_tokens = vars(Step)["max_tokens"].__set__
_set_key = vars(Step)["key"].__set__
