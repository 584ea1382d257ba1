"""Step logs are written by one line in an engine and read back as they were; a broken one is named by file and line."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import random
import threading
import time
from pathlib import Path

import pytest

from planlife import CapacityLadder, Step, record, step_log
from planlife.errors import ConfigError
from planlife.step_log import MAX_BLOCK_STEPS, StepLogWriter, is_step_log, stream_step_log
from planlife.trace import TraceError
from planlife.trace_file import TraceFile
from tests.eventually import EVENTUALLY_S

from .fake_world import FakeWorld, Owner, spec

GOOD = '{"planlife_steps":1,"dt_us":[0,5],"rows":[3,0]}\n'


def steps_of(path) -> list[tuple[int, int, str, int]]:
    return [
        (
            block.dt_us[i],
            block.rows[i],
            block.sites[block.site[i] if block.site else 0],
            block.ubatch[i] if block.ubatch else 0,
        )
        for block in stream_step_log(path)
        for i in range(len(block.rows))
    ]


@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.gz"])
def test_what_was_written_is_read(tmp_path, name):
    chance = random.Random(0)
    steps = [
        (chance.randrange(10**6), chance.randrange(300), chance.choice(["target", 'dra"ft\n']), chance.randrange(2))
        for _ in range(2 * MAX_BLOCK_STEPS + 17)
    ]
    with StepLogWriter(tmp_path / name) as writer:
        for step in steps:
            writer.add(*step)
    assert steps_of(tmp_path / name) == steps
    assert is_step_log(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_a_log_of_one_site_and_ubatch_has_two_columns_and_copies_block_by_block(tmp_path):
    with StepLogWriter(tmp_path / "a") as writer:
        writer.add(0, 3)
        writer.add(5, 0)
    assert (tmp_path / "a").read_text("utf-8") == GOOD
    with StepLogWriter(tmp_path / "b") as writer:
        writer.add_blocks(stream_step_log(tmp_path / "a"))
    assert (tmp_path / "b").read_text("utf-8") == GOOD


def test_a_byte_order_mark_crlf_and_blank_lines_are_read(tmp_path):
    path = tmp_path / "steps"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n\r\n").encode() + GOOD.encode())
    assert steps_of(path) == [(0, 3, "default", 0), (5, 0, "default", 0)] * 2


def test_a_request_trace_is_no_step_log(tmp_path):
    path = tmp_path / "requests"
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 4}\n')
    assert not is_step_log(path)
    path.write_text("")
    assert not is_step_log(path)


BROKEN = {
    "no json": ("{", "a JSON object"),
    "not an object": ("[1]", "a JSON object"),
    "nan": (GOOD.replace("5", "NaN"), "a JSON object"),
    "infinity": (GOOD.replace("5", "-Infinity"), "a JSON object"),
    "deep": ("[" * 100_000, "a JSON object"),
    "no version": ('{"dt_us":[0],"rows":[3]}', "planlife_steps must be 1"),
    "another version": (GOOD.replace("1", "2", 1), "planlife_steps must be 1.*got 2"),
    "version true": (GOOD.replace("1", "true", 1), "planlife_steps must be 1.*got True"),
    "missing column": ('{"planlife_steps":1,"rows":[3]}', "dt_us must be a list"),
    "unknown column": (GOOD.replace('"rows"', '"tokens":[1,2],"rows"'), "tokens"),
    "column of a word": (GOOD.replace("[3,0]", '"30"'), "rows must be a list"),
    "negative rows": (GOOD.replace("3", "-3"), "rows must be a whole number.*got -3"),
    "negative time": (GOOD.replace("5", "-5"), "dt_us must be a whole number.*got -5"),
    "huge rows": (GOOD.replace("3", "2147483648"), "rows.*2147483648"),
    "endless digits": (GOOD.replace("3", "9" * 5000), "a JSON object"),
    "fraction": (GOOD.replace("5", "5.0"), "dt_us.*got 5.0"),
    "bool": (GOOD.replace("3", "true"), "rows.*got True"),
    "null": (GOOD.replace("3", "null"), "rows.*got None"),
    "unequal columns": (GOOD.replace("[0,5]", "[0]"), "dt_us has 1 entries and rows has 2"),
    "site out of range": (GOOD.replace('"rows"', '"site":[0,1],"rows"'), "site.*got 1"),
    "nameless site": (GOOD.replace('"rows"', '"sites":[""],"rows"'), "sites must be a list of names"),
    "sites of numbers": (GOOD.replace('"rows"', '"sites":[1],"rows"'), "sites must be a list of names"),
    "negative ubatch": (GOOD.replace('"rows"', '"ubatch":[0,-1],"rows"'), "ubatch.*got -1"),
    "no utf-8": (b"\xff\xfe", "no UTF-8"),
    "endless line": (b" " * (1 << 20) + b"x", "longer than"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_block_is_named_by_file_and_line(tmp_path, kind):
    content, message = BROKEN[kind]
    path = tmp_path / "the log"
    path.write_bytes(GOOD.encode() + (content if isinstance(content, bytes) else content.encode()))
    with pytest.raises(TraceError, match=message) as caught:
        steps_of(path)
    assert f"{str(path)!r}, line 2: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("content", ["", "\n\n", '{"planlife_steps":1,"dt_us":[],"rows":[]}'])
def test_a_log_without_a_step_is_refused(tmp_path, content):
    path = tmp_path / "empty"
    path.write_text(content)
    with pytest.raises(TraceError, match="at least one"):
        steps_of(path)


def test_a_truncated_gzip_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "cut.gz"
    chance = random.Random(0)
    with StepLogWriter(path) as writer:
        for _ in range(5 * MAX_BLOCK_STEPS):
            writer.add(chance.randrange(10**9), chance.randrange(10**6))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cut.gz', line [23]: cannot read on: "):
        steps_of(path)
    path.write_bytes(gzip.compress(GOOD.encode())[:-4])
    with pytest.raises(TraceError, match="cannot read on"):
        steps_of(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match="none' cannot be opened: No such file"):
        is_step_log(tmp_path / "none")
    with pytest.raises(TraceError, match="path"):
        TraceFile("a\0b")
    with pytest.raises(ConfigError, match="path"):
        StepLogWriter("a\0b")


def test_recording_takes_one_line_and_notes_each_step_once(tmp_path):
    world = FakeWorld(ubatches=2)
    world.warm()
    path = tmp_path / "steps.jsonl"
    recorder = record(world.manager, path)
    for rows in (3, 3, 5):
        step = world.step([7] * rows)
        plan = world.manager.plan_for(step)
        assert plan.rows == rows
        assert world.manager.plan_for(step) is plan  # the next layer, or the replay
    world.manager.plan_for(world.step([7] * 2, ubatch=1))
    dummy = world.step([7] * 2, dummy=True)
    world.manager.plan_for(dummy)
    world.manager.plan_for(dummy)
    world.manager.plan_for(world.step([7] * 2, dummy=True))
    recorder.close()
    recorder.close()
    world.manager.plan_for(world.step([7]))
    steps = steps_of(path)
    assert [(rows, site, ubatch) for _, rows, site, ubatch in steps] == [
        (3, "default", 0),
        (3, "default", 0),
        (5, "default", 0),
        (2, "default", 1),
        (0, "default", 0),
        (0, "default", 0),
    ]
    assert steps[0][0] == 0
    assert "plan_for" not in vars(world.manager)


def test_an_owner_at_the_address_of_a_dead_one_is_another_step(tmp_path):
    """An engine's per-step object is often made where the last one was."""
    world = FakeWorld()
    world.warm()
    with record(world.manager, tmp_path / "steps"):
        owner = Owner()
        world.manager.plan_for(world.step([7, 7], owner=owner))
        address = id(owner)
        owner = world.owner = None
        later = [Owner()]
        while id(later[-1]) != address and len(later) < 100_000:
            later.append(Owner())
        assert id(later[-1]) == address
        world.manager.plan_for(world.step([7, 7], owner=later[-1]))
    assert len(steps_of(tmp_path / "steps")) == 2


