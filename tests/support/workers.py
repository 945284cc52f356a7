"""Functions that tests run in processes of their own: spawned children import them by name from here."""

from __future__ import annotations

import os
import random

from kvcached.ledger import binding
from kvcached.ledger.publication import publish


def create_once(directory: str) -> tuple[bool, int]:
    """Create the ledger cpu-0 if nobody did; whether this call made it, and the inode that is there."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        made = binding.create_ledger(fd, "cpu-0.ledger", 0o600)
        handle = binding.Handle(fd, "cpu-0.ledger", writable=True)
        inode = handle.file.inode
        handle.close()
    finally:
        os.close(fd)
    return made, inode


def publish_many(ledger_dir: str, seed: int, count: int) -> list[str]:
    """Publish random limits to the instance "engine", one after the other; the statuses."""
    rng = random.Random(seed)
    return [publish(rng.randrange(1_000_000), "engine", ledger_dir).status for _ in range(count)]
