"""Goodput: the K with the most expected tokens a second, from live acceptance and step times.

    goodput(B, K) = B * AL(K) / T(B, K)

TurboSpec (arXiv 2406.14066) introduced the measure for speculation; the form AL / ITL and the remark that best K
need not fall with B are from seed 002 (hardware-aware dynamic speculative decoding, Cohere). Ours adds what an
on-line choice needs: both factors carry their uncertainty, K is raised above 0 only for a gain beyond a margin,
changes must pay beyond the noise, and a K that might be better is tried when the trial is cheap.
"""

from __future__ import annotations

import numpy as np

from rollout_spec.control.acceptance import Acceptance
from rollout_spec.control.cost import StepTime
from rollout_spec.control.policy import Decision, StepResult, StepView

# Speculating must promise this much over K=0: below it, model error decides and not the gain.
MARGIN = 0.02
# A change between two K above 0 must promise this much: no flapping at a threshold.
HYSTERESIS = 0.02
# Trials may cost this share of the run's time, so that the worst case stays within 1 % of no speculation.
TRIAL_SHARE = 0.005
# At most this many steps' worth of unused allowance is carried over.
TRIAL_SAVINGS = 8.0
# A trial lasts this many steps: one to draft, and enough to measure time and acceptance.
TRIAL_STEPS = 4
# A trial is worth it when the gain would be there one deviation above what is expected.
OPTIMISM = 1.0
# While speculating, K=0 is measured again after this many steps: the reference must not go stale.
REFERENCE_EVERY = 100
REFERENCE_STEPS = 2
# With nothing changed in the batch a decision stands for this many steps: choosing costs more than keeping.
KEEP_STEPS = 4


class Goodput:
    """argmax over K of expected tokens a second. One engine's state; not thread-safe."""

    def __init__(self, k_max: int) -> None:
        self.k_max = k_max
        self.acceptance = Acceptance(k_max)
        self.cost = StepTime(k_max)
        self._current = Decision(0, "nothing measured")
        self._key: tuple[int, bool] | None = None
        self._age = 0
        self._trial: list[Decision] = []
        self._allowance = 0.0
        self._since_reference = 0
        self._step_seconds = 0.0
        self._expected_gain = 1.0

    def decide(self, view: StepView) -> Decision:
        if self._trial:
            return self._trial.pop()
        key = (view.decode, view.waiting > 0)
        if key == self._key and self._age < KEEP_STEPS:
            self._age += 1
            return self._current
        self._key, self._age = key, 0
        if view.decode and self.cost.known:
            return self._choose(view.decode)
        return self._current

    def observe(self, result: StepResult) -> None:
        self.acceptance.observe(result)
        self.cost.observe(result)
        if not result.decode:
            return
        self._step_seconds = result.seconds
        cap = TRIAL_SAVINGS * result.seconds
        self._allowance = min(cap, self._allowance + TRIAL_SHARE * result.seconds)
        self._since_reference = 0 if result.k == 0 else self._since_reference + 1

    def policy_updated(self, keep: float = 0.3) -> None:
        """New weights: what was accepted under the old ones counts for less."""
        self.acceptance.forget(keep)

    def metrics(self) -> dict[str, float]:
        lengths, _ = self.acceptance.length()
        return {
            "expected_acceptance_length": float(lengths[self._current.k]),
            "expected_speedup": self._expected_gain,
        }

    def _choose(self, decode: int) -> Decision:
        length, length_sd = self.acceptance.length()
        seconds, seconds_sd = self.cost.seconds(decode, self.acceptance.drafts())
        goodput = length / seconds
        best = int(np.argmax(goodput))
        if goodput[best] < goodput[0] * (1 + MARGIN):
            best = 0
        now = self._current.k
        if best and now and goodput[best] < goodput[now] * (1 + HYSTERESIS):
            best = now
        self._expected_gain = float(goodput[best] / goodput[0])
        self._current = Decision(best, "goodput")
        hopeful = (length + OPTIMISM * length_sd) / np.maximum(seconds - OPTIMISM * seconds_sd, seconds * 0.3)
        return self._try(best, goodput, hopeful, seconds) or self._current

    def _try(self, best: int, goodput: np.ndarray, hopeful: np.ndarray, seconds: np.ndarray) -> Decision | None:
        """A few steps of another K, if it may be better and the expected loss is within the allowance."""
        if best and self._since_reference >= REFERENCE_EVERY:
            candidate, steps, reason = 0, REFERENCE_STEPS, "reference"
        else:
            promising = hopeful >= goodput[best] * (1 + MARGIN)
            promising[best] = False
            if not promising.any():
                return None
            # From K=0 the shortest promising draft tells most for least; else the most promising.
            candidate = int(np.argmax(promising)) if best == 0 else int(np.argmax(np.where(promising, hopeful, 0)))
            steps, reason = TRIAL_STEPS, "trial"
        loss = steps * float(seconds[candidate] * max(0.0, 1.0 - goodput[candidate] / goodput[best]))
        if loss > self._allowance:
            return None
        self._allowance -= loss
        self._since_reference = 0
        decision = Decision(candidate, reason)
        self._trial = [decision] * (steps - 1)
        return decision
