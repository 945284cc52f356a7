"""Run a vLLM server under load and four caps, and draw what the kernel counts of its memory: docs/vllm-memory.png.

Takes about two minutes on a quiet machine, and makes the engine's environment first. ``--figures FILE`` draws what an
earlier run wrote there, or keeps what this one measures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "vllm-memory.png"
MEASUREMENT = ROOT / "tests" / "engines" / "vllm" / "vllm_memory_timeline.py"
INK, FAINT, KERNEL, CAP = "#22303c", "#8a97a3", "#1b6ca8", "#d1495b"
MIB = 1 << 20


def measure() -> dict[str, Any]:
    """Run the server in its own environment; return what was measured."""
    subprocess.run([ROOT / "scripts" / "test", "--engines", "vllm", "--prepare-only"], check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(MEASUREMENT.parent), "PYTHONSAFEPATH": "1"}
    command = [ROOT / ".venvs" / "vllm" / "bin" / "python", MEASUREMENT]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def draw(figures: dict[str, Any]) -> None:
    """Write the picture."""
    figure, panel = plt.subplots(figsize=(10, 4.2), dpi=140)
    end_s = figures["samples"][-1][0]
    seconds, kernel, resident = zip(*figures["samples"], strict=True)
    panel.plot(seconds, [each / MIB for each in kernel], color=KERNEL, linewidth=1.8)
    panel.plot(seconds, [each / MIB for each in resident], color=FAINT, linewidth=1.2, linestyle="--")
    _draw_caps(panel, figures, end_s)
    panel.text(
        end_s,
        kernel[-1] / MIB,
        "  anonymous memory of\n  engine core and worker,\n  as the kernel counts it",
        color=KERNEL,
    )
    panel.text(end_s, resident[-1] / MIB, "  its KV, as the engine\n  reports it", color=FAINT)
    panel.set_xlim(0, end_s)
    panel.set_ylim(0, 1.25 * max(kernel) / MIB)
    panel.set_xlabel("seconds under a steady load of prompts that share nothing", color=INK)
    panel.set_ylabel("MiB", color=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(
        "vLLM on the CPU under load: caps of 50, 25, 75 and 12.5 % of its pool",
        loc="left",
        color=INK,
        fontweight="bold",
    )
    figure.tight_layout(rect=(0, 0, 0.98, 1))
    figure.savefig(PICTURE, bbox_inches="tight")
    plt.close(figure)


def _draw_caps(panel: Axes, figures: dict[str, Any], end_s: float) -> None:
    """Draw each cap from its publication to the next one, with its share of the pool."""
    caps = figures["caps"]
    ends = [published_s for published_s, _, _ in caps[1:]] + [end_s]
    for (published_s, _, tokens), stop_s in zip(caps, ends, strict=True):
        height = tokens * figures["token_bytes"]
        panel.hlines(height / MIB, published_s, stop_s, color=CAP, linewidth=1.2, linestyle=":")
        panel.axvline(published_s, color=CAP, linewidth=0.6, alpha=0.5)
        share = f"{100 * height / figures['pool_bytes']:.1f}".removesuffix(".0")
        top = 1.22 * max(kernel for _, kernel, _ in figures["samples"]) / MIB
        panel.text(published_s + 0.006 * end_s, top, f"{share} %", color=CAP, fontsize=8.5, va="top")


def main() -> None:
    """Measure unless there are figures, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", type=Path, metavar="FILE")
    file = parser.parse_args().figures
    if file is not None and file.exists():
        draw(json.loads(file.read_text()))
        return
    figures = measure()
    if file is not None:
        file.write_text(json.dumps(figures))
    draw(figures)


if __name__ == "__main__":
    main()
