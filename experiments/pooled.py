"""Benchmark results at one speed of the machine: each step counts what steps like it took in the mean of all runs.

    python experiments/pooled.py experiments/draft_head/t0_clipped ...     # reads results.json, prints a table

On a shared machine the same arm takes 13 s in one minute and 20 s in another, which hides what a choice of K is worth.
Which steps an arm made does not depend on that. A step of K draft tokens and n sequences is therefore counted at the
mean over the steps of all runs with the same K (without a drafter: of those) and n within `NEAR`. The ratios are of
these sums: less noise, but not a measured makespan. What is left of the noise is that of a K that few runs used.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Sequences of like steps: between n / NEAR and n * NEAR.
NEAR = 1.3


def pooled(arms: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each arm's runs."""
    rows = [
        (arm["drafter"] is None, k, live, seconds, index, run["repeat"])
        for index, arm in enumerate(arms)
        for run in arm["runs"]
        for seconds, live, k in zip(
            np.diff([0.0, *run["timeline"]["t_s"]]), run["timeline"]["live"], run["timeline"]["k"], strict=True
        )
    ]
    plain, ks, live, seconds, of, repeat = np.array(rows, dtype=np.float64).T
    counted: NDArray[np.float64] = np.empty_like(seconds)
    for without in np.unique(plain):
        for k in np.unique(ks):
            (like,) = np.nonzero((plain == without) & (ks == k))
            for n in np.unique(live[like]):
                near = like[(live[like] >= n / NEAR) & (live[like] <= n * NEAR)]
                counted[like[live[like] == n]] = seconds[near].mean()
    return {
        arm["name"]: [float(counted[(of == index) & (repeat == run["repeat"])].sum()) for run in arm["runs"]]
        for index, arm in enumerate(arms)
    }


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        arms = json.loads((folder / "results.json").read_text())["arms"]
        found = pooled(arms)
        base = found["off"]
        print(f"{folder}\n{'arm':<12}{'pooled over off':>24}{'measured over off':>28}")
        for arm in arms:
            ratios = [off / own for off, own in zip(base, found[arm["name"]], strict=True)]
            seen = arm["speedup_over_off"]
            print(
                f"{arm['name']:<12}{median(ratios):>10.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
                f"{seen['median']:>14.2f} [{seen['low']:.2f}-{seen['high']:.2f}]"
            )


if __name__ == "__main__":
    main()
