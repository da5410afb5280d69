"""When it pays to move live sequences from a crowded engine to a drained one. Pure bookkeeping: no Ray, no engine.

A sequence moves as prompt and tokens so far, which the other engine reads like a prompt. What a token takes by how many
sequences are live is what engines of this job have measured, speculation included: with fewer, a step is shorter and K
higher. A moved sequence can at most gain what is known of sizes that some engine has already been at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Weight of a new measurement.
NEWEST = 0.3
# A move must save this share of the time that is left, and this many seconds, for what a turn of the driver takes.
LEAST_SHARE = 0.05
LEAST_SECONDS = 0.5


class Load(NamedTuple):
    """An engine in the tail."""

    engine: int
    lengths: Sequence[int]
    """Tokens so far of what it has live, prompts not counted."""
    prompts: float
    """Mean tokens of their prompts."""


class Move(NamedTuple):
    source: int
    target: int
    sequences: int
    gain: float
    """Seconds by which the later of the two engines ends earlier, expected."""


class Balance:
    """What is known of the engines' pace; they are taken to be alike."""

    def __init__(self) -> None:
        self._pace: dict[int, float] = {}  # live sequences -> seconds a token of each of them
        self._fastest = 0.0  # tokens a second of an engine: reading goes at least as fast

    def measured(self, live: float, seconds: float, tokens: float) -> None:
        """An engine made so many tokens in so many seconds with about so many sequences live."""
        if live < 1 or seconds <= 0 or tokens <= 0:
            return
        pace, at = seconds * live / tokens, round(live)
        self._pace[at] = self._pace.get(at, pace) + NEWEST * (pace - self._pace.get(at, pace))
        self._fastest = max(self._fastest, tokens / seconds)

    def pace(self, live: int) -> float:
        """Seconds a token of each sequence with so many live; beyond what was seen, that of the nearest seen."""
        known = sorted(self._pace)
        at = bisect_left(known, live)
        if at == 0 or at == len(known):
            return self._pace[known[min(at, len(known) - 1)]]
        low, high = known[at - 1], known[at]
        return self._pace[low] + (self._pace[high] - self._pace[low]) * (live - low) / (high - low)

    def best(self, loads: Sequence[Load], remaining: Callable[[int], float]) -> Move | None:
        """The move between the fullest and the emptiest engine, if it pays. remaining: expected tokens still to come
        of a response that has so many."""
        if len(loads) < 2 or not self._pace:
            return None
        source = max(loads, key=lambda load: len(load.lengths))
        target = min(loads, key=lambda load: len(load.lengths))
        count = (len(source.lengths) - len(target.lengths)) // 2
        if count < 1:
            return None
        moving = moved_first(source.lengths)[:count]
        staying = moved_first(source.lengths)[count:]
        reading = sum(moving) + count * source.prompts
        now = max(self._end(source.lengths, remaining), self._end(target.lengths, remaining))
        then = max(
            self._end(staying, remaining),
            self._end([*target.lengths, *moving], remaining) + reading / self._fastest,
        )
        gain = now - then
        return Move(source.engine, target.engine, count, gain) if gain > LEAST_SECONDS + LEAST_SHARE * now else None

    def _end(self, lengths: Sequence[int], remaining: Callable[[int], float]) -> float:
        """Seconds until the last of them has ended, if none ended before."""
        return self.pace(len(lengths)) * max(map(remaining, lengths)) if lengths else 0.0


def moved_first(lengths: Sequence[int]) -> list[int]:
    """In the order in which they are moved: those with the fewest tokens are the cheapest to read again."""
    return sorted(lengths)
