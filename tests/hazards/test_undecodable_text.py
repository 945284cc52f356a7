"""Hazards of text that cannot be encoded: file names and messages hold any bytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvcached.ledger.instances import get_instances
from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription
from kvcached.values import Identity, Outcome, Report, Update

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NOT_UTF8 = b"caf\xe9".decode("utf-8", "surrogateescape")


def test_text_that_cannot_be_encoded_stops_neither_report_nor_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's error message and a caller's program name may hold bytes that are no text."""
    directory = tmp_path / "ledgers"
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(sys, "argv", [f"/opt/{NOT_UTF8}/{NOT_UTF8}.py"])
    subscription = Subscription(Identity("a", "toy", NOT_UTF8, 0, 1, 1, 16000, 16), ["cpu-0"], str(directory))
    subscription.start()
    try:
        subscription.acknowledge(Report(Update(0, 16000), 0, Outcome.EVICTION_FAILED, NOT_UTF8, 0, 0, 0, 0, 1))
        assert publish(5, "a", str(directory)).accepted
        (instance,) = get_instances(directory)
        assert instance.replicas[0].reason == "caf?"
    finally:
        subscription.close()
