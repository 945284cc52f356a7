"""An independent checker of recorded histories: it knows the promises and nothing of the product.

A history is of one bound, limit or cap: the two have nothing to do with each other, so each is judged by itself, and
whatever one of them got from the other is something that nobody wrote there.

The promises are I1 to I4, that each member's word is linearizable, and that revisions are counted one by one.

A history is what many processes wrote down about themselves, with CLOCK_MONOTONIC in nanoseconds, which all processes
of a machine share. Every operation is an interval: it took effect at some instant between its start and its end.

* :class:`Raise` - one attempt of a publisher to raise one member's word; ``found`` is the word replaced, or that won.
* :class:`Look` - an observer read one member's word.
* :class:`Poll` - the engine asked for news and got a pair, or None. ``settled`` is the revision it had settled before.
* :class:`Apply` - one rank took a pair over at one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

Word: TypeAlias = tuple[int, int]
"""A pair of revision and limit."""


class Raise(NamedTuple):
    """One compare-and-swap of a publisher."""

    start: int
    end: int
    member: int
    word: Word
    raised: bool
    found: Word


class Look(NamedTuple):
    """One word as an observer read it."""

    start: int
    end: int
    member: int
    word: Word


class Poll(NamedTuple):
    """One question of the engine for news."""

    start: int
    end: int
    word: Word | None
    settled: int


class Apply(NamedTuple):
    """One rank taking a pair over."""

    at: int
    rank: int
    step: int
    word: Word


@dataclass
class History:
    """Everything that was recorded of one replica from its registration to its end."""

    members: int
    initial: Word
    final: list[Word]
    raises: list[Raise] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    applies: list[Apply] = field(default_factory=list)
    accepted: list[Word] = field(default_factory=list)
    """What publishers were told to be written everywhere."""


class Stay(NamedTuple):
    """How long a word was in one member: set between ``earliest`` and ``set_end``, replaced before ``latest``."""

    earliest: int
    set_end: int
    replaced_start: int
    latest: int


FOREVER = 2**63
Stays: TypeAlias = list[dict[Word, Stay]]


def check(history: History) -> list[str]:
    """Return every violation found, each as a sentence; an empty list is a clean history."""
    problems: list[str] = []
    stays: Stays = []
    for member in range(history.members):
        stays.append(_check_member(history, member, problems))
    _check_counting(history, problems)
    if problems:
        return problems  # what follows reasons about words whose order is known
    _check_polls(history, stays, problems)
    _check_applies(history, stays, problems)
    problems += [
        f"accepted: {word} was not written into all members"
        for word in history.accepted
        if any(word not in stay for stay in stays)
    ]
    _check_end(history, problems)
    return problems


def _check_counting(history: History, problems: list[str]) -> None:
    """Check that no revision is passed over: a publisher takes the one after the highest of its bound."""
    tried = {op.word for op in history.raises}
    highest = max((word[0] for word in tried), default=history.initial[0])
    if highest - history.initial[0] > len(tried):
        problems.append(f"revision {highest} was taken, though only {len(tried)} words were ever tried")


def _check_member(history: History, member: int, problems: list[str]) -> dict[Word, Stay]:
    """Check that one member's word is linearizable as a register that only rises.

    Words are unique and each success names its predecessor, so at most one order of the writes is possible. In that
    order each write, and each read of it, is given the earliest instant that it can have; if one of them has to lie
    behind the end of its operation, no other choice would help.
    """
    writes = sorted((op for op in history.raises if op.member == member and op.raised), key=lambda op: op.word)
    reads = _reads_of(history, member, problems)
    current, now = history.initial, 0
    instants = {current: 0}
    for write in writes:
        if write.found != current:
            problems.append(f"member {member}: {write.word} replaced {write.found}, but {current} stood there")
        if write.word[0] <= current[0]:
            problems.append(f"member {member}: {write.word} was written over {current}: revisions only grow")
        now = max(now, write.start, *(start for start, _ in reads.get(current, [(0, 0)])))
        if now > write.end:
            problems.append(f"member {member}: {current} was still seen after {write.word} had replaced it")
        instants[write.word] = now
        current = write.word
    for word, intervals in reads.items():
        if word not in instants:
            problems.append(f"member {member}: {word} was seen, which nobody wrote")
        elif any(end < instants[word] for _, end in intervals):
            problems.append(f"member {member}: {word} was seen before it was written")
    if history.final[member] != current:
        problems.append(f"member {member}: {history.final[member]} stands at the end, but {current} was written last")
    return _stays_of(history.initial, writes)


def _reads_of(history: History, member: int, problems: list[str]) -> dict[Word, list[tuple[int, int]]]:
    """Return when which word was seen in one member: by observers, and by publishers that lost against it."""
    reads: dict[Word, list[tuple[int, int]]] = {}
    for attempt in history.raises:
        if attempt.member == member and not attempt.raised:
            reads.setdefault(attempt.found, []).append((attempt.start, attempt.end))
            if attempt.found[0] < attempt.word[0]:
                problems.append(f"member {member}: {attempt.word} lost against the lower {attempt.found}")
    for look in history.looks:
        if look.member == member:
            reads.setdefault(look.word, []).append((look.start, look.end))
    return reads


def _stays_of(initial: Word, writes: list[Raise]) -> dict[Word, Stay]:
    chain = [Raise(0, 0, 0, initial, raised=True, found=initial), *writes]
    stays = {one.word: Stay(one.start, one.end, other.start, other.end) for one, other in pairwise(chain)}
    stays[chain[-1].word] = Stay(chain[-1].start, chain[-1].end, FOREVER, FOREVER)
    return stays


def _common(stays: Stays, word: Word) -> tuple[int, int] | None:
    """Return the longest time in which ``word`` may have been in all members; None if there is none."""
    found = [stay.get(word) for stay in stays]
    known = [stay for stay in found if stay is not None]
    if len(known) < len(found):
        return None
    start, end = max(stay.earliest for stay in known), min(stay.latest for stay in known)
    return (start, end) if start <= end else None


def _check_polls(history: History, stays: Stays, problems: list[str]) -> None:
    """I1 for every pair offered, and no pair is skipped that was stored everywhere during a whole poll."""
    certain = sorted(
        (max(stay[word].set_end for stay in stays), min(stay[word].replaced_start for stay in stays), word)
        for word in set.intersection(*(set(stay) for stay in stays))
    )
    position, standing = 0, history.initial
    until = FOREVER
    newest = history.initial
    for poll in sorted(history.polls):
        if poll.word is not None:
            when = _common(stays, poll.word)
            if when is None or when[0] > poll.end:
                problems.append(f"I1: a poll returned {poll.word}, which had not stood in all members by then")
            if poll.word < newest:
                problems.append(f"I2: a poll returned {poll.word} after it had returned {newest}")
            newest = max(newest, poll.word)
            if poll.word[0] <= poll.settled:
                problems.append(f"I2: a poll returned {poll.word} after revision {poll.settled} was settled")
        while position < len(certain) and certain[position][0] < poll.start:
            _, until, standing = certain[position]
            position += 1
        if standing[0] > poll.settled and until > poll.end and poll.word != standing and standing[1] >= -1:
            problems.append(f"I4: a poll returned {poll.word} while {standing} stood in all members, unsettled")


def _check_applies(history: History, stays: Stays, problems: list[str]) -> None:
    offered = {poll.word for poll in history.polls}
    by_rank: dict[int, list[Apply]] = {}
    for apply in sorted(history.applies):
        by_rank.setdefault(apply.rank, []).append(apply)
        when = _common(stays, apply.word)
        if when is None or when[0] > apply.at:
            problems.append(f"I1: rank {apply.rank} applied {apply.word}, which had not stood in all members")
        elif apply.word not in offered:
            problems.append(f"I1: rank {apply.rank} applied {apply.word}, which no poll returned")
    for rank, applies in by_rank.items():
        for one, other in pairwise(applies):
            if other.word[0] <= one.word[0]:
                problems.append(f"I2: rank {rank} applied {other.word} after {one.word}")
    did = {rank: [(apply.step, apply.word) for apply in applies] for rank, applies in by_rank.items()}
    for rank, steps in did.items():
        if steps != did[min(did)]:
            different = next(
                (pair for pair in zip(steps, did[min(did)], strict=False) if pair[0] != pair[1]), "the end"
            )
            problems.append(f"I3: rank {rank} and rank {min(did)} differ at {different}")


def _check_end(history: History, problems: list[str]) -> None:
    """I4: without further publications all members are equal, and every rank has applied what they store."""
    if len(set(history.final)) > 1:
        problems.append(f"I4: the members end apart: {history.final}")
        return
    newest = max([op.word for op in history.raises if op.raised], default=history.initial)
    if history.final[0] != newest:
        problems.append(f"I4: {history.final[0]} stands at the end, but {newest} was published")
    last: dict[int, Word] = {}
    for apply in sorted(history.applies):
        last[apply.rank] = apply.word
    for rank, word in last.items():
        if word != newest:
            problems.append(f"I4: rank {rank} ends with {word}, but {newest} was published")
    if newest != history.initial and not last:
        problems.append(f"I4: nothing was ever applied, but {newest} was published")
