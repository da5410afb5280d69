"""Regret of K policies against an oracle on random worlds; writes results.json and regret.png beside this file.

    .venv/bin/python experiments/regret/run.py [--worlds 60] [--hopeless 30] [--mixed 30] [--collapse 12] [--seed 0]

Resumable: worlds that are in results.json already, made by the same code and seed, are not run again.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from rollout_spec import provenance
from rollout_spec.control.goodput import Goodput
from rollout_spec.control.policy import Decision, StepView
from rollout_spec.simulate.contenders import make
from rollout_spec.simulate.fleet import simulate
from rollout_spec.simulate.step_model import Floats, StepModel, Work
from rollout_spec.simulate.worlds import World, collapsing_world, hopeless_world, mixed_world, random_world

HERE = Path(__file__).parent
NAMES = ("oracle", "goodput", "off", "fixed:1", "fixed:3", "fixed:5", "threshold", "table", "bandit")
FIXED = ("off", "fixed:1", "fixed:3", "fixed:5")
LABELS = {
    "goodput": "ours (goodput)",
    "best fixed": "best fixed K, in hindsight",
    "fixed:3": "fixed K=3",
    "threshold": "threshold at ridge/(K+1)",
    "table": "table from the profile",
    "bandit": "bandit by batch bucket",
    "off": "off",
}
COLLAPSE_STEP = 192
PARTS = ("worlds", "hopeless", "mixed", "collapse")


class Watched(Goodput):
    """Ours, with the K of every step written down."""

    def __init__(self, world: World, log: list[tuple[int, int, str]]) -> None:
        super().__init__(world.fleet.k_max, world.prior)
        self.log = log

    def decide(self, view: StepView) -> Decision:
        decision = super().decide(view)
        self.log.append((decision.k, view.decode, decision.reason))
        return decision


class Meter:
    """A step model that adds up the time of all steps before noise and hiccups. Runs differ in luck as well, by more
    than a per cent where one hiccup hits a long prefill and not its neighbour."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.total = 0.0

    def seconds(self, work: Work) -> Floats:
        seconds = self.model.seconds(work)
        if np.ndim(work.decode) == 1:  # not the oracle's look at all K
            self.total += float(seconds.sum())
        return seconds


def compare(world: World, names: tuple[str, ...], seed: int) -> dict[str, Any]:
    fleet = world.fleet
    seconds, undisturbed, steps, metrics = {}, {}, {}, {}
    for name in names:
        meter = Meter(fleet.model)
        outcome = simulate(replace(fleet, model=meter), make(name, fleet, world.prior, world.ridge), seed)
        seconds[name], undisturbed[name], steps[name] = outcome.seconds, meter.total, outcome.replica_steps
        if name == "goodput":
            metrics = outcome.metrics
    return {
        "world": world.name,
        "moe": world.moe,
        "prior": world.prior_kind,
        "max_num_seqs": fleet.max_num_seqs,
        "k_max": fleet.k_max,
        "acceptance_1": fleet.acceptance.survival[0],
        "noise": fleet.noise,
        "seconds": seconds,
        "undisturbed_seconds": undisturbed,
        "steps": steps,
        "goodput_metrics": metrics,
    }


def collapse(index: int, seed: int) -> dict[str, Any]:
    world = collapsing_world(index, COLLAPSE_STEP, seed)
    log: list[tuple[int, int, str]] = []
    simulate(world.fleet, lambda: Watched(world, log), seed + 1)
    after = [k for k, _, reason in log[COLLAPSE_STEP:]]
    zero = next((i for i, k in enumerate(after) if k == 0), None)
    late = [k > 0 for k in after[50:]]
    return {
        "world": world.name,
        "k_before": [k for k, _, _ in log[COLLAPSE_STEP - 20 : COLLAPSE_STEP]],
        "steps_to_zero": zero,
        "share_speculating_after_50": float(np.mean(late)) if late else None,
        "steps_after": len(after),
    }


def run(job: tuple[str, int, int]) -> dict[str, Any]:
    """One world; `job` is the part, the index and the seed."""
    part, index, seed = job
    if part == "worlds":
        return compare(random_world(index, seed), NAMES, seed + 1)
    if part == "hopeless":
        return compare(hopeless_world(index, seed), ("off", "goodput"), seed + 1)
    if part == "mixed":
        return compare(mixed_world(index, seed), ("off", "fixed:1", "fixed:3", "table", "oracle", "goodput"), seed + 1)
    return collapse(index, seed)


