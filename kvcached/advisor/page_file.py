"""Where pages lie: beside the ledgers, ``<gpu>.<slot>.advice`` for the replica that owns that slot of the ledger.

A page counts only while the slot is alive and the page carries the slot's incarnation. So there are at most as many
files as slots, and what a dead engine left is replaced by the next one in its slot.

The file is written and read by single calls at a position, not through a mapping: a peer that may write it may also cut
it, and a mapping would then end the engine by SIGBUS.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from typing import TYPE_CHECKING

from kvcached.advisor.page import PAGE_BYTES, PageError, TornPageError, unpack_page
from kvcached.ledger.directory import ADVICE_SUFFIX, LedgerDirectory

if TYPE_CHECKING:
    from kvcached.advisor.page import Page
    from kvcached.ledger.registration import SlotPlace

READ_TRIES = 20
"""How often a reader tries again that meets a page in the middle of being written."""

READ_PAUSE_S = 0.002
"""How long it waits in between."""


def page_name(gpu: str, slot: int) -> str:
    """Return the file name of a slot's page."""
    return f"{gpu}.{slot}{ADVICE_SUFFIX}"


class PageWriter:
    """Writes one replica's page. For one thread."""

    def __init__(self, ledger_dir: str) -> None:
        """Write into ``ledger_dir``; nothing is touched before the first :meth:`write`."""
        self._ledger_dir = ledger_dir
        self._place: SlotPlace | None = None
        self._fd = -1
        self._sequence = 0

    def write(self, place: SlotPlace, page: Page) -> None:
        """Write ``page``, which carries the incarnation of ``place``, in one call.

        Raises :class:`OSError` or :class:`LedgerDirectoryError` if the file cannot be made or written.
        """
        self._sequence += 1
        data = page.pack(self._sequence)
        if self._fd < 0 or place != self._place or os.fstat(self._fd).st_nlink == 0:
            self._open(place, data)
        os.pwrite(self._fd, data, 0)

    def _open(self, place: SlotPlace, data: bytes) -> None:
        """Make a new file and move it over whatever has the name: nothing of that is opened, or written to."""
        self._forget()
        name = page_name(place.gpu, place.slot)
        new = f".{name}.{secrets.token_hex(8)}.new"
        with LedgerDirectory(self._ledger_dir, writable=True) as directory:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(new, flags, 0o600, dir_fd=directory.descriptor)
            try:
                os.fchmod(fd, directory.new_file_mode)
                os.posix_fallocate(fd, 0, PAGE_BYTES)
                os.pwrite(fd, data, 0)
                os.rename(new, name, src_dir_fd=directory.descriptor, dst_dir_fd=directory.descriptor)
            except OSError:
                os.close(fd)
                os.unlink(new, dir_fd=directory.descriptor)
                raise
        self._fd, self._place = fd, place

    def close(self) -> None:
        """Remove the page, if the file of its name is still this one."""
        place = self._place
        if self._fd >= 0 and place is not None:
            path = os.path.join(self._ledger_dir, page_name(place.gpu, place.slot))
            try:
                if os.path.samestat(os.lstat(path), os.fstat(self._fd)):
                    os.unlink(path)
            except OSError:
                pass  # it is gone, or was never to be removed by this user: it does no harm
        self._forget()

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._place = -1, None


def read_page(directory: LedgerDirectory, place: SlotPlace) -> Page:
    """Return the page of a live slot. Raises :class:`PageError` with the reason if there is none that can be used.

    Takes at most ``READ_TRIES`` times ``READ_PAUSE_S`` seconds, whatever the file holds.
    """
    name = page_name(place.gpu, place.slot)
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=directory.descriptor)
    except OSError as error:
        message = f"{directory.path}/{name}: {error.strerror}"
        raise PageError(message) from error
    try:
        _check_file(directory, os.fstat(fd))
        page = _read_whole(fd)
    except OSError as error:
        message = f"{directory.path}/{name}: {error.strerror}"
        raise PageError(message) from error
    except PageError as error:
        message = f"{directory.path}/{name} {error}"
        raise PageError(message) from error
    finally:
        os.close(fd)
    if page.incarnation != place.incarnation:
        message = f"{directory.path}/{name} was left by an engine that has ended"
        raise PageError(message)
    return page


def _check_file(directory: LedgerDirectory, status: os.stat_result) -> None:
    """Apply the rules for ledgers to a page's file."""
    problem = directory.ownership_problem(status.st_uid, status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        problem = "is not a regular file"
    elif status.st_nlink != 1:
        problem = f"has {status.st_nlink} names (hard links); a page has one"
    elif status.st_size != PAGE_BYTES:
        problem = f"is {status.st_size} bytes long; a page has {PAGE_BYTES}"
    if problem:
        raise PageError(problem)


def _read_whole(fd: int) -> Page:
    """Read until a page is whole, for a bounded time."""
    for _ in range(READ_TRIES - 1):
        try:
            return unpack_page(os.pread(fd, PAGE_BYTES, 0))
        except TornPageError:
            time.sleep(READ_PAUSE_S)
    return unpack_page(os.pread(fd, PAGE_BYTES, 0))
