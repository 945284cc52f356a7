"""What the advisor of one replica tells the outside: one page of 4 KiB, in the machine's own byte order.

A page begins and ends with the same sequence number, growing from one page to the next, and carries a checksum.
Together they do what a sequence lock does by memory barriers, which Python does not have: a page that was read while it
was written is recognised as such.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_BYTES = 4096
PAGE_VERSION = 1
MAGIC = b"KVADVICE"

MAX_LIMITS = 63
WINDOWS = 2
NOTE_BYTES = 128

WATCHING = 0
"""The advisor is at work."""
STOPPED = 1
"""It failed and has turned itself off; the note says why."""

_HEADER = struct.Struct(f"=8sIIQQQQQqqddIIII{NOTE_BYTES}s")
_LIMITS = struct.Struct(f"={MAX_LIMITS}Q")
_WINDOW = struct.Struct(f"={4 + MAX_LIMITS + 1}d")
_TRAILER = struct.Struct("=QI")

_BODY_BYTES = _HEADER.size + _LIMITS.size + WINDOWS * _WINDOW.size
_MOST_TOKENS = 2.0**62


class PageError(Exception):
    """A page cannot be used; the message is the reason."""


class TornPageError(PageError):
    """A page was read while it was written, or its writer ended in the middle of it."""


@dataclass(frozen=True)
class PageWindow:
    """One window's sums, in tokens: see :class:`kvcached.advisor.windows.Window`."""

    half_life: float
    prompt: float
    hit: float
    predicted: float
    buckets: tuple[float, ...]


@dataclass(frozen=True)
class Page:
    """The advisor's state. All sizes are tokens.

    ``limit_tokens`` is the limit in force, -1 for none; ``in_use_mean`` and ``in_use_high`` are mean and 95th
    percentile of what requests held of late; ``windows`` are *now* and *long*, and ``limits`` belong to their buckets.
    """

    incarnation: int
    updated_ns: int
    observed_tokens: int
    requests: int
    limit_tokens: int
    capacity_tokens: int
    in_use_mean: float
    in_use_high: float
    block_tokens: int
    state: int
    failures: int
    note: str
    limits: tuple[int, ...]
    windows: tuple[PageWindow, ...]

    def pack(self, sequence: int) -> bytes:
        """Return the page's bytes; ``sequence`` is greater than that of the page before."""
        note = self.note.encode(errors="replace")[:NOTE_BYTES].decode(errors="ignore").encode()
        parts = [
            _HEADER.pack(
                MAGIC,
                PAGE_VERSION,
                len(self.limits),
                sequence,
                self.incarnation,
                self.updated_ns,
                self.observed_tokens,
                self.requests,
                self.limit_tokens,
                self.capacity_tokens,
                self.in_use_mean,
                self.in_use_high,
                self.block_tokens,
                self.state,
                self.failures,
                0,
                note,
            ),
            _LIMITS.pack(*_padded(self.limits, MAX_LIMITS, 0)),
            *(
                _WINDOW.pack(
                    one.half_life, one.prompt, one.hit, one.predicted, *_padded(one.buckets, MAX_LIMITS + 1, 0.0)
                )
                for one in self.windows
            ),
        ]
        body = b"".join(parts)
        return (body + _TRAILER.pack(sequence, zlib.crc32(body))).ljust(PAGE_BYTES, b"\0")


def unpack_page(data: bytes) -> Page:
    """Return the page that ``data`` holds. Raises :class:`PageError` for anything that makes no sense."""
    if len(data) != PAGE_BYTES:
        message = f"is {len(data)} bytes long; a page has {PAGE_BYTES}"
        raise PageError(message)
    magic, version, count, begun, *fields, _, note = _HEADER.unpack_from(data)
    if magic != MAGIC:
        message = "is not an advice page (wrong magic number)"
        raise PageError(message)
    if version != PAGE_VERSION:
        message = f"has advice version {version}; this program reads version {PAGE_VERSION}"
        raise PageError(message)
    ended, checksum = _TRAILER.unpack_from(data, _BODY_BYTES)
    if begun != ended or checksum != zlib.crc32(memoryview(data)[:_BODY_BYTES]):
        message = "was read while it was being written"
        raise TornPageError(message)
    limits = _LIMITS.unpack_from(data, _HEADER.size)
    windows = [
        _WINDOW.unpack_from(data, _HEADER.size + _LIMITS.size + place * _WINDOW.size) for place in range(WINDOWS)
    ]
    if not 1 <= count <= MAX_LIMITS:
        message = f"has {count} limits; there are 1 to {MAX_LIMITS}"
        raise PageError(message)
    found = [_window_of([*window[:4], window[4 : 5 + count]]) for window in windows]
    page = _page_of([*fields, note.rstrip(b"\0").decode(errors="replace"), limits[:count], tuple(found)])
    if not _makes_sense(page):
        message = "holds invalid figures"
        raise PageError(message)
    return page


def _page_of(fields: Sequence[Any]) -> Page:
    return Page(*fields)


def _window_of(fields: Sequence[Any]) -> PageWindow:
    return PageWindow(*fields)


def _padded(values: Sequence[float], length: int, filler: float) -> list[float]:
    return [*values, *[filler] * (length - len(values))]


def _makes_sense(page: Page) -> bool:
    """Return whether one can calculate with a page that anybody may have written."""
    limits = page.limits
    growing = all(low < high for low, high in zip((0, *limits), limits, strict=False)) and limits[-1] < _MOST_TOKENS
    sizes = [page.in_use_mean, page.in_use_high, page.capacity_tokens, page.observed_tokens]
    for window in page.windows:
        sizes += [window.half_life, window.prompt, window.hit, window.predicted, *window.buckets]
    countable = all(math.isfinite(size) and 0 <= size < _MOST_TOKENS for size in sizes)
    return growing and countable and page.block_tokens > 0 and -1 <= page.limit_tokens < _MOST_TOKENS
