"""When to try another K: if what may be learned is worth the trial, and trials stay within an allowance.

The worth is the expected improvement over the present best (as in Bayesian optimisation) for as many steps as the
knowledge will serve; the price is the expected loss while trying. The allowance grows with the run, and with what
speculation gains; what speculating steps lose to K=0 is paid from it as measured, so that the worst case is bounded
whatever the model believes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Trials may cost this share of the run's time, so that the worst case stays within 1 % of no speculation ...
SHARE = 0.005
# ... plus this share of what speculation gains ...
GAIN_SHARE = 0.03
# ... and this many steps at the start, when everything is to be learned.
FIRST = 3.0
# ... counted over blocks of this many steps, for one step's tokens say little.
BLOCK = 16
# At most this many steps' worth of unused allowance is carried over.
SAVINGS = 8.0
# What is learned serves this many steps; more with requests waiting, for the batch then stays as it is.
HORIZON, HORIZON_WAITING = 100.0, 300.0
# A trial is one step to draft and then enough to measure: this many steps, fewer when many sequences tell at once.
STEPS, STEPS_WIDE, WIDE = 4, 2, 16
# While speculating, K=0 is measured again after this many steps, if the allowance has it: the reference must not
# go stale. Two steps, for the first still verifies.
REFERENCE_EVERY, REFERENCE_STEPS = 150, 2
# As many steps more for each tenth by which K=0 is behind: the choice between them is then safer, and a look dearer.
REFERENCE_BEHIND = 10.0
# Until K=0 was measured for so many steps at about this batch a look at it is due early, if it is expected to be
# behind by less than this share: a profile may be wrong about the very steps that it says are not worth making.
REFERENCE_KNOWN, REFERENCE_NEAR, REFERENCE_FIRST = 3, 1 / 3, 3
# Early is after so many steps there, and as many more for each tenth by which it is behind: a rollout of a hundred
# steps passes through five sizes of batch, and must not pay for a look at each.
REFERENCE_AFTER = 4


class Trial(NamedTuple):
    k: int
    steps: int
    reason: str


class Trials:
    """The allowance, and the choice of what to try."""

    def __init__(self) -> None:
        self._allowance = 0.0
        self._unit = 0.0
        self._gained, self._steps = 0.0, 0  # of the block
        self._since_reference = 0
        self.spent = 0.0  # seconds, expected

    @property
    def exhausted(self) -> bool:
        """Nothing new may be tried, be it expected to gain."""
        return self._allowance + min(0.0, self._gained) <= 0.0

    def observe(self, seconds: float, k: int, gained: float, count: int = 1) -> None:
        """`count` like steps; `gained`: seconds by which K=0 would have been slower for the same tokens in one of them,
        0 if it was K=0."""
        if not self._unit:
            self._unit, self._allowance = seconds, FIRST * seconds
        self._unit += min(0.1 * count, 1.0) * (min(seconds, 3 * self._unit) - self._unit)
        self._gained += gained * count
        self._steps += count
        change = SHARE * seconds * count
        if self._steps >= BLOCK:
            change += self._gained * GAIN_SHARE if self._gained > 0 else self._gained
            self._gained, self._steps = 0.0, 0
        self._allowance = min(max(self._allowance + change, -SAVINGS * self._unit), SAVINGS * self._unit)
        self._since_reference = 0 if k == 0 else self._since_reference + count

    def propose(
        self,
        decode: int,
        waiting: bool,
        best: int,
        candidates: Sequence[int],
        gain: Sequence[float],
        sd: Sequence[float],
        seconds: Sequence[float],
        seen: Sequence[float] = (REFERENCE_KNOWN,),
    ) -> Trial | None:
        """The trial most worth its price. By K: `gain` over the best (relative), its `sd`, step `seconds`, and `seen`,
        in how many steps it was measured at about this batch.
        """
        steps = STEPS_WIDE if decode >= WIDE else STEPS
        horizon = HORIZON_WAITING if waiting else HORIZON
        chosen, most, price = None, 0.0, 0.0
        for k in candidates:
            if k == best:
                continue
            loss = steps * max(0.0, -gain[k])
            worth = horizon * expected_improvement(gain[k], sd[k]) - loss
            if worth > most and loss * seconds[k] <= self._allowance:
                chosen, most, price = Trial(k, steps, "trial"), worth, loss * seconds[k]
        behind = max(0.0, -gain[0])
        first = seen[0] < REFERENCE_KNOWN and behind < REFERENCE_NEAR
        first &= sum(seen) >= REFERENCE_AFTER * (1.0 + REFERENCE_BEHIND * behind)
        due = self._since_reference >= REFERENCE_EVERY * (1.0 + REFERENCE_BEHIND * behind)
        if best and (first or (chosen is None and due)):
            steps = REFERENCE_FIRST if first else REFERENCE_STEPS
            price = steps * behind * seconds[0]
            if price <= self._allowance:
                chosen = Trial(0, steps, "reference")
        if chosen is not None:
            if chosen.k == 0:
                self._allowance -= price  # a longer draft is charged as measured
                self._since_reference = 0
            self.spent += price
        return chosen


def expected_improvement(gain: float, sd: float) -> float:
    """E[max(0, X)] for X normal with mean `gain`."""
    if sd <= 0.0:
        return max(0.0, gain)
    z = gain / sd
    if z < -6.0:
        return 0.0
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return sd * density + gain * 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
