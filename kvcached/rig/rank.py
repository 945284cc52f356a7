"""One rank of the engine: its cache, its policy, and the loop that works off what rank 0 broadcasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.capacity import CapacityPolicy
from kvcached.memory.elastic import Elastic
from kvcached.memory.madvise import prepare
from kvcached.memory.pool_memory import PoolMemory
from kvcached.memory.regions import PoolShape
from kvcached.policy import RetentionPolicy
from kvcached.replica_policy import ReplicaPolicy
from kvcached.rig.block_cache import BlockCache
from kvcached.rig.cache_digest import CacheDigest
from kvcached.rig.group_transport import GroupTransport
from kvcached.rig.guarded_memory import GuardedMemory, GuardedTransport
from kvcached.rig.injected_faults import FailingCache
from kvcached.rig.intake import Stop
from kvcached.rig.kv_rows import KvRows
from kvcached.rig.rank_record import Recorder
from kvcached.rig.rig_pool import RigPool
from kvcached.rig.scheduler import Scheduler
from kvcached.values import UNLIMITED, Outcome, Update
from kvcached.workload.request import Request

if TYPE_CHECKING:
    from kvcached.memory.regions import Region
    from kvcached.rig.config import RigConfig
    from kvcached.rig.intake import Message
    from kvcached.settings import Settings


class Rank:
    """What every rank does alike, rank 0 included; it reads neither clock nor file to decide anything."""

    def __init__(self, config: RigConfig, rank: int) -> None:
        """Build the cache and the policy of ``rank``."""
        self.cache = _make_cache(config)
        rows = self.rows = KvRows(
            self.cache.capacity_tokens() // config.block_tokens, config.block_tokens, config.token_bytes
        )
        self.scheduler = Scheduler(self.cache, rows, step_tokens=config.step_tokens)
        self.transport = _make_transport(config, rows.region())
        rows.memory = self._memory = _open_memory(config, rows.region(), self.transport)
        self._pool = RigPool(self.cache, self.scheduler, self._memory, config.longest_tokens)
        self.policy = self._make_policy(config, config.settings)
        self._digest = CacheDigest(self.cache)
        self._config = config
        self._recorder = Recorder(rank, self.policy, self.cache, ranks=config.world_size, timeline=config.timeline)
        self._step = 0
        self._now = 0.0

    def start(self, start_ns: int) -> None:
        """Count times from ``start_ns`` on rank 0's monotonic clock."""
        self._recorder.start_ns = start_ns
        settings = self._config.settings
        if settings.elastic_after_s is not None and not settings.disabled:
            now = start_ns / 1e9
            self.policy.become_elastic(Elastic(self._memory, self._pool, settings.elastic_after_s, now))

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The time series of this rank, empty if none was asked for."""
        return self._recorder.samples

    def step(self, message: Message) -> bool:
        """Work off ``message`` in order and run one scheduler step; return False if it was the last one."""
        self._step += 1
        self._now = message.taken_ns / 1e9
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
        if update.revision <= self.policy.settled_revision(update.bound):
            return
        if self._config.pp_size > 1:
            reason = f"pp_size is {self._config.pp_size}: pipeline stages step apart, so no step is common to all ranks"
            self.policy.reject(update, Outcome.REJECTED_PIPELINE_PARALLEL, reason)
            self._recorder.note_rejection(self._step, update, reason)
            return
        self._recorder.before_update(update)
        self.policy.update(update)
        self._recorder.note_update(self._step, update, taken_ns)

    def _make_policy(self, config: RigConfig, settings: Settings) -> ReplicaPolicy:
        limit, cap = settings.startup_limit_tokens, settings.startup_cap_tokens
        if settings.disabled:
            limit = cap = UNLIMITED
        retention = RetentionPolicy(self.cache, limit, chunk_tokens=config.chunk_tokens)
        capacity = CapacityPolicy(self._pool, retention, self._memory, cap, chunk_tokens=config.chunk_tokens)
        token_bytes = config.token_bytes * config.world_size
        # The clock is rank 0's on all ranks: one that lagged behind would have nobody to wake it once rank 0 rests.
        return ReplicaPolicy(retention, capacity, self._memory, token_bytes=token_bytes, clock=lambda: self._now)


def _make_transport(config: RigConfig, region: Region) -> GroupTransport:
    if config.guards_returned:
        return GuardedTransport(region, config.world_size)
    return GroupTransport([region], config.world_size)


def _open_memory(config: RigConfig, region: Region, transport: GroupTransport) -> PoolMemory:
    """Return the memory of one rank, which does the same as all others at the same step."""
    shape = PoolShape(region.rows, region.row_bytes, ranks=config.world_size)
    if isinstance(transport, GuardedTransport):
        return GuardedMemory(shape, transport, prepare([region]))
    return PoolMemory(shape, transport, prepare([region]))


def _make_cache(config: RigConfig) -> BlockCache:
    blocks = config.capacity_tokens // config.block_tokens
    if config.fault_evictions == 0:
        return BlockCache(blocks, config.block_tokens)
    return FailingCache(blocks, config.block_tokens, config.fault_evictions)
