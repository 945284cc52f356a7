"""Words, limits and settings."""

from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.limits import format_limit, parse_limit
from kvcached.settings import SettingsError, check_gpu_id, check_instance_name, choose_ledger_dir, read_settings
from kvcached.values import MAX_LIMIT_TOKENS, MAX_REVISION, Bound, Update, pack, unpack


@given(st.integers(0, MAX_REVISION), st.integers(-(2**31), MAX_LIMIT_TOKENS), st.sampled_from(Bound))
def test_word_round_trip(revision: int, limit: int, bound: Bound) -> None:
    """Every revision and limit that fits a word comes back from it unchanged."""
    word = pack(Update(revision, limit, bound))
    assert 0 <= word < 2**64
    assert unpack(word, bound) == Update(revision, limit, bound)


@given(st.integers(0, MAX_REVISION), st.integers(-(2**31), MAX_LIMIT_TOKENS))
def test_update_survives_the_broadcast_of_an_engine(revision: int, limit: int) -> None:
    """An update is pickled and read back as it was, and one of a cap is never equal to one of a limit."""
    cap, of_limit = Update(revision, limit, Bound.CAP), Update(revision, limit)
    assert pickle.loads(pickle.dumps(cap)) == cap  # noqa: S301 - what engines do with their own messages
    assert cap != of_limit


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0", 0),
        ("1", 1),
        ("16000", 16000),
        ("16k", 16000),
        ("16K", 16000),
        ("2m", 2_000_000),
        ("unlimited", -1),
        ("none", 0),
        ("-1", -1),
        ("2147483647", MAX_LIMIT_TOKENS),
    ],
)
def test_limit_is_read_exactly(text: str, limit: int) -> None:
    """A limit as people write it means exactly one number."""
    assert parse_limit(text) == limit


@pytest.mark.parametrize(
    "text",
    ["", " ", "k", "1.5k", "1e4", "-0", "+5", "0x10", "16q", "9" * 20, "9" * 5000, "-2", "2147483648", "3000m", "0k",
     "007", "1 k", "１６", "16k ", "nan", "inf", "True"],
)  # fmt: skip
def test_doubtful_limit_is_refused(text: str) -> None:
    """Nothing doubtful becomes a number, least of all 0 or unlimited."""
    with pytest.raises(ValueError, match=r"limit"):
        parse_limit(text)


@given(st.text(max_size=12))
def test_refused_or_within_range(text: str) -> None:
    """Whatever is typed is refused or becomes a limit that a word can carry."""
    try:
        limit = parse_limit(text)
    except ValueError:
        return
    assert -1 <= limit <= MAX_LIMIT_TOKENS
    assert format_limit(limit)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", -1),
        ("0", 0),
        ("none", 0),
        ("-1", -1),
        ("-70", -1),
        ("-" + "9" * 5000, -1),
        ("unlimited", -1),
        ("5", 5),
        ("16k", 16000),
        ("2m", 2_000_000),
        ("2147483647", MAX_LIMIT_TOKENS),
    ],
)
def test_startup_limit(text: str, limit: int) -> None:
    """A startup limit is written as for `set`, any negative number is unlimited, and so is an unset one."""
    assert read_settings("toy", {"KVCACHED_MAX_CACHED_TOKENS": text}).startup_limit_tokens == limit


@pytest.mark.parametrize(
    "text", ["lots", "1.5", "2147483648", "0x10", "1_000", " 5", "5 ", "1 000", "١٦", "-0", "-007", "- 1", "-١", "\n"]
)
def test_startup_limit_that_is_no_limit(text: str) -> None:
    """A startup limit that only Python's parser would understand is one clear error that names variable and value."""
    with pytest.raises(SettingsError) as caught:
        read_settings("toy", {"KVCACHED_MAX_CACHED_TOKENS": text})
    assert str(caught.value).startswith(
        f"KVCACHED_MAX_CACHED_TOKENS={text!r} is not a number of tokens; give 16000, 16k"
    )


@pytest.mark.parametrize("name", ["a", "my-model", "A.b_c-9", "x" * 63])
def test_instance_names(name: str) -> None:
    """The documented names are taken."""
    assert check_instance_name(name) == name