def test_a_step_that_finds_no_room_at_each_layer_is_one_step(tmp_path):
    world = FakeWorld(fallback=lambda *call, **extras: None)
    world.options["budget_bytes"] = world.manager.min_budget_bytes()
    world.manager.close()
    world.manager = world.new_manager()
    world.warm()
    world.manager.plan_for(world.step([7] * world.rows))
    with world.manager.graph() as graph:
        world.manager.plan_for(world.step([7] * world.rows))
    with record(world.manager, tmp_path / "steps"):
        for rows in (1, 1, 2):
            step = world.step([7] * rows)
            plans = {world.manager.plan_for(step) for _ in range(3)}
            assert {plan.route for plan in plans} == {"fallback"}
    assert [rows for _, rows, _, _ in steps_of(tmp_path / "steps")] == [1, 1, 2]
    world.manager.release(graph)


def test_what_is_planned_inside_a_recording_is_no_step(tmp_path):
    world = FakeWorld()
    world.warm()
    with record(world.manager, tmp_path / "steps"):
        world.manager.plan_for(world.step([7]))
        with world.manager.graph():
            world.manager.plan_for(world.step([7, 7]))
    assert [rows for _, rows, _, _ in steps_of(tmp_path / "steps")] == [1]


def test_a_disk_that_is_full_ends_the_recording_and_no_step(tmp_path, caplog, monkeypatch):
    world = FakeWorld()
    world.warm()
    recorder = record(world.manager, tmp_path / "steps")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StepLogWriter, "add", full)
    with caplog.at_level(logging.ERROR, "planlife"):
        for _ in range(3):
            assert world.manager.plan_for(world.step([7])).route == "planned"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left" in caplog.text
    monkeypatch.undo()
    recorder.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_ends_the_recording_and_leaves_no_file_open(monkeypatch, caplog):
    world = FakeWorld()
    world.warm()
    monkeypatch.setattr(step_log, "MAX_BLOCK_STEPS", 1)
    recorder = record(world.manager, "/dev/full")
    file = recorder._writer._file
    for _ in range(500):  # more than what waits in the file's buffer
        world.manager.plan_for(world.step([7] * 8))
    assert "No space left" in caplog.text
    assert file.closed
    recorder.close()


