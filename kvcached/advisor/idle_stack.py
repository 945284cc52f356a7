"""Many least-recently-used caches at once: the position of each sample, and up to where each cache has evicted.

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
from typing import TYPE_CHECKING

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

    def admit(self, keys: Sequence[Hashable], weights: Sequence[int], hittable: int, buckets: list[int]) -> None:
        """Take the samples of a prompt into use; add the tokens that were hits to ``buckets``, by the limit they need.

        Item 0 are tokens that requests use anyway, item ``i`` those that the ``i``-th limit and larger ones would have
        kept, but not the next smaller one. Only the first ``hittable`` samples can be hits; the engine computes the
        others whatever is cached.
        """
        users = self._users
        used = 0  # how many of the leading samples are in use
        for key in keys:
            if key not in users:
                break
            users[key] += 1
            used += 1
        buckets[0] += sum(weights[: min(used, hittable)])
        gone = [0] * (len(self._limits) + 1)
        cached = self._take(keys, weights, used, hittable, gone)
        if cached > used:
            # `gone` counts by how many caches had a sample, the largest first: had by all means a hit at any limit.
            buckets[1:] = map(add, buckets[1:], gone[:0:-1])
        self._remove(keys[cached:], gone)
        users.update(dict.fromkeys(keys[used:], 1))
        self._let_go(gone)

    def _take(self, keys: Sequence[Hashable], weights: Sequence[int], begin: int, end: int, gone: list[int]) -> int:
        """Take idle samples from ``begin`` on out of the order, up to ``end`` or the first that is not idle.

        Adds their tokens to ``gone`` by the number of caches that held them; returns where it stopped.
        """
        slot_of, stamps, marks = self._slot_of, self._stamp, self._mark_stamps
        after, before, unused = self._after, self._before, self._unused
        for place in range(begin, end):
            slot = slot_of.pop(keys[place], None)
            if slot is None:
                return place
            stamp = stamps[slot]
            holders = bisect_left(marks, stamp)
            gone[holders] += weights[place]
            newer, older = after[slot], before[slot]
            after[older] = newer
            before[newer] = older
            unused.append(slot)
            # Caches whose newest evicted sample it was are at its predecessor now: there is nothing in between.
            while holders < len(marks) and marks[holders] == stamp:
                self._marks[holders], marks[holders] = older, stamps[older]
                holders += 1
        return max(begin, end)

    def _remove(self, keys: Sequence[Hashable], gone: list[int]) -> None:
        """Take those of ``keys`` that are idle out of the order, wherever they are, and add them to ``gone``.

        Rarely any is: what cannot be a hit, or was computed again although it was cached.
        """
        if self._slot_of.keys().isdisjoint(keys):
            return
        for key in keys:
            if key in self._slot_of:
                self._take([key], [self._weight[self._slot_of[key]]], 0, 1, gone)

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
        used = 0  # who uses a sample uses all before it
        while used < len(cached) and cached[used] in users:
            used += 1
        gone = [0] * (len(self._limits) + 1)
        self._remove(cached[used:], gone)
        self._let_go(gone)
        added = sum(weights[used : len(cached)])
        self._append(cached[used:], weights[used : len(cached)])
        self._held = [tokens + added for tokens in self._held]
        self._evict(self._limits)

    def _append(self, keys: Sequence[Hashable], weights: Sequence[int]) -> None:
        """Make samples idle, the last of them first."""
        unused, slot_of, key_of, weight_of = self._unused, self._slot_of, self._key, self._weight
        after, before, stamps = self._after, self._before, self._stamp
        self._make_room(len(keys))
        newest, clock = before[0], self._clock
        for key, weight in zip(reversed(keys), reversed(weights), strict=True):
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

    def _let_go(self, gone: list[int]) -> None:
        """Take what left the order off the caches that held it; ``gone[i]`` are tokens that ``i`` caches held."""
        if not any(gone):
            return
        self._held = list(map(sub, self._held, list(accumulate(gone[:0:-1]))[::-1]))

    def squeeze(self, room: int) -> None:
        """Evict from each cache what does not fit into ``room`` tokens, because requests hold the rest of the pool."""
        if self._held[0] > room:
            self._evict([min(limit, room) for limit in self._limits])

    def _evict(self, limits: Sequence[int]) -> None:
        """Move each mark on until its cache is within its limit."""
        after, weight = self._after, self._weight
        for cache, limit in enumerate(limits):
            held = self._held[cache]
            if held <= limit:
                continue
            slot = self._marks[cache]
            while held > limit:
                slot = after[slot]
                if slot == 0:  # would go round for ever; nothing but a fault in here leads to it
                    message = f"{held} tokens are held beyond the newest sample"
                    raise LookupError(message)
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
            self._unused.append(slot)
            slot = self._after[slot]
        self._after[0], self._before[begin] = begin, 0
        for cache, stamp in enumerate(self._mark_stamps):
            if stamp <= last_stamp:
                self._marks[cache] = self._mark_stamps[cache] = 0
