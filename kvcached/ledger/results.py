"""What a publication returns: plain values, the same from Python and on the command line."""

from __future__ import annotations

from kvcached.light_dataclasses import dataclass
from kvcached.values import Bound, TextEnum

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from typing import Any


class PublicationStatus(TextEnum):
    """What became of a publication. Each is equal to its text, which is what JSON shows."""

    ACCEPTED = "accepted"
    PARTIAL = "partial"
    SUPERSEDED = "superseded"
    UNAVAILABLE = "unavailable"


class MemberResultStatus(TextEnum):
    """What a publication did to one member. Each is equal to its text, which is what JSON shows."""

    PUBLISHED = "published"
    SUPERSEDED = "superseded"
    FAILED = "failed"


@dataclass(frozen=True)
class MemberResult:
    """What a publication did to one member. ``revision`` and ``limit_tokens`` are what is stored there now."""

    gpu: str
    replica: int
    status: MemberResultStatus
    revision: int | None
    limit_tokens: int | None
    error: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "gpu": self.gpu,
            "replica": self.replica,
            "status": self.status.value,
            "revision": self.revision,
            "limit_tokens": self.limit_tokens,
            "error": self.error,
        }


@dataclass(frozen=True)
class Rejection:
    """A replica that will not apply a publication, and why."""

    replica: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"replica": self.replica, "reason": self.reason}


@dataclass(frozen=True)
class PublicationResult:
    """What became of a publication; ``bound`` says whether ``limit_tokens`` is a limit or a cap.

    ``accepted`` means written everywhere, not that anything was evicted. ``revision`` is the one this call took, 0 if
    it wrote nothing. ``gpus`` has one entry for each member, whatever happened. ``incarnation`` (16 hex digits, None if
    nobody was found) tells the instance from its successors: after a restart it is another one. ``unchanged`` says that
    the limit was desired everywhere already and nothing was written; ``revision`` is then the newest one there.

    After waiting, ``applied`` tells whether every replica reports the limit applied and holds no more than it,
    ``waited_s`` how many seconds that took, ``rejections`` who will not apply it, and ``engine_ended`` that an engine
    ended or was restarted meanwhile, which drops the publication. Without waiting they are None, None, empty and False.
    """

    status: PublicationStatus
    instance_name: str
    limit_tokens: int
    revision: int
    gpus: tuple[MemberResult, ...] = ()
    warnings: tuple[str, ...] = ()
    applied: bool | None = None
    waited_s: float | None = None
    rejections: tuple[Rejection, ...] = ()
    engine_ended: bool = False
    unchanged: bool = False
    incarnation: str | None = None
    bound: Bound = Bound.LIMIT

    @property
    def accepted(self) -> bool:
        """Whether revision and limit are stored in every member of every live replica."""
        return self.status is PublicationStatus.ACCEPTED

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; what concerns waiting is in it only after waiting."""
        fields: dict[str, Any] = {
            "status": self.status.value,
            "instance_name": self.instance_name,
            "bound": self.bound.value,
            "limit_tokens": self.limit_tokens,
            "revision": self.revision,
            "accepted": self.accepted,
            "unchanged": self.unchanged,
            "incarnation": self.incarnation,
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "warnings": list(self.warnings),
        }
        if self.applied is not None:
            fields["applied"] = self.applied
            fields["waited_s"] = self.waited_s
            fields["rejections"] = [rejection.to_dict() for rejection in self.rejections]
            fields["engine_ended"] = self.engine_ended
        return fields
