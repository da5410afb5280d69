"""What one rollout did, from two readings of the controller's counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.draft.refresh_policy import RolloutSeen
from rollout_spec.rollout.metrics import gain


def seen_between(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> RolloutSeen:
    """Seconds of engine steps, and drafts by position. `before` None: since the engine's start.

    A bucket of batch sizes knows how many of its steps drafted, not how long these took: they get their share.
    """
    done = gain(after, before)
    steps, seconds = done["steps_by_bucket_and_k"], done["seconds_by_bucket"]
    return RolloutSeen(
        seconds=sum(seconds),
        speculating_seconds=sum(s * (1 - row[0] / sum(row)) for row, s in zip(steps, seconds, strict=True) if sum(row)),
        tail_seconds=done["tail_seconds"],
        drafted=tuple(done["drafted_per_position"]),
        accepted=tuple(done["accepted_per_position"]),
    )
