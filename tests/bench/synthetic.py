"""Plausible runs without an engine: a heavy-tailed rollout stepped through with a toy cost model."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from rollout_spec.bench.results import LiveBatch, Results, Run, Timeline, live_batch_bounds

ACCEPTANCE = 0.7
Policy = Callable[[int], int]

ARMS: dict[str, tuple[str, str | None, Policy]] = {
    "off": ("off", None, lambda live: 0),
    "fixed:3": ("fixed", "ngram", lambda live: 3),
    "fixed:5": ("fixed", "ngram", lambda live: 5),
    "table": ("table", "ngram", lambda live: 3 if live <= 8 else 0),
    "goodput": ("goodput", "ngram", lambda live: 0 if live > 12 else 8 if live <= 2 else 5 if live <= 4 else 2),
}
PROVENANCE: dict[str, Any] = {
    "time": "2026-01-02T03:04:05+00:00",
    "command": ["rollout-spec", "bench"],
    "config_fingerprint": "0123456789abcdef",
    "versions": {"vllm": "0.31.0", "torch": "2.13.0", "python": "3.11.7"},
    "git": {"revision": "abc", "dirty": False},
    "device": {"cpu": "Imagined CPU", "cores": 2, "memory_gib": 8.0, "gpus": []},
}
WORKLOAD: dict[str, Any] = {"model": "smollm2-135m", "name": "heavy_tail", "num_prompts": 8, "n": 4, "max_num_seqs": 32}


def make_run(policy: Policy, repeat: int = 0, scale: float = 1.0) -> Run:
    """One rollout of 32 sequences; `scale` stretches its times."""
    rng = random.Random(repeat)
    noise = random.Random(repeat * 1000 + int(scale * 1000) + policy(1))
    left = [min(600, int(rng.paretovariate(1.1) * 30)) for _ in range(32)]
    total, clock, drafted, accepted, drafts = sum(left), 0.0, 0, 0, 0
    timeline: tuple[list[float], list[int], list[int]] = ([], [], [])
    reached, passed = [0] * 8, [0] * 8
    buckets: dict[tuple[int, int], tuple[float, int]] = {}
    while left:
        live, k = len(left), policy(len(left))
        seconds = scale * noise.uniform(0.97, 1.03) * (0.02 + 0.0012 * live * (k + 1) + (0.002 if k else 0.0))
        gained = 0
        for i in range(live):
            hit = next((j for j in range(k) if noise.random() > ACCEPTANCE), k)
            for j in range(k):
                reached[j] += 1
                passed[j] += j < hit
            drafted, accepted, drafts = drafted + k, accepted + hit, drafts + (k > 0)
            step = min(left[i], 1 + hit)
            left[i] -= step
            gained += step
        clock += seconds
        timeline[0].append(clock)
        timeline[1].append(live)
        timeline[2].append(k)
        before, tokens = buckets.get(live_batch_bounds(live), (0.0, 0))
        buckets[live_batch_bounds(live)] = (before + seconds, tokens + gained)
        left = [n for n in left if n]
    return Run(
        repeat=repeat,
        started_at=f"2026-01-02T03:0{repeat}:00+00:00",
        makespan_s=clock,
        output_tokens=total,
        steps=len(timeline[0]),
        draft_tokens=drafted,
        accepted_tokens=accepted,
        acceptance_length=1 + accepted / drafts if drafts else None,
        acceptance_per_position=[p / r for p, r in zip(passed, reached, strict=True) if r],
        k_histogram=dict(Counter(timeline[2])),
        by_live_batch=[LiveBatch(lo=lo, hi=hi, seconds=s, output_tokens=n) for (lo, hi), (s, n) in buckets.items()],
        timeline=Timeline(t_s=timeline[0], live=timeline[1], k=timeline[2]),
    )


def flat_run(repeat: int, makespan_s: float) -> Run:
    """A run of which only the makespan matters."""
    return Run(
        repeat=repeat,
        started_at="2026-01-02T03:04:05+00:00",
        makespan_s=makespan_s,
        output_tokens=math.ceil(makespan_s * 100),
        steps=10,
        draft_tokens=0,
        accepted_tokens=0,
        k_histogram={0: 10},
    )


def make_results(arms: list[str] | None = None, repeats: int = 3, scale: dict[str, float] | None = None) -> Results:
    results = Results(PROVENANCE, WORKLOAD)
    for name in arms if arms is not None else list(ARMS):
        policy, drafter, choose = ARMS[name]
        results.add_arm(name, policy, drafter)
        for repeat in range(repeats):
            results.add_run(name, make_run(choose, repeat, (scale or {}).get(name, 1.0)))
    return results


def timed(**arms: list[float]) -> Results:
    """Results with these makespans, repeat by repeat, and nothing else; arms are named by their policy."""
    results = Results(PROVENANCE, WORKLOAD)
    for policy, times in arms.items():
        results.add_arm(policy, policy, None if policy == "off" else "ngram")
        for repeat, makespan_s in enumerate(times):
            results.add_run(policy, flat_run(repeat, makespan_s))
    return results
