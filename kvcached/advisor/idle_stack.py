"""Many least-recently-used caches at once: where each sample stands, and up to where each cache has evicted.

All caches see the same samples become idle and be taken again, and differ only in how much they may keep. What a
small one keeps a large one keeps too, so one common order of idle samples does, with one *mark* per cache: the newest
sample that it has evicted. This is exact where a depth in the order would not be: a sample is evicted at the greatest
depth that it ever had, and depths shrink when newer samples are taken.

Samples in use are outside of the order, as blocks in use are outside of an engine's idle cache. What the largest cache
has evicted is forgotten.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from operator import add, sub

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class IdleStack:
    """The samples of one replica. Holds no lock: for one thread.

    Idle samples form a linked list in columns, from the oldest to the newest, closed to a ring by the empty slot 0.
    Each has a stamp, growing from oldest to newest. Cache number ``i`` (the largest first) holds exactly the idle
    samples whose stamp is above ``_mark_stamps[i]``, and those are ``_held[i]`` tokens.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        """Keep caches of these many tokens each, strictly growing."""
        self._limits = list(reversed(limits))
        self._users: dict[Hashable, int] = {}
        self._clear_idle()

    def _clear_idle(self) -> None:
        caches = len(self._limits)
        self._held = [0] * caches
        self._marks = [0] * caches
        self._mark_stamps = [0] * caches
        self._clock = 0
        self._slot_of: dict[Hashable, int] = {}
        self._after, self._before, self._stamp, self._weight = [0], [0], [0], [0]
        self._key: list[Hashable] = [None]
        self._unused: list[int] = []

    @property
    def idle_samples(self) -> int:
        """How many samples are idle in the largest cache."""
        return len(self._slot_of)

    @property
    def used_samples(self) -> int:
        """How many samples are in use."""
        return len(self._users)

    def clear(self) -> None:
        """Forget all idle samples, as the engine has."""
        self._clear_idle()

    def admit(self, keys: Sequence[Hashable], weights: Sequence[int], hittable: int) -> list[int]:
        """Take the samples of a prompt into use; return the tokens that were hits, by the limit they need.

        Item 0 are tokens that requests use anyway, item ``i`` those that the ``i``-th limit and larger ones would have
        kept, but not the next smaller one. Only the first ``hittable`` samples can be hits; the engine computes the
        others whatever is cached.
        """
        caches = len(self._limits)
        found, gone = [0] * (caches + 1), [0] * (caches + 1)
        found[0] = self._take(keys[:hittable], weights, found)
        self._take(keys[hittable:], weights[hittable : len(keys)], gone)
        gone[1:] = map(add, gone[1:], found[1:])
        self._let_go(gone)
        # `found` counts by how many caches had the sample, the largest first: had by all means found at limit 1.
        return [found[0], *found[:0:-1]]

    def _take(self, keys: Sequence[Hashable], weights: Sequence[int], gone: list[int]) -> int:
        """Put samples in use; add those that were idle to ``gone``, and return the tokens that were in use."""
        users, slot_of, stamps, marks = self._users, self._slot_of, self._stamp, self._mark_stamps
        in_use = 0
        for key, weight in zip(keys, weights, strict=False):
            if key in users:
                users[key] += 1
                in_use += weight
                continue
            users[key] = 1
            slot = slot_of.pop(key, None)
            if slot is not None:
                holders = bisect_left(marks, stamps[slot])
                gone[holders] += weight
                self._unlink(slot, holders)
        return in_use

    def release(self, held: Sequence[Hashable], cached: Sequence[Hashable], weights: Sequence[int]) -> None:
        """End the use of the samples ``held``; of those, and of newly computed ones, ``cached`` are kept idle.

        Both begin at the head of the chain. The tail becomes idle first, as it is evicted first.
        """
        users = self._users
        for key in held:
            if users[key] > 1:
                users[key] -= 1
            else:
                del users[key]
        idle = [(key, weight) for key, weight in zip(cached, weights, strict=False) if key not in users]
        self._remove(idle)
        self._append(idle)
        added = sum(weight for _, weight in idle)
        self._held = [tokens + added for tokens in self._held]
        self._evict()

    def _remove(self, samples: Sequence[tuple[Hashable, int]]) -> None:
        """Take samples that were computed again although they are idle, as the engine could not use them, out first."""
        again = [key for key, _ in samples if key in self._slot_of]
        if not again:
            return
        gone = [0] * (len(self._limits) + 1)
        for key in again:
            slot = self._slot_of.pop(key)
            holders = bisect_left(self._mark_stamps, self._stamp[slot])
            gone[holders] += self._weight[slot]
            self._unlink(slot, holders)
        self._let_go(gone)

    def _append(self, samples: Sequence[tuple[Hashable, int]]) -> None:
        """Make samples with their weights idle, the last of them first."""
        unused, slot_of, key_of, weight_of = self._unused, self._slot_of, self._key, self._weight
        after, before, stamps = self._after, self._before, self._stamp
        self._make_room(len(samples))
        newest, clock = before[0], self._clock
        for key, weight in reversed(samples):
            slot = unused.pop()
            clock += 1
            stamps[slot] = clock
            weight_of[slot] = weight
            key_of[slot] = key
            slot_of[key] = slot
            after[newest] = slot
            before[slot] = newest
            newest = slot
        after[newest], before[0] = 0, newest
        self._clock = clock

    def _make_room(self, slots: int) -> None:
        """Have at least ``slots`` unused slots."""
        missing = slots - len(self._unused)
        if missing > 0:
            begin = len(self._key)
            self._unused += range(begin, begin + missing)
            self._key += [None] * missing
            for column in (self._after, self._before, self._stamp, self._weight):
                column.extend([0] * missing)

    def _unlink(self, slot: int, holders: int) -> None:
        """Take an idle sample that ``holders`` caches hold out of the order."""
        before, after, stamp = self._before[slot], self._after[slot], self._stamp[slot]
        self._after[before], self._before[after] = after, before
        self._key[slot] = None
        self._unused.append(slot)
        # Caches whose newest evicted sample it was stand at its predecessor now: there is nothing in between.
        marks = self._mark_stamps
        while holders < len(marks) and marks[holders] == stamp:
            self._marks[holders], marks[holders] = before, self._stamp[before]
            holders += 1

    def _let_go(self, gone: list[int]) -> None:
        """Take what left the order off the caches that held it; ``gone[i]`` are tokens that ``i`` caches held."""
        self._held = list(map(sub, self._held, list(accumulate(gone[:0:-1]))[::-1]))

    def _evict(self) -> None:
        """Move each mark on until its cache is within its limit."""
        after, weight = self._after, self._weight
        for cache, limit in enumerate(self._limits):
            held = self._held[cache]
            if held <= limit:
                continue
            slot = self._marks[cache]
            while held > limit:
                slot = after[slot]
                held -= weight[slot]
            self._held[cache], self._marks[cache], self._mark_stamps[cache] = held, slot, self._stamp[slot]
        if self._marks[0]:
            self._forget()

    def _forget(self) -> None:
        """Drop the samples that the largest cache has evicted."""
        last, last_stamp = self._marks[0], self._mark_stamps[0]
        slot = self._after[0]
        begin = self._after[last]
        while slot != begin:
            del self._slot_of[self._key[slot]]
            self._key[slot] = None
            self._unused.append(slot)
            slot = self._after[slot]
        self._after[0], self._before[begin] = begin, 0
        for cache, stamp in enumerate(self._mark_stamps):
            if stamp <= last_stamp:
                self._marks[cache] = self._mark_stamps[cache] = 0
