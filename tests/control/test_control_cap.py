"""``cap``, and LIMIT in percent and in bytes, against engines that know caps and engines that do not."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.limits import Amount, parse_amount

if TYPE_CHECKING:
    from support.commands import Control, Toys

CAPPED = {"capacity": 100_000, "token_bytes": 1024, "cap_floor": 4_000}


def test_cap_is_published_waited_for_and_shown(control: Control, toys: Toys) -> None:
    """A cap is applied by every replica, and status shows it beside the limit, in text and in JSON."""
    toys.start("chat", gpus="GPU-0,GPU-1", **CAPPED)
    result = control.json("cap", "50k", "--instance", "chat", "--wait")
    assert (result["bound"], result["applied"], result["revision"]) == ("cap", True, 1)
    assert control.json("set", "5k", "--instance", "chat", "--wait")["revision"] == 1
    (replica,) = control.json("status")["instances"][0]["replicas"]
    assert replica["cap"] == {"revision": 1, "limit_tokens": 50_000, "outcome": "applied", "reason": ""}
    assert [member["cap"] for member in replica["members"]] == [{"revision": 1, "limit_tokens": 50_000}] * 2
    assert (replica["applied"], replica["split"]) == ({"revision": 1, "limit_tokens": 5000}, False)
    assert (replica["pool_bytes"], replica["returned_bytes"]) == (102_400_000, 51_200_000)
    text = control.run("status").stdout
    assert "cap r1 50,000, applied" in text
    assert "KV memory: 48.8 MiB of 97.7 MiB resident, 48.8 MiB returned" in text
    said = control.run("cap", "60k", "--instance", "chat").stdout
    assert said.startswith("accepted r2: cap 60,000 tokens, in 2 member(s) of chat in ")


def test_cap_below_the_floor_is_refused_with_the_number(control: Control, toys: Toys) -> None:
    """A cap that no request of the longest length fits in ends a wait with 7, and the cap before it stays."""
    toys.start("chat", **CAPPED)
    result = control.run("cap", "1k", "--instance", "chat", "--wait")
    assert result.returncode == 7
    assert "rejected_below_floor: one request of the longest length needs 4000 tokens" in result.stderr
    assert "cap r1 rejected below floor: one request" in control.run("status").stdout
    assert control.json("status")["instances"][0]["replicas"][0]["cap"]["limit_tokens"] == -1


def test_cap_of_an_engine_that_knows_none_is_refused_aloud(control: Control, toys: Toys) -> None:
    """An engine without caps rejects one for whoever waits, and limits work on."""
    toys.start("chat")
    result = control.run("cap", "50k", "--instance", "chat", "--wait")
    assert result.returncode == 7
    assert "does not limit KV capacity" in result.stderr
    assert control.run("set", "5k", "--instance", "chat", "--wait").returncode == 0
    assert control.run("cap", "50k", "--instance", "chat", "--if-different").stdout.startswith("unchanged, accepted r1")


def test_history_and_metrics_tell_the_bounds_apart(control: Control, toys: Toys) -> None:
    """The record says which of the two was published, and metrics have figures of both."""
    toys.start("chat", **CAPPED)
    control.json("cap", "50k", "--instance", "chat", "--wait", "--note", "neighbour")
    control.json("set", "5k", "--instance", "chat", "--wait")
    history = control.json("status", "--history")["history"]
    assert [(one["bound"], one["new"]["revision"]) for one in history] == [("cap", 1), ("limit", 1)]
    assert "cap r1 50,000" in control.run("status", "--history").stdout
    text = control.run("metrics").stdout
    labels = '{engine="toy",instance="chat",replica="0"}'
    for name, value in (("cap_tokens", "50000.0"), ("applied_cap_revision", "1.0"), ("returned_bytes", "5.12e+07")):
        assert f"kvcached_{name}{labels} {value}" in text, name
    assert 'kvcached_cap_outcome{engine="toy",instance="chat",outcome="applied",replica="0"} 1.0' in text


def test_dry_run_of_a_cap_counts_what_is_held_in_all(control: Control, toys: Toys) -> None:
    """Idle tokens go first, and of those in use as many as are then still above the cap."""
    toys.start("chat", idle=10_000, active=6_000, **CAPPED)
    (replica,) = control.json("cap", "5k", "--instance", "chat", "--dry-run")["replicas"]
    assert (replica["kept_tokens"], replica["evict_now_tokens"], replica["evict_later_tokens"]) == (5000, 10_000, 1000)
    (replica,) = control.json("cap", "12k", "--instance", "chat", "--dry-run")["replicas"]
    assert (replica["evict_now_tokens"], replica["evict_later_tokens"]) == (4000, 0)
    assert control.run("cap", "5k", "--instance", "chat", "--dry-run").stdout.startswith("cap 5,000 tokens would be")


@pytest.mark.parametrize(
    ("text", "tokens"), [("50%", 50_000), ("12.5%", 12_500), ("10MB", 9_765), ("8MiB", 8_192), ("0%", 0)]
)
def test_limits_in_percent_and_in_bytes(control: Control, toys: Toys, text: str, tokens: int) -> None:
    """A share of the capacity and an amount of memory become tokens by the engine's own figures, rounded down."""
    toys.start("chat", **CAPPED)
    assert control.json("set", text, "--instance", "chat")["limit_tokens"] == tokens
    assert control.json("set", text, "--instance", "chat", "--dry-run")["limit_tokens"] == tokens


