"""The plugin on the classes of a release that does not run here: its wheel is for a GPU, and needs only be unpacked.

pip download --no-deps vllm==0.33.0 && unzip -q vllm-*.whl -d DIRECTORY
KVCACHED_TEST_VLLM_CLASSES=DIRECTORY scripts/test --engines vllm -- -k unpacked_release
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "KVCACHED_TEST_VLLM_CLASSES"
HERE = Path(__file__).parent

TARGETS = """
import sys, vllm
from kvcached.engines.vllm.inproc import ENTRIES, STEPS
from kvcached.engines.vllm.relied_on import check_pool_model, resolve_targets
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
assert vllm.__file__.startswith(sys.argv[1])
targets = resolve_targets()
check_pool_model(targets.block_pool)
methods = {
    targets.engine_core: ("_initialize_kv_caches", *(name for name in (*STEPS, *ENTRIES) if name != "step_fn")),
    Scheduler: ("schedule", "_free_request_blocks", "has_unfinished_requests"),
    KVCacheManager: ("reset_prefix_cache",),
    Request: ("is_finished", "take_prefill_stats"),
}
print([f"{owner.__name__}.{name}" for owner, names in methods.items() for name in names if not hasattr(owner, name)])
"""


@pytest.fixture
def classes() -> Path:
    """Return where the other release was unpacked."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        pytest.skip(f"{VARIABLE} names no directory with an unpacked wheel of another release")
    return Path(directory).resolve()


def run(classes: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the other release in front of the installed one, over the installed one's requirements."""
    paths = [str(classes), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=HERE.parent)


def test_all_that_is_hooked_is_there(classes: Path) -> None:
    """Every name that the plugin relies on is there, and the pool orders its free queue as expected."""
    done = run(classes, "-c", TARGETS, str(classes))
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr[-3000:]


def test_the_count_of_idle_blocks_is_right(classes: Path) -> None:
    """The tests of the count pass on the other release's pool."""
    arguments = ("-c", "pytest.ini", "-p", "no:cacheprovider", "-q", str(HERE / "test_idle_blocks.py"))
    done = run(classes, "-m", "pytest", "--rootdir", str(HERE.parents[2]), *arguments)
    assert done.returncode == 0, done.stdout[-3000:]
