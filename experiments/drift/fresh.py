"""After `run.py`: a head trained from nothing for the policy as it ended, and every arm's head beside it.

    python experiments/drift/fresh.py --out out/drift       # the recipe's time, 45 minutes on 2 cores; resumes

All are judged on the same responses of that policy, to prompts that none of them was trained on. Written to
OUT/fresh.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rollout_spec import provenance
from rollout_spec.draft.acceptance import judge_samples
from rollout_spec.draft.checkpoint import HELD_OUT, load_head
from rollout_spec.draft.features import Target
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.samples import read_samples
from rollout_spec.files import write_json

RECIPE = Path(__file__).resolve().parents[2] / "configs/draft/smollm2.yaml"
FORWARD_TOKENS = 4096
K = 3


def train(policy: Path, head: Path, version: int, options: list[str]) -> None:
    """By the recipe that made the head that the run began with."""
    command = [str(Path(sys.executable).parent / "rollout-spec"), "draft", "train", "--config", str(RECIPE)]
    command += ["--set", f"model={policy}", "--policy-version", str(version), "--out", str(head)]
    for option in options:
        command += ["--set", option]
    subprocess.run(command, check=True)


def lengths(policy: Path, heads: dict[str, Path], responses: Path, seen: set[str]) -> dict[str, Any]:
    """Acceptance lengths by arm and temperature, without responses to prompts in `seen`."""
    samples = [sample for sample in read_samples(responses) if sample.prompt_id not in seen]
    saved = {name: load_head(head) for name, head in heads.items()}
    target = Target(policy, next(iter(saved.values())).head.shape.aux_layers)
    found: dict[str, Any] = {}
    for name, head in saved.items():
        shared = Shared.of(target.embedding, target.output, head.ids)
        rows = judge_samples(head.head.bfloat16(), shared, target, samples, FORWARD_TOKENS, K)
        found[name] = {str(row["temperature"]): row["acceptance_length"] for row in rows if row["k"] == K}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="that of run.py")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override the recipe")
    args = parser.parse_args()
    results = json.loads((args.out / "results.json").read_text("utf-8"))
    step = results["rows"][-1]["step"] + 1
    policy, fresh = args.out / "policy" / str(step), args.out / "fresh"
    train(policy, fresh, step, args.set)
    heads = {**{name: Path(path) for name, path in results["heads"].items()}, "fresh": fresh}
    found = lengths(policy, heads, fresh / HELD_OUT, set(results["prompts"]))
    write_json(args.out / "fresh.json", {"step": step, "k": K, "heads": found, "provenance": provenance.collect()})
    for name, by_temperature in found.items():
        print(name, by_temperature)
    return 0


if __name__ == "__main__":
    sys.exit(main())
