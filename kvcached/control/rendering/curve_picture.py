"""Hit-rate curves as a picture, with measured runs as points where there are some."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

from kvcached.control.queries.recommendation import PROMISE
from kvcached.control.rendering.curve_text import short

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from kvcached.control.queries.recommendation import Advice

INK = "#22303c"
FAINT = "#8a97a3"
CURVE = "#1b6ca8"
LIMIT = "#d1495b"
ADVICE = "#2a9d8f"


def draw_curves(
    path: str, name: str, advices: Sequence[Advice], runs: Sequence[Mapping[int, float]] = (), title: str = ""
) -> None:
    """Write a picture with one panel per replica to ``path``; ``runs`` are rates by limit that were measured."""
    known = [advice for advice in advices if advice.curve is not None]
    figure, panels = plt.subplots(1, max(1, len(known)), squeeze=False, figsize=(max(9, 6 * len(known)), 4.8), dpi=140)
    for number, (panel, advice) in enumerate(zip(panels[0], known, strict=False)):
        _draw(panel, advice, runs[number] if number < len(runs) else {})
        if len(known) > 1:
            panel.set_title(f"replica {advice.replica}", loc="left", color=INK, fontsize=10)
    text = title or f"{name}: prefix-cache hit rate over the limit"
    figure.suptitle(text, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path)
    plt.close(figure)


def _draw(panel: Axes, advice: Advice, runs: Mapping[int, float]) -> None:
    curve = advice.curve
    if curve is None:
        return
    limits = [curve.limits[0] / 2, *curve.limits]  # the first one stands for limit 0, which a logarithm does not have
    rates = [rate for _, rate in curve.points()]
    panel.set_xscale("log", base=2)
    panel.fill_between(
        limits,
        [rate - PROMISE for rate in rates],
        [rate + PROMISE for rate in rates],
        color=CURVE,
        alpha=0.12,
        lw=0,
    )
    panel.plot(limits, rates, color=CURVE, lw=2, label=f"predicted, ± {PROMISE}")
    if curve.values[-1] - rates[-1] > PROMISE / 2:
        panel.plot(limits, curve.values, color=CURVE, lw=1.2, ls=":", label="in a larger pool")
    if runs:
        places = [max(limit, limits[0]) for limit in runs]
        panel.plot(places, list(runs.values()), "o", ms=7, mfc="white", mec=INK, mew=1.6, label="real runs", zorder=4)
    _mark_limit(panel, advice, limits)
    room = curve.room_tokens
    if limits[0] < room < limits[-1]:
        panel.axvspan(room, limits[-1], color=FAINT, alpha=0.15, lw=0, label="beyond the free space")
    if advice.advised_limit_tokens is not None:
        at = max(advice.advised_limit_tokens, limits[0])
        panel.plot([at], [advice.wanted or 0.0], "*", ms=19, color=ADVICE, mec="white", label="advice", zorder=5)
        panel.annotate(
            f"{advice.advised_limit_tokens:,} tokens\nfor {advice.wanted:.3f}",
            (at, advice.wanted or 0.0),
            xytext=(-14, 6),
            textcoords="offset points",
            ha="right",
            color=ADVICE,
            fontweight="bold",
            fontsize=10,
            bbox={"fc": "white", "ec": "none", "alpha": 0.85, "pad": 1.5},
        )
    _dress(panel, limits)


def _mark_limit(panel: Axes, advice: Advice, limits: Sequence[float]) -> None:
    """Draw the limit in force with the rate that was measured at it."""
    curve, limit = advice.curve, advice.limit_tokens
    if curve is None or limit is None:
        return
    at = max(min(curve.room_tokens, limits[-1]) if limit < 0 else limit, limits[0])
    panel.axvline(at, color=LIMIT, lw=1.2, ls=(0, (4, 3)), label="limit in force")
    panel.plot([at], [curve.measured], "D", ms=7, color=LIMIT, mec="white", label="measured at it", zorder=4)


def _dress(panel: Axes, limits: Sequence[float]) -> None:
    ticks = [limits[0]]
    while ticks[-1] * 4 <= limits[-1]:
        ticks.append(ticks[-1] * 4)
    panel.set_xticks(ticks)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: "0" if tick <= limits[0] else short(tick)))
    panel.set_xlim(limits[0], limits[-1] * 1.1)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("limit: idle tokens kept", color=INK)
    panel.set_ylabel("hit tokens / prompt tokens", color=INK)
    panel.grid(color=FAINT, alpha=0.25, lw=0.6)
    panel.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.legend(frameon=False, fontsize=9, loc="upper left")
