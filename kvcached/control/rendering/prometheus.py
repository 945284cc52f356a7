"""The figures of a ledger directory as metrics. Needs prometheus_client."""

from __future__ import annotations

import math
import sys
import threading
from typing import TYPE_CHECKING

from prometheus_client import exposition, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry

from kvcached.balance.budget_state import read_budgets
from kvcached.control import exit_codes
from kvcached.control.queries.directory_view import View, view_of
from kvcached.control.rendering.prometheus_balance import budget_metrics
from kvcached.control.rendering.status_remarks import newest_cap, newest_desired
from kvcached.control.rendering.text import complain
from kvcached.ledger import NativeLibraryError
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.snapshot import take_snapshot
from kvcached.values import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from kvcached.ledger.instances import InstanceStatus, ReplicaStatus

_LABELS = ("instance", "replica", "engine")

_GAUGES: tuple[tuple[str, str, Callable[[ReplicaStatus], float]], ...] = (
    (
        "kvcached_limit_tokens",
        "Idle tokens that the replica may retain, as it applies it; +Inf without a limit.",
        lambda replica: _limit(replica.applied.limit_tokens),
    ),
    (
        "kvcached_desired_limit_tokens",
        "Idle tokens of the newest published limit; +Inf without a limit.",
        lambda replica: _limit(newest_desired(replica).limit_tokens),
    ),
    (
        "kvcached_desired_revision",
        "Revision of the newest publication; 0 before the first.",
        lambda replica: newest_desired(replica).revision,
    ),
    (
        "kvcached_applied_revision",
        "Revision of the limit in force; 0 is the startup limit.",
        lambda replica: replica.applied.revision,
    ),
    (
        "kvcached_settled_revision",
        "Newest revision that was applied or rejected.",
        lambda replica: replica.settled_revision,
    ),
    (
        "kvcached_cap_tokens",
        "Tokens of KV that the replica may hold in all, as it applies it; +Inf for the whole pool.",
        lambda replica: _limit(replica.cap.applied.limit_tokens),
    ),
    (
        "kvcached_desired_cap_tokens",
        "Tokens of the newest published cap; +Inf for the whole pool.",
        lambda replica: _limit(newest_cap(replica).limit_tokens),
    ),
    (
        "kvcached_desired_cap_revision",
        "Revision of the newest published cap; 0 before the first.",
        lambda replica: newest_cap(replica).revision,
    ),
    (
        "kvcached_applied_cap_revision",
        "Revision of the cap in force; 0 is the startup cap.",
        lambda replica: replica.cap.applied.revision,
    ),
    (
        "kvcached_settled_cap_revision",
        "Newest revision of the cap that was applied or rejected.",
        lambda replica: replica.cap.settled_revision,
    ),
    (
        "kvcached_token_bytes",
        "Bytes of one token of KV over all ranks; 0 where the engine does not say.",
        lambda replica: replica.token_bytes,
    ),
    ("kvcached_pool_bytes", "Bytes of the KV pool over all ranks.", lambda replica: replica.pool_bytes),
    (
        "kvcached_resident_bytes",
        "Bytes of the KV pool that hold memory now.",
        lambda replica: replica.resident_bytes,
    ),
    (
        "kvcached_returned_bytes",
        "Bytes of the KV pool whose memory is back with the operating system or the device's driver now.",
        lambda replica: replica.returned_bytes,
    ),
    ("kvcached_idle_tokens", "Cached tokens in use by no request.", lambda replica: replica.idle_tokens),
    ("kvcached_active_tokens", "Tokens held by running requests.", lambda replica: replica.active_tokens),
    ("kvcached_capacity_tokens", "Tokens that the cache can hold.", lambda replica: replica.capacity_tokens),
    (
        "kvcached_split",
        "1 while the members do not all carry the same publication, else 0.",
        lambda replica: replica.split,
    ),
    (
        "kvcached_last_report_age_seconds",
        "Seconds since the engine last reported; it reports when something changes. NaN before its first report.",
        lambda replica: math.nan if replica.report_age_s is None else max(0.0, replica.report_age_s),
    ),
)

