"""Hooks that the plugin attaches itself, where SGLang's hook registry cannot.

The registry applies what is registered while plugins are loaded, and resolves every target then. What is to be hooked
later, or without importing a module that this process may not need, is wrapped here.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def attach(target: str, hook: Callable[..., Any], *, before: bool) -> None:
    """Let ``hook`` run before or after ``target``, under the rules of SGLang's registry.

    A hook before gets the arguments and may return others as ``(args, kwargs)``; one after gets the result first and
    may return another. Raises ``ImportError`` or ``AttributeError`` if there is no such target.
    """
    owner_name, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    stock = getattr(owner, name)
    hooked = (_preceded if before else _followed)(stock, hook)
    setattr(owner, name, hooked)
    if not isinstance(owner, type):
        _replace_copies(stock, hooked)


def attach_around(owner: type, name: str, frame: Callable[..., AbstractContextManager[Callable[[Any], None]]]) -> None:
    """Run the class method ``owner.name`` inside ``frame(*arguments)``; what it yields is told the result.

    A subclass that has a method of its own is not concerned. Raises ``AttributeError`` if ``owner`` has none itself.
    """
    call = owner.__dict__.get(name).__func__  # type: ignore[union-attr]

    @functools.wraps(call)
    def framed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - SGLang's, passed on as it is
        with frame(*args, **kwargs) as tell:
            result = call(*args, **kwargs)
            tell(result)
        return result

    setattr(owner, name, classmethod(framed))


def _preceded(stock: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def hooked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        changed = hook(*args, **kwargs)
        if changed is not None:
            args, kwargs = changed
        return stock(*args, **kwargs)

    return hooked


def _followed(stock: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def hooked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = stock(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        return result if changed is None else changed

    return hooked


def _replace_copies(stock: object, hooked: object) -> None:
    """Give ``hooked`` to every module that imported ``stock`` by name."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is stock:
                setattr(module, name, hooked)