def test_steps_of_two_threads_are_noted_in_the_order_of_their_times(tmp_path, monkeypatch):
    """A log whose time ran backwards could not be read again."""
    world = FakeWorld(ubatches=2)
    world.warm()
    now, is_first_waiting, is_second_done = itertools.count(1000, 1000), threading.Event(), threading.Event()

    def clock() -> int:
        drawn = next(now)
        if drawn == 1000:
            is_first_waiting.set()
            is_second_done.wait(0.2)
        return drawn

    def second() -> None:
        is_first_waiting.wait(EVENTUALLY_S)
        world.manager.plan_for(steps[1])
        is_second_done.set()

    steps = [world.step([7], ubatch=0), world.step([7], ubatch=1)]
    with record(world.manager, tmp_path / "steps"):
        monkeypatch.setattr(time, "monotonic_ns", clock)
        thread = threading.Thread(target=second)
        thread.start()
        world.manager.plan_for(steps[0])
        thread.join()
        monkeypatch.undo()
    assert [(dt_us, ubatch) for dt_us, _, _, ubatch in steps_of(tmp_path / "steps")] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("is_first_to_end", [True, False])
def test_two_recordings_at_once_end_each_on_its_own(tmp_path, is_first_to_end):
    world = FakeWorld()
    world.warm()
    one, two = record(world.manager, tmp_path / "one"), record(world.manager, tmp_path / "two")
    world.manager.plan_for(world.step([7]))
    ended, other = (one, two) if is_first_to_end else (two, one)
    ended.close()
    world.manager.plan_for(world.step([7, 7]))
    other.close()
    world.manager.plan_for(world.step([7, 7, 7]))
    lengths = {
        recorder: [rows for _, rows, _, _ in steps_of(tmp_path / name)]
        for recorder, name in ((one, "one"), (two, "two"))
    }
    assert lengths[ended] == [1]
    assert lengths[other] == [1, 2]
    assert "plan_for" not in vars(world.manager)


def test_a_manager_that_is_off_or_has_two_sites_is_recorded_too(tmp_path):
    world = FakeWorld(sites={"target": spec(), "draft": spec()})
    world.warm()
    with record(world.manager, tmp_path / "two"):
        world.manager.plan_for(world.step([7], site="draft"))
        world.manager.plan_for(world.step([7, 7], site="target"))
    assert [(rows, site) for _, rows, site, _ in steps_of(tmp_path / "two")] == [(1, "draft"), (2, "target")]
    off = FakeWorld(enabled=False, fallback=lambda *call, **extras: None, ladder=CapacityLadder([8]))
    with record(off.manager, tmp_path / "off"):
        off.manager.plan_for(Step(off.lens[0][:4], owner=1))
    assert [rows for _, rows, _, _ in steps_of(tmp_path / "off")] == [4]
    assert json.loads((tmp_path / "off").read_text("utf-8"))["planlife_steps"] == 1
