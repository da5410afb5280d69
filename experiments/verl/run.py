"""GRPO with verl on this CPU: plain, through our option without speculation, with it, and with a draft head that is
refreshed or not: rewards, probabilities, seconds a generated token, acceptance.

    python experiments/verl/run.py --head out/draft/head --steps 60 --seeds 0 1 2     # many hours on two cores
    python experiments/verl/run.py --arms plain ngram --at-once                     # side by side, a core each
    python experiments/verl/report.py                                               # figures and plots of results.json
    bash experiments/verl/head.sh                     # a head for this job, left alone and refreshed
    bash experiments/verl/off.sh                      # what the option costs, switched off

The task is verifiable and short: repeat a list of words, one a line (`reward.py`). Every arm and seed is a job of its
own, `python -m verl.trainer.main_ppo` with configs/verl/cpu.yaml. Arms take turns, so that a slow hour hits all, or,
`--at-once`, the arms of a seed run at the same time, each bound to its share of the cores, so that a slow minute does;
which arm has which share changes with the seed.
A job that is in the results already is not run again, and one that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
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
# Short, for two cores: with four responses a prompt, a step computes on 16 sequences.
PROMPTS, WORDS = 4, 8
SAVE_EVERY = 20
HEAD = f"{GROUP}.drafter={{method: eagle3, model: {{head}}, k_max: 5}}"
ARMS = {
    # Plain verl: neither the option nor anything that it sets.
    "plain": ["actor_rollout_ref.rollout._target_=verl.workers.config.RolloutConfig", "~" + GROUP[2:]],
    "off": [f"{GROUP}.policy.name=off"],
    "ngram": [f"{GROUP}.drafter={{method: ngram, k_max: 8}}"],
    "frozen": [HEAD, f"{GROUP}.refresh.policy=never"],
    "refreshed": [HEAD, f"{GROUP}.refresh={{policy: every, every: 8, seconds: 20, folder: {{folder}}/draft}}"],
}
# verl's default is bfloat16 everywhere, which is slow on a CPU without instructions for it.
FLOAT32 = [
    "actor_rollout_ref.rollout.dtype=float32",
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
]
# Two jobs side by side, or one in float32, take twice the memory.
SMALL = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
]
# Long answers and a policy that stays, for what the rollout itself costs: updates would take most of the time.
ROLLOUT_ONLY = [
    "trainer.critic_warmup=1000000",  # so many steps without an update of the actor
    "actor_rollout_ref.rollout.ignore_eos=true",
    "data.max_response_length=400",
    "actor_rollout_ref.rollout.calculate_log_probs=true",
    "algorithm.rollout_correction.bypass_mode=true",  # the rollout's probabilities, not computed again
]
# For two jobs side by side in 24 GB: a process less each, and a heap that gives back what it does not need.
THRIFTY = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MALLOC_ARENA_MAX": "2"}
KEPT = ("critic/score/", "training/", "timing_", "response_length/", "rollout/", "rollout_spec/", "perf/")


def tasks(count: int, seed: int) -> list[tuple[list[str], list[dict[str, str]]]]:
    """Words to repeat, and the chat that asks for it."""
    rng = random.Random(seed)
    lists = [rng.sample(THINGS, WORDS) for _ in range(count)]
    question = "Write this list of words again, in the same order, one word a line, and nothing else:\n"
    return [(words, [{"role": "user", "content": question + "\n".join(words)}]) for words in lists]


def write_data(path: Path, rows: int, seed: int) -> None:
    import pandas

    table = [
        {
            "data_source": "repeat",
            "prompt": prompt,
            "ability": "copying",
            "reward_model": {"style": "rule", "ground_truth": " ".join(words)},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (words, prompt) in enumerate(tasks(rows, seed))
    ]
    pandas.DataFrame(table).to_parquet(path)


def run(
    folder: Path, arm: str, seed: int, steps: int, model: str, head: str, settings: list[str], lane: int
) -> list[dict[str, Any]]:
    """The metrics of each step; RuntimeError if the job fails, its output is then in the last log of `folder`."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder / "data.parquet", rows=steps * PROMPTS, seed=seed)
        # A logger of verl's begins its file anew, so each attempt has its own.
        attempt = len(list(folder.glob("attempt_*.jsonl")))
        command = [
            *(sys.executable, str(HERE / "lane.py"), str(lane)),
            *(sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo"),
            *("--config-dir", str(ROOT / "configs/verl"), "--config-name", "cpu"),
            f"data.train_files={folder}/data.parquet",
            f"data.val_files={folder}/data.parquet",
            f"data.train_batch_size={PROMPTS}",
            "data.max_prompt_length=96",
            "data.max_response_length=64",
            f"data.seed={seed}",
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            "actor_rollout_ref.actor.optim.lr=2e-5",
            f"reward.custom_reward_function.path={HERE}/reward.py",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}/checkpoints",
            f"trainer.save_freq={SAVE_EVERY}",
            "trainer.max_actor_ckpt_to_keep=1",
            "trainer.resume_mode=auto",
            "trainer.logger=[file]",
            f"trainer.v1.sampler.custom_sampler={{path: {HERE}/sampler.py, name: PromptReplayBuffer}}",
            # Ray is there already.
            *("~ray_kwargs.ray_init.num_cpus", "~ray_kwargs.ray_init.num_gpus"),
            *settings,
            *(option.replace("{head}", head).replace("{folder}", str(folder)) for option in ARMS[arm]),
        ]
        path = os.pathsep.join([str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")])
        logged = {"VERL_FILE_LOGGER_PATH": str(folder / f"attempt_{attempt:03}.jsonl")}
        with (folder / f"log_{attempt:03}.txt").open("w") as log:
            done = subprocess.run(
                command,
                env={**os.environ, **ENVIRONMENT, **THRIFTY, **logged, "PYTHONPATH": path},
                stdout=log,
                stderr=log,
                cwd=folder,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"{arm}, seed {seed}: verl ended with status {done.returncode}, see {log.name}")
        metrics.write_text("".join(json.dumps(row) + "\n" for row in attempts(folder)))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name.startswith(KEPT)} for row in rows]


