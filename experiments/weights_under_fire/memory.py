"""Does an update leak? Resident memory over updates alone, over generation alone as in the storm, and over both.

    python experiments/weights_under_fire/memory.py     # 2 minutes on 2 cores; writes memory.json beside this file

The storm's memory grows while its engine meets new batch shapes and touches its cache for the first time; here the two
are told apart. Memory that was freed but not yet given back to the system is given back before each reading.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("engine", "shared")]

import fire  # noqa: E402
from fresh import run_fresh  # noqa: E402

from rollout_spec import provenance  # noqa: E402
from rollout_spec.files import write_json  # noqa: E402

SCHEMA = 1
READINGS = 5


def resident_mib() -> float:
    import psutil

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return round(float(psutil.Process().memory_info().rss) / 2**20, 1)


def measure(folder: Path, updates: int, actions: int) -> dict[str, list[float]]:
    """Readings (MiB) by phase, the first before it begins."""
    readings: dict[str, list[float]] = {}
    with fire.fire_engine(folder, 0, 0) as worker:
        storm = fire.Storm(worker, folder, 2, 2, seed=0)

        def phase(name: str, total: int, act: Callable[[int], Any]) -> None:
            readings[name] = [resident_mib()]
            for number in range(total):
                act(number)
                if (number + 1) % (total // READINGS) == 0:
                    readings[name].append(resident_mib())

        def generate(number: int) -> None:
            storm.random.choice([storm.submit, storm.steps])()

        phase("updates of the target", updates, lambda n: worker.update_weights(folder / f"target{n % 2}", n))
        phase("updates of the head", updates, lambda n: worker.refresh_draft(folder / f"head{n % 2}", n))
        phase("generation", actions, generate)
        storm.drain()
        phase(
            "updates of the target, afterwards", updates, lambda n: worker.update_weights(folder / f"target{n % 2}", n)
        )
        phase("updates of the head, afterwards", updates, lambda n: worker.refresh_draft(folder / f"head{n % 2}", n))
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100, help="in each phase")
    parser.add_argument("--actions", type=int, default=400, help="submissions and runs of steps")
    parser.add_argument("--out", type=Path, default=HERE / "memory.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        fire.make_models(folder, 2, 2)
        readings = run_fresh(measure, folder, args.updates, args.actions)
    write_json(
        args.out,
        {
            "schema": SCHEMA,
            "provenance": provenance.collect(),
            "updates": args.updates,
            "actions": args.actions,
            "resident_mib": readings,
        },
    )
    for name, values in readings.items():
        print(f"{name:36} {values[-1] - values[0]:+7.1f} MiB  {values}")


if __name__ == "__main__":
    main()
