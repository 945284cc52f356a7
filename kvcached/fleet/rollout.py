"""Drives a roll-out: raises the share wave by wave, waits, checks, and pauses at the first thing that goes wrong.

Nothing runs in the background. A driver that dies leaves the document as it is, which is a pause; anybody resumes from
what is stored, or rolls back by one write.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvcached.fleet.decide import share_for, wave_size
from kvcached.fleet.document import MAX_SHARE, DocumentError
from kvcached.fleet.fleet_view import FleetView, is_new
from kvcached.fleet.fleet_waiting import FleetWait, wait_for_fleet
from kvcached.fleet.operations import advanced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvcached.fleet.fleet_view import FleetTarget
    from kvcached.fleet.operations import WriteOutcome

_WHOLE_PERCENT = 100


class Operates(Protocol):
    """What the driver needs of a store."""

    def read(self) -> FleetView:
        """Return the whole fleet at one revision."""

    def write(self, instance: str, fields: Mapping[str, Any] | None, revision: int) -> WriteOutcome:
        """Write a document if its last revision is ``revision``."""


@dataclass(frozen=True)
class WaveOptions:
    """What happens in each wave: seconds to wait for it and after it, and a command that must succeed, if any."""

    timeout_s: float = 60.0
    soak_s: float = 0.0
    check: str = ""


@dataclass(frozen=True)
class RolloutEnd:
    """How a drive ended: ``done``, ``paused`` or ``superseded``, why, at which revision, and its last wait."""

    state: str
    why: str
    revision: int
    wait: FleetWait = field(default_factory=FleetWait)


class RolloutDriver:
    """Drives the roll-out that is stored for one instance name. ``tell`` is given a line about each wave."""

    def __init__(self, operator: Operates, instance: str, options: WaveOptions, tell: Callable[[str], None]) -> None:
        self._operator = operator
        self._instance = instance
        self._options = options
        self._tell = tell

    def drive(self, revision: int) -> RolloutEnd:
        """Go on from the document of this revision to the end, or to the first trouble. Raises what the store does."""
        fields, targets = self._look(revision)
        if fields is None:
            return _superseded(revision)
        if fields["rollout"]["state"] == "done":
            return RolloutEnd("done", "", revision)
        for percent in _waves_of(fields):
            if self._is_behind(targets, percent):
                end = self._wave(fields, targets, percent, revision)
                revision = end.revision
                if end.state != "running":
                    return end
                fields, targets = self._look(revision)
                if fields is None:
                    return _superseded(revision)
        return self._store(fields, revision, "done", "", FleetWait())

    def _look(self, revision: int) -> tuple[Mapping[str, Any] | None, Sequence[FleetTarget]]:
        """Return the document if it is still that of this revision, and its live targets."""
        view = self._operator.read()
        stored = view.documents.get(self._instance)
        if stored is None or stored.desired is None or stored.revision != str(revision):
            return None, ()
        if stored.desired.rollout is None:
            message = f"the document of {self._instance} is in no roll-out"
            raise DocumentError(message)
        self._desired = stored.desired
        return stored.desired.fields, view.live(self._instance)

    def _is_behind(self, targets: Sequence[FleetTarget], percent: float) -> bool:
        """Return whether a wave is still to come: fewer targets are new than it has, or it is the last one."""
        if percent >= _WHOLE_PERCENT:
            return True
        return sum(is_new(self._desired, one) for one in targets) < wave_size(percent, len(targets))

    def _wave(
        self, fields: Mapping[str, Any], targets: Sequence[FleetTarget], percent: float, revision: int
    ) -> RolloutEnd:
        """Make so many targets new, and see that they apply it."""
        if not targets:
            return self._store(fields, revision, "paused", "no live target", FleetWait())
        count = wave_size(percent, len(targets))
        places = [(one.node, one.instance) for one in targets]
        whole = percent >= _WHOLE_PERCENT
        share = MAX_SHARE if whole else share_for(fields["rollout"]["id"], places, count)
        started = self._store(advanced(fields, share=share, state="running"), revision, "running", "", FleetWait())
        if started.state != "running":
            return started
        wait = self._wait(started.revision, fields, count)
        if wait.superseded:
            return _superseded(started.revision)
        why = self._trouble(wait, fields)
        if why:
            now, _ = self._look(started.revision)
            paused = None if now is None else self._store(now, started.revision, "paused", why, wait)
            return paused or _superseded(started.revision)
        self._tell(f"wave {percent:g} %: {len(wait.applied)} of {len(targets)} targets applied it")
        return RolloutEnd("running", "", started.revision, wait)

    def _wait(self, revision: int, fields: Mapping[str, Any], count: int) -> FleetWait:
        return wait_for_fleet(
            self._operator.read,
            self._instance,
            str(revision),
            self._options.timeout_s,
            expect=count,
            tolerated=_tolerated(fields),
        )

    def _trouble(self, wait: FleetWait, fields: Mapping[str, Any]) -> str:
        """Return what is wrong after a wave, an empty text if it may go on."""
        if len(wait.refusing) > _tolerated(fields):
            return (
                f"{_names(wait.refusing)} refused it: {wait.refusing[0].status.reason or wait.refusing[0].status.state}"
            )
        if wait.lost:
            return f"{_names(wait.lost)} ended"
        if wait.lagging or not wait.enough:
            return f"{_names(wait.lagging) or 'targets'} did not apply it in {self._options.timeout_s:g} s"
        time.sleep(self._options.soak_s)
        if self._options.check:
            code = subprocess.run(shlex.split(self._options.check), check=False).returncode  # noqa: S603 - the operator's
            return f"the check ended with exit code {code}" if code else ""
        return ""

    def _store(self, fields: Mapping[str, Any], revision: int, state: str, why: str, wait: FleetWait) -> RolloutEnd:
        outcome = self._operator.write(self._instance, advanced(fields, state=state, why=why), revision)
        if outcome.revision:
            return RolloutEnd(state, why, outcome.revision, wait)
        if outcome.failed or outcome.unknown:
            return RolloutEnd("failed", outcome.reason, revision, wait)
        return _superseded(outcome.stored)


def _superseded(revision: int) -> RolloutEnd:
    return RolloutEnd("superseded", "a newer write decides", revision)


def _waves_of(fields: Mapping[str, Any]) -> list[float]:
    """Return the stored waves; another program may have stored none."""
    found = fields["rollout"].get("waves")
    is_list = isinstance(found, list) and all(isinstance(one, (int, float)) for one in found)
    return [*found, _WHOLE_PERCENT] if is_list and _WHOLE_PERCENT not in found else (found if is_list else [100.0])


def _tolerated(fields: Mapping[str, Any]) -> int:
    found = fields["rollout"].get("max_failed", 0)
    return found if isinstance(found, int) else 0


def _names(targets: Sequence[FleetTarget]) -> str:
    names = [one.node for one in targets]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")  # noqa: PLR2004 - as above
