"""Which pair an engine registers again with, after it gave up slots that publishers could not reach any more.

A function of values: :mod:`kvcached.ledger.subscription` reads them and acts on the answer. What it keeps: within one
engine's life a revision has one limit, and a publication that was accepted is not lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.values import MAX_REVISION, Update

if TYPE_CHECKING:
    from collections.abc import Sequence


def resume_from(words: Sequence[Update | None], taken: Update, limit_in_force: int) -> Update:
    """Return the pair of one bound that all members of the new registration begin with.

    Args:
        words: What each own word of the bound says after the slots were given up; None for a member that cannot be
            read, or that carries another incarnation.
        taken: The newest pair that was read in all members before.
        limit_in_force: The limit or cap that the engine keeps now, in tokens.

    Words below ``taken`` were set back and do not count. If all others agree on a newer pair, its publication may have
    been accepted: that pair is taken. If they differ, somebody published half of it, so neither is taken, and the limit
    in force goes on under a revision above all of them: a revision that was used, even for half a publication, is not
    used again. At the last revision there is none above: the limit in force goes on there.

    """
    newer = {word for word in words if word is not None and word.revision >= taken.revision}
    if not newer or newer == {taken}:
        return taken
    if len(newer) == 1:
        return newer.pop()
    highest = max(word.revision for word in newer)
    return Update(min(highest + 1, MAX_REVISION), limit_in_force, taken.bound)
