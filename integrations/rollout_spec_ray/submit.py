"""`rollout-spec submit`: the job through Ray's job submission, its log followed to the end; or on a Ray of its own."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from rollout_spec.config import Config, ConfigError, load_config
from rollout_spec_ray.job import check, execute, guarded
from rollout_spec_ray.places import absolute, check_public, place

CONFIG = "config.yaml"


def submit(args: argparse.Namespace) -> int:
    """The job's exit code. Bad input is refused here, before anything is sent."""
    return guarded(lambda: _submit(args))


def _submit(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.set)
    check(config)
    for option in ("prompts", "out"):
        place(getattr(args, option), f"--{option}")
    if args.address is None:
        return execute(config, args, "local")
    return _send(config, args)


def _send(config: Config, args: argparse.Namespace) -> int:
    from ray.job_submission import JobSubmissionClient

    check_public(args.address, "--address")
    with tempfile.TemporaryDirectory(prefix="rollout_spec_job_") as folder:
        (Path(folder) / CONFIG).write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        try:
            client = JobSubmissionClient(args.address)
            name = client.submit_job(entrypoint=entry_point(args), runtime_env={"working_dir": folder})
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"--address {args.address}: the job was not taken: {error}") from error
    print(f"job {name} is submitted; `ray job stop --address {args.address} {name}` ends it", flush=True)
    try:
        asyncio.run(_follow(client, name))
    except KeyboardInterrupt:
        print(f"\njob {name} goes on; `ray job logs -f --address {args.address} {name}` shows it", file=sys.stderr)
        raise
    info = client.get_job_info(name)
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    print(f"rollout-spec: job {name} {info.status.value}: {info.message}", file=sys.stderr)
    return 0 if info.status.value == "SUCCEEDED" else 1


def entry_point(args: argparse.Namespace) -> str:
    """The command that the cluster runs: every place absolute, the configuration from the job's own folder."""
    words = ["python", "-m", "rollout_spec_ray.job", "--config", CONFIG]
    for option in ("prompts", "out", "weights", "watch"):
        value = getattr(args, option)
        if value is not None:
            words += [f"--{option}", absolute(value)]
    if args.weights:
        words += ["--policy-version", str(args.policy_version)]
    words += ["--update-mode", args.update_mode]
    return shlex.join(words)


async def _follow(client: Any, name: str) -> None:
    async for lines in client.tail_job_logs(name):
        print(lines, end="", flush=True)
