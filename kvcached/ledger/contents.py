"""What a ledger file is and holds, as values."""

from __future__ import annotations

from kvcached.light_dataclasses import dataclass
from kvcached.values import Bound

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from kvcached.values import Identity, Report, Update


@dataclass(frozen=True)
class FileStatus:
    """A ledger file's identity and permissions; ``mode`` as in ``os.stat_result``."""

    device: int
    inode: int
    size: int
    links: int
    uid: int
    gid: int
    mode: int
    format: int


@dataclass(frozen=True)
class Slot:
    """One live slot as stored in the file; times are nanoseconds since the epoch.

    ``desired`` is the limit's pair and ``desired_cap`` the cap's. ``consistent`` is False when the report is not whole.
    It is then the report of an engine that has said nothing yet.
    """

    incarnation: int
    desired: Update
    desired_cap: Update
    registered_ns: int
    identity: Identity
    member: int
    members: int
    pid: int
    report: Report
    reported_ns: int
    consistent: bool

    def desired_of(self, bound: Bound) -> Update:
        """Return the pair that is desired of ``bound``."""
        return self.desired_cap if bound is Bound.CAP else self.desired


@dataclass(frozen=True)
class AuditRecord:
    """One publication as its publisher recorded it; the time is nanoseconds since the epoch.

    Both pairs are of one bound, the one that was published.
    """

    when_ns: int
    before: Update
    after: Update
    uid: int
    pid: int
    instance_name: str
    program: str
    note: str
