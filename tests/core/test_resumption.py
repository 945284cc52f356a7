"""Which pair an engine registers anew with: a function of values, tried on every case there is."""

from __future__ import annotations

from itertools import product

import pytest

from kvcached.ledger.resumption import resume_from
from kvcached.values import MAX_REVISION, Update

TAKEN = Update(6, 1005)
IN_FORCE = 500


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([TAKEN, TAKEN], TAKEN),
        ([None, None], TAKEN),
        ([None, TAKEN], TAKEN),
        ([Update(7, 111), Update(7, 111)], Update(7, 111)),
        ([Update(7, 111), None], Update(7, 111)),
        ([Update(7, 111), Update(5, 1)], Update(7, 111)),
        ([Update(5, 1), Update(4, 2)], TAKEN),
        ([Update(7, 111), TAKEN], Update(8, IN_FORCE)),
        ([Update(7, 111), Update(7, 222)], Update(8, IN_FORCE)),
        ([Update(7, 111), Update(9, 222), None], Update(10, IN_FORCE)),
        ([Update(MAX_REVISION, 1), TAKEN], Update(MAX_REVISION, IN_FORCE)),
    ],
)
def test_pair_of_the_new_registration(words: list[Update | None], expected: Update) -> None:
    """Lost and set-back words do not count; an agreed newer pair is taken; a split is passed over by a new revision."""
    assert resume_from(words, TAKEN, IN_FORCE) == expected


def test_no_revision_gets_two_limits_and_no_agreed_pair_is_lost() -> None:
    """Over all words of three members: the choice was agreed or is above all words, and not below what was taken."""
    candidates = [None, Update(5, 1), TAKEN, Update(7, 1), Update(7, 2), Update(8, 1)]
    for words in product(candidates, repeat=3):
        chosen = resume_from(words, TAKEN, IN_FORCE)
        counted = {word for word in words if word is not None and word.revision >= TAKEN.revision}
        assert chosen.revision >= TAKEN.revision
        if len(counted) == 1:
            assert chosen == counted.copy().pop()
        elif counted:
            assert all(chosen.revision > word.revision for word in counted)