@pytest.mark.parametrize("name", ["", ".a", "-a", "x" * 64, "a/b", "a b", "ä", "a\n", "a\0", None, 5])
def test_malformed_instance_names(name: str) -> None:
    """Anything else is refused, among it whatever could name another path."""
    with pytest.raises(SettingsError, match="is invalid"):
        check_instance_name(name)


@pytest.mark.parametrize("gpu", ["", "..", "a/b", "../x", ".hidden", "x" * 129])
def test_malformed_gpu_ids(gpu: str) -> None:
    """A GPU id that could leave the directory or hide in it is refused."""
    with pytest.raises(SettingsError, match="cannot name a ledger"):
        check_gpu_id(gpu)


def test_gpu_ids_of_the_environment() -> None:
    """KVCACHED_GPU_IDS is split at commas, and nothing is what the engine's devices say."""
    assert read_settings("toy", {"KVCACHED_GPU_IDS": "GPU-1, GPU-2"}).gpu_ids == ("GPU-1", "GPU-2")
    assert read_settings("toy", {}).gpu_ids is None


def test_gpu_ids_that_repeat() -> None:
    """Two members of one id would share a slot file and count as one, so the second is refused."""
    with pytest.raises(SettingsError, match="KVCACHED_GPU_IDS names GPU-1 more than once"):
        read_settings("toy", {"KVCACHED_GPU_IDS": "GPU-1,GPU-2, GPU-1"})


@pytest.mark.parametrize("directory", ["", "a\0b", b"bytes"])
def test_malformed_ledger_directory(directory: str) -> None:
    """A directory that is no path is a ValueError."""
    with pytest.raises(ValueError, match="not a path"):
        choose_ledger_dir(directory, {})


def test_ledger_directory_precedence() -> None:
    """The argument wins over the variable, and the variable over the user's default."""
    environ = {"KVCACHED_LEDGER_DIR": "/a", "HOME": "/b", "TMPDIR": "/c"}
    assert choose_ledger_dir("/x", environ) == "/x"
    assert choose_ledger_dir(None, environ) == "/a"
    assert choose_ledger_dir(None, {"HOME": "/b", "TMPDIR": "/c"}).startswith("/dev/shm/kvcached-")  # noqa: S108


@pytest.mark.parametrize(("text", "cap"), [("", -1), ("16k", 16000), ("unlimited", -1), ("-7", -1)])
def test_startup_cap_is_written_as_a_limit_is(text: str, cap: int) -> None:
    """The startup cap takes what the startup limit takes."""
    assert read_settings("toy", {"KVCACHED_MAX_KV_TOKENS": text}).startup_cap_tokens == cap


def test_startup_cap_that_is_no_number_of_tokens_is_an_error() -> None:
    """An engine with a mistyped cap does not start, and is told which variable it is."""
    with pytest.raises(SettingsError, match="KVCACHED_MAX_KV_TOKENS='lots' is not a number of tokens"):
        read_settings("toy", {"KVCACHED_MAX_KV_TOKENS": "lots"})


@pytest.mark.parametrize(
    ("environ", "after"),
    [
        ({}, None),
        ({"KVCACHED_ELASTIC": "0"}, None),
        ({"KVCACHED_ELASTIC": "1"}, 5.0),
        ({"KVCACHED_ELASTIC": "1", "KVCACHED_ELASTIC_AFTER": "0.5"}, 0.5),
        ({"KVCACHED_ELASTIC_AFTER": "nonsense"}, None),
    ],
)
def test_memory_is_elastic_only_where_it_was_asked_for(environ: dict[str, str], after: float | None) -> None:
    """Elastic memory is off by default, and its time is five seconds."""
    assert read_settings("toy", environ).elastic_after_s == after


@pytest.mark.parametrize("text", ["0", "-1", "five", "1e3", "inf", "nan", " 5"])
def test_elastic_time_that_is_not_positive_seconds_is_an_error(text: str) -> None:
    """A time that cannot be meant stops the engine's start with the variable's name."""
    with pytest.raises(SettingsError, match=re.escape(f"KVCACHED_ELASTIC_AFTER={text!r}")):
        read_settings("toy", {"KVCACHED_ELASTIC": "1", "KVCACHED_ELASTIC_AFTER": text})
