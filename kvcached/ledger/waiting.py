"""Waiting until every replica of an instance applies a published limit, woken by the engines' own doorbell."""

from __future__ import annotations

import time
from contextlib import suppress

from kvcached.ledger import ACKNOWLEDGED
from kvcached.ledger.open_ledger import LISTEN_S
from kvcached.ledger.publication import SUPERSEDED, Rejection
from kvcached.ledger.replicas import newest_revision
from kvcached.ledger.snapshot import look_again, open_snapshot
from kvcached.light_dataclasses import dataclass, replace
from kvcached.values import UNLIMITED, Bound, Outcome, kept_tokens

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcached.ledger.open_ledger import Ledger
    from kvcached.ledger.publication import PublicationResult
    from kvcached.ledger.replicas import Replica
    from kvcached.ledger.snapshot import FileLook, Snapshot
    from kvcached.values import BoundReport

ABSENCE_S = 3.0
"""How long a replica may be away before it counts as ended: one whose ledger was replaced is back within 2 s."""


@dataclass(frozen=True)
class Progress:
    """How far a wait has come: which replicas are not there yet, and their tokens beyond the limit or the cap."""

    lagging: tuple[Replica, ...]
    absent: tuple[int, ...]
    excess_tokens: int


def wait_until_applied(
    result: PublicationResult,
    ledger_dir: str,
    timeout_s: float,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    since: float | None = None,
) -> PublicationResult:
    """Wait until all replicas report ``result`` applied and hold no more idle tokens than its limit.

    A cap is waited for until all engines say that it is applied, which they say when the memory beyond it is returned,
    or, where theirs cannot be, when no more tokens are held.

    Returns the result with ``applied``, ``waited_s``, ``rejections`` and ``engine_ended`` filled in; ``warnings`` say
    who lags when the time is over, or who ended. Ends at once if a replica will not apply it or was restarted, or if a
    newer publication decides. A replica whose ledger or directory is away for a moment is waited for, as its engine
    registers again; one that cannot be read is waited for until the end.
    Seconds count from ``since``, a ``time.monotonic()``; by default from now.
    """
    started = time.monotonic() if since is None else since
    waiter = _Waiter(result, ledger_dir, started + timeout_s, on_progress)
    ended = waiter.run()
    return replace(ended, waited_s=round(time.monotonic() - started, 6))


