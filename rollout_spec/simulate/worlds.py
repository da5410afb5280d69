"""Random worlds to hold a policy against the oracle: machines, models, drafters, requests, drifts, wrong profiles.

Every range below is wide on purpose and none was chosen by looking at a policy's result. Times are relative to
reading the weights once, so the unit (`weights`) hardly matters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollout_spec.control.step_times import StepTimes
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.simulate.fleet import Fleet
from rollout_spec.simulate.step_model import Analytic, tabulate

PRIORS = ("none", "biased", "biased", "wrong")
GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class World:
    name: str
    fleet: Fleet
    prior: StepTimes | None
    """What the controller is told; None: nothing."""
    prior_kind: str
    ridge: float
    """Tokens at which computing takes as long as reading the dense weights: what a user's threshold starts from."""
    moe: bool


def random_model(rng: np.random.Generator, moe: bool) -> tuple[Analytic, float]:
    """A machine with a model and a drafter, and its ridge point in tokens."""
    read = _log_uniform(rng, 4e-3, 40e-3)
    ridge = _log_uniform(rng, 48, 640)
    experts = int(rng.choice([16, 64, 128, 256])) if moe else 1
    each = int(rng.choice([2, 4, 8])) if moe else 1
    expert_share = rng.uniform(0.7, 0.95) if moe else 0.0
    model = Analytic(
        fixed=read * rng.uniform(0.05, 0.4),
        weights=read * (1 - expert_share),
        token=read / ridge,
        kv_token=read * rng.uniform(0.02, 0.8) / (64 * 2000),
        expert_weights=read * expert_share,
        experts=experts,
        experts_a_token=min(each, experts),
        draft_pass=read * _log_uniform(rng, 0.005, 0.12),
        draft_token=read / ridge * rng.uniform(0.01, 0.1),
        verify_fixed=read * rng.uniform(0.0, 0.06),
        sample_token=read * rng.uniform(0.0, 3e-4),
        tile=int(rng.choice([1, 8, 32])),
        sharpness=float(rng.choice([2.0, 4.0, 8.0])),
    )
    return model, ridge


def random_world(index: int, seed: int = 0) -> World:
    rng = np.random.default_rng([seed, index])
    moe = index % 5 < 2
    model, ridge = random_model(rng, moe)
    k_max = int(rng.choice([4, 6, 8]))
    rounds = 3
    batch = round(_log_uniform(rng, 8, 256))
    sequences = round(batch * rng.uniform(1.0, 2.5))
    median, sigma = _log_uniform(rng, 150, 1000), rng.uniform(0.5, 1.1)
    lengths = tuple(
        np.clip(np.exp(np.log(median) + sigma * rng.standard_normal(sequences)), 8, 8 * median).astype(np.int64)
        for _ in range(rounds)
    )
    by_round = np.exp(np.concatenate([[0.0], rng.uniform(0.0, 0.25, rounds - 1).cumsum()]))
    refresh = int(rng.choice([0, 1, 2]))
    if refresh:
        by_round = np.array([by_round[number % refresh] for number in range(rounds)])
    walk = np.exp((rng.uniform(0.0, 0.08) * rng.standard_normal(64)).cumsum())
    if rng.random() < 0.2:  # the drafter meets text that it does not know, or comes back from it
        walk[int(rng.integers(2, 20)) :] *= rng.choice([0.4, 4.0])
    acceptance = AcceptanceCurve.geometric(
        rng.uniform(0.2, 0.9),
        k_max,
        rng.uniform(0.85, 1.0),
        request_sigma=rng.uniform(0.0, 0.5),
        by_round=tuple(by_round.tolist()),
        by_step=tuple(walk.tolist()),
        step_block=64,
    )
    throttle = rng.uniform(-0.1, 0.1, rounds)
    fleet = Fleet(
        model=model,
        acceptance=acceptance,
        lengths=lengths,
        max_num_seqs=batch,
        prompt_tokens=int(rng.integers(50, 1000)),
        noise=rng.uniform(0.01, 0.08),
        hiccup_every=int(rng.choice([0, 200, 500])),
        speed_bias=lambda number, step: 1.0 + float(throttle[number]),
        refresh_every=refresh,
    )
    kind = PRIORS[int(rng.integers(len(PRIORS)))]
    prior = None
    if kind != "none":
        profiled = model if kind == "biased" else random_model(rng, bool(rng.random() < 0.4))[0]
        prior = tabulate(profiled, list(GRID), k_max, [0, 1000, 4000], spread=0.15)
        prior = _disturbed(prior, rng.uniform(0.7, 1.3), rng)
    return World(f"world-{index:03d}", fleet, prior, kind, ridge, moe)


def hopeless_world(index: int, seed: int = 0) -> World:
    """Nothing helps: computing costs from the first token on, and few drafts are accepted."""
    world = random_world(index, seed)
    rng = np.random.default_rng([seed, index, 1])
    assert isinstance(world.fleet.model, Analytic)
    model = replace(world.fleet.model, token=world.fleet.model.weights * rng.uniform(0.5, 1.0), sharpness=1.0, tile=1)
    curve = AcceptanceCurve.geometric(rng.uniform(0.02, 0.2), world.fleet.k_max)
    return replace(world, fleet=replace(world.fleet, model=model, acceptance=curve))


def mixed_world(index: int, seed: int = 0) -> World:
    """Some requests accept nearly everything and others nothing; in half of the worlds all run into the same cap."""
    world = random_world(index, seed)
    rng = np.random.default_rng([seed, index, 2])
    curve = AcceptanceCurve.geometric(rng.uniform(0.6, 0.95), world.fleet.k_max, hopeless_share=rng.uniform(0.2, 0.8))
    lengths = world.fleet.lengths
    if index % 2:
        lengths = tuple(np.full(world.fleet.max_num_seqs, round(_log_uniform(rng, 150, 1000))) for _ in lengths)
    # An engine knows the caps of its requests.
    fleet = replace(world.fleet, acceptance=curve, lengths=lengths, lengths_known=bool(index % 2))
    return replace(world, fleet=fleet)


def collapsing_world(index: int, step: int, seed: int = 0) -> World:
    """Acceptance falls to nothing at the block of 64 steps that holds `step`."""
    world = random_world(index, seed)
    walk = [1.0] * (step // 64) + [400.0]
    curve = replace(world.fleet.acceptance, by_step=tuple(walk), by_round=(1.0,))
    return replace(world, fleet=replace(world.fleet, acceptance=curve, lengths=world.fleet.lengths[:1]))


def _disturbed(times: StepTimes, bias: float, rng: np.random.Generator) -> StepTimes:
    """As measured once on another day: all times off by `bias`, each by a little more."""
    seconds = tuple(
        tuple(tuple(t * bias * float(np.exp(0.03 * rng.standard_normal())) for t in row) for row in plane)
        for plane in times.seconds
    )
    return replace(times, seconds=seconds)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))