def test_amounts_are_refused_where_the_engine_lacks_the_figure(control: Control, toys: Toys) -> None:
    """An amount that the engine has no figure for is refused, with what to write, and nothing is published."""
    toys.start("chat", capacity=0)
    for text, figure in (("4GiB", "its bytes per token"), ("50%", "its capacity")):
        result = control.run("cap", text, "--instance", "chat")
        assert result.returncode == 2
        assert f"chat: {text} cannot be turned into tokens: the engine does not report {figure}" in result.stderr
        failed = control.run("cap", text, "--instance", "chat", "--json")
        assert figure in json.loads(failed.stdout)["error"]
    assert control.json("status", "--history")["history"] == []
    assert control.run("set", "50%", "--instance", "nobody").returncode == 3


def test_cap_of_several_instances_is_each_ones_own_share(control: Control, toys: Toys) -> None:
    """A share for a pattern is taken of each instance's own capacity."""
    toys.start("chat-a", **CAPPED)
    toys.start("chat-b", **{**CAPPED, "capacity": 40_000})
    results = control.json("cap", "50%", "--instance", "chat-*")["results"]
    assert [result["limit_tokens"] for result in results] == [50_000, 20_000]


def test_cap_without_a_limit_says_what_to_write(control: Control) -> None:
    """The usage error names the command that was meant."""
    result = control.run("cap", "--instance", "chat")
    assert result.returncode == 2
    assert "LIMIT is missing; write, for example, cap 16k" in result.stderr


@pytest.mark.parametrize(
    "text", ["101%", "-5%", "%", "5 %", "1e2%", "4GB5", "GiB", "4.GiB", "04GiB", "4gi", "5.1234MB"]
)
def test_doubtful_amounts_are_refused(text: str) -> None:
    """Nothing doubtful becomes an amount."""
    with pytest.raises(ValueError, match=r"limit|capacity"):
        parse_amount(text)


@given(st.integers(1, 100), st.integers(1, 2**31 - 1))
def test_a_share_is_never_more_than_asked_for(percent: int, capacity: int) -> None:
    """A share is rounded down, and refused where nothing is left of it."""
    amount = parse_amount(f"{percent}%")
    assert isinstance(amount, Amount)
    tokens = partial(amount.tokens, capacity, 0)
    if percent * capacity < 100:
        with pytest.raises(ValueError, match="less than one token"):
            tokens()
    else:
        assert percent * capacity // 100 - 1 <= tokens() <= percent * capacity / 100
