"""An agent that follows a file: what it publishes, what it leaves alone, and what it says of it."""

from __future__ import annotations

import json
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from support.commands import Control, wait_for

from kvcached.control import get_instances, set_prefix_cache_retention_limit
from kvcached.fleet.file import FileSource

if TYPE_CHECKING:
    from pathlib import Path

    from support.commands import Toys
    from support.fleet import Agents, DesiredFile, Rigs


def desired_pair(directory: Path, instance: str = "chat") -> tuple[int, int]:
    """Return revision and limit that are stored for an instance; zeros while it is away."""
    found = [one for one in get_instances(directory) if one.name == instance]
    return (found[0].replicas[0].members[0].revision, found[0].replicas[0].members[0].limit_tokens) if found else (0, 0)


def test_limit_and_cap_are_published_and_reported(
    agents: Agents, toys: Toys, desired: DesiredFile, control: Control
) -> None:
    """Both bounds of a document reach the engine, with the origin in the record, and the status says applied."""
    toys.start("chat", cap_floor=100)
    desired.write(chat={"limit_tokens": 5000, "cap_tokens": 50_000, "by": "ana", "note": "night"})
    agents.start(desired.fleet, toys.directory, "--status-file", str(desired.status_path))
    wait_for(lambda: desired.state("chat") == "applied", "applied")
    replica, status = control.replica("chat"), desired.status("chat")
    assert replica["applied"] == {"revision": 1, "limit_tokens": 5000}
    assert replica["cap"]["limit_tokens"] == 50_000
    assert (status["ledger_revision"], status["cap_revision"], status["share"]) == (1, 1, "new")
    history = control.json("status", "--history")["history"]
    assert [one["note"] for one in history] == [f"fleet r{status['observed']} ana: night"] * 2


@pytest.mark.fleet
def test_labels_choose_and_other_instances_are_left_alone(agents: Agents, toys: Toys, desired: DesiredFile) -> None:
    """A rule for a label of the node decides, and an instance without a document is unmanaged and untouched."""
    toys.start("chat", "free")
    desired.write(chat={"limit_tokens": 5000, "where": [{"labels": {"gpu": "A100"}, "limit_tokens": 3000}]})
    agents.start(desired.fleet, toys.directory, "--status-file", str(desired.status_path), "--label", "gpu=A100")
    wait_for(lambda: desired.state("chat") == "applied", "applied")
    assert desired_pair(toys.directory) == (1, 3000)
    assert desired.state("free") == "unmanaged"
    assert desired_pair(toys.directory, "free")[0] == 0


def test_a_document_outside_the_nodes_bounds_is_refused(agents: Agents, toys: Toys, desired: DesiredFile) -> None:
    """With --min-limit a smaller limit is not published, and the status names the option."""
    toys.start("chat")
    desired.write(chat={"limit_tokens": 0})
    agents.start(desired.fleet, toys.directory, "--status-file", str(desired.status_path), "--min-limit", "1k")
    wait_for(lambda: desired.state("chat") == "refused_by_node", "refusal")
    assert "--min-limit" in desired.status("chat")["reason"]
    assert desired_pair(toys.directory)[0] == 0


def test_a_local_publication_is_put_back_and_said(agents: Agents, toys: Toys, desired: DesiredFile) -> None:
    """What somebody publishes on the node beside the fleet is contested, and replaced after a second."""
    toys.start("chat")
    desired.write(chat={"limit_tokens": 5000})
    agents.start(desired.fleet, toys.directory, "--status-file", str(desired.status_path))
    wait_for(lambda: desired.state("chat") == "applied", "applied")
    began = time.monotonic()
    set_prefix_cache_retention_limit(7000, instance_name="chat", ledger_dir=toys.directory)
    wait_for(lambda: desired.state("chat") == "contested", "contest")
    wait_for(lambda: desired.state("chat") == "applied", "return")
    assert time.monotonic() - began >= 1.0
    assert desired_pair(toys.directory) == (3, 5000)


def test_engines_that_refuse_are_reported_as_they_say(agents: Agents, toys: Toys, desired: DesiredFile) -> None:
    """An engine under pipeline parallelism is reported with its own outcome and reason."""
    toys.start("chat", trouble="pipeline")
    desired.write(chat={"limit_tokens": 5000})
    agents.start(desired.fleet, toys.directory, "--status-file", str(desired.status_path))
    wait_for(lambda: desired.state("chat") == "rejected_pipeline_parallel", "rejection")
    assert "pp_size" in desired.status("chat")["reason"]


