"""Draws idle tokens, limit and cap over time, one panel per rank, and the memory that the kernel counts for each."""

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
    from matplotlib.figure import Figure
    from memory_sampler import MemorySample
    from rig_process import Publication

INK = "#22303c"
FAINT = "#8a97a3"
LIMIT = "#d1495b"
CAP = "#22303c"
RANK_COLOURS = ("#1b6ca8", "#2a9d8f", "#7a5ea8", "#c9822b")


def draw(
    path: Path,
    samples: Sequence[dict[str, Any]],
    publications: Sequence[Publication],
    report: dict[str, Any],
    memory: Sequence[MemorySample],
) -> None:
    """Write the picture of a run to ``path``."""
    ranks = len(report["ranks"])
    figure = plt.figure(figsize=(11, 4.2 + 1.35 * ranks), dpi=140)
    grid = figure.add_gridspec(ranks + 1, 1, height_ratios=[1.0] * ranks + [1.9])
    panels = [figure.add_subplot(grid[0])]
    panels += [figure.add_subplot(grid[row], sharex=panels[0], sharey=panels[0]) for row in range(1, ranks)]
    bottom = figure.add_subplot(grid[ranks], sharex=panels[0])
    end_s = max(sample["t"] for sample in samples)
    top = max(max(one["idle_tokens"], one["limit_tokens"]) for one in samples) * 1.25
    for rank, panel in enumerate(panels):
        _draw_rank(panel, rank, [one for one in samples if one["rank"] == rank], end_s)
        _draw_publications(panel, _publications_of(report["ranks"][rank]), top)
        panel.tick_params(labelbottom=False)
    panels[0].set_ylim(0, top)
    panels[0].set_xlim(0, end_s)
    _name_publications(panels[0], publications, _publications_of(report["ranks"][0]), top)
    _draw_memory(bottom, memory, [one for one in samples if one["rank"] == 0], report)
    _shade_idle([*panels, bottom], samples, end_s)
    bottom.set_xlabel("seconds since the engine was ready", color=INK)
    _title(figure)
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    figure.savefig(path)
    plt.close(figure)


def _title(figure: Figure) -> None:
    figure.suptitle(
        "Tokens and memory follow the limit and the cap, on all ranks at the same step",
        x=0.075,
        ha="left",
        fontsize=12.5,
        fontweight="bold",
        color=INK,
    )
    handles = [Patch(color=FAINT, alpha=0.5), Line2D([], [], color=LIMIT), Line2D([], [], color=CAP, linestyle=":")]
    figure.legend(
        handles,
        ["idle tokens", "limit", "cap"],
        loc="upper right",
        ncols=3,
        frameon=False,
        fontsize=8.5,
    )


def _publications_of(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a rank noted of limits and caps, in order of time."""
    return sorted([*rank["updates"], *rank["caps"]], key=lambda one: one["time_s"])


def _draw_memory(
    panel: Axes, memory: Sequence[MemorySample], samples: Sequence[dict[str, Any]], report: dict[str, Any]
) -> None:
    """Draw the kernel's count of the memory of each rank's KV pool, and the cap in bytes."""
    pool = report["capacity_tokens"] * report["token_bytes"]
    times = [one.at_s for one in memory]
    for rank in range(len(report["ranks"])):
        held = [one.pool_bytes[rank] / 1e6 for one in memory]
        colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
        panel.plot(times, held, color=colour, linewidth=1.4, drawstyle="steps-post", alpha=0.85)
    caps = [_capped(one["cap_tokens"], report) * report["token_bytes"] / 1e6 for one in samples]
    panel.step([one["t"] for one in samples], caps, where="post", color=CAP, linestyle=":", linewidth=1.8)
    panel.set_ylim(0, pool / 1e6 * 1.15)
    panel.set_ylabel("MB of KV per rank,\ncounted by the kernel", color=INK, fontsize=9)
    _dress(panel)


def _capped(cap_tokens: int, report: dict[str, Any]) -> int:
    return report["capacity_tokens"] if cap_tokens < 0 else min(cap_tokens, report["capacity_tokens"])


def _draw_rank(panel: Axes, rank: int, samples: Sequence[dict[str, Any]], end_s: float) -> None:
    times = [one["t"] for one in samples] + [end_s]
    idle = [one["idle_tokens"] for one in samples]
    limits = [one["limit_tokens"] for one in samples]
    colour = RANK_COLOURS[rank % len(RANK_COLOURS)]
    panel.fill_between(times, [*idle, idle[-1]], step="post", color=colour, alpha=0.28, linewidth=0)
    panel.step(times, [*idle, idle[-1]], where="post", color=colour, linewidth=1.4)
    panel.step(times, [*limits, limits[-1]], where="post", color=LIMIT, linewidth=1.6)
    caps = [one["cap_tokens"] if one["cap_tokens"] >= 0 else float("nan") for one in samples]
    panel.step(times, [*caps, caps[-1]], where="post", color=CAP, linewidth=1.6, linestyle=":")
    panel.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center", color=colour, fontweight="bold")
    panel.yaxis.set_major_formatter(FuncFormatter(_short))
    _dress(panel)


def _dress(panel: Axes) -> None:
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
    for place, (publication, update) in enumerate(zip(publications, updates, strict=False)):
        panel.annotate(
            f"{publication.command} {publication.limit}",
            (update["time_s"], top),
            xytext=(0, 4 + 11 * (place % 2)),
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
