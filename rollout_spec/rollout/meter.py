"""What one rollout did, from two readings of the controller's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.draft.refresh_policy import RolloutSeen


def seen_between(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> RolloutSeen:
    """Seconds of engine steps, and drafts by position. `before` None: since the engine's start.

    A bucket of batch sizes knows how many of its steps drafted, not how long these took: they get their share.
    """
    seconds = speculating = 0.0
    for bucket, (steps, spent) in enumerate(
        zip(after["steps_by_bucket_and_k"], after["seconds_by_bucket"], strict=True)
    ):
        if before is not None:
            steps = [a - b for a, b in zip(steps, before["steps_by_bucket_and_k"][bucket], strict=True)]
            spent -= before["seconds_by_bucket"][bucket]
        seconds += spent
        speculating += spent * (1 - steps[0] / sum(steps)) if sum(steps) else 0.0
    return RolloutSeen(
        seconds=seconds,
        speculating_seconds=speculating,
        tail_seconds=after["tail_seconds"] - (before["tail_seconds"] if before is not None else 0.0),
        drafted=_gained(before, after, "drafted_per_position"),
        accepted=_gained(before, after, "accepted_per_position"),
    )


def _gained(before: Mapping[str, Any] | None, after: Mapping[str, Any], name: str) -> tuple[int, ...]:
    start = before[name] if before is not None else [0] * len(after[name])
    return tuple(a - b for a, b in zip(after[name], start, strict=True))
