"""The history tells what the record holds, in the order in which it was recorded, and what it knows no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from kvcached.arguments import MAX_NOTE_BYTES
from kvcached.control.diagnosis.ledger_directory import LEDGER_BYTES
from kvcached.control.queries.publication_history import RECORDS
from kvcached.ledger import binding
from kvcached.ledger.contents import AuditRecord
from kvcached.ledger.directory import LedgerDirectory
from kvcached.ledger.publication import publish
from kvcached.values import Update

if TYPE_CHECKING:
    from pathlib import Path

    from support.commands import Control, Toys


def test_record_that_lost_the_older_ones_says_so(control: Control, toys: Toys) -> None:
    """With many instances on a GPU, one whose publications have left the record is not said to have had none."""
    names = [f"inst-{number}" for number in range(40)]
    toys.start(*names, step_s=3600)
    assert control.run("status", "--history", "--instance", "inst-1").stdout.endswith(
        "nothing was published to inst-1 yet\n"
    )
    for some in (names, names[2:], names[2:]):
        for name in some:
            assert publish(5000, name, str(control.directory)).accepted
    text = control.run("status", "--history", "--instance", "inst-1").stdout
    assert "nothing was published" not in text
    assert text.endswith(
        "the record keeps the last 64 publications of each GPU, to all instances together; none to inst-1 is in it\n"
    )
    assert "older ones are gone" in control.run("status", "--history", "--instance", "inst-39").stdout
    found = control.json("status", "--history", "--instance", "inst-39")
    assert (len(found["history"]), found["history_complete"]) == (2, False)


def test_short_record_is_complete(control: Control, toys: Toys) -> None:
    """A record that holds everything since the engine's start says nothing of older publications."""
    toys.start("chat", gpus="GPU-0,GPU-1")
    for limit in ("5k", "6k"):
        control.run("set", limit, "--instance", "chat")
    found = control.json("status", "--history")
    assert (len(found["history"]), found["history_complete"]) == (2, True)
    assert "gone" not in control.run("status", "--history").stdout


def test_time_has_year_and_zone(control: Control, toys: Toys) -> None:
    """The time of a publication is told with its year and its distance from UTC."""
    toys.start("chat")
    control.run("set", "5k", "--instance", "chat")
    text = control.run("status", "--history", TZ="Asia/Kolkata").stdout
    assert re.search(r"chat +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\+05:30 ", text)


def test_order_is_by_sequence_and_not_by_the_clock(control: Control, toys: Toys) -> None:
    """After the clock was set back, publications are still told in the order in which they were made."""
    toys.start("chat", gpus="GPU-0,GPU-1")
    for limit in (1000, 2000, 3000):
        publish(limit, "chat", str(control.directory))
    with LedgerDirectory(str(control.directory), writable=True) as directory:
        for ledger in directory.open_all():
            (newest, *_) = ledger.handle.audits()
            early = AuditRecord(5, Update(3, 3000), Update(4, 4000), newest.uid, 1, "chat", "late", "")
            ledger.handle.audit(early)
    found = control.json("status", "--history")["history"]
    assert [entry["new"]["limit_tokens"] for entry in found] == [1000, 2000, 3000, 4000]
    assert {entry["members"] for entry in found} == {2}


def program_of(directory: Path, *command: str) -> str:
    """Run a program that publishes, and return the name under which the record has it."""
    subprocess.run([sys.executable, *command, str(directory)], check=True, cwd=directory.parent)
    with LedgerDirectory(str(directory), writable=False) as opened:
        (ledger,) = opened.open_all()
        return ledger.handle.audits()[0].program


def test_program_names_are_true(control: Control, toys: Toys) -> None:
    """A module, a folder, a script and code on the command line are recorded as what they are, not as this command."""
    toys.start("chat")
    code = (
        "import sys; from kvcached.ledger.publication import publish; assert publish(5, 'chat', sys.argv[1]).accepted"
    )
    folder = control.directory.parent
    (folder / "autotune").mkdir()
    (folder / "autotune" / "__init__.py").touch()
    (folder / "autotune" / "__main__.py").write_text(code)
    (folder / "nightly.py").write_text(code)
    assert program_of(control.directory, "-m", "autotune") == "autotune"
    assert program_of(control.directory, "autotune") == "autotune"
    assert program_of(control.directory, "nightly.py") == "nightly.py"
    assert program_of(control.directory, "-c", code) == "python"
    control.run("set", "5k", "--instance", "chat")
    assert control.json("status", "--history")["history"][-1]["program"] == "kvcached-control"


def test_numbers_agree_with_the_library(control: Control, toys: Toys) -> None:
    """What this package repeats of the library's numbers is what the library has."""
    toys.start("chat")
    library = binding._load().lib
    assert (RECORDS, LEDGER_BYTES) == (library.KVL_AUDIT_RECORDS, library.KVL_FILE_BYTES)
    assert library.KVL_NOTE_BYTES - 1 == MAX_NOTE_BYTES
    assert os.path.getsize(control.directory / "cpu-0.ledger") == LEDGER_BYTES
