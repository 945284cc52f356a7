"""The Python functions of the control side."""

from __future__ import annotations

import time

from kvcached.arguments import check_bound, check_note, check_wait
from kvcached.ledger.publication import publish
from kvcached.light_dataclasses import replace
from kvcached.settings import check_instance_name, choose_ledger_dir
from kvcached.values import Bound

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    import os
    import threading

    from kvcached.control.queries.forecast import Forecast
    from kvcached.control.queries.publication_history import PublicationHistory
    from kvcached.ledger.instances import InstanceStatus
    from kvcached.ledger.results import PublicationResult


def set_prefix_cache_retention_limit(
    limit_tokens: int,
    *,
    instance_name: str,
    ledger_dir: str | os.PathLike[str] | None = None,
    if_revision: int | None = None,
    if_incarnation: str | None = None,
    if_different: bool = False,
    wait: float | None = None,
    stop: threading.Event | None = None,
    note: str = "",
) -> PublicationResult:
    """Publish how many idle prefix-cache tokens the engines of an instance may retain.

    May be called from any thread of any process that may write the ledger directory; it blocks only with ``wait``.

    What to know:

    * The limit is stored before eviction is tried, so an exception during eviction does not roll it back.
    * The update is process-local in the engine and is gone with it: a restarted engine begins with
      ``KVCACHED_MAX_CACHED_TOKENS`` again.
    * Active and locked KV is never touched.
    * Acceptance is not completion: ``accepted`` means that the limit is stored for every member, not that anything was
      evicted, nor that physical GPU memory was returned. Use ``wait``, or read :func:`get_instances`.
    * SGLang applies nothing while ``pp_size > 1``.
    * Only logical retention is changed.

    Args:
        limit_tokens: Idle tokens that each replica may retain: -1 unlimited, 0 none, N at most N.
        instance_name: The name the operator gave the engine (``KVCACHED_INSTANCE_NAME``).
        ledger_dir: The ledger directory; default ``KVCACHED_LEDGER_DIR``, else ``/dev/shm/kvcached-<uid>``.
        if_revision: Publish only if the instance's highest revision is exactly this one.
        if_incarnation: Publish only if the instance is still the one of this incarnation (16 hex digits, from
            ``InstanceStatus.incarnation`` or an earlier result). Revisions begin again after a restart, so give both.
        if_different: Publish nothing if this limit is desired everywhere already; the result is then accepted and
            ``unchanged``.
        wait: Seconds, up to 1e9, to wait until every replica reports the limit applied and holds no more idle tokens
            than it.
        stop: Set this event from another thread to end the wait within a quarter of a second.
        note: Why, in one line of at most 55 bytes, for the record of publications.

    Returns:
        The result. Whatever the outside world does wrong is in it and is not raised.

    Raises:
        TypeError: an argument of another type: ``limit_tokens`` takes no bool, float, str or None.
        ValueError: a limit below -1 or above 2147483647, a malformed instance name, ledger directory, incarnation, wait
            or note. Nothing was written then.

    """
    conditions = (if_revision, if_incarnation, if_different)
    return _publish(limit_tokens, Bound.LIMIT, instance_name, ledger_dir, conditions, wait, stop, note)


