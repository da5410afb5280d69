"""A rollout against the table: steady steps on repeated prompts are not quite the steps of a rollout.

There, requests end and are handed over, the machine hiccups, and caches are as real text leaves them. The share by
which the mean step of a held-out rollout is longer than the table says belongs in a prediction of seconds; the choice
of K, which compares steps of one rollout, does without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout_spec.control.policy import StepResult
from rollout_spec.control.step_times import StepTimes
from rollout_spec.simulate.step_model import Tabulated, Work

# Fewer steps than this say less than the steady steps themselves.
ENOUGH = 40

# [seconds, sequences, draft tokens, context tokens, K made in the step]: what a step is compared by.
Row = list[float]


def rows(steps: Sequence[StepResult]) -> list[Row]:
    """Of the steps that only decode; the first one, which warms up, is left out."""
    pure = [step for step in steps if step.decode and not step.prefill_tokens][1:]
    return [[s.seconds, s.decode, s.draft_tokens, s.context_tokens, s.k_next] for s in pure]


def level(found: Sequence[Row], times: StepTimes, k_max: int) -> float | None:
    """Mean seconds of a rollout's steps over what `times` says of them, hiccups left out; None for too few steps."""
    if len(found) < ENOUGH:
        return None
    seconds, decode, draft_tokens, context, k_next = np.array(found, dtype=np.float64).T
    work = Work(decode, draft_tokens, context, k_next, decode)
    predicted = Tabulated(times, k_max).seconds(work) / times.hiccups
    return float(seconds.sum() / predicted.sum())
