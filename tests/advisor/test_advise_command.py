"""``advise`` and ``set --of-max`` as an operator meets them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from kvcached.advisor.estimator import Estimator
from kvcached.advisor.observer import Figures
from kvcached.advisor.page_file import page_name
from kvcached.control.rendering.curve_text import short

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import AdvisedEngine
    from support.commands import Control

FIELDS = {
    "replica",
    "limit_tokens",
    "measured_hit_rate",
    "in_use_hit_rate",
    "attainable_hit_rate",
    "observed_tokens",
    "model_error",
    "curve",
    "advised_limit_tokens",
    "refused",
    "warnings",
}


def serve(engine: AdvisedEngine, requests: int = 1500, known: int = 30, *, truth: float = 0.0) -> None:
    """Let the engine serve and tell."""
    engine.observer.tick()
    engine.serve(requests, known, truth=truth)
    engine.observer.tick(idle=True)


def test_json_has_the_fields_of_the_contract(control: Control, engine: AdvisedEngine) -> None:
    """``--json`` prints one object with every field of the contract, and rates that grow with the limit."""
    serve(engine)
    result = control.run("advise", "--instance", "chat", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert set(found) == {"instance", "replicas"}
    (replica,) = found["replicas"]
    assert set(replica) >= FIELDS
    rates = [point["hit_rate"] for point in replica["curve"]]
    limits = [point["limit_tokens"] for point in replica["curve"]]
    assert rates == sorted(rates)
    assert limits == sorted(set(limits))
    assert limits[0] == 0
    assert replica["observed_tokens"] == 1500 * 320


def test_thirty_prompts_need_the_room_of_thirty_prompts(control: Control, engine: AdvisedEngine) -> None:
    """For uniform traffic over 9,600 tokens nearly all of them are advised, in whole blocks, with a range."""
    serve(engine)
    (replica,) = control.json("advise")["replicas"]
    advised, (low, high) = replica["advised_limit_tokens"], replica["advised_range_tokens"]
    assert 8000 <= advised <= 9600
    assert low <= advised <= high
    assert advised % 16 == 0
    assert replica["attainable_hit_rate"] > 0.95
    assert replica["wanted_hit_rate"] == pytest.approx(0.9 * replica["attainable_hit_rate"])
    (target,) = control.json("advise", "--target", "0.4")["replicas"]
    assert 2800 < target["advised_limit_tokens"] < 5000


def test_text_shows_the_answer_and_the_curve(control: Control, engine: AdvisedEngine) -> None:
    """Without ``--json`` there are the figures, the advice and a plot in plain characters within the terminal."""
    serve(engine)
    result = control.run("advise", COLUMNS="80")
    assert result.returncode == 0
    assert result.stdout.isascii()
    for word in ("measured", "in use", "attainable", "advice", " *", "A", "o"):
        assert word in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if "|" in line) <= 80


def test_picture_is_drawn(control: Control, engine: AdvisedEngine, tmp_path: Path) -> None:
    """``--plot`` writes a picture, or says what is missing for it."""
    serve(engine)
    result = control.run("advise", "--plot", str(tmp_path / "curve.png"), PYTHONWARNINGS="default")
    if "needs matplotlib" in result.stderr:
        assert result.returncode == 1
    else:
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "curve.foo", tmp_path / "nowhere" / "curve.png"):
        result = control.run("advise", "--plot", str(path), PYTHONWARNINGS="default")
        assert result.returncode == 1
        assert result.stderr.startswith("kvcached-control: --plot")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (16_000, "16k"), (999_499, "999k"), (999_600, "1m"), (1_234_567, "1.23m"),
     (999_999_999, "1g"), (12_345_678_901, "12.3g")],
)  # fmt: skip
def test_numbers_on_the_axis_have_three_digits(tokens: int, text: str) -> None:
    """A number is written in the unit that shows three digits of it, and never with an exponent."""
    assert short(tokens) == text


@pytest.mark.parametrize(
    ("requests", "truth", "options", "reason"),
    [
        (0, 0.0, (), "no requests seen yet"),
        (50, 0.0, (), "only 50 requests seen"),
        (1500, 0.2, (), "model and engine disagree"),
        (1500, 0.0, ("--target", "0.999"), "cannot be reached"),
    ],
)
def test_advice_is_refused_with_a_reason(
    control: Control, engine: AdvisedEngine, requests: int, truth: float, options: tuple[str, ...], reason: str
) -> None:
    """Too little seen, a model that does not fit, a target out of reach: no number is named, exit 1, and why."""
    serve(engine, requests, truth=truth)
    result = control.run("advise", *options, "--json")
    (replica,) = json.loads(result.stdout)["replicas"]
    assert result.returncode == 1
    assert replica["advised_limit_tokens"] is None
    assert reason in replica["refused"]
    assert reason in result.stderr
    assert "at the same moment" not in result.stderr
    assert reason in control.run("advise", *options).stderr


def test_target_below_what_is_shared_in_use_is_refused(control: Control, engine: AdvisedEngine) -> None:
    """A rate that running requests give each other needs no cache, and is not credited to a limit."""
    prompt = [("shared", position) for position in range(20)]
    engine.observer.watch(Estimator.admit, "stays", prompt, 20, 320, 0)
    for request in range(200):
        engine.observer.watch(Estimator.admit, request, prompt, 20, 320, 320)
    engine.observer.tick(idle=True)
    (replica,) = control.json("advise", "--target", "0.5")["replicas"]
    assert "needs no idle cache" in replica["refused"]
    assert replica["in_use_hit_rate"] > 0.9


def test_nothing_is_advised_beyond_what_the_pool_leaves(control: Control, engine: AdvisedEngine) -> None:
    """With requests that hold most of the pool, the advice stays in the rest, and a warning tells of the bound."""
    engine.figures = Figures(1600, 16_000, 20_000)
    serve(engine)
    (replica,) = control.json("advise", "--of-max", "1")["replicas"]
    assert replica["room_tokens"] == 4000
    assert replica["advised_limit_tokens"] <= 4000
    assert replica["attainable_hit_rate"] < 0.5
    assert any("the pool is too small, not the limit" in warning for warning in replica["warnings"])


def test_changing_traffic_is_told(control: Control, engine: AdvisedEngine) -> None:
    """After traffic changed, the windows differ, the one named *now* is taken, and a warning says so."""
    engine.observer.tick()
    engine.serve(1000)
    engine.serve(1000, known=10**9)
    engine.observer.tick(idle=True)
    (replica,) = control.json("advise", "--target", "0.5")["replicas"]
    assert replica["window"] == "now"
    assert any("traffic is changing" in warning for warning in replica["warnings"])
    (long,) = control.json("advise", "--window", "long")["replicas"]
    assert long["attainable_hit_rate"] > replica["attainable_hit_rate"] + 0.05


def test_unknown_instances_and_bad_shares_are_told(control: Control, engine: AdvisedEngine) -> None:
    """A name that nobody has ends with 3, nonsense with 2, each with one line."""
    serve(engine)
    assert control.run("advise", "--instance", "nobody").returncode == 3
    for options in (("--of-max", "0"), ("--target", "1.5"), ("--of-max", "0.5", "--target", "0.5"), ("--window", "x")):
        result = control.run("advise", *options)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("damage", ["missing", "garbage", "foreign"])
def test_engine_without_a_usable_page_is_refused(
    control: Control, engine: AdvisedEngine, ledger_dir: Path, damage: str
) -> None:
    """No page, a page of garbage or that of another engine is a refusal with a reason, never a crash."""
    serve(engine)
    place = engine.subscription.place()
    assert place is not None
    path = ledger_dir / page_name(place.gpu, place.slot)
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "garbage":
        path.write_bytes(bytes(range(256)) * 16)
    elif damage == "foreign":
        data[24] ^= 1
        path.write_bytes(data)
    result = control.run("advise", "--json")
    (replica,) = json.loads(result.stdout)["replicas"]
    assert result.returncode == 1
    assert "no curve yet" in replica["refused"]
    assert replica["curve"] == []


def test_advised_limit_is_published_shown_and_recorded(control: Control, engine: AdvisedEngine) -> None:
    """``set --of-max`` publishes the advised number, says it, and leaves it in the record with the caller's note."""
    serve(engine)
    (advice,) = control.json("advise", "--of-max", "0.8")["replicas"]
    result = control.run("set", "--of-max", "0.8", "--instance", "chat", "--note", "evening")
    assert result.returncode == 0, result.stderr
    assert f"advised: {advice['advised_limit_tokens']:,} tokens" in result.stdout
    (record,) = control.json("status", "--history")["history"]
    assert record["new"]["limit_tokens"] == advice["advised_limit_tokens"]
    assert record["note"].startswith("of-max 0.8 of 0.9")
    assert record["note"].endswith("; evening")


def test_refused_advice_publishes_nothing(control: Control, engine: AdvisedEngine) -> None:
    """Without an advice ``set --of-max`` ends with 3 and a reason, in JSON too, and the ledger is as it was."""
    serve(engine, 10)
    result = control.run("set", "--of-max", "0.8", "--instance", "chat", "--json")
    assert result.returncode == 3
    assert "only 10 requests" in result.stderr
    found = json.loads(result.stdout)
    assert (found["status"], found["accepted"], found["limit_tokens"]) == ("unavailable", False, None)
    assert control.replica("chat")["members"][0]["revision"] == 0
    assert control.run("set", "--of-max", "0.8", "--all").returncode == 2


def test_page_of_an_ended_engine_says_nothing(control: Control, engine: AdvisedEngine, ledger_dir: Path) -> None:
    """A page that outlives its engine belongs to nobody."""
    serve(engine)
    copy = ledger_dir.parent / "copy"
    place = engine.subscription.place()
    assert place is not None
    shutil.copy(ledger_dir / page_name(place.gpu, place.slot), copy)
    engine.close()
    shutil.copy(copy, ledger_dir / page_name(place.gpu, place.slot))
    assert control.run("advise", "--instance", "chat").returncode == 3
