"""What the rig reads and makes up: traces, generated chats, and the order in which they arrive."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvcached.rig.chats import CHAT_BLOCK_TOKENS, generate_chats
from kvcached.rig.request_feed import IN_FLIGHT, Feed
from kvcached.workload.request import Arrival, Request
from kvcached.workload.trace import TraceError, read_trace

if TYPE_CHECKING:
    from pathlib import Path

LINE = {"timestamp": 1500, "input_length": 1100, "output_length": 600, "hash_ids": [7, 8, 9]}


def write_trace(tmp_path: Path, *lines: object) -> Path:
    """Write a trace of ``lines`` and return its path."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_trace_gives_requests_in_blocks(tmp_path: Path) -> None:
    """Full prompt blocks keep their hash ids; a partial one is not named by its own, as the answer fills it."""
    (arrival,) = read_trace(write_trace(tmp_path, LINE))
    assert arrival.at_ms == 0
    request = arrival.request
    assert (request.prompt_tokens, request.output_tokens) == (1100, 600)
    assert request.content[:2] == (7, 8)
    assert len(request.content) == (1100 + 600) // 512
    assert request.content[2] != 9


def test_answers_of_two_requests_differ(tmp_path: Path) -> None:
    """Two requests with equal prompts share the prompt's blocks and no block of their answers."""
    first, second = (one.request.content for one in read_trace(write_trace(tmp_path, LINE, LINE)))
    assert first[:2] == second[:2]
    assert first[2] != second[2]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", {"timestamp": 1}, {**LINE, "hash_ids": [1]}, {**LINE, "input_length": 0}, {**LINE, "hash_ids": "no"}],
)
def test_bad_line_is_named(tmp_path: Path, line: Any) -> None:  # noqa: ANN401 - any JSON
    """A line that is no request is refused with file and line number."""
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: "):
        read_trace(write_trace(tmp_path, LINE, line))


def bytes_of(*lines: object) -> bytes:
    """Return lines of a trace as a file holds them."""
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "NaN is not a number in JSON"),
        ('{"timestamp": Infinity, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "Infinity is not a number"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "out of range"),
        ({**LINE, "timestamp": "1500"}, "timestamp is '1500' and not a number"),
        ({**LINE, "timestamp": True}, "timestamp is True and not a number"),
        ({**LINE, "timestamp": 1_700_000_000_000}, "more than a year after the first request"),
        ({**LINE, "input_length": 1100.5}, "input_length is 1100.5 and not a whole number"),
        ({**LINE, "input_length": "1_100"}, "input_length is '1_100' and not a whole number"),
        ({**LINE, "output_length": 10**15}, "more than 10,000,000 tokens"),
        ({**LINE, "hash_ids": [7, 8, 9.5]}, "a hash id is 9.5 and not a whole number"),
        ({**LINE, "hash_ids": 7}, "hash_ids is 7 and not a list"),
        ({"timestamp": 1}, "it has no 'input_length'"),
        ("[1]", r"\[1\] is not an object"),
        ("[" * 100_000, "not a request"),
        ({**LINE, "input_length": 16, "hash_ids": [7, 8]}, "set --block-tokens to the number of tokens per hash id"),
    ],
)
def test_number_that_only_a_parser_likes_is_refused_in_plain_words(tmp_path: Path, line: object, words: str) -> None:
    """A value that is not a number of the format is refused with file, line and text."""
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 2: .*{words}"):
        read_trace(write_trace(tmp_path, {**LINE, "timestamp": 0}, line))


@pytest.mark.parametrize("begin", [0, 27_482, 1_700_000_000_000, 1_700_000_000_000.5])
def test_time_begins_with_the_first_request(tmp_path: Path, begin: float) -> None:
    """Absolute stamps are replayed from the first one; a stamp before that arrives with it."""
    lines = [{**LINE, "timestamp": begin + gap} for gap in (5, 0, 105)]
    assert [one.at_ms for one in read_trace(write_trace(tmp_path, *lines))] == [0, 0, 100]


def test_packed_and_marked_files_are_read(tmp_path: Path) -> None:
    """A byte order mark, gzip, both, CRLF and blank lines change nothing."""
    expected = read_trace(write_trace(tmp_path, LINE, LINE))
    plain = bytes_of(LINE, LINE)
    marked = b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n\r\n")
    for number, content in enumerate((plain, marked, gzip.compress(plain), gzip.compress(marked))):
        path = tmp_path / str(number)
        path.write_bytes(content)
        assert read_trace(path) == expected


