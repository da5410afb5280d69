"""The draft vocabulary: the target's tokens that its responses use most."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rollout_spec.draft.samples import Sample


def choose_vocabulary(samples: Iterable[Sample], vocab_size: int, size: int, always: Iterable[int] = ()) -> Tensor:
    """[size] target ids in rising order: those most used in responses, and `always` (ends of a sequence)."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for sample in samples:
        counts += torch.bincount(torch.tensor(sample.response, dtype=torch.long), minlength=vocab_size)
    for token in always:
        counts[token] = torch.iinfo(torch.long).max
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def coverage(samples: Iterable[Sample], ids: Tensor) -> float:
    """Share of response tokens that the draft vocabulary `ids` has; 0 without responses."""
    tokens = torch.tensor([token for sample in samples for token in sample.response])
    return torch.isin(tokens, ids).float().mean().item() if len(tokens) else 0.0


def d2t(ids: Tensor) -> Tensor:
    """vLLM's offsets: target id minus draft id, for each draft id."""
    return ids - torch.arange(len(ids))


def from_d2t(offsets: Tensor) -> Tensor:
    """Target ids of the draft vocabulary."""
    return offsets + torch.arange(len(offsets))


def target_to_draft(ids: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size] draft id of each target id, -1 where it has none."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.long)
    inverse[ids] = torch.arange(len(ids))
    return inverse
