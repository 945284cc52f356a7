"""``kvcached-control balance`` against engines without traffic: what it refuses, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from support.commands import PATIENCE_S, wait_for
from support.toys import identity

from kvcached.balance.budget_lock import BudgetLock
from kvcached.ledger import binding
from kvcached.values import Update

if TYPE_CHECKING:
    from pathlib import Path

    from support.commands import Control, Toys

QUICK = ("--period", "0.2", "--once")


def refusal(control: Control, *arguments: str) -> str:
    """Return why one decision was refused."""
    result = control.run("balance", *arguments, *QUICK)
    assert result.returncode == 1, (result.stdout, result.stderr)
    return result.stderr


def test_what_cannot_be_shared_is_refused_with_what_to_do(control: Control, toys: Toys) -> None:
    """Unknown bytes per token, tokens of different size and different GPUs are named, and the way out."""
    toys.start("plain")
    toys.start("small", token_bytes=1024)
    toys.start("large", token_bytes=4096)
    toys.start("elsewhere", token_bytes=1024, gpus="cpu-7")
    assert "plain does not report bytes per token; give --budget in tokens" in refusal(
        control, "--instances", "plain,small", "--budget", "1GiB"
    )
    assert "give --budget in bytes" in refusal(control, "--instances", "small,large", "--budget", "1m")
    assert "a byte on one GPU is none on another" in refusal(
        control, "--instances", "small,elsewhere", "--budget", "1GiB"
    )
    assert "no curve: " in refusal(control, "--instances", "small,large", "--budget", "1GiB")
    assert control.replica("small")["members"][0]["revision"] == 0


def test_two_engines_of_one_name_are_refused(control: Control, ledger_dir: Path) -> None:
    """Where two live engines claim one name nobody can say whose curve is whose."""
    with contextlib.ExitStack() as stack:
        for number in (1, 2):
            fd = os.open(ledger_dir, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, fd)
            binding.create_ledger(fd, f"cpu-{number}.ledger", 0o600)
            ledger = binding.Handle(fd, f"cpu-{number}.ledger", writable=True)
            stack.callback(ledger.close)
            ledger.register(identity("chat"), 0, 1, number, [Update(0, 16_000)])
        assert "two live engines are named" in refusal(control, "--instances", "chat", "--budget", "1m")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--instances", "nobody", "--budget", "1m", *QUICK), 3, "nobody"),
        (("--budget", "1m"), 2, "--instances is missing"),
        (("--instances", "chat"), 2, "--budget is missing"),
        (("--instances", "chat", "--budget", "50%"), 2, "is not a budget"),
        (("--instances", "chat", "--budget", "1m", "--weight", "chat=0"), 2, "is not a weight"),
        (("--instances", "chat", "--budget", "1m", "--floor", "chat=unlimited"), 2, "a floor cannot be unlimited"),
        (("--instances", "chat", "--budget", "1m", "--name", "x" * 25), 2, "too long"),
        (("--take", "nobody"), 3, "nobody"),
    ],
    ids=str,
)
def test_wrong_words_and_missing_instances_have_their_exit_codes(
    control: Control, toys: Toys, words: tuple[str, ...], code: int, said: str
) -> None:
    """What is missing or cannot be meant is said in one line, with the exit code of its kind."""
    toys.start("chat")
    result = control.run("balance", *words)
    assert (result.returncode, said in result.stderr) == (code, True), result.stderr


def test_one_supervisor_for_one_budget(control: Control, ledger_dir: Path, toys: Toys) -> None:
    """While a budget is held a second supervisor ends with 5 and names the holder; a dry run may look."""
    toys.start("chat")
    words = ("balance", "--instances", "chat", "--budget", "1m", *QUICK)
    with BudgetLock(str(ledger_dir), "default"):
        second = control.run(*words)
        assert second.returncode == 5
        assert f"is held by pid {os.getpid()} since" in second.stderr
        assert control.run(*words, "--dry-run").returncode == 1
    assert control.run(*words).returncode == 1


def test_an_instance_has_one_budget(control: Control, ledger_dir: Path, toys: Toys) -> None:
    """A live supervisor of another name that balances the same instance is named, and the second one ends with 5."""
    toys.start("chat", "other")
    with BudgetLock(str(ledger_dir), "night") as night:
        night.write_state({"instances": [{"name": "chat"}]})
        taken = control.run("balance", "--instances", "chat", "--budget", "1m", *QUICK)
        assert (taken.returncode, "chat is balanced by night already" in taken.stderr) == (5, True)
        assert control.run("balance", "--instances", "other", "--budget", "1m", *QUICK).returncode == 1
    assert control.run("balance", "--instances", "chat", "--budget", "1m", *QUICK).returncode == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_in_order(control: Control, toys: Toys, number: signal.Signals, code: int) -> None:
    """SIGTERM is the orderly end, Ctrl-C that of a shell, and a state of the last decision is left."""
    toys.start("chat")
    command = control.command("balance", "--instances", "chat", "--budget", "1m", "--period", "0.2", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: dict[str, Any] = json.loads(process.stdout.readline())
        assert said["decision"] == "refused"
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    state = json.loads((control.directory / "balance.default.json").read_text())
    assert state["instances"][0]["name"] == "chat"


def test_it_waits_for_engines_that_are_not_there_yet(control: Control, toys: Toys) -> None:
    """A supervisor that is started first says that nobody is running, and sees the engine that comes later."""
    control.directory.rmdir()
    command = control.command("balance", "--instances", "chat", "--budget", "1m", "--period", "0.2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "waiting: " in process.stderr.readline()
        control.directory.mkdir(mode=0o700)
        toys.start("chat")
        assert re.search(r"no curve: |no instance is running", process.stdout.readline())
        wait_for(lambda: "chat" in (control.directory / "balance.default.json").read_text(), "a state with the engine")
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def _state(control: Control) -> Any:  # noqa: ANN401 - JSON is anything
    return json.loads((control.directory / "balance.default.json").read_text())


@pytest.mark.needs_module("prometheus_client")
def test_budgets_are_in_metrics_and_status(control: Control, ledger_dir: Path, toys: Toys) -> None:
    """Without a budget there is no metric of one; with one they tell whether it is held, how full and by whom."""
    toys.start("chat")
    assert "kvcached_balance" not in control.run("metrics").stdout
    assert control.run("balance", "--instances", "chat", "--budget", "1m", *QUICK).returncode == 1
    shown = control.run("metrics").stdout
    assert 'kvcached_balance_up{budget="default"} 0.0' in shown
    assert 'kvcached_balance_budget{budget="default",unit="tokens"} 1e+06' in shown
    assert 'kvcached_balance_state{budget="default",instance="chat",state="held"} 1.0' in shown
    with BudgetLock(str(ledger_dir), "default"):
        assert 'kvcached_balance_up{budget="default"} 1.0' in control.run("metrics").stdout
        assert "budget default: 16,000 tokens of 1,000,000 tokens held; chat held" in control.run("status").stdout
    assert "budget default (nobody balances it now" in control.run("status").stdout
    assert control.json("status")["budgets"] == [
        {"name": "default", "held_by_supervisor": False, "state": _state(control)}
    ]
    (ledger_dir / "balance.default.json").write_text('{"budget": [], "instances": [7, {"name": 3}], "time": "x"}')
    assert 'kvcached_balance_budget{budget="default",unit="tokens"} NaN' in control.run("metrics").stdout


def test_take_publishes_the_same_limit_under_the_budgets_name(control: Control, toys: Toys) -> None:
    """What was set by hand is published again unchanged, and the record says whose it is now."""
    toys.start("chat")
    control.run("set", "5000", "--instance", "chat")
    result = control.run("balance", "--take", "chat", "--name", "day")
    assert (result.returncode, "given to budget day at 5,000 tokens (r2)" in result.stdout) == (0, True)
    assert control.json("status", "--history")["history"][-1]["note"] == "balance day: taken"
