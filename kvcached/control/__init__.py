"""Change how many tokens of KV a running engine keeps, idle and in all, and see what it keeps.

Importing this loads nothing; its names are loaded when first used, with neither torch nor an engine nor a parser of C.
"""

from __future__ import annotations

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from kvcached.control.api import (
        forecast_kv_capacity_limit,
        forecast_prefix_cache_retention_limit,
        get_instances,
        get_publication_history,
        set_kv_capacity_limit,
        set_prefix_cache_retention_limit,
    )
    from kvcached.control.queries.forecast import Forecast, ReplicaForecast
    from kvcached.control.queries.publication_history import PublicationHistory, RecordedPublication
    from kvcached.errors import KvcachedError
    from kvcached.ledger import NativeLibraryError
    from kvcached.ledger.directory import LedgerDirectoryError
    from kvcached.ledger.instances import InstanceStatus, MemberStatus, ReplicaStatus
    from kvcached.ledger.results import (
        MemberResult,
        MemberResultStatus,
        PublicationResult,
        PublicationStatus,
        Rejection,
    )
    from kvcached.settings import SettingsError
    from kvcached.values import Bound, BoundReport, Outcome, Update

__all__ = [
    "Bound",
    "BoundReport",
    "Forecast",
    "InstanceStatus",
    "KvcachedError",
    "LedgerDirectoryError",
    "MemberResult",
    "MemberResultStatus",
    "MemberStatus",
    "NativeLibraryError",
    "Outcome",
    "PublicationHistory",
    "PublicationResult",
    "PublicationStatus",
    "RecordedPublication",
    "Rejection",
    "ReplicaForecast",
    "ReplicaStatus",
    "SettingsError",
    "Update",
    "forecast_kv_capacity_limit",
    "forecast_prefix_cache_retention_limit",
    "get_instances",
    "get_publication_history",
    "set_kv_capacity_limit",
    "set_prefix_cache_retention_limit",
]

_FROM = {
    "kvcached.ledger": ("NativeLibraryError",),
    "kvcached.control.api": (
        "forecast_kv_capacity_limit",
        "forecast_prefix_cache_retention_limit",
        "get_instances",
        "get_publication_history",
        "set_kv_capacity_limit",
        "set_prefix_cache_retention_limit",
    ),
    "kvcached.control.queries.forecast": ("Forecast", "ReplicaForecast"),
    "kvcached.control.queries.publication_history": ("PublicationHistory", "RecordedPublication"),
    "kvcached.errors": ("KvcachedError",),
    "kvcached.ledger.instances": ("InstanceStatus", "MemberStatus", "ReplicaStatus"),
    "kvcached.ledger.directory": ("LedgerDirectoryError",),
    "kvcached.ledger.results": (
        "MemberResult",
        "MemberResultStatus",
        "PublicationResult",
        "PublicationStatus",
        "Rejection",
    ),
    "kvcached.settings": ("SettingsError",),
    "kvcached.values": ("Bound", "BoundReport", "Outcome", "Update"),
}


def __getattr__(name: str) -> object:
    """Load a name when it is first used, so that the command line can see to its signals before anything is loaded."""
    from importlib import import_module  # noqa: PLC0415 - as above

    for module, names in _FROM.items():
        if name in names:
            found = getattr(import_module(module), name)
            globals()[name] = found
            return found
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    """Return the names that are promised."""
    return sorted({*globals(), *__all__})
