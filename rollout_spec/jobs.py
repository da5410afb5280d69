"""`rollout-spec submit` and `rollout-spec report`: a rollout on a Ray cluster, and what came of it.

What they do is in integrations/rollout_spec_ray; this module only declares them, so that neither ray nor pyarrow is
needed by anything else.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from rollout_spec.config import ConfigError


def add_parser(subparsers: Any) -> None:
    submit = subparsers.add_parser("submit", help="a rollout on a Ray cluster, or on a local Ray")
    submit.add_argument("--address", metavar="URL", help="of the cluster's jobs, such as http://head:8265; none: local")
    submit.add_argument("--config", metavar="FILE", help="YAML configuration, see configs/ray/")
    submit.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    submit.add_argument("--prompts", metavar="FILE", required=True, help="JSONL or Parquet, as the cluster sees it")
    submit.add_argument(
        "--out", metavar="DIR", required=True, help="output, as the cluster sees it; goes on from there"
    )
    submit.add_argument("--weights", metavar="DIR", help="safetensors to begin with, in place of the model's own")
    submit.add_argument("--policy-version", type=int, default=1, metavar="N", help="of --weights (default 1)")
    submit.add_argument("--watch", metavar="DIR", help="take new weights whenever DIR/latest.json names some")
    submit.add_argument(
        "--update-mode",
        choices=("drained", "abort_resume", "in_flight"),
        default="drained",
        help="what sequences that run do then (with --watch)",
    )
    submit.set_defaults(handler=lambda args: _integration("submit").submit(args))
    report = subparsers.add_parser("report", help="what a rollout job made, from its output")
    report.add_argument("dir", metavar="DIR", help="the --out of the job, a path or a URI")
    report.add_argument("--json", action="store_true", help="the same as JSON")
    report.set_defaults(handler=_report)


def _report(args: argparse.Namespace) -> int:
    store = _integration("store").Store(_integration("places").place(args.dir, "DIR"))
    module = _integration("report")
    result = module.report(store)
    print(json.dumps(result, indent=1) if args.json else module.render(result))
    return 0 if result["complete"] else 3


def _integration(name: str) -> Any:
    try:
        return importlib.import_module(f"rollout_spec_ray.{name}")
    except ImportError as error:
        raise ConfigError(f"this command needs ray and pyarrow: pip install 'rollout-spec[ray]' ({error})") from error
