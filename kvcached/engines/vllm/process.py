"""What kind of vLLM process this is, and the settings that hold in it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re

from kvcached.settings import INSTANCE_NAME_VARIABLE, Settings, read_settings

_ENGINE_CORE_NAME = re.compile(r"EngineCore(?:_DP(?P<rank>\d+))?")
"""vLLM names its engine core processes so; nothing but a default and a diagnosis depends on it."""


def engine_core_settings() -> Settings:
    """Read the settings of this process. Raises ``SettingsError`` for one that cannot be used.

    An instance that its operator gave no name is ``vllm-<pid>`` by the process that was started, which is the parent
    of its engine cores: under data parallelism they belong to one instance.
    """
    environ = dict(os.environ)
    parent = multiprocessing.parent_process()
    if not environ.get(INSTANCE_NAME_VARIABLE) and parent is not None and _core_name() is not None:
        environ[INSTANCE_NAME_VARIABLE] = f"vllm-{parent.pid}"
    return read_settings("vllm", environ)


def is_instance_named() -> bool:
    """Return whether the operator chose the instance's name."""
    return bool(os.environ.get(INSTANCE_NAME_VARIABLE))


def holds_engine_core() -> bool:
    """Return whether this process is an engine core, or is to hold one beside the application."""
    if _core_name() is not None:
        return True
    return os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0" and multiprocessing.parent_process() is None


def replica_by_name() -> int:
    """Return the data-parallel rank that this process is named after, else 0."""
    match = _core_name()
    return int((match and match["rank"]) or 0)


def log_beside_vllm() -> None:
    """Let our log lines go where vLLM's go, marked as ours, if they have no place of their own."""
    ours, vllms = logging.getLogger("kvcached"), logging.getLogger("vllm")
    streams = [each.stream for each in vllms.handlers if isinstance(each, logging.StreamHandler)]
    if ours.handlers or not streams:
        return
    handler = logging.StreamHandler(streams[0])
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s kvcached: %(message)s", "%m-%d %H:%M:%S"))
    ours.addHandler(handler)
    ours.setLevel(vllms.level)
    ours.propagate = False


def _core_name() -> re.Match[str] | None:
    return _ENGINE_CORE_NAME.fullmatch(multiprocessing.current_process().name)
