"""Memory really goes back to the kernel, or the reason why not is told."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from typing import TYPE_CHECKING

import cloudpickle
import pytest

from kvcached import guards
from kvcached.memory import madvise
from kvcached.memory.kernel_figures import anonymous_bytes, cgroup_bytes, minor_faults, resident_bytes
from kvcached.memory.madvise import find_obstacle, prepare, return_rows
from kvcached.memory.regions import Region

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Mapping

MIB = 1 << 20
ROW = 128 << 10
LIBC = ctypes.CDLL(None, use_errno=True)


def test_returned_rows_leave_the_anonymous_pages_of_the_process(mapped: Callable[[int], Mapping]) -> None:
    """At least 95 % of what is said to be returned is gone from the kernel's count, and the rows read as zeros."""
    mapping = mapped(256 * MIB)
    region = mapping.region(ROW, offset=64)
    before = anonymous_bytes()
    returned, reason = return_rows([region], [(0, 500), (1000, 1700)])
    fallen = before - anonymous_bytes()
    assert (returned > 0.99 * 1200 * ROW, reason) == (True, "")
    assert fallen >= 0.95 * returned
    assert mapping.memory[64 + 10 * ROW : 64 + 11 * ROW].count(0) == ROW
    assert mapping.memory[64 + 700 * ROW : 64 + 701 * ROW].count(0x5A) == ROW


def test_returned_rows_leave_the_memory_cgroup(mapped: Callable[[int], Mapping]) -> None:
    """The cgroup's usage falls by what was returned; others in it may take a part of it meanwhile."""
    if cgroup_bytes() is None:
        pytest.skip("no memory cgroup to be seen here")
    mapping = mapped(512 * MIB)
    before = cgroup_bytes()
    returned, _ = return_rows([mapping.region(ROW)], [(0, 4096)])
    after = cgroup_bytes()
    assert before is not None
    assert after is not None
    assert before - after >= 0.5 * returned


def test_rows_that_are_written_again_come_back_by_page_faults(mapped: Callable[[int], Mapping]) -> None:
    """Returned memory needs no call to be used again."""
    mapping = mapped(64 * MIB)
    region = mapping.region(ROW)
    return_rows([region], [(0, region.rows)])
    assert resident_bytes([region]) == 0
    faults = minor_faults()
    mapping.fill(1)
    assert minor_faults() - faults >= 64 * MIB // mmap.PAGESIZE // 16  # the kernel may fault several pages at once
    assert resident_bytes([region]) == 64 * MIB


def test_locked_memory_is_refused_at_bind_and_left_alone_by_returning(mapped: Callable[[int], Mapping]) -> None:
    """The reason is told before anything is tried, and trying tells it as well; the memory stays as it is."""
    mapping = mapped(MIB)
    region = mapping.region(ROW)
    if LIBC.mlock(ctypes.c_void_p(mapping.address), ctypes.c_size_t(MIB)) != 0:
        pytest.skip("this user may not lock a MiB")
    assert prepare([region]) == "its memory is locked (mlock)"
    assert return_rows([region], [(0, 8)]) == (0, "madvise: EINVAL: the memory is locked or in huge pages")
    assert mapping.memory[:] == b"\x5a" * MIB


def test_shared_memory_is_refused_because_returning_it_would_free_nothing() -> None:
    """MADV_DONTNEED succeeds on shared pages and gives nothing back, so that it must not be relied on."""
    with mmap.mmap(-1, MIB) as memory:
        first = ctypes.c_char.from_buffer(memory)
        assert prepare([Region(ctypes.addressof(first), ROW, 8)]) == "its memory is shared with other processes"
        del first


def test_a_pool_without_regions_is_refused() -> None:
    """An engine whose KV is on a device has no regions here."""
    assert prepare([]) == "it has no KV tensors in main memory"


def test_ordinary_memory_has_no_obstacle(mapped: Callable[[int], Mapping]) -> None:
    """Anonymous memory can be returned."""
    assert prepare([mapped(MIB).region(ROW)]) == ""


