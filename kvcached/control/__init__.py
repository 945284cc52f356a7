"""The operator's door: change how many idle prefix-cache tokens a running engine keeps, and see what it holds to.

Importing it loads neither torch nor an engine, and no parser of C.
"""

from __future__ import annotations

import time

from kvcached.publication import MemberResult, PublicationResult, publish
from kvcached.settings import check_instance_name, choose_ledger_dir
from kvcached.values import MAX_LIMIT_TOKENS, UNLIMITED

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import os

    from kvcached.instances import InstanceStatus

__all__ = [
    "MemberResult",
    "PublicationResult",
    "get_instances",
    "set_prefix_cache_retention_limit",
]


def set_prefix_cache_retention_limit(
    limit_tokens: int,
    *,
    instance_name: str,
    ledger_dir: str | os.PathLike[str] | None = None,
    if_revision: int | None = None,
    wait: float | None = None,
) -> PublicationResult:
    """Publish how many idle prefix-cache tokens the engines of an instance may retain.

    May be called from any thread of any process that may write the ledger directory; it blocks only with ``wait``.

    What to know:

    * The limit is stored before eviction is tried, so an exception during eviction does not roll it back.
    * The update is process-local in the engine and is gone with it: a restarted engine begins with
      ``KVCACHED_MAX_CACHED_TOKENS`` again.
    * Active and locked KV is never touched.
    * Acceptance is not completion: ``accepted`` means that the limit stands in every member, not that anything was
      evicted, nor that physical GPU memory was returned. Use ``wait``, or read :func:`get_instances`.
    * SGLang applies nothing while ``pp_size > 1``.
    * Only logical retention is changed.

    Args:
        limit_tokens: Idle tokens that each replica may retain: -1 unlimited, 0 none, N at most N.
        instance_name: The name the operator gave the engine (``KVCACHED_INSTANCE_NAME``).
        ledger_dir: The ledger directory; default ``KVCACHED_LEDGER_DIR``, else ``/dev/shm/kvcached-<uid>``.
        if_revision: Publish only if the instance's highest revision is exactly this one.
        wait: Seconds to wait until every replica reports the limit applied and holds no more idle tokens than it.

    Returns:
        The result. Whatever the outside world does wrong is in it and is not raised.

    Raises:
        TypeError: ``limit_tokens`` is no int (a bool is none), or ``if_revision`` or ``wait`` is no number.
        ValueError: a limit below -1 or above 2147483647, a malformed instance name or ledger directory.

    """
    check_limit(limit_tokens)
    check_instance_name(instance_name)
    if if_revision is not None and (isinstance(if_revision, bool) or not isinstance(if_revision, int)):
        message = f"if_revision must be an int or None, not {type(if_revision).__name__}"
        raise TypeError(message)
    if wait is not None and (isinstance(wait, bool) or not isinstance(wait, (int, float))):
        message = f"wait must be a number of seconds or None, not {type(wait).__name__}"
        raise TypeError(message)
    directory = choose_ledger_dir(ledger_dir)
    started = time.monotonic()
    result = publish(limit_tokens, instance_name, directory, if_revision=if_revision)
    if wait is None or not result.accepted:
        return result
    from kvcached.control.waiting import wait_until_applied  # noqa: PLC0415 - only who waits pays for its import

    return wait_until_applied(result, directory, wait, since=started)


def get_instances(ledger_dir: str | os.PathLike[str] | None = None) -> tuple[InstanceStatus, ...]:
    """Read the state of all live instances of a ledger directory, and change nothing.

    May be called from any thread of any process that may read the directory. Files that cannot be used are passed over.

    Raises:
        LedgerDirectoryError: the directory does not exist or cannot be used.
        ValueError: a malformed directory.

    """
    from kvcached import instances  # noqa: PLC0415 - publishing does without it

    return instances.get_instances(ledger_dir)


def check_limit(limit_tokens: int) -> None:
    """Raise TypeError or ValueError, with a sentence that says what a limit is."""
    if isinstance(limit_tokens, bool) or not isinstance(limit_tokens, int):
        message = f"limit_tokens must be an int (tokens), not {type(limit_tokens).__name__}"
        raise TypeError(message)
    if not UNLIMITED <= limit_tokens <= MAX_LIMIT_TOKENS:
        message = f"limit_tokens must be -1 (unlimited), 0 (none) or up to {MAX_LIMIT_TOKENS}, not {limit_tokens}"
        raise ValueError(message)
