"""Measured over expected step times by batch bucket and K: what no model of step times foresees."""

from __future__ import annotations

# A cell is trusted like the model after this many steps, and forgets over the second.
WEIGHT, MEMORY = 3.0, 60.0
# A cell may say that the model is off by at most this factor.
MOST = 3.0
# Batch buckets.
ROWS = 12


class Cells:
    """Rows are batch buckets, columns K."""

    def __init__(self, k_max: int) -> None:
        self.k_max = k_max
        self.ratio = [[1.0] * (k_max + 1) for _ in range(ROWS)]
        self.seen = [[0.0] * (k_max + 1) for _ in range(ROWS)]

    def learn(self, row: int, k: int, ratio: float, count: int) -> None:
        """`count` whole steps took `ratio` times what was expected."""
        ratio = min(max(ratio, 1.0 / MOST), MOST)
        seen = min(self.seen[row][k], MEMORY)
        self.ratio[row][k] += (ratio - self.ratio[row][k]) * count / (seen + count)
        self.seen[row][k] = seen + count

    def common(self, row: int) -> float:
        """The ratio that the measured K of a bucket share, for those that were not measured; 1 without evidence."""
        seen = self.seen[row]
        total = sum(seen)
        if not total:
            return 1.0
        mean = sum(count * ratio for count, ratio in zip(seen, self.ratio[row], strict=True)) / total
        return 1.0 + (mean - 1.0) * total / (total + WEIGHT)

    def measured(self, row: int, k: int) -> bool:
        """A step of this K was measured at about this batch: in this bucket or one beside it."""
        return any(seen[k] > 0 for seen in self.seen[max(row - 1, 0) : row + 2])

    def longest_measured(self, row: int) -> int:
        """The largest such K; 0 if none."""
        return next((k for k in range(self.k_max, 0, -1) if self.measured(row, k)), 0)


def bucket(decode: int) -> int:
    """0, 1, 2, 3, ... for a batch of 1, 2, 3-4, 5-8, ...; the last takes all beyond."""
    return min(max(decode - 1, 0).bit_length(), ROWS - 1)
