"""`rollout-spec profile`: what a step of this engine costs by batch and K, and the best K that follows from it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rollout_spec.config import load_config


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("profile", help="measure step times and acceptance of this engine; best K by batch")
    parser.add_argument("--config", metavar="FILE", help="YAML configuration, see configs/profile/ and configs/bench/")
    parser.add_argument("--out", metavar="FILE.json", required=True, help="the profile; a plot goes beside it")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    from rollout_spec.profile.report import plot, render
    from rollout_spec.profile.run import Profiler, say

    out = Path(args.out)
    started = time.monotonic()
    profiler = Profiler(load_config(args.config, args.set), out)
    try:
        profile = profiler.run()
    except KeyboardInterrupt:
        say(f"interrupted; {profiler.partial} keeps what was measured, the same command goes on from there")
        raise
    print(render(profile))
    picture = plot(profile, out.with_suffix(".png"))
    print(f"\nprofile: {out}" + (f", plot: {picture}" if picture else "") + f"   ({time.monotonic() - started:.0f} s)")
    return 0
