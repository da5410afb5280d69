"""A vLLM worker that fails when it is to take new weights."""

from __future__ import annotations

from typing import Any

from rollout_spec_verl.cpu.worker_extension import WorkerExtension


class FailingExtension(WorkerExtension):
    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a planted failure")
