"""Runs our code inside an engine so that its faults stay ours: each is handed on, and the engine goes on.

What runs once per scheduler step or once per request has a ``try`` of its own instead, because a call more would be
felt there; ``tests/core/test_sizes.py`` counts them. ``SystemExit`` and ``KeyboardInterrupt`` pass: a strict refusal
and an interrupt have to end the process.

Standard library only, no state: these functions travel by value to an engine's workers, which may not have this
package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")
_F = TypeVar("_F")


def call_guarded(
    on_fault: Callable[[Exception], _F], step: Callable[_P, _T], *args: _P.args, **named: _P.kwargs
) -> _T | _F:
    """Return ``step(*args, **named)``; if it raises an exception of any kind, return ``on_fault(error)``.

    ``on_fault`` runs while the error is handled, so it may log it with its traceback, and it may raise: the caller
    gets that. Any thread; costs about 0.1 µs.
    """
    try:
        return step(*args, **named)
    except Exception as error:  # noqa: BLE001 - an engine's objects may raise anything, and the engine has to serve on
        return on_fault(error)


def log_fault(log: Callable[..., None], message: str, *args: object) -> Callable[[Exception], None]:
    """Return an ``on_fault`` that only logs: ``log``, a method of a logger, gets ``message``, ``args`` and the error.

    The result is None where the step would have returned a value.
    """

    def say(error: Exception) -> None:
        log(message, *args, exc_info=error)

    return say
