"""Waiting until every replica of an instance holds to a published limit, woken by the engines' own doorbell."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from kvcached import _native
from kvcached.ledger import LedgerDirectory, LedgerDirectoryError
from kvcached.publication import SUPERSEDED, Rejection
from kvcached.replicas import find_replicas
from kvcached.values import Outcome

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.publication import PublicationResult
    from kvcached.replicas import Replica

SLICE_S = 0.25
"""How long one sleep on a doorbell lasts at most; there is one per replica, and only one can be slept on."""

ABSENCE_S = 3.0
"""How long a replica may be away before it counts as ended: one whose ledger was replaced is back within 2 s."""


@dataclass(frozen=True)
class Progress:
    """How far a wait has come: idle tokens of the replicas that are not there yet, and who they are."""

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

    Returns the result with ``applied``, ``waited_s`` and ``rejections`` filled in; who lags when the time is over, or
    ended meanwhile, stands in ``warnings``. Ends at once if a replica will not apply it or a newer publication decides.
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
        self._ledger_dir = ledger_dir
        self._deadline = deadline
        self._on_progress = on_progress
        self._expected = {gpu.replica for gpu in result.gpus}
        self._last_seen = dict.fromkeys(self._expected, time.monotonic())

    def run(self) -> PublicationResult:
        while True:
            ended = self._watch_directory()
            if ended is not None:
                return ended

    def _watch_directory(self) -> PublicationResult | None:
        """Watch the replicas of one look at the directory; None when they have to be looked up anew."""
        try:
            with LedgerDirectory(self._ledger_dir, writable=False) as directory:
                return self._watch_ledgers(directory)
        except LedgerDirectoryError as error:
            return self._end(applied=False, warning=str(error))

    def _watch_ledgers(self, directory: LedgerDirectory) -> PublicationResult | None:
        ledgers = directory.open_all()
        while True:
            bells = [(ledger, ledger.handle.bell(_native.ACKNOWLEDGED)) for ledger in ledgers]
            replicas = find_replicas(ledgers, self._result.instance_name)
            ended = self._judge(replicas)
            if ended is not None:
                return ended
            lagging = [replica for replica in replicas if not self._is_done(replica)]
            first = lagging[0].members[0].ledger if lagging else None
            slice_end = min(self._deadline, time.monotonic() + SLICE_S)
            for ledger, seen in bells:
                if ledger is first:
                    ledger.handle.wait(_native.ACKNOWLEDGED, seen, slice_end)
            if first is None or not first.is_current():
                time.sleep(max(0.0, min(slice_end - time.monotonic(), SLICE_S)))
                return None

    def _judge(self, replicas: Sequence[Replica]) -> PublicationResult | None:
        """Return the end of the wait, or None while it goes on."""
        now = time.monotonic()
        present = {replica.slot.identity.replica for replica in replicas}
        self._last_seen.update(dict.fromkeys(present & self._expected, now))
        absent = sorted(self._expected - present)
        rejections = tuple(filter(None, map(self._rejection, replicas)))
        if rejections:
            return replace(self._end(applied=False), rejections=rejections)
        if any(replica.slot.report.applied.revision > self._result.revision for replica in replicas):
            newer = self._end(applied=False, warning="a newer publication was applied meanwhile")
            return replace(newer, status=SUPERSEDED)
        lagging = [replica for replica in replicas if not self._is_done(replica)]
        if not lagging and not absent:
            return self._end(applied=True)
        gone = [replica for replica in absent if now - self._last_seen[replica] > ABSENCE_S]
        if gone:
            ended = self._end(applied=False, warning=f"replica {gone[0]} ended while waiting for it")
            return replace(ended, engine_ended=True)
        if now >= self._deadline:
            return self._end(applied=False, warning=self._who_lags(lagging, absent))
        if self._on_progress is not None:
            self._on_progress(Progress(tuple(lagging), tuple(absent), sum(map(self._excess, lagging))))
        return None

    def _rejection(self, replica: Replica) -> Rejection | None:
        report = replica.slot.report
        unsupported = report.outcome is Outcome.UNSUPPORTED_ENGINE
        if unsupported or (report.outcome.rejected and report.settled_revision >= self._result.revision):
            return Rejection(replica.slot.identity.replica, f"{report.outcome.value}: {report.reason}")
        return None

    def _is_done(self, replica: Replica) -> bool:
        return replica.slot.report.applied.revision >= self._result.revision and self._excess(replica) <= 0

    def _excess(self, replica: Replica) -> int:
        """Return how many idle tokens stand above the limit; an engine keeps a whole block of a smaller limit."""
        limit = self._result.limit_tokens
        if limit < 0:
            return 0
        allowed = max(limit, replica.slot.identity.block_tokens) if limit else 0
        return max(0, replica.slot.report.idle_tokens - allowed)

    def _who_lags(self, lagging: Sequence[Replica], absent: Sequence[int]) -> str:
        parts = [f"replica {index} is not registered" for index in absent]
        for replica in lagging:
            report = replica.slot.report
            if report.applied.revision < self._result.revision:
                parts.append(f"replica {replica.slot.identity.replica} has not applied it yet")
            else:
                reason = f" ({report.reason})" if report.reason else ""
                parts.append(
                    f"replica {replica.slot.identity.replica} still holds {report.idle_tokens} idle tokens: "
                    f"{report.outcome.value}{reason}"
                )
        return "; ".join(parts)

    def _end(self, *, applied: bool, warning: str | None = None) -> PublicationResult:
        warnings = (*self._result.warnings, warning) if warning else self._result.warnings
        return replace(self._result, applied=applied, waited_s=0.0, warnings=warnings)
