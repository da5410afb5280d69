"""The training loop: passes over features in memory until the time is up, kept every so often.

The learning rate warms up, then falls along a cosine over the share of the time (or of the passes, whichever is
further) that is used up: the head is finished when the clock is.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_spec.config import DraftConfig
from rollout_spec.draft.features import Features, batches, collate
from rollout_spec.draft.loss import Shared, StepStats, unrolled_loss
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.precision import cpu_dtype

WARM_UP_STEPS = 30
# Of the peak learning rate, at the end.
FLOOR = 0.02
CLIP = 1.0
BETAS = (0.9, 0.95)
KEEP_EVERY_SECONDS = 60.0


@dataclass(slots=True)
class Progress:
    """How far training is; what a continuation starts from, with the tensors of `Trainer.state`."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    """Trained on, prompts and padding left out, repeated passes counted."""
    passes: float = 0.0


@dataclass(slots=True)
class Trainer:
    """Trains `head` in place on features whose channels are of unit scale."""

    head: Eagle3Head
    shared: Shared
    features: Sequence[Features]
    options: DraftConfig
    seconds: float
    """Of training, over all sessions."""
    progress: Progress = field(default_factory=Progress)
    _optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self._optimizers = optimizers(self.head, self.options)
        self.shared = Shared(self.shared.embedding.float(), self.shared.rows, self.shared.ids, self.shared.draft_of)

    def run(
        self,
        on_step: Callable[[Progress, float, Sequence[StepStats]], object],
        keep: Callable[[dict[str, Tensor], Progress], object],
    ) -> None:
        """Until time or passes are used up. `on_step` gets the loss and what each draft step does; `keep` a state."""
        started, before, kept = time.monotonic(), self.progress.seconds, time.monotonic()
        for batch_of in self._batches():
            used = self._used()
            if used >= 1:
                break
            loss, stats = self._step(collate(batch_of), used)
            self.progress.steps += 1
            self.progress.tokens += sum(len(each.tokens) - each.start for each in batch_of)
            self.progress.passes += len(batch_of) / len(self.features)
            self.progress.seconds = before + time.monotonic() - started
            on_step(self.progress, loss, stats)
            if time.monotonic() - kept > KEEP_EVERY_SECONDS:
                keep(self.state(), self.progress)
                kept = time.monotonic()

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser moments by name, to keep."""
        tensors = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        for number, optimizer in enumerate(self._optimizers):
            for index, moments in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{name}": value for name, value in moments.items()}
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}

    def restore(self, tensors: dict[str, Tensor], progress: Progress) -> None:
        """Go on from what `state` gave."""
        self.progress = progress
        self.head.load_state_dict(
            {name.removeprefix("head."): tensor for name, tensor in tensors.items() if name.startswith("head.")}
        )
        for number, optimizer in enumerate(self._optimizers):
            state: dict[int, dict[str, Any]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    _, _, index, moment = name.split(".")
                    state.setdefault(int(index), {})[moment] = tensor
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def _batches(self) -> Iterator[list[Features]]:
        lengths = [len(each.tokens) for each in self.features]
        rng = random.Random(self.options.seed + self.progress.steps)
        while True:
            for group in batches(lengths, self.options.batch_tokens, rng):
                yield [self.features[index] for index in group]

    def _used(self) -> float:
        return max(self.progress.seconds / self.seconds, self.progress.passes / self.options.max_passes)

    def _step(self, batch: Any, used: float) -> tuple[float, Sequence[StepStats]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(self.progress.steps, used)
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cpu_dtype() == torch.bfloat16):
            steps = self.options.unroll if used >= self.options.single_share else 1
            loss, stats = unrolled_loss(self.head, self.shared, batch, steps, self.options.decay, self.options.overlap)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIP)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.item(), stats


def optimizers(head: Eagle3Head, options: DraftConfig) -> list[torch.optim.Optimizer]:
    """Muon for the layer's matrices, AdamW for the output layer and the norms."""
    matrices = [p for name, p in head.named_parameters() if p.dim() == 2 and not name.startswith("lm_head")]
    others = [p for name, p in head.named_parameters() if p.dim() != 2 or name.startswith("lm_head")]
    decay = options.weight_decay
    made: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=options.matrix_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=options.rate, betas=BETAS, weight_decay=decay, fused=True),
    ]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def rate(steps: int, used: float) -> float:
    """Share of the peak learning rate after so many steps and so much of the budget."""
    return min(1.0, (steps + 1) / WARM_UP_STEPS) * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(used, 1))))
