"""What we run inside vLLM's worker process, through `worker_extension_cls` and `collective_rpc`.

Method names carry our prefix: vLLM refuses an extension that shadows a worker's attribute. Arguments and results
are plain values, so no pickle is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rollout_spec.engine import reload

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.rollout_spec")


class WorkerExtension:
    """Mixed into vLLM's worker; `self` is the worker."""

    model_runner: Any
    _rollout_spec_before: reload.Snapshot | None = None
    _rollout_spec_chosen: Sequence[str] = ()
    _rollout_spec_marks: Mapping[str, reload.Marks] = MappingProxyType({})
    _rollout_spec_copy: tuple[Path, dict[str, torch.Tensor]] | None = None

    def rollout_spec_sampler_ok(self) -> bool:
        """The rejection sampler of this worker expands sampling parameters correctly."""
        from rollout_spec.engine.sampler_check import sampler_in_force_is_right

        return sampler_in_force_is_right()

    def rollout_spec_forget_drafts(self) -> None:
        """Drop the history of a drafter that keeps one."""
        forget = getattr(getattr(self.model_runner, "drafter", None), "forget", None)
        if forget is not None:
            forget()

    def rollout_spec_remember_drafts(self, prompt: list[int], responses: list[list[int]]) -> None:
        """Add responses to the history of a drafter that keeps one."""
        remember = getattr(getattr(self.model_runner, "drafter", None), "remember", None)
        if remember is not None:
            remember(prompt, responses)

    def rollout_spec_load_weights(self, target: list[str], draft: list[str]) -> str | None:
        """Load checked safetensors files, in Hugging Face names, into the target, the draft ([]: not) or both.

        Returns what went wrong, as a value, since other workers may have succeeded. Either way the old weights are
        kept until `rollout_spec_settle_weights`, which must follow.
        """
        files = {reload.TARGET: target, reload.DRAFT: draft}
        chosen = [which for which in files if files[which]]
        self._rollout_spec_before, self._rollout_spec_chosen = None, chosen
        try:
            if not self._rollout_spec_marks:
                self.rollout_spec_note_weights()
            found = reload.models(self.model_runner)
            self._rollout_spec_before = reload.Snapshot(found[which] for which in chosen)
            for which in chosen:
                reload.load(self, which, reload.read(files[which]))
        except Exception as error:  # whatever broke it, the old weights must come back
            logger.exception("rollout_spec: new weights could not be loaded")
            return f"{type(error).__name__}: {error}"
        return None

    def rollout_spec_settle_weights(self, keep: bool) -> str | None:
        """Let the old weights go (keep), or put them back; returns what is wrong with those that came back."""
        before, self._rollout_spec_before = self._rollout_spec_before, None
        if keep:
            self.rollout_spec_note_weights(self._rollout_spec_chosen)
            return None
        if before is None:  # nothing was touched
            return None
        before.restore()
        changed = self.rollout_spec_changed_weights()
        return f"{' and '.join(changed)} weights are not what they were" if changed else None

    def rollout_spec_copy_next_update(self, file: str) -> None:
        """Write the policy's weights to this safetensors file when they come the next time.

        For a trainer that sends them to the engine only: its own extension tells us of them, see the next two.
        """
        self._rollout_spec_copy = (Path(file), {})

    def rollout_spec_copy_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Some of an update's tensors, under their checkpoint's names."""
        if self._rollout_spec_copy is not None:
            self._rollout_spec_copy[1].update((name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights)

    def rollout_spec_end_copy(self) -> None:
        """The update is whole. A copy that cannot be written costs a refresh, not the update."""
        copy, self._rollout_spec_copy = self._rollout_spec_copy, None
        if copy is None or not copy[1]:
            return
        from rollout_spec.draft.checkpoint import save_whole

        try:
            save_whole(*copy)
        except Exception:
            logger.exception("rollout_spec: the policy's weights could not be copied to %s", copy[0])

    def rollout_spec_shared_layers(self) -> list[str]:
        """Layers of the draft (embed_tokens, lm_head) that are the target's: no draft update may hold them."""
        return reload.shared(self.model_runner)

    def rollout_spec_note_weights(self, loaded: Sequence[str] = (reload.TARGET, reload.DRAFT)) -> None:
        """Those `loaded` are right from now on: `rollout_spec_changed_weights` compares with them."""
        found = reload.models(self.model_runner)
        if reload.TARGET not in loaded:  # the draft's marks have the layers in them that it shares with the target
            found.pop(reload.TARGET)
        marks = {which: reload.fingerprint(model) for which, model in found.items()}
        self._rollout_spec_marks = {**self._rollout_spec_marks, **marks}

    def rollout_spec_fingerprint(self) -> int:
        """Of the draft's own weights, 0 without any: a number that another head has not, whatever the target does."""
        found = reload.models(self.model_runner)
        return reload.own_checksum(found[reload.DRAFT], found[reload.TARGET]) if reload.DRAFT in found else 0

    def rollout_spec_changed_weights(self) -> list[str]:
        """Models (target, draft) whose weights are no longer what was noted."""
        found = reload.models(self.model_runner)
        noted = self._rollout_spec_marks
        return [which for which in noted if not reload.same(reload.fingerprint(found[which]), noted[which])]
