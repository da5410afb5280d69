"""Microseconds that controller and plug-in add to an engine step at 256 live sequences.

    python experiments/step_overhead.py [--sequences 256] [--rounds 5] [--steps 2000]

A real vLLM scheduler with the plug-in schedules every step and processes its output; only the model is made up, and
with it the clock that the policy reads. Timed are `_before_step` and `_after_step`, with the control loop and the
policy inside them. Goodput decides by itself: in one case drafts are never accepted, in the other three are often and
further ones never; with budgets, half of the sequences have three drafts accepted and the others none. Counted are the
steps that verified the K of the case (with budgets: any). Prints median, mean and 90th percentile, and the mean of the
policy's `decide` alone, which for most steps keeps the K it has and is dear where it chooses. Writes
results/step_overhead.json, and fails if a median, or a mean decision, is beyond its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
# The tests' scheduler without a model.
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "engine_unit")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

SCHEMA = "rollout-spec/step-overhead/2"
LIMIT_US = 50.0
DECISION_LIMIT_US, BUDGETS_LIMIT_US = 20.0, 200.0
K_MAX = 8
# Not counted: prompts, and a policy that has measured nothing yet.
WARM_UP_STEPS = 300


class Case(NamedTuple):
    name: str
    policy: dict[str, Any]
    k: int | None  # steps that verified this K are counted; None: all
    useful: int  # drafts beyond this position are never accepted
    draft_cost: float  # what a draft a sequence adds to a step, as a share of a step without
    limit_us: float | None = LIMIT_US  # of the median of both hooks
    decision_limit_us: float = DECISION_LIMIT_US


CASES = [
    Case("fixed, K=0", {"name": "off"}, 0, 0, 0.3),
    Case("goodput, K=0", {"name": "goodput"}, 0, 0, 0.3),
    Case("goodput, K=3, drafts verified", {"name": "goodput"}, 3, 3, 0.05),
    Case("budget, uneven sequences", {"name": "budget"}, None, 3, 0.05, None, BUDGETS_LIMIT_US),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step_overhead.json")
    args = parser.parse_args()
    import rollout_spec.engine.scheduler  # noqa: F401 - loads torch, so that the provenance names its GPUs
    from rollout_spec import provenance

    cases = []
    print(f"microseconds a step at {args.sequences} live sequences, {args.rounds} x {args.steps} steps")
    print(f"{'':32}{'median':>8}{'mean':>8}{'p90':>8}{'before':>9}{'after':>8}{'decision':>10}{'steps at K':>12}")
    for case in CASES:
        rounds = [measure(case, args.sequences, args.steps, seed) for seed in range(args.rounds)]
        before, after, decision = zip(*(sample for one in rounds for sample in one), strict=True)
        both = [first + second for first, second in zip(before, after, strict=True)]
        row = {
            "name": case.name,
            "median_us": round(median(both), 1),
            "mean_us": round(fmean(both), 1),
            "p90_us": round(quantiles(both, n=10)[-1], 1),
            "median_us_by_round": [round(median(first + second for first, second, _ in one), 1) for one in rounds],
            "before_median_us": round(median(before), 1),
            "after_median_us": round(median(after), 1),
            "decision_mean_us": round(fmean(decision), 1),
            "decision_median_us": round(median(decision), 1),
            "decision_max_us": round(max(decision), 1),
            "limit_us": case.limit_us,
            "decision_limit_us": case.decision_limit_us,
            "steps_counted": len(both),
            "samples_us": [round(sample, 1) for sample in both],
        }
        cases.append(row)
        print(
            f"{case.name:32}{row['median_us']:8}{row['mean_us']:8}{row['p90_us']:8}"
            f"{row['before_median_us']:9}{row['after_median_us']:8}{row['decision_mean_us']:10}"
            f"{len(both) / args.rounds / args.steps:12.0%}"
        )
    record = {
        "schema": SCHEMA,
        "provenance": provenance.collect(),
        "load_average": os.getloadavg(),  # beside others on the same cores, caches are cold and figures larger
        "sequences": args.sequences,
        "rounds": args.rounds,
        "steps": args.steps,
        "k_max": K_MAX,
        "cases": cases,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record) + "\n")
    beyond = [
        row["name"]
        for row in cases
        if (row["limit_us"] and row["median_us"] >= row["limit_us"])
        or row["decision_mean_us"] >= row["decision_limit_us"]
    ]
    print(f"{f'BEYOND its limit: {beyond}' if beyond else 'all within their limits'}; {args.out}")
    return 1 if beyond else 0


def measure(case: Case, sequences: int, steps: int, seed: int) -> list[tuple[float, float, float]]:
    """Microseconds in `_before_step`, in `_after_step`, and in the policy's `decide` within the first, of each step
    that verified the case's K."""
    from scheduler_harness import Driver, make_config, make_scheduler, request

    from rollout_spec.engine import scheduler as plugin

    rng = random.Random(seed)
    hits = [rng.choices(range(n + 1), [0.8**j for j in range(n + 1)], k=1021) for n in range(K_MAX + 1)]

    def accept(name: str, drafts: int) -> int:
        if case.k is None:
            return min(drafts, case.useful) if int(name[-1]) % 2 else 0
        return hits[min(drafts, case.useful)][rng.randrange(1021)] if drafts else 0

    tokens = (WARM_UP_STEPS + steps) * (1 + case.useful) + 64
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            Path(folder),
            k_max=K_MAX,
            settings={"policy": case.policy, "status_file": str(Path(folder) / "status.json")},
            max_num_seqs=sequences,
            max_num_batched_tokens=sequences * (K_MAX + 2),
            max_model_len=tokens + 64,
        )
        scheduler = make_scheduler(config, blocks=sequences * (tokens // 16 + 2))
        for number in range(sequences):
            scheduler.add_request(request(f"sequence-{number:08d}", prompt=8, output=tokens))
        driver = Driver(scheduler, accept, count=False)
        before, after = timed(scheduler, "_before_step"), timed(scheduler, "_after_step")
        decision = timed(scheduler._loop.policy, "decide")
        clock = Clock()
        plugin.time, real = clock, plugin.time
        counts_of = plugin._counts_of
        counts = timed(plugin, "_counts_of")
        try:
            verified = 0
            samples = []
            for step in range(WARM_UP_STEPS + steps):
                clock.step = 0.02 * rng.gauss(1.0, 0.02) * (1.0 + case.draft_cost * verified)
                driver.step()
                if step >= WARM_UP_STEPS and case.k in (verified, None):
                    samples.append((before[-1], after[-1] + counts[-1], decision[-1]))
                verified = scheduler._k
        finally:
            plugin.time, plugin._counts_of = real, counts_of
        status = scheduler._loop.status()
    if status["failed"] or len(samples) < steps / 2:
        raise SystemExit(f"{case.name}: only {len(samples)} of {steps} steps verified K={case.k}: {status}")
    return samples


class Clock:
    """The `time` that the plug-in sees: a step takes what the made-up model takes. Each reading ends half a step."""

    now = 0.0
    step = 0.0

    def perf_counter(self) -> float:
        self.now += self.step / 2
        return self.now


def timed(holder: Any, name: str) -> list[float]:
    """Wrap a function; its microseconds, call by call."""
    method: Callable[..., Any] = getattr(holder, name)
    samples: list[float] = []
    clock = time.perf_counter_ns

    def wrapper(*args: Any) -> Any:
        started = clock()
        result = method(*args)
        samples.append((clock() - started) / 1e3)
        return result

    setattr(holder, name, wrapper)
    return samples


if __name__ == "__main__":
    sys.exit(main())
