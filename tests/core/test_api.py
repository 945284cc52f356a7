"""The Python functions: what the outside world does wrong is a result, or one of the family's errors."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

import kvcached.control
from kvcached.control import (
    KvcachedError,
    LedgerDirectoryError,
    NativeLibraryError,
    PublicationStatus,
    SettingsError,
    get_instances,
    set_prefix_cache_retention_limit,
)
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.publication import UNKNOWN_GPU, publish
from kvcached.ledger.waiting import wait_until_applied
from kvcached.values import Update

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.ledger.subscription import Subscription

    Subscribe = Callable[..., Subscription]


def desired(ledger_dir: Path) -> list[tuple[int, int]]:
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        slots = [slot for ledger in directory.open_all() for _, slot in ledger.handle.live_slots()]
    return [(slot.desired.revision, slot.desired.limit_tokens) for slot in slots]


def in_a_process(script: str, *arguments: object) -> str:
    """Run a script of its own, and return what it printed."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


FEW_DESCRIPTORS = """
import json, os, resource, sys
from kvcached.control import KvcachedError, get_instances, set_prefix_cache_retention_limit
import kvcached.ledger.waiting, kvcached.ledger.instances
from kvcached.ledger import binding
binding.library_version()
set_prefix_cache_retention_limit(1, instance_name="nobody", ledger_dir=sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
answers = []
for free in range(12):
    result = set_prefix_cache_retention_limit(free, instance_name="engine", ledger_dir=sys.argv[1], wait=0.0)
    try:
        found = len(get_instances(sys.argv[1]))
    except KvcachedError as error:
        found = str(error)
    answers.append((result.status, result.revision, list(result.warnings), found))
    os.close(held.pop())
for one in held:
    os.close(one)
print(json.dumps(answers))
"""


def test_without_descriptors_left_nothing_is_published_and_nobody_is_called_absent(
    ledger_dir: Path, subscribe: Subscribe
) -> None:
    """With any number of descriptors left a publication is whole or not made, and the shortage is the reason."""
    subscribe(gpus=("cpu-0", "cpu-1", "cpu-2"))
    answers = json.loads(in_a_process(FEW_DESCRIPTORS, ledger_dir))
    assert {status for status, *_ in answers} == {"unavailable", "accepted"}
    for status, revision, warnings, found in answers:
        if status == "unavailable":
            assert (revision, "Too many open files" in warnings[0]) == (0, True), warnings
        assert found == 1 or "Too many open files" in found, found
    accepted = sum(status == "accepted" for status, *_ in answers)
    assert {revision for revision, _ in desired(ledger_dir)} == {accepted}


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), -float("inf"), -1, -0.1, 10**400, -(10**400), 1e308])
def test_wait_that_no_clock_knows_publishes_nothing(wait: float, ledger_dir: Path, subscribe: Subscribe) -> None:
    """A wait that is no span of time is a ValueError before anything is written."""
    subscribe()
    with pytest.raises(ValueError, match="wait must be from 0 to 1000000000 seconds"):
        set_prefix_cache_retention_limit(5, instance_name="engine", ledger_dir=ledger_dir, wait=wait)
    assert desired(ledger_dir) == [(0, 16000)] * 2


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("note", "two\nlines", ValueError),
        ("note", "x" * 56, ValueError),
        ("note", None, TypeError),
        ("if_revision", True, TypeError),
        ("if_incarnation", "xyz", ValueError),
        ("if_incarnation", 5, TypeError),
        ("wait", "1", TypeError),
    ],
)
def test_other_arguments_are_checked_before_anything_is_written(
    argument: str, value: object, error: type[Exception], ledger_dir: Path, subscribe: Subscribe
) -> None:
    """Each argument has one error for what it does not take."""
    subscribe()
    call: Callable[..., object] = set_prefix_cache_retention_limit
    with pytest.raises(error):
        call(5, instance_name="engine", ledger_dir=ledger_dir, **{argument: value})
    assert desired(ledger_dir) == [(0, 16000)] * 2


def test_relative_directory_in_a_working_directory_that_was_removed(tmp_path: Path) -> None:
    """Where the working directory is gone a relative ledger directory is one that cannot be opened."""
    script = """
import os, sys
from kvcached.control import LedgerDirectoryError, get_instances, set_prefix_cache_retention_limit
os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])
os.environ["KVCACHED_LEDGER_DIR"] = "ledgers"
result = set_prefix_cache_retention_limit(5, instance_name="engine", wait=1.0)
print(result.status, *result.warnings)
try:
    get_instances()
except LedgerDirectoryError as error:
    print(error)
"""
    gone = tmp_path / "gone"
    gone.mkdir()
    result, error = in_a_process(script, gone).splitlines()
    assert result.startswith("unavailable ledger directory ledgers cannot be opened: No such file or directory")
    assert error.startswith("ledger directory ledgers cannot be opened: No such file or directory")


