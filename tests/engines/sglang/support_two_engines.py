"""Two engines inside one program, neither of which was given a name: a limit for one leaves the other alone."""

from __future__ import annotations

import json
import os
import sys

from support_engine import start

from kvcached.control import get_instances, set_prefix_cache_retention_limit

SAMPLING = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


def main(model: str) -> None:
    """Print the engines' names, without the process's id, and how many tokens each had cached after a limit of 0."""
    engines = [start(model), start(model)]
    names = sorted(instance.name for instance in get_instances())
    ids = list(range(10, 210))
    for engine in engines:
        engine.generate(input_ids=ids, sampling_params=SAMPLING)
    result = set_prefix_cache_retention_limit(0, instance_name=names[-1], wait=30)
    cached = [
        engine.generate(input_ids=ids, sampling_params=SAMPLING)["meta_info"]["cached_tokens"] for engine in engines
    ]
    for engine in engines:
        engine.shutdown()
    shown = [name.replace(str(os.getpid()), "PID") for name in names]
    left = os.environ.get("KVCACHED_INSTANCE_NAME", "")
    sys.stdout.write(json.dumps({"names": shown, "applied": result.applied, "cached": cached, "left": left}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
