"""The source rank's connection to the ledgers: what is published comes in, what became of it goes out."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.engines.sglang.agreement import PATIENCE_S
from kvcached.engines.sglang.ungoverned_scheduler import UNGOVERNED
from kvcached.ledger.subscription import REFRESH_S
from kvcached.values import Bound, Outcome, unsupported_report

if TYPE_CHECKING:
    from kvcached.engines.sglang.agreement import RankAgreement
    from kvcached.engines.sglang.doorbell import Doorbell
    from kvcached.engines.sglang.rank_messages import Startup
    from kvcached.ledger.registration import SlotPlace
    from kvcached.ledger.subscription import Subscription
    from kvcached.replica_policy import ReplicaPolicy
    from kvcached.values import Report, Update

_OPEN_OUTCOMES = frozenset({Outcome.APPLYING, Outcome.HELD, Outcome.EVICTION_FAILED})

_log = logging.getLogger(__name__)


class Source:
    """What one replica is told and what it reports. Scheduler thread only.

    Nothing is announced before all ranks agreed that they can follow. Without agreement, whatever is published is
    refused with the reason.
    """

    def __init__(
        self, startup: Startup, subscription: Subscription, doorbell: Doorbell | None, agreement: RankAgreement
    ) -> None:
        """Announce ``startup`` first, then whatever ``subscription`` brings."""
        self._subscription = subscription
        self._doorbell = doorbell
        self._agreement = agreement
        self._patient_until = time.monotonic() + PATIENCE_S
        self._refusal = ""
        self._startup: Startup | None = startup
        self._announced = dict.fromkeys(Bound, 0)
        self._open = False
        self._listened_at_bytes = 0
        self.next_refresh = 0.0
        """When the reported figures are due again, on the clock of ``time.monotonic``."""

    @property
    def began(self) -> bool:
        """Whether the replica was told what to start with."""
        return self._startup is None

    def place(self) -> SlotPlace | None:
        """Return the replica's slots in the ledgers, or None without a registration."""
        return self._subscription.place()

    def close(self) -> None:
        """Release the slots."""
        self._subscription.close()

    def collect(self) -> list[Startup | Update]:
        """Return what the replica has to be told now; nearly always nothing. Call once per iteration."""
        if self._doorbell is not None:
            self._doorbell.answer()
        if self._startup is not None:
            return self._begin(self._startup)
        update = self._subscription.poll()
        # Once per revision: the engine may hold a message back for some iterations, for instance behind a pause.
        if update is None or update.revision <= self._announced[update.bound]:
            return []
        self._announced[update.bound] = update.revision
        return [update]

    def note_served(self) -> None:
        """Take note that all ranks have served a request: who did not say by now that it can follow never will."""
        if self._startup is not None and not self._refusal and not self._agreement.is_reached(at_once=True):
            self._give_up()

    def _begin(self, startup: Startup) -> list[Startup | Update]:
        if self._refusal:
            update = self._subscription.poll()
            if update is not None:
                self._subscription.acknowledge(unsupported_report(self._refusal, update.revision))
        elif self._agreement.is_reached():
            self._startup = None
            words = self._agreement
            return [replace(startup, no_cap=words.no_cap, obstacle=words.obstacle), *self.collect()]
        elif self._agreement.is_refused or time.monotonic() >= self._patient_until:
            self._give_up()
        return []

    def _give_up(self) -> None:
        self._refusal = self._agreement.explain()
        _log.error(UNGOVERNED, self._refusal)
        self._subscription.acknowledge(unsupported_report(self._refusal))

    def acknowledge(self, policy: ReplicaPolicy) -> None:
        """Report the current state."""
        report = self._report_of(policy)
        self._open = any(report.of(bound).outcome in _OPEN_OUTCOMES for bound in Bound)
        self._subscription.acknowledge(report)

    def after_enforcement(self, policy: ReplicaPolicy) -> None:
        """Report at once if the newest publication was still waiting for evictions."""
        if self._open:
            self.acknowledge(policy)

    def refresh(self, policy: ReplicaPolicy) -> None:
        """Freshen the reported figures, and keep a scheduler awake that has something to continue with."""
        self.next_refresh = time.monotonic() + REFRESH_S
        self._listen(policy)
        self._subscription.refresh(lambda: self._report_of(policy))
        if policy.draining and self._doorbell is not None:
            self._doorbell.ring()

    def _listen(self, policy: ReplicaPolicy) -> None:
        """Ask whether another rank could not return its memory, if some was returned since the last time."""
        returned_bytes = policy.report().returned_bytes
        if returned_bytes > self._listened_at_bytes:
            self._agreement.hear_shortfalls()
        self._listened_at_bytes = returned_bytes

    def _report_of(self, policy: ReplicaPolicy) -> Report:
        """Return the report of all ranks: the others are taken to return as much as this one, unless they said not."""
        report = policy.report()
        short = self._agreement.shortfalls
        if not short:
            return report
        ranks = self._agreement.ranks
        returned = report.returned_bytes // ranks * (ranks - len(short))
        returns = "; ".join(f"rank {index}: {reason}" for index, reason in sorted(short.items()))
        return replace(report, returned_bytes=returned, resident_bytes=report.pool_bytes - returned, returns=returns)
