"""An engine that is nothing but a registration and an advisor's page, and the command line that reads it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from support.toys import identity

from kvcached.advisor.curve import spaced_limits
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.observer import Figures, Observer
from kvcached.advisor.page_file import PageWriter
from kvcached.advisor.sampling import EVERY_BLOCK, SamplePlan
from kvcached.ledger.subscription import Subscription
from kvcached.values import Outcome, Report, Update

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_TOKENS = 16
CAPACITY = 20_000
PROMPT_BLOCKS = 20


class AdvisedEngine:
    """Serves made-up prompts of 320 tokens each, of which every other is one that was asked before."""

    def __init__(self, ledger_dir: Path, replica: int = 0) -> None:
        self.figures = Figures(limit_tokens=1600, active_tokens=320, capacity_tokens=CAPACITY)
        self.subscription = Subscription(identity("chat", replica=replica), [f"cpu-{replica}"], str(ledger_dir))
        self.subscription.start()
        report = Report(Update(0, 1600), 0, Outcome.STARTUP, "", 0, 0, CAPACITY, 0, 0)
        self.subscription.acknowledge(report)
        self.plan = SamplePlan(BLOCK_TOKENS, EVERY_BLOCK)
        self.estimator = Estimator(
            self.plan, spaced_limits(BLOCK_TOKENS, CAPACITY, 1600), half_lives=(100_000, 10_000_000)
        )
        self.observer = Observer(
            self.estimator,
            BLOCK_TOKENS,
            lambda: self.figures,
            PageWriter(str(ledger_dir)),
            self.subscription.place,
        )
        self._random = random.Random(replica)
        self._prompts = 0

    def serve(self, requests: int, known: int = 30, *, truth: float = 0.0) -> None:
        """Serve prompts drawn from ``known`` ones; ``truth`` is added to the hit rate that the engine measures."""
        for _ in range(requests):
            self._prompts += 1
            name = self._random.randrange(known)
            keys = [(name, position) for position in range(PROMPT_BLOCKS)]
            hits = 0 if known > 10**6 else self._hits(keys)
            self.observer.watch(_serve, self._prompts, keys, hits + int(truth * 320))

    def _hits(self, keys: list[tuple[int, int]]) -> int:
        # What a cache of 1600 tokens holds, told by the model itself: the comparison is not what is tested here.
        stack = self.estimator.stack
        cache = len(self.estimator.limits) - 1 - self.estimator.limits.index(1600)
        mark = stack._mark_stamps[cache]
        return sum(16 for key in keys if (slot := stack._slot_of.get(key)) is not None and stack._stamp[slot] > mark)

    def close(self) -> None:
        """End the engine."""
        self.observer.close()
        self.subscription.close()


def _serve(estimator: Estimator, request: int, keys: list[tuple[int, int]], hits: int) -> None:
    estimator.admit(request, keys, len(keys), len(keys) * BLOCK_TOKENS, hits)
    estimator.release(request, keys)


@pytest.fixture
def engine(ledger_dir: Path) -> Iterator[AdvisedEngine]:
    """Return an engine that goes by the name "chat"."""
    engine = AdvisedEngine(ledger_dir)
    yield engine
    engine.close()
