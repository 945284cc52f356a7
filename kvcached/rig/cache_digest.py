"""A running hash over what a rank's cache did and held, step by step."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.rig.block_cache import BlockCache

_STEP = struct.Struct("=QqQQ")


class CacheDigest:
    """Equal on two ranks exactly when their caches were the same after every step, hash collisions aside."""

    def __init__(self, cache: BlockCache) -> None:
        """Watch ``cache`` from now on; it is the only reader of the cache's journal."""
        self._cache = cache
        self._hash = hashlib.blake2b(digest_size=16)

    def end_step(self, step: int) -> None:
        """Take in all changes since the last call, in order, and the content that they led to."""
        cache = self._cache
        if cache.journal:
            self._hash.update(array("q", cache.journal).tobytes())
            cache.journal.clear()
        self._hash.update(_STEP.pack(step, cache.content, cache.idle_tokens(), cache.active_tokens()))

    def hexdigest(self) -> str:
        """Return the current hash."""
        return self._hash.hexdigest()
