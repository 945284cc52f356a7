"""Real SGLang servers on the CPU, driven over HTTP, and their prefix-cache limit, driven by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached.control import get_instances, set_kv_capacity_limit, set_prefix_cache_retention_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcached.control import PublicationResult

HERE = Path(__file__).parent
OLD_RELEASES = HERE / "old_releases"
INSTANCE = "under-test"
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 20

OPTIONS = (
    *("--skip-tokenizer-init", "--device", "cpu", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--dtype", "bfloat16", "--context-length", "4096"),
    *("--max-total-tokens", "8192", "--mem-fraction-static", "0.3", "--grammar-backend", "none"),
    *("--enable-metrics", "--host", "127.0.0.1"),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_NCCL_SO_PATH": "/nonexistent.so",  # no NCCL on a CPU: the ranks talk over gloo
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # asking for its health must not make the server serve
    "KVCACHED_INSTANCE_NAME": INSTANCE,
    "KVCACHED_MAX_CACHED_TOKENS": "-1",
}


@dataclass(frozen=True)
class Answer:
    """What a server said to one prompt."""

    output_ids: tuple[int, ...]
    cached_tokens: int
    details: dict[str, int] | None
    logprobs: tuple[float, ...] = ()
    """Of the output tokens, if they were asked for."""


@dataclass(frozen=True)
class Ran:
    """A command that ended."""

    code: int
    out: str
    err: str
    seconds: float


def prompt(seed: int, length: int) -> list[int]:
    """Return ``length`` token ids that differ from seed to seed from the first id on."""
    return [4 + (seed * 7919 + position * 31 + seed * position) % 1000 for position in range(length)]


def bind_ranks(options: Sequence[str] = ()) -> dict[str, str]:
    """Return the variable that binds ranks to cores.

    It has to name one core for each device of the launch; up to 0.5.18, for each tensor-parallel rank.
    """
    count = 2
    if version("sglang").startswith(("0.5.15", "0.5.18")):
        count = int(options[options.index("--tp-size") + 1]) if "--tp-size" in options else 1
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(count)))}


def needs_old_release_shim() -> bool:
    """Return whether the release under test is too old for the transformers beside it."""
    return version("sglang").startswith(("0.5.15", "0.5.18"))


def engine_path() -> list[str]:
    """Return the folders that the release under test needs on Python's path."""
    shim = [str(OLD_RELEASES)] if needs_old_release_shim() else []
    return [*filter(None, [os.environ.get("PYTHONPATH")]), *shim]


def has_consensus_checker() -> bool:
    """Return whether the release under test can compare its ranks by itself."""
    return not version("sglang").startswith("0.5.15")


def write_probe_entry_point(folder: Path) -> Path:
    """Make the probes a plugin of SGLang for processes that have ``folder`` on their path; returns it."""
    info = folder / "kvcached_probes-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached-probes\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkvcached-probes = kvcached_probes:register\n")
    return folder