def regrets(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Relative time above the oracle's, by policy, in the order of the worlds."""
    table = {name: [row["seconds"][name] / row["seconds"]["oracle"] - 1 for row in rows] for name in NAMES[1:]}
    table["best fixed"] = [min(values) for values in zip(*(table[name] for name in FIXED), strict=True)]
    return table


def summary(results: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, values in regrets(results["worlds"]).items():
        out[name] = {"median": float(np.median(values)), "p90": float(np.quantile(values, 0.9)), "max": max(values)}
    for kind in ("none", "biased", "wrong"):
        rows = [row for row in results["worlds"] if row["prior"] == kind]
        if rows:
            values = regrets(rows)["goodput"]
            out[f"goodput, profile {kind}"] = {
                "worlds": len(rows),
                "median": float(np.median(values)),
                "p90": float(np.quantile(values, 0.9)),
            }
    for label, key in (("", "seconds"), (", without noise and hiccups", "undisturbed_seconds")):
        harm = [row[key]["goodput"] / row[key]["off"] - 1 for row in results["hopeless"]]
        if harm:
            values = {"median": float(np.median(harm)), "max": max(harm), "worlds": len(harm)}
            out[f"harm where no K helps{label}"] = values
    if results["mixed"]:
        out["speed-up over off where some requests accept all drafts and others none"] = {
            name: {
                "median": float(np.median(gain)),
                "p10": float(np.quantile(gain, 0.1)),
                "min": min(gain),
            }
            for name in results["mixed"][0]["undisturbed_seconds"]
            if name != "off"
            for gain in [
                [row["undisturbed_seconds"]["off"] / row["undisturbed_seconds"][name] for row in results["mixed"]]
            ]
        }
    if results["collapse"]:
        zeros = [row["steps_to_zero"] for row in results["collapse"]]
        # A rollout may end before K is 0: it neither passed nor failed.
        over = [zero is None and row["steps_after"] < 50 for zero, row in zip(zeros, results["collapse"], strict=True)]
        out["collapse"] = {
            "steps_to_zero": zeros,
            "within_50": sum(zero is not None and zero <= 50 for zero in zeros),
            "ended_before": sum(over),
        }
    return out


def plot(results: dict[str, Any], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    table = regrets(results["worlds"])
    figure, axes = plt.subplots(figsize=(8.6, 4.8), layout="constrained")
    for name, label in LABELS.items():
        values = 100 * np.sort(table[name])
        ours = name == "goodput"
        share = (np.arange(len(values)) + 1) / len(values)
        axes.step(values, share, where="post", label=label, lw=2.6 if ours else 1.4, zorder=3 if ours else 2)
    axes.axhline(0.5, color="#dddddd", lw=0.8)
    axes.axhline(0.9, color="#dddddd", lw=0.8)
    axes.set_xscale("symlog", linthresh=5)
    axes.set_xlim(-2, 200)
    axes.set_xticks([0, 2, 5, 10, 20, 50, 100], ["0", "2", "5", "10", "20", "50", "100"])
    axes.set_xlabel("time above the oracle's, per cent")
    axes.set_ylabel("share of worlds")
    axes.set_title(f"Regret on {len(results['worlds'])} random worlds", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=60)
    parser.add_argument("--hopeless", type=int, default=30)
    parser.add_argument("--mixed", type=int, default=30)
    parser.add_argument("--collapse", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    path = args.out / "results.json"
    results: dict[str, Any] = {
        "schema": 1,
        "seed": args.seed,
        "worlds": [],
        "hopeless": [],
        "mixed": [],
        "collapse": [],
    }
    if path.exists():
        old = json.loads(path.read_text())
        # Worlds of another state of the code would be published under this one's revision.
        git = provenance.collect()["git"]
        if (
            old["schema"] == results["schema"]
            and old["seed"] == args.seed
            and old["provenance"]["git"] == git
            and git
            and not git["dirty"]
        ):
            results = old
    todo = [(part, index, args.seed) for part in PARTS for index in range(len(results[part]), getattr(args, part))]
    # Time is simulated: how busy the machine is does not matter.
    with ProcessPoolExecutor(args.jobs) as pool:
        for (part, index, _), row in zip(todo, pool.map(run, todo), strict=True):
            results[part].append(row)
            results["provenance"] = provenance.collect()
            results["summary"] = summary(results) if results["worlds"] else {}
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(part, index, json.dumps(results[part][-1].get("seconds", results[part][-1])), flush=True)
    plot(results, args.out / "regret.png")
    print(json.dumps(results["summary"], indent=1))


if __name__ == "__main__":
    main()
