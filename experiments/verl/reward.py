"""The share of the words that the response repeats in their order, a word a line; other lines count against it."""

from __future__ import annotations

from itertools import takewhile
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **more: Any) -> float:
    wanted = ground_truth.split()
    lines = [line.strip(" -*.").lower() for line in solution_str.splitlines() if line.strip()]
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, lines, strict=False)))
    return right / max(len(wanted), len(lines))
