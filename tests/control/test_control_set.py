"""``set`` beyond its basics: dry runs, several instances at once, notes, and every bad input as a user meets it."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from kvcached.control import set_prefix_cache_retention_limit

if TYPE_CHECKING:
    from support.commands import Control, Toys

GPUS = "GPU-0,GPU-1"


def test_dry_run_tells_what_would_go_and_writes_nothing(control: Control, toys: Toys) -> None:
    """A dry run names tokens that go now and later, per replica, and leaves revision and history as they were."""
    toys.start("chat", gpus=GPUS, replicas=2, idle=10_000, active=2_000)
    found = control.json("set", "1k", "--instance", "chat", "--dry-run")
    assert (found["dry_run"], found["status"], found["revision"]) == (True, "accepted", 1)
    assert found["replicas"] == [
        {
            "replica": replica,
            "kept_tokens": 1000,
            "idle_tokens": 10_000,
            "active_tokens": 2_000,
            "evict_now_tokens": 9_000,
            "evict_later_tokens": 2_000,
        }
        for replica in (0, 1)
    ]
    text = control.run("set", "1k", "--instance", "chat", "--dry-run").stdout
    assert text.startswith("1,000 tokens would be published; nothing was written\n")
    (instance,) = control.json("status", "--history")["instances"]
    assert {member["revision"] for replica in instance["replicas"] for member in replica["members"]} == {0}
    assert control.json("status", "--history")["history"] == []


def test_dry_run_of_no_limit_evicts_nothing(control: Control, toys: Toys) -> None:
    """Without a limit nothing would go."""
    toys.start("chat")
    (replica,) = control.json("set", "unlimited", "--instance", "chat", "--dry-run")["replicas"]
    assert (replica["kept_tokens"], replica["evict_now_tokens"], replica["evict_later_tokens"]) == (-1, 0, 0)


def test_dry_run_foretells_failures(control: Control, toys: Toys) -> None:
    """A dry run ends with the code that publishing would end with."""
    toys.start("chat")
    assert control.run("set", "1k", "--instance", "nobody", "--dry-run").returncode == 3
    result = control.run("set", "1k", "--instance", "chat", "--dry-run", "--if-revision", "7")
    assert result.returncode == 5
    assert "the instance's highest revision is 0, not 7" in result.stderr


def test_limits_that_do_little_are_warned_about(control: Control, toys: Toys) -> None:
    """A limit below one block and one above the capacity are accepted with a warning."""
    toys.start("chat", block_tokens=32, capacity=50_000)
    for extra in ((), ("--dry-run",)):
        small = control.run("set", "8", "--instance", "chat", *extra)
        large = control.run("set", "1m", "--instance", "chat", *extra)
        assert (small.returncode, large.returncode) == (0, 0)
        assert "keeps one block, 32 tokens, which is more than 8" in small.stderr
        assert "holds 50000 tokens at most, so this limit has no effect" in large.stderr


def test_pattern_and_all_give_a_result_each_and_the_worst_code(control: Control, toys: Toys) -> None:
    """Several instances are set at once; the exit code is that of the worst."""
    toys.start("chat-a", "chat-b", "code")
    toys.start("chat-pipe", trouble="pipeline")
    found = control.json("set", "1k", "--instance", "chat-[ab]", "--wait")["results"]
    assert [(result["instance_name"], result["applied"]) for result in found] == [("chat-a", True), ("chat-b", True)]
    everyone = control.run("set", "2k", "--all", "--wait", "10")
    assert everyone.returncode == 7
    assert everyone.stdout.count("applied r") == 3
    assert "replica 0 will not apply it: rejected_pipeline_parallel: pp_size is 2" in everyone.stderr
    assert control.replica("code")["applied"] == {"revision": 1, "limit_tokens": 2000}


def test_pattern_that_matches_nothing(control: Control, toys: Toys) -> None:
    """A pattern without a match is unavailable, and says where was looked."""
    toys.start("chat")
    result = control.run("set", "1k", "--instance", "code-*")
    assert (result.returncode, result.stdout) == (3, "")
    assert f"no live instance matches 'code-*' in {control.directory}" in result.stderr
    found = control.json("set", "1k", "--instance", "code-*")
    assert found["results"] == []
    assert found["error"].startswith("no live instance matches 'code-*'")


def test_pattern_goes_without_a_revision(control: Control) -> None:
    """An expected revision belongs to one instance."""
    result = control.run("set", "1k", "--all", "--if-revision", "1")
    assert result.returncode == 2
    assert result.stderr == (
        "kvcached-control: --if-revision and --if-incarnation need one instance name: "
        "each instance counts its own revisions\n"
    )


def test_note_is_kept_with_the_publication(control: Control, toys: Toys) -> None:
    """A note is shown by the history."""
    toys.start("chat")
    control.run("set", "1k", "--instance", "chat", "--note", "night shift, 10 % traffic")
    (entry,) = control.json("status", "--history")["history"]
    assert entry["note"] == "night shift, 10 % traffic"
    assert "note: night shift, 10 % traffic" in control.run("status", "--history").stdout


def test_both_doors_tell_the_same_story(control: Control, toys: Toys) -> None:
    """The Python function and the command return the same object for the same thing, whatever became of it."""
    toys.start("chat", "twin", gpus=GPUS)
    toys.start("pipe-1", "pipe-2", trouble="pipeline")
    for one, other, options, arguments in (
        ("chat", "twin", {}, ()),
        ("chat", "twin", {"wait": 10.0}, ("--wait", "10")),
        ("chat", "twin", {"if_revision": 9}, ("--if-revision", "9")),
        ("nobody", "nowhere", {}, ()),
        ("pipe-1", "pipe-2", {"wait": 10.0}, ("--wait", "10")),
    ):
        call = partial(set_prefix_cache_retention_limit, 5000, ledger_dir=control.directory)
        returned = call(instance_name=one, **options).to_dict()
        printed = control.json("set", "5k", "--instance", other, *arguments)
        for result in (returned, printed):
            result.pop("waited_s", None)
            result.pop("incarnation")
        assert json.loads(json.dumps(returned).replace(one, "X")) == json.loads(json.dumps(printed).replace(other, "X"))


USAGE_ERRORS = (
    ("16q",),
    ("",),
    (" ",),
    ("k",),
    ("1.5k",),
    ("1e4",),
    ("-0",),
    ("+5",),
    ("0x10",),
    ("007",),
    ("-2",),
    ("-16k",),
    ("2147483648",),
    ("2148m",),
    ("9" * 20),
    ("true",),
    ("None1",),
    ("١٦",),
    ("16k\n",),
    ("5", "6"),
    ("5", "--wait", "soon"),
    ("5", "--wait", "-1"),
    ("5", "--wait", "nan"),
    ("5", "--wait", "inf"),
    ("5", "--if-revision", "x"),
    ("5", "--note", "two\nlines"),
    ("5", "--note", "x" * 56),
    ("5", "--wat"),
    ("5", "--wait", "--dry-run"),
)


def test_usage_errors_are_one_sentence_and_publish_nothing(control: Control, toys: Toys) -> None:
    """Whatever is mistyped ends with code 2, one line on standard error, and nothing published."""
    toys.start("chat")
    for arguments in USAGE_ERRORS:
        result = control.run("set", *arguments, "--instance", "chat")
        assert (result.returncode, result.stdout) == (2, ""), arguments
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith("kvcached-control"), arguments
    (member,) = control.replica("chat")["members"]
    assert (member["revision"], member["limit_tokens"], member["cap"]["revision"]) == (0, 16000, 0)
