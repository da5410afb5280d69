"""The output layer and the loss over it, slice by slice, gradients made on the way.

Rows over a vocabulary are far larger than a cache, and autograd walks over them a dozen times; slices of rows that stay
in cache, as Liger Kernel's fused linear cross-entropy does it (arXiv 2410.10989), saved a fifth of a training step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Rows of a slice: 2 MiB in float32 over 4,096 tokens.
ROWS = 128
# Of the shared mass, where its logarithm is cut off.
LEAST = 1e-6


class OutputLoss(NamedTuple):
    """Means over rows."""

    loss: Tensor
    cross_entropy: Tensor
    overlap: Tensor
    """Sum over tokens of min(p, q)."""


def output_loss(x: Tensor, weight: Tensor, law: Tensor, rows: Tensor, divisor: Tensor, overlap: float) -> OutputLoss:
    """Cross-entropy to the law, minus `overlap` times the log of the mass shared with it, mean over n rows.

    x [n, hidden] and weight [vocabulary, hidden] give the logits, divided by divisor [n]; law [m, vocabulary] holds the
    target's probabilities (a row may sum to less than 1), rows [n] says which of its rows belongs to which of x. Only
    `loss` has gradients, for x and weight.
    """
    return OutputLoss(*_OutputLoss.apply(x, weight, law, rows, divisor, overlap))


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, law: Tensor, rows: Tensor, divisor: Tensor, overlap: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(x)
        by_token = weight.to(x.dtype)
        gradient = torch.empty(count, len(weight), dtype=x.dtype)  # for the logits
        entropy, log_shared, shared = torch.zeros(3).unbind()
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, count, ROWS):
                part = slice(start, start + ROWS)
                scale = 1 / divisor[part, None]
                log_q = (x[part] @ by_token.T).float().mul_(scale).log_softmax(-1)
                p, q = law[rows[part]], log_q.exp()
                entropy -= torch.dot(p.flatten(), log_q.flatten())
                mass = torch.minimum(p, q).sum(-1, keepdim=True)
                shared += mass.sum()
                log_shared += mass.clamp_min(LEAST).log().sum()
                below = q * (q < p)  # where more q is more shared mass
                strength = torch.where(mass > LEAST, overlap / mass, 0.0)
                for_q = p.sum(-1, keepdim=True) + strength * below.sum(-1, keepdim=True)
                pull = q.mul_(for_q).sub_(p).sub_(below.mul_(strength))
                gradient[part] = pull.mul_(scale / count)
            ctx.save_for_backward(gradient @ by_token, gradient.T @ x)
        found = entropy / count, shared / count
        ctx.mark_non_differentiable(*found)
        return (entropy - overlap * log_shared) / count, *found

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> tuple[Tensor | None, ...]:
        for_x, for_weight = ctx.saved_tensors
        return for_x * of[0], for_weight * of[0], None, None, None, None
