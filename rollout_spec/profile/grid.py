"""Which batch sizes to measure: few, and more where the curve bends."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_spec.profile.cell import Cell


def candidates(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]


def first(sizes: Sequence[int]) -> list[int]:
    """Both ends and the middle, the largest first: what does not fit shows at once."""
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}, reverse=True)


def next_size(sizes: Sequence[int], measured: dict[int, list[Cell]], bend: float) -> int | None:
    """A size to measure next, in the middle of a gap beside which the curve bends by more than `bend`; None: enough.

    A measured size bends if one of its cells is off the line between its neighbours'; with two gaps beside it, the
    wider is filled first.
    """
    done = [size for size in sizes if measured.get(size)]
    gaps = []
    for index in range(1, len(done) - 1):
        if _off_line(*(measured[size] for size in done[index - 1 : index + 2])) > bend:
            gaps += [(done[index - 1], done[index]), (done[index], done[index + 1])]
    inside = [[size for size in sizes if low < size < high and size not in measured] for low, high in gaps]
    widest = max(inside, key=len, default=[])
    return widest[len(widest) // 2] if widest else None


def _off_line(low: list[Cell], middle: list[Cell], high: list[Cell]) -> float:
    """The largest relative distance of `middle` from the line between `low` and `high`, over the K of all three."""
    below, above = {c.k: c for c in low}, {c.k: c for c in high}
    off = 0.0
    for cell in middle:
        a, b = below.get(cell.k), above.get(cell.k)
        if a is not None and b is not None:
            share = (cell.batch - a.batch) / (b.batch - a.batch)
            off = max(off, abs(a.seconds + share * (b.seconds - a.seconds) - cell.seconds) / cell.seconds)
    return off
