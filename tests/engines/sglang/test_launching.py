"""The plugin is there however SGLang is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_server import ENVIRONMENT, INSTANCE, bind_ranks, engine_path, prompt

if TYPE_CHECKING:
    from conftest import Serve


def test_the_serve_command_is_governed(serve: Serve, plain_model: Path) -> None:
    """A server started by ``sglang serve`` takes a limit over."""
    entry = ("-c", "import sys; from sglang.cli.main import main; sys.exit(main())", "serve")
    server = serve(plain_model, entry=entry)
    server.generate(prompt(1, 300))
    server.apply_limit(0)
    assert server.generate(prompt(1, 300)).cached_tokens == 0


def test_an_engine_inside_a_program_is_governed(plain_model: Path, tmp_path: Path) -> None:
    """An ``Engine`` object takes a limit over that the program around it publishes."""
    environ = {**os.environ, **ENVIRONMENT, **bind_ranks(), "KVCACHED_LEDGER_DIR": str(tmp_path / "ledgers")}
    environ["PYTHONPATH"] = os.pathsep.join(engine_path())
    script = Path(__file__).parent / "support_engine.py"
    ran = subprocess.run(
        [sys.executable, str(script), str(plain_model), INSTANCE],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {"applied": True, "cached": [0, 199, 0]}
