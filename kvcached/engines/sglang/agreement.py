"""Whether all ranks that would have to evict alike can do so: they say it before the first one is told to.

Ranks of another node have an environment of their own: there the plugin may be missing, switched off, of another
version, or have failed. A rank that gets a message which it does not know dies of it, and one that does not evict when
the others do makes them fail at their next forward pass. So each rank leaves a word in the store through which
torch.distributed brought the ranks together, and the source rank sends nothing before it has read all of them.
"""

from __future__ import annotations

import importlib
import json
import logging
import time
from typing import TYPE_CHECKING, Protocol

from kvcached.guards import call_guarded

if TYPE_CHECKING:
    from kvcached.engines.sglang.placement import Placement

PATIENCE_S = 60.0
"""How long after a rank took its place it expects to hear of the others."""

POLL_S = 0.05
"""How often the store is asked at most while a word is missing."""

_log = logging.getLogger(__name__)


class Store(Protocol):
    """What is used of ``torch.distributed.Store``; all ranks of a launch see the same one."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a word."""

    def get(self, key: str, /) -> bytes:
        """Return the word of a key that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are there; does not wait."""


def launch_store() -> Store:
    """Return the store of this launch; raises if torch.distributed has none."""
    store: Store = importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()  # noqa: SLF001
    return store


class RankAgreement:
    """The words of the ranks that get the requests of one replica. Scheduler thread only."""

    def __init__(self, placement: Placement, dialect: str, store: Store | None) -> None:
        """Prepare to hear of all ranks; ``dialect`` must be the same on all. No store is needed for a single rank."""
        self.no_cap = ""
        """Why the pool of some rank heard so far cannot be capped."""
        self.obstacle = ""
        """Why the memory of some rank heard so far cannot be returned."""
        self.shortfalls: dict[int, str] = {}
        """By rank, why it did not return memory that it was to return, as far as is known."""
        self._keys = [f"kvcached/{placement.replica}/{index}" for index in range(placement.ranks)]
        self._own_index = placement.index
        self._dialect = dialect
        self._store = store
        self._unheard = list(range(placement.ranks)) if store is not None else []
        self._refusals: list[str] = []
        self._next_poll = 0.0

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self._keys)

    def declare(self, refusal: str = "", *, no_cap: str = "", obstacle: str = "") -> None:
        """Tell the other ranks that this one can follow, or why it cannot; and what of the rest it cannot do."""
        if self._store is None:
            self.no_cap, self.obstacle = no_cap, obstacle
            return
        word = {"dialect": self._dialect, "refusal": refusal, "no_cap": no_cap, "obstacle": obstacle}
        self._store.set(self._keys[self._own_index], json.dumps(word))

    def declare_shortfall(self, reason: str) -> None:
        """Tell the source rank that this one did not return memory that it was to return."""
        if self._store is not None:
            self._store.set(self._shortfall_key(self._own_index), reason)
            self._store.set(self._shortfall_key(None), "")

    def hear_shortfalls(self) -> None:
        """Listen for such words; costs one question to the store when there are none."""
        if self._store is not None:
            call_guarded(_warn_of_store, self._read_shortfalls, self._store)

    @property
    def is_refused(self) -> bool:
        """Whether some rank heard so far cannot follow."""
        return bool(self._refusals)

    def is_reached(self, *, at_once: bool = False) -> bool:
        """Return whether every rank has said that it can follow; listens if that is due, or ``at_once``."""
        now = time.monotonic()
        if self._unheard and (at_once or now >= self._next_poll):
            self._next_poll = now + POLL_S
            call_guarded(self._refuse_store, self._listen)
        return not self._unheard and not self._refusals

    def wait(self) -> str:
        """Listen until all ranks have spoken, for ``PATIENCE_S`` at most; returns why they do not agree, if so."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.is_reached():
            if self._refusals or time.monotonic() >= deadline:
                return self.explain()
            time.sleep(POLL_S)
        return ""

    def explain(self) -> str:
        """Return a sentence about what is missing."""
        if self._refusals:
            return "; ".join(self._refusals)
        ranks = ", ".join(map(str, self._unheard))
        word = "ranks" if len(self._unheard) > 1 else "rank"
        return (
            f"{word} {ranks} of {len(self._keys)} did not report that kvcached runs there; "
            "install it on every node, and do not disable it on some"
        )

    def _listen(self) -> None:
        self._unheard = [index for index in self._unheard if not self._hear(index)]

    def _refuse_store(self, error: Exception) -> None:
        self._refusals.append(f"the store of the launch failed ({type(error).__name__}: {error})")

    def _read_shortfalls(self, store: Store) -> None:
        if not store.check([self._shortfall_key(None)]):
            return
        for index in range(self.ranks):
            if store.check([self._shortfall_key(index)]):
                self.shortfalls[index] = store.get(self._shortfall_key(index)).decode(errors="replace")

    def _hear(self, index: int) -> bool:
        """Read the word of a rank; returns whether there is one."""
        store, key = self._store, self._keys[index]
        if store is None or not store.check([key]):
            return False
        word = json.loads(store.get(key))
        if word["refusal"]:
            self._refusals.append(f"rank {index}: {word['refusal']}")
        elif word["dialect"] != self._dialect:
            self._refusals.append(f"rank {index} runs another version of kvcached; install the same on every node")
        else:
            self.no_cap = self.no_cap or word["no_cap"]
            self.obstacle = self.obstacle or word["obstacle"]
        return True

    def _shortfall_key(self, index: int | None) -> str:
        """Return the key of one rank's word, or of the word that there are any."""
        return f"{self._keys[0 if index is None else index]}/shortfall{'s' if index is None else ''}"


def _warn_of_store(error: Exception) -> None:
    _log.warning("what other ranks return of their memory is not known: %s", error)
