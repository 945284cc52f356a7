"""What one look at a ledger directory shows of the instances that share a budget: plain values, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.values import Bound, Outcome, kept_tokens

if TYPE_CHECKING:
    from kvcached.advisor.page import Page


@dataclass(frozen=True)
class ReplicaLook:
    """One replica under the bound that is balanced. Sizes are tokens where their names do not say bytes.

    ``published_tokens`` is the largest limit (or cap) that any of its members is told, ``applied_tokens`` the one in
    force, -1 for none; ``used_tokens`` what counts against it. ``resident_bytes`` is 0 unless memory of a cap has yet
    to return. ``page`` is the advisor's, or None for the reason ``page_problem``.
    """

    published_tokens: int
    applied_tokens: int
    used_tokens: int
    active_tokens: int
    capacity_tokens: int
    startup_tokens: int
    block_tokens: int
    token_bytes: int
    resident_bytes: int
    page: Page | None
    page_problem: str

    def effective(self, tokens: int) -> int:
        """Return what a limit lets this replica hold: no more than its pool, and a block of any positive one."""
        kept = kept_tokens(tokens, self.block_tokens)
        if kept < 0:
            return self.capacity_tokens
        return min(kept, self.capacity_tokens) if self.capacity_tokens > 0 else kept

    @property
    def limit_tokens(self) -> int:
        """What it may hold, by what is published."""
        return self.effective(self.published_tokens)

    @property
    def held_tokens(self) -> int:
        """What it may hold by what is published or in force, or holds all the same: whatever is the most."""
        return max(self.limit_tokens, self.effective(self.applied_tokens), self.used_tokens)


@dataclass(frozen=True)
class PublishedBy:
    """Who published what an instance is told: the note, and user and program as the record has them."""

    note: str
    uid: int
    program: str


@dataclass(frozen=True)
class InstanceLook:
    """One instance. All of its replicas are told one limit, of which ``revision`` is the highest.

    ``problem`` says why it cannot be controlled, if so; ``outcome`` is that of the replica furthest from done.
    ``published_by`` is None where the record of publications does not have that revision.
    """

    name: str
    incarnation: str
    revision: int
    gpus: tuple[str, ...]
    bound: Bound
    replicas: tuple[ReplicaLook, ...]
    outcome: Outcome
    problem: str
    published_by: PublishedBy | None

    @property
    def limit_tokens(self) -> int:
        """What a replica may hold, by what is published: the most of any."""
        return max(replica.limit_tokens for replica in self.replicas)

    @property
    def block_tokens(self) -> int:
        """The largest block of its replicas: limits are whole ones."""
        return max(replica.block_tokens for replica in self.replicas)

    @property
    def needed_tokens(self) -> int:
        """What running requests need of a cap: 95 % of the time, or now. 0 of a limit, which does not count them."""
        if self.bound is Bound.LIMIT:
            return 0
        high = [round(replica.page.in_use_high) for replica in self.replicas if replica.page is not None]
        return max([*high, *(replica.active_tokens for replica in self.replicas)])

    @property
    def token_bytes(self) -> int:
        """What a token of the limit costs in bytes, over all replicas and GPUs; 0 where an engine does not say."""
        sizes = [replica.token_bytes for replica in self.replicas]
        return sum(sizes) if all(sizes) else 0
