"""Every call that the kernels cannot take is refused before a launch, naming what was found and what was wanted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from planlife.call_check import CallChecker
from planlife.errors import ConfigError
from planlife.spec import PlanSpec
from planlife.testing import FakeDevice, FakeTensor

ORDER = (
    "plan_rows",
    "class_rows",
    "output",
    "query",
    "key_cache",
    "value_cache",
    "block_tables",
    "softmax_scale",
    "key_scale",
    "value_scale",
    "sinks",
    "lse",
)


class RefusingNumber(FakeTensor):
    """A tensor on the device: whoever looks at its value reads it back."""

    def read_back(self, *_: object) -> Any:
        raise AssertionError("read back")

    __float__ = __bool__ = __eq__ = __ne__ = __lt__ = __gt__ = __repr__ = read_back  # type: ignore[assignment]
    __hash__ = FakeTensor.__hash__


def make_spec(**options: Any) -> PlanSpec:
    return PlanSpec(8, 2, 64, 16, max_context_tokens=4096, **options)


def bf16(*shape: int, **options: Any) -> FakeTensor:
    return FakeTensor(shape, "bfloat16", **options)


def good_call(**changed: Any) -> dict[str, Any]:
    """A call of a plan of 5 rows in a class of 8."""
    return {
        "plan_rows": 5,
        "class_rows": 8,
        "output": bf16(5, 8, 64),
        "query": bf16(5, 8, 64),
        "key_cache": bf16(10, 16, 2, 64),
        "value_cache": bf16(10, 16, 2, 64),
        "block_tables": FakeTensor((5, 7)),
        "softmax_scale": 0.125,
        "key_scale": None,
        "value_scale": None,
        "sinks": None,
        "lse": None,
        **changed,
    }


def check(checker: CallChecker, call: dict[str, Any]) -> None:
    checker.check(*(call[name] for name in ORDER))


def checker_of(spec: PlanSpec | None = None) -> CallChecker:
    return CallChecker("dense", make_spec() if spec is None else spec, FakeDevice())


def test_a_good_call_passes_again_and_again():
    checker, call = checker_of(), good_call()
    for _ in range(3):
        check(checker, call)
        check(checker, good_call())


WRONG = {
    "query on another device": ({"query": bf16(5, 8, 64, device="other")}, "query's device is other.*fake"),
    "query of another dtype": ({"query": FakeTensor((5, 8, 64), "float16")}, "query's dtype is float16.*bfloat16"),
    "query with other heads": ({"query": bf16(5, 4, 64)}, r"query's shape is \[5, 4, 64\].*\[rows \* 1, 8, 64\]"),
    "query with another head size": ({"query": bf16(5, 8, 128)}, r"query's shape is \[5, 8, 128\]"),
    "query of two axes": ({"query": bf16(5, 512)}, r"query's shape is \[5, 512\]"),
    "query with fewer rows than the plan": ({"query": bf16(4, 8, 64)}, "row count is 4.*5 to 8"),
    "query with more rows than the class": ({"query": bf16(9, 8, 64)}, "row count is 9.*5 to 8"),
    "query with a strided last axis": (
        {"query": bf16(5, 8, 64, strides=(1024, 128, 2))},
        "query's last stride is 2, wanted 1",
    ),
    "query that is no tensor": ({"query": [1.0]}, r"query is \[1.0\] \(list\), wanted a tensor"),
    "output on another device": ({"output": bf16(5, 8, 64, device="other")}, "output's device is other"),
    "output of another dtype": ({"output": FakeTensor((5, 8, 64), "float32")}, "output's dtype is float32"),
    "output of another shape": ({"output": bf16(6, 8, 64)}, r"output's shape is \[6, 8, 64\].*\[5, 8, 64\]"),
    "output with a strided last axis": ({"output": bf16(5, 8, 64, strides=(1024, 128, 2))}, "output's last stride"),
    "output with one row for all": (
        {"output": bf16(5, 8, 64, strides=(0, 64, 1))},
        r"output's strides is \[0, 64, 1\], wanted memory of its own for each number",
    ),
    "cache with another page": ({"key_cache": bf16(10, 32, 2, 64)}, r"key_cache's shape.*32.*\[pages, 16, 2, 64\]"),
    "cache with another head size": ({"key_cache": bf16(10, 16, 2, 32)}, "key_cache's shape.*head_dim 64"),
    "cache with other heads": ({"value_cache": bf16(10, 16, 4, 64)}, "value_cache's shape.*num_kv_heads 2"),
    "cache of the other layout": ({"key_cache": bf16(10, 2, 16, 64)}, "key_cache's shape.*kv_layout 'nhd'"),
    "cache of five axes": ({"key_cache": bf16(10, 2, 8, 16, 8)}, "key_cache's shape"),
    "cache of another dtype": ({"key_cache": FakeTensor((10, 16, 2, 64), "float16")}, "key_cache's dtype is float16"),
    "cache on another device": ({"value_cache": bf16(10, 16, 2, 64, device="cpu")}, "value_cache's device is cpu"),
    "cache without pages": ({"key_cache": bf16(0, 16, 2, 64)}, r"key_cache's shape is \[0, 16, 2, 64\]"),
    "caches of different page counts": ({"value_cache": bf16(9, 16, 2, 64)}, "page count is 9.*10"),
    "cache with a strided last axis": (
        {"key_cache": bf16(10, 16, 2, 64, strides=(4096, 256, 128, 2))},
        "key_cache's last stride is 2",
    ),
    "tables of int64": ({"block_tables": FakeTensor((5, 7), "int64")}, "block_tables's dtype is int64.*int32"),
    "tables of one axis": ({"block_tables": FakeTensor((35,))}, r"block_tables' shape is \[35\]"),
    "tables with fewer rows than the plan": ({"block_tables": FakeTensor((4, 7))}, "at least the plan's 5 rows"),
    "tables without columns": ({"block_tables": FakeTensor((5, 0))}, "at least 1 page"),
    "tables on another device": ({"block_tables": FakeTensor((5, 7), device="cpu")}, "block_tables's device is cpu"),
    "scale 0": ({"softmax_scale": 0.0}, "softmax_scale is 0.0, wanted finite and > 0"),
    "scale below 0": ({"softmax_scale": -1.0}, "softmax_scale is -1.0"),
    "scale nan": ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
    "scale inf": ({"softmax_scale": float("inf")}, "softmax_scale is inf"),
    "scale True": ({"softmax_scale": True}, r"softmax_scale is True \(bool\)"),
    "scale as text": ({"softmax_scale": "0.1"}, r"softmax_scale is '0.1' \(str\)"),
    "scale on the device": ({"softmax_scale": RefusingNumber(1, "float32")}, "a tensor on fake.*number on the host"),
    "scale of a cache that has none": (
        {"key_scale": 1.0},
        r"key_scale is 1.0 \(float\), wanted None: a bfloat16 cache",
    ),
    "tensor scale of a cache that has none": (
        {"value_scale": RefusingNumber(1, "float32")},
        "value_scale is a tensor on fake, wanted None",
    ),
    "sinks of another shape": ({"sinks": FakeTensor(7, "float32")}, r"sinks' shape is \[7\], wanted \[8\]"),
    "sinks on another device": ({"sinks": FakeTensor(8, "float32", "cpu")}, "sinks' device is cpu"),
    "lse of another dtype": ({"lse": FakeTensor((5, 8), "bfloat16")}, "lse's dtype is bfloat16, wanted float32"),
    "lse of another shape": ({"lse": FakeTensor((5, 2), "float32")}, r"lse's shape is \[5, 2\], wanted \[5, 8\]"),
    "lse of the class's rows": ({"lse": FakeTensor((8, 8), "float32")}, r"lse's shape is \[8, 8\], wanted \[5, 8\]"),
    "lse with heads first": (
        {"lse": FakeTensor((5, 8), "float32", strides=(1, 5))},
        "lse's contiguity is False, wanted True",
    ),
    "lse on another device": ({"lse": FakeTensor((5, 8), "float32", "cpu")}, "lse's device is cpu, wanted the manager"),
    "lse that is no tensor": ({"lse": True}, r"lse is True \(bool\), wanted a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "after good calls"])
def test_a_wrong_call_names_what_was_found_and_wanted(name, warm):
    changed, named = WRONG[name]
    checker, call = checker_of(), good_call()
    if warm:
        check(checker, call)
        check(checker, call)
    for _ in range(2):
        with pytest.raises(ConfigError, match=named) as refused:
            check(checker, {**call, **changed})
        assert "site 'dense'" in str(refused.value)
    check(checker, call)


RIGHT = {
    "as many rows as the class": {"query": bf16(8, 8, 64), "output": bf16(8, 8, 64)},
    "strided heads": {"query": bf16(5, 8, 64, strides=(64, 320, 1)), "output": bf16(5, 8, 64, strides=(1024, 128, 1))},
    "one query for all rows": {"query": bf16(5, 8, 64, strides=(0, 64, 1))},
    "caches as halves of one row": {
        name: bf16(10, 16, 2, 64, strides=(4096, 256, 128, 1)) for name in ("key_cache", "value_cache")
    },
    "one page broadcast": {name: bf16(10, 16, 2, 64, strides=(0, 128, 64, 1)) for name in ("key_cache", "value_cache")},
    "tables with more rows and columns": {"block_tables": FakeTensor((9, 99))},
    "an int scale": {"softmax_scale": 1},
    "sinks": {"sinks": FakeTensor(8, "float32")},
    "lse": {"lse": FakeTensor((5, 8), "float32")},
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_unusual_but_right_passes(name):
    checker = checker_of()
    for call in (good_call(**RIGHT[name]), good_call(), good_call(**RIGHT[name])):
        check(checker, call)


def test_numpy_scales_are_numbers():
    numpy = pytest.importorskip("numpy")
    checker = checker_of()
    check(checker, good_call(softmax_scale=numpy.float32(0.5)))
    with pytest.raises(ConfigError, match="softmax_scale"):
        check(checker, good_call(softmax_scale=numpy.float64("nan")))
    with pytest.raises(ConfigError, match="softmax_scale"):
        check(checker, good_call(softmax_scale=numpy.bool_(True)))


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_a_numpy_number_is_a_scale_of_the_whole_cache_and_a_numpy_array_is_none(name):
    """Both have a dtype, a shape and a device, as a tensor has."""
    numpy = pytest.importorskip("numpy")
    checker = checker_of(make_spec(scales="per_tensor", **FP8))
    scales = {"key_scale": 0.5, "value_scale": 0.5}
    for number in (numpy.float32(0.5), numpy.float64(0.5), numpy.int64(2)):
        check(checker, good_call(**PACKED, **{**scales, name: number}))
    for wrong in (numpy.float32("nan"), numpy.float64(-1), numpy.bool_(True), numpy.ones(1, numpy.float32)):
        with pytest.raises(ConfigError, match=rf"{name} is .*wanted (finite|a number on the host)"):
            check(checker, good_call(**PACKED, **{**scales, name: wrong}))


@pytest.mark.parametrize("name", ["query", "output", "key_cache", "value_cache", "block_tables", "sinks", "lse"])
def test_a_numpy_array_is_not_taken_for_a_tensor(name):
    numpy = pytest.importorskip("numpy")
    checker, right = checker_of(), {**good_call(), **RIGHT["sinks"], **RIGHT["lse"]}
    check(checker, right)
    with pytest.raises(ConfigError, match=rf"(?s){name}.* is array\(.*\(ndarray\), wanted"):
        check(checker, {**right, name: numpy.zeros(right[name].shape, numpy.float32)})


def test_a_message_does_not_print_all_of_a_list_that_is_no_tensor():
    checker = checker_of()
    for tables, said in (([[7] * 9] * 999, "..."), ([[7, 7]], "")):  # the short one is named whole
        with pytest.raises(ConfigError, match=r"block_tables is \[\[7, 7.*\(list\), wanted a tensor") as refused:
            check(checker, good_call(block_tables=tables))
        assert len(str(refused.value)) < 300 and said in str(refused.value)


def test_true_is_not_taken_for_a_scale_of_one_that_passed():
    checker = checker_of()
    check(checker, good_call(softmax_scale=1.0))
    with pytest.raises(ConfigError, match=r"True \(bool\)"):
        check(checker, good_call(softmax_scale=True))


def test_query_rows_count_in_steps_of_the_query_length():
    checker = checker_of(make_spec(query_length=3))
    check(checker, good_call(query=bf16(15, 8, 64), output=bf16(15, 8, 64)))
    with pytest.raises(ConfigError, match=r"query's shape is \[16, 8, 64\], wanted \[rows \* 3, 8, 64\]") as refused:
        check(checker, good_call(query=bf16(16, 8, 64), output=bf16(16, 8, 64)))
    assert "non-uniform query lengths (or another than the site's) are not served: " in str(refused.value)
    with pytest.raises(ConfigError, match=r"query's shape is \[16, 4, 64\]") as refused:  # other heads: another fault
        check(checker, good_call(query=bf16(16, 4, 64), output=bf16(16, 4, 64)))
    assert "non-uniform" not in str(refused.value)
    with pytest.raises(ConfigError, match="row count is 9"):
        check(checker, good_call(query=bf16(27, 8, 64), output=bf16(27, 8, 64)))


@pytest.mark.parametrize(
    "changed", [{"value_cache": bf16(10, 16, 2, 48)}, {"output": bf16(5, 8, 48)}], ids=["value cache", "output"]
)
def test_values_of_another_head_dim_than_the_keys_are_told_by_their_name(changed):
    with pytest.raises(ConfigError, match=r"MLA \(values of another head_dim than the keys\) is not served: .*kernel"):
        check(checker_of(), good_call(**changed))
    for plain in (
        {"value_cache": bf16(10, 16, 4, 64)},
        {"value_cache": bf16(0, 16, 2, 64)},
        {"key_cache": bf16(10, 16, 2, 48)},
        {"output": bf16(6, 8, 64)},
    ):
        with pytest.raises(ConfigError, match="shape") as refused:
            check(checker_of(), good_call(**plain))
        assert "MLA" not in str(refused.value)


def test_tensors_that_passed_for_one_plan_are_checked_against_the_next():
    checker, call = checker_of(), good_call()
    check(checker, call)
    with pytest.raises(ConfigError, match=r"row count is 5.*6 to 8"):
        check(checker, {**call, "plan_rows": 6})
    with pytest.raises(ConfigError, match=r"row count is 5.*2 to 4"):
        check(checker, {**call, "plan_rows": 2, "class_rows": 4})
    wide = {**call, "query": bf16(8, 8, 64), "output": bf16(8, 8, 64), "plan_rows": 8}
    with pytest.raises(ConfigError, match="block_tables' shape"):
        check(checker, wide)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query", lambda: bf16(5, 4, 64)),
        ("output", lambda: bf16(5, 4, 64)),
        ("key_cache", lambda: bf16(10, 32, 2, 64)),
        ("value_cache", lambda: bf16(10, 32, 2, 64)),
        ("block_tables", lambda: FakeTensor((4, 7))),
    ],
)
def test_a_recycled_id_is_not_taken_for_the_tensor_that_had_it(name, wrong):
    checker = checker_of()
    held = []
    for _ in range(50):
        call = good_call()
        check(checker, call)
        passed_id = id(call.pop(name))
        gc.collect(0)
        for _ in range(50):
            bad = wrong()
            if id(bad) == passed_id:
                with pytest.raises(ConfigError, match=name):
                    check(checker, {**call, name: bad})
                return
            held.append(bad)
    pytest.skip("the interpreter recycled no id")


def test_a_value_cache_is_remembered_with_its_key_cache_only():
    checker, call = checker_of(), good_call()
    check(checker, call)
    with pytest.raises(ConfigError, match="value_cache's shape"):
        check(checker, {**call, "value_cache": bf16(10, 32, 2, 64)})


def test_remembering_keeps_no_tensor_alive_and_stays_bounded():
    checker, call = checker_of(), good_call()
    caches = [bf16(10, 16, 2, 64) for _ in range(2000)]
    for cache in caches:
        check(checker, {**call, "key_cache": cache})
    assert 1 <= len(checker._caches) <= 1024
    del caches, cache
    check(checker, call)
    alive = []
    for name in ("query", "output", "key_cache", "value_cache", "block_tables"):
        alive.append(weakref.ref(call[name]))
    del call
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5


def test_the_other_layouts_have_their_own_shapes():
    hnd = {name: bf16(10, 2, 16, 64) for name in ("key_cache", "value_cache")}
    check(checker_of(make_spec(kv_layout="hnd")), good_call(**hnd))
    with pytest.raises(ConfigError, match=r"\[pages, 2, 16, 64\] \(kv_layout 'hnd'"):
        check(checker_of(make_spec(kv_layout="hnd")), good_call())


def fp8(*shape: int) -> FakeTensor:
    return FakeTensor(shape, "float8_e4m3fn")


FP8 = {"kv_layout": "packed", "kv_dtype": "float8_e4m3fn"}
PACKED = {"key_cache": fp8(10, 2, 4, 16, 16), "value_cache": fp8(10, 2, 1, 64, 16)}


def test_packed_caches_hold_sixteen_bytes_of_a_token_together():
    scales = {"key_scale": 0.5, "value_scale": 1.0}
    checker = checker_of(make_spec(scales="per_tensor", **FP8))
    check(checker, good_call(**PACKED, **scales))
    check(checker, good_call(**{**PACKED, "value_cache": fp8(10, 2, 64, 16)}, **scales))  # plain 4-D V
    with pytest.raises(ConfigError, match=r"key_cache's shape is \[10, 2, 8, 16, 8\].*\[pages, 2, 4, 16, 16\]"):
        check(checker, good_call(**{**PACKED, "key_cache": fp8(10, 2, 8, 16, 8)}, **scales))
    wide = checker_of(make_spec(kv_layout="packed"))
    bf16_caches = {"key_cache": bf16(10, 2, 8, 16, 8), "value_cache": bf16(10, 2, 2, 64, 8)}
    check(wide, good_call(**bf16_caches))
    check(wide, good_call(**{**bf16_caches, "value_cache": bf16(10, 2, 64, 16)}))  # plain 4-D V


def test_a_packed_v_may_have_fewer_pages_and_none_more():
    """K and V packed into one block of memory: V's view starts some pages behind K's."""
    scales = {name: FakeTensor((10, 2, 16), "float32") for name in ("key_scale", "value_scale")}
    checker = checker_of(make_spec(scales="per_token", **FP8))
    for num_pages in (1, 9, 10):
        for value_cache in (fp8(num_pages, 2, 1, 64, 16), fp8(num_pages, 2, 64, 16)):
            check(checker, good_call(**{**PACKED, "value_cache": value_cache}, **scales))
    for num_pages, message in ((11, "page count is 11, wanted at most key_cache's, 10"), (0, "value_cache's shape")):
        with pytest.raises(ConfigError, match=message):
            check(checker, good_call(**{**PACKED, "value_cache": fp8(num_pages, 2, 1, 64, 16)}, **scales))
    fewer = {**PACKED, "value_cache": fp8(9, 2, 1, 64, 16)}
    with pytest.raises(ConfigError, match=r"key_scale's shape is \[9, 2, 16\], wanted \[10, 2, 16\]"):
        check(checker, good_call(**fewer, **{name: FakeTensor((9, 2, 16), "float32") for name in scales}))


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf"), True])
@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_a_host_scale_is_finite_and_positive(name, scale):
    checker = checker_of(make_spec(scales="per_tensor", **FP8))
    scales = {"key_scale": 0.5, "value_scale": RefusingNumber(1, "float32")}
    check(checker, good_call(**PACKED, **scales))
    with pytest.raises(ConfigError, match=name):
        check(checker, good_call(**PACKED, **{**scales, name: scale}))


def test_an_fp8_cache_needs_both_scales_of_its_kind():
    per_token = checker_of(make_spec(scales="per_token", **FP8))
    scales = {"key_scale": FakeTensor((10, 2, 16), "float32"), "value_scale": FakeTensor((10, 2, 16), "float32")}
    check(per_token, good_call(**PACKED, **scales))
    for wrong in (None, 1.0, FakeTensor((10, 2, 16), "float16"), FakeTensor((10, 2, 16), "float32", "cpu")):
        with pytest.raises(ConfigError, match="value_scale"):
            check(per_token, good_call(**PACKED, **{**scales, "value_scale": wrong}))


def test_scales_that_passed_are_remembered_with_their_cache_and_only_while_they_live():
    checker = checker_of(make_spec(scales="per_token", **FP8))

    def scales(pages: int = 10) -> dict[str, FakeTensor]:
        return {name: FakeTensor((pages, 2, 16), "float32") for name in ("key_scale", "value_scale")}

    first = scales()
    for given in (first, first, scales(), first):
        check(checker, good_call(**PACKED, **given))
    for name in first:
        with pytest.raises(ConfigError, match=f"{name}'s shape"):
            check(checker, good_call(**PACKED, **{**first, name: FakeTensor((9, 2, 16), "float32")}))
        with pytest.raises(ConfigError, match=f"{name}'s dtype"):
            check(checker, good_call(**PACKED, **{**first, name: FakeTensor((10, 2, 16), "float64")}))
    other = {"key_cache": fp8(9, 2, 4, 16, 16), "value_cache": fp8(9, 2, 1, 64, 16)}
    with pytest.raises(ConfigError, match="key_scale's shape"):  # right for the other cache
        check(checker, good_call(**other, **first))
    check(checker, good_call(**other, **scales(9)))
    for name in ("key_scale", "value_scale"):  # what died gives None back
        given = scales()
        check(checker, good_call(**PACKED, **given))
        alive = weakref.ref(given.pop(name))
        gc.collect()
        assert alive() is None
        with pytest.raises(ConfigError, match=f"{name} is None"):
            check(checker, good_call(**PACKED, **{**given, name: None}))
