"""What the environment of an engine or a caller says; read when asked, never at import."""

from __future__ import annotations

import os
import re

from kvcached.errors import KvcachedError
from kvcached.light_dataclasses import dataclass
from kvcached.limits import parse_startup_limit
from kvcached.values import MAX_LIMIT_TOKENS, UNLIMITED

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping

STARTUP_LIMIT_VARIABLE = "KVCACHED_MAX_CACHED_TOKENS"
STARTUP_CAP_VARIABLE = "KVCACHED_MAX_KV_TOKENS"
LEDGER_DIR_VARIABLE = "KVCACHED_LEDGER_DIR"
INSTANCE_NAME_VARIABLE = "KVCACHED_INSTANCE_NAME"
GPU_IDS_VARIABLE = "KVCACHED_GPU_IDS"
DISABLE_VARIABLE = "KVCACHED_DISABLE"
STRICT_VARIABLE = "KVCACHED_STRICT"
ADVISOR_VARIABLE = "KVCACHED_ADVISOR"

_INSTANCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")
_GPU_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class SettingsError(KvcachedError, ValueError):
    """A setting cannot be used; the message says which, why and what to write instead."""


@dataclass(frozen=True)
class Settings:
    """An engine's settings. ``gpu_ids`` is None where the engine's own devices decide."""

    instance_name: str
    startup_limit_tokens: int
    ledger_dir: str
    gpu_ids: tuple[str, ...] | None
    disabled: bool
    strict: bool
    startup_cap_tokens: int = UNLIMITED


def read_settings(engine: str, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings of an ``engine`` ("vllm", "sglang", "rig") from ``environ`` (default: the process's own).

    Raises :class:`SettingsError` with one sentence for a value that cannot be used.
    """
    environ = os.environ if environ is None else environ
    return Settings(
        instance_name=check_instance_name(environ.get(INSTANCE_NAME_VARIABLE) or f"{engine}-{os.getpid()}"),
        startup_limit_tokens=_read_startup(environ, STARTUP_LIMIT_VARIABLE),
        ledger_dir=choose_ledger_dir(None, environ),
        gpu_ids=_read_gpu_ids(environ),
        disabled=is_disabled(environ),
        strict=environ.get(STRICT_VARIABLE, "") == "1",
        startup_cap_tokens=_read_startup(environ, STARTUP_CAP_VARIABLE),
    )


def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether ``KVCACHED_DISABLE=1`` tells the plugins to do nothing at all."""
    environ = os.environ if environ is None else environ
    return environ.get(DISABLE_VARIABLE, "") == "1"


def is_advisor_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether engines estimate their hit rate at other limits: unless ``KVCACHED_ADVISOR=0``."""
    environ = os.environ if environ is None else environ
    return environ.get(ADVISOR_VARIABLE, "") != "0"


def choose_ledger_dir(ledger_dir: str | os.PathLike[str] | None, environ: Mapping[str, str] | None = None) -> str:
    """Return the ledger directory: the argument, else ``KVCACHED_LEDGER_DIR``, else ``/dev/shm/kvcached-<uid>``.

    The default depends on the user id alone, so that all processes of a user meet there whatever their environment
    holds. Raises :class:`SettingsError` for a path that is empty or holds a NUL byte.
    """
    environ = os.environ if environ is None else environ
    if ledger_dir is None:
        ledger_dir = environ.get(LEDGER_DIR_VARIABLE) or default_ledger_dir()
    text = os.fspath(ledger_dir)
    if not isinstance(text, str) or not text or "\0" in text:
        message = f"ledger directory {text!r} is not a path; give an absolute or relative directory name"
        raise SettingsError(message)
    try:
        return os.path.abspath(text)
    except FileNotFoundError:  # the working directory was removed: whoever opens the path is told so
        return text


def default_ledger_dir() -> str:
    """Return ``/dev/shm/kvcached-<uid>``, the directory used when nothing names another one."""
    return f"/dev/shm/kvcached-{os.getuid()}"  # noqa: S108 - mode 0700 and ownership are checked on use


def check_instance_name(name: str) -> str:
    """Return ``name`` if it is a legal instance name, else raise :class:`SettingsError`."""
    if not isinstance(name, str) or not is_instance_name(name):
        message = (
            f"instance name {name!r} is invalid; use 1 to 63 of A-Z a-z 0-9 . _ - and do not start with '.' or '-'"
        )
        raise SettingsError(message)
    return name


def is_instance_name(name: str) -> bool:
    """Return whether ``name`` is one that an instance can have."""
    return _INSTANCE_NAME.fullmatch(name) is not None


def check_gpu_id(gpu_id: str) -> str:
    """Return ``gpu_id`` if it can name a ledger file, else raise :class:`SettingsError`."""
    if _GPU_ID.fullmatch(gpu_id) is None:
        message = f"GPU id {gpu_id!r} cannot name a ledger file; use 1 to 128 of A-Z a-z 0-9 . _ -"
        raise SettingsError(message)
    return gpu_id


def _read_startup(environ: Mapping[str, str], variable: str) -> int:
    text = environ.get(variable, "")
    if text == "":
        return UNLIMITED  # installing the package changes nothing: an engine keeps what it would keep without it
    try:
        return parse_startup_limit(text)
    except ValueError as error:
        message = (
            f"{variable}={text!r} is not a number of tokens; give 16000, 16k, 2m (at most "
            f"{MAX_LIMIT_TOKENS}), 'none' for 0, 'unlimited' or a negative number for no limit"
        )
        raise SettingsError(message) from error


def _read_gpu_ids(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    text = environ.get(GPU_IDS_VARIABLE, "")
    if text == "":
        return None
    gpu_ids = tuple(check_gpu_id(part.strip()) for part in text.split(","))
    repeated = sorted({gpu for gpu in gpu_ids if gpu_ids.count(gpu) > 1})
    if repeated:
        message = f"{GPU_IDS_VARIABLE} names {', '.join(repeated)} more than once; give each member its own id"
        raise SettingsError(message)
    return gpu_ids
