"""Forked children that end where they should."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def fork(run: Callable[[], object]) -> int:
    """Let a child do ``run`` and end there, whatever comes of it; return its process id.

    An exception that got out of the child's ``run`` would go on in the child with what the parent does next, its
    clean-up of everything included.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run()
        status = 0
    except BaseException:  # noqa: BLE001 - see above
        traceback.print_exc()
    finally:
        os._exit(status)
