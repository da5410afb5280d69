"""`rollout-spec`: one subcommand a module. Each module has `add_parser(subparsers)`, which sets `handler`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rollout_spec import __version__
from rollout_spec.config import ConfigError

# Imported for every call: none of them may import torch or vLLM before its handler runs.
COMMANDS = (
    "rollout_spec.bench.command",
    "rollout_spec.draft.command",
    "rollout_spec.engine.doctor",
    "rollout_spec.jobs",
    "rollout_spec.model",
    "rollout_spec.profile.command",
    "rollout_spec.simulate.command",
)

BAD_INPUT = 2
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout-spec",
        description="RL rollouts on stock vLLM with dynamic speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=f"rollout-spec {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        importlib.import_module(module).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, what the handler returns, 2 for bad input, 130 for Ctrl-C."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.handler(args) or 0)
    except ConfigError as error:
        print(f"rollout-spec: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
