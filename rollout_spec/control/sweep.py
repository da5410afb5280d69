"""Goes through K after K, for measuring: each for some steps, between them steps that draft or verify only.

A visit to K is the decisions K, K, .., 0, 0. Its first step drafts and verifies nothing, the last but one verifies
and drafts nothing, the last does neither: their differences split a step into base, drafting and verification. K = 0 is
visited too, because a step right after a verification is slower than one among its like.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from rollout_spec.control.fixed import Static
from rollout_spec.control.policy import Decision, StepView

# Steps that draft and verify K, in each visit.
STEADY = 3


class Sweep(Static):
    """Each round visits every K once, 0 included, in a new order: what drifts disturbs all of them alike."""

    def __init__(self, ks: Sequence[int]) -> None:
        self.ks = sorted({0, *ks})
        self._rng = Random(0)
        self._plan: list[Decision] = []

    @property
    def round_steps(self) -> int:
        """Steps of a round."""
        return len(self.ks) * (STEADY + 3)

    def decide(self, view: StepView) -> Decision:
        if not self._plan:
            for k in self._rng.sample(self.ks, len(self.ks)):
                # Taken from the end.
                self._plan += [Decision(0, "sweep")] * 2 + [Decision(k, "sweep")] * (STEADY + 1)
        return self._plan.pop()


def spread_out(k_max: int) -> list[int]:
    """A few K from 1 to k_max, ever further apart: 1, 2, 3, 5, 8, 13, ..."""
    ks, k, after = [], 1, 2
    while k < k_max:
        ks.append(k)
        k, after = after, k + after
    return [*ks, k_max]
