from __future__ import annotations

import pytest
import torch

from rollout_spec.draft.output_loss import LEAST, ROWS, output_loss

HIDDEN, VOCABULARY = 8, 23


def written_out(x, weight, law, rows, divisor, overlap):
    """The same by autograd."""
    log_q = (x @ weight.T / divisor[:, None]).log_softmax(-1)
    p = law[rows]
    mass = torch.minimum(p, log_q.exp()).sum(-1)
    entropy = -(p * log_q).sum(-1).mean()
    return entropy - overlap * mass.clamp_min(LEAST).log().mean(), entropy, mass.mean()


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, ROWS + 3])
def test_value_and_gradients_are_those_of_autograd(count: int, overlap: float) -> None:
    rng = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=rng, dtype=torch.float64).float()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=rng)
    law = torch.rand(50, 1, generator=rng) * torch.randn(50, VOCABULARY, generator=rng).softmax(-1)
    rows = torch.randint(50, (count,), generator=rng)
    divisor = torch.rand(count, generator=rng) + 0.5
    law[3] = 0  # nothing of it is in the draft vocabulary
    rows[0] = 3

    made, gradients = [], []
    for function in (output_loss, written_out):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        result = function(*leaves, law, rows, divisor, overlap)
        (3 * result[0]).backward()
        made.append([value.detach() for value in result])
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*made)
    torch.testing.assert_close(*gradients)
