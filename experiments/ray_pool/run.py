"""A heavy-tail rollout of 400 sequences by two engines of one core each, as a Ray job: ours against the same pool
without speculation and without order.

    python experiments/ray_pool/run.py [--profile PROFILE.json]     # about 25 minutes on 2 quiet cores

Each run is a job of its own through `ray job submit`; arms take turns, ratios are of pairs. The makespan is from the
first sequence handed to an engine to the last one finished, as the job's report has it: the start of the engines is not
in it. Lengths are imposed; ours knows those of an earlier epoch, which resemble them (`ALIKE` of the variance of the
logarithm is the prompt's own). With a profile of an engine on one core the simulator's prediction is set beside.
Resumable: runs that are in results.json already are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np
import yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "integrations")]

from rollout_spec_ray.places import place  # noqa: E402
from rollout_spec_ray.rows import Label, as_table  # noqa: E402
from rollout_spec_ray.store import Store  # noqa: E402

from rollout_spec import provenance  # noqa: E402
from rollout_spec.bench.runner import load_tokenizer  # noqa: E402
from rollout_spec.config import Config, PolicyConfig, load_config, parse_config  # noqa: E402
from rollout_spec.control.makespan import Lengths, longest_first  # noqa: E402
from rollout_spec.control.registry import make_policy  # noqa: E402
from rollout_spec.engine.requests import prompt_token_ids  # noqa: E402
from rollout_spec.files import write_json  # noqa: E402
from rollout_spec.model import resolve  # noqa: E402
from rollout_spec.profile.record import Profile  # noqa: E402
from rollout_spec.rollout.types import Rollout  # noqa: E402
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve  # noqa: E402
from rollout_spec.simulate.fleet import Fleet, Ints, simulate  # noqa: E402
from rollout_spec.simulate.step_model import Tabulated  # noqa: E402
from rollout_spec.workload.lengths import length_profile  # noqa: E402
from rollout_spec.workload.prompts import generate_prompts  # noqa: E402

SCHEMA = 1
SEQUENCES, PROFILE, SCALE, MIN_TOKENS, ALIKE = 400, "heavy_tail", 0.02, 4, 0.5
ENGINES = 2
FIRST_SEED = 1000  # of the prompts
# What an arm changes in configs/ray/local.yaml.
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"policy": {"name": "off"}, "ray": {"order": "submitted"}},
    "ordered": {"policy": {"name": "off"}, "ray": {"order": "longest_first"}},
    "ours": {"policy": {"name": "goodput"}, "ray": {"order": "longest_first"}},
}


def two_epochs(seed: int) -> tuple[Ints, Ints]:
    """Lengths of the same prompts, one response each, in an earlier epoch and in this one."""
    rng = np.random.default_rng([seed, 17])
    own, below = rng.standard_normal(SEQUENCES), np.vectorize(NormalDist().cdf)
    epochs = []
    for _ in range(2):
        u = below(np.sqrt(ALIKE) * own + np.sqrt(1 - ALIKE) * rng.standard_normal(SEQUENCES))
        lengths = length_profile(PROFILE).quantile(np.clip(u, 1e-6, 1 - 1e-6)) * SCALE
        epochs.append(np.maximum(np.rint(lengths).astype(np.int64), MIN_TOKENS))
    return epochs[0], epochs[1]


def write_epoch(folder: Path, ids: list[str], lengths: Ints) -> None:
    """An output as an earlier epoch would have left it, for its lengths."""
    store = Store(place(str(folder), "--out")).open_for_writing()
    finished = [
        (Label(0, name, 0, 0, 0.0), Rollout(0, 0, [0], [0] * tokens, None, "length", 0, None))
        for name, tokens in zip(ids, lengths.tolist(), strict=True)
    ]
    store.append(as_table(finished, 0, store.attempt, 0.0))
    store.flush()
    store.write_job({"samples_fingerprint": "none", "sequences": len(ids), "attempts": []})
    store.close()


def job(address: str, config: Path, prompts: Path, out: Path) -> dict[str, Any]:
    """The report of a run."""
    command = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", address, "--"]
    command += ["python", "-m", "rollout_spec_ray.job"]
    command += ["--config", str(config), "--prompts", str(prompts), "--out", str(out)]
    subprocess.run(command, check=True)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert report["complete"], report["sequences"]
    return report


def options_of(base: Config, arm: str) -> Config:
    tree = base.model_dump(mode="json")
    for group, options in ARMS[arm].items():
        tree[group] |= options
    return parse_config(tree)


def predict(config: Config, profile: Path, repeat: int) -> list[float]:
    """Makespans in seconds of this arm and repeat in the simulator, one a seed."""
    before, now = two_epochs(repeat)
    prompts = generate_prompts(SEQUENCES, seed=FIRST_SEED + repeat)
    tokenizer = load_tokenizer(str(resolve(config.model)))
    each = [len(prompt_token_ids(lambda: tokenizer, list(one.messages))) for one in prompts]
    prompt_tokens = round(float(np.mean(each)))
    times = Profile.load(profile).step_times()
    lengths = now
    if config.ray.order == "longest_first":
        known = Lengths()
        for prompt, tokens in enumerate(before.tolist()):
            known.finished(prompt, tokens)
        lengths = now[longest_first(range(len(now)), known)]
    off = config.policy.name == "off"
    k_max = config.drafter.k_max
    fleet = Fleet(
        model=Tabulated(times.without_drafter() if off else times, k_max, times.prefill_token_seconds),
        acceptance=AcceptanceCurve.measured(times, k_max),
        lengths=(lengths,),
        max_num_seqs=config.engine.max_num_seqs,
        replicas=ENGINES,
        queue="shared",
        prompt_tokens=prompt_tokens,
        noise=0.03,
        lengths_known=True,
    )
    policy = PolicyConfig(name="fixed", k=0) if off else config.policy
    return [simulate(fleet, lambda: make_policy(policy, k_max), seed).seconds for seed in range(3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    base = load_config(
        HERE.parents[1] / "configs/ray/local.yaml",
        ["sampling.temperature=0", f"ray.engines={ENGINES}", "engine.kv_cache_gib=0.5", "engine.max_model_len=1024"],
    )
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    import ray

    with tempfile.TemporaryDirectory() as scratch:
        context = ray.init(address="local", num_cpus=ENGINES + 2, include_dashboard=True, log_to_driver=False)
        for repeat in range(args.repeats):
            prompts = generate_prompts(SEQUENCES, seed=FIRST_SEED + repeat)
            before, now = two_epochs(repeat)
            folder = Path(scratch) / str(repeat)
            folder.mkdir()
            write_epoch(folder / "epoch", [prompt.id for prompt in prompts], before)
            lines = [
                json.dumps({"id": prompt.id, "prompt": list(prompt.messages), "output_tokens": tokens})
                for prompt, tokens in zip(prompts, now.tolist(), strict=True)
            ]
            (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
            for arm in ARMS:
                if any((run["repeat"], run["arm"]) == (repeat, arm) for run in runs):
                    continue
                tree = options_of(base, arm).model_dump(mode="json")
                if tree["ray"]["order"] == "longest_first":
                    tree["ray"]["history"] = [str(folder / "epoch")]
                config = folder / f"{arm}.yaml"
                config.write_text(yaml.safe_dump(tree))
                report = job(f"http://{context.dashboard_url}", config, folder / "prompts.jsonl", folder / arm)
                (attempt,) = report["attempts"]
                runs.append({"repeat": repeat, "arm": arm, "attempt": attempt, "speculation": report["speculation"]})
                save(args.out, base, runs)
        ray.shutdown()
    if args.profile is not None:
        for run in runs:
            run["predicted_s"] = predict(options_of(base, run["arm"]), args.profile, run["repeat"])
        save(args.out, base, runs)
    for arm, figures in summary(runs).items():
        print(arm, figures)


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    by = {(run["repeat"], run["arm"]): run for run in runs}
    result = {}
    for arm in ARMS:
        mine = [run for run in runs if run["arm"] == arm]
        pairs = [(by[run["repeat"], "plain"], run) for run in mine if (run["repeat"], "plain") in by]
        ratios = [other["attempt"]["makespan_s"] / run["attempt"]["makespan_s"] for other, run in pairs]
        if not ratios:
            continue
        result[arm] = {
            "makespan_s": median(run["attempt"]["makespan_s"] for run in mine),
            "speedup": [median(ratios), min(ratios), max(ratios)],
            "predicted_over_measured": [
                median(run["predicted_s"]) / run["attempt"]["makespan_s"] for run in mine if "predicted_s" in run
            ],
        }
    return result


def save(path: Path, config: Config, runs: list[dict[str, Any]]) -> None:
    lengths = {"profile": PROFILE, "scale": SCALE, "alike": ALIKE, "sequences": SEQUENCES}
    record = {"schema": SCHEMA, "provenance": provenance.collect(), "config": config.model_dump(mode="json")}
    write_json(path, record | {"lengths": lengths, "summary": summary(runs), "runs": runs})


if __name__ == "__main__":
    main()
