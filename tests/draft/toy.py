"""A head and features small enough for brute force."""

from __future__ import annotations

import torch

from rollout_spec.draft.features import Features
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.shape import HeadShape

HIDDEN, VOCABULARY, DRAFT = 16, 24, 12


def shape(draft: int = DRAFT) -> HeadShape:
    return HeadShape(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=128,
        vocab_size=VOCABULARY,
        draft_vocab_size=draft,
        aux_layers=(1, 2),
        bos_token_id=0,
        eos_token_id=1,
    )


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
    return Features(tokens, start, torch.randn(length, 2 * HIDDEN), last, logits.logsumexp(-1), temperature)
