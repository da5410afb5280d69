"""verl's extension of vLLM's workers, and ours: new draft heads go in, and the policy's weights are copied for them."""

from __future__ import annotations

import os
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rollout_spec.engine.worker_extension import WorkerExtension as Ours
from rollout_spec_verl import compat

compat.require(compat.worker_problems)


class WorkerExtension(Ours, vLLMColocateWorkerExtension):
    """`engine_kwargs.vllm.worker_extension_cls` where draft heads are refreshed."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights_from_ipc(*args, **kwargs)
        self.rollout_spec_end_copy()

    def _update_weights(self, weights: Any, peft_config: Any, base_sync_done: bool) -> None:
        weights = list(weights)
        # All workers of all replicas get the same tensors; an adapter's are no model.
        first = self.rank == 0 and os.environ.get("VERL_REPLICA_RANK", "0") == "0"
        if first and not (peft_config and base_sync_done):
            self.rollout_spec_copy_weights(weights)
        super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
