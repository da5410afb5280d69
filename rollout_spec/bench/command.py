"""`rollout-spec bench`: compare speculation policies on one workload, on this machine."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rollout_spec.config import load_config

# Flags and the options they stand for.
FLAGS = {
    "model": "model",
    "drafter": "drafter.method",
    "arms": "bench.arms",
    "workload": "workload.name",
    "temperature": "sampling.temperature",
    "repeats": "bench.repeats",
    "seed": "bench.seed",
    "max_num_seqs": "engine.max_num_seqs",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="compare speculation policies on a rollout workload")
    parser.add_argument("--config", metavar="FILE", help="YAML configuration, see configs/bench/")
    parser.add_argument("--out", metavar="DIR", required=True, help="results.json, plots and report.html go here")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    parser.add_argument("--model", help="a name that was fetched, a folder or a hub name")
    parser.add_argument("--drafter", help="ngram, suffix, draft_model, eagle, eagle3, mtp or medusa")
    parser.add_argument("--arms", help="comma-separated, for example off,fixed:3,table,goodput@suffix")
    parser.add_argument("--workload", metavar="NAME|FILE.jsonl")
    parser.add_argument("--temperature")
    parser.add_argument("--repeats")
    parser.add_argument("--seed")
    parser.add_argument("--max-num-seqs")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    from rollout_spec.bench.report import write_report
    from rollout_spec.bench.runner import Benchmark, say
    from rollout_spec.bench.table import render

    config = load_config(args.config, [*args.set, *flag_overrides(args)])
    started = time.monotonic()
    benchmark = Benchmark(config, Path(args.out))
    failures: list[str] = []
    try:
        failures = benchmark.run()
    except KeyboardInterrupt:
        say(f"interrupted; {benchmark.path} keeps every finished run, the same command goes on from there")
        raise
    finally:
        if any(arm.runs for arm in benchmark.results.arms):
            report = write_report(benchmark.results, args.out)
            print(render(benchmark.results))
            print(f"\nreport: {report}   ({time.monotonic() - started:.0f} s)")
    for arm in benchmark.results.arms:
        if arm.policy != "off" and arm.runs and not any(run.draft_tokens for run in arm.runs):
            say(f"note: arm {arm.name!r} never speculated in this run")
    for failure in failures:
        say(f"failed: {failure}")
    return 1 if failures else 0


def flag_overrides(args: argparse.Namespace) -> list[str]:
    """`key=value` for each flag that was given; the value is YAML, so texts are quoted, as JSON is YAML."""
    overrides = []
    for flag, option in FLAGS.items():
        value = getattr(args, flag)
        if value is None:
            continue
        if flag == "arms":
            value = json.dumps([arm.strip() for arm in value.split(",") if arm.strip()], ensure_ascii=False)
        elif flag in ("model", "drafter", "workload"):
            value = json.dumps(value, ensure_ascii=False)
        overrides.append(f"{option}={value}")
    return overrides
