"""What a trained EAGLE-3 head accepts after K was 0: run all along, caught up, or with a hole in its cache.

    python experiments/k0_tax/acceptance.py --head DIR [--sequences 16] [--off 128] [--on 96] [--k 3]

Greedy, float32, so that all engines write the same text and drafts can be compared one by one. K is 0 for the first
steps, then k. stock: vLLM's own drafter, which runs the head at K=0. ours: it is deferred and caught up. stale: it is
deferred and never caught up, which is what doing nothing about it would cost. Acceptance is counted by draft position
and by steps since the switch. Writes acceptance.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
# The tests' engines and policies.
sys.path.insert(0, str(HERE.parents[1] / "tests" / "shared"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SCHEMA = "rollout-spec/k0-acceptance/1"
# Steps since the switch; a hole in the cache matters less the more was seen after it.
WINDOWS = ((0, 8), (8, 24), (24, 10_000))


def main() -> None:
    from fresh import run_fresh

    from rollout_spec import provenance
    from rollout_spec.model import DEFAULT_MODEL, resolve

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--head", required=True)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--off", type=int, default=128, help="steps with K=0")
    parser.add_argument("--on", type=int, default=96, help="tokens after them")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "acceptance.json")
    args = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    for arm in ("stock", "ours", "stale"):
        runs[arm] = run_fresh(run, resolve(args.model), args.head, arm, args.sequences, args.off, args.on, args.k)
        same = runs[arm]["tokens"] == runs["stock"]["tokens"]
        rows = (f"{row['steps']}: {row['rates']} of {row['drafts']}" for row in rates(runs[arm]["steps"], args.k))
        print(f"{arm}, {'the same text as' if same else 'ANOTHER TEXT THAN'} stock", *rows, sep="\n  ", flush=True)
        record = {
            "schema": SCHEMA,
            "provenance": provenance.collect(),
            "arguments": {key: str(value) for key, value in vars(args).items()},
            "same_text_as_stock": {arm: one["tokens"] == runs["stock"]["tokens"] for arm, one in runs.items()},
            "rates": {arm: rates(one["steps"], args.k) for arm, one in runs.items()},
            "steps": {arm: one["steps"] for arm, one in runs.items()},  # [step]: drafted, accepted by position
        }
        args.out.write_text(json.dumps(record) + "\n")


def run(model: Path, head: str, arm: str, sequences: int, off: int, on: int, k: int) -> dict[str, Any]:
    """Tokens by sequence, and of each step since the switch the drafts and the accepted ones by position."""
    from fresh import engine, scheduler_of
    from policies import SwitchOn

    from rollout_spec.config import SamplingConfig
    from rollout_spec.engine.draft_cache import DeferringEagleProposer
    from rollout_spec.workload import generate_prompts

    if arm == "stale":
        DeferringEagleProposer._catch_up = lambda *args: None
    options = {
        "drafter__method": "eagle3",
        "drafter__model": head,
        "drafter__draft_buffer_mib": 0 if arm == "stock" else 256,
        "engine__max_num_seqs": sequences,
        "engine__max_model_len": 1024,
    }
    prompts = [prompt.messages for prompt in generate_prompts(sequences, seed=23)]
    with engine(model, **options) as worker:
        policy = SwitchOn(after=off, k=k)
        scheduler_of(worker)._loop.policy = policy
        greedy = SamplingConfig(temperature=0, logprobs=False)
        rollouts = worker.generate(prompts, sampling=greedy, output_tokens=[[off + on]] * sequences)
    steps = [(list(result.drafted)[:k], list(result.accepted)[:k]) for result in policy.results if result.k]
    return {"tokens": [rollout.token_ids for rollout in rollouts], "steps": steps}


def rates(steps: list[tuple[list[int], list[int]]], k: int) -> list[dict[str, Any]]:
    """By window: drafts at the first position, and the share of drafts accepted to each position with its error."""
    rows = []
    for start, end in WINDOWS:
        part = np.array(steps[start:end])  # [steps, 2, k]
        if not len(part):
            continue
        drafts = int(part[:, 0, 0].sum())
        chance = part[:, 1].sum(0) / max(drafts, 1)
        row = {
            "steps": f"{start}-{min(end, len(steps))}",
            "drafts": drafts,
            "rates": [round(float(one), 3) for one in chance],
            "errors": [round(float((one * (1 - one) / max(drafts, 1)) ** 0.5), 3) for one in chance],
            "acceptance_length": round(1 + float(chance.sum()), 3),
        }
        rows.append(row)
    return rows


if __name__ == "__main__":  # vLLM starts processes
    main()
