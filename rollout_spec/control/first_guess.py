"""What an engine step should take before this engine was measured: a profile held to the first steps, or a line.

A profile's shape is worth something only on a machine like its own, and the first steps tell: all its times are
scaled to them, and if that takes too much it is another machine's or model's, and is put aside. Without a profile the
guess is a pessimistic line: mostly proportional to the tokens of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rollout_spec.control.step_times import StepTimes, blend

# The median of this many first steps sets the level, so that one slow start does not.
FIRST_STEPS = 3
# A profile is put aside if it is off by this factor, which no throttling explains, and by this many of its spreads.
MOST_OFF, MOST_SPREADS = 2.0, 4.0
# Without a profile this share of the first steps' time does not depend on tokens.
FLAT = 0.3
# Context tokens a sequence are rounded to this for looking up the profile.
CONTEXT_STEP = 512


class Step(NamedTuple):
    """Work and time of a measured step."""

    seconds: float
    decode: int
    draft_tokens: int
    k_next: int
    context: int


class FirstGuess:
    """Expected time of steps, in units of one typical first step."""

    def __init__(self, k_max: int, profile: StepTimes | None) -> None:
        self.k_max = k_max
        self.profile = profile
        self.unit = 0.0
        """Seconds; 0 until `start` or `calibrate`."""
        self.tokens, self.context = 1.0, 1.0
        """Of the typical step: decoding and draft tokens, and context tokens."""
        self._share = profile.draft_share if profile is not None else 0.0
        self._level = 1.0  # the engine's times over the profile's
        self._table: dict[tuple[int, int], list[float]] = {}

    def start(self, decode: int, context: int) -> None:
        """Take a profile at its word, for decisions before the first steps."""
        assert self.profile is not None
        self._set_scale(self._level * self._seconds(decode, context)[0], decode, context)

    def calibrate(self, steps: Sequence[Step]) -> None:
        """Set the level by the first steps; `profile` is None afterwards if it can't be this engine's."""
        if self.profile is not None:
            self.start(steps[0].decode, steps[0].context)
            off = [s.seconds / (self.unit * self.of(s.decode, s.draft_tokens, s.k_next, s.context)) for s in steps]
            level = sorted(off)[len(off) // 2]
            most = max(MOST_OFF, math.exp(MOST_SPREADS * self.profile.spread))
            if 1.0 / most <= level <= most:
                self._level = level
                self.start(steps[0].decode, steps[0].context)
                return
            self.profile = None
        typical = sorted(steps)[len(steps) // 2]
        self._set_scale(typical.seconds, typical.decode + typical.draft_tokens, typical.context)

    def of(self, decode: float, draft_tokens: float, k_next: int, context: float) -> float:
        """A step that verifies `draft_tokens` and drafts `k_next`."""
        if self.profile is None:
            return FLAT + (1.0 - FLAT) * (decode + draft_tokens) / self.tokens
        times = self._times(round(decode), round(context))
        return blend(times, min(draft_tokens / decode, float(self.k_max)), k_next, self._share)

    def by_k(self, decode: int, drafts: Sequence[float], context: int) -> list[float]:
        """Steady steps of K = 0, 1, ..., with `drafts[K]` draft tokens a sequence."""
        if self.profile is None:
            per_draft = (1.0 - FLAT) * decode / self.tokens
            return [FLAT + per_draft * (1.0 + each) for each in drafts]
        times = self._times(decode, context)
        return [blend(times, each, k, self._share) for k, each in enumerate(drafts)]

    def _times(self, decode: int, context: int) -> list[float]:
        """The profile's by K, in units."""
        each = context // max(decode, 1) // CONTEXT_STEP
        times = self._table.get((decode, each))
        if times is None:
            if len(self._table) > 4096:
                self._table.clear()
            scale = self._level / self.unit
            times = [scale * seconds for seconds in self._seconds(decode, context)]
            self._table[decode, each] = times
        return times

    def _seconds(self, decode: int, context: int) -> list[float]:
        assert self.profile is not None
        each = context // max(decode, 1) // CONTEXT_STEP
        return self.profile.by_k(decode, self.k_max, (each + 0.5) * CONTEXT_STEP if context else 0.0)

    def _set_scale(self, unit: float, tokens: int, context: int) -> None:
        self.unit, self.tokens, self.context = unit, float(max(tokens, 1)), float(max(context, 1))
        self._table.clear()
