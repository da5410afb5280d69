"""What the engines' controllers report, in verl's logger: collected from the rollout servers at every log call.

Each engine writes a status file (see `ControlLoop.status`) on its node; the server actor that started the engine is
asked to read it. A fault here costs metrics, or the refresh of draft heads, and never a step.
"""

from __future__ import annotations

import logging
import time

from rollout_spec.rollout.fleet_refresh import FleetRefresh
from rollout_spec.rollout.gains import Statuses
from rollout_spec.rollout.metrics import fleet_metrics
from rollout_spec_verl.engines import RayEngines

logger = logging.getLogger("rollout_spec")

# After so many failures in a row nobody is asked any more.
PATIENCE = 3


class Collector:
    """Lives in the trainer's process; remembers what was reported, since counters grow from the engines' start."""

    def __init__(self) -> None:
        self._engines = RayEngines()
        self._before: Statuses = {}
        self._failures = 0
        self._refresh: FleetRefresh | None = None

    def begin(self) -> None:
        """The engines are there, and nothing was generated yet: a draft head that a run before left goes in."""
        try:
            self._before = self._engines.statuses()
            self._refresh = self._engines.refresh(self._before)
        except Exception:  # Ray has many
            logger.exception("rollout_spec: draft heads are not refreshed in this run")

    def collect(self, step: int) -> dict[str, float]:
        """Metrics of what was generated since the last call; draft heads are refreshed."""
        if self._failures >= PATIENCE:
            return {}
        began = time.monotonic()
        try:
            now = self._engines.statuses()
        except Exception:  # none of Ray's may end a training run
            self._failures += 1
            last = " for the last time" if self._failures == PATIENCE else ""
            logger.exception("rollout_spec: no metrics of this step, the rollout servers could not be asked%s", last)
            return {}
        self._failures = 0
        if not now:
            logger.error(
                "rollout_spec: no engine of this job reports a controller, so nothing is sped up. Is this package "
                "installed on every node, and VLLM_PLUGINS unset or with 'rollout_spec' in it?"
            )
        found = fleet_metrics(now, self._before)
        if self._refresh is not None:
            found |= self._refresh.step(step, now, self._before)
        self._before = {**self._before, **now}
        return found | {"rollout_spec/collect_seconds": time.monotonic() - began}
