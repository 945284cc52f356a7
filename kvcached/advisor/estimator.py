"""The estimator: events of requests in, histograms of hits by limit out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.advisor.idle_stack import IdleStack
from kvcached.advisor.windows import LONG_TOKENS, NOW_TOKENS, Tally, Window, predicted_hits

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvcached.advisor.sampling import SamplePlan

FOLD_TOKENS = 65536
"""After how many prompt tokens what was counted joins the windows; aging is no finer than that."""


class Estimator:
    """Watches the traffic of one replica. For the scheduler's thread alone; decides nothing.

    A request is admitted once and released once, whatever it goes through. Events about requests that are unknown (they
    were admitted before this was watching) count nothing.
    """

    def __init__(
        self,
        plan: SamplePlan,
        limits: Sequence[int],
        half_lives: Sequence[float] = (NOW_TOKENS, LONG_TOKENS),
    ) -> None:
        """Estimate the hit rate at ``limits`` (tokens, growing), in one window per item of ``half_lives``."""
        self.plan = plan
        self.limits = tuple(limits)
        self.windows = [Window(half_life, len(self.limits) + 1) for half_life in half_lives]
        self.requests = 0
        """How many requests were counted."""
        self.observed_tokens = 0
        """How many prompt tokens they had."""
        self._stack = IdleStack(self.limits)
        self._held: dict[Hashable, Sequence[Hashable]] = {}
        self._limit = float(self.limits[-1])
        self._pending = self._empty_tally()

    @property
    def stack(self) -> IdleStack:
        """The samples, for tests and measurements."""
        return self._stack

    def set_limit(self, limit: float) -> None:
        """Say how many idle tokens the engine can keep from now on, for the comparison of model and engine."""
        if limit != self._limit:
            self.fold()
            self._limit = limit

    def squeeze(self, room: int) -> None:
        """Say that ``room`` tokens are free of running requests: no cache holds more, whatever its limit."""
        self._stack.squeeze(room)

    def admit(
        self, request: Hashable, keys: Sequence[Hashable], hittable: int, prompt_tokens: int, hit_tokens: int
    ) -> None:
        """Begin a request.

        Args:
            request: What its release will name.
            keys: The samples of its prompt's full blocks.
            hittable: How many blocks of the prompt the engine looks up in its cache.
            prompt_tokens: Its length; 0 for one that the engine's own hit rate leaves out.
            hit_tokens: How many of them the engine found cached.

        """
        if request in self._held:  # its end was missed
            self.release(request, self._held[request])
        tally = self._pending if prompt_tokens > 0 else self._empty_tally()
        self._stack.admit(keys, self.plan.weights, min(self.plan.samples_of(hittable), len(keys)), tally.buckets)
        self._held[request] = keys
        if prompt_tokens <= 0:
            return
        tally.prompt += prompt_tokens
        tally.hit += hit_tokens
        self.requests += 1
        self.observed_tokens += prompt_tokens
        if tally.prompt >= FOLD_TOKENS:
            self.fold()

    def release(self, request: Hashable, cached: Sequence[Hashable]) -> None:
        """End a request, for good or until it is admitted again; ``cached`` are the samples it leaves in the cache."""
        held = self._held.pop(request, None)
        if held is not None:
            self._stack.release(held, cached, self.plan.weights)

    def holds(self, request: Hashable) -> bool:
        """Return whether ``request`` was admitted and is not released yet."""
        return request in self._held

    def drop(self, request: Hashable) -> None:
        """End a request that leaves nothing."""
        self.release(request, ())

    def clear(self) -> None:
        """Forget what is idle: the engine has emptied its cache."""
        self._stack.clear()

    def fold(self) -> None:
        """Bring the windows up to date."""
        if self._pending.prompt == 0:
            return
        predicted = predicted_hits(self.limits, self._pending, self._limit)
        for window in self.windows:
            window.add(self._pending, predicted)
        self._pending = self._empty_tally()

    def _empty_tally(self) -> Tally:
        return Tally([0] * (len(self.limits) + 1))