def set_kv_capacity_limit(
    limit_tokens: int,
    *,
    instance_name: str,
    ledger_dir: str | os.PathLike[str] | None = None,
    if_revision: int | None = None,
    if_incarnation: str | None = None,
    if_different: bool = False,
    wait: float | None = None,
    stop: threading.Event | None = None,
    note: str = "",
) -> PublicationResult:
    """Publish how many tokens of KV the engines of an instance may hold in all, in use and idle: the *cap*.

    The twin of :func:`set_prefix_cache_retention_limit`, with revisions of its own: a cap never changes a limit. The
    same arguments, results and exceptions, and what differs:

    * An engine evicts idle tokens to get below its cap. While running requests hold more than the cap it is
      ``applying``, and takes blocks as they end; requests that do not fit wait, as they do when the pool is full.
    * A cap below what one longest request needs is not applied: ``rejected_below_floor``, with the number.
    * A restarted engine begins with ``KVCACHED_MAX_KV_TOKENS`` again.
    * Where memory can be returned, engines return that of capped blocks to the operating system. ``returns`` in
      ``status --json`` says whether this one does, or why not.

    Args:
        limit_tokens: Tokens of KV that each replica may hold: -1 the whole pool, N at most N.
        instance_name: The name the operator gave the engine (``KVCACHED_INSTANCE_NAME``).
        ledger_dir: The ledger directory; default ``KVCACHED_LEDGER_DIR``, else ``/dev/shm/kvcached-<uid>``.
        if_revision: Publish only if the instance's highest revision of the cap is exactly this one.
        if_incarnation: As for the limit.
        if_different: Publish nothing if this cap is desired everywhere already.
        wait: Seconds, up to 1e9, to wait until every replica reports the cap applied, which it does once the memory
            beyond it is returned; where its device cannot return memory, once no more tokens are held.
        stop: Set this event from another thread to end the wait within a quarter of a second.
        note: Why, in one line of at most 55 bytes, for the record of publications.

    Returns:
        The result. Whatever the outside world does wrong is in it and is not raised.

    Raises:
        TypeError: as for the limit.
        ValueError: as for the limit.

    """
    conditions = (if_revision, if_incarnation, if_different)
    return _publish(limit_tokens, Bound.CAP, instance_name, ledger_dir, conditions, wait, stop, note)


def _publish(
    limit_tokens: int,
    bound: Bound,
    instance_name: str,
    ledger_dir: str | os.PathLike[str] | None,
    conditions: tuple[int | None, str | None, bool],
    wait: float | None,
    stop: threading.Event | None,
    note: str,
) -> PublicationResult:
    """Check the arguments of both functions and do what they say."""
    if_revision, if_incarnation, if_different = conditions
    check_instance_name(instance_name)
    check_bound(limit_tokens, if_revision, if_incarnation)
    check_note(note)
    seconds = None if wait is None else check_wait(wait)
    directory = choose_ledger_dir(ledger_dir)
    started = time.monotonic()
    result = publish(
        limit_tokens,
        instance_name,
        directory,
        bound=bound,
        if_revision=if_revision,
        if_incarnation=if_incarnation,
        if_different=if_different,
        note=note,
    )
    return result if seconds is None else _wait(result, directory, seconds, started, stop)


def forecast_prefix_cache_retention_limit(
    limit_tokens: int,
    *,
    instance_name: str,
    ledger_dir: str | os.PathLike[str] | None = None,
    if_revision: int | None = None,
    if_incarnation: str | None = None,
    if_different: bool = False,
) -> Forecast:
    """Return what :func:`set_prefix_cache_retention_limit` would do with these arguments, and write nothing.

    May be called from any thread of any process that may write the ledger directory, and does not block. The figures
    are those of the engines' last reports, which are up to a quarter of a second old while an engine is busy.

    Args:
        limit_tokens: Idle tokens that each replica may retain: -1 unlimited, 0 none, N at most N.
        instance_name: The name the operator gave the engine (``KVCACHED_INSTANCE_NAME``).
        ledger_dir: The ledger directory; default ``KVCACHED_LEDGER_DIR``, else ``/dev/shm/kvcached-<uid>``.
        if_revision: As for the publication.
        if_incarnation: As for the publication.
        if_different: The forecast is ``unchanged`` if this limit is desired everywhere.

    Returns:
        The forecast: the status that the publication would most likely return, and for each replica how many tokens
        would be kept, evicted at once, and evicted at most later. What would prevent it is in the forecast, too.

    Raises:
        TypeError, ValueError: as for the publication.

    """
    conditions = (if_revision, if_incarnation, if_different)
    return _forecast(limit_tokens, Bound.LIMIT, instance_name, ledger_dir, conditions)


