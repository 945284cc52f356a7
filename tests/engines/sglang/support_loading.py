"""Loads SGLang's plugins and its scheduler in one order or the other, and prints what is hooked then."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from typing import Any

from kvcached.engines.sglang import hook_places

HOOKED_BY = ("hook_registry.py", "attaching.py")


def load_plugins() -> None:
    """Load plugins as SGLang does."""
    importlib.import_module("sglang.srt.plugins").load_plugins()


def hooks_of(target: str) -> int:
    """Return how many hooks ``target`` has."""
    found: Any = pkgutil.resolve_name(target)
    count = 0
    while found is not None:
        count += found.__code__.co_filename.endswith(HOOKED_BY)
        found = getattr(found, "__wrapped__", None)
    return count


def stale_copies() -> list[str]:
    """Return the modules that still have the function that was hooked."""
    common = importlib.import_module("sglang.srt.mem_cache.common")
    stock = getattr(common.release_kv_cache, "__wrapped__", None)
    return [name for name, module in list(sys.modules.items()) if vars(module).get("release_kv_cache") is stock]


def main(order: str, *more: str) -> None:
    """Load in ``order``; with "missing", with a target that is not what the hooks need."""
    if order == "scheduler-first":
        importlib.import_module(hook_places.SCHEDULER_MODULE)
    if "missing" in more:
        hook_places._LEADING_PARAMETERS[hook_places.RELEASE] = ("renamed",)
    load_plugins()
    imported_by_plugin = order != "scheduler-first" and hook_places.SCHEDULER_MODULE in sys.modules
    importlib.import_module(hook_places.SCHEDULER_MODULE)
    if order == "plugins-twice":
        load_plugins()
    found = {
        "hooks": {target: hooks_of(target) for target in hook_places._LEADING_PARAMETERS},
        "report": hooks_of(f"{hook_places.SCHEDULER}.__init__"),
        "stale": stale_copies(),
        "imported_by_plugin": imported_by_plugin,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
