"""The lock that keeps a second agent off a ledger directory; it ends with its agent, however that ends."""

from __future__ import annotations

import fcntl
import os

from kvcached.errors import KvcachedError

LOCK_NAME = "fleet-agent.lock"


class AgentLockError(KvcachedError):
    """A ledger directory cannot be taken by this agent; the message says why and what to do."""


class AgentLock:
    """Holds a ledger directory for one agent until :meth:`close`, or until the process ends."""

    def __init__(self, ledger_dir: str) -> None:
        """Take the lock. Raises :class:`AgentLockError` if another agent has it or the file cannot be made."""
        path = f"{ledger_dir}/{LOCK_NAME}"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            message = f"{path} cannot be made: {error.strerror}; an agent needs write access to the ledger directory"
            raise AgentLockError(message) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            message = f"another agent runs on {ledger_dir}; stop it first, or give this one another --ledger-dir"
            raise AgentLockError(message) from error

    def close(self) -> None:
        """Give the directory up."""
        os.close(self._fd)
