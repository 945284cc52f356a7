"""Hazards of a peer that may write a ledger and means ill: it can change limits, and nothing else."""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from support.toys import ToyCache, poll_now

from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription
from kvcached.policy import RetentionPolicy
from kvcached.values import Identity, Outcome, Update

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOTS_AT = 4096
MEMBERS_FIELD = 104
IDENTITY_BYTES = 136
INCARNATION_AT, SEAL_AT = SLOTS_AT + 208, SLOTS_AT + 224
"""Offsets of native/layout.h."""
PATIENCE_S = 5.0


class Engine:
    """An engine in this process, and the memory of its first ledger, to write anything into."""

    def __init__(self, ledger_dir: Path) -> None:
        identity = Identity("engine", "toy", "1", 0, 2, 1, 16000, 16)
        self.policy = RetentionPolicy(ToyCache(), 16000)
        self.subscription = Subscription(identity, ["cpu-0", "cpu-1"], str(ledger_dir))
        self.subscription.start()
        self.subscription.acknowledge(self.policy.report())
        with open(ledger_dir / "cpu-0.ledger", "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)

    def step(self) -> None:
        """Do what an engine does at each step."""
        update = poll_now(self.subscription)
        if update is not None:
            self.policy.update(update)
        self.subscription.acknowledge(self.policy.report())


@pytest.fixture
def engine(ledger_dir: Path) -> Iterator[Engine]:
    """Run an engine."""
    engine = Engine(ledger_dir)
    yield engine
    engine.subscription.close()
    engine.memory.close()


def seal(engine: Engine) -> None:
    """Seal the first slot's identity again, as a peer that knows the format can."""
    incarnation, registered_ns = struct.unpack_from("=QQ", engine.memory, INCARNATION_AT)
    inner = sealed(0, struct.pack("=QQ", incarnation, registered_ns))
    identity = engine.memory[SLOTS_AT : SLOTS_AT + IDENTITY_BYTES]
    struct.pack_into("=Q", engine.memory, SEAL_AT, sealed(inner, identity))


def sealed(key: int, data: bytes) -> int:
    """Return the seal of native/handle.h."""
    value = 14695981039346656037
    for word in (key, *struct.unpack(f"={len(data) // 8}Q", data)):
        value = (value ^ word) * 1099511628211 % 2**64
        value ^= value >> 29
    return value


def test_absurd_member_counts_cost_callers_nothing(engine: Engine, ledger_dir: Path) -> None:
    """A slot that claims four thousand million members is listed and published to at once."""
    struct.pack_into("<I", engine.memory, SLOTS_AT + MEMBERS_FIELD, 2**32 - 1)
    seal(engine)
    started = time.monotonic()
    (instance,) = get_instances(ledger_dir)
    assert instance.replicas[0].split
    assert publish(64, "engine", str(ledger_dir)).status == "partial"
    assert time.monotonic() - started < PATIENCE_S


def test_texts_reach_no_terminal_as_commands(engine: Engine, ledger_dir: Path) -> None:
    """Escape sequences and line breaks in a slot do not reach readers."""
    engine.memory[SLOTS_AT + 64 : SLOTS_AT + 80] = b"\x1b]0;owned\x07\n\xff\0\0\0\0"
    seal(engine)
    (instance,) = get_instances(ledger_dir)
    assert instance.engine.isprintable()
    assert "owned" in instance.engine


def test_random_bytes_in_all_slots_harm_nobody(engine: Engine, ledger_dir: Path) -> None:
    """Whatever follows the stamp of a ledger, an engine keeps stepping and callers get an answer."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    for _ in range(50):
        at = generator.randrange(64, len(engine.memory) - 64)
        engine.memory[at : at + 64] = generator.randbytes(64)
        engine.step()
        assert all(instance.to_dict() for instance in get_instances(ledger_dir))
        assert publish(64, "engine", str(ledger_dir)).to_dict()


def test_limit_without_meaning_is_never_applied(engine: Engine, ledger_dir: Path) -> None:
    """A peer that writes a limit below -1 into all members gets it rejected, and the limit in force stays."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        for ledger in directory.open_all():
            ((index, slot),) = ledger.handle.live_slots()
            assert ledger.handle.raise_desired(index, slot.incarnation, Update(5, -7))[0]
    for _ in range(3):
        engine.step()
    assert engine.policy.limit_tokens == 16000
    (instance,) = get_instances(ledger_dir)
    assert instance.replicas[0].outcome is Outcome.REJECTED_INVALID
    assert publish(64, "engine", str(ledger_dir)).accepted
    engine.step()
    assert engine.policy.limit_tokens == 64


def test_changed_identity_takes_the_slot_out_of_every_list(engine: Engine, ledger_dir: Path) -> None:
    """A slot whose identity was changed without its seal has no owner, and its engine registers again."""
    engine.memory[SLOTS_AT : SLOTS_AT + 4] = b"evil"
    assert get_instances(ledger_dir)[0].name == "engine"  # by its other member
    assert publish(64, "evil", str(ledger_dir)).status == "unavailable"
    deadline = time.monotonic() + PATIENCE_S
    while not publish(64, "engine", str(ledger_dir)).accepted:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_cut_ledger_ends_no_engine_and_no_caller(engine: Engine, ledger_dir: Path) -> None:
    """A peer that cuts ledgers to nothing, again and again, takes the control away for a moment, and nothing else."""
    for _ in range(2):
        os.truncate(ledger_dir / "cpu-0.ledger", 0)
        os.truncate(ledger_dir / "cpu-1.ledger", 0)
        for _ in range(100):
            engine.step()
        assert engine.policy.limit_tokens in {16000, 64}
        deadline = time.monotonic() + PATIENCE_S
        while not publish(64, "engine", str(ledger_dir)).accepted:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine.step()
        assert engine.policy.limit_tokens == 64


def test_bells_rung_without_end_change_nothing(engine: Engine, ledger_dir: Path) -> None:
    """A peer that rings all the time keeps listeners busy; what they see stays right."""
    stop = threading.Event()

    def ring() -> None:
        with LedgerDirectory(str(ledger_dir), writable=True) as directory:
            handles = [ledger.handle for ledger in directory.open_all()]
            while not stop.is_set():
                for handle in handles:
                    handle.ring(0)
                    handle.ring(1)

    ringer = threading.Thread(target=ring)
    ringer.start()
    try:
        assert not engine.subscription.wait(time.monotonic() + 0.3)
        assert publish(64, "engine", str(ledger_dir)).accepted
        assert engine.subscription.wait(time.monotonic() + PATIENCE_S)
    finally:
        stop.set()
        ringer.join()


def test_file_swapped_between_check_and_use_is_never_followed(ledger_dir: Path) -> None:
    """While a peer swaps a ledger for a symlink and back, an opening gets the ledger or a refusal, never the target."""
    with LedgerDirectory(str(ledger_dir), writable=True) as directory:
        directory.create("real")
        directory.create("target")
    target = os.stat(ledger_dir / "target.ledger")
    os.rename(ledger_dir / "target.ledger", ledger_dir / "elsewhere")
    swapper = f"""
import os
os.chdir({str(ledger_dir)!r})
os.symlink("elsewhere", "link")
while True:
    os.rename("real.ledger", "kept")
    os.rename("link", "real.ledger")
    os.rename("real.ledger", "link")
    os.rename("kept", "real.ledger")
"""
    process = subprocess.Popen([sys.executable, "-c", swapper])
    opened = refused = 0
    try:
        deadline = time.monotonic() + 60
        while (opened < 200 or refused < 200) and time.monotonic() < deadline:
            with LedgerDirectory(str(ledger_dir), writable=True) as directory:
                try:
                    ledger = directory.open("real")
                except LedgerDirectoryError:
                    refused += 1
                else:
                    opened += 1
                    assert ledger.handle.file.inode != target.st_ino
    finally:
        process.kill()
        process.wait()
    assert opened > 0
    assert refused > 0


def test_programs_that_are_started_inherit_nothing(engine: Engine, ledger_dir: Path) -> None:
    """A program that an engine starts has no descriptor of a ledger."""
    engine.step()
    script = (
        "import os; print([p for p in (os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd'))])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, close_fds=False)
    assert str(ledger_dir) not in result.stdout
