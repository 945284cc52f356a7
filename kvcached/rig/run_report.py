"""The report of a run and its time series, as files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvcached.rig.config import RigConfig
    from kvcached.rig.worker import Done


def build_report(config: RigConfig, results: Sequence[Done]) -> dict[str, Any]:
    """Return the report of a whole run, JSON-ready."""
    return {
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        **results[0].totals,
        "block_tokens": config.block_tokens,
        "capacity_tokens": config.capacity_tokens,
        "token_bytes": config.token_bytes,
        "ranks": [one.report for one in results],
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write ``report`` to ``path`` as one JSON object."""
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def write_timeline(path: Path, results: Sequence[Done]) -> None:
    """Write the samples of all ranks to ``path``, one JSON object a line, in order of time."""
    samples = sorted((sample for one in results for sample in one.samples), key=_sample_order)
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")


def _sample_order(sample: dict[str, Any]) -> tuple[float, int]:
    return sample["t"], sample["rank"]
