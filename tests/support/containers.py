"""Plays a container deployment with Linux namespaces: ``containers.py PLAN`` prints as JSON what each command did.

Runs under ``unshare --mount --propagation private``. The plan is a JSON object: ``volume`` (options of the tmpfs that
becomes the shared volume), ``folder`` (where it is mounted here), ``init`` (a command to run in it first, or null),
``ledgers`` (the ledger directory below ``/mnt/shared``), ``engine`` and ``control`` (``uid:gid``), and ``commands``
(argument lists for the command line, or the word "kill" for the engine's end). Every command runs in a PID and a mount
namespace of its own, with a read-only root, seeing nothing of the engine but the volume.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

AS_USER = Path(__file__).parent / "as_user.py"

SHARED = "/mnt/shared"
NAMESPACES = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private"]
ISOLATE = """
set -e
mount -t tmpfs none /mnt
mkdir {shared}
mount --bind {folder} {shared}
{read_only}
mount -t tmpfs none {parent}
mount -t proc proc /proc
mount -o remount,bind,ro /
exec "$@"
"""


def main() -> None:
    """Carry out the plan."""
    plan = json.loads(sys.argv[1])
    folder = Path(plan["folder"])
    subprocess.run(["mount", "-t", "tmpfs", "-o", plan["volume"], "tmpfs", folder], check=True)
    if plan["init"]:
        uid, gid = plan["engine"].split(":")
        command = [argument.replace("/shared", SHARED, 1) for argument in plan["init"]]
        subprocess.run(
            [*_inside(folder), "setpriv", "--reuid", uid, "--regid", gid, "--clear-groups", *command], check=True
        )
    engine = _start_engine(plan, folder)
    results = [_run(command, plan, folder, engine) for command in plan["commands"]]
    engine.communicate()
    print(json.dumps(results))


def _start_engine(plan: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    command = [*_inside(folder), sys.executable, str(AS_USER), plan["engine"], "engine", "--instance", "my-model"]
    command += ["--gpus", "GPU-0,GPU-1", "--ledger-dir", plan["ledgers"]]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())
    assert engine.stdout is not None
    assert engine.stdout.readline().startswith("ready"), "the engine did not start"
    return engine


def _run(
    command: str | list[str], plan: dict[str, Any], folder: Path, engine: subprocess.Popen[str]
) -> dict[str, Any] | None:
    if isinstance(command, str):
        _kill(engine)
        return None
    read_only = command[0] == "status"
    line = [*_inside(folder, read_only=read_only), sys.executable, str(AS_USER), plan["control"], "control", *command]
    result = subprocess.run(
        [*line, "--ledger-dir", plan["ledgers"]], capture_output=True, text=True, check=False, env=_environment()
    )
    return {"code": result.returncode, "output": result.stdout, "errors": result.stderr}


def _kill(engine: subprocess.Popen[str]) -> None:
    """Kill the engine itself; its starter, which made the namespaces, ends with it."""
    (child,) = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    engine.wait()


def _inside(folder: Path, *, read_only: bool = False) -> list[str]:
    remount = f"mount -o remount,bind,ro {SHARED}" if read_only else ""
    script = ISOLATE.format(shared=SHARED, folder=folder, parent=folder.parent, read_only=remount)
    return [*NAMESPACES, "sh", "-c", script, "sh"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


if __name__ == "__main__":
    main()
