"""DraftRefresh for engines that belong to a trainer: it calls once a step, from its own process.

The trainer generates and updates as it does without us. What a refresh needs is found where it is left: statuses and
responses in files of the engines, the policy's weights in a copy that a worker makes of an update when asked to.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rollout_spec.config import Config
from rollout_spec.draft.samples import Sample
from rollout_spec.draft.target import read_target
from rollout_spec.rollout.draft_refresh import DraftRefresh
from rollout_spec.rollout.gains import Gains, Statuses
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.update import WeightSync
from rollout_spec.rollout.weights import SHARED_MEMORY, Weights

logger = logging.getLogger("vllm.rollout_spec")


class Engines(Protocol):
    """The engines, wherever they are. A call that fails raises RuntimeError."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run a method of the worker extension in each worker of each engine; their results."""

    def announce(self, draft_version: int) -> None:
        """Replace the draft file of each engine."""

    def take(self, temperature: float, tokens: int) -> list[Sample]:
        """Responses at this temperature since the last time, about so many tokens at most from each node."""


class Fleet:
    """The engines as DraftRefresh knows a worker: a new head goes into all of them or into none."""

    # A head goes in between two steps of an engine, and nobody asks which drafts were whose.
    num_unfinished = 0
    takes_in_flight = True

    def __init__(self, config: Config, engines: Engines, folder: Path) -> None:
        self.config = config
        self.policy_version = self.draft_version = 0
        self._engines = engines
        spec = {"method": config.drafter.method, "model": config.drafter.model}
        self._sync = WeightSync(engines.call, {"model": config.model, "speculative_config": spec}, folder)
        # A validation at temperature 0 accepts more than training does.
        self.gains = Gains(sampled_only=config.sampling.temperature > 0)

    def controller_status(self) -> dict[str, Any] | None:
        return self.gains.status

    def refresh_draft(self, weights: Weights, draft_version: int) -> None:
        """As RolloutWorker.refresh_draft."""
        try:
            self._sync.load(None, weights, int(read_target(self.config.model).config["vocab_size"]))
        except Exception:
            # An engine that was never asked, since another failed, must not keep what that one has not.
            with suppress(RuntimeError):
                self._engines.call("rollout_spec_settle_weights", False)
            raise
        self._engines.announce(draft_version)
        self.draft_version = draft_version

    def fingerprint(self) -> int:
        """Of the head in the engines; 0 where they have not the same one."""
        found = set(self._engines.call("rollout_spec_fingerprint"))
        return found.pop() if len(found) == 1 else 0


class FleetRefresh:
    """Call `step` after each step of the trainer. Whatever goes wrong costs a warning, and the old head stays."""

    def __init__(self, config: Config, engines: Engines, near: bool, statuses: Statuses) -> None:
        """near: engine and trainer share a machine, so that weights can be handed over in its shared memory.

        Puts the head in that a run before left in `refresh.folder`. Raises ConfigError where there is no head to train.
        """
        self._engines, self._options, self._temperature = engines, config.refresh, config.sampling.temperature
        self._scratch = tempfile.TemporaryDirectory(prefix="rollout_spec_")
        self._fleet = Fleet(config, engines, Path(self._scratch.name))
        self._refresh = DraftRefresh(self._fleet)
        place = SHARED_MEMORY if near and SHARED_MEMORY.is_dir() else config.refresh.folder
        # The process in its name, so that who was killed can be told from who is at work.
        self._handed = tempfile.TemporaryDirectory(prefix=f"rollout_spec_{os.getpid()}_", dir=place)
        self._policy = Path(self._handed.name)
        self._updates = _updates(statuses)
        self._began = self._asked = False
        self._faults = 0
        self._fingerprint = 0
        self._ask_for_weights()

    def step(self, step: int, now: Statuses, before: Statuses) -> dict[str, float]:
        """The trainer's step `step` is over; statuses now and at the last call. Returns metrics."""
        try:
            self._step(step, now, before)
        except Exception:  # a refresh must not end a training run
            self._faults += 1
            logger.warning("draft refresh: step %d: the head in the engines stays", step, exc_info=True)
        return self._refresh.metrics() | {
            "rollout_spec/draft_version": float(self._fleet.draft_version),
            "rollout_spec/draft_fingerprint": float(self._fingerprint % 2**31),
            "rollout_spec/refresh_faults": float(self._faults),
        }

    def close(self) -> None:
        """End a running refresh, remove what is temporary. Idempotent."""
        self._refresh.close()
        self._handed.cleanup()
        self._scratch.cleanup()

    def _step(self, step: int, now: Statuses, before: Statuses) -> None:
        self._fleet.policy_version = step
        self._fleet.gains.took(now, before)
        responses = self._engines.take(self._temperature, self._options.buffer_tokens)
        updates = _updates(now)
        if responses and not self._began:
            self._began = True
            self._refresh.replay.forget_from(step)
        if responses or updates > self._updates:
            if updates > self._updates:
                fresh, self._asked = self._asked and self._file.exists(), False
                self._refresh.after_update(self._policy if fresh else None)
            self._updates = updates
            self._refresh.after_rollout([_rollout(one, step) for one in responses], self._temperature)
            if self._refresh.wants_weights:
                self._ask_for_weights()
            elif not self._refresh.running:
                self._file.unlink(missing_ok=True)
        self._fingerprint = self._fleet.fingerprint()

    @property
    def _file(self) -> Path:
        return self._policy / "model.safetensors"

    def _ask_for_weights(self) -> None:
        self._file.unlink(missing_ok=True)
        if self._options.policy != "never":
            self._engines.call("rollout_spec_copy_next_update", str(self._file))
            self._asked = True


def _updates(statuses: Statuses) -> int:
    return min((status["weight_updates"] for status in statuses.values()), default=0)


def _rollout(sample: Sample, step: int) -> Rollout:
    return Rollout(0, 0, sample.prompt, sample.response, None, "stop" if sample.ended else "length", step, None)