def job(options: argparse.Namespace, arm: str, seed: int, lane: int, cores: list[int]) -> dict[str, Any]:
    os.sched_setaffinity(0, cores)  # of this thread alone; the job inherits it
    folder = (options.work / f"{arm}_{seed}").resolve()
    model, head = str(resolve(options.model)), str(options.head.resolve())
    settings = FLOAT32 if options.dtype == "float32" else []
    if options.dtype == "float32" or options.at_once:
        settings = settings + SMALL
    if options.rollout_only:
        settings = settings + ROLLOUT_ONLY
    steps = run(folder, arm, seed, options.steps, model, head, settings, lane)
    print(arm, seed, "done", flush=True)
    # `provenance` counts the cores of the calling thread.
    return {"arm": arm, "seed": seed, "dtype": options.dtype, "steps": steps, "provenance": collect()}


def attempts(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step, of the attempt that did it last."""
    rows: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob("attempt_*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        first = True
        for line in lines:
            # The first step of an attempt starts everything up: its times are no others'.
            rows[line["step"]] = {**line["data"], "training/starts_up": first}
            first = False
    return [rows[step] for step in sorted(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--head", type=Path, default=ROOT / "out/draft/head", help="an EAGLE-3 head of the model")
    parser.add_argument("--work", type=Path, default=ROOT / "out/verl", help="data, logs and metrics of each job")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of actor and rollout")
    parser.add_argument("--at-once", action="store_true", help="the arms of a seed side by side: 11 GB each")
    parser.add_argument("--rollout-only", action="store_true", help="400 tokens each, and no update of the policy")
    options = parser.parse_args()
    if {"frozen", "refreshed"} & set(options.arms) and not (options.head / "config.json").exists():
        parser.error(
            f"--head {options.head}: no head there; `rollout-spec draft train` makes one, or name other --arms"
        )
    runs = kept(options.out, options.steps)
    cores = sorted(os.sched_getaffinity(0))
    lanes = len(options.arms) if options.at_once else 1
    if lanes > len(cores):
        parser.error(f"--at-once runs {lanes} arms, a core each, and there are {len(cores)}; name fewer --arms")
    for seed in options.seeds:
        arms = [arm for arm in options.arms if not any((run["arm"], run["seed"]) == (arm, seed) for run in runs)]
        with ThreadPoolExecutor(lanes) as pool:
            shares = [cores[(lane + seed - 1) % lanes :: lanes] for lane in range(lanes)]
            jobs = [pool.submit(job, options, arm, seed, at % lanes, shares[at % lanes]) for at, arm in enumerate(arms)]
            for done in as_completed(jobs):
                runs.append(done.result())
                write_json(options.out, {"schema": 3, "runs": runs})


def kept(path: Path, steps: int) -> list[dict[str, Any]]:
    """The runs of `path` that need not be run again; none if there is no such file."""
    found = json.loads(path.read_text())["runs"] if path.exists() else []
    return [run for run in found if len(run["steps"]) == steps]


if __name__ == "__main__":
    main()
