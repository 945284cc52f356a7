"""Many processes publish to one engine while others watch; an independent checker judges what they wrote down."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.forked import popen

from history import seeded_faults
from history.actors import INITIAL
from history.checker import Apply, History, Look, Poll, Raise, check
from history.recorder import MEMBERS
from kvcached.values import Bound

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.forked import Process

PATIENCE_S = 240
PUBLICATIONS = int(os.environ.get("KVCACHED_TEST_PUBLICATIONS", "60"))
"""Of each of the sixteen publishers; set it for a long run."""


class Stage:
    """Starts actors and collects what they recorded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledger_dir = directory / "ledgers"
        self.ledger_dir.mkdir(mode=0o700)
        self.started: list[Process] = []

    def start(self, role: str, **options: object) -> Process:
        """Start an actor; engines are waited for."""
        record = self.directory / f"{len(self.started)}-{role}.json"
        command = [sys.executable, "-m", "history.run", role, "--ledger-dir", str(self.ledger_dir)]
        command += ["--record", str(record)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(process)
        if role in ("engine", "holder"):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return process

    def records(self, role: str) -> list[dict[str, Any]]:
        """Return what all actors of a role recorded."""
        return [json.loads(path.read_text()) for path in sorted(self.directory.glob(f"*-{role}.json"))]

    def stop(self) -> None:
        """End what is left."""
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Return a stage in a directory of its own."""
    stage = Stage(tmp_path)
    yield stage
    stage.stop()


def play(stage: Stage, publishers: int, count: int, fault: str = "none") -> tuple[dict[Bound, History], dict[str, int]]:
    """Let publishers publish at once while an engine works and two observers look; the histories and the statuses."""
    engine = stage.start("engine", fault=fault)
    observers = [stage.start("observer", seed=seed) for seed in (1, 2)]
    writers = [stage.start("publisher", seed=seed, count=count, fault=fault) for seed in range(1, publishers + 1)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        assert writer.wait(PATIENCE_S) == 0
    for other in (engine, *observers):
        other.terminate()
        assert other.wait(PATIENCE_S) == 0
    return read_history(stage)


def read_history(stage: Stage) -> tuple[dict[Bound, History], dict[str, int]]:
    """Put the records of all actors together, those of each bound by itself."""
    (engine,) = stage.records("engine")
    statuses: dict[str, int] = {}
    for record in stage.records("publisher"):
        for status, _, _ in record["results"]:
            statuses[status] = statuses.get(status, 0) + 1
    return {bound: history_of(bound, engine, stage) for bound in Bound}, statuses


def history_of(bound: Bound, engine: dict[str, Any], stage: Stage) -> History:
    """Return what was recorded of one bound.

    A poll returns one update, so one that returned the other bound's says nothing of this one.
    """
    initial = (INITIAL[bound].revision, INITIAL[bound].limit_tokens)
    history = History(MEMBERS, initial, [tuple(word) for word in engine["final"][bound.value]])
    for record in stage.records("publisher"):
        for start, end, member, which, word, raised, found in record["raises"]:
            if which == bound.value:
                history.raises.append(Raise(start, end, member, tuple(word), raised, tuple(found)))
        for status, which, word in record["results"]:
            if status == "accepted" and which == bound.value:
                history.accepted.append(tuple(word))
    for record in stage.records("observer"):
        looks = [look for look in record["looks"] if look[3] == bound.value]
        history.looks += [Look(start, end, member, tuple(word)) for start, end, member, _, word in looks]
    for start, end, which, word, settled in engine["polls"]:
        if which in (bound.value, None):
            history.polls.append(Poll(start, end, tuple(word) if word else None, settled[bound.value]))
    applies = [apply for apply in engine["applies"] if apply[3] == bound.value]
    history.applies = [Apply(at, rank, step, tuple(word)) for at, rank, step, _, word in applies]
    return history


def check_all(histories: dict[Bound, History]) -> list[str]:
    """Return the violations of both bounds."""
    return [f"{bound.value}: {problem}" for bound, history in histories.items() for problem in check(history)]


def test_sixteen_publishers_leave_a_clean_history(stage: Stage) -> None:
    """Revisions only grow, members end equal, and the newest is applied at the same steps on all ranks."""
    histories, statuses = play(stage, publishers=16, count=PUBLICATIONS)
    assert check_all(histories) == []
    assert sum(statuses.values()) == 16 * PUBLICATIONS
    assert set(statuses) <= {"accepted", "superseded"}
    for bound, history in histories.items():
        won = [op for op in history.raises if op.raised]
        print(
            f"{bound.value}: {len(won)} words written, {len(history.raises) - len(won)} attempts lost, "
            f"{len(history.looks)} looks, {len(history.polls)} polls, {len(history.applies)} applies, "
            f"results {statuses}, end {history.final[0]}"
        )


@pytest.mark.parametrize(
    "fault", [*seeded_faults.ENGINE_FAULTS, *seeded_faults.PUBLISHER_FAULTS, *seeded_faults.RANK_FAULTS]
)
def test_seeded_faults_are_found(stage: Stage, fault: str) -> None:
    """A history of a product with a mistake in it does not pass."""
    count = 60
    for _ in range(3):  # races need not happen in every run
        histories, _ = play(stage, publishers=4, count=count, fault=fault)
        problems = check_all(histories)
        if problems:
            print(len(problems), problems[0])
            return
        for path in stage.directory.glob("*.json"):
            path.unlink()
        count *= 2
    pytest.fail(f"{fault} was not found")


# The checker itself: small histories by hand


def made(**changes: list[Any]) -> History:
    """Return a clean history of two members and one publication, changed as told."""
    history = History(
        members=2,
        initial=(0, 9),
        final=[(1, 5), (1, 5)],
        raises=[
            Raise(10, 20, 0, (1, 5), raised=True, found=(0, 9)),
            Raise(30, 40, 1, (1, 5), raised=True, found=(0, 9)),
        ],
        looks=[Look(12, 18, 0, (0, 9)), Look(15, 45, 1, (1, 5))],
        polls=[Poll(5, 6, None, 0), Poll(50, 60, (1, 5), 0), Poll(80, 90, None, 1)],
        applies=[Apply(70, 0, 3, (1, 5)), Apply(71, 1, 3, (1, 5))],
    )
    for name, value in changes.items():
        setattr(history, name, value)
    return history


def test_checker_accepts_a_clean_history() -> None:
    """The history that the others are variations of has no fault."""
    assert check(made()) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"looks": [Look(21, 22, 0, (0, 9))]}, "still seen after"),
        ({"looks": [Look(1, 9, 0, (1, 5))]}, "seen before it was written"),
        ({"looks": [Look(1, 9, 0, (7, 7))]}, "which nobody wrote"),
        ({"final": [(1, 5), (0, 9)]}, "stands at the end"),
        ({"polls": [Poll(5, 6, None, 0), Poll(80, 90, None, 0)]}, "I4: a poll returned None"),
        ({"polls": [Poll(1, 2, (1, 5), 0)]}, "had not stood in all members"),
        ({"polls": [Poll(50, 60, (1, 5), 0), Poll(61, 62, (0, 9), -1)]}, "after it had returned"),
        ({"polls": [Poll(50, 60, (1, 5), 1)]}, "after revision 1 was settled"),
        ({"applies": [Apply(70, 0, 3, (1, 5)), Apply(71, 1, 4, (1, 5))]}, "I3"),
        ({"applies": [Apply(70, 0, 3, (1, 5)), Apply(75, 0, 4, (1, 5))]}, "I2"),
        ({"applies": [Apply(25, 0, 3, (1, 5))]}, "I1"),
        ({"applies": []}, "nothing was ever applied"),
        ({"accepted": [(1, 5), (1, 6)]}, "accepted: (1, 6)"),
        ({"raises": [Raise(10, 20, 0, (3, 5), raised=True, found=(0, 9))]}, "revision 3 was taken"),
    ],
)
def test_checker_finds_each_kind_of_violation(changes: dict[str, Any], expected: str) -> None:
    """Each promise, broken in the smallest way, is named."""
    assert any(expected in problem for problem in check(made(**changes))), check(made(**changes))


def linearizable_by_search(history: History) -> bool:
    """Decide the same question for one member by trying all orders: slow, and obviously right."""
    operations: list[Raise | Look] = [*history.raises, *history.looks]

    def possible(done: frozenset[int], word: tuple[int, int]) -> bool:
        if len(done) == len(operations):
            return word == history.final[0]
        left = [index for index in range(len(operations)) if index not in done]
        first_end = min(operations[index].end for index in left)
        for index in left:
            operation = operations[index]
            if operation.start > first_end:
                continue
            if isinstance(operation, Look):
                fits, after = operation.word == word, word
            elif operation.raised:
                fits, after = operation.found == word and operation.word[0] > word[0], operation.word
            else:
                fits, after = operation.found == word and word[0] >= operation.word[0], word
            if fits and possible(done | {index}, after):
                return True
        return False

    return possible(frozenset(), history.initial)


def random_member_history(generator: random.Random) -> History:
    """Return what one member may have been through, often with something impossible in it."""
    raises, looks, word, now = [], [], (0, 9), 0
    for revision in range(1, generator.randint(1, 4)):
        now += generator.randint(1, 10)
        start, end = now - generator.randint(0, 12), now + generator.randint(0, 12)
        raises.append(Raise(start, end, 0, (revision, revision), raised=True, found=word))
        if generator.random() < 0.4:
            lost = (generator.choice([revision, revision - 1]), 77)
            if lost[0] > 0:
                raises.append(
                    Raise(now, now + generator.randint(0, 9), 0, lost, raised=False, found=(revision, revision))
                )
        word = (revision, revision)
    for _ in range(generator.randint(0, 4)):
        seen = generator.choice([(0, 9), *[op.word for op in raises if op.raised]])
        start = generator.randint(0, max(1, now))
        looks.append(Look(start, start + generator.randint(0, 15), 0, seen))
    return History(members=1, initial=(0, 9), final=[word], raises=raises, looks=looks)


def test_checker_agrees_with_an_exhaustive_search() -> None:
    """On small random histories of one member, the quick decision is that of trying all orders."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        history = random_member_history(generator)
        expected = linearizable_by_search(history)
        problems = [problem for problem in check(history) if problem.startswith("member")]
        assert (not problems) == expected, (history, problems)
        outcomes[expected] += 1
    assert min(outcomes.values()) > 300, outcomes
