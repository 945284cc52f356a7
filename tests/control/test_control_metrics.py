"""``metrics``: OpenMetrics text, served over HTTP, scraped by a real Prometheus whose rules and board are ours."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_classic
from support.commands import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.commands import Control, Toys

MONITORING = Path(__file__).parent.parent.parent / "docs" / "monitoring"

needs_prometheus = pytest.mark.needs_program("prometheus", "prometheus")
needs_torch = pytest.mark.needs_module("torch")


def samples(text: str) -> dict[str, float]:
    """Return the samples of OpenMetrics text as ``name{label values}``."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_text_holds_every_figure(control: Control, toys: Toys) -> None:
    """Each figure of the status is a metric with help, labelled by instance, replica and engine."""
    toys.start("chat", gpus="GPU-0,GPU-1", replicas=2)
    toys.start("free", startup_limit=-1)
    toys.start("broken", trouble="eviction")
    control.run("set", "5k", "--instance", "chat", "--wait")
    control.run("set", "5k", "--instance", "broken", "--wait", "0.2")
    result = control.run("metrics")
    assert result.returncode == 0
    assert result.stdout.endswith("# EOF\n")
    found = samples(result.stdout)
    for replica in ("0", "1"):
        labels = f"{{toy,chat,{replica}}}"
        assert found[f"kvcached_limit_tokens{labels}"] == 5000
        assert found[f"kvcached_desired_revision{labels}"] == found[f"kvcached_applied_revision{labels}"] == 1
        assert found[f"kvcached_idle_tokens{labels}"] == 4992
        assert found[f"kvcached_active_tokens{labels}"] == 2000
        assert found[f"kvcached_capacity_tokens{labels}"] == 100_000
        assert found[f"kvcached_evicted_tokens_total{labels}"] == 5008
        assert found[f"kvcached_split{labels}"] == 0
        assert 0 <= found[f"kvcached_last_report_age_seconds{labels}"] < PATIENCE_S
        assert found[f"kvcached_outcome{{toy,chat,applied,{replica}}}"] == 1
    assert found["kvcached_limit_tokens{toy,free,0}"] == float("inf")
    assert found["kvcached_eviction_errors_total{toy,broken,0}"] == 1
    assert found["kvcached_outcome{toy,broken,eviction_failed,0}"] == 1
    assert found["kvcached_ledger_dir_readable{}"] == 1


def test_older_format_has_the_same_figures(control: Control, toys: Toys) -> None:
    """For files that node_exporter reads there is the older text, with types and help for counters as well."""
    toys.start("chat")
    text = control.run("metrics", "--format", "prometheus").stdout
    assert "# EOF" not in text
    assert "# TYPE kvcached_evicted_tokens_total counter" in text
    assert "# HELP kvcached_evicted_tokens_total " in text
    newer = samples(control.run("metrics").stdout)
    older = {line.split("{")[0] for line in text.splitlines() if line and not line.startswith("#")}
    assert {name.split("{")[0] for name in newer} <= {name.split(" ")[0] for name in older}


@needs_prometheus
def test_promtool_accepts_the_older_text(control: Control, toys: Toys) -> None:
    """Prometheus's own checker finds nothing to say about the text that older scrapers get."""
    toys.start("chat")
    text = control.run("metrics", "--format", "prometheus").stdout
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_unreadable_directory_is_a_metric_and_an_error(control: Control) -> None:
    """Without a directory the text says so, and so does the exit code."""
    control.directory.rmdir()
    result = control.run("metrics")
    assert result.returncode == 3
    assert samples(result.stdout) == {"kvcached_ledger_dir_readable{}": 0}
    assert len(result.stderr.splitlines()) == 1


def test_refused_files_are_counted(control: Control, ledger_dir: Path) -> None:
    """A file that is no ledger is counted."""
    (ledger_dir / "GPU-0.ledger").write_bytes(b"")
    assert samples(control.run("metrics").stdout)["kvcached_ledger_files_refused{}"] == 1


def test_missing_package_is_one_sentence(control: Control, tmp_path: Path) -> None:
    """Without prometheus_client there is one sentence that says what to install."""
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here')\n")
    result = control.run("metrics", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "kvcached-control: metrics need the package prometheus_client (not here); pip install prometheus-client\n"
    )


def test_bad_ports(control: Control) -> None:
    """What is no port is a usage error, and one that is taken is named."""
    for text in ("65536", "-1", "x", "", "9" * 20):
        result = control.run("metrics", "--port", text)
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = control.run("metrics", "--port", str(port))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"kvcached-control: cannot serve at 127.0.0.1 port {port}: Address already in use\n"
    result = control.run("metrics", "--port", "0", "--listen", "no such host")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)