def forecast_kv_capacity_limit(
    limit_tokens: int,
    *,
    instance_name: str,
    ledger_dir: str | os.PathLike[str] | None = None,
    if_revision: int | None = None,
    if_incarnation: str | None = None,
    if_different: bool = False,
) -> Forecast:
    """Return what :func:`set_kv_capacity_limit` would do with these arguments, and write nothing.

    The twin of :func:`forecast_prefix_cache_retention_limit`: the same callers, arguments, result and exceptions.
    ``kept_tokens`` are those that may be held in all. Whether the cap is below what one longest request needs is not
    forecast: only the engine knows that number.
    """
    conditions = (if_revision, if_incarnation, if_different)
    return _forecast(limit_tokens, Bound.CAP, instance_name, ledger_dir, conditions)


def _forecast(
    limit_tokens: int,
    bound: Bound,
    instance_name: str,
    ledger_dir: str | os.PathLike[str] | None,
    conditions: tuple[int | None, str | None, bool],
) -> Forecast:
    """Check the arguments of both functions and forecast."""
    if_revision, if_incarnation, _ = conditions
    check_instance_name(instance_name)
    check_bound(limit_tokens, if_revision, if_incarnation)
    from kvcached.control.queries.forecast import Conditions, forecast  # noqa: PLC0415 - publishing does without it

    return forecast(limit_tokens, instance_name, choose_ledger_dir(ledger_dir), Conditions(*conditions, bound))


def get_publication_history(
    ledger_dir: str | os.PathLike[str] | None = None, instance_name: str | None = None
) -> PublicationHistory:
    """Read who published what, oldest first, to one instance or to all, also to instances that have ended since.

    May be called from any thread of any process that may read the directory. Each ledger keeps the last 64
    publications to all of its instances together; the history is ``complete`` only if nothing can be missing from it.

    Args:
        ledger_dir: The ledger directory; default ``KVCACHED_LEDGER_DIR``, else ``/dev/shm/kvcached-<uid>``.
        instance_name: Only publications to instances of this name; None for all.

    Raises:
        LedgerDirectoryError: the directory does not exist or could not be looked at, with the reason.
        NativeLibraryError: the native library is missing or does not fit.
        ValueError: a malformed directory or instance name.

    """
    if instance_name is not None:
        check_instance_name(instance_name)
    from kvcached.control.queries import publication_history  # noqa: PLC0415 - publishing does without it

    return publication_history.get_publication_history(choose_ledger_dir(ledger_dir), instance_name)


def get_instances(ledger_dir: str | os.PathLike[str] | None = None) -> tuple[InstanceStatus, ...]:
    """Read the state of all live instances of a ledger directory, and change nothing.

    May be called from any thread of any process that may read the directory. An empty tuple means that nobody is there.

    Raises:
        LedgerDirectoryError: the directory does not exist or could not be looked at, with the reason.
        NativeLibraryError: the native library is missing or does not fit.
        ValueError: a malformed directory.

    """
    from kvcached.ledger import instances  # noqa: PLC0415 - publishing does without it

    return instances.get_instances(ledger_dir)


def _wait(
    result: PublicationResult, directory: str, seconds: float, started: float, stop: threading.Event | None
) -> PublicationResult:
    if not result.accepted:
        return result
    from kvcached.ledger.waiting import wait_until_applied  # noqa: PLC0415 - only who waits pays for it

    watch = None if stop is None else _Stopper(stop)
    try:
        return wait_until_applied(result, directory, seconds, watch, since=started)
    except _StoppedError:
        return stopped_waiting(result, started)


def stopped_waiting(result: PublicationResult, started: float) -> PublicationResult:
    """Return an accepted result whose wait was stopped before its end; ``started`` is a ``time.monotonic()``."""
    warning = f"the wait was stopped; r{result.revision} is published, and the engine will still apply it"
    waited_s = round(time.monotonic() - started, 6)
    return replace(result, applied=False, waited_s=waited_s, warnings=(*result.warnings, warning))


class _StoppedError(Exception):
    """The caller wants to wait no longer."""


class _Stopper:
    """Ends a wait from its progress reports, which come at least four times a second."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def __call__(self, _progress: object) -> None:
        if self._stop.is_set():
            raise _StoppedError
