"""Waiting until every live target of an instance name has applied a document, or it is known that one will not."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcached.fleet.fleet_view import has_applied, is_new
from kvcached.fleet.store import Stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.fleet.fleet_view import FleetTarget, FleetView

LOOK_FIRST_S, LOOK_LAST_S = 0.05, 0.5
"""How soon the fleet is read again: often at first, then less."""


@dataclass(frozen=True)
class FleetWait:
    """How a wait ended: who ``applied`` the document, who ``lags``, who is ``lost`` since it began, who ``refuses``."""

    applied: tuple[FleetTarget, ...] = ()
    lagging: tuple[FleetTarget, ...] = ()
    lost: tuple[FleetTarget, ...] = ()
    refusing: tuple[FleetTarget, ...] = ()
    superseded: bool = False
    enough: bool = False
    waited_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Whether every target, and as many as were expected, applied it."""
        return self.enough and not (self.lagging or self.lost or self.refusing or self.superseded)


def wait_for_fleet(
    read: Callable[[], FleetView],
    instance: str,
    revision: str,
    timeout_s: float,
    *,
    expect: int = 1,
    known: tuple[FleetTarget, ...] = (),
    tolerated: int = 0,
) -> FleetWait:
    """Wait until at least ``expect`` targets, and all that live, have applied the document of this revision.

    Of a document in roll-out only those count that take the new rules. Targets that appear meanwhile count as well;
    one that was ``known`` or seen alive and ends is lost. Ends early where more than ``tolerated`` targets refuse, or a
    newer document decides. Raises what ``read`` raises. Seconds.
    """
    began = time.monotonic()
    seen = {one.node: one for one in known}
    pause = LOOK_FIRST_S
    while True:
        found = _judge(read(), instance, revision, seen, expect)
        waited = time.monotonic() - began
        settled = found.enough and not found.lagging
        if settled or found.superseded or len(found.refusing) > tolerated or waited >= timeout_s:
            return replace(found, waited_s=round(waited, 3))
        time.sleep(min(pause, max(0.0, timeout_s - waited)))
        pause = min(LOOK_LAST_S, 1.5 * pause)


def _judge(view: FleetView, instance: str, revision: str, seen: dict[str, FleetTarget], expect: int) -> FleetWait:
    stored = view.documents.get(instance, Stored("", None))
    if stored.revision != revision or stored.desired is None:
        return FleetWait(superseded=True)
    live = {one.node: one for one in view.live(instance) if is_new(stored.desired, one)}
    lost = tuple(one for node, one in seen.items() if node not in live)
    seen.update(live)
    current = [one for one in live.values() if one.status.observed == revision]
    applied = tuple(one for one in live.values() if has_applied(one, revision))
    refusing = tuple(one for one in current if one.status.refuses)
    lagging = tuple(one for one in live.values() if one not in applied and one not in refusing)
    return FleetWait(applied, lagging, lost, refusing, enough=len(applied) + len(lost) + len(refusing) >= expect)
