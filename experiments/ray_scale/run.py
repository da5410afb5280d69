"""A job of 100,000 prompts on fake engines: does the driver's memory stay flat, and what does its queue cost?

    python experiments/ray_scale/run.py     # about two minutes on 2 cores; writes results.json beside this file

Engines make tokens of nothing, in no time, so everything measured is the job's own: reading, queue, Ray, Parquet.
Memory is the driver's own pages (USS), a reading every half second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / "ray_integration"), str(HERE.parents[1] / "integrations")]

import jobs  # noqa: E402
from rollout_spec_ray import job  # noqa: E402

from rollout_spec import provenance  # noqa: E402
from rollout_spec.files import write_json  # noqa: E402

SCHEMA = 1
PROMPT_TOKENS = 100
MIB = 2**20


class Memory(threading.Thread):
    """(seconds, USS in MiB, sequences finished) of this process while the job runs."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.readings: list[tuple[float, float, int]] = []
        self.stop = threading.Event()
        self._out, self._began = out, time.monotonic()

    def run(self) -> None:
        me = psutil.Process()
        while not self.stop.wait(0.5):
            parts = sum(1 for _ in (self._out / "parts").glob("0*.parquet"))
            self.readings.append((time.monotonic() - self._began, me.memory_full_info().uss / MIB, parts))


def write_prompts(path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    with path.open("w") as file:
        for i in range(count):
            tokens = min(int(rng.lognormvariate(2, 1)) + 1, 400)
            prompt = [5, tokens, *(rng.randrange(1000) for _ in range(PROMPT_TOKENS - 2))]
            file.write(json.dumps({"id": f"p{i}", "prompt": prompt}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    options = jobs.config(engines=args.engines, samples=1, flush_rows=2000, flush_seconds=5.0, engine__max_num_seqs=256)
    with tempfile.TemporaryDirectory() as scratch:
        path, out = Path(scratch) / "prompts.jsonl", Path(scratch) / "out"
        write_prompts(path, args.prompts, seed=0)
        with jobs.ray_session(num_cpus=args.engines):
            memory = Memory(out)
            memory.start()
            began, cpu = time.monotonic(), time.process_time()
            code, _ = jobs.run(out, path, options, jobs.worker(step_seconds=0.0))
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
            memory.stop.set()
            memory.join()
        report = json.loads((out / "report.json").read_text())
        size = sum(part.stat().st_size for part in (out / "parts").iterdir()) / MIB
    (attempt,) = report["attempts"]
    serving = [(t, uss) for t, uss, parts in memory.readings if parts]
    fifth = max(len(serving) // 5, 1)
    early = statistics.median(uss for _, uss in serving[:fifth])
    late = statistics.median(uss for _, uss in serving[-fifth:])
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "provenance": provenance.collect(),
        "prompts": args.prompts,
        "engines": args.engines,
        "complete": code == job.COMPLETE and report["complete"],
        "sequences": report["sequences"],
        "seconds": seconds,
        "sequences_per_second": args.prompts / seconds,
        "tokens": report["tokens"]["total"],
        "output_mib": size,
        "driver_cpu_seconds": cpu,
        "queue": attempt["queue"]
        | {
            "microseconds_an_operation": 1e6 * attempt["queue"]["seconds"] / attempt["queue"]["operations"],
            "share_of_the_time": attempt["queue"]["seconds"] / seconds,
        },
        "driver_memory_mib": {
            "first_fifth_of_serving": early,
            "last_fifth_of_serving": late,
            "growth": late - early,
            "highest": max(uss for _, uss, _ in memory.readings),
            "readings": [[round(t, 1), round(uss, 1), parts] for t, uss, parts in memory.readings],
        },
    }
    write_json(args.out, result)
    shown = {key: value for key, value in result.items() if key not in ("provenance", "driver_memory_mib")}
    print(json.dumps(shown, indent=1))
    print({key: value for key, value in result["driver_memory_mib"].items() if key != "readings"})
    return 0 if result["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
