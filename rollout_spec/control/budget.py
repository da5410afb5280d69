"""A verification budget shared by the requests: the next draft token goes where it is likeliest to be accepted.

Gains P(first j accepted | request) of all requests are sorted, and tokens added while goodput rises. For drafters
whose drafts may differ in length between requests (n-gram, suffix, and any whose surplus drafts are cut). The form
is that of a marginal-gain (water-filling) allocation; AdaSpec (arXiv 2503.05096) and TurboSpec (arXiv 2406.14066)
choose lengths request by request by the same measure. A token counts by what it is worth for the end of the rollout
(`worth`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rollout_spec.control.acceptance import Acceptance
from rollout_spec.control.goodput import HOLD_BATCH, KEEP_STEPS, KEEP_STEPS_WIDE, Goodput
from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.control.step_times import StepTimes

# Uneven budgets must promise this much over the same K for all.
MARGIN = 0.01


class Budget(Goodput):
    """Goodput's choice for the batch, then its tokens dealt out anew."""

    @property
    def wants_requests(self) -> bool:
        return True

    def __init__(self, k_max: int, prior: StepTimes | None = None) -> None:
        super().__init__(k_max, prior)
        self._dealt: Decision | None = None
        self._dealt_for: tuple[int, int] = (-1, -1)
        self._kept = 0
        # Budgets by step, of drafts that were made and not yet verified.
        self._made: deque[Mapping[str, int]] = deque([{}], maxlen=4)
        self._limits: Mapping[str, int] = {}
        self._requests: Mapping[str, tuple[int, int]] = {}

    def decide(self, view: StepView) -> Decision:
        decision = super().decide(view)
        if view.requests and decision.reason == "goodput":
            self._kept += 1
            # Sorting costs more than keeping.
            keep = KEEP_STEPS if view.decode < HOLD_BATCH else KEEP_STEPS_WIDE
            if self._dealt is None or self._kept > keep or self._dealt_for != (view.decode, decision.k):
                self._kept, self._dealt_for = 0, (view.decode, decision.k)
                self._dealt = self._deal(view, decision)
            decision = self._dealt
        self._made.append(decision.per_request or {})
        return decision

    def observe(self, result: StepResult) -> None:
        limits = self._made.popleft() if len(self._made) > 1 else {}
        self._limits = limits if result.k and result.requests else {}
        self._requests = result.requests or {}
        if self._limits and result.requests:
            # Who was to have no drafts did not fail to get any.
            asked = {r: counts for r, counts in result.requests.items() if limits.get(r, 1)}
            result = replace(result, requests=asked)
        super().observe(result)

    def _count(self, acceptance: Acceptance, result: StepResult) -> None:
        """Where budgets were uneven, a position was asked of, and can be reached by, those alone that had it."""
        if not self._limits:
            super()._count(acceptance, result)
            return
        limits, k, drafted = self._limits, result.k, result.drafted
        cut = np.bincount(np.minimum(list(limits.values()), k), minlength=k + 1).cumsum()
        asked = [max(result.speculated - int(cut[j]), drafted[j]) for j in range(k)]
        own = np.array([limits.get(request, k) for request in self._requests])
        hits = np.array([hits for _, hits in self._requests.values()])
        reached = [asked[0]] + [int(((hits >= j) & (own > j)).sum()) for j in range(1, k)]
        acceptance.observe(k, result.speculated, drafted, result.accepted, asked, reached)

    def _deal(self, view: StepView, decision: Decision) -> Decision:
        count, longest = len(view.requests), max(self._allowed(view.decode))
        shares = self.worth.of(view, max(decision.k, 1), self.acceptance, self.cost)
        # gains[i, j-1] = P(first j accepted | request i) by what its tokens are worth, falling along j.
        gains = np.diff(shares.lengths[:, : longest + 1], axis=1) * shares.worth[:, None]
        seconds = self.cost.seconds(view.decode, self.acceptance.drafts(), view.context_tokens)
        order = np.argsort(-gains, axis=None, kind="stable")
        falling = gains.ravel()[order]
        tokens = count + np.concatenate([[0.0], falling.cumsum()])
        time = np.interp(np.arange(len(tokens)) / count, np.arange(longest + 1.0), seconds[: longest + 1])
        # All are drafted for as long as any is, and the surplus is cut.
        most_of = np.concatenate([[0], np.maximum.accumulate(order % longest + 1)])
        time += self.cost.draft_share * (np.array(seconds)[most_of] - time)
        goodput = tokens / time
        best = int(goodput.argmax())
        same = (count + float(gains[:, : decision.k].sum())) / seconds[decision.k]
        if best == 0 or goodput[best] < (1 + MARGIN) * same:
            return decision
        own = (gains >= falling[best - 1]).sum(axis=1).tolist()
        most = max(own)
        limits = {request: k for request, k in zip(view.requests, own, strict=True) if k < most}
        return Decision(most, "budget", limits)
