"""Do no harm: what speculation gains on this engine, measured, and a veto where it loses.

For each step, the tokens it gave say how long K=0 would have needed for them, by the step time measured at K=0
(`reference`); over the step's own time that is the speed-up. Unlike the model of step times nothing is left out
here, hiccups included: a K whose slow steps were all taken for outliers is caught.
"""

from __future__ import annotations

# The speed-up shown forgets over this many steps; its spread is that of block means.
MEMORY = 1000.0
BLOCK = 16
# A veto needs this many speculating steps in a row of one batch bucket that lose by this many deviations.
WINDOW = 24
DEVIATIONS = 2.5
# It lasts this many steps, and twice as long each time, up to the second.
HOLD, HOLD_MOST = 100, 3200


class Guard:
    """Measured speed-up over K=0, and the veto."""

    def __init__(self) -> None:
        self.vetoes = 0
        self._base = self._spent = 0.0  # decayed seconds: of K=0 for the same tokens, and of what was done
        self._block = [0.0, 0.0, 0.0]  # steps, base, spent
        self._mean = self._square = self._blocks = 0.0
        self._window = [0.0, 0.0, 0.0, 0.0]  # speculating steps, sum and square sum of log ratios, bucket
        self._hold: dict[int, float] = {}
        self._last_hold: dict[int, int] = {}

    def observe(self, row: int, k: int, k_next: int, seconds: float, tokens: float, reference: float) -> None:
        """A step at batch bucket `row`: `tokens` a sequence, and the `reference` seconds of K=0 at its batch."""
        base = tokens * reference if k or k_next else seconds
        self._base += base - self._base / MEMORY
        self._spent += seconds - self._spent / MEMORY
        block = self._block
        block[0] += 1
        block[1] += base
        block[2] += seconds
        if block[0] >= BLOCK:
            self._close_block()
        if self._hold.get(row, 0) > 0:
            self._hold[row] -= 1
        if k and k_next:
            self._watch(row, base, seconds)

    def vetoed(self, row: int) -> bool:
        return self._hold.get(row, 0) > 0

    def speedup(self) -> tuple[float, float]:
        """Effective speed-up over K=0 and its standard deviation; (1, 0) before anything was measured."""
        if not self._spent:
            return 1.0, 0.0
        spread = max(0.0, self._square - self._mean**2) / max(self._blocks, 1.0)
        return self._base / self._spent, float(spread**0.5)

    def _close_block(self) -> None:
        ratio = self._block[1] / self._block[2]
        self._block = [0.0, 0.0, 0.0]
        self._blocks = min(self._blocks + 1, MEMORY / BLOCK)
        self._mean += (ratio - self._mean) / self._blocks
        self._square += (ratio * ratio - self._square) / self._blocks

    def _watch(self, row: int, base: float, seconds: float) -> None:
        window = self._window
        if window[3] != row:
            self._window = window = [0.0, 0.0, 0.0, float(row)]
        window[0] += 1
        lost = (seconds - base) / max(seconds, base)  # in -1 .. 1
        window[1] += lost
        window[2] += lost * lost
        if window[0] < WINDOW:
            return
        count, total, square, _ = window
        mean = total / count
        sd = (max(square / count - mean * mean, 1e-6) / count) ** 0.5
        if mean > DEVIATIONS * sd:
            hold = min(self._last_hold.get(row, HOLD // 2) * 2, HOLD_MOST)
            self._last_hold[row] = hold
            self._hold[row] = hold
            self.vetoes += 1
        elif mean < 0:
            self._last_hold.pop(row, None)
        self._window = [0.0, 0.0, 0.0, float(row)]
