"""Doing something once a module is imported, now or later, without importing it."""

from __future__ import annotations

import logging
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

from kvcached.guards import call_guarded, log_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_log = logging.getLogger(__name__)


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` when the module ``name`` is imported: at once if it is already, else right after its first import.

    ``then`` runs on the importing thread. Of a later call, nothing but ``SystemExit`` reaches the importer.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited(MetaPathFinder):
    """Lets the other finders find one module, and adds a call to the end of its execution."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow_execution(spec)
                return spec
        return None

    def _follow_execution(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            execute(module)
            call_guarded(log_fault(_log.error, "after the import of %s", self._name), self._then)

        loader.exec_module = execute_and_tell  # type: ignore[method-assign]
