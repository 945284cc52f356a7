"""Draws idle tokens and limit over time, one panel per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from rig_process import Publication

INK = "#22303c"
FAINT = "#8a97a3"
LIMIT = "#d1495b"
RANK_COLOURS = ("#1b6ca8", "#2a9d8f", "#7a5ea8", "#c9822b")


def draw(
    path: Path,
    samples: Sequence[dict[str, Any]],
    publications: Sequence[Publication],
    report: dict[str, Any],
) -> None:
    """Write the picture of a run to ``path``."""
    ranks = len(report["ranks"])
    figure, panels = plt.subplots(ranks, 1, sharex=True, sharey=True, figsize=(11, 1.1 + 1.55 * ranks), dpi=140)
    end_s = max(sample["t"] for sample in samples)
    top = max(max(one["idle_tokens"], one["limit_tokens"]) for one in samples) * 1.25
    for rank, panel in enumerate(panels):
        _draw_rank(panel, rank, [one for one in samples if one["rank"] == rank], end_s)
        _draw_publications(panel, report["ranks"][rank]["updates"], top)
    panels[0].set_ylim(0, top)
    panels[0].set_xlim(0, end_s)
    _name_publications(panels[0], publications, report["ranks"][0]["updates"], top)
    _shade_idle(panels, samples, end_s)
    panels[-1].set_xlabel("seconds since the engine was ready", color=INK)
    figure.suptitle(
        "Idle prefix-cache tokens follow the limit, on all ranks at the same step",
        x=0.075,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=INK,
    )
    idle, limit = Patch(color=FAINT, alpha=0.5), Line2D([], [], color=LIMIT)
    figure.legend([idle, limit], ["idle tokens", "limit"], loc="upper right", ncols=2, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.995))
    figure.savefig(path)
    plt.close(figure)


def _draw_rank(panel: Axes, rank: int, samples: Sequence[dict[str, Any]], end_s: float) -> None:
    times = [one["t"] for one in samples] + [end_s]
    idle = [one["idle_tokens"] for one in samples]
    limits = [one["limit_tokens"] for one in samples]
    colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
    panel.fill_between(times, [*idle, idle[-1]], step="post", color=colour, alpha=0.28, linewidth=0)
    panel.step(times, [*idle, idle[-1]], where="post", color=colour, linewidth=1.4)
    panel.step(times, [*limits, limits[-1]], where="post", color=LIMIT, linewidth=1.6)
    panel.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", color=colour, fontweight="bold")
    panel.yaxis.set_major_formatter(FuncFormatter(_short))
    panel.tick_params(colors=INK, labelsize=8.5)
    panel.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(FAINT)


def _draw_publications(panel: Axes, updates: Sequence[dict[str, Any]], top: float) -> None:
    """Mark on a rank's panel when it applied each publication, and at which scheduler step."""
    for update in updates:
        panel.axvline(update["time_s"], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
        panel.annotate(
            f"step {update['step']:,}",
            (update["time_s"], top),
            xytext=(4, -3),
            textcoords="offset points",
            va="top",
            fontsize=7.5,
            color=FAINT,
        )


def _name_publications(
    panel: Axes,
    publications: Sequence[Publication],
    updates: Sequence[dict[str, Any]],
    top: float,
) -> None:
    """Write above the first panel what was published."""
    for publication, update in zip(publications, updates, strict=False):
        panel.annotate(
            f"set {publication.limit}",
            (update["time_s"], top),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9.5,
            fontweight="bold",
            family="monospace",
            color=INK,
            annotation_clip=False,
        )


def _shade_idle(panels: Sequence[Axes], samples: Sequence[dict[str, Any]], end_s: float) -> None:
    """Shade the time in which the engine has no request left."""
    busy = [sample["t"] for sample in samples if sample["active_tokens"] > 0]
    if not busy or max(busy) >= end_s:
        return
    for panel in panels:
        panel.axvspan(max(busy), end_s, color=FAINT, alpha=0.12, linewidth=0)
    panels[0].text(
        end_s - 0.15,
        0.64,
        "engine idles",
        ha="right",
        transform=panels[0].get_xaxis_transform(),
        fontsize=8.5,
        color=INK,
        style="italic",
    )


def _short(tokens: float, _position: int) -> str:
    """Write 1200000 as 1.2 m, as limits are given on the command line."""
    for size, unit in ((1_000_000, "m"), (1_000, "k")):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"
