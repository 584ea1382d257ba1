"""R46: what the variables that hide and renumber devices leave, one after the other."""

from __future__ import annotations

import pytest

from planlife.visibility import read_visibility

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def test_both_variables_cut_twice_and_the_numbers_are_told():
    found = read_visibility({ROCR: "0,1,4,5", HIP: "0,1,4,5"}, "rocm")
    assert found.physical == ("0", "1")
    (line,) = found.wrong
    for part in ("ROCR_VISIBLE_DEVICES=0,1,4,5 leaves 4 devices", "0..3", "2 of its 4", "HIP_VISIBLE_DEVICES=0,1,2,3"):
        assert part in line
    as_told = read_visibility({ROCR: "0,1,4,5", HIP: "0,1,2,3"}, "rocm")  # positive control: the way out
    assert (as_told.physical, as_told.wrong) == (("0", "1", "4", "5"), ())
    alone = read_visibility({ROCR: "0,1,4,5"}, "rocm")
    assert (alone.physical, alone.wrong) == (("0", "1", "4", "5"), ())


@pytest.mark.parametrize(
    "entry", ["9" * 5000, "\u0663", "\udcff", ""], ids=["5000 digits", "another script", "a byte", ""]
)
@pytest.mark.parametrize("name", [ROCR, HIP, CUDA])
def test_what_no_driver_reads_as_an_index_ends_the_list(entry, name):
    found = read_visibility({name: f"1,{entry},0"}, "cuda" if name == CUDA else "rocm")
    assert found.physical == ("1",)
    assert "names 3 devices and leaves 1" in found.wrong[0]


def test_hip_indexes_what_rocr_left_in_its_order():
    found = read_visibility({ROCR: "6,2,7", HIP: "2,0"}, "rocm")
    assert (found.physical, found.wrong) == (("7", "6"), ())
    assert "ROCR_VISIBLE_DEVICES=6,2,7 picks from the physical devices: 0 = physical 6" in found.notes[0]
    assert "picks from the 3 that are left, renumbered from 0: 0 = physical 7, 1 = physical 6" in found.notes[1]


def test_one_device_by_its_physical_number_in_both_leaves_none():
    found = read_visibility({ROCR: "3", HIP: "3"}, "rocm")
    assert found.physical == ()
    assert "0 of its 1" in found.wrong[0] and "HIP_VISIBLE_DEVICES=0 beside it" in found.wrong[0]
    assert read_visibility({ROCR: "0", HIP: "0"}, "rocm").wrong == ()  # control: device 0 is 0 in both


@pytest.mark.parametrize(
    ("environ", "physical"),
    [
        ({}, None),
        ({HIP: "4,5"}, ("4", "5")),
        ({CUDA: "4,5"}, ("4", "5")),
        ({CUDA: "1", HIP: "4,5"}, ("4", "5")),
        ({ROCR: "4,5", CUDA: "1"}, ("5",)),
        ({ROCR: "GPU-ab12, 3"}, ("GPU-ab12", "3")),
    ],
)
def test_on_rocm_hip_is_read_before_cuda_and_after_rocr(environ, physical):
    found = read_visibility(environ, "rocm")
    assert (found.physical, found.wrong) == (physical, ())


def test_on_cuda_the_variables_of_rocm_are_not_read_and_that_is_said():
    found = read_visibility({ROCR: "0", HIP: "0", CUDA: "2,3"}, "cuda")
    assert (found.physical, found.wrong) == (("2", "3"), ())
    assert [note for note in found.notes if "is not read by a CUDA build" in note] == list(found.notes[:2])


@pytest.mark.parametrize("platform", ["cpu", "unknown"])
def test_without_a_gpu_build_none_is_read(platform):
    found = read_visibility({ROCR: "0,1,4,5", HIP: "0,1,4,5", CUDA: "7"}, platform)
    assert (found.physical, found.wrong) == (None, ())
    assert len(found.notes) == 3 and all("is not read" in note for note in found.notes)


@pytest.mark.parametrize(
    ("value", "physical", "part"),
    [
        ("", (), "leaves no device"),
        ("-1", (), "leaves no device"),
        ("1,1", (), "leaves no device"),
        ("0,x,1", ("0",), "names 3 devices and leaves 1"),
        ("0,1", ("0", "1"), None),  # positive control
    ],
)
def test_a_list_ends_at_what_is_no_device(value, physical, part):
    found = read_visibility({CUDA: value}, "cuda")
    assert found.physical == physical
    assert [part in line for line in found.wrong] == ([] if part is None else [True])


def test_where_rocr_leaves_nothing_one_line_says_so():
    found = read_visibility({ROCR: "", HIP: "0,1"}, "rocm")
    assert found.physical == () and len(found.wrong) == 1
    assert found.wrong[0].startswith("ROCR_VISIBLE_DEVICES= leaves no device")
