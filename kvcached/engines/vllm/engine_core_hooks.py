"""The four hooks, and what they lead to.

``EngineCore.get_supported_tasks`` (called once an in-process engine is built), ``EngineCore.post_step`` (after every
step), ``EngineCore.shutdown`` and ``EngineCoreProc._notify_idle_state_callbacks`` (at each turn of the idle loop, first
before any request) are wrapped on their classes. Everything else is attached to the one engine core's own objects.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from kvcached.engines.vllm import uncontrolled_engine
from kvcached.engines.vllm.process import engine_core_settings, log_beside_vllm
from kvcached.engines.vllm.relied_on import (
    StartRefusedError,
    Targets,
    UnsupportedEngineError,
    check_pool_model,
    resolve_targets,
)
from kvcached.engines.vllm.taking_control import bind, check_early
from kvcached.engines.vllm.uncontrolled_engine import Uncontrolled
from kvcached.guards import call_guarded, log_fault
from kvcached.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.vllm.governor import Governor
    from kvcached.engines.vllm.inproc import InprocGovernor
    from kvcached.settings import Settings

_log = logging.getLogger(__name__)

_GOVERNOR = "_kvcached_governor"
_MARK = "_kvcached_hooked"


def install() -> None:
    """Resolve all targets and install the hooks, or none; idempotent. Raises ``StartRefused``, ``SettingsError``.

    vLLM's loader of plugins passes everything else on, too, so nothing else is raised.
    """
    settings = engine_core_settings()
    log_beside_vllm()
    call_guarded(functools.partial(_announce, settings), _install, settings)


def _announce(settings: Settings, error: Exception) -> None:
    """Say why no engine core of this process is controlled, or refuse its start."""
    reason = _reason_of(error)
    if settings.strict:
        message = f"KVCACHED_STRICT=1, and this vLLM cannot be controlled: {reason}"
        raise StartRefusedError(message) from error
    uncontrolled_engine.announce(reason)


def _install(settings: Settings) -> None:
    targets = resolve_targets()
    if hasattr(targets.engine_core, _MARK):
        return
    check_pool_model(targets.block_pool)
    setattr(targets.engine_core, _MARK, True)  # on the class: others may wrap our hooks in turn
    _wrap(targets.engine_core, "post_step", functools.partial(_after_step, targets))
    _wrap(targets.engine_core, "get_supported_tasks", functools.partial(_once_built, targets))
    _wrap(targets.engine_core, "shutdown", _at_shutdown)
    _wrap(targets.engine_core_proc, "_notify_idle_state_callbacks", functools.partial(_while_idle, targets))
    if settings.strict and hasattr(targets.engine_core, "_initialize_kv_caches"):
        _wrap(targets.engine_core, "_initialize_kv_caches", _refuse_early)


def _wrap(owner: type[Any], name: str, then: Callable[[Any], None]) -> None:
    """Let ``owner.name`` be followed by ``then(self)``, of which nothing but a refusal reaches vLLM.

    Any other exception ends the control of that engine. vLLM's own pass as they are, and ``then`` is not called.
    """
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever vLLM passes and returns
        result = stock(self, *args, **kwargs)
        try:
            then(self)
        except (StartRefusedError, SettingsError):
            raise
        except Exception as error:  # noqa: BLE001 - the engine has to serve on; inline: runs after each step
            _end_control(self, error)
        return result

    setattr(owner, name, hook)


def _after_step(targets: Targets, engine: Any) -> None:  # noqa: ANN401 - vLLM's EngineCore
    governor = engine.__dict__.get(_GOVERNOR) or _bind(targets, engine)
    governor.on_step()


def _while_idle(targets: Targets, engine: Any) -> None:  # noqa: ANN401
    governor = engine.__dict__.get(_GOVERNOR) or _bind(targets, engine)
    governor.on_idle()


def _once_built(targets: Targets, engine: Any) -> None:  # noqa: ANN401
    """Bind an engine that has no loop to be bound in. Pooling models come here with every request."""
    if _GOVERNOR not in engine.__dict__ and "scheduler" in engine.__dict__:  # else it is still being built
        _while_idle(targets, engine)


def _at_shutdown(engine: Any) -> None:  # noqa: ANN401
    governor = engine.__dict__.get(_GOVERNOR)
    engine.__dict__[_GOVERNOR] = Uncontrolled()
    if governor is not None:
        unreleased = "the ledger slot could not be released; it becomes free when this process ends"
        call_guarded(log_fault(_log.warning, unreleased), governor.on_shutdown)


def _refuse_early(engine: Any) -> None:  # noqa: ANN401
    """Refuse an engine that is still being built, before its server says that it is ready."""
    call_guarded(_refuse_if_unsupported, check_early, engine)


def _refuse_if_unsupported(error: Exception) -> None:
    if isinstance(error, UnsupportedEngineError):
        raise _refusal(str(error)) from error
    # It is looked at again when it is bound.
    _log.debug("this engine could not be inspected while it was built", exc_info=error)


def _bind(targets: Targets, engine: Any) -> Governor | InprocGovernor | Uncontrolled:  # noqa: ANN401
    """Return the governor of ``engine``, or a stand-in if it cannot have one, which is said once."""
    settings = engine_core_settings()
    log_beside_vllm()  # again: an application's own process sets vLLM's logging up after it loaded the plugins
    unbound = functools.partial(_leave_alone, settings, engine, targets.version)
    end = functools.partial(_end_control, engine)
    governor = call_guarded(unbound, bind, targets, engine, settings, end)
    engine.__dict__[_GOVERNOR] = governor
    return governor


def _leave_alone(settings: Settings, engine: Any, version: str, error: Exception) -> Uncontrolled:  # noqa: ANN401
    """Return the stand-in for an engine that ``error`` kept from being controlled, or refuse its start."""
    if isinstance(error, StartRefusedError):
        raise error
    reason = _reason_of(error)
    if settings.strict:
        raise _refusal(reason) from error
    return uncontrolled_engine.leave_alone(settings, engine, version, reason)


def _reason_of(error: Exception) -> str:
    """Return what users are told, and log the traceback of what nobody expected."""
    if isinstance(error, UnsupportedEngineError):
        return str(error)
    _log.info("the error that kept this engine from being controlled:", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _refusal(reason: str) -> StartRefusedError:
    return StartRefusedError(f"KVCACHED_STRICT=1, and this engine cannot be controlled: {reason}")


def _end_control(engine: Any, error: Exception) -> None:  # noqa: ANN401
    """Leave ``engine`` to itself after an error of ours, give its methods back, and say so; never raises."""
    governor = engine.__dict__.get(_GOVERNOR)
    if isinstance(governor, Uncontrolled):
        return
    _log.error(
        "run-time control of this engine ended after an internal error; the engine keeps serving", exc_info=error
    )
    engine.__dict__[_GOVERNOR] = Uncontrolled()
    if governor is None:
        return
    reason = f"the plugin failed: {type(error).__name__}: {error}"
    engine.__dict__[_GOVERNOR] = uncontrolled_engine.report_failure(governor.subscription, reason)
    call_guarded(log_fault(_log.warning, "some methods of this engine could not be restored"), governor.detach)
