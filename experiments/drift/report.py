"""What a run says: acceptance lengths by ten steps, each head over the frozen one, and what refreshes cost.

    python experiments/drift/report.py experiments/drift/with_trials

The folder holds results.json and, where refreshes are to be counted, the records of the arms (measured.jsonl,
every.jsonl: OUT/ARM/record.jsonl of the run).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from plot import NAMES

BLOCK = 10


def mean(rows: list[dict[str, Any]], arm: str) -> float:
    return sum(row["arms"][arm]["acceptance_length"] for row in rows) / len(rows)


def main() -> None:
    folder = Path(sys.argv[1])
    rows = json.loads((folder / "results.json").read_text("utf-8"))["rows"]
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        reward = sum(row["reward"] for row in block) / len(block)
        lengths = ", ".join(f"{arm} {mean(block, arm):.2f}" for arm in NAMES)
        print(f"steps {start:2}-{start + len(block) - 1:2}: reward {reward:.2f}; acceptance length {lengths}")
    last = rows[-BLOCK:]
    for arm in ("every", "measured"):
        over = [row["arms"][arm]["acceptance_length"] / row["arms"]["frozen"]["acceptance_length"] for row in last]
        print(f"{arm} over frozen, last {len(last)} steps: {median(over):.3f} [{min(over):.3f}-{max(over):.3f}]")
        record = folder / f"{arm}.jsonl"
        if record.exists():
            events = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
            counts = Counter(event.get("code", event["event"]) for event in events)
            elapsed = events[-1]["time"] - events[0]["time"]
            cost = rows[-1]["arms"][arm]["refresh_seconds"]
            print(f"  {dict(counts)}; {cost:.0f} s of refreshes in {elapsed:.0f} s: {cost / elapsed:.1%}")


if __name__ == "__main__":
    main()
