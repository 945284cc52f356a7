"""The SGLang plugin: entry point group ``sglang.srt.plugins``, name ``kvcached``, object :func:`register`.

SGLang calls :func:`register` in every process that it starts. Only scheduler processes do more than look around: there
the hooks of :mod:`kvcached.engines.sglang.hooks` are installed, all of them or none.
"""

from __future__ import annotations

import os
import sys

from kvcached.engines.sglang import targets, unsupported
from kvcached.engines.sglang.hooks import SchedulerHooks
from kvcached.settings import INSTANCE_NAME_VARIABLE, SettingsError, is_disabled, read_settings

__all__ = ["register"]


def register() -> None:
    """Install the scheduler hooks in this process, or say why they cannot be.

    Raises ``SystemExit``, which SGLang's plugin loader does not swallow, for settings that cannot be used and, with
    ``KVCACHED_STRICT=1``, for an engine that lacks a hook target.
    """
    if is_disabled():
        return
    try:
        settings = read_settings("sglang")
    except SettingsError as error:
        message = f"kvcached: {error}"
        raise SystemExit(message) from None
    # The launcher comes by first. What it leaves here its schedulers inherit, so that all replicas of one launch bear
    # one name although each of them is a process of its own.
    os.environ.setdefault(INSTANCE_NAME_VARIABLE, settings.instance_name)
    if targets.SCHEDULER_MODULE not in sys.modules:
        return  # the detokenizer and the like: nothing to govern here, and importing a scheduler would cost seconds
    missing = targets.find_missing()
    if missing:
        unsupported.report_spawned(settings, f"this SGLang has no usable {', '.join(missing)}")
        return
    SchedulerHooks(settings).install()
