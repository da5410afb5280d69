"""Step times of one batch size and context, from the steps of a sweep: medians, their spread, and their parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from rollout_spec.control.policy import StepResult

# Drafts were found for at least this share of the positions, or the cell says nothing of full drafts.
FULL_ENOUGH = 0.5


class TimedStep(NamedTuple):
    """One step of a steady batch."""

    seconds: float
    k: int
    k_next: int
    draft_tokens: int
    context: float  # tokens a sequence
    model_seconds: float
    k_before: int
    """K that the step before it verified."""
    round: int
    """The visit to its batch in which it was made."""

    @classmethod
    def of(cls, before: StepResult, step: StepResult, number: int) -> Self:
        context = step.context_tokens / step.decode if step.decode else 0.0
        return cls(step.seconds, step.k, step.k_next, step.draft_tokens, context, step.model_seconds, before.k, number)


@dataclass(frozen=True, slots=True)
class Cell:
    """A steady step that verifies and drafts K tokens a sequence. Times in seconds, medians over `samples` steps."""

    batch: int
    k: int
    context: float
    """Mean context tokens a sequence."""
    seconds: float
    error: float
    """Standard error of `seconds`, relative, from how its rounds differ; 1 with fewer than two."""
    samples: int
    filled: float = 1.0
    """Share of the draft tokens that the drafter found; `seconds` is scaled up to all of them, linearly."""
    draft_seconds: float | None = None
    """By which a step that only drafts exceeds one that does neither."""
    verify_seconds: float | None = None
    """By which a step that only verifies exceeds it; rejection sampling included."""
    mean_seconds: float | None = None
    """Mean of the same steps, hiccups included: what they take in the long run."""
    host_seconds: float = 0.0
    """Scheduling, detokenising and so on: outside the model's forward, sampling and drafting."""

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def cells(batch: int, samples: Sequence[TimedStep]) -> list[Cell]:
    """A cell for each K that was steadily used, K = 0 first; empty where K = 0 was not."""
    steps: dict[tuple[int, int], list[TimedStep]] = {}
    for sample in samples:
        # A step that verifies nothing counts among its like; right after a verification it is slower.
        if sample.k or not sample.k_before:
            steps.setdefault((sample.k, sample.k_next), []).append(sample)
    if (0, 0) not in steps:
        return []
    base = _median(steps[0, 0])
    made = []
    for k in sorted({k for k, k_next in steps if k == k_next}):
        steady = steps[k, k]
        seconds = median = _median(steady)
        filled = 1.0
        draft = verify = None
        if k:
            filled = float(np.mean([s.draft_tokens for s in steady])) / (batch * k)
            if filled < FULL_ENOUGH:
                continue
            seconds = base + max(seconds - base, 0.0) / filled
            draft = _median(steps[0, k]) - base if (0, k) in steps else None
            verify = _median(steps[k, 0]) - base if (k, 0) in steps else None
        made.append(
            Cell(
                batch=batch,
                k=k,
                context=float(np.mean([s.context for s in steady])),
                seconds=seconds,
                error=_error(steady),
                samples=len(steady),
                filled=min(filled, 1.0),
                draft_seconds=draft,
                verify_seconds=verify,
                mean_seconds=seconds * float(np.mean([s.seconds for s in steady])) / median,
                host_seconds=float(np.median([s.seconds - s.model_seconds for s in steady])),
            )
        )
    return made


def worst_error(made: Iterable[Cell]) -> float:
    """The largest relative standard error; infinite without cells."""
    return max((cell.error for cell in made), default=float("inf"))


def _median(steps: Sequence[TimedStep]) -> float:
    return float(np.median([s.seconds for s in steps]))


def _error(steps: Sequence[TimedStep]) -> float:
    """Relative standard error of the mean of the rounds' medians: steps of a round share what the machine does then,
    and in a median a hiccup does not count."""
    rounds = {step.round for step in steps}
    if len(rounds) < 2:
        return 1.0
    medians = np.array([_median([s for s in steps if s.round == number]) for number in sorted(rounds)])
    return float(medians.std(ddof=1) / medians.mean() / len(medians) ** 0.5)
