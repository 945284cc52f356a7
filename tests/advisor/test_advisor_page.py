"""The exported page: what is written comes out again, and nothing that stands in its place does harm."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import stat
import struct
import time
import zlib
from typing import TYPE_CHECKING

import pytest

from kvcached.advisor.page import PAGE_BYTES, Page, PageError, PageWindow, TornPageError, unpack_page
from kvcached.advisor.page_file import PageWriter, page_name, read_page
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.registration import SlotPlace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLACE = SlotPlace("cpu-0", 3, 0xDEADBEEF)


def page_of(seed: int = 1) -> Page:
    """Return a page with seeded figures."""
    rng = random.Random(seed)
    limits = tuple(sorted(rng.sample(range(1, 10**7), rng.randint(1, 63))))
    buckets = [tuple(rng.random() * 1000 for _ in range(len(limits) + 1)) for _ in range(2)]
    windows = tuple(PageWindow(1e6, sum(one) * 2, sum(one), sum(one), one) for one in buckets)
    return Page(
        incarnation=PLACE.incarnation,
        updated_ns=123,
        observed_tokens=rng.randrange(2**40),
        requests=rng.randrange(2**30),
        limit_tokens=rng.choice((-1, 0, 16000)),
        capacity_tokens=10**7,
        in_use_mean=3.5,
        in_use_high=7.0,
        block_tokens=16,
        state=0,
        failures=0,
        note="sliding window: äöü",
        limits=limits,
        windows=windows,
    )


@pytest.fixture
def directory(ledger_dir: Path) -> Iterator[LedgerDirectory]:
    """Return the ledger directory as a reader opens it."""
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        yield directory


@pytest.mark.parametrize("seed", range(5))
def test_page_comes_out_as_it_went_in(seed: int) -> None:
    """A packed page has its size and unpacks to the same values."""
    page = page_of(seed)
    data = page.pack(7)
    assert len(data) == PAGE_BYTES
    assert unpack_page(data) == page


def test_longest_page_fits() -> None:
    """The note is cut to its field without breaking a character, and the largest page is one page."""
    page = dataclasses.replace(page_of(), note="ä" * 500, limits=tuple(range(1, 64)))
    page = dataclasses.replace(page, windows=tuple(PageWindow(1, 1, 1, 1, (0.0,) * 64) for _ in range(2)))
    found = unpack_page(page.pack(1))
    assert found.note == "ä" * 64
    assert found.limits == page.limits


def test_hostile_bytes_are_refused_by_reason() -> None:
    """Whatever is in a page, reading it gives a valid page or a reason, even with a checksum."""
    rng = random.Random(5)
    whole = page_of().pack(1)
    body = next(size for size in range(8, PAGE_BYTES) if zlib.crc32(whole[:size]) == _checksum_at(whole, size))
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(0, body - 8)
            junk = rng.choice((rng.randbytes(8), struct.pack("=d", rng.choice((float("nan"), float("inf"), -1.0)))))
            data[place : place + 8] = junk
        struct.pack_into("=QI", data, body, struct.unpack_from("=Q", data, 16)[0], zlib.crc32(data[:body]))
        try:
            page = unpack_page(bytes(data))
        except PageError:
            refused += 1
        else:
            assert sum(page.windows[0].buckets) >= 0
            assert page.limits[-1] > 0
    assert refused > 500
    for data in (b"", b"\0" * PAGE_BYTES, rng.randbytes(PAGE_BYTES), whole[:-1]):
        with pytest.raises(PageError):
            unpack_page(data)


def _checksum_at(data: bytes, size: int) -> int:
    return int(struct.unpack_from("=QI", data.ljust(2 * PAGE_BYTES, b"\0"), size)[1])


def test_half_written_page_is_recognised() -> None:
    """A page of which a part belongs to the page before is torn, wherever the cut is."""
    old, new = page_of(1).pack(1), page_of(2).pack(2)
    body = next(size for size in range(8, PAGE_BYTES) if zlib.crc32(old[:size]) == _checksum_at(old, size))
    for cut in range(24, body + 8, 8):
        with pytest.raises(TornPageError):
            unpack_page(new[:cut] + old[cut:])


def test_file_is_whole_private_and_removed_at_the_end(ledger_dir: Path, directory: LedgerDirectory) -> None:
    """The page's file is allocated whole with the ledgers' mode, is read back, and goes with its writer."""
    writer = PageWriter(str(ledger_dir))
    writer.write(PLACE, page_of())
    path = ledger_dir / page_name(PLACE.gpu, PLACE.slot)
    assert path.stat().st_size == PAGE_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_page(directory, PLACE) == page_of()
    writer.write(PLACE, page_of(2))
    assert read_page(directory, PLACE) == page_of(2)
    writer.close()
    assert list(ledger_dir.iterdir()) == []


def test_page_of_another_incarnation_is_refused(ledger_dir: Path, directory: LedgerDirectory) -> None:
    """What a former owner of the slot left is not taken for the present one's."""
    PageWriter(str(ledger_dir)).write(PLACE, page_of())
    with pytest.raises(PageError, match="engine that has ended"):
        read_page(directory, dataclasses.replace(PLACE, incarnation=1))


