"""What a token of each request is worth: the time by which the rollout ends sooner for it.

Tokens a second is the right measure while others wait. When nothing does, a rollout ends with its last response, and a
step costs less with each one that has left. With T(b) the seconds of a step of b sequences, the request that leaves as
the b-th from the end, one step sooner, saves T(b) - T(b-1); the last one saves all of T(1). So

    goodput(K) = sum_i worth_i * AL_i(K) / T(B, K)

which is B * AL(K) / T(B, K) where all requests accept alike, and favours the slow ones where they do not: where half of
the batch has all drafts accepted and the other none, most tokens a second is a rollout that ends later than without
any speculation. Derived here; the order is that of the remaining steps, tokens to go over tokens a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_spec.control.acceptance import Acceptance
from rollout_spec.control.cells import bucket
from rollout_spec.control.cost import StepTime
from rollout_spec.control.policy import StepView
from rollout_spec.control.requests import RequestRates

# How far a request's tokens a step are off by chance (deviation of the logarithm), from some tens of its steps.
SPEED_SD = 0.15

# A rate of 0 or 1 would be a certainty that no count of drafts can give.
RATES = (0.002, 0.998)

Vector = NDArray[np.float64]


class Shares(NamedTuple):
    """The requests of a batch, in the order of `StepView.requests`."""

    worth: Vector
    """Of a token of each, [n]; the mean is 1."""
    lengths: Vector
    """AL(K) of each, [n, k_max + 1]."""

    def length(self) -> Vector:
        """[k_max + 1]: AL(K) of those that run now, by worth."""
        mean: Vector = self.worth @ self.lengths / len(self.worth)
        return mean


class Worth:
    """How each request gets on, and what its tokens are worth."""

    def __init__(self) -> None:
        self.rates = RequestRates()
        self._levels: list[float] = []  # seconds of a step of 1, 2, 4, .. sequences without drafts
        self._next = 0

    def of(self, view: StepView, k: int, acceptance: Acceptance, cost: StepTime) -> Shares:
        """The requests of `view`; their order at the end is that of a rollout with `k` drafts."""
        low, high = RATES
        overall = min(max(acceptance.per_token(), low), high)
        rates = np.clip(self.rates.rates(view.requests, overall), low, high)
        lengths = acceptance_lengths(acceptance.rates(), overall, rates)
        if view.waiting:
            return Shares(np.ones(len(rates)), lengths)
        seconds = self._step_seconds(view, acceptance, cost)
        worth = token_worth(seconds, lengths[:, k], view.remaining, view.remaining_sd)
        return Shares(worth / max(float(worth.mean()), 1e-12), lengths)

    def _step_seconds(self, view: StepView, acceptance: Acceptance, cost: StepTime) -> Vector:
        """[n + 1]: seconds of a step of 0, 1, .. n sequences without drafts."""
        count, drafts = len(view.requests), acceptance.drafts()
        each = view.context_tokens / max(view.decode, 1)
        rows = bucket(count) + 1
        # One of them is looked up anew each time: they change slowly, and a look costs as much as all the rest.
        self._next = (self._next + 1) % rows
        if len(self._levels) > self._next:
            self._levels[self._next] = cost.seconds(1 << self._next, drafts, int(each * (1 << self._next)))[0]
        for row in range(len(self._levels), rows):
            self._levels.append(cost.seconds(1 << row, drafts, int(each * (1 << row)))[0])
        at = [0.0, *(float(1 << row) for row in range(rows))]
        seconds: Vector = np.interp(np.arange(count + 1.0), at, [0.0, *self._levels[:rows]])
        # A step of more sequences is not shorter; where it was measured so, that is noise.
        return np.maximum.accumulate(seconds)


def token_worth(step_seconds: Vector, speed: Vector, remaining: Sequence[float], remaining_sd: float) -> Vector:
    """Worth of a token of each request, [n], adding up to the seconds of a step without drafts.

    step_seconds [n + 1]: seconds of a step of 0, 1, .. n sequences without drafts; the first is 0.
    speed [n]: tokens a step. remaining [n]: tokens to go, or empty where nobody knows.
    remaining_sd: deviation of the logarithm of those.
    """
    steps = -np.log(speed)
    if remaining:
        steps += np.log(np.maximum(remaining, 1.0))
    saved = np.diff(step_seconds)
    worth = np.empty_like(saved)
    worth[np.argsort(-steps, kind="stable")] = saved
    # The order is as doubtful as what it is made of: in that share a request counts like any other.
    doubt = remaining_sd**2 + SPEED_SD**2
    doubt /= doubt + float(steps.var())
    return np.maximum(worth + doubt * (saved.mean() - worth), 0.0)


def acceptance_lengths(survival: Sequence[float], overall: float, rates: Vector) -> Vector:
    """AL(K) of each request, [n, k_max + 1], from the P(first j accepted) of all and each one's own rate.

    overall: P(one more draft accepted) of all, and `rates` [n] of each: both in (0, 1). A request's curve is that of
    all to a power, as in `simulate.acceptance_curve`.
    """
    power = np.log(rates) / np.log(overall)
    curve = np.maximum(np.asarray(survival), 1e-9) ** power[:, None]
    return np.concatenate([np.ones((len(rates), 1)), 1.0 + curve.cumsum(axis=1)], axis=1)