def test_without_the_native_library_there_is_a_result_and_a_family_error(ledger_dir: Path) -> None:
    """A library that is not there is a result of a publication, and an error of the family for a look."""
    script = """
import sys
from kvcached.ledger import binding
binding.LIBRARY_PATH = "/nonexistent/libkvledger.so"
from kvcached.control import NativeLibraryError, get_instances, set_prefix_cache_retention_limit
open(sys.argv[1] + "/cpu-0.ledger", "wb").close()
result = set_prefix_cache_retention_limit(5, instance_name="engine", ledger_dir=sys.argv[1])
print(result.status, *result.warnings)
try:
    get_instances(sys.argv[1])
except NativeLibraryError as error:
    print(error)
"""
    result, error = in_a_process(script, ledger_dir).splitlines()
    assert result.startswith("unavailable native library /nonexistent/libkvledger.so")
    assert error.startswith("native library /nonexistent/libkvledger.so")


def test_errors_have_one_base_and_are_exported() -> None:
    """Whatever the family raises can be caught under one name, and every promised name is there."""
    for error in (LedgerDirectoryError, NativeLibraryError, SettingsError):
        assert issubclass(error, KvcachedError)
    assert issubclass(SettingsError, ValueError)
    for name in kvcached.control.__all__:
        assert getattr(kvcached.control, name).__name__ == name
        assert name in dir(kvcached.control)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvcached.control.nonsense  # noqa: B018 - the look itself is tested
    raised = inspect.getdoc(get_instances) or ""
    assert all(error.__name__ in raised for error in (LedgerDirectoryError, NativeLibraryError))


def test_statuses_are_an_enum_with_string_values(ledger_dir: Path) -> None:
    """A status is a member of an enum, equal to its text, and printed as such."""
    result = set_prefix_cache_retention_limit(5, instance_name="nobody", ledger_dir=ledger_dir)
    assert result.status is PublicationStatus.UNAVAILABLE
    assert (result.status == "unavailable", f"{result.status}", str(result.status)) == (True,) + ("unavailable",) * 2
    assert json.dumps(result.to_dict()["status"]) == '"unavailable"'


