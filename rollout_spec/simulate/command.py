"""`rollout-spec simulate`: what a policy costs on a fleet, where the crossover is, what a better drafter buys."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollout_spec.config import load_config


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("simulate", help="compare speculation policies on a fleet, in simulated time")
    parser.add_argument("--config", metavar="FILE", help="YAML configuration, see configs/simulate/")
    parser.add_argument("--out", metavar="DIR", required=True, help="results.json and simulation.png go here")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    from rollout_spec.simulate.report import render, write
    from rollout_spec.simulate.study import run

    config = load_config(args.config, args.set)
    results = run(config)
    print(render(results))
    print(f"\nresults: {write(results, Path(args.out))}")
    return 0
