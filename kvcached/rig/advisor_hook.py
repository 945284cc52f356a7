"""The advisor in the rig: rank 0 tells it of each request's beginning and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.advisor.curve import spaced_limits
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.observer import Figures, Observer
from kvcached.advisor.page_file import PageWriter
from kvcached.advisor.sampling import SamplePlan
from kvcached.settings import is_advisor_wanted

if TYPE_CHECKING:
    from kvcached.rig.config import RigConfig
    from kvcached.rig.intake import PublicationSource
    from kvcached.rig.rank import Rank
    from kvcached.rig.scheduler import Sequence


class AdvisedRank:
    """Watches the scheduler of one rank, and nothing else of it: the rank is as it would be alone."""

    def __init__(self, observer: Observer, block_tokens: int) -> None:
        """Report to ``observer``."""
        self._observer = observer
        self._block_tokens = block_tokens

    def admitted(self, sequence: Sequence) -> None:
        """Note that a request begins, its hits acquired."""
        self._observer.watch(_admit, sequence, self._block_tokens)

    def released(self, sequence: Sequence) -> None:
        """Note that a request has given its blocks back."""
        self._observer.watch(_release, sequence)

    def end_step(self, *, idle: bool) -> None:
        """Do what is due after a step; ``idle`` says that nothing waits or runs."""
        self._observer.tick(idle=idle)

    def close(self) -> None:
        """Tell the outside nothing more."""
        self._observer.close()


def open_advised(config: RigConfig, worker: Rank, subscription: PublicationSource) -> AdvisedRank | None:
    """Let an advisor watch ``worker``, the source rank; None if it is switched off."""
    if config.settings.disabled or not is_advisor_wanted():
        return None
    cache, policy = worker.cache, worker.policy
    plan = SamplePlan(config.block_tokens)
    limits = spaced_limits(config.block_tokens, cache.capacity_tokens(), policy.limit_tokens)
    observer = Observer(
        Estimator(plan, limits),
        config.block_tokens,
        lambda: Figures(policy.limit_tokens, cache.active_tokens(), cache.capacity_tokens()),
        PageWriter(config.settings.ledger_dir),
        subscription.place,
    )
    advised = AdvisedRank(observer, config.block_tokens)
    worker.scheduler.watcher = advised
    return advised


def _admit(estimator: Estimator, sequence: Sequence, block_tokens: int) -> None:
    plan, keys = estimator.plan, sequence.keys
    samples = plan.samples_of(sequence.prompt_tokens // block_tokens)
    estimator.admit(
        sequence,
        [keys[position] for position in plan.positions[:samples]],
        (sequence.prompt_tokens - 1) // block_tokens,
        sequence.prompt_tokens,
        sequence.computed,
    )


def _release(estimator: Estimator, sequence: Sequence) -> None:
    plan, keys = estimator.plan, sequence.keys
    samples = plan.samples_of(sequence.committed)
    estimator.release(sequence, [keys[position] for position in plan.positions[:samples]])
