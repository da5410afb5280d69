"""How long the long tail of a rollout takes: the time in which few of its sequences are still alive."""

from __future__ import annotations

# Below this share of the most that were alive since the engine last drained, it is the tail.
SHARE = 0.1


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
