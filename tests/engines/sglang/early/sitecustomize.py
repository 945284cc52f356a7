"""Loads SGLang's plugins when a process of it starts, before it imports anything else, as later releases may."""

from __future__ import annotations

import sys

if any("sglang.launch_server" in word or "spawn_main" in word for word in sys.orig_argv):
    from sglang.srt.plugins import load_plugins

    load_plugins()
