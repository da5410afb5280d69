"""Greedy output with and without speculation in bfloat16, prompt by prompt, and what the differences are.

    python experiments/exactness/run.py          # about 3 minutes on 2 cores; writes results.json beside this file

In float32 the outputs are identical: tests/engine/test_lossless.py.

For each prompt whose tokens differ in bfloat16, the first differing position is looked at: a float32 teacher-forced
pass over the common prefix gives the log-probabilities of the two tokens. A near-tie is a gap that bfloat16 logits of
this size cannot resolve (they are spaced 0.125 apart between 16 and 32). The control is the engine without
speculation against itself at another batch size: it parts from itself in the same way.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

PROMPTS, TOKENS = 100, 64
ARMS: dict[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "off, batch 8": {"policy": "off", "max_num_seqs": 8},
    "fixed:3 n-gram": {"policy": "fixed", "k_max": 3, "stock": True},
    "goodput n-gram": {"policy": "goodput", "k_max": 8},
}
# Twice the spacing of bfloat16 numbers between 16 and 32, where the largest logits of this model are.
NEAR_TIE = 0.25


def generate(arm: str, dtype: str) -> dict[str, Any]:
    from rollout_spec.config import SamplingConfig, parse_config
    from rollout_spec.engine.launch import engine_arguments
    from rollout_spec.rollout.worker import RolloutWorker
    from rollout_spec.workload import generate_prompts

    spec = ARMS[arm]
    config = parse_config(
        {
            "engine": {
                "dtype": dtype,
                "max_model_len": 512,
                "max_num_seqs": spec.get("max_num_seqs", 32),
                "kv_cache_gib": 1,
            },
            "drafter": {"method": spec.get("method", "ngram"), "k_max": spec.get("k_max", 8)},
            "policy": {"name": "goodput" if spec["policy"] == "goodput" else "off"},
        }
    )
    off = spec["policy"] == "off"
    arguments = engine_arguments(
        config, drafter=None if off else config.drafter, policy=None if off or spec.get("stock") else config.policy
    )
    prompts = [prompt.messages for prompt in generate_prompts(PROMPTS, seed=7)]
    with RolloutWorker(config, arguments=arguments) as worker:
        rollouts = worker.generate(prompts, sampling=SamplingConfig(temperature=0, max_tokens=TOKENS))
    return {
        "prompts": [rollout.prompt_token_ids for rollout in rollouts],
        "tokens": [rollout.token_ids for rollout in rollouts],
        "draft_tokens": sum(r.speculation.draft_tokens for r in rollouts if r.speculation),
        "accepted_tokens": sum(r.speculation.accepted_tokens for r in rollouts if r.speculation),
    }


def gaps(prompts: Sequence[Sequence[int]], first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Any:
    """For each prompt whose outputs differ: where, the two tokens, their log-probability gap and their ranks."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollout_spec.model import DEFAULT_MODEL, resolve

    model = AutoModelForCausalLM.from_pretrained(resolve(DEFAULT_MODEL), dtype=torch.float32)
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, first, second, strict=True)):
        if list(a) == list(b):
            continue
        at = next(i for i in range(max(len(a), len(b))) if a[i : i + 1] != b[i : i + 1])
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *a[:at]]])).logits[0, -1]
        law = logits.log_softmax(-1)
        ranks = [int((law > law[token]).sum()) for token in (a[at], b[at])]
        found.append(
            {
                "prompt": index,
                "position": at,
                "tokens": [a[at], b[at]],
                "gap": abs(float(law[a[at]] - law[b[at]])),
                "ranks": ranks,
                "largest_logit": float(logits.max()),
            }
        )
    return found


def main() -> None:
    from rollout_spec.provenance import collect

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    context = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {"schema": "rollout-spec/exactness/1", "provenance": collect(), "dtypes": {}}
    results |= {"num_prompts": PROMPTS, "max_tokens": TOKENS, "near_tie": NEAR_TIE}
    for dtype in ("bfloat16",):
        runs = {}
        for arm in ARMS:
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                runs[arm] = pool.submit(generate, arm, dtype).result()
        reference = runs["off"]
        rows = results["dtypes"][dtype] = {}
        for arm in list(ARMS)[1:]:
            different = gaps(reference["prompts"], reference["tokens"], runs[arm]["tokens"])
            rows[arm] = {
                "differing_prompts": len(different),
                "largest_gap": max((row["gap"] for row in different), default=0.0),
                "all_near_ties_of_the_two_top_logits": all(
                    row["gap"] <= NEAR_TIE and sorted(row["ranks"]) == [0, 1] for row in different
                ),
                "draft_tokens": runs[arm]["draft_tokens"],
                "accepted_tokens": runs[arm]["accepted_tokens"],
                "differences": different,
            }
            print(
                f"{dtype:9} {arm:15} {len(different):3} of {PROMPTS} prompts differ from off, largest gap "
                f"{rows[arm]['largest_gap']:.3f}, {rows[arm]['accepted_tokens']} drafts accepted",
                flush=True,
            )
        (Path(__file__).parent / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
