"""What a limit would do, without publishing it: evicted at once, evicted later, and what speaks against it."""

from __future__ import annotations

from kvcached.ledger import NativeLibraryError
from kvcached.ledger.addressees import Obstacle, look_up, unusable, warnings_for
from kvcached.ledger.directory import LedgerDirectory, LedgerDirectoryError
from kvcached.ledger.results import PublicationStatus
from kvcached.light_dataclasses import dataclass, replace
from kvcached.values import Bound, Outcome, kept_tokens

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kvcached.ledger.replicas import Replica


@dataclass(frozen=True)
class ReplicaForecast:
    """What one replica would do. All sizes are tokens.

    ``kept_tokens`` is what may stay idle, -1 for anything, and at least one block of a positive limit; under a cap,
    what may be held in all. ``evict_later_tokens`` is how many of the tokens in use now would go at most when their
    requests end.
    """

    replica: int
    kept_tokens: int
    idle_tokens: int
    active_tokens: int
    evict_now_tokens: int
    evict_later_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "replica": self.replica,
            "kept_tokens": self.kept_tokens,
            "idle_tokens": self.idle_tokens,
            "active_tokens": self.active_tokens,
            "evict_now_tokens": self.evict_now_tokens,
            "evict_later_tokens": self.evict_later_tokens,
        }


@dataclass(frozen=True)
class Forecast:
    """What a publication to an instance would do; nothing was written.

    ``status`` is the one it would most likely return, and ``revision`` the one it would take, 0 if none. ``replicas``
    is empty where nobody would be told; ``warnings`` then say why. ``unchanged``: the limit is desired everywhere
    already, and with ``if_different`` nothing would be published.
    """

    status: PublicationStatus
    instance_name: str
    limit_tokens: int
    revision: int
    replicas: tuple[ReplicaForecast, ...] = ()
    warnings: tuple[str, ...] = ()
    unchanged: bool = False
    bound: Bound = Bound.LIMIT

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "dry_run": True,
            "status": self.status.value,
            "instance_name": self.instance_name,
            "bound": self.bound.value,
            "limit_tokens": self.limit_tokens,
            "revision": self.revision,
            "unchanged": self.unchanged,
            "replicas": [replica.to_dict() for replica in self.replicas],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Conditions:
    """Under which conditions a publication would be made, as :func:`kvcached.ledger.publication.publish` takes them."""

    revision: int | None = None
    incarnation: str | None = None
    different: bool = False
    bound: Bound = Bound.LIMIT


def forecast(limit_tokens: int, instance_name: str, ledger_dir: str, conditions: Conditions) -> Forecast:
    """Return what publishing a limit or a cap would do now. Writes nothing; what would prevent it is in the result."""
    nothing = Forecast(PublicationStatus.UNAVAILABLE, instance_name, limit_tokens, 0, bound=conditions.bound)
    try:
        # Opened for writing, because that is what the publication would need; nothing is written.
        with LedgerDirectory(ledger_dir, writable=True) as directory:
            found = look_up(directory, instance_name, conditions.bound, conditions.revision, conditions.incarnation)
    except LedgerDirectoryError as error:
        return _with(nothing, warnings=(unusable(ledger_dir, error),))
    except NativeLibraryError as error:
        return _with(nothing, warnings=(str(error),))
    if isinstance(found, Obstacle):
        return _with(nothing, status=found.status, warnings=found.warnings)
    replicas = found.replicas
    unchanged = conditions.different and found.desire(limit_tokens)
    return Forecast(
        _status_of(replicas),
        instance_name,
        limit_tokens,
        found.newest if unchanged else found.newest + 1,
        tuple(_forecast_replica(replica, limit_tokens, conditions.bound) for replica in replicas),
        (*warnings_for(found, limit_tokens), *found.refused),
        unchanged,
        conditions.bound,
    )


def _status_of(replicas: Sequence[Replica]) -> PublicationStatus:
    writable = {member.ledger.writable for replica in replicas for member in replica.members}
    if True not in writable:
        return PublicationStatus.UNAVAILABLE
    incomplete = False in writable or any(replica.missing for replica in replicas)
    return PublicationStatus.PARTIAL if incomplete else PublicationStatus.ACCEPTED


def _with(
    nothing: Forecast, *, warnings: tuple[str, ...], status: PublicationStatus = PublicationStatus.UNAVAILABLE
) -> Forecast:
    return replace(nothing, status=status, warnings=warnings)


def _forecast_replica(replica: Replica, limit_tokens: int, bound: Bound) -> ReplicaForecast:
    identity, report = replica.slot.identity, replica.slot.report
    idle, active = report.idle_tokens, report.active_tokens
    index = identity.replica
    answer = report.of(bound)
    refuses = answer.outcome in (Outcome.UNSUPPORTED_ENGINE, Outcome.REJECTED_PIPELINE_PARALLEL)
    if limit_tokens < 0 or refuses:
        return ReplicaForecast(index, answer.applied.limit_tokens if refuses else limit_tokens, idle, active, 0, 0)
    if bound is Bound.CAP:
        now = min(idle, max(0, idle + active - limit_tokens))
        return ReplicaForecast(index, limit_tokens, idle, active, now, max(0, idle - now + active - limit_tokens))
    kept = kept_tokens(limit_tokens, identity.block_tokens)
    now = max(0, idle - kept)
    return ReplicaForecast(index, kept, idle, active, now, max(0, idle - now + active - kept))
