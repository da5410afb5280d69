"""Acceptance as measured: per draft position, and how it changes as a response grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_spec.control.policy import StepResult
from rollout_spec.simulate.acceptance_curve import POSITION_BLOCK

# A block is held to its neighbour before it by this many sequence-steps: late blocks are few.
HELD = 20.0
# Powers are sought within this range.
POWERS = (0.02, 20.0)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many drafts were accepted; a sequence without a draft counts as one with none accepted."""

    accepted: tuple[float, ...] = ()
    """P(first j drafts accepted), j = 1 .. k_max; empty: not measured."""
    drafted: tuple[float, ...] = ()
    """P(at least j tokens drafted)."""
    sequence_steps: int = 0
    source: str = "not measured"
    by_position: tuple[float, ...] = (1.0,)
    """Each entry for POSITION_BLOCK response tokens: P(first j accepted) there is `accepted[j-1]` to this power."""

    def length(self) -> list[float]:
        """AL(K) for K = 0 .. k_max."""
        return [1.0, *(1.0 + np.cumsum(self.accepted)).tolist()]

    def drafts(self) -> list[float]:
        """Expected draft tokens a sequence for K = 0 .. k_max."""
        return [0.0, *np.cumsum(self.drafted).tolist()]


def count(steps: Sequence[StepResult], k_max: int, source: str) -> Acceptance:
    """From steps that were all asked for `k_max` drafts. All sequences must have started together."""
    asked = [step for step in steps if step.k == k_max and step.speculated]
    total = sum(step.speculated for step in asked)
    if not total:
        return Acceptance(source=f"{source}: no step speculated")
    accepted = np.sum([step.accepted for step in asked], axis=0) / total
    drafted = np.sum([step.drafted for step in asked], axis=0) / total
    return Acceptance(
        tuple(accepted.tolist()), tuple(drafted.tolist()), total, source, _by_position(asked, accepted.tolist())
    )


def _by_position(asked: Sequence[StepResult], survival: list[float]) -> tuple[float, ...]:
    """One power a block of mean position, from accepted tokens a sequence-step."""
    if survival[0] <= 0 or not all(step.context_tokens for step in asked):
        return (1.0,)
    start = min(step.context_tokens / step.decode for step in asked)
    steps: dict[int, list[StepResult]] = {}
    for step in asked:
        steps.setdefault(int((step.context_tokens / step.decode - start) // POSITION_BLOCK), []).append(step)
    powers: list[float] = []
    mean = float(sum(survival))
    for block in range(max(steps) + 1):
        found = steps.get(block, [])
        weight = sum(step.speculated for step in found)
        hits = sum(sum(step.accepted) for step in found)
        mean = (hits + HELD * mean) / (weight + HELD)
        powers.append(_power(survival, mean))
    return tuple(powers)


def _power(survival: list[float], mean: float) -> float:
    """The p for which the sum of survival ** p, which falls with p, is `mean`."""
    grid = np.geomspace(*POWERS, 400)
    sums = (np.asarray(survival)[:, None] ** grid).sum(0)
    return float(np.interp(-mean, -sums, grid))
