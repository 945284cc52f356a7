"""The estimator against exact caches, and mutants of it that the comparison has to find."""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path

import pytest
from support.idle_caches import differences, weights_of

from kvcached import advisor
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.sampling import EVERY_BLOCK, SamplePlan

SEEDS = 160
EVENTS = 160
BLOCKS = 64

MUTANTS = {
    "the head of a chain becomes idle first": (
        "idle_stack",
        "zip(reversed(keys), reversed(weights)",
        "zip(keys, weights",
    ),
    "hits on blocks in use are not counted": ("idle_stack", "buckets[0] += sum", "buckets[0] += 0 * sum"),
    "hits on blocks in use are not bounded": ("idle_stack", "min(used, hittable)", "used"),
    "the last prompt block can be a hit": ("estimator", "min(self.plan.samples_of(hittable), len(keys))", "len(keys)"),
    "a mark counts as held": ("idle_stack", "bisect_left(marks, stamp)", "bisect_left(marks, stamp + 1)"),
    "what is taken into use still fills the caches": (
        "idle_stack",
        "users.update(dict.fromkeys(keys[used:], 1))\n        self._let_go(gone)",
        "users.update(dict.fromkeys(keys[used:], 1))",
    ),
    "only hits are taken into use": ("idle_stack", "fromkeys(keys[used:], 1)", "fromkeys(keys[used:cached], 1)"),
    "what is taken into use again stays idle": ("idle_stack", "self._remove(keys[cached:], gone)", "pass"),
    "a sample weighs what its predecessor weighs": (
        "idle_stack",
        "gone[holders] += weights[place]",
        "gone[holders] += weights[place - 1]",
    ),
    "a full cache evicts one sample too many": ("idle_stack", "while held > limit:", "while held >= limit > 0:"),
    "a cache may exceed its limit by a sample": ("idle_stack", "if held <= limit:", "if held <= limit + 16:"),
    "what was computed again stays in the counts": (
        "idle_stack",
        "self._let_go(gone)\n        added",
        "added",
    ),
    "what was computed again stays in the order": ("idle_stack", "self._remove(cached[used:], gone)", "pass"),
    "marks on samples that leave stay behind": ("idle_stack", "while holders < len(marks) and", "while False and"),
    "marks on forgotten samples stay behind": ("idle_stack", "if stamp <= last_stamp:", "if stamp < last_stamp:"),
    "nothing is forgotten": ("idle_stack", "if self._marks[0]:", "if not self._marks:"),
    "the last user ends every use": ("idle_stack", "if users[key] > 1:", "if users[key] > 2:"),
    "a second user is not noted": ("idle_stack", "users[key] += 1", "users[key] += 0"),
    "samples in use become idle as well": ("idle_stack", "cached[used] in users:", "cached[used] is None:"),
    "stamps do not grow": ("idle_stack", "clock += 1", "clock += 0"),
    "buckets are in the wrong order": ("idle_stack", "gone[:0:-1])\n", "gone[1:])\n"),
    "uncounted requests count": ("estimator", "if prompt_tokens > 0 else", "if prompt_tokens >= 0 else"),
    "bursts leave the caches as they are": ("estimator", "self._stack.squeeze(room)", "pass"),
    "bursts squeeze every cache to its limit only": ("idle_stack", "[min(limit, room) for limit", "[limit for limit"),
    "bursts squeeze the small caches too much": ("idle_stack", "[min(limit, room) for limit", "[room // 2 for limit"),
    "an emptied cache is remembered": ("estimator", "self._stack.clear()", "pass"),
}


def estimator(seed: int, kind: type[Estimator] = Estimator) -> Estimator:
    """Return an estimator that samples every block, at seeded limits, some of them larger than all there is."""
    rng = random.Random(seed)
    most = rng.choice((300, 1500, 100_000))
    limits = sorted({rng.randint(1, most) for _ in range(9)} | {16 * rng.randint(1, 8)})
    return kind(SamplePlan(16, EVERY_BLOCK), limits, half_lives=(float("inf"),))


def check(seed: int, kind: type[Estimator] = Estimator) -> str:
    """Compare one seed; return the difference, or nothing."""
    subject = estimator(seed, kind)
    subject.plan.samples_of(BLOCKS)
    return differences(seed, EVENTS, subject, weights_of(seed, len(subject.plan.weights)))


@pytest.mark.parametrize("part", range(8))
def test_sampling_every_block_is_an_exact_simulation(part: int) -> None:
    """An estimator that samples every block counts the hits of each exact cache to the last bit."""
    for seed in range(part, SEEDS, 8):
        assert not check(seed), f"seed {seed}"


@pytest.mark.parametrize("name", MUTANTS)
def test_comparison_finds_every_mutant(name: str) -> None:
    """Each small fault put into the estimator makes it differ from the exact caches."""
    kind = mutant(*MUTANTS[name])
    assert any(_differs(seed, kind) for seed in range(40)), name


def _differs(seed: int, kind: type[Estimator]) -> bool:
    try:
        return bool(check(seed, kind))
    except (ArithmeticError, LookupError):
        return True


def mutant(module: str, old: str, new: str) -> type[Estimator]:
    """Return the estimator with one piece of its source replaced."""
    namespaces = {}
    for name in ("idle_stack", "estimator"):
        source = (Path(advisor.__file__).parent / f"{name}.py").read_text()
        if name == module:
            assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {name}.py"
            source = source.replace(old, new)
        made = types.ModuleType(f"mutant_{name}")
        sys.modules[made.__name__] = made
        try:
            exec(compile(source, f"{name}.py", "exec"), made.__dict__)  # noqa: S102 - our own source
        finally:
            del sys.modules[made.__name__]
        namespaces[name] = made
    namespaces["estimator"].__dict__["IdleStack"] = namespaces["idle_stack"].__dict__["IdleStack"]
    kind: type[Estimator] = namespaces["estimator"].__dict__["Estimator"]
    return kind
