"""Light dataclasses behave as the standard library's: every class that uses them is compared with its twin there."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest

import kvcached
from kvcached.ledger.results import Rejection
from kvcached.light_dataclasses import dataclass, replace

PACKAGE = Path(kvcached.__file__).parent
IMPORT = "from kvcached.light_dataclasses import"


def pairs() -> list[Any]:
    """Return each light dataclass of the package, and the one that the standard library makes of the same source."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        if IMPORT in source:
            module = importlib.import_module(".".join(["kvcached", *path.relative_to(PACKAGE).with_suffix("").parts]))
            twins = {"__name__": module.__name__, "__file__": str(path)}
            exec(compile(source.replace(IMPORT, "from dataclasses import"), path, "exec"), twins)  # noqa: S102
            found += [
                pytest.param(cls, twins[name], id=f"{module.__name__}.{name}")
                for name, cls in vars(module).items()
                if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
            ]
    return found


PAIRS = pytest.mark.parametrize(("light", "standard"), pairs())


def values_of(cls: type[Any]) -> list[str]:
    return [f"value {index}" for index in range(len(dataclasses.fields(cls)))]


def test_there_are_light_dataclasses() -> None:
    """The comparisons below compare something."""
    assert len(pairs()) > 15


@PAIRS
def test_the_standard_library_accepts_them(light: type[Any], standard: type[Any]) -> None:
    """Fields, defaults, dictionaries, tuples and copies with changes are those of a standard dataclass."""
    for name in ("__match_args__", "__dataclass_params__"):
        assert repr(getattr(light, name)) == repr(getattr(standard, name))
    shapes = [
        [(field.name, field.type, repr(field.default)) for field in dataclasses.fields(cls)]
        for cls in (light, standard)
    ]
    assert shapes[0] == shapes[1]
    values = values_of(light)
    value, twin = light(*values), standard(*values)
    assert dataclasses.is_dataclass(value)
    assert dataclasses.asdict(value) == dataclasses.asdict(twin) == vars(value)
    assert dataclasses.astuple(value) == tuple(values)
    name = light.__match_args__[-1]
    for changed in (dataclasses.replace(value, **{name: "new"}), replace(value, **{name: "new"})):
        assert type(changed) is light
        assert vars(changed) == {**vars(value), name: "new"}


@PAIRS
def test_values_are_compared_printed_and_copied_alike(light: type[Any], standard: type[Any]) -> None:
    """Representation, equality and hash are a standard dataclass's, and pickling and copying keep a value equal."""
    values = values_of(light)
    value, twin = light(*values), standard(*values)
    assert repr(value) == repr(twin)
    assert hash(value) == hash(twin)
    for same in (light(**dict(zip(light.__match_args__, values, strict=True))), copy.copy(value), copy.deepcopy(value)):
        assert (same, hash(same), list(vars(same))) == (value, hash(value), list(vars(value)))
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301
    assert value not in (twin, tuple(values), light(*values[:-1], "another"))


@PAIRS
def test_arguments_are_taken_and_refused_alike(light: type[Any], standard: type[Any]) -> None:
    """Both take the same arguments, fill in the same defaults, and refuse the same calls."""
    values = values_of(light)
    names = light.__match_args__
    taken = 0
    for count in range(len(names) + 2):
        for named in ({}, {names[-1]: "named"}, {"unheard_of": 1}):
            outcomes = [construct(cls, [*values, "more"][:count], named) for cls in (light, standard)]
            assert outcomes[0] == outcomes[1], (count, named)
            taken += outcomes[0] is not None
    assert taken


def construct(cls: type[Any], values: list[str], named: dict[str, object]) -> list[tuple[str, str]] | None:
    try:
        return [(name, repr(value)) for name, value in vars(cls(*values, **named)).items()]
    except TypeError:
        return None


@PAIRS
def test_values_are_frozen_alike(light: type[Any], standard: type[Any]) -> None:
    """Neither fields nor other attributes can be assigned or deleted; the errors say the same."""
    for name in (light.__match_args__[0], "another"):
        messages = []
        for value in (light(*values_of(light)), standard(*values_of(light))):
            with pytest.raises(dataclasses.FrozenInstanceError) as assigned:
                setattr(value, name, 1)
            with pytest.raises(dataclasses.FrozenInstanceError) as deleted:
                delattr(value, name)
            messages.append((str(assigned.value), str(deleted.value)))
        assert messages[0] == messages[1]


def test_a_pattern_takes_its_fields_apart() -> None:
    """A ``match`` statement binds the fields by their place."""
    match Rejection(3, "why"):
        case Rejection(replica, reason):
            assert (replica, reason) == (3, "why")


def test_a_standard_dataclass_may_extend_a_light_one() -> None:
    """Whoever subclasses a result with the standard decorator gets all fields."""
    standard = dataclasses.dataclass(frozen=True)
    cls = standard(type("Extended", (Rejection,), {"__annotations__": {"hint": "str"}}))
    assert dataclasses.asdict(cls(0, "why", "what")) == {"replica": 0, "reason": "why", "hint": "what"}  # type: ignore[call-overload]


def test_only_frozen_ones_are_made() -> None:
    """A light dataclass that could be changed is refused where it is declared."""
    with pytest.raises(TypeError, match="frozen"):
        dataclass(frozen=False)
