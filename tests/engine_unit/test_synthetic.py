"""Synthetic acceptance on CPU: at the rates asked for, and well-formed rows whatever is accepted."""

import pytest
import torch

from rollout_spec.engine import synthetic


def sample(uniform, rates, mine=None, drafts=((10, 11, 12), (20,), ())):
    counts = torch.tensor([len(row) for row in drafts])
    flat = torch.tensor([token for row in drafts for token in row], dtype=torch.int32)
    output = torch.full((len(drafts), 4), -1, dtype=torch.int32)
    bonus = torch.tensor([[91], [92], [93]], dtype=torch.int32)[: len(drafts)]
    synthetic.accept(
        output, counts.cumsum(0).int(), flat, flat + 50, bonus, torch.tensor(uniform), torch.tensor(rates), mine
    )
    return output.tolist()


def test_accepts_while_the_dice_are_below_the_rates_then_gives_one_more_token():
    rows = sample([0.1, 0.1, 0.9, 0.1], [0.5, 0.5, 0.5])
    assert rows == [[10, 11, 62, -1], [20, 92, -1, -1], [93, -1, -1, -1]]
    assert sample([0.9, 0.1, 0.1, 0.9], [0.5] * 3) == [[60, -1, -1, -1], [70, -1, -1, -1], [93, -1, -1, -1]]
    assert sample([0.1] * 4, [0.5] * 3)[0] == [10, 11, 12, 91]


def test_padding_is_never_accepted_and_other_rows_are_left_alone():
    assert sample([0.1] * 4, [0.5] * 3, drafts=((10, -1, 12), (20,), ()))[0][:2] == [10, 49]
    mine = torch.tensor([False, True, True])
    assert sample([0.1] * 4, [0.5] * 3, mine)[0] == [-1] * 4


def test_rates_are_those_asked_for():
    torch.manual_seed(0)
    n = 20_000
    output = torch.full((n, 4), -1, dtype=torch.int32)
    drafts = torch.arange(3 * n, dtype=torch.int32)
    cu = torch.arange(3, 3 * n + 1, 3, dtype=torch.int32)
    rates = torch.tensor([0.6, 0.5, 0.25])
    synthetic.accept(output, cu, drafts, drafts, drafts[:n, None], torch.rand(3 * n, dtype=torch.float64), rates, None)
    accepted = (output >= 0).sum(1) - 1
    survival = [(accepted >= j).float().mean().item() for j in (1, 2, 3)]
    assert survival == pytest.approx([0.6, 0.3, 0.075], abs=0.015)
