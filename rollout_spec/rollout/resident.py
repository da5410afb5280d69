"""The weights in a running engine: which versions they are, how they change, and whether they are still there."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Literal, get_args

from rollout_spec.config import ConfigError
from rollout_spec.files import write_json
from rollout_spec.rollout.ledger import Ledger
from rollout_spec.rollout.update import WeightSync
from rollout_spec.rollout.versions import Versions
from rollout_spec.rollout.weights import Weights

logger = logging.getLogger("vllm.rollout_spec")

Mode = Literal["drained", "abort_resume", "in_flight"]


class Resident:
    """Whoever changes it holds the worker's lock, so that a change falls between two engine steps."""

    def __init__(self, engine: Any, ledger: Ledger, sync: WeightSync, draft_file: Path, in_process: bool) -> None:
        """draft_file: replaced with each new draft, since the controller watches it."""
        self.versions = Versions()
        self.lost = False  # the target's weights are gone
        self.update_seconds = 0.0  # the last update took so long
        self._engine = engine
        self._ledger = ledger
        self._sync = sync
        self._draft_file = draft_file
        self._in_process = in_process
        if sync.has_draft:
            sync.note()

    def update(
        self,
        target: Weights | None,
        policy_version: int | None,
        draft: Weights | None,
        draft_version: int | None,
        mode: Mode,
    ) -> None:
        """As `RolloutWorker.update_weights`."""
        if (target is None) != (policy_version is None) or (draft is None) != (draft_version is None):
            raise ConfigError("update_weights: give weights and their version together: target's, draft's or both")
        if target is None and draft is None:
            raise ConfigError("update_weights: neither weights of the target nor of the draft are given")
        if mode not in get_args(Mode):
            raise ConfigError(f"update_weights: mode {mode!r}: must be one of {', '.join(get_args(Mode))}")
        self._check_running(mode)
        began = time.perf_counter()
        self._sync.load(target, draft, vocabulary=int(self._engine.vllm_config.model_config.get_vocab_size()))
        self.versions = self.versions.updated(policy_version, draft_version)
        self._ledger.changed(self._engine, self.versions)
        if target is not None:
            self.lost = False
            self._drop_caches(mode)
        if draft is not None:
            self._announce_draft()
        self.update_seconds = time.perf_counter() - began

    def sleep(self, level: int) -> None:
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise RuntimeError(
                "sleep: vLLM's sleep mode is off in this engine; set engine.extra.enable_sleep_mode=true where the "
                "platform has it (vLLM on CPU has none)"
            )
        self._check_running("drained")
        self._sync.note()
        self._engine.sleep(level)

    def mend(self) -> bool:
        """As `RolloutWorker.mend_weights`."""
        changed = self._sync.changed()
        mended = "draft" in changed and self._sync.has_draft
        if mended:
            logger.warning("the draft's weights are not those of version %d: loading them again", self.versions.draft)
            self._sync.reload_draft()
            self._announce_draft()
        self.lost = "target" in changed
        return mended

    @property
    def takes_in_flight(self) -> bool:
        """Tokens of running requests can be told apart by version."""
        return self._in_process and not self._engine.vllm_config.scheduler_config.async_scheduling

    def require(self) -> None:
        """RuntimeError if the target's weights are gone: nothing may be sampled."""
        if self.lost:
            raise RuntimeError(
                f"the weights of policy version {self.versions.policy} are no longer in the engine (a level 2 sleep "
                "discards them): push weights with update_weights before generating"
            )

    def _announce_draft(self) -> None:
        write_json(self._draft_file, {"draft_version": self.versions.draft})

    def _check_running(self, mode: Mode) -> None:
        """RuntimeError where requests run and `mode` does not allow that."""
        count = len(self._ledger.running)
        if not count:
            return
        if mode == "drained":
            raise RuntimeError(
                f"weights: {count} requests still run on policy version {self.versions.policy}; let them finish, abort "
                "them, or choose another mode"
            )
        if not self.takes_in_flight:
            raise RuntimeError(
                f"weights: {count} requests still run, and in mode {mode!r} their tokens can only be told apart by "
                "version with engine.in_process=true and engine.extra.async_scheduling=false"
            )

    def _drop_caches(self, mode: Mode) -> None:
        """After a new target. Cached blocks are salted by update: what must stay never answers a later request."""
        if mode == "abort_resume":
            self._engine.reset_prefix_cache(reset_running_requests=True)
            return
        dropped = self._engine.reset_prefix_cache()  # also tells the controller
        if mode == "in_flight":
            self._ledger.restart_unbegun(self._engine, self.versions)
        elif not dropped:
            logger.warning("update_weights: vLLM did not drop its prefix cache; it keeps memory until it is evicted")
