"""What several engines of one policy did, as if they were one: for who refreshes their draft head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_spec.rollout.metrics import added, gain, sampled

Statuses = Mapping[str, Mapping[str, Any]]
"""By engine: `ControlLoop.status`."""


class Gains:
    """Counts added up, seconds those of an engine on average."""

    def __init__(self, sampled_only: bool) -> None:
        """sampled_only: tokens drafted at temperature 0 don't count, since more of them are accepted."""
        self._sampled_only = sampled_only
        self.status: dict[str, Any] | None = None
        """Since the beginning, as the status of an engine; None before the first."""

    def took(self, now: Statuses, before: Statuses) -> None:
        """What the engines did between two readings; one that was not there before, since its start."""
        gains = [gain(status, before.get(name)) for name, status in now.items()]
        if not gains:
            return
        total = added(gains)
        for name in ("seconds_by_bucket", "tail_seconds"):
            value = total[name]
            each = len(gains)
            total[name] = [one / each for one in value] if isinstance(value, list) else value / each
        if self._sampled_only:
            total["drafted_per_position"], total["accepted_per_position"] = sampled(total)
        self.status = added([self.status, total]) if self.status else total
