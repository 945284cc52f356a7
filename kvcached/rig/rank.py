"""One rank of the engine: its cache, its policy, and the loop that works off what rank 0 broadcasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.policy import RetentionPolicy
from kvcached.rig.block_cache import BlockCache
from kvcached.rig.cache_digest import CacheDigest
from kvcached.rig.injected_faults import FailingCache
from kvcached.rig.intake import Stop
from kvcached.rig.kv_rows import KvRows
from kvcached.rig.rank_record import Recorder
from kvcached.rig.request import Request
from kvcached.rig.scheduler import Scheduler
from kvcached.values import UNLIMITED, Outcome, Update

if TYPE_CHECKING:
    from kvcached.rig.config import RigConfig
    from kvcached.rig.intake import Message


class Rank:
    """What every rank does alike, rank 0 included; it reads neither clock nor file to decide anything."""

    def __init__(self, config: RigConfig, rank: int) -> None:
        """Build the cache and the policy of ``rank``."""
        self.cache = _make_cache(config)
        limit = UNLIMITED if config.settings.disabled else config.settings.startup_limit_tokens
        self.policy = RetentionPolicy(self.cache, limit, chunk_tokens=config.chunk_tokens)
        pages = KvRows(self.cache.capacity_tokens() // config.block_tokens, config.block_tokens)
        self.scheduler = Scheduler(self.cache, pages, step_tokens=config.step_tokens)
        self._digest = CacheDigest(self.cache)
        self._config = config
        self._recorder = Recorder(rank, self.policy, self.cache, timeline=config.timeline)
        self._step = 0

    def start(self, start_ns: int) -> None:
        """Count the times in the report from ``start_ns`` on the monotonic clock."""
        self._recorder.start_ns = start_ns

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The time series of this rank, empty if none was asked for."""
        return self._recorder.samples

    def step(self, message: Message) -> bool:
        """Work off ``message`` in order and run one scheduler step; return False if it was the last one."""
        self._step += 1
        going_on = True
        self.policy.on_step()
        for item in message.items:
            if isinstance(item, Request):
                self.scheduler.add(item)
            elif isinstance(item, Update):
                self._settle(item, message.taken_ns)
            elif isinstance(item, Stop):
                going_on = False
        if self.scheduler.step():
            self.policy.on_release()
        self._recorder.end_step(self._step)
        self._digest.end_step(self._step)
        if self._config.check and not self.scheduler.unfinished:
            self.cache.check_integrity()
        return going_on

    def report(self) -> dict[str, Any]:
        """Return this rank's part of the report."""
        return {**self._recorder.to_dict(), "steps": self._step, "digest": self._digest.hexdigest()}

    def _settle(self, update: Update, taken_ns: int) -> None:
        """Apply ``update``, or reject it where pipeline stages would apply it at different moments."""
        if update.revision <= self.policy.settled_revision:
            return
        if self._config.pp_size > 1:
            reason = (
                f"pp_size is {self._config.pp_size}: pipeline stages step independently, so the ranks share no step"
            )
            self.policy.reject(update, Outcome.REJECTED_PIPELINE_PARALLEL, reason)
            self._recorder.note_rejection(self._step, update, reason)
            return
        self._recorder.before_update()
        self.policy.update(update)
        self._recorder.note_update(self._step, update, taken_ns)


def _make_cache(config: RigConfig) -> BlockCache:
    blocks = config.capacity_tokens // config.block_tokens
    if config.fault_evictions == 0:
        return BlockCache(blocks, config.block_tokens)
    return FailingCache(blocks, config.block_tokens, config.fault_evictions)
