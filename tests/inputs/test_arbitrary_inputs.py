"""Anything may stand on a command line, in the environment and in a call: it is understood or refused, never both."""

from __future__ import annotations

import contextlib
import io
import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvcached.control import set_prefix_cache_retention_limit
from kvcached.control.commands.command_line import main
from kvcached.limits import parse_limit
from kvcached.settings import SettingsError, read_settings
from kvcached.values import MAX_LIMIT_TOKENS, Outcome, Update, pack, unpack

if TYPE_CHECKING:
    from pathlib import Path

VARIABLES = (
    "KVCACHED_MAX_CACHED_TOKENS",
    "KVCACHED_LEDGER_DIR",
    "KVCACHED_INSTANCE_NAME",
    "KVCACHED_GPU_IDS",
    "KVCACHED_DISABLE",
    "KVCACHED_STRICT",
)
USAGE, UNAVAILABLE = 2, 3
WORDS = st.sampled_from(
    ["set", "status", "--instance", "--json", "--wait", "--if-revision", "16k", "-1", "none", "a", "0"]
)
TEXT = st.text(st.characters(exclude_characters="\0"), max_size=30) | st.from_regex(
    r"-?[0-9_ ]{0,12}[kKmM.]?", fullmatch=True
)

quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@quick
@given(st.dictionaries(st.sampled_from(VARIABLES), TEXT))
@example({"KVCACHED_MAX_CACHED_TOKENS": "9" * 5000})
@example({"KVCACHED_MAX_CACHED_TOKENS": "-" + "9" * 5000})
@example({"KVCACHED_GPU_IDS": ","})
@example({"KVCACHED_INSTANCE_NAME": "../x"})
def test_environment_is_understood_or_refused(environ: dict[str, str]) -> None:
    """Whatever the variables hold, an engine's settings are whole and within their bounds, or there are none."""
    try:
        found = read_settings("toy", environ)
    except SettingsError:
        return
    assert -1 <= found.startup_limit_tokens <= MAX_LIMIT_TOKENS
    assert found.ledger_dir.startswith("/")
    assert 1 <= len(found.instance_name) <= 63
    assert found.instance_name[0] not in ".-"
    assert len(set(found.gpu_ids or ())) == len(found.gpu_ids or ())
    for gpu in found.gpu_ids or ():
        assert "/" not in gpu
        assert gpu[0] != "."


@quick
@given(TEXT)
def test_limit_text_is_understood_or_refused(text: str) -> None:
    """A limit is what its digits say, or an error."""
    try:
        limit = parse_limit(text)
    except ValueError:
        return
    assert -1 <= limit <= MAX_LIMIT_TOKENS
    if text.isascii() and text.isdigit():
        assert limit == int(text)


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers())


@quick
@given(limit=ANYTHING, name=ANYTHING, revision=ANYTHING)
def test_call_with_anything_is_refused_or_answered(
    tmp_path: Path, limit: object, name: object, revision: object
) -> None:
    """The Python call raises TypeError or ValueError for what it cannot mean, and answers everything else."""
    try:
        result = set_prefix_cache_retention_limit(
            limit, instance_name=name, ledger_dir=tmp_path / "none", if_revision=revision
        )
    except (TypeError, ValueError):
        return
    assert type(limit) is int
    assert -1 <= limit <= MAX_LIMIT_TOKENS
    assert result.status == "unavailable"
    assert json.loads(json.dumps(result.to_dict()))["status"] == "unavailable"


def call(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command line in this process: the exit code and what it printed."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else USAGE
    return code, out.getvalue(), errors.getvalue()


@quick
@given(st.lists(WORDS | TEXT, max_size=7))
@example(["set", "16k", "--instance", "a", "--json", "--wait", "nan"])
@example(["set", "16k", "--instance", "a", "--if-revision", "9" * 5000])
@example(["set", "16k", "--instance", "a", "--json", "--wait=1e308"])
@example(["set", "16k", "--instance", "a", "--json", "--if-revision=-1"])
def test_command_line_of_anything_ends_with_a_known_code(tmp_path: Path, arguments: list[str]) -> None:
    """Any words after `set` or `status` end in a known exit code, and what `--json` prints is one object or nothing."""
    if "-h" in arguments or any(word.startswith("--h") for word in arguments):
        return
    for command in ("set", "status"):
        code, out, errors = call([command, "--ledger-dir", str(tmp_path / "none"), *arguments])
        assert code in (0, USAGE, UNAVAILABLE), (code, errors)
        assert "Traceback" not in errors
        if "--json" in arguments and code in (0, UNAVAILABLE) and out:
            assert isinstance(json.loads(out), dict)


@given(st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1))
def test_words_hold_every_pair(revision: int, limit: int) -> None:
    """A pair comes back from its word exactly."""
    assert unpack(pack(Update(revision, limit))) == Update(revision, limit)


@pytest.mark.parametrize("outcome", Outcome)
def test_outcomes_are_words(outcome: Outcome) -> None:
    """What users see of an outcome is a lower-case word."""
    assert outcome.value.replace("_", "").isalpha()
