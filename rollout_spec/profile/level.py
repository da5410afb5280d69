"""A rollout against the table: steady steps on repeated prompts are not quite the steps of a rollout.

There, requests end, others take their place, steps read prompts beside decoding, the machine hiccups, and caches are as
real text leaves them. The share by which the mean step of a held-out rollout is longer than the table and the rate of
reading say belongs in a prediction of seconds; the choice of K, which compares steps of one rollout, does without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout_spec.control.policy import StepResult
from rollout_spec.control.step_times import StepTimes
from rollout_spec.simulate.step_model import Tabulated, Work

# Fewer steps than this say less than the steady steps themselves.
ENOUGH = 40

# [seconds, sequences, draft tokens, context tokens, K made in the step, prompt tokens]: what a step is compared by.
Row = list[float]


def rows(steps: Sequence[StepResult]) -> list[Row]:
    """Of the steps that decode; the first one, which warms up, is left out."""
    decoding = [step for step in steps if step.decode][1:]
    return [
        [s.seconds, s.decode, s.draft_tokens, s.context_tokens, s.k_next, float(s.prefill_tokens)] for s in decoding
    ]


def prompt_tokens(found: Sequence[Row]) -> float:
    return sum(row[-1] for row in found)


def level(found: Sequence[Row], times: StepTimes, k_max: int, reading: float = 0.0) -> float | None:
    """Mean seconds of a rollout's steps over what `times` says of them, hiccups left out; None for too few steps.

    reading: seconds of these steps that prompts take by the profile's rate.
    """
    if len(found) < ENOUGH:
        return None
    seconds, decode, draft_tokens, context, k_next, _ = np.array(found, dtype=np.float64).T
    work = Work(decode, draft_tokens, context, k_next, decode)
    predicted = Tabulated(times, k_max).seconds(work) / times.hiccups
    # Reading beside decoding hides in part; a rate that would leave less than half for decoding is not to be believed.
    return float(max(seconds.sum() - reading, 0.5 * seconds.sum()) / predicted.sum())
