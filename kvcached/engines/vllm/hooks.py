"""The four hooks, and what they lead to.

``EngineCore.get_supported_tasks`` (called once an in-process engine is built), ``EngineCore.post_step`` (after every
step), ``EngineCore.shutdown`` and ``EngineCoreProc._notify_idle_state_callbacks`` (at each turn of the idle loop, first
before any request) are wrapped on their classes. Everything else is attached to the one engine core's own objects.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm import unsupported
from kvcached.engines.vllm.binding import bind
from kvcached.engines.vllm.process import engine_core_settings, log_beside_vllm
from kvcached.engines.vllm.targets import (
    StartRefusedError,
    Targets,
    UnsupportedEngineError,
    check_pool_model,
    resolve_targets,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.vllm.governor import Governor
    from kvcached.engines.vllm.inproc import InprocGovernor

_log = logging.getLogger(__name__)

_GOVERNOR = "_kvcached_governor"
_MARK = "_kvcached_hooked"


class _Uncontrolled:
    """Stands where the governor of an engine core would, once that core is left alone."""

    def on_step(self) -> None:
        """Do nothing."""

    def on_idle(self) -> None:
        """Do nothing."""

    def on_shutdown(self) -> None:
        """Do nothing."""


_UNCONTROLLED = _Uncontrolled()


def install() -> None:
    """Resolve all targets and install the hooks, or none; idempotent. Raises ``StartRefused``, ``SettingsError``."""
    settings = engine_core_settings()
    log_beside_vllm()
    try:
        targets = resolve_targets()
        if hasattr(targets.engine_core, _MARK):
            return
        check_pool_model(targets.block_pool)
    except UnsupportedEngineError as error:
        if settings.strict:
            message = f"KVCACHED_STRICT=1, and this vLLM cannot be controlled: {error}"
            raise StartRefusedError(message) from error
        unsupported.announce(str(error))
        return
    setattr(targets.engine_core, _MARK, True)  # on the class: others may wrap our hooks in turn
    _wrap(targets.engine_core, "post_step", functools.partial(_attend, targets, "on_step"))
    _wrap(targets.engine_core, "get_supported_tasks", functools.partial(_attend, targets, "on_idle"))
    _wrap(targets.engine_core, "shutdown", functools.partial(_attend, targets, "on_shutdown"))
    _wrap(targets.engine_core_proc, "_notify_idle_state_callbacks", functools.partial(_attend, targets, "on_idle"))


def _wrap(owner: type[Any], name: str, then: Callable[[Any], None]) -> None:
    """Let ``owner.name`` be followed by ``then(self)``."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever vLLM passes and returns
        result = stock(self, *args, **kwargs)
        then(self)
        return result

    setattr(owner, name, hook)


def _attend(targets: Targets, moment: str, engine: Any) -> None:  # noqa: ANN401 - vLLM's EngineCore
    """Call the governor of ``engine``, bound at the first call. Nothing but a refused start gets out of here."""
    try:
        governor: Governor | InprocGovernor | _Uncontrolled | None = engine.__dict__.get(_GOVERNOR)
        if moment == "on_shutdown":
            engine.__dict__[_GOVERNOR] = _UNCONTROLLED
        elif governor is None and "scheduler" in engine.__dict__:  # else it is still being built
            governor = engine.__dict__[_GOVERNOR] = _bind_or_leave(targets, engine)
        if governor is not None:
            getattr(governor, moment)()
    except StartRefusedError:
        raise
    except Exception as error:  # noqa: BLE001 - the place where the engine is protected from us: it has to serve on
        engine.__dict__[_GOVERNOR] = _UNCONTROLLED
        _log.exception("run-time control of this engine ended by an error of its own; the engine serves on")
        unsupported.report_failure(engine, f"the plugin failed: {type(error).__name__}: {error}")


def _bind_or_leave(targets: Targets, engine: Any) -> Governor | InprocGovernor | _Uncontrolled:  # noqa: ANN401
    """Return the governor of ``engine``, or a stand-in if it cannot have one, which is said once."""
    settings = engine_core_settings()
    log_beside_vllm()  # again: an application's own process sets vLLM's logging up after it loaded the plugins
    try:
        return bind(targets, engine, settings)
    except UnsupportedEngineError as error:
        if settings.strict:
            message = f"KVCACHED_STRICT=1, and this engine cannot be controlled: {error}"
            raise StartRefusedError(message) from error
        unsupported.register_unsupported(settings, engine, targets.version, str(error))
        return _UNCONTROLLED
