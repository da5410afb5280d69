"""The comparison of arms as a table: rows of text, shared by the terminal, Markdown and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from statistics import median

from rollout_spec.bench.results import Arm, Results, Run, Spread

HEADERS = (
    "arm",
    "drafter",
    "makespan s [min-max]",
    "speed-up [low-high]",
    "tokens/s",
    "acc. len",
    "drafted",
    "mean K",
)
LEFT = 2
"""Columns aligned left; the rest hold figures."""
WIDTH = 110
GAP = "  "
NAME_WIDTH_LEAST = 8
DRAFTER_WIDTH = 11
NONE = "-"


def rows(results: Results) -> list[tuple[str, ...]]:
    """One row an arm; figures of several runs are medians, `-` stands for what wasn't measured."""
    return [_row(arm, is_off=arm is results.off) for arm in results.arms]


def render(results: Results) -> str:
    """Aligned plain text, at most 110 columns: long names are cut to what the figures leave."""
    table = [HEADERS, *((row[0], _cut(row[1], DRAFTER_WIDTH), *row[2:]) for row in rows(results))]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADERS))]
    left = WIDTH - sum(widths[1:]) - len(GAP) * (len(HEADERS) - 1)
    widths[0] = min(widths[0], max(left, NAME_WIDTH_LEAST))
    table = [(_cut(row[0], widths[0]), *row[1:]) for row in table]
    lines = [GAP.join(_pad(cell, widths[i], i) for i, cell in enumerate(row)).rstrip() for row in table]
    lines.insert(1, GAP.join("-" * width for width in widths))
    return "\n".join(lines)


def mean_k(runs: list[Run]) -> float | None:
    """Mean K over the engine steps that verified any draft."""
    steps: Counter[int] = Counter()
    for run in runs:
        steps.update({k: count for k, count in run.k_histogram.items() if k > 0})
    return sum(k * count for k, count in steps.items()) / steps.total() if steps.total() else None


def _row(arm: Arm, is_off: bool) -> tuple[str, ...]:
    makespan, ratio, k = arm.makespan_s, arm.speedup_over_off, mean_k(arm.runs)
    speed = NONE if ratio is None else f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]"
    return (
        one_line(arm.name),
        one_line(arm.drafter or NONE),
        NONE if makespan is None else _seconds(makespan),
        "1 (reference)" if is_off and ratio else speed,
        _median(arm, lambda run: run.output_tokens / run.makespan_s, ".0f"),
        _median(arm, lambda run: run.acceptance_length, ".2f"),
        _median(arm, lambda run: run.draft_tokens, ".0f"),
        NONE if k is None else f"{k:.1f}",
    )


def _median(arm: Arm, figure: Callable[[Run], float | None], form: str) -> str:
    values = [value for run in arm.runs if (value := figure(run)) is not None]
    return format(median(values), form) if values else NONE


def _seconds(spread: Spread) -> str:
    """To about four digits."""
    digits = 2 if spread.max < 100 else 1 if spread.max < 1000 else 0
    return f"{spread.median:.{digits}f} [{spread.min:.{digits}f}-{spread.max:.{digits}f}]"


def one_line(text: str) -> str:
    """Without line breaks and control characters, which would break a table or drive a terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < LEFT else cell.rjust(width)
