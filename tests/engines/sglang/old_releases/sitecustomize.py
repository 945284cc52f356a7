"""Lets SGLang 0.5.18 and older run beside a transformers release that is newer than they expect.

Those releases register model configurations of their own under names that transformers has taken since then. Python
imports this module at start when its folder is on the path, as the suite puts it for those releases.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

TARGET = "transformers.models.auto.configuration_auto"


class LenientLoader(Loader):
    """Loads the module as it is, then lets a configuration be registered twice."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave this to the real loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module and loosen its check."""
        self._loader.exec_module(module)
        register = module.AutoConfig.register
        module.AutoConfig.register = staticmethod(
            lambda name, config, exist_ok=True: register(name, config, exist_ok=True),  # noqa: ARG005
        )


class LenientFinder(MetaPathFinder):
    """Finds that one module and hands it to the lenient loader."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of the module, or None for every other one."""
        if fullname != TARGET:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LenientLoader(spec.loader)
        return spec


sys.meta_path.insert(0, LenientFinder())
