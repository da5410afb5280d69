"""How long an engine step takes, learned on line: seconds as a function of batch, tokens and K.

Two layers. A Bayesian linear regression over what a step does (a constant, its tokens, whether it verifies, how
much it drafts) says what to expect where nothing was measured yet; it starts pessimistic, proportional to the
tokens, and learns the flat part of the curve as the batch drains. A grid of measured over expected times per
batch bucket and K corrects it where something was measured, so that no shape (a knee, an MoE's dip) is assumed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout_spec.control.policy import StepResult

# Step times scatter by about this share even on a quiet machine.
NOISE = 0.05
# Share of the first measured step that does not depend on tokens, before evidence, and how sure that is.
PRIOR_FLAT = 0.3
PRIOR_SD = 0.35
# Sampling with drafts and drafting, as shares of the first step, before evidence.
PRIOR_VERIFY = 0.05
PRIOR_DRAFT = 0.02
# The regression forgets with this factor a step: context grows, machines throttle.
FORGET = 0.998
# A grid cell is trusted like the regression after this many steps, and forgets over the second.
CELL_WEIGHT = 3.0
CELL_MEMORY = 60.0
# A step this many times slower than expected is a hiccup, unless it repeats this often in a row.
OUTLIER = 2.5
OUTLIER_RUN = 4

Vector = NDArray[np.float64]


class StepTime:
    """Expected seconds of a decode-only step; nothing is known before the first observation."""

    def __init__(self, k_max: int) -> None:
        self.k_max = k_max
        self._ks = np.arange(k_max + 1, dtype=np.float64)
        self._unit = 0.0  # seconds and
        self._tokens = 1.0  # tokens of the first step: the scale of everything below
        self._weights = np.array([PRIOR_FLAT, 1 - PRIOR_FLAT, PRIOR_VERIFY, PRIOR_DRAFT])
        self._cov = np.diag(np.array([PRIOR_SD, PRIOR_SD, PRIOR_VERIFY, PRIOR_DRAFT]) ** 2)
        self._ratio = np.ones((12, k_max + 1))
        self._seen = np.zeros((12, k_max + 1))
        self._outliers = 0

    @property
    def known(self) -> bool:
        return self._unit > 0

    def observe(self, result: StepResult) -> None:
        """Learn from a step; steps with prefill tokens or without decodes are left out."""
        if result.prefill_tokens or not result.decode or result.seconds <= 0:
            return
        if not self.known:
            self._unit, self._tokens = result.seconds, float(result.decode + result.draft_tokens)
        x = self._features(result.decode, float(result.draft_tokens), result.k > 0, float(result.k_next))
        y = result.seconds / self._unit
        expected = float(x @ self._weights)
        if y > OUTLIER * max(expected, 1e-6) and self._outliers < OUTLIER_RUN:
            self._outliers += 1
            return
        self._outliers = 0
        self._fit(x, y)
        # A cell holds whole steps of one K: with another K drafted than verified the time is of neither.
        if result.k == result.k_next:
            self._correct(_bucket(result.decode), result.k, y / max(float(x @ self._weights), 1e-6))

    def seconds(self, decode: int, drafts: Vector) -> tuple[Vector, Vector]:
        """Mean and deviation of step seconds for K = 0 .. k_max at a batch of `decode` sequences.

        `drafts` [k_max + 1]: expected draft tokens a sequence at each K.
        """
        ks = self._ks
        x = np.empty((self.k_max + 1, 4))
        x[:, 0] = 1.0
        x[:, 1] = decode * (1.0 + drafts) / self._tokens
        x[:, 2] = ks > 0
        x[:, 3] = ks * (decode / self._tokens)
        row = _bucket(decode)
        seen = self._seen[row]
        trust = seen / (seen + CELL_WEIGHT)
        fitted = np.maximum(x @ self._weights, 1e-3)
        mean = fitted * (1.0 + trust * (self._ratio[row] - 1.0))
        # The regression's doubt, as far as the cell has not settled it.
        doubt = np.sqrt(np.einsum("ij,jk,ik->i", x, self._cov, x)) * (1.0 - trust)
        return mean * self._unit, np.hypot(doubt, NOISE * mean / np.sqrt(seen + 1.0)) * self._unit

    def forget_cells(self, keep: float) -> None:
        """Trust measured cells less; the regression stays."""
        self._seen *= keep

    def _features(self, decode: int, draft_tokens: float, verifies: bool, k_next: float) -> Vector:
        return np.array(
            [1.0, (decode + draft_tokens) / self._tokens, float(verifies), k_next * decode / self._tokens]
        )

    def _fit(self, x: Vector, y: float) -> None:
        gain = self._cov @ x
        noise = (NOISE * y) ** 2
        denominator = noise + float(x @ gain)
        self._weights += gain * ((y - float(x @ self._weights)) / denominator)
        self._cov -= np.outer(gain, gain) / denominator
        # Forgetting is bounded, or directions never excited would grow uncertain without end.
        self._cov /= FORGET
        shrink = np.minimum(1.0, PRIOR_SD / np.sqrt(np.diag(self._cov)))
        self._cov *= np.outer(shrink, shrink)

    def _correct(self, row: int, k: int, ratio: float) -> None:
        seen = min(self._seen[row, k], CELL_MEMORY)
        self._ratio[row, k] += (ratio - self._ratio[row, k]) / (seen + 1.0)
        self._seen[row, k] = seen + 1.0


def _bucket(decode: int) -> int:
    """0, 1, 2, 3, ... for a batch of 1, 2, 3-4, 5-8, ...; the last row takes all beyond."""
    return min(max(decode - 1, 0).bit_length(), 11)
