"""How many drafts are accepted: per draft position, with uncertainty, forgetting as the policy moves.

Two chains over the positions, of the sequences in steps that asked for K >= j: a share of those that have a
draft token at j-1 also has one at j (an n-gram drafter may find none, or a short one), and a share of those whose
drafts up to j-1 were accepted has a token at j that is accepted. Being conditional on the position before, the
shares of steps with different K can be pooled; their running products give

    AL(K) = 1 + sum_{j<=K} P(first j accepted)        drafts(K) = sum_{j<=K} P(a token is drafted at j)

Positions never reached take the rate of the position before (geometric tail), held loosely.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_spec.control.policy import StepResult

# Before any evidence a draft token is as likely accepted as not, worth this many observations.
PRIOR_RATE = 0.5
PRIOR_WEIGHT = 4.0
# Evidence older than about this many sequence-steps is forgotten; 1/sqrt(400) is a 5 % error of a rate.
MEMORY = 400.0
# And, speculating or not, older than about this many engine steps: what is not looked at grows uncertain.
MEMORY_STEPS = 500.0

Vector = NDArray[np.float64]


class Acceptance:
    """Decayed counts per draft position and what follows from them. Arrays are [k_max] unless stated."""

    def __init__(self, k_max: int) -> None:
        self.k_max = k_max
        self._asked = np.zeros(k_max)  # had drafts up to j-1 and were asked for j
        self._reached = np.zeros(k_max)  # had drafts up to j-1 accepted and were asked for j
        self._drafted = np.zeros(k_max)
        self._accepted = np.zeros(k_max)
        self._fresh = False
        self._update()

    def observe(self, result: StepResult) -> None:
        """Count one step; a step that asked for no drafts only lets old evidence fade."""
        k = result.k
        keep = 1.0 - 1.0 / MEMORY_STEPS
        if k and result.speculated:
            keep *= max(0.0, 1.0 - result.speculated / MEMORY)
            self._decay(keep)
            for before, counts in ((self._asked, result.drafted), (self._reached, result.accepted)):
                before[0] += result.speculated
                before[1:k] += counts[: k - 1]
            self._drafted[:k] += result.drafted[:k]
            self._accepted[:k] += result.accepted[:k]
        else:
            self._decay(keep)
        self._fresh = False

    def forget(self, keep: float) -> None:
        """Widen the uncertainty: keep this share of the evidence (after a weight update or draft refresh)."""
        self._decay(keep)
        self._fresh = False

    def length(self) -> tuple[Vector, Vector]:
        """Mean and standard deviation of AL(K), each [k_max + 1], for K = 0 .. k_max (tokens a step)."""
        self._update()
        return self._mean, self._sd

    def drafts(self) -> Vector:
        """Expected draft tokens a sequence for K = 0 .. k_max, [k_max + 1]."""
        self._update()
        return self._tokens

    def rates(self) -> Vector:
        """P(first j accepted) for j = 1 .. k_max."""
        self._update()
        return np.diff(self._mean)

    def evidence(self) -> float:
        """Decayed number of sequence-steps behind the first position."""
        return float(self._reached[0])

    def _decay(self, keep: float) -> None:
        self._asked *= keep
        self._reached *= keep
        self._drafted *= keep
        self._accepted *= keep

    def _update(self) -> None:
        if self._fresh:
            return
        k_max = self.k_max
        asked, drafted = self._asked.tolist(), self._drafted.tolist()
        reached, accepted = self._reached.tolist(), self._accepted.tolist()
        mean, variance, tokens = [1.0], [0.0], [0.0]
        prior_accept, prior_draft = PRIOR_RATE, 1.0
        present, survive, relative = 1.0, 1.0, 0.0
        for j in range(k_max):
            draft = (drafted[j] + PRIOR_WEIGHT * prior_draft) / (asked[j] + PRIOR_WEIGHT)
            weight = reached[j] + PRIOR_WEIGHT
            accept = (accepted[j] + PRIOR_WEIGHT * prior_accept) / weight
            present *= draft
            tokens.append(tokens[-1] + present)
            survive *= accept
            # Delta method: relative variances of the factors of a product add up.
            relative += (1.0 - accept) / (max(accept, 1e-3) * weight)
            mean.append(mean[-1] + survive)
            # Neighbouring positions share their factors, so their errors are nearly one: deviations add.
            variance.append((variance[-1] ** 0.5 + survive * relative**0.5) ** 2)
            prior_accept, prior_draft = accept, draft
        self._mean = np.array(mean)
        self._sd = np.sqrt(variance)
        self._tokens = np.array(tokens)
        self._fresh = True
