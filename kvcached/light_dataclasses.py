"""``@dataclass(frozen=True)`` and ``replace`` for the modules that every start of the command line loads.

The standard library compiles six methods for each class, and loads ``inspect`` to be able to: together that was half
the time of ``kvcached-control set``. Here all classes share one set of methods. Nothing else differs: type checkers see
the standard library's decorator, and :mod:`dataclasses` itself accepts these classes and their values.

Supported are fields with or without a default, in a class that inherits no fields and has no special methods of its
own; not ``field()``, ``ClassVar``, ``InitVar`` or ``__post_init__``. Modules that no start loads use
:mod:`dataclasses`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import Field
    from typing import Any, NoReturn

__all__ = ["dataclass", "replace"]


class _Methods:
    """The methods that all light dataclasses share."""

    __match_args__: tuple[str, ...]
    _required: frozenset[str]
    _defaults: dict[str, object]  # of every field, in order; what is required is in it too

    def __init__(self, *values: object, **named: object) -> None:
        if not values and named.keys() == self._defaults.keys():  # the usual call, at half the price of what follows
            self.__dict__.update(named)
            return
        fields = dict(zip(self.__match_args__, values))  # noqa: B905 - too many are noticed below
        fields.update(named)
        once = len(fields) == len(values) + len(named)
        if not once or not self._required <= fields.keys() <= self._defaults.keys():
            expected = ", ".join(self.__match_args__)
            message = f"{type(self).__name__}() takes {expected}: none twice, and all that have no default"
            raise TypeError(message)
        self.__dict__.update(self._defaults)
        self.__dict__.update(fields)

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in zip(self.__match_args__, _values(self), strict=True))
        return f"{type(self).__qualname__}({', '.join(fields)})"

    def __eq__(self, other: object) -> bool:
        # Fields alone are in there: nothing else can be set.
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(_values(self))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        from dataclasses import FrozenInstanceError  # noqa: PLC0415 - only for a mistake

        message = f"cannot assign to field {name!r}"
        raise FrozenInstanceError(message)

    def __delattr__(self, name: str) -> NoReturn:
        from dataclasses import FrozenInstanceError  # noqa: PLC0415 - only for a mistake

        message = f"cannot delete field {name!r}"
        raise FrozenInstanceError(message)

    def __replace__(self, **changes: object) -> _Methods:
        return type(self)(**{**self.__dict__, **changes})


_METHODS = {name: method for name, method in vars(_Methods).items() if callable(method)}


def _values(value: _Methods) -> tuple[object, ...]:
    return tuple(value.__dict__[name] for name in value.__match_args__)


class _Description:
    """``__dataclass_fields__`` of a light dataclass, which :mod:`dataclasses` makes when it is first asked for."""

    def __init__(self, cls: type[Any]) -> None:
        self._cls = cls

    def __get__(self, instance: object, owner: type[Any]) -> dict[str, Field[Any]]:
        from dataclasses import make_dataclass  # noqa: PLC0415 - what the command line does without

        cls = self._cls
        defaults = {name: (value,) for name, value in cls._defaults.items() if name not in cls._required}
        fields = [(name, cls.__annotations__[name], *defaults.get(name, ())) for name in cls.__match_args__]
        model: Any = make_dataclass(cls.__name__, fields, frozen=True)
        cls.__dataclass_params__ = model.__dataclass_params__
        described: dict[str, Field[Any]] = model.__dataclass_fields__
        cls.__dataclass_fields__ = described
        return described


def _dataclass(*, frozen: bool) -> Callable[[type[Any]], type[Any]]:
    if not frozen:
        message = "a light dataclass is frozen; the standard library has the others"
        raise TypeError(message)
    return _complete


def _complete(cls: type[Any]) -> type[Any]:
    names = tuple(cls.__annotations__)
    attributes = {
        "__match_args__": names,
        "__dataclass_fields__": _Description(cls),
        "_required": frozenset(name for name in names if name not in vars(cls)),
        "_defaults": {name: vars(cls).get(name) for name in names},
    }
    for name, value in (attributes | _METHODS).items():
        setattr(cls, name, value)
    return cls


def _replace(value: _Methods, /, **changes: object) -> _Methods:
    return value.__replace__(**changes)


if TYPE_CHECKING:
    from dataclasses import dataclass, replace
else:
    dataclass, replace = _dataclass, _replace
