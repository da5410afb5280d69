"""How long the long tail of a rollout takes: the time in which few of its sequences are still alive."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Below this share of a rollout's sequences (in an engine: of the most that were alive since it last drained).
SHARE = 0.1


def tail_seconds(ends: NDArray[np.float64]) -> float:
    """Of a rollout whose sequences ended at these seconds [sequences], in any order."""
    left = math.ceil(SHARE * len(ends)) - 1
    if left <= 0:
        return 0.0
    ends = np.sort(ends)
    return float(ends[-1] - ends[-1 - left])


class Tail:
    """Told of every step; a rollout reaches from one drained engine to the next."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._peak = 0

    def step(self, alive: int, seconds: float) -> None:
        """`alive`: sequences that run or wait."""
        if alive > self._peak:
            self._peak = alive
        elif alive < SHARE * self._peak:
            self.seconds += seconds

    def drained(self) -> None:
        self._peak = 0
