"""The dry run and the history from Python."""

from __future__ import annotations

import os
from datetime import timezone
from typing import TYPE_CHECKING

import pytest
from support.capped import NO_CAP_YET
from support.toys import ToyCache

from kvcached.control import (
    Bound,
    BoundReport,
    LedgerDirectoryError,
    Outcome,
    PublicationStatus,
    Update,
    forecast_kv_capacity_limit,
    forecast_prefix_cache_retention_limit,
    get_instances,
    get_publication_history,
    set_prefix_cache_retention_limit,
)
from kvcached.light_dataclasses import replace
from kvcached.policy import RetentionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.ledger.subscription import Subscription

    Subscribe = Callable[..., Subscription]


def test_a_forecast_says_what_a_publication_would_do_and_writes_nothing(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Kept, evicted now and evicted later at most add up to what the cache holds, and no revision is taken."""
    subscribe().acknowledge(RetentionPolicy(ToyCache(idle=4800, active=320), 16000).report())
    forecast = forecast_prefix_cache_retention_limit(1000, instance_name="engine", ledger_dir=ledger_dir)
    assert (forecast.status, forecast.revision, forecast.unchanged) == (PublicationStatus.ACCEPTED, 1, False)
    (replica,) = forecast.replicas
    assert (replica.kept_tokens, replica.evict_now_tokens, replica.evict_later_tokens) == (1000, 3800, 320)
    assert {member.revision for member in get_instances(ledger_dir)[0].replicas[0].members} == {0}
    assert get_publication_history(ledger_dir).publications == ()


def test_a_forecast_of_a_cap_counts_what_is_in_use_as_well(ledger_dir: Path, subscribe: Subscribe) -> None:
    """A cap is about all tokens that are held; an engine that knows none keeps what it has, and takes no revision."""
    report = RetentionPolicy(ToyCache(idle=4800, active=1280), 16000).report()
    subscription = subscribe()
    subscription.acknowledge(replace(report, cap=BoundReport(NO_CAP_YET, 0, Outcome.STARTUP, "")))
    for cap, (now, later) in {6080: (0, 0), 2000: (4080, 0), 1000: (4800, 280), -1: (0, 0)}.items():
        forecast = forecast_kv_capacity_limit(cap, instance_name="engine", ledger_dir=ledger_dir)
        (replica,) = forecast.replicas
        assert (forecast.bound, forecast.revision, replica.kept_tokens) == (Bound.CAP, 1, cap)
        assert (replica.evict_now_tokens, replica.evict_later_tokens) == (now, later)
    subscription.acknowledge(report)
    (replica,) = forecast_kv_capacity_limit(1000, instance_name="engine", ledger_dir=ledger_dir).replicas
    assert (replica.kept_tokens, replica.evict_now_tokens, replica.evict_later_tokens) == (-1, 0, 0)
    assert get_publication_history(ledger_dir).publications == ()


def test_a_forecast_tells_what_would_prevent_a_publication(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Conditions and absence lead to the status that the publication would return, also where no directory is."""
    subscribe()
    stale = forecast_prefix_cache_retention_limit(5, instance_name="engine", ledger_dir=ledger_dir, if_revision=3)
    assert (stale.status, stale.replicas) == (PublicationStatus.SUPERSEDED, ())
    for directory, name in ((ledger_dir, "nobody"), (ledger_dir / "missing", "engine")):
        nobody = forecast_prefix_cache_retention_limit(5, instance_name=name, ledger_dir=directory)
        assert nobody.status is PublicationStatus.UNAVAILABLE
        assert nobody.warnings
    with pytest.raises(TypeError):
        forecast_prefix_cache_retention_limit(1.5, instance_name="engine", ledger_dir=ledger_dir)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name"):
        forecast_prefix_cache_retention_limit(5, instance_name="a b", ledger_dir=ledger_dir)


def test_the_history_tells_who_published_what(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Each publication is in it once, oldest first, with both pairs, the publisher and its note."""
    subscribe()
    for limit in (9, 5):
        set_prefix_cache_retention_limit(limit, instance_name="engine", ledger_dir=ledger_dir, note=f"try {limit}")
    history = get_publication_history(ledger_dir, "engine")
    assert history.complete
    first, second = history.publications
    assert (first.new, second.old, second.new) == (Update(1, 9), Update(1, 9), Update(2, 5))
    assert (second.instance_name, second.note, second.pid, second.uid) == ("engine", "try 5", os.getpid(), os.getuid())
    assert second.members == len(get_instances(ledger_dir)[0].replicas[0].members)
    assert first.time.tzinfo is timezone.utc
    assert get_publication_history(ledger_dir, "other").publications == ()


def test_the_history_says_when_older_publications_are_gone(ledger_dir: Path, subscribe: Subscribe) -> None:
    """Once a ledger is full, the oldest publications have left it, and the history is not complete."""
    subscribe(gpus=("cpu-0",))
    for limit in range(65):
        set_prefix_cache_retention_limit(limit, instance_name="engine", ledger_dir=ledger_dir)
    history = get_publication_history(ledger_dir)
    assert not history.complete
    assert [one.new.limit_tokens for one in history.publications] == list(range(1, 65))


def test_the_history_of_a_missing_directory_is_an_error(ledger_dir: Path) -> None:
    """No directory is not the same as no publication."""
    with pytest.raises(LedgerDirectoryError, match="missing"):
        get_publication_history(ledger_dir / "missing")
    with pytest.raises(ValueError, match="name"):
        get_publication_history(ledger_dir, "a b")
