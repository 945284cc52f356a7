"""The vLLM plugin: vLLM finds :func:`register` through the entry point group ``vllm.general_plugins``."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Put this process under run-time control if it comes to hold a vLLM engine core.

    vLLM calls this in each of its processes, once or several times, before it builds anything; further calls do
    nothing. With ``KVCACHED_DISABLE=1`` it only sees to it that engine cores started by Ray hear of that. Raises
    ``SettingsError`` for a setting that cannot be used, and with ``KVCACHED_STRICT=1`` ``StartRefused`` for a vLLM
    that does not fit, which stops the start.
    """
    # Imported late: the modules that vLLM imports anyway must not be paid for by a process that is disabled.
    from kvcached.engines.vllm.process import prepare_ray_actors  # noqa: PLC0415
    from kvcached.settings import is_disabled  # noqa: PLC0415

    prepare_ray_actors()
    if is_disabled():
        return
    from kvcached.engines.vllm.engine_core_hooks import install  # noqa: PLC0415

    install()
