"""What the program that launches engines does for them: a name for each launch, and a word about Ray.

Engines of one program are told apart by name, and only the launching process can count them. A name that the operator
gave is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

from kvcached.engines.sglang import ungoverned_scheduler
from kvcached.engines.sglang.attaching import attach_around
from kvcached.engines.sglang.importing import when_imported
from kvcached.settings import INSTANCE_NAME_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.settings import Settings

ENGINE_MODULE = "sglang.srt.entrypoints.engine"
RAY_ENGINE_MODULE = "sglang.srt.ray.engine"
LAUNCH = "_launch_scheduler_processes"

RAY_REASON = (
    "this SGLang starts its schedulers as Ray actors, which load no plugins: "
    "launch it without Ray to control its prefix caches"
)

_log = logging.getLogger(__name__)


def watch_launches(settings: Settings) -> None:
    """Attend to every engine that this process launches from now on."""
    names = LaunchNames(settings.instance_name)
    when_imported(ENGINE_MODULE, names.follow_launches)
    when_imported(RAY_ENGINE_MODULE, lambda: _watch_ray(settings))


class LaunchNames:
    """Gives each launch of this process a name, unless the operator named them: the first free one of a row."""

    def __init__(self, first: str) -> None:
        """Name the first launch ``first``, and those that run beside it ``first-2``, ``first-3`` and so on."""
        self._first = first
        self._processes: dict[str, tuple[Any, ...] | None] = {}

    def follow_launches(self) -> None:
        """Name the launches of SGLang's ``Engine`` through the environment that they inherit."""
        try:
            attach_around(importlib.import_module(ENGINE_MODULE).Engine, LAUNCH, self.name_launch)
        except AttributeError:
            _log.debug("this SGLang launches differently than expected: all engines of this process share one name")
            os.environ.setdefault(INSTANCE_NAME_VARIABLE, self._first)

    @contextlib.contextmanager
    def name_launch(self, *_args: object, **_named: object) -> Iterator[Callable[[Any], None]]:
        """Put a free name into the environment during a launch; yields what wants to know what it returned."""
        if os.environ.get(INSTANCE_NAME_VARIABLE):
            yield _nothing
            return
        name = self._free_name()
        self._processes[name] = None
        os.environ[INSTANCE_NAME_VARIABLE] = name
        try:
            yield lambda launched: self._note(name, launched)
        except BaseException:
            del self._processes[name]
            raise
        finally:
            os.environ.pop(INSTANCE_NAME_VARIABLE, None)

    def _note(self, name: str, launched: Any) -> None:  # noqa: ANN401 - SGLang's result of a launch
        """Remember which processes go by ``name``; SGLang returns them last, or nothing if it runs none itself."""
        found = launched[-1] if isinstance(launched, tuple) else None
        self._processes[name] = tuple(found) if isinstance(found, list) else None

    def _free_name(self) -> str:
        number = 1
        while True:
            name = self._first if number == 1 else f"{self._first}-{number}"
            processes = self._processes.get(name, ())
            if processes is not None and not any(process.exitcode is None for process in processes):
                return name
            number += 1


def _watch_ray(settings: Settings) -> None:
    """Say, or refuse, at each launch through Ray, that it is not controlled, unless its actors load plugins."""

    @contextlib.contextmanager
    def check(*_args: object, **_named: object) -> Iterator[Callable[[Any], None]]:
        if not _actors_load_plugins():
            ungoverned_scheduler.refuse_or_warn(settings, RAY_REASON)
        yield _nothing

    try:
        attach_around(importlib.import_module(RAY_ENGINE_MODULE).RayEngine, LAUNCH, check)
    except AttributeError:
        ungoverned_scheduler.refuse_or_warn(settings, RAY_REASON)


def _actors_load_plugins() -> bool:
    """Return whether SGLang's Ray actor loads plugins before it builds its scheduler, as ordinary processes do."""
    actor = importlib.import_module("sglang.srt.ray.scheduler_actor").SchedulerActor
    metadata = getattr(actor, "__ray_metadata__", None)
    cls = getattr(metadata, "modified_class", actor)
    code = getattr(inspect.unwrap(cls.__init__), "__code__", None)
    return "load_plugins" in getattr(code, "co_names", ())


def _nothing(_result: object) -> None:
    """Take note of nothing."""
