"""A reward that varies between the responses of a prompt, so that GRPO has something to learn from."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **more: Any) -> float:
    return sum(map(ord, solution_str)) % 8 / 7
