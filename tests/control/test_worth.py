"""What a token of each request is worth, and what follows for K."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rollout_spec.control.goodput import Goodput
from rollout_spec.control.requests import RequestRates
from rollout_spec.control.worth import acceptance_lengths, token_worth
from rollout_spec.simulate.contenders import make
from rollout_spec.simulate.fleet import simulate
from rollout_spec.simulate.worlds import mixed_world

STEP = np.array([0.0, 10.0, 11.0, 12.0, 13.0])  # seconds of a step of 0 .. 4 sequences


def makespan(remaining: list[float], speed: list[float]) -> float:
    """Seconds until all are done, each going at its speed all the time."""
    steps = sorted((tokens / rate for tokens, rate in zip(remaining, speed, strict=True)), reverse=True)
    return sum(
        (own - after) * STEP[left] for left, (own, after) in enumerate(zip(steps, [*steps[1:], 0.0], strict=True), 1)
    )


def test_worth_is_the_derivative_of_the_makespan() -> None:
    remaining, speed = [40.0, 100.0, 60.0, 350.0], [1.0, 2.0, 1.0, 1.0]
    worth = token_worth(STEP, np.array(speed), remaining, 0.0)
    less = []
    for i in range(4):
        sooner = [tokens - (i == at) for at, tokens in enumerate(remaining)]
        less.append((makespan(remaining, speed) - makespan(sooner, speed)) * speed[i])
    # The order is not quite sure even of known lengths: some of the worth is shared out evenly.
    assert worth == pytest.approx(less, abs=0.6)
    assert worth.sum() == pytest.approx(STEP[-1])
    assert np.argmax(worth) == 3


def test_nothing_known_makes_all_worth_the_same() -> None:
    alike = token_worth(STEP, np.full(4, 2.0), [], 0.4)
    assert alike == pytest.approx(np.full(4, STEP[-1] / 4))
    # Slow requests are likely the last, the more so the less lengths matter.
    speed = np.array([1.0, 4.0, 4.0, 4.0])
    doubtful, sure = token_worth(STEP, speed, [], 0.8), token_worth(STEP, speed, [100.0] * 4, 0.0)
    assert alike[0] < doubtful[0] < sure[0] <= 10.0


def test_a_requests_curve_is_that_of_all_to_a_power() -> None:
    survival = [0.5, 0.3, 0.2]
    lengths = acceptance_lengths(survival, 0.5, np.array([0.5, 0.25, 0.5**0.5]))
    assert lengths[0] == pytest.approx([1.0, 1.5, 1.8, 2.0])
    assert lengths[1] == pytest.approx([1.0, 1.25, 1.34, 1.38])
    assert lengths[2, 1] == pytest.approx(1.0 + math.sqrt(0.5))


def test_rates_are_held_to_the_common_one_only_where_they_are_alike() -> None:
    alike, apart = RequestRates(), RequestRates()
    rng = np.random.default_rng(0)
    for _ in range(12):
        alike.observe({f"r{i}": (1, int(rng.random() < 0.5)) for i in range(16)})
        apart.observe({f"r{i}": (1, int(i % 2)) for i in range(16)})
    names = [f"r{i}" for i in range(16)]
    assert np.ptp(alike.rates(names, 0.5)) < 0.3
    rates = apart.rates(names, 0.5)
    assert rates[::2].max() < 0.15
    assert rates[1::2].min() > 0.85


@pytest.mark.parametrize("index", [1, 3, 7])
def test_a_rollout_that_ends_with_hopeless_requests_is_not_slowed(index: int) -> None:
    """Responses of one length, some with all drafts accepted and others with none: most tokens a second ends later."""
    world = mixed_world(index)
    fleet = replace(world.fleet, noise=0.0, hiccup_every=0, lengths=world.fleet.lengths[:1])
    off = simulate(fleet, make("off", fleet, None), 0).seconds
    ours = simulate(fleet, lambda: Goodput(fleet.k_max, world.prior), 0).seconds
    assert ours < 1.02 * off
