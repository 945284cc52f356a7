"""What becomes of a fault of ours where an engine must go on."""

from __future__ import annotations

import logging
import traceback
from typing import NoReturn

import pytest

from kvcached.guards import call_guarded, log_fault

_log = logging.getLogger("engine")


def divide(number: int, *, by: int) -> float:
    return number / by


def raise_again(error: Exception) -> NoReturn:
    raise error


def test_without_a_fault_the_result_is_that_of_the_step() -> None:
    """Arguments reach the step by position and by name, and what would become of a fault is not asked."""
    assert call_guarded(raise_again, divide, 6, by=3) == 2.0


def test_a_fault_is_handed_on_with_its_traceback_and_its_answer_returned() -> None:
    """Who ends the control gets the error itself, from where it was raised."""
    faults: list[Exception] = []
    assert call_guarded(faults.append, divide, 6, by=0) is None
    assert call_guarded(str, divide, 6, by=0) == "division by zero"
    assert [type(fault) for fault in faults] == [ZeroDivisionError]
    assert traceback.extract_tb(faults[0].__traceback__)[-1].name == "divide"


def test_a_fault_may_be_answered_by_an_exception() -> None:
    """A refusal to start is raised where the fault is handled, and reaches the caller."""
    with pytest.raises(ZeroDivisionError) as raised:
        call_guarded(raise_again, divide, 6, by=0)
    assert raised.value.__cause__ is raised.value.__context__ is None


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_process_passes(end: type[BaseException]) -> None:
    """A strict refusal and an interrupt are no faults."""
    faults: list[Exception] = []

    def leave() -> NoReturn:
        raise end

    with pytest.raises(end):
        call_guarded(faults.append, leave)
    assert faults == []


def test_a_fault_that_is_only_logged_is_logged_whole(caplog: pytest.LogCaptureFixture) -> None:
    """The line has its level and its arguments, the traceback follows, and the result is None."""
    assert call_guarded(log_fault(_log.warning, "slot %d is not released", 7), divide, 6, by=0) is None
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("engine", "WARNING", "slot 7 is not released")
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
