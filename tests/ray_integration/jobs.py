"""What tests of jobs share: a Ray, configurations, files of prompts, and what an output directory holds.

Run as a program it is a driver of its own, which tests can kill: see `driver`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake
import psutil

from rollout_spec.config import Config, parse_config


@contextmanager
def ray_session(**options: Any) -> Iterator[str]:
    """A Ray of our own for the time of the block; its address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    context = ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def config(**options: Any) -> Config:
    """Two fake engines of eight sequences; `ray` options by name, others as group__option."""
    tree: dict[str, Any] = {
        "engine": {"max_num_seqs": 8},
        "ray": {"engines": 2, "flush_seconds": 0.2, "progress_seconds": 0.5, "samples": 2},
    }
    for name, value in options.items():
        group, _, option = name.rpartition("__")
        if group == "top":
            tree[option] = value
        else:
            tree.setdefault(group or "ray", {})[option] = value
    return parse_config(tree)


def worker(**options: Any) -> Any:
    """What makes a fake engine in an actor's process."""
    import ray

    ray.cloudpickle.register_pickle_by_value(fake)
    return functools.partial(fake.FakeWorker, **options)


def write_prompts(path: Path, prompts: Sequence[Any], **columns: Any) -> Path:
    """A JSONL file; prompt i has id p<i>."""
    lines = [json.dumps({"id": f"p{i}", "prompt": prompt, **columns}) for i, prompt in enumerate(prompts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(
    out: Path, prompts: Path, options: Config, make_worker: Any, said: list[str] | None = None, **more: Any
) -> tuple[int, list[str]]:
    """A job in this process: exit code and what it said. said: a list that another thread reads meanwhile."""
    from rollout_spec_ray import job

    said = [] if said is None else said
    return job.run(options, str(prompts), str(out), make_worker=make_worker, say=said.append, **more), said


def rows(out: Path) -> list[dict[str, Any]]:
    from rollout_spec_ray.places import place
    from rollout_spec_ray.rows import SCHEMA
    from rollout_spec_ray.store import Store

    return [row for table in Store(place(str(out), "out")).read(SCHEMA.names) for row in table.to_pylist()]


def keys(out: Path) -> list[tuple[str, int]]:
    """(prompt id, sample id) of every row, sorted: what is there twice is here twice."""
    return sorted((row["prompt_id"], row["sample_id"]) for row in rows(out))


def asked(count: int, n: int = 2) -> list[tuple[str, int]]:
    return sorted((f"p{i}", sample) for i in range(count) for sample in range(n))


def engine_processes(of: int | None = None) -> list[psutil.Process]:
    """Processes of actors below a process (none: this one)."""
    found = []
    for process in psutil.Process(of).children(recursive=True):
        try:
            if process.cmdline()[0].startswith("ray::EngineActor"):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def wait_for(happened: Any, seconds: float = 60.0) -> Any:
    """Its first true value; AssertionError if there is none in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := happened():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def driver(out: Path, prompts: Path, *arguments: str) -> subprocess.Popen[str]:
    """A job with fake engines in a process of its own; arguments as in `main` below."""
    command = [sys.executable, __file__, "--prompts", str(prompts), "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    from rollout_spec_ray import job

    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    parser.add_argument("--address", default="local")
    parser.add_argument("--gate")
    parser.add_argument("--step-seconds", type=float, default=0.01)
    parser.add_argument("--file-limit", type=int, help="bytes that a file may have from when the job starts")
    args = parser.parse_args()

    def execute() -> int:
        with job.ray_for(config(), args.address):
            if args.file_limit:
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (args.file_limit, hard))
            made = worker(gate=args.gate, step_seconds=args.step_seconds)
            return job.run(config(), args.prompts, args.out, make_worker=made, say=lambda line: print(line, flush=True))

    return job.guarded(execute)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations"))
    sys.exit(main())
