"""Our extension of vLLM's workers in verl, for workers on a CPU: they can take new weights.

vLLM repacks the weights of linear layers on a CPU when it loads them and drops the originals, so that verl's loading
in place finds nothing to load into. Here they stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils as layers

from rollout_spec_verl import worker_extension

if not hasattr(layers, "dispatch_cpu_unquantized_gemm"):
    raise RuntimeError("vllm.model_executor.layers.utils has no dispatch_cpu_unquantized_gemm: who packs weights now?")


def _unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


layers.dispatch_cpu_unquantized_gemm = _unpacked


class WorkerExtension(worker_extension.WorkerExtension):
    """`engine_kwargs.vllm.worker_extension_cls`."""

    def _update_weights(self, weights: Any, peft_config: Any, base_sync_done: bool) -> None:
        """With tied embeddings the head is the embedding; in a bucket of its own vLLM refuses it."""
        if getattr(self.model_runner.model_config.hf_text_config, "tie_word_embeddings", False):
            weights = [(name, tensor) for name, tensor in weights if name != "lm_head.weight"]
        if weights:
            super()._update_weights(weights, peft_config=peft_config, base_sync_done=base_sync_done)
