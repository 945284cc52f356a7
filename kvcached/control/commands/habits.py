"""What people who know other tools type, and how it is written here: only asked after a usage error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.limits import parse_amount

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "get": "status",
    "list": "status",
    "ls": "status",
    "ps": "status",
    "show": "status",
    "describe": "status",
    "info": "status",
    "top": "watch",
    "monitor": "watch",
    "patch": "set",
    "scale": "set",
}
"""Commands of kubectl, docker, redis-cli and others, and the one that does it here."""

_NOUNS = frozenset({"instance", "instances", "engine", "engines", "all"})
_WATCHING = frozenset({"-w", "--watch", "-f", "--follow"})
_FLAGS = {"-A": "--all", "-o=json": "--json", "-ojson": "--json", "--output=json": "--json", "-w": "--wait"}
_OPTIONS = {"-n": "--instance", "-i": "--instance", "--name": "--instance", "-l": "--interval"}
_WITHOUT_VALUE = frozenset({"--json", "--all", "--dry-run", "--if-different", "--history"})
_PUBLISHING = frozenset({"set", "cap"})
_POSITIONAL = {"status": "--instance", "watch": "--instance", "advise": "--instance", "doctor": "--pid"}


def right_form(words: Sequence[str]) -> list[str] | None:
    """Return what ``words`` most likely mean, as arguments of this command line; None if there is no good guess.

    The result is a guess about words only: the caller checks that the parser takes it.
    """
    if not words or words[0].startswith("-"):
        return None
    command = COMMANDS.get(words[0], words[0])
    rest = [word for word in words[1:] if words[0] not in COMMANDS or word not in _NOUNS]
    if command == "status" and ("-l" in rest or not _WATCHING.isdisjoint(rest)):
        command = "watch"
    options, positional = _sorted(command, rest)
    placed = _place(command, options, positional)
    return None if placed is None or [command, *placed] == list(words) else [command, *placed]


def _sorted(command: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of ``words``, written as here, and the words that belong to no option."""
    options: list[str] = []
    positional: list[str] = []
    takes_value = False
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if takes_value:
            options.append(word)
            takes_value = False
        elif word in ("-o", "--output") and after == "json":
            options.append("--json")
        elif word == "json" and options[-1:] == ["--json"]:
            continue
        elif (command == "watch" and word in _WATCHING) or (command not in _PUBLISHING and word == "-A"):
            continue  # is what this command does anyway
        elif word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            options.append(_FLAGS.get(word, _OPTIONS.get(word, word)))
            takes_value = _takes_value(options[-1], after)
        else:
            positional.append(word)
    return options, positional


def _takes_value(option: str, after: str) -> bool:
    if option == "--wait":  # its value is optional
        return after.replace(".", "", 1).isdecimal()
    return option not in _WITHOUT_VALUE and "=" not in option and bool(after)


def _place(command: str, options: list[str], positional: list[str]) -> list[str] | None:
    """Return the arguments with each word that belongs to no option in its place; None if there is no place for it."""
    if command in _PUBLISHING:
        return _place_limit(options, positional)
    if not positional:
        return options
    option = _POSITIONAL.get(command)
    return [option, *positional, *options] if option and len(positional) == 1 and option not in options else None


def _place_limit(options: list[str], positional: list[str]) -> list[str] | None:
    limits = [word for word in positional if _is_limit(word)]
    names = [word for word in positional if not _is_limit(word)]
    if len(limits) != 1 or len(names) > 1:
        return None
    if names:
        target = ["--instance", *names]
    else:
        target = [] if "--instance" in options or "--all" in options else ["--instance", "NAME"]
    return [*limits, *target, *options]


def _is_limit(word: str) -> bool:
    try:
        parse_amount(word)
    except ValueError:
        return False
    return True
