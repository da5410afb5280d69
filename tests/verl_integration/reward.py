"""A reward that varies between the responses of a prompt, so that GRPO has something to learn from."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

# A folder of refreshes: a response is judged when the first of them, if it has begun, is over.
REFRESHES = "ROLLOUT_SPEC_TEST_REFRESHES"
SECONDS = 200.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, **more: Any) -> float:
    first = Path(os.environ.get(REFRESHES, "/nowhere")) / "refresh-1"
    until = time.monotonic() + SECONDS
    while (first / "job.json").exists() and not (first / "result.json").exists() and time.monotonic() < until:
        time.sleep(0.1)
    return sum(map(ord, solution_str)) % 8 / 7
