"""What kind of vLLM process this is, and the settings that hold in it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
from typing import Any

from kvcached.settings import INSTANCE_NAME_VARIABLE, Settings, read_settings

_ENGINE_CORE_NAME = re.compile(r"EngineCore(?:_DP(?P<rank>\d+))?")
"""vLLM names its engine core processes so; nothing but a default and a diagnosis depends on it."""

LAUNCH_VARIABLE = "KVCACHED_LAUNCH"
"""The default name of a launch, for its engine cores that Ray starts: they have no parent process to be named after."""

RAY_PREFIXES_VARIABLE = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
"""What vLLM takes into the Ray actors that it starts, beside variables of its own."""

_OUR_PREFIX = "KVCACHED_"


def prepare_ray_actors() -> None:
    """Let the Ray actors that vLLM may start from this process have our settings, and one default name.

    Without it they would serve under other limits than were asked for, each under a name of its own.
    """
    envs = sys.modules.get("vllm.envs")
    if envs is None or RAY_PREFIXES_VARIABLE not in getattr(envs, "environment_variables", ()):
        return
    prefixes = [each.strip() for each in os.environ.get(RAY_PREFIXES_VARIABLE, "").split(",") if each.strip()]
    if _OUR_PREFIX not in prefixes:
        os.environ[RAY_PREFIXES_VARIABLE] = ",".join([*prefixes, _OUR_PREFIX])
    if multiprocessing.parent_process() is None and not (_is_ray_actor() and os.environ.get(LAUNCH_VARIABLE)):
        os.environ[LAUNCH_VARIABLE] = f"vllm-{os.getpid()}"


def engine_core_settings() -> Settings:
    """Read the settings of this process. Raises ``SettingsError`` for one that cannot be used.

    An instance that its operator gave no name is ``vllm-<pid>`` by the process that was started, which is the parent
    of its engine cores: under data parallelism they belong to one instance.
    """
    environ = dict(os.environ)
    if not environ.get(INSTANCE_NAME_VARIABLE):
        parent = multiprocessing.parent_process()
        if parent is not None and _core_name() is not None:
            environ[INSTANCE_NAME_VARIABLE] = f"vllm-{parent.pid}"
        elif environ.get(LAUNCH_VARIABLE) and _is_ray_actor():
            environ[INSTANCE_NAME_VARIABLE] = environ[LAUNCH_VARIABLE]
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


def is_externally_launched(engine: Any) -> bool:  # noqa: ANN401 - vLLM's EngineCore
    """Return whether ``engine`` is one of several that a launcher like torchrun started, and that must decide alike."""
    parallel = engine.vllm_config.parallel_config
    executors = {each.__name__ for each in type(getattr(engine, "model_executor", None)).__mro__}
    external = parallel.distributed_executor_backend == "external_launcher"
    return (external or "ExecutorWithExternalLauncher" in executors) and int(parallel.world_size) > 1


def replica_of(engine: Any) -> int:  # noqa: ANN401 - vLLM's EngineCore
    """Return the index of ``engine`` among the engine cores of its launch."""
    if is_externally_launched(engine) and os.environ.get("RANK", "").isdecimal():
        return int(os.environ["RANK"])
    index = getattr(engine, "engine_index", None)  # an in-process engine has none
    return int(index if index is not None else getattr(engine.vllm_config.parallel_config, "data_parallel_index", 0))


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


def _is_ray_actor() -> bool:
    """Return whether Ray started this process as an actor, which also a launcher can be."""
    ray: Any = sys.modules.get("ray")
    try:
        return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None)
    except AttributeError:  # no Ray here, or half of it
        return False
