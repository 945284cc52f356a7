"""The paged prefix cache: blocks named by hash chains, counted references, least recently used ones evicted first.

A block is *free* (holds nothing), *active* (held by a request) or *idle* (cached, held by nobody). A key stands for a
whole prefix, so a block is of use only while all blocks before it are cached: idle blocks are kept in an order in which
the tail of a chain comes before its head, and are evicted from the front of that order.
"""

from __future__ import annotations

from collections import OrderedDict

ROOT_KEY = 0
"""The key of the empty prefix; no block carries it."""


class CacheFullError(RuntimeError):
    """A block was asked for while every block is held by a request; admission should have prevented it."""


class IntegrityError(AssertionError):
    """The cache's indexes contradict each other; the message shows both sides."""


def chain_keys(content: tuple[int, ...]) -> list[int]:
    """Return one key per block of ``content``, each standing for all content up to and including its block.

    The hash of a tuple of integers is the same in every process, whatever its hash seed.
    """
    keys = []
    key = ROOT_KEY
    for item in content:
        key = hash((key, item))
        keys.append(key)
    return keys


class BlockCache:
    """A pool of equal blocks with a prefix index; a ``PrefixCache`` that a retention policy can govern.

    Holds no lock: for the scheduler's thread alone. Everything that is asked once per step is O(1).
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """Make a pool of ``blocks`` free blocks of ``block_tokens`` tokens each."""
        self.block_tokens = block_tokens
        """Tokens per block, the smallest amount that is cached or evicted."""
        self.journal: list[int] = []
        """Keys cached and complements of keys dropped since the journal was last cleared, in order."""
        self.content = 0
        """A number that summarizes what is cached where; equal for equal content, however it got there."""
        self._blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * blocks
        self._keys: list[int | None] = [None] * blocks
        self._parents = [ROOT_KEY] * blocks
        self._index: dict[int, int] = {}

    def idle_tokens(self) -> int:
        """Return how many tokens are cached and held by no request."""
        return len(self._idle) * self.block_tokens

    def active_tokens(self) -> int:
        """Return how many tokens requests hold, computed or not."""
        return (self._blocks - len(self._free) - len(self._idle)) * self.block_tokens

    def capacity_tokens(self) -> int:
        """Return how many tokens the pool holds in all."""
        return self._blocks * self.block_tokens

    def available_blocks(self) -> int:
        """Return how many blocks can be allocated: the free ones and the idle ones."""
        return len(self._free) + len(self._idle)

    def match(self, keys: list[int]) -> tuple[int, int]:
        """Return how many of the leading ``keys`` are cached, and how many of those blocks are idle."""
        index, references = self._index, self._references
        hits = idle = 0
        for key in keys:
            block = index.get(key)
            if block is None:
                break
            hits += 1
            if references[block] == 0:
                idle += 1
        return hits, idle

    def acquire(self, keys: list[int]) -> list[int]:
        """Take a reference on the blocks of ``keys``, all of which are cached, and return them."""
        blocks = [self._index[key] for key in keys]
        references = self._references
        for block in blocks:
            if references[block] == 0:
                del self._idle[block]
            references[block] += 1
        return blocks

    def allocate(self) -> int:
        """Return a block for one request to compute into, evicting the first idle one if none is free."""
        if not self._free:
            if not self._idle:
                message = f"all {self._blocks} blocks are held by requests"
                raise CacheFullError(message)
            self._evict_first()
        block = self._free.pop()
        self._references[block] = 1
        return block

    def commit(self, block: int, key: int, parent: int) -> int:
        """Cache the computed ``block`` under ``key``, whose prefix is ``parent``; return the block to use from now on.

        That is another one if the same content was cached in the meantime; then ``block`` is free again.
        """
        cached = self._index.get(key)
        if cached is not None:
            self._references[block] = 0
            self._free.append(block)
            self.acquire([key])
            return cached
        self._index[key] = block
        self._keys[block] = key
        self._parents[block] = parent
        self._note(block, key, key)
        return block

    def release(self, blocks: list[int]) -> None:
        """Give back one reference on each of ``blocks``, a chain from its head to its tail."""
        references = self._references
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] > 0:
                continue
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def evict(self, tokens: int) -> int:
        """Evict at least ``tokens`` idle tokens, least recently used first, or all there are; return how many."""
        count = min(-(-tokens // self.block_tokens), len(self._idle))
        for _ in range(count):
            self._evict_first()
        return count * self.block_tokens

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if any index contradicts another. O(blocks); for tests and idle moments."""
        self._check_states()
        self._check_index()
        self._check_chains()

    def _evict_first(self) -> None:
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        if key is None:  # an idle block always has one; see check_integrity
            message = f"idle block {block} has no key"
            raise IntegrityError(message)
        del self._index[key]
        self._keys[block] = None
        self._parents[block] = ROOT_KEY
        self._free.append(block)
        self._note(block, key, ~key)

    def _note(self, block: int, key: int, entry: int) -> None:
        self.journal.append(entry)
        self.content ^= hash((block, key))

    def _check_states(self) -> None:
        free, idle = set(self._free), set(self._idle)
        active = {block for block, count in enumerate(self._references) if count > 0}
        _require_equal("free + idle + active blocks", len(self._free) + len(idle) + len(active), self._blocks)
        _require_equal("blocks in exactly one state", len(free | idle | active), self._blocks)
        _require_equal("negative reference counts", [count for count in self._references if count < 0], [])
        _require_equal("free blocks with a key", [block for block in free if self._keys[block] is not None], [])
        _require_equal("idle blocks without a key", [block for block in idle if self._keys[block] is None], [])
        _require_equal("active tokens", self.active_tokens(), len(active) * self.block_tokens)

    def _check_index(self) -> None:
        by_block = {key: block for block, key in enumerate(self._keys) if key is not None}
        _require_equal("index of keys", self._index, by_block)
        content = 0
        for key, block in by_block.items():
            content ^= hash((block, key))
        _require_equal("content summary", self.content, content)

    def _check_chains(self) -> None:
        children = {key: parent for key, block in self._index.items() if (parent := self._parents[block]) != ROOT_KEY}
        orphans = [key for key, parent in children.items() if parent not in self._index]
        _require_equal("cached blocks whose prefix is not cached", orphans, [])
        place = {block: position for position, block in enumerate(self._idle)}
        pairs = [(self._index[key], self._index[parent]) for key, parent in children.items()]
        late = [(tail, head) for tail, head in pairs if head in place and place.get(tail, self._blocks) > place[head]]
        _require_equal("(tail, idle head) where the tail is active or evicted later", late, [])


def _require_equal(what: str, left: object, right: object) -> None:
    if left != right:
        message = f"{what}: {left!r} != {right!r}"
        raise IntegrityError(message)
