"""How fast an engine goes by how much it has live: windows of steps, closed at each look at its token counter."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    live: float
    """Sequences, mean over steps."""
    seconds: float
    tokens: float


class Pace:
    def __init__(self) -> None:
        self._steps, self._live, self._seconds = 0, 0, 0.0

    def step(self, live: int, seconds: float) -> None:
        """A step, the time since the last one included, with so many sequences in the engine."""
        self._steps += 1
        self._live += live
        self._seconds += seconds

    def close(self, tokens: float) -> Window | None:
        """The window that ends here, in which so many tokens were made; None without a step."""
        window = Window(self._live / self._steps, self._seconds, tokens) if self._steps else None
        self._steps, self._live, self._seconds = 0, 0, 0.0
        return window
