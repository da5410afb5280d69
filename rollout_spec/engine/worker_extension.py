"""What we run inside vLLM's worker process, through `worker_extension_cls` and `collective_rpc`.

Method names carry our prefix: vLLM refuses an extension that shadows a worker's attribute. Arguments and results
are plain values, so no pickle is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class WorkerExtension:
    """Mixed into vLLM's worker; `self` is the worker."""

    model_runner: Any

    def rollout_spec_sampler_ok(self) -> bool:
        """The rejection sampler of this worker expands sampling parameters correctly."""
        from rollout_spec.engine.sampler_check import sampler_in_force_is_right

        return sampler_in_force_is_right()

    def rollout_spec_forget_drafts(self) -> None:
        """Drop the history of a drafter that keeps one."""
        forget = getattr(getattr(self.model_runner, "drafter", None), "forget", None)
        if forget is not None:
            forget()

    def rollout_spec_load_weights(self, files: list[str]) -> int:
        """Load target weights from safetensors files, in Hugging Face names, into the running model.

        Returns the number of tensors. vLLM's layerwise reload restores and repacks what its kernels had packed.
        """
        config = self.model_runner.model_config.hf_text_config
        tied = bool(getattr(config, "tie_word_embeddings", False))
        count = 0

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal count
            for name, tensor in _read(files):
                count += 1
                # With tied embeddings the head is the embedding; loaded by itself vLLM refuses it.
                if not (tied and name == "lm_head.weight"):
                    yield name, tensor

        self.model_runner.reload_weights(weights_iterator=tensors())
        if tied:
            self._rollout_spec_repack_tied_head()
        return count

    def _rollout_spec_repack_tied_head(self) -> None:
        """On CPU a tied head keeps a packed copy of the old embedding; pack it again."""
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        method = getattr(head, "quant_method", None)
        if head is not None and method is not None:
            method.process_weights_after_loading(head)


def _read(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - safe_open is not iterable
                yield name, weights.get_tensor(name)
