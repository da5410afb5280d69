"""The acceptance length that a head will have, from responses that were recorded without it.

At a temperature the engine's output has the target's law p whatever is drafted, so recorded responses are what a
speculating engine would have written. Where a draft of law q was verified there, it was accepted with probability
min(1, q(x) / p(x)) given that the token became x (p(x) times that is min(p, q)(x), the accepted mass); at temperature
0, if the head's likeliest token is x. A verification that accepts n drafts moves on by n + 1 tokens, so that
predictable text is verified less often: the chance that each position starts a verification is followed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout_spec.draft.features import Features, Target, batches, collate, extract
from rollout_spec.draft.loss import Shared, unrolled_states
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.samples import Sample

# K that a head is judged at.
K_MAX = 5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Predicted:
    """At K drafts a verification. `survival[j-1]`: P(first j drafts accepted)."""

    k: int
    survival: tuple[float, ...]
    verifications: float

    @property
    def acceptance_length(self) -> float:
        """Bonus token included: vLLM's 1 + accepted / verifications with drafts."""
        return 1 + sum(self.survival)


def predict(chances: Sequence[Floats], k: int) -> Predicted:
    """chances: for each response [positions, at least k], P(draft j accepted | those before it were) at each position.

    Position t of a response of n positions stands for a verification whose first draft is position t's token; drafts
    beyond the end are never accepted.
    """
    accepted = np.zeros(k)
    verifications = 0.0
    for table in chances:
        survival = np.cumprod(table[:, :k], axis=1)
        reached = np.zeros(len(table) + k + 1)  # P(a verification starts here)
        reached[0] = 1.0
        for t, row in enumerate(survival):
            stops = -np.diff(row, prepend=1.0, append=0.0)  # P(exactly n accepted), n = 0 .. k
            reached[t + 1 : t + k + 2] += reached[t] * stops
        weights = reached[: len(table)]
        accepted += weights @ survival
        verifications += weights.sum()
    return Predicted(k, tuple((accepted / max(verifications, 1e-9)).tolist()), verifications)


@torch.inference_mode()
def acceptance_chances(
    head: Eagle3Head, shared: Shared, features: Sequence[Features], k: int, batch_tokens: int
) -> list[Floats]:
    """For each response [its tokens but the first, k]: see `predict`; each at the temperature it was sampled at."""
    found: dict[int, Floats] = {}
    for group in batches([len(each.tokens) for each in features], batch_tokens, random.Random(0)):
        chosen = [features[index] for index in group]
        batch = collate(chosen)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=head.fc.weight.dtype != torch.float32):
            states = unrolled_states(head, shared, batch, k)
        tables = [_of_sample(head, shared, each, [state[row] for state in states]) for row, each in enumerate(chosen)]
        found |= dict(zip(group, tables, strict=True))
    return [found[index] for index in range(len(features))]


def _of_sample(head: Eagle3Head, shared: Shared, sample: Features, states: Sequence[Tensor]) -> Floats:
    """[response tokens - 1, k] of one sample; `states` [tokens of the batch, hidden] of each draft step."""
    first = sample.start + 1  # the response's first token comes of the prompt's forward pass, undrafted
    count = len(sample.tokens) - first
    table = torch.zeros(max(count, 0), len(states))
    for step, state in enumerate(states):
        # Drafts of the token at position t, t = first + step ..: states at t - 2 - step.
        n = count - step
        if n <= 0:
            break
        at = torch.arange(first - 2, first - 2 + n)
        logits = head.logits(state[at])
        truth = sample.tokens[at + 2 + step]
        draft = shared.draft_of[truth]
        if sample.temperature == 0:
            chance = (logits.argmax(-1) == draft).float()
        else:
            rows = shared.rows[draft.clamp_min(0)].float()
            log_p = (sample.last[at + 1 + step].float() * rows).sum(-1) / sample.divisor - sample.log_norm[
                at + 1 + step
            ]
            log_q = (logits / sample.divisor).log_softmax(-1).gather(1, draft.clamp_min(0)[:, None])[:, 0]
            chance = (log_q - log_p).clamp_max(0).exp()
        table[:n, step] = torch.where(draft >= 0, chance, 0.0)
    return table.double().numpy()


def judge_samples(
    head: Eagle3Head, shared: Shared, target: Target, samples: Sequence[Sample], batch_tokens: int, k_max: int = K_MAX
) -> list[dict[str, Any]]:
    """Predictions for each temperature of the samples and each K up to `k_max`, as plain values."""
    rows = []
    for temperature in sorted({sample.temperature for sample in samples}):
        chosen = [sample for sample in samples if sample.temperature == temperature]
        chances = acceptance_chances(head, shared, extract(target, chosen, batch_tokens), k_max, batch_tokens)
        for k in range(1, k_max + 1):
            predicted = predict(chances, k)
            rows.append(
                {
                    "temperature": temperature,
                    "k": k,
                    "acceptance_length": round(predicted.acceptance_length, 4),
                    "survival": [round(value, 4) for value in predicted.survival],
                    "responses": len(chosen),
                    "response_tokens": sum(len(sample.response) for sample in chosen),
                }
            )
    return rows
