"""How an engine core takes its slot in the ledger, controlled or not, and under which name."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from kvcached.engines.vllm.process import is_instance_named
from kvcached.engines.vllm.relied_on import StartRefusedError
from kvcached.ledger.registration import InstanceNameTakenError
from kvcached.ledger.subscription import Subscription

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcached.settings import Settings
    from kvcached.values import Identity, Report

MOST_ENGINES = 64
"""How many engines of one program get default names of their own."""


def take_slot(
    identity: Identity,
    members: Sequence[str],
    settings: Settings,
    on_publication: Callable[[], None] | None = None,
    first: Report | None = None,
) -> tuple[Subscription, str]:
    """Register a replica; return its subscription and the name it got. With ``first``, nobody sees it without a report.

    A name that its operator chose and another live engine has is waited for: that may be the predecessor on its way
    out. With ``KVCACHED_STRICT=1`` it raises :class:`StartRefusedError` instead. A default name is only ever shared by
    engines of one program; the next one gets a number.
    """

    def subscribe(identity: Identity) -> Subscription:
        subscription = Subscription(identity, members, settings.ledger_dir, on_publication=on_publication)
        if first is not None:
            subscription.acknowledge(first)
        return subscription

    if is_instance_named():
        subscription = subscribe(identity)
        try:
            subscription.start(patient=not settings.strict)
        except InstanceNameTakenError as error:
            raise StartRefusedError(str(error)) from error
        return subscription, identity.instance_name
    for name in _default_names(identity.instance_name):
        named = dataclasses.replace(identity, instance_name=name)
        subscription = subscribe(named)
        try:
            subscription.start()
        except InstanceNameTakenError:
            continue
        return subscription, name
    subscription = subscribe(identity)
    subscription.start(patient=True)
    return subscription, identity.instance_name


def _default_names(first: str) -> Iterator[str]:
    """Yield ``first``, then ``first-2``, ``first-3`` and so on."""
    yield first
    for number in itertools.islice(itertools.count(2), MOST_ENGINES - 1):
        yield f"{first}-{number}"
