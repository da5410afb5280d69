"""What results.json of `run.py` says, by arm: rewards, probabilities, times against plain verl, acceptance over steps.

python experiments/verl/report.py [results.json]      # a table, and plots beside the file
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

REWARD, LENGTH = "critic/score/mean", "rollout/spec_accept_length"
DIFF = "training/rollout_probs_diff"

OURS = "rollout_spec/collect_seconds"
UPDATE = "update_actor"

Steps = list[dict[str, Any]]


def ends(steps: Steps) -> tuple[float, float]:
    """Mean reward of the first and the last sixth."""
    rewards, share = [step[REWARD] for step in steps], max(len(steps) // 6, 1)
    return statistics.mean(rewards[:share]), statistics.mean(rewards[-share:])


def has(steps: Steps, name: str) -> bool:
    return all(name in step for step in steps)


def token_ms(steps: Steps, part: str) -> float:
    """Of `part` of a step, over all steps but those that begin a job, or go on with one: they start everything up. A
    total and no median: verl's trainer asks every 2 seconds whether the rollout is done, and only a sum is finer."""
    counted = [step for step in steps if not step["training/starts_up"]]
    tokens = [step[f"timing_s/{part}"] / step[f"timing_per_token_ms/{part}"] for step in counted]
    return sum(step[f"timing_s/{part}"] for step in counted) / sum(tokens)


def ratios(pairs: Sequence[tuple[Steps, Steps]], part: str) -> str:
    return spread([token_ms(ours, part) / token_ms(plain, part) for ours, plain in pairs])


def alike(pairs: Sequence[tuple[Steps, Steps]]) -> str:
    """Of rollouts as long as these, over plain verl's: responses differ from job to job, and a rollout takes as many
    decode steps as its longest response. Least squares over plain verl's steps, on their longest and mean length."""
    found = []
    for ours, plain in pairs:
        fit, *_ = np.linalg.lstsq(*shapes(plain), rcond=None)
        lengths, took = shapes(ours)
        found.append(float(took.sum() / (lengths @ fit).sum()))
    return spread(found)


def shapes(steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """(steps, 3): one, longest and mean length of the responses; and (steps,): seconds of the rollout."""
    counted = [step for step in steps if not step["training/starts_up"]]
    lengths = [[1.0, step["response_length/max"], step["response_length/mean"]] for step in counted]
    return np.array(lengths), np.array([step["timing_s/gen"] for step in counted])


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}-{max(values):.3f}]"


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results.json"
    runs: dict[str, dict[int, Steps]] = defaultdict(dict)
    for run in json.loads(path.read_text())["runs"]:
        runs[run["arm"]][run["seed"]] = run["steps"]
    print("median [range] over the seeds; time a generated token over plain verl's of the same seed")
    for arm, seeds in runs.items():
        first, last = zip(*(ends(steps) for steps in seeds.values()), strict=True)
        print(f"{arm:10} reward {spread(first)} -> {spread(last)}")
        if all(has(steps, f"{DIFF}_mean") for steps in seeds.values()):
            mean = [statistics.mean(step[f"{DIFF}_mean"] for step in steps) for steps in seeds.values()]
            most = [max(step[f"{DIFF}_max"] for step in steps) for steps in seeds.values()]
            print(f"{'':10} probabilities differ by {spread(mean)} on average, {spread(most)} at most")
        took = [statistics.median(step[OURS] for step in steps) for steps in seeds.values() if has(steps, OURS)]
        if took:
            print(f"{'':10} the option's own {spread(took)} s a step outside of the rollout")
        lengths = [step[LENGTH] for steps in seeds.values() for step in steps[len(steps) * 2 // 3 :] if LENGTH in step]
        if lengths:
            print(f"{'':10} acceptance length {statistics.mean(lengths):.2f} in the last third")
        plain = runs.get("plain", {}) if arm != "plain" else {}
        pairs = [(steps, plain[seed]) for seed, steps in seeds.items() if seed in plain]
        if pairs:
            late = [(ours[len(ours) * 2 // 3 :], other[len(other) * 2 // 3 :]) for ours, other in pairs]
            print(f"{'':10} rollout time a token {ratios(pairs, 'gen')}, in the last third {ratios(late, 'gen')}")
            print(f"{'':10} rollout time over plain verl's of rollouts as long {alike(pairs)}")
            # What speculation cannot change tells how like the hours were.
            if all(has(steps, f"timing_s/{UPDATE}") for pair in pairs for steps in pair):
                print(f"{'':10} update time a token  {ratios(pairs, UPDATE)}, in the last third {ratios(late, UPDATE)}")
    plot(runs, path.parent)


def plot(runs: dict[str, dict[int, Steps]], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, value, title in (("reward", REWARD, "mean reward"), ("acceptance", LENGTH, "acceptance length")):
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        for number, (arm, seeds) in enumerate(runs.items()):
            for index, steps in enumerate(seeds.values()):
                points = [(at, step[value]) for at, step in enumerate(steps, 1) if value in step]
                if points:
                    axes.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.6, label=None if index else arm)
        axes.set(xlabel="step", ylabel=title)
        if not axes.lines:
            continue
        axes.legend()
        figure.savefig(folder / f"{name}.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
