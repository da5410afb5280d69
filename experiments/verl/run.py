"""GRPO with verl on this CPU, with and without our option: rewards, probabilities, and seconds a generated token.

    python experiments/verl/run.py --steps 60 --seeds 0 1 2      # hours on two cores; results.json beside this file

The task is verifiable and short: repeat a list of words, one a line (`reward.py`). Every arm and seed is a job of its
own, `python -m verl.trainer.main_ppo` with configs/verl/cpu.yaml; arms take turns, so that a slow hour hits all.
A job that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout_spec_verl.cpu import ENVIRONMENT

from rollout_spec.files import write_json
from rollout_spec.model import DEFAULT_MODEL, resolve
from rollout_spec.provenance import collect
from rollout_spec.workload.problems import THINGS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GROUP = "++actor_rollout_ref.rollout.rollout_spec"
ARMS = {
    # Plain verl: neither the option nor anything that it sets.
    "plain": ["actor_rollout_ref.rollout._target_=verl.workers.config.RolloutConfig", "~" + GROUP[2:]],
    "goodput": [f"{GROUP}.policy={{name: goodput}}", f"{GROUP}.drafter={{method: ngram, k_max: 8}}"],
}
KEPT = ("critic/score/", "training/rollout_probs_diff", "timing_", "response_length/", "rollout/", "rollout_spec/")


def write_data(path: Path, rows: int, seed: int) -> None:
    import pandas

    rng = random.Random(seed)
    table = []
    for index in range(rows):
        words = rng.sample(THINGS, 8)
        question = "Write this list of words again, in the same order, one word a line, and nothing else:\n"
        table.append(
            {
                "data_source": "repeat",
                "prompt": [{"role": "user", "content": question + "\n".join(words)}],
                "ability": "copying",
                "reward_model": {"style": "rule", "ground_truth": " ".join(words)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    pandas.DataFrame(table).to_parquet(path)


def run(folder: Path, arm: str, seed: int, steps: int, model: str) -> list[dict[str, Any]]:
    """The metrics of each step; RuntimeError if the job fails, its output is then in `folder`/log.txt."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder / "data.parquet", rows=steps * 8, seed=seed)
        command = [
            *(sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"),
            *("--config-dir", str(ROOT / "configs/verl"), "--config-name", "cpu"),
            f"data.train_files={folder}/data.parquet",
            f"data.val_files={folder}/data.parquet",
            "data.train_batch_size=8",
            "data.max_prompt_length=128",
            "data.max_response_length=96",
            f"data.seed={seed}",
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.rollout.seed={seed}",
            "actor_rollout_ref.rollout.max_num_seqs=32",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            f"reward.custom_reward_function.path={HERE}/reward.py",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}/checkpoints",
            "trainer.logger=[file]",
            *ARMS[arm],
        ]
        partial = folder / "partial.jsonl"
        partial.unlink(missing_ok=True)
        path = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(partial)}
        with (folder / "log.txt").open("w") as log:
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, cwd=folder, check=False)
        if done.returncode:
            raise RuntimeError(f"{arm}, seed {seed}: verl ended with status {done.returncode}, see {folder}/log.txt")
        partial.rename(metrics)
    rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith(KEPT)} for row in rows]


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The first step starts everything up and is left out of the times."""
    rewards = [step["critic/score/mean"] for step in steps]
    tail = max(len(steps) // 6, 1)
    return {
        "reward_first": statistics.mean(rewards[:tail]),
        "reward_last": statistics.mean(rewards[-tail:]),
        "probs_diff_max": max(step["training/rollout_probs_diff_max"] for step in steps),
        "gen_ms_per_token": statistics.median(step["timing_per_token_ms/gen"] for step in steps[1:] or steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--work", type=Path, default=ROOT / "out/verl", help="data, logs and metrics of each job")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        for arm in ARMS:
            folder = (options.work / f"{arm}_{seed}").resolve()
            steps = run(folder, arm, seed, options.steps, str(resolve(options.model)))
            runs.append({"arm": arm, "seed": seed, "summary": summary(steps), "steps": steps})
            print(arm, seed, runs[-1]["summary"], flush=True)
            write_json(options.out, {"schema": 1, "provenance": collect(), "runs": runs})


if __name__ == "__main__":
    main()
