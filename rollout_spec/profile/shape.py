"""How the best K runs over the batch: falling, as for a dense model, or low, high, low, as an MoE's may."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def describe(best: Sequence[int]) -> str:
    """In words, for the best K of ascending batches. One batch's step up and down by 1 is taken for noise."""
    steady = [k for i, k in enumerate(best) if not (0 < i < len(best) - 1 and _blip(best, i))]
    if not any(steady):
        return "no K pays at any batch"
    if all(a >= b for a, b in pairwise(steady)):
        return "falls with the batch" if steady[0] != steady[-1] else "the same at every batch"
    top = steady.index(max(steady))
    rises = all(a <= b for a, b in pairwise(steady[: top + 1]))
    falls = all(a >= b for a, b in pairwise(steady[top:]))
    if rises and falls:
        return "rises with the batch" if steady[-1] == steady[top] else "low, high, low over the batch"
    return "goes up and down with the batch"


def _blip(best: Sequence[int], i: int) -> bool:
    return best[i - 1] == best[i + 1] and abs(best[i] - best[i - 1]) == 1
