"""Where a step stops being free: the bend of step time over the tokens in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollout_spec.profile.cell import Cell


@dataclass(frozen=True, slots=True)
class Knee:
    """Up to `tokens` a step takes `flat` seconds, beyond it `per_token` more for each token."""

    tokens: float
    flat: float
    per_token: float

    def seconds(self, tokens: float) -> float:
        return self.flat + self.per_token * max(0.0, tokens - self.tokens)


def knee(cells: Sequence[Cell]) -> Knee | None:
    """Least squares over relative errors, the corner sought on a grid; None with fewer than four points.

    Tokens are those verified, batch x (K + 1). A corner at the first point says that there is no flat part.
    """
    points = np.array([(cell.batch * (cell.k + 1), cell.seconds) for cell in cells])
    if len(points) < 4:
        return None
    tokens, seconds = points.T
    best, least = None, float("inf")
    for corner in np.geomspace(tokens.min(), tokens.max(), 60)[:-1]:
        x = np.stack([np.ones_like(tokens), np.maximum(tokens - corner, 0.0)], axis=1) / seconds[:, None]
        (flat, slope), *_ = np.linalg.lstsq(x, np.ones_like(tokens), rcond=None)
        error = float(np.sum((x @ [flat, slope] - 1.0) ** 2))
        if error < least and flat > 0:
            best, least = Knee(float(corner), float(flat), float(slope)), error
    return best
