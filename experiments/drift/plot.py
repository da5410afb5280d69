"""Acceptance over the steps of a policy that moves, one line an arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAMES = {
    "frozen": "frozen head",
    "every": "refreshed every n updates",
    "measured": "refreshed by measurement",
    "history": "suffix trees, no head",
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    steps = [row["step"] for row in rows]
    for name, label in NAMES.items():
        lengths = [row["arms"][name]["acceptance_length"] for row in rows]
        [line] = top.plot(steps, lengths, label=label)
        new = [i for i, row in enumerate(rows) if row["arms"][name].get("refreshed")]
        top.plot([steps[i] for i in new], [lengths[i] for i in new], "o", color=line.get_color())
    top.set_ylabel("acceptance length")
    top.legend()
    bottom.plot(steps, [row["reward"] for row in rows], color="black")
    bottom.set_ylabel("mean reward")
    bottom.set_xlabel("optimiser steps")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