def test_nonsense_and_a_missing_file_keep_the_last_valid_documents(
    agents: Agents, toys: Toys, desired: DesiredFile
) -> None:
    """A file that is not valid, or gone, changes nothing, not even for an engine that starts meanwhile."""
    toys.start("chat")
    desired.write(chat={"limit_tokens": 5000})
    agents.start(desired.fleet, toys.directory, "--status-file", str(desired.status_path))
    wait_for(lambda: desired.state("chat") == "applied", "applied")
    desired.write_text('{"instances": {"chat": {"limit_tokens": 1}, "bad": {}}}')
    wait_for(lambda: "bad" in json.loads(desired.status_path.read_text())["fault"], "fault")
    toys.stop()
    wait_for(lambda: desired.state("chat") == "absent", "absence")
    desired.path.unlink()
    toys.start("chat")
    wait_for(lambda: desired.state("chat") == "applied", "applied again")
    assert desired_pair(toys.directory) == (1, 5000)
    desired.write(chat={"limit_tokens": 6000})
    wait_for(lambda: desired_pair(toys.directory) == (2, 6000), "next document")


@pytest.mark.fleet
def test_a_second_agent_on_one_directory_is_refused(agents: Agents, toys: Toys, desired: DesiredFile) -> None:
    """The second agent ends with exit 1 and says who is in the way; after the first one's death the next one runs."""
    toys.start("chat")
    desired.write(chat={"limit_tokens": 5000})
    first = agents.start(desired.fleet, toys.directory)
    wait_for(lambda: desired_pair(toys.directory)[0] == 1, "publication")
    assert agents.start(desired.fleet, toys.directory, node="n2").wait(30) == 1
    assert "another agent" in agents.log("n2")
    first.kill()
    first.wait()
    desired.write(chat={"limit_tokens": 6000})
    agents.start(desired.fleet, toys.directory, node="n3")
    wait_for(lambda: desired_pair(toys.directory) == (2, 6000), "publication")


def test_a_restarted_engine_gets_the_fleets_value_at_once(agents: Agents, rigs: Rigs, desired: DesiredFile) -> None:
    """A real engine that was killed has the document's limit applied within a second of its registration."""
    desired.write(chat={"limit_tokens": 5000})
    agents.start(desired.fleet, rigs.directory, "--status-file", str(desired.status_path))
    delays = []
    for _ in range(2):
        engine = rigs.start()
        registered = time.monotonic()  # its line comes after the registration
        wait_for(lambda: desired_pair(rigs.directory) == (1, 5000), "the fleet's value")
        wait_for(lambda: desired.state("chat") == "applied", "applied")
        delays.append(time.monotonic() - registered)
        rigs.kill(engine)
        wait_for(lambda: desired.state("chat") == "absent", "absence")
    print(f"applied {delays} s after the line ready")
    assert max(delays) < 1.0


@pytest.mark.fleet
def test_an_agent_killed_at_random_moments_publishes_nothing_again(
    agents: Agents, toys: Toys, desired: DesiredFile
) -> None:
    """The ledger's revision grows with the documents' changes only, wherever agents are killed."""
    seed = 16
    print(f"seed {seed}")
    dice = random.Random(seed)
    toys.start("chat")
    changes = 0
    for _ in range(8):
        if dice.random() < 0.5:
            changes += 1
            desired.write(chat={"limit_tokens": 1000 + changes})
        agent = agents.start(desired.fleet, toys.directory)
        time.sleep(dice.uniform(0.1, 0.5))
        agent.kill()
        agent.wait()
        assert desired_pair(toys.directory)[0] <= changes
    agents.start(desired.fleet, toys.directory)
    wait_for(lambda: desired_pair(toys.directory)[1] == 1000 + changes, "last document")
    assert 0 < desired_pair(toys.directory)[0] <= changes


@pytest.mark.parametrize("by_link", [False, True], ids=["rename", "kubelet"])
def test_four_hundred_swaps_are_read_whole(tmp_path: Path, *, by_link: bool) -> None:
    """Whether the file or a folder's link is replaced, a reader in a loop sees whole documents only, and the last."""
    path = tmp_path / ("..data/desired.json" if by_link else "desired.json")
    child = os.fork()
    if child == 0:
        for number in range(400):
            _swap(tmp_path, number, by_link=by_link)
        os._exit(0)
    source, seen = FileSource(str(path), "n1"), []
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        seen += [one.desired.rules.tokens for one in source.read().documents.values() if one.desired]
    last = source.read()
    assert last.fault == ""
    assert last.documents["chat"].desired.rules.tokens.limit_tokens == 1399
    assert all(tokens.cap_tokens == 2 * tokens.limit_tokens for tokens in seen)
    limits = [tokens.limit_tokens for tokens in seen]
    assert limits == sorted(limits)


def _swap(directory: Path, number: int, *, by_link: bool) -> None:
    """Replace the documents as ConfigMaps are replaced, or by a rename."""
    text = json.dumps({"instances": {"chat": {"limit_tokens": 1000 + number, "cap_tokens": 2 * (1000 + number)}}})
    if not by_link:
        (directory / "new").write_text(text)
        (directory / "new").rename(directory / "desired.json")
        return
    folder = directory / f"..{number}"
    folder.mkdir()
    (folder / "desired.json").write_text(text)
    (directory / "..data_tmp").symlink_to(folder.name)
    (directory / "..data_tmp").rename(directory / "..data")
    if number:
        (directory / f"..{number - 1}/desired.json").unlink()
        (directory / f"..{number - 1}").rmdir()
