from __future__ import annotations

import copy

import pytest

from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.engine.control_loop import ControlLoop
from rollout_spec.rollout.meter import seen_between


class Fixed:
    def decide(self, view: StepView) -> Decision:
        return Decision(2)

    def observe(self, result: StepResult) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}


def step(decode: int, k: int, seconds: float, accepted: tuple[int, int] = (0, 0)) -> StepResult:
    drafted = (decode if k > 0 else 0, decode if k > 1 else 0)
    return StepResult(
        seconds=seconds,
        decode=decode,
        prefill_tokens=0,
        k=k,
        k_next=k,
        speculated=decode if k else 0,
        drafted=drafted,
        accepted=accepted,
    )


def test_a_rollout_is_what_came_between_two_readings() -> None:
    loop = ControlLoop(Fixed(), k_max=2)
    loop.observe(step(8, 2, 1.0, (8, 8)))
    before = copy.deepcopy(loop.status())
    for _ in range(3):
        loop.observe(step(8, 0, 2.0))
    loop.observe(step(8, 1, 4.0, (5, 0)))
    loop.observe(step(1, 2, 0.5, (1, 1)))
    seen = seen_between(before, loop.status())
    assert seen.seconds == pytest.approx(10.5)
    # A quarter of the steps at batch 8 drafted, and all at batch 1.
    assert seen.speculating_seconds == pytest.approx(10 / 4 + 0.5)
    assert (seen.drafted, seen.accepted) == ((9, 1), (6, 1))
    whole = seen_between(None, loop.status())
    assert whole.seconds == pytest.approx(11.5)
    assert (whole.drafted, whole.accepted) == ((17, 9), (14, 9))
    nothing = seen_between(loop.status(), loop.status())
    assert (nothing.seconds, nothing.speculating_seconds) == (0, 0)
