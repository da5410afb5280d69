from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from toy import HIDDEN, VOCABULARY, features, head, shared

from rollout_spec.draft.acceptance import acceptance_chances, predict
from rollout_spec.draft.features import Features
from rollout_spec.draft.loss import Shared


def simulate(tables: list[np.ndarray], k: int, rng: random.Random) -> tuple[int, list[int]]:
    """Walks along the responses, tossing a coin for each draft; verifications and how many accepted j or more."""
    verifications, accepted = 0, [0] * k
    for table in tables:
        at = 0
        while at < len(table):
            n = 0
            while n < k and rng.random() < table[at, n]:
                n += 1
            verifications += 1
            for j in range(n):
                accepted[j] += 1
            at += n + 1
    return verifications, accepted


@pytest.mark.parametrize("k", [1, 3])
def test_prediction_is_what_a_walk_along_the_responses_accepts_on_average(k: int) -> None:
    maker = np.random.default_rng(0)
    tables = []
    for length in (1, 2, 7, 30):
        table = maker.random((length, 4)) ** 0.5
        for j in range(4):
            table[max(length - j, 0) :, j] = 0  # beyond the end
        tables.append(table)
    predicted = predict(tables, k)
    rng = random.Random(1)
    total, accepted = 0, np.zeros(k)
    for _ in range(4000):
        verifications, found = simulate(tables, k, rng)
        total += verifications
        accepted += found
    assert predicted.verifications == pytest.approx(total / 4000, rel=0.01)
    assert predicted.survival == pytest.approx((accepted / total).tolist(), rel=0.02)


def test_all_accepted_gives_k_and_the_bonus() -> None:
    table = np.ones((400, 3))
    for j in range(3):
        table[400 - j :, j] = 0
    assert predict([table], 3).acceptance_length == pytest.approx(4.0, rel=0.01)
    assert predict([np.zeros((50, 3))], 3).acceptance_length == 1.0


def test_nothing_recorded_predicts_nothing() -> None:
    assert predict([], 3).acceptance_length == 1.0


def test_chances_are_those_of_drafting_step_by_step() -> None:
    """Each chance again, from a head that sees one prefix at a time, as an engine's does."""
    made, common = head(), shared()
    output = torch.zeros(VOCABULARY, HIDDEN)
    output[common.ids] = common.rows
    output[common.draft_of < 0] = torch.randn(int((common.draft_of < 0).sum()), HIDDEN) * 0.1
    for temperature in (0.0, 1.0, 0.7):
        sample = features(output, 14, start=5, temperature=temperature)
        [table] = acceptance_chances(made, common, [sample], 3, 1000)
        assert table.shape == (14 - 6, 3)
        for t, j in ((0, 0), (2, 1), (4, 2), (7, 0)):
            expected = by_hand(made, common, sample, sample.start + 1 + t, j)
            assert table[t, j] == pytest.approx(expected, abs=1e-5), (temperature, t, j)
        assert table[-1, 1] == table[-1, 2] == table[-2, 2] == 0


@torch.no_grad()
def by_hand(made, common: Shared, sample: Features, token: int, j: int) -> float:
    """P(accept) of the draft of position token + j, the verification starting at `token`."""
    sees = token - 2  # the last position whose features the engine has, and whose successor it knows
    state = made.fc(sample.aux[None, : sees + 1])
    cache: list = []
    for step in range(j + 1):
        follows = sample.tokens[None, 1 + step : sees + 2 + step]
        state = made.step(common.embedding[follows], state, step, cache)
    logits = made.logits(state[0, sees])
    truth = sample.tokens[token + j]
    draft = int(common.draft_of[truth])
    if draft < 0:
        return 0.0
    if sample.temperature == 0:
        return float(logits.argmax() == draft)
    q = (logits / sample.temperature).softmax(-1)[draft]
    p = (sample.last[token + j - 1] @ common.rows[draft] / sample.temperature - sample.log_norm[token + j - 1]).exp()
    return min(1.0, float(q / p))


def test_batching_changes_no_chance() -> None:
    made, common = head(), shared()
    samples = [features(torch.randn(VOCABULARY, HIDDEN), length, 3, seed=length) for length in (5, 9, 20, 4, 12)]
    together = acceptance_chances(made, common, samples, 3, 10_000)
    alone = acceptance_chances(made, common, samples, 3, 1)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
