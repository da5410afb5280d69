"""Medians of a sweep, which batches to measure, the knee, and how best K runs."""

import numpy as np
import pytest

from rollout_spec.control.sweep import STEADY, Sweep, spread_out
from rollout_spec.profile import grid, shape
from rollout_spec.profile.cell import Cell, TimedStep, cells, worst_error
from rollout_spec.profile.knee import knee
from rollout_spec.profile.record import SPREAD, SPREAD_MOST, spread


def sweep_samples(ks, seconds, rounds=3, batch=4, fill=1.0):
    """What an engine would give that takes `seconds(verified, drafted)`, tokens a sequence each."""
    policy, before, k, samples = Sweep(ks), 0, 0, []
    for step in range(rounds * policy.round_steps):
        k_next, number = policy.decide(None).k, step // policy.round_steps
        tokens = round(batch * k * fill)
        samples.append(TimedStep(seconds(k * fill, k_next), k, k_next, tokens, 100.0, 0.008, before, number))
        before, k = k, k_next
    return samples


def test_a_round_visits_every_k_steadily_and_shows_its_parts():
    policy = Sweep([1, 3])
    ks = [policy.decide(None).k for _ in range(policy.round_steps)]
    pairs = list(zip([0, *ks], ks, strict=False))
    assert pairs.count((0, 0)) >= STEADY
    for k in (1, 3):
        assert pairs.count((k, k)) == STEADY
        assert (0, k) in pairs
        assert (k, 0) in pairs
    assert (0, 0) in pairs


def test_k_spread_out_reach_the_largest():
    assert spread_out(1) == [1]
    assert spread_out(8) == [1, 2, 3, 5, 8]
    assert spread_out(12)[-1] == 12


def test_cells_split_a_step_into_its_parts():
    found = {c.k: c for c in cells(4, sweep_samples([1, 3], lambda v, d: 0.01 + 0.002 * v + 0.001 * d))}
    assert found[0].seconds == pytest.approx(0.010)
    assert found[3].seconds == pytest.approx(0.019)
    assert found[3].draft_seconds == pytest.approx(0.003)
    assert found[3].verify_seconds == pytest.approx(0.006)
    assert found[3].host_seconds == pytest.approx(0.011)


def test_missing_drafts_are_scaled_up_and_too_few_give_no_cell():
    found = {c.k: c for c in cells(4, sweep_samples([4], lambda v, d: 0.01 + 0.002 * v, fill=0.75))}
    assert found[4].seconds == pytest.approx(0.018)
    assert found[4].filled == pytest.approx(0.75)
    assert [c.k for c in cells(4, sweep_samples([4], lambda v, d: 0.01, fill=0.25))] == [0]


def test_a_step_right_after_a_verification_does_not_count_for_k_0():
    samples = sweep_samples([3], lambda v, d: 0.01 + 0.002 * v)
    slow = [s._replace(seconds=s.seconds + 0.005) if s.k == 0 and s.k_before else s for s in samples]
    assert any(s.seconds == pytest.approx(0.015) for s in slow)
    assert next(c for c in cells(4, slow) if c.k == 0).seconds == pytest.approx(0.01)


def test_one_hiccup_neither_moves_a_cell_nor_hides_its_spread():
    samples = sweep_samples([2], lambda v, d: 0.01, rounds=4)
    samples[5] = samples[5]._replace(seconds=1.0)
    made = cells(4, samples)
    assert all(cell.seconds == pytest.approx(0.01) for cell in made)
    assert max(cell.mean_seconds for cell in made) > 0.03
    scatter = np.random.default_rng(0).uniform(0.8, 1.2, len(samples))
    noisy = [s._replace(seconds=s.seconds * factor) for s, factor in zip(samples, scatter, strict=True)]
    assert worst_error(cells(4, noisy)) > 0.02
    assert worst_error(cells(4, samples[: len(samples) // 4])) == 1.0
    assert worst_error([]) > 1.0


def test_a_slow_minute_shows_in_the_error_and_in_the_spread_that_the_controller_is_told():
    steady = sweep_samples([2], lambda v, d: 0.01, rounds=4)
    assert worst_error(cells(4, steady)) == 0.0
    slow = [s._replace(seconds=s.seconds * (1.4 if s.round == 3 else 1.0)) for s in steady]
    # Each round by itself is as steady as before; of their medians 10, 10, 10 and 14 ms the mean is off by 9 %.
    assert [c.error for c in cells(4, slow)] == pytest.approx([1.0 / 11.0] * 2)
    assert spread(cells(4, steady)) == SPREAD
    assert spread(cells(4, slow)) == pytest.approx((SPREAD**2 + 1.0 / 121.0) ** 0.5)
    assert spread(cells(4, steady[: len(steady) // 4])) == SPREAD_MOST  # of one round nobody knows


def cell(batch, k, seconds):
    return Cell(batch, k, 100.0, seconds, 0.0, 9)


def measure_all(seconds, most=64, bend=0.05):
    sizes = grid.candidates(most)
    measured = {}
    todo = grid.first(sizes)
    while (size := todo.pop(0) if todo else grid.next_size(sizes, measured, bend)) is not None:
        measured[size] = [cell(size, k, seconds(size, k)) for k in (0, 3)]
    return sorted(measured)


def test_few_batches_are_measured_where_the_curve_is_straight_more_where_it_bends():
    assert grid.candidates(48) == [1, 2, 4, 8, 16, 32, 48]
    assert measure_all(lambda b, k: 0.01 + 0.001 * b) == [1, 8, 64]
    bent = measure_all(lambda b, k: 0.01 + 0.001 * max(0, b * (k + 1) - 16))
    assert {1, 4, 8, 64} <= set(bent)


def test_knee_is_where_time_begins_to_grow():
    found = knee([cell(b, k, 0.02 + 1e-4 * max(0, b * (k + 1) - 64)) for b in (1, 4, 16, 64) for k in (0, 1, 3, 7)])
    assert found.tokens == pytest.approx(64, rel=0.15)
    assert found.flat == pytest.approx(0.02, rel=0.02)
    assert knee([cell(1, 0, 0.1)]) is None


@pytest.mark.parametrize(
    ("best", "words"),
    [
        ([5, 3, 1, 0], "falls with the batch"),
        ([3, 3, 3], "the same at every batch"),
        ([0, 0], "no K pays at any batch"),
        ([0, 2, 4, 1], "low, high, low over the batch"),
        ([0, 1, 3], "rises with the batch"),
        ([4, 0, 4, 0], "goes up and down with the batch"),
        ([3, 3, 2, 3, 1], "falls with the batch"),
    ],
)
def test_shape_of_best_k_in_words(best, words):
    assert shape.describe(best) == words