def test_packed_trace_comes_through_a_pipe(tmp_path: Path) -> None:
    """A trace is read once from its beginning, so it may come from a named pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(bytes_of(LINE)),))
    writer.start()
    assert len(read_trace(pipe)) == 1
    writer.join()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer, .* git lfs pull"),
        (b"\xef\xbb\xbf[\n" + bytes_of(LINE), "is a JSON array; the format has one object on each line"),
        (gzip.compress(bytes_of(LINE))[:-9], "cannot be read"),
        (bytes_of(LINE) + b"\xff\xfe\n", "line 2: is not UTF-8 text"),
        (b"\x1f\x8b nonsense", "cannot be read"),
    ],
    ids=["pointer", "array", "cut gzip", "no text", "no gzip"],
)
def test_file_that_is_something_else_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    """A file that is no trace is refused by what it is."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_hash_ids_of_another_block_size(tmp_path: Path) -> None:
    """With a block size given, a hash id covers that many tokens."""
    line = {"timestamp": 0, "input_length": 33, "output_length": 40, "hash_ids": [7, 8, 9]}
    (arrival,) = read_trace(write_trace(tmp_path, line), block_tokens=16)
    assert arrival.request.content[:2] == (7, 8)
    assert len(arrival.request.content) == (33 + 40) // 16


def test_missing_trace_is_named(tmp_path: Path) -> None:
    """A file that is not there is refused by name."""
    with pytest.raises(TraceError, match=r"nothing\.jsonl"):
        read_trace(tmp_path / "nothing.jsonl")


def test_generated_load_depends_on_the_seed_alone() -> None:
    """Another process with another hash seed generates the same load."""
    code = "from kvcached.rig.chats import generate_chats; print(hash(tuple(generate_chats(200, 5))))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{hash(tuple(generate_chats(200, 5)))}\n"}
    assert list(generate_chats(200, 5)) != list(generate_chats(200, 6))


def test_generated_chats_grow_and_share_system_prompts() -> None:
    """Most prompt blocks were seen before, in an earlier turn or in a shared system prompt."""
    seen: set[tuple[int, ...]] = set()
    blocks = hits = 0
    for arrival in generate_chats(500, 1):
        request = arrival.request
        assert len(request.content) == request.total_tokens // CHAT_BLOCK_TOKENS
        for length in range(1, request.prompt_tokens // CHAT_BLOCK_TOKENS + 1, 8):
            blocks += 1
            hits += request.content[:length] in seen
        seen.update(request.content[:length] for length in range(1, len(request.content) + 1))
    assert hits / blocks > 0.7


@pytest.mark.parametrize("capacity", [16, 100, 1000, 10_000])
def test_generated_requests_fit_a_small_cache(capacity: int) -> None:
    """A load made for a small cache has no request that the cache could not hold."""
    load = [arrival.request for arrival in generate_chats(300, 3, capacity * 3 // 4)]
    assert max(request.total_tokens for request in load) <= max(capacity, 3)


def arrivals(*times_ms: float) -> list[Arrival]:
    """Return arrivals at ``times_ms``, numbered in order."""
    return [Arrival(at_ms, Request(index, 10, 1, ())) for index, at_ms in enumerate(times_ms)]


def test_feed_follows_time_stamps() -> None:
    """With a speed, requests arrive when their time stamps divided by it have passed, however many are in progress."""
    feed = Feed(arrivals(0, 1000, 2000), speed=10)
    feed.start(50.0)
    assert [one.index for one in feed.take(50.0, 10_000)] == [0]
    assert feed.take(50.05, 0) == []
    assert feed.next_due() == pytest.approx(50.1)
    assert [one.index for one in feed.take(50.2, 0)] == [1, 2]
    assert feed.exhausted
    assert feed.next_due() is None


def test_feed_without_speed_keeps_the_engine_busy() -> None:
    """Without a speed, requests arrive as others finish, whatever their time stamps."""
    feed = Feed(arrivals(*range(0, 1_000_000, 1000)), speed=None)
    feed.start(0.0)
    assert len(feed.take(0.0, 0)) == IN_FLIGHT
    assert len(feed.take(0.0, IN_FLIGHT)) == 0
    assert len(feed.take(0.0, IN_FLIGHT - 3)) == 3
