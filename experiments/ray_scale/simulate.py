"""512 engines in the simulator: one queue with long prompts first, against prompts split among engines beforehand.

    python experiments/ray_scale/simulate.py     # about ten minutes; writes simulated.json beside this file

Engines are replicas of a dense 70B model on four H200 (a roofline, not a measurement). Four times as many sequences as
fit at once, eight a prompt, with the lengths of a published clipped math run, a quarter as long. How alike a prompt's
responses are decides what their history is worth, and nothing published says it: `alike` is the share of the variance
(of the logarithm) that is the prompt's own, and three values are tried. Expected lengths come from one earlier epoch of
the same prompts, through the same `Lengths` and `longest_first` as in the job; siblings that finish meanwhile are not
used here. Resumable: rows that are in simulated.json already are not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from rollout_spec import provenance
from rollout_spec.config import load_config
from rollout_spec.control.makespan import Lengths, longest_first
from rollout_spec.files import write_json
from rollout_spec.simulate.contenders import make
from rollout_spec.simulate.fleet import Fleet, Ints, simulate
from rollout_spec.simulate.study import build_fleet, curve, step_times
from rollout_spec.workload.lengths import length_profile

HERE = Path(__file__).resolve().parent
SCHEMA = 2
PROFILE, SCALE, SAMPLES = "clipped_math", 0.25, 8
ALIKE = (0.0, 0.5, 0.9)
SEQUENCES_PER_SLOT = 4


def two_epochs(prompts: int, alike: float, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Lengths [prompt, sample] of the same prompts in two epochs."""
    own = rng.standard_normal((prompts, 1))
    shared, rest = np.sqrt(alike) * own, np.sqrt(1 - alike)
    below = np.vectorize(NormalDist().cdf)
    epochs = []
    for _ in range(2):
        u = below(shared + rest * rng.standard_normal((prompts, SAMPLES))).ravel()
        lengths = length_profile(PROFILE).quantile(np.clip(u, 1e-9, 1 - 1e-9)) * SCALE
        epochs.append(np.maximum(np.rint(lengths).astype(np.int64), 1).reshape(prompts, SAMPLES))
    return epochs[0], epochs[1]


def ordered(before: Ints, now: Ints) -> Ints:
    """Lengths in the order in which prompts start, their samples together."""
    lengths = Lengths(prompts=len(before))
    for prompt, row in enumerate(before.tolist()):
        for tokens in row:
            lengths.finished(prompt, tokens)
    return now[longest_first(range(len(now)), lengths)].ravel()


def run(fleet: Fleet, policy: Any, seed: int) -> dict[str, float]:
    began = time.perf_counter()
    outcome = simulate(fleet, policy, seed)
    return {
        "makespan_s": outcome.seconds,
        "tail_s": outcome.tail_seconds[0],
        "tokens": outcome.tokens,
        "took_s": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--policies", nargs="+", default=["off"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "simulated.json")
    args = parser.parse_args()
    config = load_config(
        HERE.parents[1] / "configs/simulate/dense_70b_h200.yaml",
        [f"simulate.replicas={args.engines}", f"simulate.max_num_seqs={args.max_num_seqs}"],
    )
    model, prior, ridge = step_times(config.simulate)
    base = build_fleet(config, model, curve(config.simulate, prior))
    prompts = args.engines * args.max_num_seqs * SEQUENCES_PER_SLOT // SAMPLES
    head = {
        "schema": SCHEMA,
        "engines": args.engines,
        "max_num_seqs": args.max_num_seqs,
        "prompts": prompts,
        "samples": SAMPLES,
        "lengths": {"profile": PROFILE, "scale": SCALE, "source": length_profile(PROFILE).source},
        "seed": args.seed,
    }
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        there = json.loads(args.out.read_text())
        rows = there["rows"] if {key: there[key] for key in head} == head else []
    for alike in ALIKE:
        before, now = two_epochs(prompts, alike, np.random.default_rng([args.seed, int(100 * alike)]))
        submitted = now.ravel()
        fleets = {
            "split beforehand": replace(base, lengths=(submitted,), queue="static"),
            "one queue": replace(base, lengths=(submitted,), queue="shared"),
            "one queue, long prompts first": replace(base, lengths=(ordered(before, now),), queue="shared"),
            "one queue, lengths known": replace(base, lengths=(np.sort(submitted)[::-1],), queue="shared"),
        }
        for policy in args.policies:
            for name, fleet in fleets.items():
                row = {"alike": alike, "policy": policy, "scheduling": name}
                if any(row.items() <= one.items() for one in rows):
                    continue
                rows.append(row | run(fleet, make(policy, fleet, prior, ridge), args.seed))
                first = next(one for one in rows if (one["alike"], one["policy"]) == (alike, policy))
                rows[-1]["speedup"] = first["makespan_s"] / rows[-1]["makespan_s"]
                print({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()}, flush=True)
                write_json(args.out, head | {"provenance": provenance.collect(), "rows": rows})


if __name__ == "__main__":
    main()
