"""How long an engine step takes, learned on line: seconds as a function of batch, tokens, K and context.

Three layers, each correcting the one before. A first guess says what to expect before anything is measured. A Bayesian
linear regression (a Kalman filter whose weights wander) scales it and adds a constant, tokens, verification, drafting,
context, and a free curve over the tokens of a step with a knot at each power of two: a knee or the rise of an MoE's
touched experts is learned there at one K and known for all. Last, a grid of measured over expected times by batch
bucket and K takes up what is left, so that no shape is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout_spec.control.cells import WEIGHT, Cells, bucket
from rollout_spec.control.first_guess import FIRST_STEPS, FirstGuess, Step
from rollout_spec.control.policy import StepResult
from rollout_spec.control.step_times import StepTimes

# Step times scatter by about this share on a quiet machine; the real share is learned over this many steps.
NOISE = 0.05
NOISE_MEMORY = 50.0
NOISE_RANGE = (0.005, 0.3)
# Without a profile the share of a step that does not depend on tokens is uncertain by this much.
FLAT_SD = 0.35
# Shares of a typical step for verifying at all, drafting a pass, and drafting a token, before evidence.
VERIFY, DRAFT_PASS, DRAFT_TOKEN = 0.05, 0.01, 0.02
# ... which is this share of what K > 0 costs.
DRAFT_SHARE = 0.1
# How far the curve over tokens may leave the prior, as a share of it; neighbouring knots differ by little.
CURVE_SD, CURVE_REACH = 0.15, 2.0
# With a profile, deviations of its scale, constant, tokens, verification, drafting and context, and of the curve, each
# as a share of its spread: what was measured on this engine is off by little, what was computed by more.
PROFILE_SD, PROFILE_CURVE_SD = (1.0, 0.67, 0.67, 0.2, 0.07, 0.07, 0.33), 0.67
# The regression's weights wander back to their prior uncertainty at this rate a step: machines throttle.
WANDER = 0.002
# If steps are this many times further off than the filter believes (in variance), its prior was wrong: it is
# loosened by this share of its first uncertainty.
SURPRISE, LOOSEN = 4.0, 0.3
# Steps alike are learned from together, this many at once: one update costs as much as ten decisions.
GROUP = 4
# Until a cell has this many steps, each is learned from at once, and a second slow one in a row is no hiccup.
CELL_FRESH = 4.0
# One update moves the regression by at most this many deviations of what it expects: one hiccup must not matter.
CLIP = 3.0
# What the regression says of a cell never measured is off by about this share, whatever its own doubt; with a profile
# by this share of its spread.
MISFIT, PROFILE_MISFIT = 0.05, 0.33
# The regression may say that a step takes this many times less than the first guess.
GUESS_MOST = 5.0
# News of this relative size is worth choosing K again.
NEWS = 0.1
# A step this many times slower than expected is a hiccup, unless it repeats this often in a row.
OUTLIER, OUTLIER_RUN = 2.5, 4
# Knots of the curve at 1, 2, 4, ... tokens a step; beyond the last it goes on straight.
KNOTS = 15

_SCALE, _FLAT, _TOKENS, _VERIFY, _PASS, _DRAFT, _CONTEXT, _CURVE = range(8)
Matrix = NDArray[np.float64]


class StepTime:
    """Expected seconds of a decode-only step. Lists by K are [k_max + 1]."""

    def __init__(self, k_max: int, prior: StepTimes | None = None) -> None:
        self.k_max = k_max
        self.noise = NOISE
        # Its unit, tokens and context tokens are the scale of everything below.
        self._guess = FirstGuess(k_max, prior)
        self._first: list[tuple[Step, int]] = []  # with K
        self._weights: list[float] = []
        self._curve = [0.0] * (KNOTS + 1)
        self._cov: Matrix = np.zeros((0, 0))
        self._cov_first: Matrix = self._cov
        self._surprise = 1.0
        self._misfit = MISFIT
        self.cells = Cells(k_max)
        self._outliers = 0
        self.news = False  # something unexpected was learned; whoever acts on it sets it back
        self._group: tuple[int, int, int] | None = None
        self._sum = [0.0, 0.0, 0.0, 0.0]  # of the group: decode, draft tokens, context, seconds
        self._count = 0
        self._last = (0, 0.0)

    @property
    def known(self) -> bool:
        return self._guess.unit > 0 or self._guess.profile is not None

    @property
    def draft_share(self) -> float:
        """Of the time by which a step of K > 0 exceeds that of K = 0, the share spent drafting."""
        return self._guess.profile.draft_share if self._guess.profile is not None else DRAFT_SHARE

    def observe(self, result: StepResult, draft_tokens: int) -> None:
        """Learn from a step; steps with prefill tokens or without decodes are left out."""
        decode, seconds = result.decode, result.seconds
        if result.prefill_tokens or not decode or seconds <= 0:
            self._learn()
            return
        step = Step(seconds, decode, draft_tokens, result.k_next, result.context_tokens)
        if len(self._first) >= FIRST_STEPS:
            self._measure(step, result.k)
            return
        self._first.append((step, result.k))
        if len(self._first) >= FIRST_STEPS:
            self._guess.calibrate([first for first, _ in self._first])
            self._set_scale()
            self.news = True
            for first, k in self._first:
                self._measure(first, k)

    def _measure(self, step: Step, k: int) -> None:
        seconds, decode, draft_tokens, k_next, context = step
        group = (bucket(decode), k, k_next)
        fresh = self.cells.seen[group[0]][k] < CELL_FRESH
        expected = self._guess.unit * self._expect(decode, draft_tokens, k, k_next, context)
        if seconds > OUTLIER * expected:
            self._outliers += 1
            if self._outliers < (2 if fresh else OUTLIER_RUN):
                return
        else:
            self._outliers = 0
        if group != self._group or self._count >= GROUP:
            self._learn()
            self._group = group
        if self._last[0] == decode and self._count:
            self._scatter(seconds, self._last[1])
        self._last = (decode, seconds)
        self._sum[0] += decode
        self._sum[1] += draft_tokens
        self._sum[2] += context
        self._sum[3] += seconds
        self._count += 1
        if fresh:
            self._learn()

    def seconds(self, decode: int, drafts: Sequence[float], context: int = 0) -> list[float]:
        """Expected seconds of a steady step for K = 0 .. k_max; `drafts`: expected draft tokens a sequence."""
        if self._group is not None and self._count >= GROUP:
            self._learn()
        if not self._guess.unit:
            self._start(decode, context)
        row = bucket(decode)
        seen, ratio = self.cells.seen[row], self.cells.ratio[row]
        common = self.cells.common(row)
        w, curve, unit, per_token = self._weights, self._curve, self._guess.unit, 1.0 / self._guess.tokens
        base = w[_FLAT] + w[_CONTEXT] * context / self._guess.context
        slope, scale, verify = w[_TOKENS] * per_token, w[_SCALE], w[_VERIFY]
        drafting = w[_PASS] + w[_DRAFT] * decode * per_token
        out = []
        for k, first in enumerate(self._guess.by_k(decode, drafts, context)):
            n = decode * (1.0 + drafts[k])
            low = min(int(n).bit_length() - 1, KNOTS - 1)
            share = n / (1 << low) - 1.0
            fitted = base + scale * first + slope * n + curve[low] + share * (curve[low + 1] - curve[low])
            if k:
                fitted += verify + drafting * k
            trust = seen[k] / (seen[k] + WEIGHT)
            out.append(max(fitted, first / GUESS_MOST) * (common + trust * (ratio[k] - common)) * unit)
        return out

    def deviation(self, decode: int, drafts: Sequence[float], context: int = 0, reference: int = 0) -> list[float]:
        """Relative standard deviation of `seconds(K) / seconds(reference)`, for K = 0 .. k_max."""
        if not self._guess.unit:
            self._start(decode, context)
        row = bucket(decode)
        seen = np.array(self.cells.seen[row])
        trust = seen / (seen + WEIGHT)
        x = np.array([self._features(decode, decode * d, k, k, context) for k, d in enumerate(drafts)])
        mean = np.maximum(x @ np.array(self._weights), 0.05)
        # d log(T_K / T_R) = x_K / T_K - x_R / T_R, each as far as the cell has not settled it.
        relative = x / mean[:, None] * (1.0 - trust)[:, None]
        relative -= relative[reference].copy()
        variance = ((relative @ self._cov) * relative).sum(axis=1)
        variance += self.noise**2 * (trust**2 / (seen + 1.0) + trust[reference] ** 2 / (seen[reference] + 1.0))
        variance += self._misfit**2 * ((1.0 - trust) ** 2 + (1.0 - trust[reference]) ** 2)
        variance[reference] = 0.0
        return [float(v) for v in np.sqrt(np.maximum(variance, 0.0))]

    def _start(self, decode: int, context: int) -> None:
        self._guess.start(decode, context)
        self._set_scale()

    def _set_scale(self) -> None:
        profile = self._guess.profile
        knots: Matrix = np.arange(KNOTS + 1, dtype=np.float64)
        sd = np.zeros(_CURVE + KNOTS + 1)
        mean = np.zeros(_CURVE + KNOTS + 1)
        mean[_SCALE] = 1.0
        shape = np.array([self._guess.of(1 << int(i), 0.0, 0, 0.0) for i in knots])
        if profile is None:
            mean[[_VERIFY, _PASS, _DRAFT]] = VERIFY, DRAFT_PASS, DRAFT_TOKEN
            sd[:_CURVE] = 0.05, FLAT_SD, FLAT_SD, VERIFY, 2 * DRAFT_PASS, DRAFT_TOKEN, 0.1
            sd[_CURVE:] = CURVE_SD * shape
        else:
            sd[:_CURVE] = profile.spread * np.array(PROFILE_SD)
            sd[_CURVE:] = profile.spread * PROFILE_CURVE_SD * shape
        self._misfit = MISFIT if profile is None else PROFILE_MISFIT * profile.spread
        self._cov_first = np.zeros((len(sd), len(sd)))
        np.fill_diagonal(self._cov_first, sd**2)
        # Flat and proportional part trade off: their sum is one typical step.
        self._cov_first[_FLAT, _TOKENS] = self._cov_first[_TOKENS, _FLAT] = -0.9 * sd[_FLAT] * sd[_TOKENS]
        near = np.exp(-np.abs(knots[:, None] - knots) / CURVE_REACH)
        self._cov_first[_CURVE:, _CURVE:] = near * np.outer(sd[_CURVE:], sd[_CURVE:])
        self._cov = self._cov_first.copy()
        self._keep_weights(mean)

    def _keep_weights(self, weights: Matrix) -> None:
        self._weights = weights.tolist()
        self._curve = self._weights[_CURVE:]

    def _expect(self, decode: float, draft_tokens: float, k: int, k_next: int, context: float) -> float:
        n = decode + draft_tokens
        low = min(int(n).bit_length() - 1, KNOTS - 1)
        share = n / (1 << low) - 1.0
        w, curve = self._weights, self._curve
        first = self._guess.of(decode, draft_tokens, k_next, context)
        value = w[_SCALE] * first + w[_FLAT]
        value += w[_TOKENS] * n / self._guess.tokens + w[_CONTEXT] * context / self._guess.context
        value += curve[low] + share * (curve[low + 1] - curve[low])
        value += k_next * (w[_PASS] + w[_DRAFT] * decode / self._guess.tokens)
        return max(value + w[_VERIFY] if k else value, first / GUESS_MOST)

    def _features(self, decode: float, draft_tokens: float, k: int, k_next: int, context: float) -> list[float]:
        n = decode + draft_tokens
        low = min(int(n).bit_length() - 1, KNOTS - 1)
        share = n / (1 << low) - 1.0
        x = [0.0] * (_CURVE + KNOTS + 1)
        x[_SCALE] = self._guess.of(decode, draft_tokens, k_next, context)
        x[_FLAT] = 1.0
        x[_TOKENS] = n / self._guess.tokens
        x[_VERIFY] = 1.0 if k else 0.0
        x[_PASS] = float(k_next)
        x[_DRAFT] = k_next * decode / self._guess.tokens
        x[_CONTEXT] = context / self._guess.context
        x[_CURVE + low] = 1.0 - share
        x[_CURVE + low + 1] = share
        return x

    def _scatter(self, now: float, before: float) -> None:
        """Noise from the difference of two like steps: no model's error is in it."""
        ratio = (now - before) / (now + before)
        step = min(2.0 * ratio * ratio, 4.0 * NOISE_RANGE[1] ** 2) - self.noise**2
        self.noise = min(max((self.noise**2 + step / NOISE_MEMORY) ** 0.5, NOISE_RANGE[0]), NOISE_RANGE[1])

    def _learn(self) -> None:
        """One filter update from the group of like steps, and its grid cell."""
        count, group = self._count, self._group
        if not count or group is None:
            return
        decode, drafted, context, seconds = (total / count for total in self._sum)
        self._sum, self._count, self._group = [0.0, 0.0, 0.0, 0.0], 0, None
        row, k, k_next = group
        x = np.array(self._features(decode, drafted, k, k_next, context))
        weights = np.array(self._weights)
        y = seconds / self._guess.unit
        expected = float(x @ weights)
        self.news |= abs(y - expected) > max(NEWS, 3 * self.noise) * y
        gain = self._cov @ x
        variance = float(x @ gain) + (self.noise * y) ** 2 / count
        off = y - expected
        self._surprise += (min(off * off / variance, 25.0) - self._surprise) / 10.0
        if self._surprise > SURPRISE:
            self._surprise = 1.0
            self._cov = self._cov + LOOSEN * self._cov_first
            gain = self._cov @ x
            variance = float(x @ gain) + (self.noise * y) ** 2 / count
        most = CLIP * variance**0.5
        self._keep_weights(weights + gain * (min(max(off, -most), most) / variance))
        wander = WANDER * count
        cov = self._cov - np.outer(gain, gain / variance)
        self._cov = cov + wander * (self._cov_first - cov)
        # A cell holds whole steps of one K: with another K drafted than verified the time is of neither.
        if k == k_next:
            self.cells.learn(row, k, y / self._expect(decode, drafted, k, k_next, context), count)
