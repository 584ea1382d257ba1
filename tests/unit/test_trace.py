"""Every published format reads as it is; what is wrong with a file is one line that names file and line."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
from pathlib import Path

import pytest

from planlife.errors import ConfigError
from planlife.trace import Request, TraceError, read_trace

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY / "tests" / "data"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MILLISECONDS = "timestamp_ms,input_tokens,output_tokens"
GOOD = f"{MILLISECONDS}\n100,7,3\n1350,9,0\n"
GOOD_REQUESTS = [Request(0.0, 7, 3), Request(1.25, 9, 0)]


def write(tmp_path, content: str | bytes) -> Path:
    path = tmp_path / "requests.dat"  # a name that tells nothing
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert isinstance(caught.value, ConfigError)
    assert "\n" not in message
    assert "\r" not in message
    return message


def test_the_azure_trace_reads_with_its_crlf_and_seven_digit_clock():
    requests = read_trace(DATA / "azure_conversation_excerpt.csv")
    assert len(requests) == 40
    assert requests[:2] == [Request(0.0, 374, 44), Request(4.314579, 396, 109)]


def test_the_mooncake_trace_reads():
    requests = read_trace(str(DATA / "mooncake_conversation_excerpt.csv"))
    assert len(requests) == 40
    assert requests[0] == Request(0.0, 6758, 500)


def test_the_json_lines_original_reads_like_its_csv(tmp_path):
    csv = DATA / "mooncake_conversation_excerpt.csv"
    lines = []
    for row in csv.read_text("utf-8").splitlines()[1:]:
        timestamp, input_length, output_length = map(int, row.split(","))
        lines.append(
            json.dumps(
                {
                    "timestamp": timestamp,
                    "input_length": input_length,
                    "output_length": output_length,
                    "hash_ids": list(range(input_length // 512)),
                }
            )
        )
    assert read_trace(write(tmp_path, "\n".join(lines))) == read_trace(csv)


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD.rstrip("\n"),
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        "\n" + GOOD.replace("\n", "\n\n"),
        GOOD.replace(",", " , "),
        GOOD.replace("1350", "1350.0"),
        f"{AZURE}\n2024-05-10 00:00:00.5,7,3\n2024-05-10 00:00:01.7500000,9,0\n",
        f"{AZURE}\n2024-05-10 00:00:00.000930+00:00,7,3\n2024-05-10 00:00:01.250930+00:00,9,0\n",
        f"{AZURE}\n2024-02-28T23:59:59,7,3\n2024-02-29 01:00:00.25+01:00,9,0\n",
        '{"timestamp": 0, "input_length": 7, "output_length": 3}\n'
        '{"hash_ids": [1], "output_length": 0, "input_length": 9, "timestamp": 1250.0}\n',
    ],
)
def test_the_format_is_told_by_content_plain_or_gzip(tmp_path, content):
    assert read_trace(write(tmp_path, content)) == GOOD_REQUESTS
    assert read_trace(write(tmp_path, gzip.compress(content.encode()))) == GOOD_REQUESTS


def test_arrivals_keep_a_tenth_of_a_microsecond(tmp_path):
    rows = "2023-11-16 18:15:46.6805900,1,1\n2023-11-16 18:15:46.6805901,1,1\n"
    assert read_trace(write(tmp_path, f"{AZURE}\n{rows}"))[1].arrival_seconds == 1e-7


def test_equal_arrivals_are_in_order_and_earlier_ones_are_refused(tmp_path):
    assert len(read_trace(write(tmp_path, f"{MILLISECONDS}\n5,1,1\n5,1,1\n"))) == 2
    message = refusal(write(tmp_path, f"{MILLISECONDS}\n5,1,1\n2005,1,1\n1005,1,1\n"))
    assert "line 4: arrives 1 s before" in message
    assert "sort" in message


TOO_MANY = str(2**31)
BAD_ROWS = {
    "two fields": "5,6",
    "four fields": "5,6,7,8",
    "no number": "5,six,7",
    "negative tokens": "5,-6,7",
    "negative time": "-5,6,7",
    "signed": "5,+6,7",
    "empty field": "5,,7",
    "fraction of a token": "5,6.5,7",
    "huge tokens": f"5,6,{TOO_MANY}",
    "astronomic tokens": f"5,6,{'9' * 6000}",
    "huge time": f"{10**15 + 1},6,7",
    "astronomic time": f"{'9' * 6000},6,7",
    "nan": "nan,6,7",
    "nan tokens": "5,nan,7",
    "infinite": "inf,6,7",
    "exponent": "1e3,6,7",
    "digit groups": "5,1_000,7",
    "other digits": "5,٦,7",
    "bool": "5,True,7",
    "quoted": '"5","6","7"',
    "header again": MILLISECONDS,
    "clock of the other format": "2023-11-16 18:15:46,6,7",
    "zero byte": "5,6\0,7",
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row):
    path = write(tmp_path, f"{MILLISECONDS}\n1,2,3\n{row}\n9,9,9\n")
    assert refusal(path).startswith(f"trace {str(path)!r}, line 3: ")
    assert len(refusal(path)) < len(str(path)) + 200


@pytest.mark.parametrize(
    "clock",
    [
        "0",
        "2023-11-16",
        "18:15:46",
        "2023-13-16 18:15:46",
        "2023-02-30 18:15:46",
        "2023-11-16 25:15:46",
        "2023-11-16 18:15:46.",
        "2023-11-16 18:15:46.1234567890",
        "2023-11-16 18:15:46+99:99",
        "0000-11-16 18:15:46",
        "nan",
    ],
)
def test_a_bad_clock_is_named_by_file_and_line(tmp_path, clock):
    path = write(tmp_path, f"{AZURE}\n2023-11-16 18:15:46,2,3\n{clock},2,3\n")
    message = refusal(path)
    assert "line 3: TIMESTAMP must be" in message
    assert repr(clock) in message


GOOD_JSON = '{"timestamp": 1, "input_length": 2, "output_length": 3}'
BAD_JSON = {
    "cut": '{"timestamp": 5, "input_length"',
    "missing key": '{"timestamp": 5, "input_length": 6}',
    "null": '{"timestamp": 5, "input_length": null, "output_length": 7}',
    "text": '{"timestamp": 5, "input_length": "6", "output_length": 7}',
    "bool": '{"timestamp": 5, "input_length": true, "output_length": 7}',
    "negative": '{"timestamp": 5, "input_length": -6, "output_length": 7}',
    "fraction": '{"timestamp": 5, "input_length": 6.0, "output_length": 7}',
    "nan": '{"timestamp": NaN, "input_length": 6, "output_length": 7}',
    "infinite": '{"timestamp": Infinity, "input_length": 6, "output_length": 7}',
    "exponent": '{"timestamp": 1e999999999, "input_length": 6, "output_length": 7}',
    "huge": '{"timestamp": 5, "input_length": 6, "output_length": 2147483648}',
    "astronomic": f'{{"timestamp": {"9" * 6000}, "input_length": 6, "output_length": 7}}',
    "list": "[5, 6, 7]",
    "deep": '{"a":' + "[" * 200_000,
    "csv": "5,6,7",
}


@pytest.mark.parametrize("row", BAD_JSON.values(), ids=BAD_JSON)
def test_a_bad_json_line_is_named_by_file_and_line(tmp_path, row):
    path = write(tmp_path, f"{GOOD_JSON}\n{row}\n")
    assert refusal(path).startswith(f"trace {str(path)!r}, line 2: ")


def test_a_good_json_line_is_read_where_the_bad_ones_stood(tmp_path):
    assert read_trace(write(tmp_path, f"{GOOD_JSON}\n{GOOD_JSON}\n")) == [Request(0.0, 2, 3)] * 2


@pytest.mark.parametrize(
    "header",
    [
        "1,2,3",
        "timestamp,input_tokens,output_tokens",
        "input_tokens,timestamp_ms,output_tokens",
        f"{MILLISECONDS},model",
        MILLISECONDS.replace(",", ";"),
        "[1, 2, 3]",
        "<html>",
    ],
)
def test_an_unknown_header_is_refused_with_the_known_ones(tmp_path, header):
    message = refusal(write(tmp_path, f"{header}\n1,2,3\n"))
    assert "line 1: header must be" in message
    assert AZURE in message
    assert MILLISECONDS in message
    assert "JSON Lines" in message


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_refused(tmp_path, content):
    assert "the file is empty" in refusal(write(tmp_path, content))


def test_a_header_without_requests_is_refused(tmp_path):
    assert "line 1: nothing follows the header" in refusal(write(tmp_path, f"{AZURE}\n"))


def test_a_missing_file_and_a_directory_are_refused_by_name(tmp_path):
    missing = tmp_path / "gone.csv"
    assert refusal(missing).startswith(f"trace {str(missing)!r} cannot be opened: ")
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize("path", [0, True, None, b"trace.csv", "tra\0ce.csv", ["trace.csv"]])
def test_what_is_no_path_is_refused(path):
    assert repr(path) in refusal(path)


def test_a_file_name_with_a_line_end_still_makes_one_line(tmp_path):
    refusal(tmp_path / "two\nlines.csv")


@pytest.mark.parametrize("kept", [2, 5, 12, 40, -9, -8, -1])
def test_a_gzip_cut_short_is_refused_although_its_rows_were_good(tmp_path, kept):
    whole = gzip.compress((DATA / "azure_conversation_excerpt.csv").read_bytes())
    assert len(read_trace(write(tmp_path, whole))) == 40
    message = refusal(write(tmp_path, whole[:kept]))
    assert ", line " in message
    assert "cannot read on" in message


def test_a_damaged_gzip_is_refused(tmp_path):
    whole = bytearray(gzip.compress(GOOD.encode()))
    whole[-6] ^= 0xFF  # its checksum
    assert "cannot read on" in refusal(write(tmp_path, bytes(whole)))
    whole[10:16] = b"\xff" * 6  # its first compressed block
    assert "cannot read on" in refusal(write(tmp_path, bytes(whole)))
    assert "cannot read on" in refusal(write(tmp_path, gzip.compress(GOOD.encode()) + b"tail"))


def test_binary_garbage_is_refused_on_its_first_bad_line(tmp_path):
    chance = random.Random(3)
    for _ in range(60):
        garbage = chance.randbytes(chance.randint(1, 400))
        assert ", line " in refusal(write(tmp_path, garbage))
        assert ", line " in refusal(write(tmp_path, GOOD.encode() + b"2000,9,\xff" + garbage))
        assert ", line " in refusal(write(tmp_path, gzip.compress(garbage)))
    assert "line 1: no UTF-8 text" in refusal(write(tmp_path, GOOD.encode("utf-16")))
    assert "line 4: no UTF-8 text" in refusal(write(tmp_path, GOOD.encode() + b"\x80"))


def test_a_file_without_line_ends_is_refused_before_it_is_read_whole(tmp_path):
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(1 << 34)  # sparse: reading it whole would end in a MemoryError
    assert "longer than 1048576 bytes" in refusal(path)
    bomb = io.BytesIO()
    with gzip.GzipFile(fileobj=bomb, mode="wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    assert "longer than 1048576 bytes" in refusal(write(tmp_path, bomb.getvalue()))


def test_the_shipped_sample_is_what_its_script_writes(monkeypatch, tmp_path):
    namespace: dict[str, object] = {"__name__": "make_sample_trace", "__file__": str(REPOSITORY / "scripts" / "x")}
    exec((REPOSITORY / "scripts" / "make_sample_trace.py").read_text("utf-8"), namespace)
    shipped = REPOSITORY / "planlife" / "demo" / "sample_trace.csv"
    namespace["SAMPLE"] = tmp_path / "again.csv"
    namespace["main"]()
    assert (tmp_path / "again.csv").read_bytes() == shipped.read_bytes()
    requests = read_trace(shipped)
    contexts = sorted(request.input_tokens for request in requests)
    assert len(requests) >= 300
    assert contexts[0] >= 20
    assert contexts[int(0.95 * len(contexts))] <= 900 < contexts[-1]  # mostly short, a few long


def full_traces() -> Path | None:
    configured = os.environ.get("PLANLIFE_TRACES")
    if configured:
        return Path(configured)
    beside = REPOSITORY.parent / "shared" / "traces"
    return beside if beside.is_dir() else None


@pytest.mark.skipif(full_traces() is None, reason="full traces: set PLANLIFE_TRACES to the directory that holds them")
@pytest.mark.parametrize(
    ("name", "num_requests", "last"),
    [
        ("azure_llm_2023_conv.csv", 19_366, Request(3501.721937, 197, 183)),
        ("mooncake_conversation.csv", 12_031, Request(3536.999, 20_774, 508)),
    ],
)
def test_a_full_trace_reads_to_its_last_request(name, num_requests, last):
    requests = read_trace(full_traces() / name)
    assert len(requests) == num_requests
    assert requests[-1] == last
