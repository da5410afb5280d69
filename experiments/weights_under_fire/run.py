"""Weight updates under fire: 200 updates of a target and its EAGLE-3 head in one running engine, at random moments.

    python experiments/weights_under_fire/run.py     # about 3 minutes on 2 cores; writes results.json beside this file

Between them generation, aborts, files cut off, wrong shapes, incomplete and not finite weights, senders killed while
they write, models that break while they load, and heads whose weights are gone as after a level 2 sleep. Every span of
every response is then compared with a new engine that was started with the version it names: tokens, log-probabilities
and, where one head made all drafts, how many of them were accepted. What runs on over the cache of an older policy
(mode in_flight) is no fresh engine's and is only counted. Models are tiny and random; greedy, float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("engine", "shared")]

import fire  # noqa: E402
import verdict  # noqa: E402
from fresh import run_fresh  # noqa: E402

from rollout_spec import provenance  # noqa: E402
from rollout_spec.files import write_json  # noqa: E402

SCHEMA = 1
TARGETS, HEADS = 4, 3


def growth(memory: list[float]) -> dict[str, float]:
    """MiB: the median of the second fifth of the updates (the first fills caches) and of the last."""
    fifth = max(len(memory) // 5, 1)
    early, late = statistics.median(memory[fifth : 2 * fifth]), statistics.median(memory[-fifth:])
    return {"early": early, "late": late, "growth": late - early}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        fire.make_models(folder, TARGETS, HEADS)
        result = run_fresh(fire.storm, folder, args.updates, TARGETS, HEADS, args.seed)
        found = verdict.check(folder, result)
    rollouts = [rollout for _, rollout in result["rollouts"]]
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "provenance": provenance.collect(),
        "updates": args.updates,
        "seed": args.seed,
        "targets": TARGETS,
        "heads": HEADS,
        "storm_seconds": result["seconds"],
        "done": dict(sorted(result["done"].items())),
        "responses": len(rollouts),
        "tokens": sum(len(rollout.token_ids) for rollout in rollouts),
        "responses_of_several_versions": sum(len(rollout.spans) > 1 for rollout in rollouts),
        "compared": {name: value for name, value in found.items() if name != "wrong"},
        "wrong": found["wrong"],
        "left_in_shared_memory": result["left_in_shared_memory"],
        "memory": growth(result["memory_mib"]),
        "memory_mib": [round(value, 1) for value in result["memory_mib"]],
    }
    write_json(args.out, report)
    print(f"{report['responses']} responses, {report['tokens']} tokens; done: {report['done']}")
    print(f"compared: {report['compared']}; wrong: {len(found['wrong'])}; memory MiB: {report['memory']}")
    return 1 if found["wrong"] or result["left_in_shared_memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