class _Waiter:
    def __init__(
        self,
        result: PublicationResult,
        ledger_dir: str,
        deadline: float,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._result = result
        self._bound = result.bound
        self._ledger_dir = ledger_dir
        self._deadline = deadline
        self._on_progress = on_progress
        self._expected = {gpu.replica for gpu in result.gpus}
        self._last_seen = dict.fromkeys(self._expected, time.monotonic())

    def run(self) -> PublicationResult:
        while True:
            with open_snapshot(self._ledger_dir) as snapshot:
                ended = self._watch(snapshot)
            if ended is not None:
                return ended

    def _watch(self, snapshot: Snapshot) -> PublicationResult | None:
        """Watch the ledgers of one look at the directory; None when they have to be looked up again."""
        while True:
            try:
                bells = {ledger.gpu: ledger.bell(ACKNOWLEDGED) for ledger in snapshot.ledgers}
            except OSError:  # one was cut in this moment: its engine makes a new one
                time.sleep(max(0.0, min(LISTEN_S, self._deadline - time.monotonic())))
                return None
            if snapshot.fault is None:
                snapshot = look_again(snapshot.path, snapshot.files)
            ended = self._judge(snapshot)
            if ended is not None:
                return ended
            lagging = [one for one in self._mine(snapshot) if not self._is_done(one)]
            self._sleep(lagging[0].members[0].ledger if lagging else None, bells)
            # All of them, not only the one that is slept on: any other may have lost its ledger meanwhile.
            if not lagging or self._is_incomplete(snapshot) or not all(map(_is_current, snapshot.files)):
                return None

    def _sleep(self, ledger: Ledger | None, bells: Mapping[str, int]) -> None:
        """Sleep until an engine rings, for a slice at most and never beyond the deadline.

        Each replica has a doorbell of its own, and only one can be slept on.
        """
        slice_end = min(self._deadline, time.monotonic() + LISTEN_S)
        if ledger is not None and ledger.is_current():
            with suppress(OSError):  # lost in this moment: the rest of the slice is slept
                ledger.wait(ACKNOWLEDGED, bells[ledger.gpu], slice_end)
                return
        time.sleep(max(0.0, slice_end - time.monotonic()))

    def _mine(self, snapshot: Snapshot) -> Sequence[Replica]:
        return snapshot.of(self._result.instance_name).replicas

    def _is_incomplete(self, snapshot: Snapshot) -> bool:
        """Return whether replicas, or members of them, are to be looked for in files that were not there before."""
        mine = self._mine(snapshot)
        present = {replica.slot.identity.replica for replica in mine}
        return not self._expected <= present or any(replica.missing for replica in mine)

    def _judge(self, snapshot: Snapshot) -> PublicationResult | None:
        """Return the end of the wait, or None while it goes on."""
        now, replicas = time.monotonic(), self._mine(snapshot)
        present = {replica.slot.identity.replica for replica in replicas}
        self._last_seen.update(dict.fromkeys(present & self._expected, now))
        absent = sorted(self._expected - present)
        lagging = [replica for replica in replicas if not self._is_done(replica)]
        if not lagging and not absent:
            return self._end(applied=True)
        ended = self._in_vain(replicas)
        if ended is not None:
            return ended
        gone = [replica for replica in absent if now - self._last_seen[replica] > ABSENCE_S]
        if gone and not snapshot.unseen:  # what could not be looked at may well be alive
            return self._gone(gone[0], snapshot)
        if now >= self._deadline:
            warning = "; ".join([*self._who_lags(lagging, absent), *snapshot.unseen])
            return self._end(applied=False, warning=warning)
        if self._on_progress is not None:
            self._on_progress(Progress(tuple(lagging), tuple(absent), sum(map(self._excess, lagging))))
        return None

    def _in_vain(self, replicas: Sequence[Replica]) -> PublicationResult | None:
        """Return the end of the wait if a replica is there that will not apply the publication any more."""
        rejections = tuple(filter(None, map(self._rejection, replicas)))
        if rejections:
            return replace(self._end(applied=False), rejections=rejections)
        if any(self._is_overtaken(replica) for replica in replicas):
            newer = self._end(applied=False, warning="a newer publication was applied in the meantime")
            return replace(newer, status=SUPERSEDED)
        restarted = [replica.slot.identity.replica for replica in replicas if self._is_restarted(replica)]
        if restarted:
            warning = f"replica {restarted[0]} restarted in the meantime, which drops the publication; publish again"
            return replace(self._end(applied=False, warning=warning), engine_ended=True)
        return None

    def _gone(self, index: int, snapshot: Snapshot) -> PublicationResult:
        why = f": {snapshot.reason}" if snapshot.reason else ""
        warning = f"replica {index} ended during the wait, which drops the publication{why}"
        return replace(self._end(applied=False, warning=warning), engine_ended=True)

    def _is_restarted(self, replica: Replica) -> bool:
        """Return whether nothing of the publication is left in a replica: it is not the engine that got it.

        An engine that registers again keeps what was accepted. A new engine begins at revision 0, under the
        same name and maybe the same pid.
        """
        newest = newest_revision([replica], self._bound)
        return newest < self._result.revision and self._answer(replica).settled_revision < self._result.revision

    def _is_overtaken(self, replica: Replica) -> bool:
        applied = self._answer(replica).applied
        return applied.revision > self._result.revision and applied.limit_tokens != self._result.limit_tokens

    def _rejection(self, replica: Replica) -> Rejection | None:
        answer = self._answer(replica)
        unsupported = answer.outcome is Outcome.UNSUPPORTED_ENGINE
        if unsupported or (answer.outcome.rejected and answer.settled_revision >= self._result.revision):
            return Rejection(replica.slot.identity.replica, f"{answer.outcome.value}: {answer.reason}")
        return None

    def _is_done(self, replica: Replica) -> bool:
        answer = self._answer(replica)
        applied = answer.applied
        newest = applied.revision >= self._result.revision and applied.limit_tokens == self._result.limit_tokens
        if self._bound is Bound.CAP:
            return newest and answer.outcome is Outcome.APPLIED
        return newest and self._excess(replica) <= 0

    def _excess(self, replica: Replica) -> int:
        """Return how many tokens are above the cap, or how many idle ones above what is kept under the limit."""
        report, tokens = replica.slot.report, self._result.limit_tokens
        if self._bound is Bound.CAP:
            return max(0, report.idle_tokens + report.active_tokens - tokens) if tokens != UNLIMITED else 0
        kept = kept_tokens(tokens, replica.slot.identity.block_tokens)
        return max(0, report.idle_tokens - kept) if kept != UNLIMITED else 0

    def _answer(self, replica: Replica) -> BoundReport:
        return replica.slot.report.of(self._bound)

    def _who_lags(self, lagging: Sequence[Replica], absent: Sequence[int]) -> list[str]:
        parts = [f"replica {index} is not registered" for index in absent]
        for replica in lagging:
            report, answer = replica.slot.report, self._answer(replica)
            name = f"replica {replica.slot.identity.replica}"
            if answer.applied.revision < self._result.revision:
                parts.append(f"{name} has not applied it yet")
                continue
            held = f"{report.idle_tokens} idle tokens"
            if self._bound is Bound.CAP:
                held = f"{report.idle_tokens + report.active_tokens} tokens, {report.resident_bytes} bytes resident"
            reason = f" ({answer.reason})" if answer.reason else ""
            parts.append(f"{name} still holds {held}: {answer.outcome.value}{reason}")
        return parts

    def _end(self, *, applied: bool, warning: str | None = None) -> PublicationResult:
        warnings = (*self._result.warnings, warning) if warning else self._result.warnings
        return replace(self._result, applied=applied, waited_s=0.0, warnings=warnings)


def _is_current(look: FileLook) -> bool:
    """Return whether there is nothing new to find at the path of a file."""
    return look.ledger is None or look.ledger.is_current()