@contextmanager
def serving(control: Control) -> Iterator[str]:
    """Serve the metrics on a free port; the address."""
    process = subprocess.Popen(control.command("metrics", "--port", "0"), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    yield process.stderr.readline().removeprefix("serving ").strip()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=PATIENCE_S) == 0
    process.stderr.close()


def get(url: str) -> str:
    """Return what a server answers."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:  # noqa: S310 - http, to a server of our own
        return str(answer.read().decode())


def test_server_reads_the_ledgers_anew_for_each_scrape(control: Control, toys: Toys) -> None:
    """What is served is what holds now, on the loopback address, and Ctrl-C ends it with 0."""
    toys.start("chat")
    with serving(control) as url:
        assert url.startswith("http://127.0.0.1:")
        for limit in (7000, 3000):
            control.run("set", str(limit), "--instance", "chat", "--wait")
            families = {family.name: family for family in parse_classic(get(url))}
            (sample,) = families["kvcached_limit_tokens"].samples
            assert (sample.value, sample.labels["instance"]) == (limit, "chat")


@needs_prometheus
def test_promtool_accepts_rules_and_configuration() -> None:
    """The shipped rules and configuration are valid, and the rules fire when they should and not before."""
    for arguments in (
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        result = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


@contextmanager
def rig(control: Control) -> Iterator[None]:
    """Run the embedded engine with two ranks."""
    command = [sys.executable, "-m", "kvcached.rig", "--tp", "2", "--requests", "20", "--linger", "600"]
    process = subprocess.Popen(
        [*command, "--instance", "demo", "--ledger-dir", str(control.directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready demo")
    yield
    process.terminate()
    process.communicate(timeout=PATIENCE_S)


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Run a Prometheus server with the shipped configuration on ``target``; the address."""
    configuration = (MONITORING / "prometheus.yml").read_text()
    assert "127.0.0.1:9477" in configuration
    configuration = configuration.replace("127.0.0.1:9477", target).replace("5s", "200ms")
    (folder / "prometheus.yml").write_text(configuration)
    shutil.copy(MONITORING / "alerts.yml", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = ("--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}")
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *options], cwd=folder, stdout=log, stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.kill()
        process.wait()


def ask(api: str, expression: str) -> list[dict[str, Any]]:
    """Return what a query finds; nothing while the server starts."""
    try:
        answer = json.loads(get(f"{api}/query?{urllib.parse.urlencode({'query': expression})}"))
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise AssertionError(expression, error.read()) from error
        return []
    except OSError:
        return []
    return list(answer["data"]["result"])


@needs_prometheus
@needs_torch
def test_prometheus_scrapes_a_running_rig(control: Control, tmp_path: Path) -> None:
    """A real Prometheus answers with the limit that the rig applied; each query of the board finds something."""
    with rig(control), serving(control) as url, prometheus(tmp_path, url.split("/")[2]) as api:
        wait_for(lambda: bool(ask(api, "kvcached_limit_tokens")), "first scrape")
        assert control.run("set", "1600", "--instance", "demo", "--wait").returncode == 0
        query = 'kvcached_limit_tokens{instance="demo",replica="0",engine="rig"}'
        wait_for(lambda: [entry["value"][1] for entry in ask(api, query)] == ["1600"], "applied limit")
        assert [entry["value"][1] for entry in ask(api, "kvcached_applied_revision")] == ["1"]
        rules = json.loads(get(f"{api}/rules"))["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        time.sleep(0.5)  # a rate needs two samples
        for expression in board_expressions():
            assert ask(api, expression), expression


def board_expressions() -> list[str]:
    """Return the queries of the Grafana board, with its variables filled in."""
    board = json.loads((MONITORING / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(found) == 9
    return [expression.replace("$instance", ".*").replace("$__rate_interval", "1m") for expression in found]


def test_board_and_rules_name_only_metrics_that_exist(control: Control, toys: Toys) -> None:
    """Every metric in the board and in the rules is one that is served."""
    toys.start("chat")
    served = {sample.split("{")[0] for sample in samples(control.run("metrics").stdout)}
    for name in ("grafana.json", "alerts.yml"):
        text = (MONITORING / name).read_text()
        words = "".join(char if char.isalnum() or char == "_" else " " for char in text).split()
        used = {word for word in words if word.startswith("kvcached_")}
        assert used
        assert used <= served
