"""How many drafts are accepted for each single request: one rate each, held to the rate of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

# A request's own rate counts like the rate of all after so many tested drafts as their spread says (empirical Bayes,
# the method of moments for a beta-binomial), within these bounds; before any spread is known, after WEIGHT.
WEIGHT = 6.0
WEIGHTS = (2.0, 40.0)
# Requests with fewer tested drafts say little of the spread, and so do fewer requests than that.
TESTED, COUNT = 4.0, 4
# A request forgets over this many of its steps: text changes between prose and code.
MEMORY_STEPS = 40.0

Vector = NDArray[np.float64]


class RequestRates:
    """P(one more draft accepted), a request each. Finished requests are forgotten as new ones come."""

    def __init__(self) -> None:
        self._row: dict[str, int] = {}
        self._hits: Vector = np.zeros(64)
        self._tries: Vector = np.zeros(64)

    def observe(self, requests: Mapping[str, tuple[int, int]]) -> None:
        """Draft tokens and accepted ones of each request that was to have drafts; none found counts as a failure."""
        if not requests:
            return
        rows = self._rows(list(requests))
        drafted, accepted = np.array(list(requests.values()), dtype=np.float64).T
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self._hits[rows] = self._hits[rows] * keep + accepted
        # A rejected draft ends the test: of those behind it nothing is learned.
        self._tries[rows] = self._tries[rows] * keep + np.maximum(np.minimum(accepted + 1, drafted), 1.0)

    def rates(self, requests: Sequence[str], overall: float) -> Vector:
        """[len(requests)], each between 0 and 1."""
        rows, weight = self._rows(requests), self._weight()
        return (self._hits[rows] + weight * overall) / (self._tries[rows] + weight)

    def _weight(self) -> float:
        """Of the rate of all, in tested drafts; from all requests that are remembered, finished ones too."""
        tested = self._tries > TESTED
        if int(tested.sum()) < COUNT:
            return WEIGHT
        tries = self._tries[tested]
        rates = self._hits[tested] / tries
        mean = float(rates.mean())
        chance = mean * (1.0 - mean)
        between = float(rates.var()) - chance * float((1.0 / tries).mean())
        low, high = WEIGHTS
        return min(max(chance / between - 1.0, low), high) if between * high > chance else high

    def fade(self, keep: float) -> None:
        """New weights or drafter: what single requests achieved counts for less."""
        self._hits *= keep
        self._tries *= keep

    def _rows(self, requests: Sequence[str]) -> NDArray[np.int64]:
        table = self._row
        rows = [table.get(request, -1) for request in requests]
        if -1 in rows:
            if len(table) + len(requests) > len(self._hits):
                self._make_room(requests)
                table = self._row
            for request in requests:
                if request not in table:
                    row = len(table)
                    table[request] = row
                    self._hits[row] = self._tries[row] = 0.0
            rows = [table[request] for request in requests]
        return np.array(rows)

    def _make_room(self, requests: Sequence[str]) -> None:
        """Keep the requests that are still asked for, and twice the space that they need."""
        kept = [request for request in requests if request in self._row]
        old = [self._row[request] for request in kept]
        size = max(64, 2 * len(requests))
        hits, tries = np.zeros(size), np.zeros(size)
        hits[: len(old)], tries[: len(old)] = self._hits[old], self._tries[old]
        self._hits, self._tries = hits, tries
        self._row = {request: row for row, request in enumerate(kept)}
