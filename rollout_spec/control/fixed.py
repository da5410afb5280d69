"""Policies that do not learn: off, fixed K, a batch threshold, a batch-size table."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_spec.control.policy import Decision, StepResult, StepView


class Static:
    """A policy that does not learn."""

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""

    def metrics(self) -> dict[str, float]:
        return {}


class Fixed(Static):
    """The same K at every step; K=0 is `off` with a drafter loaded."""

    def __init__(self, k: int) -> None:
        self._decision = Decision(k, "fixed")

    def decide(self, view: StepView) -> Decision:
        return self._decision


class Threshold(Static):
    """K while at most `batch` sequences decode, else 0 (SGLang's switch: seed 000, LinkedIn)."""

    def __init__(self, batch: int, k: int) -> None:
        self._batch = batch
        self._on = Decision(k, "at or below threshold")
        self._off = Decision(0, "above threshold")

    def decide(self, view: StepView) -> Decision:
        return self._on if view.decode <= self._batch else self._off


class Table(Static):
    """K by batch size from `[[lo, hi, K], ...]`, as vLLM's `num_speculative_tokens_per_batch_size`.

    Beyond the last row the last row's K holds, as in vLLM.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int]]) -> None:
        last = max(hi for _, hi, _ in rows)
        self._by_batch = [Decision(0, "table")] * (last + 1)
        for lo, hi, k in rows:
            self._by_batch[lo : hi + 1] = [Decision(k, "table")] * (hi - lo + 1)
        self._last = last

    def decide(self, view: StepView) -> Decision:
        return self._by_batch[min(view.decode, self._last)]
