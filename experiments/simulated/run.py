"""The simulator against measured rollouts: predicted makespan of each arm over the measured one.

    .venv/bin/python experiments/simulated/run.py BENCH_DIR [BENCH_DIR ...] --profile PROFILE.json [...] --out DIR

The profiles must come from the same engine and session as the benchmarks. They hold step times and acceptance on other
prompts; of a benchmark nothing is used but its configuration: lengths, prompts and arms. With several profiles (one
from before and one from after: the machine's speed wanders) the mean of what they predict counts. Writes
simulated.json and simulated.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib as mpl
import numpy as np

from rollout_spec import provenance
from rollout_spec.bench.arms import ArmSpec, parse_arm
from rollout_spec.bench.results import Results
from rollout_spec.bench.runner import load_tokenizer
from rollout_spec.config import Config, PolicyConfig, parse_config
from rollout_spec.control.policy import Policy
from rollout_spec.control.registry import make_policy
from rollout_spec.control.step_times import StepTimes
from rollout_spec.engine.requests import prompt_token_ids
from rollout_spec.model import resolve
from rollout_spec.profile.record import Profile
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.simulate.fleet import Fleet, simulate
from rollout_spec.simulate.step_model import Tabulated
from rollout_spec.workload import build_workload

# Each run is simulated so many times with other luck; the median counts.
SEEDS = 7
NOISE = 0.03
BOUND = 0.07


def policy_of(arm: ArmSpec, times: StepTimes) -> Policy:
    if arm.kind == "table":
        return make_policy(PolicyConfig(name="table", table=arm.vllm_table), arm.drafter.k_max)
    if arm.policy is None:
        return make_policy(PolicyConfig(name="fixed", k=arm.drafter.k_max if arm.drafter else 0), 1)
    prior = times if arm.policy.profile else None
    return make_policy(arm.policy.model_copy(update={"profile": None}), arm.drafter.k_max, prior)


def predict(config: Config, arm: ArmSpec, times: StepTimes, repeat: int, prompt_tokens: int) -> list[float]:
    """Makespans in seconds, one a seed."""
    load = build_workload(config.workload, config.bench.seed, repeat)
    lengths = np.array([length for group in load.groups for length in group.output_tokens])
    k_max = arm.drafter.k_max if arm.drafter else 1
    used = times if arm.drafter else times.without_drafter()
    fleet = Fleet(
        model=Tabulated(used, k_max, times.prefill_token_seconds),
        acceptance=AcceptanceCurve.measured(times, k_max),
        lengths=(lengths,),
        max_num_seqs=config.engine.max_num_seqs,
        prompt_tokens=prompt_tokens,
        noise=NOISE,
        lengths_known=True,  # imposed lengths are the caps of the requests
    )
    return [simulate(fleet, lambda: policy_of(arm, times), seed).seconds for seed in range(SEEDS)]


def compare(folder: Path, profiles: list[StepTimes]) -> dict[str, Any]:
    results = Results.load(folder / "results.json")
    config = parse_config(results.provenance["config"])
    tokenizer = load_tokenizer(str(resolve(config.model)))
    rows = []
    for arm in results.arms:
        spec = parse_arm(arm.name, config)
        predicted, measured = [], []
        for run in arm.runs:
            load = build_workload(config.workload, config.bench.seed, run.repeat)
            prompts = [len(prompt_token_ids(lambda: tokenizer, group.prompt)) for group in load.groups]
            tokens = round(float(np.mean(prompts)))
            predicted.append(mean(median(predict(config, spec, times, run.repeat, tokens)) for times in profiles))
            measured.append(run.makespan_s)
        ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
        rows.append({"arm": arm.name, "predicted_s": predicted, "measured_s": measured,
                     "ratio_of_medians": median(predicted) / median(measured), "ratios": ratios})  # fmt: skip
    off = next(row for row in rows if row["arm"] == "off")
    for row in rows:
        row["speedup_predicted"] = median(o / p for o, p in zip(off["predicted_s"], row["predicted_s"], strict=True))
        row["speedup_measured"] = median(o / m for o, m in zip(off["measured_s"], row["measured_s"], strict=True))
    return {"bench": folder.name, "workload": results.workload, "arms": rows}


def plot(results: list[dict[str, Any]], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(5 * len(results), 4), layout="constrained", squeeze=False)
    for axes, part in zip(panels[0], results, strict=True):
        for i, row in enumerate(part["arms"]):
            axes.plot(row["measured_s"], [i] * len(row["measured_s"]), "o", color="#222222", ms=5)
            axes.plot(row["predicted_s"], [i] * len(row["predicted_s"]), "x", color="#0072B2", ms=7)
        axes.set_yticks(range(len(part["arms"])), [row["arm"] for row in part["arms"]])
        axes.set_xlabel("makespan, s (dots measured, crosses predicted)")
        axes.set_title(part["bench"], loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", type=Path, nargs="+")
    parser.add_argument("--profile", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    profiles = [Profile.load(path).step_times() for path in args.profile]
    results = [compare(folder, profiles) for folder in args.bench]
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"schema": 1, "provenance": provenance.collect(), "results": results}
    (args.out / "simulated.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(results, args.out / "simulated.png")
    for part in results:
        print(part["bench"])
        for row in part["arms"]:
            mark = "" if abs(row["ratio_of_medians"] - 1) <= BOUND else "   beyond 7 %"
            print(
                f"  {row['arm']:<16} predicted {median(row['predicted_s']):7.2f} s  measured "
                f"{median(row['measured_s']):7.2f} s  ratio {row['ratio_of_medians']:.3f}  speed-up "
                f"{row['speedup_predicted']:.2f} / {row['speedup_measured']:.2f}{mark}"
            )


if __name__ == "__main__":
    main()
