"""``kvcached-control balance``: divide one memory budget among instances by what their caches are worth."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from kvcached.balance.budget_lock import BudgetLock, BudgetTakenError, published_of
from kvcached.balance.decision import Decision, Verdict
from kvcached.balance.decision_json import decision_fields
from kvcached.balance.observations import Observations
from kvcached.balance.rules import rules_for
from kvcached.balance.supervisor import Supervisor
from kvcached.control import exit_codes
from kvcached.control.commands.balance_options import add_options, terms_of
from kvcached.control.rendering.balance_text import decision_line, decision_table, situation
from kvcached.control.rendering.text import complain, say
from kvcached.ledger.directory import LedgerDirectoryError
from kvcached.ledger.not_found import not_found_message
from kvcached.ledger.snapshot import take_snapshot

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from kvcached.balance.publishing_round import RoundReport
    from kvcached.balance.terms import Terms

DIRECTORY_WAIT_S = 1.0
"""How often a supervisor that was started before any engine looks for the ledger directory."""

EPILOG = """\
examples:
  kvcached-control balance --instances 'chat-*' --budget 2m --once --dry-run
  kvcached-control balance --instances 'chat-*' --budget 20GiB
  kvcached-control balance --instances big,small --budget 20GiB --weight big=10 --floor small=16k
  kvcached-control balance --take chat-a
  kvcached-control balance --traces day.jsonl night.jsonl --budget 2m
exit codes:
  0 ended by SIGTERM, or --once decided   1 --once refused, and why   2 wrong usage
  3 no such instance or directory         5 another balance holds the budget or an instance
  130 ended by Ctrl-C"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    text = "divide one memory budget among instances by what their caches are worth"
    parser = commands.add_parser("balance", help=text, epilog=EPILOG)
    add_options(parser)
    parser.set_defaults(run=run, acts=True)


def run(arguments: argparse.Namespace) -> int:
    """Balance, until a signal ends it unless told otherwise; the exit code."""
    if arguments.take is not None:
        from kvcached.control.commands.balance_take import take  # noqa: PLC0415 - only when asked for

        return take(arguments)
    if arguments.traces is not None:
        from kvcached.control.commands.balance_traces import divide_traces  # noqa: PLC0415 - as above

        return divide_traces(arguments)
    terms = terms_of(arguments)
    stop = _Stop()
    try:
        if arguments.dry_run:
            return _Balance(arguments, terms, None, stop).run()
        lock = _wait_for_lock(terms, stop, once=arguments.once)
        if lock is None:
            return stop.code
        with lock:
            return _Balance(arguments, terms, lock, stop).run()
    except BudgetTakenError as error:
        complain(str(error))
        return exit_codes.SUPERSEDED


def _wait_for_lock(terms: Terms, stop: _Stop, *, once: bool) -> BudgetLock | None:
    """Take the budget; wait for the directory, which the first engine makes. None if told to stop meanwhile."""
    said = False
    while True:
        try:
            return BudgetLock(terms.ledger_dir, terms.name)
        except LedgerDirectoryError as error:
            if once:
                raise
            if not said:
                complain(f"waiting: {error}")
            said = True
        if stop.event.wait(DIRECTORY_WAIT_S):
            return None


class _Stop:
    """SIGTERM and SIGINT end a supervisor after the round at work."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.code = exit_codes.OK
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        self.code = exit_codes.INTERRUPTED if number == signal.SIGINT else exit_codes.OK
        self.event.set()


class _Balance:
    """One run of the command: what is printed, and what the state file says."""

    def __init__(self, arguments: argparse.Namespace, terms: Terms, lock: BudgetLock | None, stop: _Stop) -> None:
        self._arguments = arguments
        self._terms = terms
        self._lock = lock
        self._stop = stop
        self._situation: object = None
        self._moves = 0
        published = published_of(lock.read_state()) if lock is not None else {}
        observations = Observations(terms, rules_for(terms.period_s), published)
        self._supervisor = Supervisor(terms, observations, publishing=lock is not None)

    def run(self) -> int:
        if self._lock is not None:
            self._lock.check_others(set(self._supervisor.look()))
        if self._arguments.once:
            return self._run_once()
        self._supervisor.run(self._stop.event, self._tell)
        return self._stop.code

    def _run_once(self) -> int:
        found = self._supervisor.run_once(self._stop.event)
        if found is None:
            if self._stop.event.is_set():
                return self._stop.code
            patterns = ", ".join(self._terms.patterns)
            complain(f"unavailable: {not_found_message(take_snapshot(self._terms.ledger_dir), patterns, pattern=True)}")
            return exit_codes.UNAVAILABLE
        decision, report = found
        self._note(decision, report)
        if self._arguments.json:
            self._print_json(decision, report)
        else:
            print("\n".join(decision_table(decision, self._terms, dry=self._lock is None)))
        if decision.verdict is Verdict.REFUSED:
            complain(decision.reason)
            return exit_codes.PROBLEM
        return exit_codes.OK

    def _tell(self, decision: Decision, report: RoundReport | None) -> None:
        """Print a decision: each as JSON, and for people what is new."""
        self._note(decision, report)
        if self._arguments.json:
            self._print_json(decision, report)
            return
        for problem in report.problems if report is not None else ():
            complain(problem)
        now = situation(decision)
        if decision.verdict is Verdict.MOVED or now != self._situation:
            would = " (dry run)" if self._lock is None else ""
            say(f"{time.strftime('%H:%M:%S')}{would} {decision_line(decision, self._terms)}")
            sys.stdout.flush()
        self._situation = now

    def _print_json(self, decision: Decision, report: RoundReport | None) -> None:
        print(json.dumps(decision_fields(decision, self._terms, report)), flush=True)

    def _note(self, decision: Decision, report: RoundReport | None) -> None:
        """Replace the state file."""
        if self._lock is None:
            return
        if report is not None and report.limits:
            self._moves += 1
        state = decision_fields(decision, self._terms, report)
        state |= {"moves": self._moves, "published": self._supervisor.observations.published}
        try:
            self._lock.write_state(state)
        except OSError as error:
            complain(f"the state file in {self._terms.ledger_dir} cannot be written: {error.strerror}")
