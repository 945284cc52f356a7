"""The victims of a storm, and the timer of the kernel that kills them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from children import fork
from storm_engine import Cache
from storm_record import GPUS, NUMBERS, STARTUP_LIMIT, Shared, identity

from kvcached.ledger.publication import publish
from kvcached.ledger.subscription import Subscription
from kvcached.policy import RetentionPolicy
from kvcached.values import Bound

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


def be_publisher(ledger_dir: str, generator: random.Random, shared: Shared) -> None:
    """Publish one thing after the other, limits and caps."""
    while True:
        shared.add("publications")
        bound = generator.choice(tuple(Bound))
        if publish(generator.choice(NUMBERS[bound]), "target", ledger_dir, bound=bound, note="storm").accepted:
            shared.add("accepted")


def be_subscriber(ledger_dir: str, generator: random.Random, _shared: Shared) -> None:
    """Register in all ledgers, poll, report and leave, again and again."""
    policy = RetentionPolicy(Cache(1), STARTUP_LIMIT)
    while True:
        subscription = Subscription(identity(f"sub-{os.getpid()}"), GPUS, ledger_dir)
        subscription.start()
        for _ in range(generator.randrange(20)):
            subscription.poll()
            subscription.acknowledge(policy.report())
            policy.on_step()
        subscription.close()


def be_forking_engine(ledger_dir: str, _generator: random.Random, _shared: Shared) -> None:
    """Register, then fork ranks that live on after this process is killed."""
    subscription = Subscription(identity(f"fork-{os.getpid()}"), GPUS, ledger_dir)
    subscription.start()
    for _ in range(2):
        fork(partial(time.sleep, 0.2))
    while True:
        subscription.wait(time.monotonic() + 1)


VICTIMS: dict[str, Callable[[str, random.Random, Shared], None]] = {
    "publisher": be_publisher,
    "subscriber": be_subscriber,
    "forking engine": be_forking_engine,
}
WEIGHTS = (80, 15, 5)
LIFETIME_S = {"publisher": 0.006, "subscriber": 0.012, "forking engine": 0.05}


class _SignalEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("pad", ctypes.c_char * 48),
    )


_SIGEV_SIGNAL = 0


def die_after(seconds: float, clock: int) -> None:
    """Let the kernel send SIGKILL to this process after so much time of a clock, wherever it is then."""
    libc = ctypes.CDLL(None, use_errno=True)
    event = _SignalEvent(None, signal.SIGKILL, _SIGEV_SIGNAL, b"")
    timer = ctypes.c_void_p()
    span = (ctypes.c_long * 4)(0, 0, 0, max(1, int(seconds * 1e9)))
    if libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) or libc.timer_settime(timer, 0, span, None):
        raise OSError(ctypes.get_errno(), "no timer")
