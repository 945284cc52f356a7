"""The advisor inside an engine: what it writes when, and that its failures stay its own."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest

from kvcached.advisor import observer as module
from kvcached.advisor.observer import Figures
from kvcached.advisor.page import STOPPED, WATCHING, Page
from kvcached.advisor.page_file import page_name, read_page
from kvcached.ledger.directory import LedgerDirectory
from kvcached.settings import is_advisor_wanted

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import AdvisedEngine

    from kvcached.advisor.estimator import Estimator


def page_of(engine: AdvisedEngine, ledger_dir: Path) -> Page:
    """Return what the engine's page says."""
    place = engine.subscription.place()
    assert place is not None
    with LedgerDirectory(str(ledger_dir), writable=False) as directory:
        return read_page(directory, place)


def fail(_estimator: Estimator) -> None:
    """Fail."""
    message = "a block without a hash"
    raise RuntimeError(message)


def test_page_is_written_at_once_and_then_once_a_second(engine: AdvisedEngine, ledger_dir: Path) -> None:
    """A busy engine's first tick writes; the next ones within a second do not, however much has happened."""
    engine.observer.tick()
    first = page_of(engine, ledger_dir)
    assert (first.requests, first.limit_tokens, first.capacity_tokens) == (0, 1600, 20_000)
    engine.serve(5)
    for _ in range(100):
        engine.observer.tick()
    assert page_of(engine, ledger_dir) == first
    time.sleep(module.WRITE_S + 0.05)
    engine.observer.tick()
    assert page_of(engine, ledger_dir).requests == 5


def test_idle_engine_tells_its_last_state_at_once(engine: AdvisedEngine, ledger_dir: Path) -> None:
    """Before an engine sleeps, the page holds all that has happened; without news it is left as it is."""
    engine.observer.tick()
    engine.serve(7)
    engine.observer.tick(idle=True)
    page = page_of(engine, ledger_dir)
    assert page.requests == 7
    engine.observer.tick(idle=True)
    assert page_of(engine, ledger_dir) == page


def test_tokens_in_use_are_told_by_mean_and_high_percentile(
    engine: AdvisedEngine, ledger_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What requests held is sampled while there are any, and idle times do not count."""
    monkeypatch.setattr(module, "SAMPLE_S", 0.0)
    for active in [*[100] * 18, 1000, 5000, *[0] * 50]:
        engine.figures = Figures(1600, active, 20_000)
        engine.observer.tick()
    engine.serve(1)
    engine.observer.tick(idle=True)
    page = page_of(engine, ledger_dir)
    assert page.in_use_mean == pytest.approx((18 * 100 + 1000 + 5000) / 20)
    assert page.in_use_high == 1000


def test_first_exception_ends_the_advisor_and_nothing_else(
    engine: AdvisedEngine, ledger_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing event is logged once and is reported in the page; later events are ignored."""
    engine.serve(3)
    engine.observer.tick()
    assert page_of(engine, ledger_dir).state == WATCHING
    with caplog.at_level(logging.ERROR, logger="kvcached"):
        engine.observer.watch(fail)
        engine.observer.watch(fail)
        engine.serve(3)
    assert len(caplog.records) == 1
    engine.observer.tick(idle=True)
    page = page_of(engine, ledger_dir)
    assert (page.state, page.failures, page.note) == (STOPPED, 1, "RuntimeError: a block without a hash")
    assert page.requests == 3


def test_figures_that_cannot_be_read_end_the_advisor_too(engine: AdvisedEngine, ledger_dir: Path) -> None:
    """An exception at a tick does not reach the engine either, also when it comes again and again."""
    engine.observer.tick()
    engine.figures = None  # type: ignore[assignment]
    for _ in range(5):
        engine.observer.tick(idle=True)
    engine.figures = Figures(1600, 0, 20_000)
    time.sleep(0.01)
    engine.observer._next_write = 0.0
    engine.observer.tick(idle=True)
    assert page_of(engine, ledger_dir).state == STOPPED


def test_page_that_cannot_be_written_is_tried_again_later(
    engine: AdvisedEngine, ledger_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory in the page's place costs one warning a minute, and the advisor goes on watching."""
    place = engine.subscription.place()
    assert place is not None
    obstacle = ledger_dir / page_name(place.gpu, place.slot)
    obstacle.mkdir()
    with caplog.at_level(logging.WARNING, logger="kvcached"):
        for _ in range(20):
            engine.serve(1)
            engine.observer.tick(idle=True)
    assert len(caplog.records) == 1
    obstacle.rmdir()
    engine.observer._next_write = 0.0
    engine.observer.tick(idle=True)
    assert page_of(engine, ledger_dir).requests == 20


def test_page_goes_with_the_engine(engine: AdvisedEngine, ledger_dir: Path) -> None:
    """When the engine ends in order, its page is removed."""
    engine.observer.tick()
    engine.observer.close()
    assert [one.name for one in ledger_dir.iterdir()] == ["cpu-0.ledger"]


def test_advisor_is_on_unless_switched_off() -> None:
    """Only ``KVCACHED_ADVISOR=0`` switches the advisor off."""
    assert is_advisor_wanted({})
    assert is_advisor_wanted({"KVCACHED_ADVISOR": "1"})
    assert not is_advisor_wanted({"KVCACHED_ADVISOR": "0"})
