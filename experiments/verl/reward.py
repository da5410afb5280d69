"""How much of the list the response repeats in its order: 2 M / T, with M words in matching runs of T in both."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **more: Any) -> float:
    words = re.findall(r"\w+", solution_str.lower())
    return SequenceMatcher(None, ground_truth.split(), words, autojunk=False).ratio()
