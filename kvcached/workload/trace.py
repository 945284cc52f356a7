"""Reads request traces in the Mooncake format: one JSON object a line, one hash id per block of prompt tokens.

Nothing is guessed: what is no such file, or holds a number that only a parser of Python would take, is refused by line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING, Any

from kvcached.workload.request import Arrival, Request

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable
    from pathlib import Path
    from typing import BinaryIO, NoReturn

TRACE_BLOCK_TOKENS = 512
"""How many tokens one hash id of the format covers by default; other collections use smaller blocks."""

MAX_LENGTH_TOKENS = 10_000_000
"""How long a prompt or an answer may be; a longer one is a mistake in the file."""

_GZIP = b"\x1f\x8b"
_LFS = b"version https://git-lfs"
_ANSWER_SALT = 11


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and reason."""


def read_trace(path: Path, block_tokens: int = TRACE_BLOCK_TOKENS) -> list[Arrival]:
    """Return the requests of the file at ``path``, plain or gzipped, in its order. Raises :class:`TraceError`.

    Time counts from the first request, so a file whose stamps are a calendar's is replayed as one that begins at 0.
    """
    try:
        with path.open("rb") as file:
            return _read(str(path), _unpacked(str(path), file), block_tokens)
    except (OSError, EOFError, zlib.error) as error:
        message = f"trace {path} cannot be read: {error}"
        raise TraceError(message) from error


def _unpacked(path: str, file: io.BufferedReader) -> BinaryIO:
    """Look at the first bytes, and return the file as lines of text, or say what it is instead."""
    begin = file.peek(len(_LFS))
    if begin.startswith(_LFS):
        message = f"trace {path} is a Git LFS pointer, not the file itself; fetch it with git lfs pull"
        raise TraceError(message)
    if begin.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if begin.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        message = f"trace {path} is a JSON array; the format has one object on each line"
        raise TraceError(message)
    return file


def _read(path: str, lines: Iterable[bytes], block_tokens: int) -> list[Arrival]:
    arrivals: list[Arrival] = []
    begin = 0.0
    for number, line in enumerate(lines, 1):
        place = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            message = f"{place}: is not UTF-8 text ({error.reason})"
            raise TraceError(message) from error
        if text.strip():
            arrival = _read_line(place, text, len(arrivals), block_tokens)
            begin = begin if arrivals else arrival.at_ms
            arrivals.append(_relative(place, arrival, begin))
    return arrivals


def _relative(place: str, arrival: Arrival, begin_ms: float) -> Arrival:
    """Let time begin with the first request; what is stamped before it arrives with it."""
    at_ms = arrival.at_ms - begin_ms
    if at_ms > _LONGEST_MS:
        message = f"{place}: arrives more than a year after the first request; one of their time stamps is wrong"
        raise TraceError(message)
    return Arrival(max(0.0, at_ms), arrival.request)


_LONGEST_MS = 366 * 24 * 3_600_000.0


def _read_line(place: str, line: str, index: int, block_tokens: int) -> Arrival:
    try:
        entry = _object(json.loads(line, parse_constant=_refuse_constant))
        at_ms = _time(entry["timestamp"])
        prompt_tokens = _whole(entry["input_length"], "input_length")
        output_tokens = _whole(entry["output_length"], "output_length")
        hash_ids = _hash_ids(entry["hash_ids"])
    except KeyError as error:
        message = f"{place}: not a request in the Mooncake format: it has no {error}"
        raise TraceError(message) from error
    except (TypeError, ValueError, RecursionError) as error:
        message = f"{place}: not a request in the Mooncake format: {error}"
        raise TraceError(message) from error
    _check_lengths(place, prompt_tokens, output_tokens, at_ms)
    if len(hash_ids) != -(-prompt_tokens // block_tokens):
        message = (
            f"{place}: {len(hash_ids)} hash ids do not cover {prompt_tokens} tokens in blocks of {block_tokens}; "
            "set --block-tokens to the number of tokens per hash id"
        )
        raise TraceError(message)
    content = _content(index, prompt_tokens, prompt_tokens + output_tokens, hash_ids, block_tokens)
    return Arrival(at_ms, Request(index, prompt_tokens, output_tokens, content))


def _check_lengths(place: str, prompt_tokens: int, output_tokens: int, at_ms: float) -> None:
    if prompt_tokens < 1 or output_tokens < 0 or at_ms < 0:
        message = f"{place}: lengths and time stamp cannot be negative, and a prompt has at least one token"
        raise TraceError(message)
    if max(prompt_tokens, output_tokens) > MAX_LENGTH_TOKENS:
        message = f"{place}: a prompt or answer of more than {MAX_LENGTH_TOKENS:,} tokens"
        raise TraceError(message)


def _object(entry: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON is anything
    if not isinstance(entry, dict):
        message = f"{entry!r:.40} is not an object"
        raise TypeError(message)
    return entry


def _hash_ids(value: Any) -> list[int]:  # noqa: ANN401 - JSON is anything
    if not isinstance(value, list):
        message = f"hash_ids is {value!r:.40} and not a list"
        raise TypeError(message)
    return [_whole(one, "a hash id") for one in value]


def _time(value: Any) -> float:  # noqa: ANN401 - JSON is anything
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        message = f"timestamp is {value!r:.40} and not a number of milliseconds"
        raise TypeError(message)
    if not abs(value) < _LATEST_MS:
        message = "timestamp is out of range"
        raise ValueError(message)
    return float(value)


_LATEST_MS = 1e15
"""In milliseconds since 1970, the year 33658. A stamp in microseconds is beyond it, and none of today's is."""


def _whole(value: Any, name: str) -> int:  # noqa: ANN401 - JSON is anything
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{name} is {value!r:.40} and not a whole number"
        raise TypeError(message)
    return value


def _refuse_constant(name: str) -> NoReturn:
    message = f"{name} is not a number in JSON"
    raise ValueError(message)


def _content(
    index: int, prompt_tokens: int, total_tokens: int, hash_ids: list[int], block_tokens: int
) -> tuple[int, ...]:
    """Name the full blocks: those of the prompt by their hash ids, those the answer fills by a number of their own.

    The trace does not tell what was answered, so the block in which prompt and answer meet matches no other.
    """
    prompt_blocks = prompt_tokens // block_tokens
    total_blocks = total_tokens // block_tokens
    answered = [hash((_ANSWER_SALT, index, position)) for position in range(prompt_blocks, total_blocks)]
    return (*hash_ids[:prompt_blocks], *answered)
