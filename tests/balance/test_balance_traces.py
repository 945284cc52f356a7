"""Dividing a budget among recorded workloads, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.traces import requests, written

if TYPE_CHECKING:
    from pathlib import Path

    from support.commands import Control


def test_traces_are_divided_by_what_caches_are_worth_to_them(control: Control, tmp_path: Path) -> None:
    """Of chats and of prompts that never come again, the chats get what they can use."""
    chats = written(tmp_path / "chats.jsonl", requests(5, 300, 20))
    lines = requests(6, 300, 1)
    for number, line in enumerate(lines):
        line["hash_ids"] = [number * 1000 + place for place in range(len(line["hash_ids"]))]
    never = written(tmp_path / "never.jsonl", lines)
    said = control.json("balance", "--traces", str(chats), str(never), "--budget", "400k")
    found = {entry["name"]: entry for entry in said["instances"]}
    assert found["chats"]["proposed_limit_tokens"] > 300_000 > found["never"]["proposed_limit_tokens"]
    assert said["hit_rate_then"] > said["hit_rate_now"]
    table = control.run("balance", "--traces", str(chats), str(never), "--budget", "400k")
    assert "would be moved" in table.stdout