def test_unreadable_smaps_is_a_reason_and_no_error(
    mapped: Callable[[int], Mapping], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the kernel does not say what the memory is, it is not returned, and the engine goes on."""
    monkeypatch.setattr(madvise, "SMAPS", str(tmp_path / "missing"))
    assert "FileNotFoundError" in prepare([mapped(MIB).region(ROW)])


def test_rows_out_of_range_are_told_and_nothing_is_raised(mapped: Callable[[int], Mapping]) -> None:
    """A worker handed nonsense returns none of it."""
    mapping = mapped(MIB)
    returned, reason = return_rows([mapping.region(ROW)], [(7, 9)])
    assert (returned, reason) == (0, "ValueError: rows 7 to 9 are not among the region's 8")
    assert mapping.memory[:] == b"\x5a" * MIB


def test_one_region_that_cannot_be_returned_does_not_keep_the_others(mapped: Callable[[int], Mapping]) -> None:
    """What comes back and why the rest does not are both told."""
    locked, free = mapped(MIB), mapped(MIB)
    if LIBC.mlock(ctypes.c_void_p(locked.address), ctypes.c_size_t(MIB)) != 0:
        pytest.skip("this user may not lock a MiB")
    returned, reason = return_rows([locked.region(ROW), free.region(ROW)], [(0, 8)])
    assert returned == MIB
    assert reason.startswith("madvise: EINVAL")


def test_huge_pages_are_avoided_from_bind_on(mapped: Callable[[int], Mapping]) -> None:
    """A region that asked for huge pages gets none for memory that it takes again."""
    with open(madvise.HUGE_PAGE_SETTING, encoding="ascii") as setting:
        if "[never]" in setting.read():
            pytest.skip("this machine has no transparent huge pages")
    mapping = mapped(64 * MIB)
    region = mapping.region(ROW)
    assert LIBC.madvise(ctypes.c_void_p(mapping.address), ctypes.c_size_t(mapping.size), 14) == 0  # MADV_HUGEPAGE
    return_rows([region], [(0, region.rows)])
    mapping.fill(1)
    assert huge_bytes(mapping.address) > 0
    assert prepare([region]) == ""
    return_rows([region], [(0, region.rows)])
    mapping.fill(2)
    assert huge_bytes(mapping.address) == 0
    before = anonymous_bytes()
    returned, _ = return_rows([region], [(row, row + 1) for row in range(0, region.rows, 2)])
    assert before - anonymous_bytes() >= 0.95 * returned


def huge_bytes(address: int) -> int:
    """Return how much of the mapping around ``address`` is in transparent huge pages."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            head = line.split(None, 1)[0]
            if not head.endswith(":"):
                low, high = (int(number, 16) for number in head.split("-"))
                inside = low <= address < high
            elif inside and head == "AnonHugePages:":
                return int(line.split()[1]) * 1024
    return 0


FOREIGN_WORKER = """
import ctypes, mmap, pickle, sys
try:
    import kvcached
except ImportError:
    pass
else:
    raise SystemExit("this process has the package")
functions = pickle.load(sys.stdin.buffer)
memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(b"x" * (1 << 20))
region = (ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 17, 8)
print(functions["prepare"]([region]), functions["return_rows"]([region], [(0, 8)]), memory[5])
"""


def test_functions_travel_by_value_to_a_process_without_this_package(tmp_path: Path) -> None:
    """A worker of an engine needs nothing but the standard library to return memory."""
    for module in (guards, madvise):
        cloudpickle.register_pickle_by_value(module)
    try:
        payload = cloudpickle.dumps({"prepare": prepare, "return_rows": return_rows})
    finally:
        for module in (guards, madvise):
            cloudpickle.unregister_pickle_by_value(module)
    packages = cloudpickle.__path__[0].rpartition("/")[0]
    (tmp_path / "cloudpickle").symlink_to(packages + "/cloudpickle")
    command = [sys.executable, "-S", "-c", FOREIGN_WORKER]
    result = subprocess.run(
        command, input=payload, capture_output=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.stderr.decode() == ""
    assert result.stdout.decode().strip() == "(1048576, '') 0"


def test_obstacle_is_looked_for_in_the_regions_only(mapped: Callable[[int], Mapping]) -> None:
    """Locked memory elsewhere in the process is nobody's obstacle."""
    locked, free = mapped(MIB), mapped(MIB)
    LIBC.madvise(ctypes.c_void_p(free.address), ctypes.c_size_t(MIB), 16)  # MADV_DONTDUMP: a mapping of its own
    if LIBC.mlock(ctypes.c_void_p(locked.address), ctypes.c_size_t(MIB)) != 0:
        pytest.skip("this user may not lock a MiB")
    assert find_obstacle([free.region(ROW)]) == ""
    assert find_obstacle([locked.region(ROW)]) != ""
