"""A bandit over K for each batch bucket: tries each arm, keeps to the one with most tokens a second.

Sources: the multi-armed bandit proposed for SGLang, reward from accepted tokens and time (seed 000, future work), and
TLT (arXiv 2511.16665), whose rollout engine picks its drafting strategy by a bandit per batch bucket. Discounted UCB;
it knows neither that K=3 and K=4 are alike nor that batch 64 resembles batch 32: each cell learns alone.
"""

from __future__ import annotations

import math

from rollout_spec.control.cells import ROWS, bucket
from rollout_spec.control.policy import Decision, StepResult, StepView

# A pull is this many steps: one to draft, and some to measure.
PULL = 4
# Rewards are forgotten at this rate a pull: acceptance drifts.
DISCOUNT = 0.98
# Width of the confidence bound, as a share of the best reward.
WIDTH = 0.15


class Bandit:
    """Arms are the K in `arms`; rewards are tokens a second of a sequence, measured in steady steps."""

    def __init__(self, k_max: int) -> None:
        self.arms = sorted({0, 1, 2, 3, 5, 8, k_max} & set(range(k_max + 1)))
        self._sum = [[0.0] * len(self.arms) for _ in range(ROWS)]
        self._pulls = [[0.0] * len(self.arms) for _ in range(ROWS)]
        self._row, self._arm, self._left = 0, 0, 0
        self._tokens = self._seconds = 0.0

    def decide(self, view: StepView) -> Decision:
        row = bucket(view.decode)
        if row != self._row or self._left <= 0:
            self._reward()
            self._row, self._arm, self._left = row, self._best(row), PULL
        self._left -= 1
        return Decision(self.arms[self._arm], "bandit")

    def observe(self, result: StepResult) -> None:
        k = self.arms[self._arm]
        if result.prefill_tokens or not result.decode or result.k != k or result.k_next != k:
            return
        self._tokens += 1.0 + sum(result.accepted) / result.decode
        self._seconds += result.seconds

    def metrics(self) -> dict[str, float]:
        return {"pulls": sum(map(sum, self._pulls))}

    def _reward(self) -> None:
        if not self._seconds:
            return
        sums, pulls = self._sum[self._row], self._pulls[self._row]
        for arm in range(len(self.arms)):
            sums[arm] *= DISCOUNT
            pulls[arm] *= DISCOUNT
        sums[self._arm] += self._tokens / self._seconds
        pulls[self._arm] += 1.0
        self._tokens = self._seconds = 0.0

    def _best(self, row: int) -> int:
        sums, pulls = self._sum[row], self._pulls[row]
        for arm, count in enumerate(pulls):
            if count < 1e-3:
                return arm
        means = [total / count for total, count in zip(sums, pulls, strict=True)]
        scale, log = WIDTH * max(means), math.log(sum(pulls) + 1.0)
        return max(range(len(means)), key=lambda arm: means[arm] + scale * math.sqrt(log / pulls[arm]))
