"""Commands as users of kubectl, redis-cli or nvidia-smi type them are answered with the form to write here."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from kvcached.control.commands.command_line import COMMANDS, main
from kvcached.control.commands.habits import COMMANDS as FOREIGN_COMMANDS
from kvcached.control.commands.habits import right_form

if TYPE_CHECKING:
    from support.commands import Control, Toys

ANSWERS = {
    "get": "status",
    "ls": "status",
    "get instances": "status",
    "get instances -A -o json": "status --json",
    "get chat": "status --instance chat",
    "get chat -w": "watch --instance chat",
    "describe engine chat": "status --instance chat",
    "top": "watch",
    "status -o json": "status --json",
    "status --output=json": "status --json",
    "status -w": "watch",
    "status -l 1": "watch --interval 1",
    "status chat": "status --instance chat",
    "watch chat": "watch --instance chat",
    "advise -n chat -ojson": "advise --instance chat --json",
    "doctor 4711": "doctor --pid 4711",
    "set 16k chat": "set 16k --instance chat",
    "set chat 16k": "set 16k --instance chat",
    "set 16k": "set 16k --instance NAME",
    "set --wait 16k": "set 16k --instance NAME --wait",
    "set 16k chat --wait 30": "set 16k --instance chat --wait 30",
    "set 16k -n chat -w": "set 16k --instance chat --wait",
    "set -A none --dry-run": "set none --all --dry-run",
    "scale chat unlimited": "set unlimited --instance chat",
}
"""What is typed, and what the answer says to write."""

WITHOUT_ANSWER = ("frobnicate", "set", "set 16k 8k chat", "set 16k chat mail", "status --jsn", "metrics 9000", "--wat")


@pytest.mark.parametrize("typed", ANSWERS)
def test_a_habit_is_answered_with_the_right_form(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command is refused with exit code 2, and one line on standard error ends with what to write."""
    assert main(shlex.split(typed)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.endswith(f"; write: kvcached-control {ANSWERS[typed]}\n")


@pytest.mark.parametrize("typed", WITHOUT_ANSWER)
def test_a_bad_guess_is_not_offered(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be understood, or would be refused again, is answered with where the help is."""
    assert main(shlex.split(typed)) == 2
    said = capsys.readouterr().err
    assert "write:" not in said
    assert said.rstrip().endswith("--help")


def test_foreign_commands_hide_no_command() -> None:
    """No command has the name of another tool's, and each of those leads to a command."""
    assert set(FOREIGN_COMMANDS).isdisjoint(COMMANDS)
    assert set(FOREIGN_COMMANDS.values()) <= set(COMMANDS)


def test_a_command_in_the_right_form_has_no_other() -> None:
    """Words that are as they should be lead to no answer."""
    for typed in ("status --json", "watch --interval 1", "set 16k --instance chat"):
        assert right_form(shlex.split(typed)) is None


def test_the_answer_to_a_positional_instance_works(control: Control, toys: Toys) -> None:
    """What the answer says to write does what was meant."""
    toys.start("chat")
    refused = control.run("set", "16k", "chat")
    answer = shlex.split(refused.stderr.partition("write: kvcached-control ")[2])
    assert (refused.returncode, control.run(*answer).returncode) == (2, 0)
    assert control.run("status", "--instance", "chat").stdout.count("16,000")
