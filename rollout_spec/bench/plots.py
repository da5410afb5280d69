"""The three pictures of the report, each as SVG to embed (for a wide and a narrow page) and as PNG file."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rollout_spec.bench import verdict
from rollout_spec.bench.results import Arm, Results, Run, speedup_by_live_batch
from rollout_spec.bench.table import one_line

# Okabe and Ito's palette, told apart with any colour vision; black is for text, the yellow is too faint on white.
OURS_COLOURS = ("#0072B2", "#56B4E9")
OTHER_COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#7F7F7F")
K_COLOUR = "#D55E00"
OFF_COLOUR = "#555555"
INK, FAINT = "#222222", "#DDDDDD"
MARKERS = "os^Dvp"
# Beyond this many changes a step line is a solid block, so the picture shows means over bins instead.
MOST_CHANGES = 60
BINS = 100
WIDE, NARROW = 8.6, 4.4
"""Inches; both are drawn with the same type, so that a phone gets a legible picture."""

STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.fonttype": "none",
    "figure.constrained_layout.use": True,
}


class Plot(NamedTuple):
    name: str
    caption: str
    wide_svg: str
    narrow_svg: str
    png: bytes


def draw_all(results: Results) -> list[Plot]:
    """Those of the three that the results have data for."""
    plots = []
    makers: dict[str, Callable[[Results, float], tuple[Figure, str] | None]] = {
        "timeline": timeline,
        "makespan": makespan,
        "speedup_by_live_batch": by_live_batch,
    }
    for name, make in makers.items():
        with matplotlib.rc_context(STYLE):
            wide, narrow = make(results, WIDE), make(results, NARROW)
            if wide and narrow:
                figure, caption = wide
                plots.append(Plot(name, caption, _svg(figure, name), _svg(narrow[0], name + "-narrow"), _png(figure)))
    return plots


def save_pngs(plots: list[Plot], folder: Path) -> None:
    for plot in plots:
        (folder / f"{plot.name}.png").write_bytes(plot.png)


def timeline(results: Results, width: float) -> tuple[Figure, str] | None:
    """Live sequences and K over time for ours (else the first arm that speculates), off's live ones beside."""
    arm = next(iter(verdict.ours(results)), None) or next(
        (arm for arm in results.arms if arm is not results.off and arm.runs), results.off
    )
    run = _typical(arm) if arm else None
    if arm is None or run is None or not run.timeline.t_s or run.timeline.t_s[-1] <= 0:
        return None
    off = results.off if results.off is not arm else None
    off_run = (off.run(run.repeat) or _typical(off)) if off else None
    figure, axes = _figure(f"Live sequences and draft tokens K over the rollout, arm {one_line(arm.name)}", width, 3.9)
    edges = np.array([0.0, *run.timeline.t_s])
    axes.stairs(*_steps(edges, run.timeline.live), fill=True, color=OURS_COLOURS[1], alpha=0.45, linewidth=0)
    handles: list[Any] = [
        axes.fill_between([], [], color=OURS_COLOURS[1], alpha=0.45, label=f"live, {one_line(arm.name)}")
    ]
    if off and off_run and off_run.timeline.t_s:
        off_edges = np.array([0.0, *off_run.timeline.t_s])
        axes.stairs(*_steps(off_edges, off_run.timeline.live), color=OFF_COLOUR, linewidth=1.0, baseline=0)
        handles += axes.plot([], [], color=OFF_COLOUR, linewidth=1.0, label=f"live, {one_line(off.name)}")
    axes.set(xlabel="time since the rollout began (s)", ylabel="live sequences", ylim=(0, None), xlim=(0, None))
    right = axes.twinx()
    right.spines["right"].set_visible(True)
    binned = np.count_nonzero(np.diff(run.timeline.k)) > MOST_CHANGES
    if binned:
        bins, means = _binned(edges, run.timeline.k)
        right.stairs(means, bins, color=K_COLOUR, linewidth=1.6, baseline=None, clip_on=False)
    else:
        right.stairs(*_steps(edges, run.timeline.k), color=K_COLOUR, linewidth=1.6, baseline=None, clip_on=False)
    label = f"K, mean over {edges[-1] / BINS:.2g} s" if binned else "K"
    handles += right.plot([], [], color=K_COLOUR, linewidth=1.4, label=label)
    right.set_ylim(0, max(1, *run.timeline.k) * 1.05)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylabel("K, draft tokens per sequence", color=K_COLOUR)
    right.tick_params(axis="y", colors=K_COLOUR)
    _legend(axes, handles, width)
    caption = (
        f"Repeat {run.repeat} of {one_line(arm.name)}, the run nearest to the median makespan. A sequence is live "
        "from its first engine step to its last. K is the number of draft tokens verified in the step; "
        "0 means plain decoding."
    )
    if binned:
        caption += " It changed too often to draw each step: the line is its mean over short spans of time."
    return figure, caption