class Server:
    """One launch of ``sglang.launch_server``; ``folder`` gets its log, its ledgers and what probes record."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        probe_path: Path,
        options: Sequence[str] = (),
        *,
        environ: dict[str, str] | None = None,
        probes: Iterable[str] = (),
        entry: Sequence[str] = ("-m", "sglang.launch_server"),
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.options = tuple(options)
        """What was added to the options that all servers get."""
        self.ledger_dir = folder / "ledgers"
        self.records_dir = folder / "records"
        self.records_dir.mkdir()
        self.log_path = folder / "server.log"
        self.port = free_port()
        load = [] if any(model.glob("*.safetensors")) else ["--load-format", "dummy"]
        self._command = [sys.executable, *entry, "--model-path", str(model), *load]
        self._command += [*OPTIONS, "--port", str(self.port), *options]
        path = [str(probe_path), str(HERE / "probes"), *engine_path()]
        self.environ = {
            **os.environ,
            **ENVIRONMENT,
            **bind_ranks(options),
            "PYTHONPATH": os.pathsep.join(path),
            "KVCACHED_LEDGER_DIR": str(self.ledger_dir),
            "KVCACHED_PROBES": ",".join(probes),
            "KVCACHED_PROBE_DIR": str(self.records_dir),
            **(environ or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    # the process

    def start(self, *, wait: bool = True) -> None:
        """Start the server and wait until it is healthy."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self.environ, start_new_session=True
            )
        if wait:
            self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        """Wait until the server answers, or raise with the end of its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.exit_code() is not None:
                break
            try:
                self.get("/health", timeout=5)
            except (OSError, urllib.error.URLError):
                time.sleep(0.3)
            else:
                return
        message = f"the server did not come up (exit code {self.exit_code()}):\n{self.log()[-6000:]}"
        raise AssertionError(message)

    @property
    def pid(self) -> int:
        """The process id of the launcher, which is that of its session and process group."""
        assert self._process is not None
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how the server ended, or None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait_for_exit(self, timeout_s: float) -> int | None:
        """Return how the server ended, or None if it did not within ``timeout_s``."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the server and every process that it started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            self.wait_for_exit(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log(self) -> str:
        """Return what the server printed so far."""
        return self.log_path.read_text(errors="replace")

    # HTTP

    def get(self, path: str, timeout: float = 60) -> str:
        """Return the body of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as response:
            return str(response.read().decode())

    def post(self, path: str, body: object, timeout: float = 240) -> Any:  # noqa: ANN401 - JSON
        """Return the JSON answer to a POST, or its text if it is none."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310 - this machine
            text = response.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def generate(self, ids: list[int], tokens: int = 8, *, ignore_eos: bool = True, **more: object) -> Answer:
        """Return the greedy continuation of ``ids``.

        With ``ignore_eos`` SGLang knows how long the answer gets and admits only what fits to its end.
        """
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": ignore_eos}
        said = self.post("/generate", {"input_ids": ids, "sampling_params": sampling, **more})
        meta = said["meta_info"]
        logprobs = tuple(each[0] for each in meta.get("output_token_logprobs") or ())
        return Answer(tuple(said["output_ids"]), meta["cached_tokens"], meta.get("cached_tokens_details"), logprobs)

    def generate_all(self, prompts: Sequence[list[int]], tokens: int = 8, *, ignore_eos: bool = True) -> list[Answer]:
        """Return the continuations of all prompts, asked for at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.generate(ids, tokens, ignore_eos=ignore_eos), prompts))

    def metric(self, name: str) -> dict[str, float]:
        """Return the samples of one metric by tensor-parallel rank."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + "{"):
                rank = re.search(r'tp_rank="(\d+)"', line)
                found[rank.group(1) if rank else ""] = float(line.rsplit(" ", 1)[1])
        return found

    # the limit

    def control(self, *arguments: str, timeout: float = 90) -> Ran:
        """Run ``python -m kvcached.control`` on this server's ledgers."""
        command = [sys.executable, "-m", "kvcached.control", *arguments, "--ledger-dir", str(self.ledger_dir)]
        began = time.monotonic()
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        return Ran(ran.returncode, ran.stdout, ran.stderr, time.monotonic() - began)

    def publish(self, limit: int, wait: float | None = None) -> PublicationResult:
        """Publish a limit as a program would."""
        return set_prefix_cache_retention_limit(limit, instance_name=INSTANCE, ledger_dir=self.ledger_dir, wait=wait)

    def apply_limit(self, limit: int) -> None:
        """Publish a limit and wait until it holds."""
        result = self.publish(limit, wait=30)
        assert result.accepted, result
        assert result.applied, result

    def set_limit(self, limit: int, *arguments: str) -> Ran:
        """Publish a limit as an operator would; ``--wait`` and the like are ``arguments``."""
        return self.control("set", str(limit), "--instance", INSTANCE, *arguments)

    def apply_cap(self, cap: int) -> None:
        """Publish a cap and wait until it holds and memory beyond it is returned."""
        result = set_kv_capacity_limit(cap, instance_name=INSTANCE, ledger_dir=self.ledger_dir, wait=60)
        assert result.accepted, result
        assert result.applied, result

    def status(self) -> list[dict[str, Any]]:
        """Return what the replicas report, in their order."""
        instances = [each.to_dict() for each in get_instances(self.ledger_dir)]
        assert [each["name"] for each in instances] == [INSTANCE], instances
        return sorted(instances[0]["replicas"], key=lambda replica: int(replica["replica"]))

    # what probes recorded

    def records(self) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
        """Return what the ``record`` probe wrote, by (replica, pipeline stage, tensor-parallel rank)."""
        found = {}
        for path in self.records_dir.glob("*.jsonl"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            place = lines[0]
            found[place["dp"], place["pp"], place["tp"]] = lines[1:]
        return found


def free_port() -> int:
    """Return a port that is free now; SGLang takes no port 0, and some releases add 10,000 for one of their own."""
    for port in random.sample(range(20_000, 50_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    message = "no free port among 100 tried"
    raise AssertionError(message)


def wait_until(condition: Any, timeout_s: float, what: str) -> None:  # noqa: ANN401 - a callable
    """Wait until ``condition()`` holds, or fail saying ``what`` did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
