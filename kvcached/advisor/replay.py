"""The hit rate over the limit of requests that were recorded: the advisor's model without an engine.

Requests are taken one after the other, each released before the next is admitted: a trace says when they began and not
how long they took. Nothing is forgotten, so the curve is that of all of them.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

from kvcached.advisor.curve import spaced_limits
from kvcached.advisor.estimator import Estimator
from kvcached.advisor.reading import Curve
from kvcached.advisor.sampling import SamplePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.workload.request import Request


def replay(requests: Sequence[Request], block_tokens: int, *, counted_from: int = 0) -> Curve:
    """Return the curve of ``requests``, up to the limit that keeps everything. There has to be one at least.

    Those before ``counted_from`` fill the caches, and their hits do not count.
    """
    largest = block_tokens * len({key for request in requests for key in request.content})
    plan = SamplePlan(block_tokens)
    estimator = Estimator(plan, spaced_limits(block_tokens, largest), half_lives=(math.inf,))
    for place, request in enumerate(requests):
        _serve(estimator, request, block_tokens, counts=place >= counted_from)
    estimator.fold()
    (window,) = estimator.windows
    rates = tuple(min(1.0, tokens / window.prompt) for tokens in accumulate(window.buckets))
    return Curve(estimator.limits, rates, rates[-1], 0.0, estimator.limits[-1], rates[0])


def _serve(estimator: Estimator, request: Request, block_tokens: int, *, counts: bool) -> None:
    plan, content = estimator.plan, request.content
    keys = [content[place] for place in plan.positions[: plan.samples_of(len(content))]]
    prompt = plan.samples_of(request.prompt_tokens // block_tokens)
    hittable = (request.prompt_tokens - 1) // block_tokens
    estimator.admit(request.index, keys[:prompt], hittable, request.prompt_tokens if counts else 0, 0)
    estimator.release(request.index, keys)
