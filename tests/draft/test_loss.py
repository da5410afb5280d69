from __future__ import annotations

import pytest
import torch
from toy import DRAFT, HIDDEN, VOCABULARY, features, head, shared

from rollout_spec.config import DraftConfig
from rollout_spec.draft.features import collate
from rollout_spec.draft.loss import shifted, unrolled_loss
from rollout_spec.draft.train import Progress, Trainer, rate


def toy_batch(count: int = 6):
    common = shared()
    output = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(3))
    output[common.ids] = common.rows
    samples = [features(output, 10 + index, 4, seed=index) for index in range(count)]
    return common, samples


def test_shifted_moves_left_and_fills() -> None:
    x = torch.tensor([[1, 2, 3]])
    assert shifted(x, 1).tolist() == [[2, 3, 0]]
    assert shifted(x, 3, fill=-1).tolist() == [[-1, -1, -1]]
    assert shifted(x, 5).tolist() == [[0, 0, 0]]


def test_the_law_is_the_targets_on_the_draft_vocabulary() -> None:
    common, samples = toy_batch(1)
    law = common.law(collate(samples))
    [sample] = samples
    full = (sample.last @ torch.zeros(VOCABULARY, HIDDEN).index_copy(0, common.ids, common.rows).T)[:, common.ids]
    expected = (full - sample.log_norm[:, None]).exp()[4:9]
    torch.testing.assert_close(law, expected)
    assert (law.sum(-1) <= 1 + 1e-5).all()


def test_first_steps_loss_is_the_cross_entropy_one_token_further_on() -> None:
    common, samples = toy_batch(1)
    made = head()
    [sample] = samples
    loss, _ = unrolled_loss(made, common, collate(samples), steps=1, decay=1.0, overlap=0.0)
    state = made.step(common.embedding[shifted(sample.tokens[None], 1)], made.fc(sample.aux[None]), 0, [])
    log_q = made.logits(state[0]).log_softmax(-1)
    law = common.law(collate(samples))
    # Laws of positions 4 to 8; the state at position i predicts the token after next.
    expected = -(law * log_q[3:8]).sum(-1).mean()
    torch.testing.assert_close(loss, expected)


def test_padding_changes_no_loss() -> None:
    common, samples = toy_batch(2)
    made = head()
    padded = collate([samples[0], features(torch.randn(VOCABULARY, HIDDEN), 40, 39)])  # the other counts for nothing
    alone, _ = unrolled_loss(made, common, collate(samples[:1]), 3, 0.8, 0.5)
    together, _ = unrolled_loss(made, common, padded, 3, 0.8, 0.5)
    torch.testing.assert_close(alone, together)


def test_training_learns_a_toy_by_heart_and_goes_on_from_a_kept_state() -> None:
    common, samples = toy_batch()
    options = DraftConfig(batch_tokens=64, max_passes=30, unroll=2, rate=1e-2, matrix_rate=1e-2)
    made = head()
    losses: list[float] = []
    trainer = Trainer(made, common, samples, options, seconds=1000)
    trainer.run(lambda progress, loss, stats: losses.append(loss), lambda state, progress: None)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert trainer.progress.passes == pytest.approx(30, abs=1)

    again = Trainer(head(seed=9), common, samples, options, seconds=1000)
    again.restore(trainer.state(), Progress(steps=trainer.progress.steps))
    for name, tensor in again.state().items():
        torch.testing.assert_close(tensor, trainer.state()[name], msg=name)
    assert set(again.state()) == set(trainer.state())


def test_the_rate_warms_up_and_is_nearly_nothing_at_the_end() -> None:
    assert rate(0, 0.0) < 0.1
    assert rate(100, 0.0) == 1.0
    assert rate(100, 1.0) == pytest.approx(0.02)


def test_the_head_starts_over_the_draft_vocabulary() -> None:
    assert head().lm_head.weight.shape == (DRAFT, HIDDEN)
