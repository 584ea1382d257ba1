"""Sites from a JSON file: read as PlanManager would take them, or refused with file and place."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from planlife import CapacityLadder, ConfigError, PlanSpec
from planlife.sites import SitesError, read_sites

GOOD: dict[str, Any] = {
    "num_q_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 128,
    "page_size": 16,
    "max_context_tokens": 4096,
    "ladder": [4, 1, 2],
}


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "sites.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_sites_are_plan_specs_and_ladders_by_name(tmp_path):
    sparse = {**GOOD, "q_dtype": "float16", "sliding_window": 128, "lane": "draft", "shared_lengths": False}
    found = read_sites(written(tmp_path, {"dense": GOOD, "sparse": sparse}))
    assert found.ladders == dict.fromkeys(("dense", "sparse"), CapacityLadder([1, 2, 4]))
    assert found.specs["dense"] == PlanSpec(8, 1, 128, 16, max_context_tokens=4096)
    assert found.specs["sparse"] == PlanSpec(
        *(8, 1, 128, 16),
        max_context_tokens=4096,
        q_dtype="float16",
        sliding_window=128,
        lane="draft",
        shared_lengths=False,
    )


def test_every_field_of_a_plan_spec_can_be_written(tmp_path):
    one = PlanSpec(4, 2, 64, 32, max_context_tokens=512, kv_dtype="float8_e4m3fn", scales="per_token", query_length=3)
    values = {field.name: getattr(one, field.name) for field in fields(PlanSpec)}
    assert read_sites(written(tmp_path, {"a": {**values, "ladder": [1]}})).specs == {"a": one}


def test_a_byte_order_mark_is_accepted(tmp_path):
    assert read_sites(written(tmp_path, b"\xef\xbb\xbf" + json.dumps({"a": GOOD}).encode())).specs.keys() == {"a"}


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{"dense": {\n "num_q_heads": 8,,\n}}', ["line 2, column 19"]),
        (b"", ["line 1"]),
        (b'{"a": \xff}', ["UTF-8", "byte 6"]),
        (b'{"a": {"head_dim": NaN}}', ["NaN is no JSON number"]),
        (b'{"a": {}, "a": {}}', ["'a' comes twice"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["sites.json", "4300"]),  # Python words it
        (b"[" * 100_000, ["recursion"]),
        ([GOOD], ["wanted an object of sites by name", "got a list"]),
        ({}, ["got an empty object"]),
        (GOOD, ["site 'num_q_heads'", "got 8", "put it inside a named site"]),
        ({"dense": [1]}, ["site 'dense'", "got a list"]),
        ({"dense": {**GOOD, "num_heads": 8}}, ["site 'dense'", "no field 'num_heads'", "did you mean 'num_"]),
        ({"dense": {**GOOD, "page_sise": 8}}, ["no field 'page_sise'", "did you mean 'page_size'?"]),
        ({"dense": {**GOOD, "zzz": 8}}, ["no field 'zzz'", "the fields are ladder, num_q_heads"]),
        ({"dense": {"head_dim": 128}}, ["ladder, num_q_heads, num_kv_heads, page_size, max_context_tokens must be"]),
        ({"dense": {**GOOD, "num_q_heads": "8"}}, ["site 'dense'", "num_q_heads must be an int, got '8' (str)"]),
        ({"dense": {**GOOD, "head_dim": 128.0}}, ["head_dim must be an int, got 128.0 (float)"]),
        ({"dense": {**GOOD, "q_dtype": ["bfloat16"]}}, ["q_dtype must be one of bfloat16"]),
        ({"dense": {**GOOD, "shared_lengths": 1}}, ["shared_lengths must be a bool, got 1"]),
        (
            {"dense": {**GOOD, "softmax_scale": 0}},
            ["softmax_scale must be a number on the host, finite and > 0, got 0"],
        ),
        ({"dense": {**GOOD, "ladder": 64}}, ["ladder must be a list of row counts", "got 64"]),
        ({"dense": {**GOOD, "ladder": []}}, ["at least one class"]),
        ({"dense": {**GOOD, "ladder": [1, "2"]}}, ["a class must be an int, got '2'"]),
        ({"dense": {**GOOD, "plan_of": "target"}}, ["plan_of of site 'dense' must name another site"]),
        ({"dense": {**GOOD, "ladder": [0]}}, ["a class must be in [1,", "got 0"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_file_and_place(content, parts, tmp_path):
    path = written(tmp_path, content)
    with pytest.raises(SitesError) as caught:
        read_sites(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text
    assert [part for part in parts if part not in text] == [], text
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(("given", "scale"), [({}, None), ({"softmax_scale": None}, None), ({"softmax_scale": 1}, 1.0)])
def test_a_site_may_have_a_softmax_scale_of_its_own(given, scale, tmp_path):
    (spec,) = read_sites(written(tmp_path, {"dense": {**GOOD, **given}})).specs.values()
    assert (spec.softmax_scale, type(spec.softmax_scale)) == (scale, type(scale))


@pytest.mark.parametrize("name", ["gone.json", "", "zero\0byte"])
def test_a_file_that_cannot_be_read_is_refused_by_name(name, tmp_path):
    with pytest.raises(SitesError, match="cannot be read"):
        read_sites(str(tmp_path / name))


def test_the_example_on_the_page_about_the_doctor_is_one(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text("utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    assert read_sites(written(tmp_path, example.encode())).specs.keys() == {"dense", "draft"}