def makespan(results: Results, width: float) -> tuple[Figure, str] | None:
    arms = [arm for arm in results.arms if arm.makespan_s]
    if not arms:
        return None
    figure, axes = _figure("Time to finish the whole rollout, by arm", width, 1.3 + 0.46 * len(arms))
    ours = verdict.ours(results)
    for row, arm in enumerate(arms):
        spread = arm.makespan_s
        assert spread is not None
        axes.barh(row, spread.median, height=0.56, color=OURS_COLOURS[0] if arm in ours else "#BBBBBB")
        times = [run.makespan_s for run in arm.runs]
        axes.plot([spread.min, spread.max], [row, row], color=INK, linewidth=1.2, marker="|", markersize=9)
        axes.plot(times, [row] * len(times), "o", color="white", markeredgecolor=INK, markersize=4.5)
        axes.annotate(
            f"{spread.median:.4g} s", (spread.max, row), (8, 0), textcoords="offset points", va="center", fontsize=9.5
        )
    axes.set_yticks(range(len(arms)), [_label(arm, width) for arm in arms])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set(
        xlabel="makespan (s), shorter is better", xlim=(0, max(a.makespan_s.max for a in arms if a.makespan_s) * 1.16)
    )
    return figure, "Bar and figure: median of the runs. Whisker: shortest to longest run. Dots: the runs."


def by_live_batch(results: Results, width: float) -> tuple[Figure, str] | None:
    off = results.off
    lines = [(arm, speedup_by_live_batch(arm, off)) for arm in results.arms if off and arm is not off]
    lines = [(arm, points) for arm, points in lines if points]
    if not lines:
        return None
    buckets = sorted({(point.lo, point.hi) for _, points in lines for point in points})
    figure, axes = _figure("Speed-up over off, by number of live sequences", width, 3.7)
    axes.axhline(1.0, color=OFF_COLOUR, linewidth=1.2, linestyle=(0, (4, 3)))
    ours = verdict.ours(results)
    others = iter(range(len(lines)))
    for arm, points in lines:
        x = [buckets.index((point.lo, point.hi)) for point in points]
        y = [point.speedup for point in points]
        if arm in ours:
            colour = OURS_COLOURS[ours.index(arm) % len(OURS_COLOURS)]
            axes.plot(x, y, color=colour, linewidth=2.8, marker="o", markersize=6, label=_label(arm), zorder=4)
        else:
            i = next(others)
            colour, marker = OTHER_COLOURS[i % len(OTHER_COLOURS)], MARKERS[1 + i % (len(MARKERS) - 1)]
            axes.plot(x, y, color=colour, linewidth=1.3, marker=marker, markersize=5, label=_label(arm))
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))
    axes.set_xticks(range(len(buckets)), [f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in buckets])
    axes.margins(x=0.04)
    axes.grid(axis="y")
    axes.set(xlabel="live sequences in the engine step", ylabel="tokens/s relative to off")
    _legend(axes, axes.get_legend_handles_labels()[0], width)
    return figure, (
        "Tokens per second in the engine steps with that many live sequences, divided by off's; "
        "paired runs pooled. Dashed line: as fast as off. Arms differ in which sequences are left, and so in "
        "context length, when few are live."
    )


def _figure(title: str, width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    figure.suptitle(
        "\n".join(textwrap.wrap(title, int(width * 10))), x=0.012, ha="left", fontsize=11, fontweight="bold"
    )
    return figure, figure.add_subplot()


def _legend(axes: Axes, handles: list[Any], width: float) -> None:
    columns = min(len(handles), 4 if width > NARROW else 1)
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, fontsize=9.5,
        borderpad=0.2, columnspacing=1.6,
    )  # fmt: skip


def _label(arm: Arm, width: float = WIDE) -> str:
    name = one_line(arm.name)
    return name if width > NARROW or len(name) <= 16 else name[:15] + "…"


def _typical(arm: Arm) -> Run | None:
    """The run nearest to the arm's median makespan."""
    if arm.makespan_s is None:
        return None
    middle = arm.makespan_s.median
    return min(arm.runs, key=lambda run: abs(run.makespan_s - middle))


def _steps(edges: np.ndarray[Any, Any], values: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values and edges without the edges where nothing changes: a long rollout stays a small picture."""
    array = np.array(values)
    starts = np.flatnonzero(np.diff(array, prepend=array[0] - 1))
    return array[starts], np.append(edges[starts], edges[-1])


def _binned(edges: np.ndarray[Any, Any], values: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bin edges and the means over time of a step function."""
    area = np.concatenate([[0.0], np.cumsum(np.array(values) * np.diff(edges))])
    bins = np.linspace(0.0, edges[-1], BINS + 1)
    return bins, np.diff(np.interp(bins, edges, area)) / np.diff(bins)


def _svg(figure: Figure, name: str) -> str:
    """The bare element: no prologue, no metadata, names that don't clash with another picture on the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", r'<svg \1 role="img">', svg, count=1)
    return re.sub(r' id="(figure|axes|patch|text|line2d|matplotlib|xtick|ytick|legend|LineC|Quad|FillB)[^"]*"', "", svg)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
