"""The SGLang plugin: entry point group ``sglang.srt.plugins``, name ``kvcached``, object :func:`register`.

SGLang calls :func:`register` in every process that it starts. A process gets the hooks of
:mod:`kvcached.engines.sglang.scheduler_hooks`, all of them or none, once it has SGLang's scheduler module, which may be
before or after the plugins are loaded. The launching process also names its engines.
"""

from __future__ import annotations

from kvcached.engines.sglang import hook_places, launching, ungoverned_scheduler
from kvcached.engines.sglang.importing import when_imported
from kvcached.engines.sglang.scheduler_hooks import SchedulerHooks
from kvcached.settings import Settings, SettingsError, is_disabled, read_settings

__all__ = ["register"]


def register() -> None:
    """Prepare this process to be controlled, or say why it cannot be.

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
    launching.watch_launches(settings)
    waiting = _Installation(settings)
    when_imported(hook_places.SCHEDULER_MODULE, waiting.install)
    waiting.registering = False


class _Installation:
    """Hooks for the schedulers of this process, installed when its scheduler module is there."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.registering = True
        """Whether SGLang is still loading plugins, and will apply the hooks that its registry gets."""

    def install(self) -> None:
        """Install all hooks, or report what is missing."""
        missing = hook_places.find_missing()
        if missing:
            ungoverned_scheduler.report_missing(self._settings, f"this SGLang has no usable {', '.join(missing)}")
            return
        hooks = SchedulerHooks(self._settings)
        if self.registering:
            hooks.register()
        else:
            hooks.attach()