def test_new_slot_means_a_new_file(ledger_dir: Path, directory: LedgerDirectory) -> None:
    """A replica that registered again writes at its new place."""
    writer = PageWriter(str(ledger_dir))
    writer.write(PLACE, page_of())
    other = SlotPlace("cpu-0", 4, 99)
    writer.write(other, dataclasses.replace(page_of(), incarnation=99))
    assert read_page(directory, other).incarnation == 99


def test_removed_page_is_made_again(ledger_dir: Path, directory: LedgerDirectory) -> None:
    """A page that someone removed is there again with the next writing."""
    writer = PageWriter(str(ledger_dir))
    writer.write(PLACE, page_of())
    (ledger_dir / page_name(PLACE.gpu, PLACE.slot)).unlink()
    writer.write(PLACE, page_of(2))
    assert read_page(directory, PLACE) == page_of(2)


def test_cut_page_does_not_end_the_writer(ledger_dir: Path, directory: LedgerDirectory) -> None:
    """A peer that truncates the file keeps neither writer nor reader from going on."""
    writer = PageWriter(str(ledger_dir))
    writer.write(PLACE, page_of())
    os.truncate(ledger_dir / page_name(PLACE.gpu, PLACE.slot), 0)
    with pytest.raises(PageError, match="0 bytes long"):
        read_page(directory, PLACE)
    writer.write(PLACE, page_of(2))
    assert read_page(directory, PLACE) == page_of(2)


@pytest.mark.parametrize("obstacle", ["symlink", "pipe", "directory", "hard link", "writable by all", "missing"])
def test_foreign_file_is_refused_and_replaced_unread(
    ledger_dir: Path, directory: LedgerDirectory, obstacle: str
) -> None:
    """Anything else at the page's name is refused at once by readers, and writers never write into it."""
    path = ledger_dir / page_name(PLACE.gpu, PLACE.slot)
    victim = ledger_dir.parent / "victim"
    victim.write_bytes(page_of().pack(1))
    if obstacle == "symlink":
        path.symlink_to(victim)
    elif obstacle == "pipe":
        os.mkfifo(path)
    elif obstacle == "directory":
        path.mkdir()
    elif obstacle == "hard link":
        path.hardlink_to(victim)
    elif obstacle == "writable by all":
        path.write_bytes(page_of().pack(1))
        path.chmod(0o666)
    begin = time.monotonic()
    with pytest.raises(PageError):
        read_page(directory, PLACE)
    assert time.monotonic() - begin < 5
    writer = PageWriter(str(ledger_dir))
    if obstacle == "directory":
        with pytest.raises(IsADirectoryError):
            writer.write(PLACE, page_of(2))
        assert [one.name for one in ledger_dir.iterdir()] == [path.name]
        return
    writer.write(PLACE, page_of(2))
    assert read_page(directory, PLACE) == page_of(2)
    assert victim.read_bytes() == page_of().pack(1)


def write_for(ledger_dir: str, seconds: float) -> None:
    """Write pages whose figures belong together as fast as possible."""
    writer = PageWriter(ledger_dir)
    pages = [dataclasses.replace(page_of(seed), updated_ns=seed) for seed in range(8)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for page in pages:
            writer.write(PLACE, page)


def test_readers_never_see_two_pages_mixed(ledger_dir: Path, directory: LedgerDirectory) -> None:
    """A reader beside a writer in a loop sees whole pages only."""
    writer = multiprocessing.get_context("spawn").Process(target=write_for, args=(str(ledger_dir), 2.0))
    pages = {seed: dataclasses.replace(page_of(seed), updated_ns=seed) for seed in range(8)}
    writer.start()
    seen = set()
    while writer.is_alive():
        try:
            page = read_page(directory, PLACE)
        except PageError:
            continue
        assert page == pages[page.updated_ns]
        seen.add(page.updated_ns)
    writer.join()
    assert writer.exitcode == 0
    assert len(seen) > 1


def test_what_a_killed_writer_left_is_swept(ledger_dir: Path) -> None:
    """A half-made page under its temporary name goes at the next registration."""
    (ledger_dir / ".cpu-0.3.advice.0123456789abcdef.new").write_bytes(b"half")
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        directory.sweep()
    assert list(ledger_dir.iterdir()) == []
