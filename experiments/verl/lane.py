"""A command on a Ray of its own, as that Ray's job number LANE + 2.

    python experiments/verl/lane.py LANE COMMAND..

verl names the socket that weights go through by replica, rank and Ray job, and every local Ray counts jobs from 1: two
verl jobs on one machine, each with its own Ray, would send each other their weights.
"""

from __future__ import annotations

import os
import subprocess
import sys

import ray

ANOTHER_DRIVER = "import ray; ray.init(log_to_driver=False, logging_level='error')"


def main() -> int:
    lane, command = int(sys.argv[1]), sys.argv[2:]
    # Resources are for Ray's bookkeeping, as in configs/verl/cpu.yaml.
    context = ray.init(num_cpus=16, num_gpus=1, include_dashboard=False, log_to_driver=False)
    environment = {**os.environ, "RAY_ADDRESS": context.address_info["address"]}
    for _ in range(lane):
        subprocess.run([sys.executable, "-c", ANOTHER_DRIVER], env=environment, check=True)
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