def test_a_missing_instance_is_answered_with_those_there_are(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A mistyped name is unavailable, and the live ones are named."""
    subscribe("chat", gpus=("cpu-0",))
    subscribe("code", gpus=("cpu-0",))
    assert "; live there: chat, code" in publish(5, "chatt", str(ledger_dir)).warnings[0]


# One entry for each member


def raise_member(directory: LedgerDirectory, gpu: str, replica: int, update: Update) -> None:
    handle = directory.open(gpu).handle
    index, slot = next(one for one in handle.live_slots() if one[1].identity.replica == replica)
    assert handle.raise_desired(index, slot.incarnation, update)[0]


def test_overtaken_at_a_later_replica_every_member_has_an_entry(
    ledger_dir: Path, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication that is overtaken at the second replica tells of all members what is stored there."""
    for replica in (0, 1):
        subscribe(gpus=("cpu-0", "cpu-1"), replica=replica)

    import kvcached.ledger.publication as module  # noqa: PLC0415 - to step in between the look and the writing

    look_up = module.look_up

    def look_then_be_late(directory: LedgerDirectory, *arguments: object) -> object:
        found = look_up(directory, *arguments)  # type: ignore[arg-type]
        raise_member(directory, "cpu-0", 1, Update(9, 7))
        return found

    monkeypatch.setattr(module, "look_up", look_then_be_late)
    result = publish(5, "engine", str(ledger_dir))
    assert (result.status, result.revision) == ("superseded", 1)
    assert [(gpu.gpu, gpu.replica, gpu.status, gpu.revision, gpu.limit_tokens) for gpu in result.gpus] == [
        ("cpu-0", 0, "published", 1, 5),
        ("cpu-1", 0, "published", 1, 5),
        ("cpu-0", 1, "superseded", 9, 7),
        ("cpu-1", 1, "superseded", 0, 16000),
    ]


def test_a_condition_that_does_not_hold_tells_what_is_stored(ledger_dir: Path, subscribe: Subscribe) -> None:
    """With if_revision unmet the result has an entry for each member, missing ones too, though nothing was written."""
    subscribe(gpus=("cpu-0", "cpu-1"))
    publish(5, "engine", str(ledger_dir))
    (ledger_dir / "cpu-1.ledger").unlink()
    result = publish(6, "engine", str(ledger_dir), if_revision=0)
    assert [(gpu.gpu, gpu.status, gpu.revision, gpu.limit_tokens) for gpu in result.gpus] == [
        ("cpu-0", "superseded", 1, 5),
        (UNKNOWN_GPU, "failed", None, None),
    ]


# Only if


def test_if_different_publishes_only_another_limit(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A limit that is desired everywhere is accepted, unchanged, and written no second time."""
    subscribe()
    first = publish(5, "engine", str(ledger_dir), if_different=True)
    again = publish(5, "engine", str(ledger_dir), if_different=True)
    assert (first.accepted, first.unchanged, first.revision) == (True, False, 1)
    assert (again.accepted, again.unchanged, again.revision) == (True, True, 1)
    assert {(gpu.status, gpu.revision, gpu.limit_tokens) for gpu in again.gpus} == {("published", 1, 5)}
    assert len(again.gpus) == 2
    assert publish(6, "engine", str(ledger_dir), if_different=True).revision == 2
    assert desired(ledger_dir) == [(2, 6)] * 2


def test_if_different_repairs_a_split(ledger_dir: Path, subscribe: Subscribe) -> None:
    """While members differ, or one is missing, the limit is not desired everywhere, and is published."""
    subscribe()
    publish(5, "engine", str(ledger_dir))
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        raise_member(directory, "cpu-0", 0, Update(7, 5))
    assert publish(5, "engine", str(ledger_dir), if_different=True).revision == 8
    (ledger_dir / "cpu-1.ledger").unlink()
    result = publish(5, "engine", str(ledger_dir), if_different=True)
    assert (result.status, result.unchanged) == ("partial", False)


def test_if_incarnation_notices_a_restart_that_a_revision_does_not(ledger_dir: Path, subscribe: Subscribe) -> None:
    """After a restart with as many publications the revision is the same, and the incarnation is not."""
    first = subscribe()
    before = publish(5, "engine", str(ledger_dir))
    (instance,) = get_instances(ledger_dir)
    assert before.incarnation == instance.incarnation == instance.replicas[0].incarnation
    assert before.incarnation == before.to_dict()["incarnation"] == instance.to_dict()["incarnation"]
    assert len(before.incarnation) == 16
    assert publish(5, "engine", str(ledger_dir), if_incarnation=before.incarnation.upper()).accepted
    first.close()
    subscribe()
    publish(5, "engine", str(ledger_dir))
    publish(5, "engine", str(ledger_dir))
    result = publish(6, "engine", str(ledger_dir), if_revision=2, if_incarnation=before.incarnation)
    assert (result.status, result.revision) == ("superseded", 0)
    assert "was restarted or registered again" in result.warnings[0]
    assert desired(ledger_dir) == [(2, 5)] * 2


def test_incarnation_of_several_replicas_changes_with_any_of_them(ledger_dir: Path, subscribe: Subscribe) -> None:
    """One replica that restarted makes the whole instance another one."""
    subscribe(gpus=("cpu-0",), replica=0)
    second = subscribe(gpus=("cpu-0",), replica=1)
    before = publish(5, "engine", str(ledger_dir)).incarnation
    second.close()
    subscribe(gpus=("cpu-0",), replica=1)
    assert publish(6, "engine", str(ledger_dir), if_incarnation=before).status == "superseded"


# Waiting


def test_a_wait_can_be_stopped_from_another_thread(ledger_dir: Path, subscribe: Subscribe) -> None:
    """An event that is set ends the wait; what was published stays so, and the result says it."""
    subscribe()
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    result = set_prefix_cache_retention_limit(
        5, instance_name="engine", ledger_dir=ledger_dir, wait=600.0, stop=stop, note="for now"
    )
    assert (result.accepted, result.applied) == (True, False)
    assert result.warnings[-1] == "the wait was stopped; r1 is published, and the engine will still apply it"
    assert result.waited_s is not None
    assert result.waited_s < 300


def test_an_engine_that_ends_during_a_wait_is_told_apart(ledger_dir: Path, subscribe: Subscribe) -> None:
    """The result of a wait says whether the engine ended, which is not slowness."""
    engine = subscribe()
    result = publish(5, "engine", str(ledger_dir))
    assert not wait_until_applied(result, str(ledger_dir), 0.05).engine_ended
    engine.close()
    ended = wait_until_applied(result, str(ledger_dir), 60.0)
    assert (ended.applied, ended.engine_ended, ended.to_dict()["engine_ended"]) == (False, True, True)
