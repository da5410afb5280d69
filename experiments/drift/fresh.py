"""After `run.py`: a head for the policy as it ended, and every arm's head beside it.

    python experiments/drift/fresh.py --out out/drift                 # from nothing by the recipe: 45 minutes; resumes
    python experiments/drift/fresh.py --out out/drift --on --set draft.minutes=15    # the first head, trained on

Both on responses of that policy to prompts of the run's kind that it never saw; all heads are judged on others such.
Ratios are to the head that was never refreshed, with the 95 % interval of a bootstrap over responses: the heads are
judged on the same text. Written to OUT/fresh.json or OUT/on.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from arms import chances
from policy import messages

from rollout_spec import provenance
from rollout_spec.draft.acceptance import predict
from rollout_spec.draft.checkpoint import HELD_OUT
from rollout_spec.draft.prompts import unseen_prompts
from rollout_spec.draft.samples import read_samples
from rollout_spec.files import write_json

RECIPE = Path(__file__).resolve().parents[2] / "configs/draft/smollm2.yaml"
K = 3
PROMPTS, PROMPT_SEED = 4000, 32
RESAMPLES = 2000


def train(policy: Path, out: Path, name: str, version: int, first: Path | None, options: list[str]) -> Path:
    """By the recipe that made the head that the run began with; `first`: from that head instead of from nothing."""
    command = [str(Path(sys.executable).parent / "rollout-spec"), "draft", "train", "--config", str(RECIPE)]
    command += ["--policy-version", str(version), "--out", str(out / name)]
    command += ["--init", str(first)] if first else []
    for option in (f"model={policy}", f"draft.prompts={out / 'unseen.jsonl'}", "draft.temperatures=[1]", *options):
        command += ["--set", option]
    subprocess.run(command, check=True)
    return out / name


def write_prompts(path: Path, seen: list[str]) -> None:
    """Those of the run's kind, in the form that its reward pays for, without any in `seen`."""
    with path.open("w", encoding="utf-8") as file:
        for prompt in unseen_prompts(PROMPTS, PROMPT_SEED, seen):
            file.write(json.dumps({"id": prompt.id, "prompt": messages(prompt)}) + "\n")


def judged(policy: Path, heads: dict[str, Path], responses: Path) -> dict[str, Any]:
    """Acceptance length of each head, and its ratio to the frozen one's, low and high end."""
    samples = read_samples(responses)
    tables = chances(policy, heads, samples, K)
    rng = np.random.default_rng(0)
    draws = rng.integers(len(samples), size=(RESAMPLES, len(samples)))
    sums = {name: np.array([_sums(table) for table in own]) for name, own in tables.items()}
    found = {}
    for name, own in tables.items():
        ratios = [_length(sums[name][draw]) / _length(sums["frozen"][draw]) for draw in draws]
        low, high = np.quantile(ratios, [0.025, 0.975])
        length = predict(own, K).acceptance_length
        found[name] = {"acceptance_length": length, "over_frozen": [float(low), float(high)], "head": str(heads[name])}
    return found


def _sums(table: Any) -> tuple[float, float]:
    """Tokens accepted, and verifications, expected of one response."""
    one = predict([table], K)
    return sum(one.survival) * one.verifications, one.verifications


def _length(sums: Any) -> float:
    accepted, verifications = sums.sum(0)
    return 1 + float(accepted / verifications)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="that of run.py")
    parser.add_argument("--on", action="store_true", help="go on from the head that the run began with")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override the recipe")
    args = parser.parse_args()
    results = json.loads((args.out / "results.json").read_text("utf-8"))
    step = results["rows"][-1]["step"] + 1
    heads = {name: Path(path) for name, path in results["heads"].items()}
    policy, name = args.out / "policy" / str(step), "on" if args.on else "fresh"
    write_prompts(args.out / "unseen.jsonl", results["prompts"])
    trained = train(policy, args.out, name, step, heads["frozen"] if args.on else None, args.set)
    found = judged(policy, {**heads, name: trained}, trained / HELD_OUT)
    options = {"step": step, "k": K, "temperature": 1, "recipe": args.set}
    write_json(args.out / f"{name}.json", {**options, "heads": found, "provenance": provenance.collect()})
    for head, figures in found.items():
        print(head, {key: figures[key] for key in ("acceptance_length", "over_frozen")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