_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaStatus], float]], ...] = (
    (
        "kvcached_evicted_tokens",
        "Idle tokens evicted to keep within the limit since the engine started.",
        lambda replica: replica.evicted_tokens,
    ),
    (
        "kvcached_eviction_errors",
        "Evictions that raised since the engine started.",
        lambda replica: replica.eviction_errors,
    ),
)


class LedgerCollector(Collector):
    """Reads the directory again for each scrape."""

    def __init__(self, path: str) -> None:
        """Collect from the ledger directory at ``path``."""
        self._path = path

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not read the directory."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; a directory that cannot be read is a metric too."""
        view = _look(self._path)
        yield GaugeMetricFamily(
            "kvcached_ledger_dir_readable", "1 if the ledger directory could be read, else 0.", value=view is not None
        )
        if view is None:
            return
        yield GaugeMetricFamily(
            "kvcached_ledger_files_refused", "Files that cannot be used as ledgers.", value=len(view.refusals)
        )
        replicas = [(instance, replica) for instance in view.instances for replica in instance.replicas]
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for instance, replica in replicas:
                gauge.add_metric(_labels(instance, replica), value_of(replica))
            yield gauge
        for name, text, value_of in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for instance, replica in replicas:
                counter.add_metric(_labels(instance, replica), value_of(replica))
            yield counter
        yield _outcomes(replicas, "kvcached_outcome", "publication", lambda replica: replica.outcome)
        yield _outcomes(replicas, "kvcached_cap_outcome", "cap", lambda replica: replica.cap.outcome)
        yield _infos(replicas)
        yield from budget_metrics(read_budgets(self._path))


def _look(path: str) -> View | None:
    try:
        snapshot = take_snapshot(path)
    except NativeLibraryError:
        return None
    return view_of(snapshot) if snapshot.fault is None else None


def _labels(instance: InstanceStatus, replica: ReplicaStatus) -> list[str]:
    return [instance.name, str(replica.replica), instance.engine]


def _limit(limit_tokens: int) -> float:
    return math.inf if limit_tokens < 0 else limit_tokens


def _outcomes(
    replicas: Iterable[tuple[InstanceStatus, ReplicaStatus]],
    name: str,
    what: str,
    outcome_of: Callable[[ReplicaStatus], Outcome],
) -> Metric:
    text = f"Outcome of the newest {what}: 1 for the current outcome, else 0."
    states = GaugeMetricFamily(name, text, labels=(*_LABELS, "outcome"))
    for instance, replica in replicas:
        for outcome in Outcome:
            states.add_metric([*_labels(instance, replica), outcome.value], outcome is outcome_of(replica))
    return states


def _infos(replicas: Iterable[tuple[InstanceStatus, ReplicaStatus]]) -> Metric:
    names = ("engine_version", "tp_size", "pp_size", "startup_limit_tokens")
    text = "Always 1: which engine serves a replica, and over how many ranks."
    infos = GaugeMetricFamily("kvcached_replica_info", text, labels=(*_LABELS, *names))
    for instance, replica in replicas:
        sizes = (replica.tp_size, replica.pp_size, replica.startup_limit_tokens)
        infos.add_metric([*_labels(instance, replica), instance.engine_version, *map(str, sizes)], 1)
    return infos


def print_once(path: str, *, older: bool = False) -> int:
    """Print the metrics as OpenMetrics text, or in the older format of files for node_exporter; the exit code."""
    generate = exposition.generate_latest if older else openmetrics.generate_latest
    sys.stdout.write(generate(_registry(path)).decode())
    try:
        snapshot = take_snapshot(path)
    except NativeLibraryError as error:
        complain(f"{error}; see kvcached-control doctor")
        return exit_codes.UNAVAILABLE
    if snapshot.fault is not None:
        complain(not_found_message(snapshot))
        return exit_codes.UNAVAILABLE
    return exit_codes.OK


def serve(path: str, address: str, port: int) -> None:
    """Serve the metrics until interrupted. Raises :class:`OSError` if the address cannot be had."""
    server, _ = start_http_server(port, addr=address, registry=_registry(path))
    host = f"[{address}]" if ":" in address else address
    print(f"serving http://{host}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    threading.Event().wait()


def _registry(path: str) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(path))
    return registry
