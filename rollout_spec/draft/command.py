"""`rollout-spec draft train|eval|info`: a draft head for a policy, what it is worth, and what is known of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rollout_spec.config import ConfigError, load_config


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("draft", help="train and judge an EAGLE-3 draft head for a policy")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    train = actions.add_parser("train", help="train a head on the policy's own responses; goes on where it stopped")
    train.add_argument("--config", metavar="FILE", help="YAML configuration, see configs/draft/")
    train.add_argument(
        "--out", metavar="DIR", required=True, help="the head; what it was trained on is in DIR/training"
    )
    train.add_argument("--init", metavar="DIR", help="go on from this head instead of from nothing")
    train.add_argument("--policy-version", type=int, default=0, metavar="N", help="written down with the head")
    train.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    train.set_defaults(handler=_train)

    judge = actions.add_parser("eval", help="acceptance length on held-out prompts: predicted, or measured too")
    judge.add_argument("--head", metavar="DIR", required=True)
    judge.add_argument("--engine", action="store_true", help="measure it in vLLM too, and compare")
    judge.add_argument("--ks", default="1,3,5", metavar="K,K", help="with --engine: an engine for each (default 1,3,5)")
    judge.add_argument("--config", metavar="FILE", help="default: the configuration that the head was trained with")
    judge.add_argument("--out", metavar="FILE.json", help="write the figures there")
    judge.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    judge.set_defaults(handler=_eval)

    info = actions.add_parser("info", help="where a head came from, and what it promised on held-out prompts")
    info.add_argument("head", metavar="DIR")
    info.set_defaults(handler=_info)


def _train(args: argparse.Namespace) -> int:
    from rollout_spec.draft.pipeline import Training
    from rollout_spec.draft.report import predictions_table

    config = load_config(args.config, args.set)
    out = Path(args.out).expanduser()
    training = Training(config, out, Path(args.init).expanduser() if args.init else None, args.policy_version)
    try:
        provenance = training.run()
    except KeyboardInterrupt:
        print(f"interrupted; {training.work} keeps what was done, the same command goes on from there")
        raise
    print(predictions_table(provenance["acceptance"]))
    print(f"\nhead: {out}   ({provenance['seconds']['total'] / 60:.1f} min)")
    return 0


def _eval(args: argparse.Namespace) -> int:
    from rollout_spec.draft.checkpoint import load_head
    from rollout_spec.draft.judge import judge
    from rollout_spec.draft.report import judgement_table
    from rollout_spec.files import write_json

    folder = Path(args.head).expanduser()
    saved = load_head(folder)
    if args.config or not saved.provenance.get("config"):
        config = load_config(args.config, args.set)
    else:
        tree = dict(saved.provenance["config"])
        config = load_config(None, args.set, base=tree)
    result = judge(config, folder, saved, _ks(args.ks) if args.engine else [])
    print(judgement_table(result))
    if args.out:
        write_json(args.out, result)
    return 0


def _info(args: argparse.Namespace) -> int:
    from rollout_spec.draft.checkpoint import load_head
    from rollout_spec.draft.report import describe

    print(describe(load_head(Path(args.head).expanduser())))
    return 0


def _ks(text: str) -> list[int]:
    try:
        ks = [int(part) for part in text.split(",")]
    except ValueError:
        ks = []
    if not ks or not all(1 <= k <= 16 for k in ks):
        raise ConfigError(f"--ks {text!r}: must be numbers of drafts from 1 to 16, for example 1,3,5")
    return ks
