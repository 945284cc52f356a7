"""The agent of one ledger directory: makes what is stored in its ledgers equal to what the fleet wants, and reports.

Level-triggered and stateless: each round looks at the ledgers and at the documents, and publishes only what differs.
So any restart, of the agent, an engine or the store, is harmless, and an unchanged document causes no publication.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvcached.arguments import MAX_NOTE_BYTES
from kvcached.fleet.bounds import NodeBounds
from kvcached.fleet.decide import decide
from kvcached.fleet.local import LocalLedgers
from kvcached.fleet.pacing import Pacing
from kvcached.fleet.target_status import TargetState, TargetStatus
from kvcached.printable_text import printable
from kvcached.values import Bound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcached.fleet.document import Desired, DesiredTokens
    from kvcached.fleet.local import LocalTarget
    from kvcached.fleet.store import DocumentSource, Hold, Stored, Wishes

LOOK_S = 0.25
"""How long a round waits at most: a new ledger file rings no bell that is listened to yet."""

LEAST_GAP_S = 0.01
"""How soon one round may follow another, so that engines that report often do not keep the agent busy."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeIdentity:
    """Who an agent is for the fleet, and what its node allows."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    bounds: NodeBounds = field(default_factory=NodeBounds)


class Agent:
    """One agent. :meth:`run` is for one thread; :meth:`stop` for any, and for signal handlers."""

    def __init__(self, node: NodeIdentity, ledger_dir: str, source: DocumentSource) -> None:
        self._node = node
        self._ledger_dir = ledger_dir
        self._source = source
        self._ledgers = LocalLedgers(ledger_dir)
        self._paces: dict[tuple[str, Bound], Pacing] = {}
        self._seen: set[str] = set()
        self._said: dict[str, str] = {}
        self._stopping = threading.Event()
        self.statuses: Mapping[str, TargetStatus] = {}
        self.wishes: Wishes | None = None

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Follow the source until :meth:`stop`; ``on_ready`` is called after the first round."""
        self._source.start(self._ledgers.wake)
        try:
            self._round()
            on_ready()
            while not self._stopping.is_set():
                self._ledgers.wait(self._pause())
                self._stopping.wait(LEAST_GAP_S)
                self._round()
        finally:
            self._source.close()
            self._ledgers.close()

    def stop(self) -> None:
        """End :meth:`run` after the round that it is in."""
        self._stopping.set()
        self._ledgers.wake()

    def _round(self) -> None:
        wishes = self._source.read()
        self._say("source", wishes.fault)
        targets, problem = self._ledgers.look()
        self._say("ledgers", problem)
        self.wishes = wishes
        if not wishes.known:
            return
        alive = {target.name for target in targets}
        statuses = {target.name: self._tend(target, wishes) for target in targets}
        gone = TargetStatus(TargetState.ABSENT.value)
        statuses |= dict.fromkeys((self._seen & wishes.documents.keys()) - alive, gone)
        self._seen |= alive
        self.statuses = statuses
        self._source.report(statuses)

    def _pause(self) -> float:
        """Return how many seconds the next round may be away: it is not later than a publication that was put off."""
        now = time.monotonic()
        waiting = [pace.next_time() - now for pace in self._paces.values() if not pace.is_due(now)]
        return max(0.0, min([LOOK_S, *waiting]))

    def _tend(self, target: LocalTarget, wishes: Wishes) -> TargetStatus:
        """Do what the document says, if there is one, and return what became of it."""
        seen = TargetStatus(
            TargetState.UNMANAGED.value,
            ledger_revision=target.revision(Bound.LIMIT),
            cap_revision=target.revision(Bound.CAP),
            incarnation=target.incarnation,
            replicas=len(target.replicas),
        )
        stored, hold = wishes.documents.get(target.name), wishes.holds.get(target.name)
        if stored is None:
            return seen
        seen = replace(seen, observed=stored.revision)
        if hold is not None and (hold.until is None or time.time() < hold.until):
            return replace(seen, state=TargetState.ON_HOLD.value, reason=_hold_text(hold))
        if stored.desired is None:
            return replace(seen, state=TargetState.UNSUPPORTED_DOCUMENT.value, reason=str(stored.error))
        return self._apply(target, stored, stored.desired, seen)

    def _apply(self, target: LocalTarget, stored: Stored, desired: Desired, seen: TargetStatus) -> TargetStatus:
        decision = decide(desired, self._node.labels, self._node.name, target.name)
        seen = replace(seen, id=desired.id, share=decision.share)
        if decision.tokens is None:
            return seen
        tokens = decision.tokens
        seen = replace(seen, limit_tokens=tokens.limit_tokens, cap_tokens=tokens.cap_tokens)
        refusal = self._node.bounds.refusal(tokens)
        if refusal:
            return replace(seen, state=TargetState.REFUSED_BY_NODE.value, reason=refusal)
        if target.obstacle:
            return replace(seen, state=TargetState.UNAVAILABLE.value, reason=target.obstacle)
        return self._make_so(target, tokens, _note(stored.revision, desired), seen)

    def _make_so(self, target: LocalTarget, tokens: DesiredTokens, note: str, seen: TargetStatus) -> TargetStatus:
        """Bring both bounds to these tokens; the status is that of the one that is further from it."""
        states = []
        for bound in Bound:
            wanted = tokens.of(bound)
            if wanted is not None:
                states.append(self._bring(target, wanted, bound, note))
        behind = [state for state in states if state[0] != TargetState.APPLIED.value]
        state, reason = behind[0] if behind else (TargetState.APPLIED.value, "")
        return replace(seen, state=state, reason=reason)

    def _bring(self, target: LocalTarget, tokens: int, bound: Bound, note: str) -> tuple[str, str]:
        now, key = time.monotonic(), (target.incarnation, tokens)
        pace = self._paces.get((target.name, bound))
        if pace is None or pace.key != key:
            pace = self._paces[target.name, bound] = Pacing(key)
        if target.desires(tokens, bound):
            pace.settled(now)
            return target.progress(tokens, bound)
        pace.differs(now)
        if pace.is_due(now):
            result = target.publish(tokens, bound, self._ledger_dir, note)
            if result.accepted:
                _log.info("published r%d to %s: %s %d tokens", result.revision, target.name, bound.value, tokens)
                self._ledgers.wake()
                return TargetState.APPLYING.value, ""
            pace.failed(now, f"{result.status.value}: {'; '.join(result.warnings)}")
            self._say(target.name, pace.reason)
        return (TargetState.CONTESTED if pace.contested else TargetState.UNAVAILABLE).value, pace.reason

    def _say(self, topic: str, text: str) -> None:
        """Log trouble when it begins and when it is over, not each round."""
        if self._said.get(topic, "") != text:
            self._said[topic] = text
            _log.warning("%s: %s", topic, printable(text) or "in reach again")


def _note(revision: str, desired: Desired) -> str:
    """Return what a ledger's record says of the publication: where it came from, as far as there is room."""
    text = printable(f"fleet r{revision} {desired.by}: {desired.note}".rstrip(": "))
    return text.encode()[:MAX_NOTE_BYTES].decode(errors="ignore")


def _hold_text(hold: Hold) -> str:
    until = "" if hold.until is None else time.strftime(" until %Y-%m-%dT%H:%M:%SZ", time.gmtime(hold.until))
    return printable(f"on hold{until}{f': {hold.note}' if hold.note else ''}")
