"""Unrolled training: draft steps on the true tokens, each held against the target's law one token further on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from rollout_spec.draft.features import Batch
from rollout_spec.draft.model import Cache, Eagle3Head
from rollout_spec.draft.output_loss import output_loss
from rollout_spec.draft.vocabulary import target_to_draft


@dataclass(frozen=True, slots=True)
class Shared:
    """What a head takes from its target. `ids` [draft vocabulary]: target ids of the draft vocabulary."""

    embedding: Tensor
    """[vocabulary, hidden]"""
    rows: Tensor
    """[draft vocabulary, hidden]: of the target's output layer."""
    ids: Tensor
    draft_of: Tensor
    """[vocabulary] draft id of each target id, -1 where it has none."""

    @classmethod
    def of(cls, embedding: Tensor, output: Tensor, ids: Tensor) -> Self:
        return cls(embedding, output[ids], ids, target_to_draft(ids, len(embedding)))

    def law(self, batch: Batch) -> Tensor:
        """[counted positions, draft vocabulary] the target's probabilities; a row's missing mass lies outside."""
        logits = (batch.last[batch.counts].to(self.rows.dtype) @ self.rows.T).float()
        logits /= batch.divisor[batch.counts][:, None]
        return (logits - batch.log_norm[batch.counts][:, None]).exp_()


@dataclass(frozen=True, slots=True)
class StepStats:
    """Of one draft step, means over positions; for the progress bar, not for judgement."""

    cross_entropy: float
    overlap: float
    """Sum over tokens of min(p, q): the chance that a draft is accepted at temperature 1."""


def unrolled_states(head: Eagle3Head, shared: Shared, batch: Batch, steps: int) -> list[Tensor]:
    """States [batch, tokens, hidden] of each draft step, on the true tokens."""
    state = head.fc(batch.aux.to(head.fc.weight.dtype))
    cache: Cache = []
    states = []
    for step in range(steps):
        embedding = F.embedding(shifted(batch.tokens, 1 + step), shared.embedding).to(state.dtype)
        state = head.step(embedding, state, step, cache)
        states.append(state)
    return states


def unrolled_loss(
    head: Eagle3Head, shared: Shared, batch: Batch, steps: int, decay: float, overlap: float
) -> tuple[Tensor, list[StepStats]]:
    """Cross-entropy to the target's law, mean over positions, weighted by decay ** step; and what each step does.

    overlap: weight of -log sum min(p, q), which is what acceptance at temperature 1 wants, beside the cross-entropy.
    """
    law = shared.law(batch)
    row_of = torch.full(batch.counts.shape, -1)
    row_of[batch.counts] = torch.arange(len(law))
    total = torch.zeros(())
    stats = []
    for step, state in enumerate(unrolled_states(head, shared, batch, steps)):
        # The state at position i predicts token i + 2 + step, whose law stands at position i + 1 + step.
        rows = shifted(row_of, 1 + step, fill=-1)
        counted = rows >= 0
        divisor = shifted(batch.divisor, 1 + step)[counted]
        out = output_loss(head.norm(state[counted]), head.lm_head.weight, law, rows[counted], divisor, overlap)
        total = total + decay**step * out.loss
        stats.append(StepStats(out.cross_entropy.item(), out.overlap.item()))
    return total / sum(decay**step for step in range(steps)), stats


def shifted(x: Tensor, by: int, fill: float = 0) -> Tensor:
    """[batch, tokens] moved left: entry t of the result is entry t + by of `x`, `fill` beyond the end."""
    return F.pad(x[:, by:], (0, min(by, x.shape[1])), value=fill)
