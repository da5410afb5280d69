"""A verification budget shared by the requests: the next draft token goes where it is likeliest to be accepted.

Gains P(first j accepted | request) of all requests are sorted, and tokens added while goodput rises. For drafters
whose drafts may differ in length between requests (n-gram, suffix, and any whose surplus drafts are cut). The form
is that of a marginal-gain (water-filling) allocation; AdaSpec (arXiv 2503.05096) and TurboSpec (arXiv 2406.14066)
choose lengths request by request by the same measure. Tokens of all requests count alike while others wait. When none
does, the rollout ends with its last response: a token then counts by the time that its request has still to go, so
far as known, or else by how slowly it goes (proportional fairness), or fast requests would hold up the slow ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from rollout_spec.control.goodput import Goodput
from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.control.requests import RequestRates
from rollout_spec.control.step_times import StepTimes

# Budgets stand for this many steps: sorting costs more than keeping.
KEEP_STEPS = 4
# Uneven budgets must promise this much over the same K for all.
MARGIN = 0.01
# With remaining lengths known, a token counts by this power of its request's remaining time: high enough for the last.
URGENCY = 4.0
# After new weights a request's own record keeps this share.
FADE = 0.3


class Budget(Goodput):
    """Goodput's choice for the batch, then its tokens dealt out anew."""

    wants_requests = True

    def __init__(self, k_max: int, prior: StepTimes | None = None) -> None:
        super().__init__(k_max, prior)
        self.rates = RequestRates()
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
            if self._dealt is None or self._kept > KEEP_STEPS or self._dealt_for != (view.decode, decision.k):
                self._kept, self._dealt_for = 0, (view.decode, decision.k)
                self._dealt = self._deal(view, decision)
            decision = self._dealt
        self._made.append(decision.per_request or {})
        return decision

    def observe(self, result: StepResult) -> None:
        limits = self._made.popleft() if len(self._made) > 1 else {}
        self._limits = limits if result.k and result.requests else {}
        self._requests = result.requests or {}
        super().observe(result)
        if result.requests:
            self.rates.observe(result.requests)

    def _count(self, result: StepResult, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Where budgets were uneven, a position was asked of, and can be reached by, those alone that had it."""
        if not self._limits:
            super()._count(result, drafted, accepted)
            return
        limits, k = self._limits, result.k
        cut = np.bincount(np.minimum(list(limits.values()), k), minlength=k + 1).cumsum()
        asked = [max(result.speculated - int(cut[j]), drafted[j]) for j in range(k)]
        own = np.array([limits.get(request, k) for request in self._requests])
        hits = np.array([hits for _, hits in self._requests.values()])
        reached = [asked[0]] + [int(((hits >= j) & (own > j)).sum()) for j in range(1, k)]
        self.acceptance.observe(k, result.speculated, drafted, accepted, asked, reached)

    def policy_updated(self) -> None:
        super().policy_updated()
        self.rates.fade(FADE)

    def draft_refreshed(self) -> None:
        super().draft_refreshed()
        self.rates.fade(0.0)

    def _deal(self, view: StepView, decision: Decision) -> Decision:
        count, longest = len(view.requests), max(self._allowed(view.decode))
        overall = self.acceptance.per_token()
        rates = self.rates.rates(view.requests, overall)
        # gains[i, j-1] = P(first j accepted | request i), falling along j.
        gains = np.multiply.accumulate(np.broadcast_to(rates[:, None], (count, longest)), axis=1)
        if not view.waiting:
            weight = 1.0 / (1.0 + gains[:, : max(decision.k, 1)].sum(axis=1))
            if view.remaining:
                weight = (weight * np.array(view.remaining)) ** URGENCY
            # One token of each request without drafts is worth `count`, as it is unweighted.
            gains = gains * (weight / max(float(weight.mean()), 1e-9))[:, None]
        seconds = self.cost.seconds(view.decode, self.acceptance.drafts(), view.context_tokens)
        falling = np.sort(gains, axis=None)[::-1]
        tokens = count + np.concatenate([[0.0], falling.cumsum()])
        time = np.interp(np.arange(len(tokens)) / count, np.arange(longest + 1.0), seconds[: longest + 1])
        goodput = tokens / time
        best = int(goodput.argmax())
        same = (count + float(gains[:, : decision.k].sum())) / seconds[decision.k]
        if best == 0 or goodput[best] < (1 + MARGIN) * same:
            return decision
        own = (gains >= falling[best - 1]).sum(axis=1).tolist()
        most = max(own)
        limits = {request: k for request, k in zip(view.requests, own, strict=True) if k < most}
        return Decision(most, "budget", limits)
