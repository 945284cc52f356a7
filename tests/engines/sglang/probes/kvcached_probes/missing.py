"""Takes a hook target away before the plugin under test looks for it, as another SGLang release might."""

from __future__ import annotations


def install() -> None:
    """Rename ``release_kv_cache`` in the module where the plugin expects it."""
    from sglang.srt.mem_cache import common  # noqa: PLC0415 - only in processes that hold a scheduler

    common.release_kv_cache_renamed = common.release_kv_cache
    del common.release_kv_cache
