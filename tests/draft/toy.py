"""Features and a head in memory, small enough for brute force."""

from __future__ import annotations

import torch
from tiny import DRAFT_VOCABULARY as DRAFT
from tiny import FEATURES, VOCABULARY, head_shape

from rollout_spec.draft.features import Features
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.shape import HeadShape

HIDDEN = 16


def shape(draft: int = DRAFT) -> HeadShape:
    small = {"hidden_size": HIDDEN, "intermediate_size": 32, "head_dim": 4}
    return head_shape(draft, **small, num_attention_heads=4, num_key_value_heads=2)


def head(seed: int = 0, draft: int = DRAFT) -> Eagle3Head:
    torch.manual_seed(seed)
    made = Eagle3Head(shape(draft))
    made.initialise(torch.ones(HIDDEN), torch.randn(draft, HIDDEN))
    return made


def shared(seed: int = 0) -> Shared:
    torch.manual_seed(seed)
    ids = torch.randperm(VOCABULARY)[:DRAFT].sort().values
    return Shared.of(torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY, HIDDEN), ids)


def features(output: torch.Tensor, length: int, start: int, temperature: float = 1.0, seed: int = 0) -> Features:
    """Random states, the law that `output` [vocabulary, hidden] makes of them, and tokens sampled of it."""
    torch.manual_seed(seed)
    last = torch.randn(length, HIDDEN)
    logits = last @ output.T / (temperature or 1.0)
    chosen = logits.argmax(-1) if temperature == 0 else torch.multinomial(logits.softmax(-1), 1)[:, 0]
    tokens = torch.cat([torch.tensor([0]), chosen[:-1]])
    return Features(tokens, start, torch.randn(length, len(FEATURES) * HIDDEN), last, logits.logsumexp(-1), temperature)
