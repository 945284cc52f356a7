"""Methods of single objects that are replaced by ours, and given back when the control ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Wraps:
    """The methods that were replaced on some objects, never on their classes: other objects of a class are not ours."""

    __slots__ = ("_replaced",)

    def __init__(self) -> None:
        """Begin with nothing replaced."""
        self._replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []

    def replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:  # noqa: ANN401 - an object of vLLM's
        """Let ``owner.name`` be ``ours`` until :meth:`undo`.

        The object's ``__dict__`` is never asked for: Python would store its attributes in a slower way from then on.
        """
        self._replaced.append((owner, name, ours, getattr(owner, name)))
        setattr(owner, name, ours)

    def undo(self) -> None:
        """Give all methods back. One that somebody else wrapped in turn stays, so ours must be harmless afterwards."""
        while self._replaced:
            owner, name, ours, former = self._replaced.pop()
            if getattr(owner, name) is not ours:
                continue
            delattr(owner, name)
            if getattr(owner, name, None) != former:  # it was the object's own, not its class's
                setattr(owner, name, former)
