"""Policies for tests."""

from __future__ import annotations

from rollout_spec.control.policy import Decision, StepResult, StepView


class Cycle:
    """Another K at every step, with K=0 between; remembers what the engine reported."""

    ORDER = (0, 5, 1, 0, 3, 2, 4, 0, 0, 5)

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self._next = 0

    def decide(self, view: StepView) -> Decision:
        self._next += 1
        return Decision(self.ORDER[self._next % len(self.ORDER)])

    def observe(self, result: StepResult) -> None:
        self.results.append(result)

    def metrics(self) -> dict[str, float]:
        return {}


class SwitchOn:
    """K=0 for so many steps, then k; remembers what the engine reported."""

    def __init__(self, after: int, k: int) -> None:
        self.results: list[StepResult] = []
        self._after = after
        self._k = k

    def decide(self, view: StepView) -> Decision:
        self._after -= 1
        return Decision(self._k if self._after < 0 else 0)

    def observe(self, result: StepResult) -> None:
        self.results.append(result)

    def metrics(self) -> dict[str, float]:
        return {}
