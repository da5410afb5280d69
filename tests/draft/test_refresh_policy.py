from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rollout_spec.config import ConfigError, RefreshConfig, parse_config
from rollout_spec.draft.refresh_policy import (
    ALIKE,
    MIN_DRAFTS,
    Drain,
    Every,
    Measured,
    Never,
    RefreshPolicy,
    RefreshView,
    RolloutSeen,
    acceptance,
    depth_of,
    make_refresh_policy,
)


def seen(rates: tuple[float, ...], drafts: int = 4000, seconds: float = 10.0, share: float = 0.5) -> RolloutSeen:
    """Each position accepted as often as `rates`, given the one before; the deeper the fewer drafts."""
    drafted, accepted, survival = [], [], 1.0
    for position, rate in enumerate(rates):
        survival *= rate
        drafted.append(drafts // (position + 1))
        accepted.append(round(drafted[-1] * survival))
    return RolloutSeen(seconds, share * seconds, 1.0, tuple(drafted), tuple(accepted))


def view(*rollouts: RolloutSeen, cost: float = 5.0, tokens: int = 10**6, failures: int = 0) -> RefreshView:
    return RefreshView(rollouts, len(rollouts), tokens, cost, failures)


def falling(count: int, per_rollout: float = 0.02, drafts: int = 4000) -> list[RolloutSeen]:
    return [seen((0.8 - per_rollout * index, 0.7 - per_rollout * index), drafts) for index in range(count)]


def until_refresh(rollouts: list[RolloutSeen], **options: float) -> int | None:
    """Rollouts after which it refreshes; None: never."""
    for count in range(1, len(rollouts) + 1):
        if Measured(1).decide(view(*rollouts[:count], **options)).refresh:
            return count
    return None


def test_acceptance_and_its_error_are_those_of_walks_repeated() -> None:
    rates, trials = (0.7, 0.6, 0.5), 300
    rng, lengths, errors = random.Random(0), [], []
    for _ in range(trials):
        drafted, accepted = [0, 0, 0], [0, 0, 0]
        for _ in range(400):
            k = rng.choice((1, 2, 3))
            alive = True
            for position in range(k):
                drafted[position] += 1
                alive = alive and rng.random() < rates[position]
                accepted[position] += alive
        found = acceptance(RolloutSeen(1, 1, 0, tuple(drafted), tuple(accepted)), 3)
        lengths.append(found.length)
        errors.append(found.error / math.sqrt(ALIKE))
    mean = sum(lengths) / trials
    assert mean == pytest.approx(1 + 0.7 + 0.42 + 0.21, abs=0.02)
    spread = math.sqrt(sum((length - mean) ** 2 for length in lengths) / trials)
    assert sum(errors) / trials == pytest.approx(spread, rel=0.12)


def test_depth_is_what_every_rollout_has_tried() -> None:
    deep, shallow = seen((0.8, 0.7, 0.6)), seen((0.8,))
    assert depth_of([deep, deep]) == 3
    assert depth_of([deep, shallow]) == 1
    assert depth_of([deep, seen((0.8, 0.8), drafts=MIN_DRAFTS - 1)]) == 0
    assert depth_of([]) == 0


def test_other_k_are_no_loss() -> None:
    """The mean acceptance length of a rollout at K=1 is far below that of one at K=3, with the same head."""
    rollouts = [seen((0.8, 0.7, 0.6)), seen((0.8, 0.7, 0.6))] + [seen((0.8,))] * 20
    assert until_refresh(rollouts, cost=0.01) is None


def test_a_head_that_is_as_good_as_ever_is_left_alone() -> None:
    decision = Measured(1).decide(view(*[seen((0.8, 0.7))] * 30, cost=0.0))
    assert (decision.refresh, decision.code, decision.gain) == (False, "fresh", 0.0)


def test_noise_alone_hardly_ever_refreshes() -> None:
    rng, refreshed = random.Random(1), 0
    for _ in range(200):
        rollouts = []
        for _ in range(25):
            hits = sum(rng.random() < 0.7 for _ in range(300))
            rollouts.append(RolloutSeen(10, 10, 1, (300,), (hits,)))
        refreshed += until_refresh(rollouts, cost=0.5) is not None
    assert refreshed <= 4


def test_what_was_lost_pays_for_the_refresh() -> None:
    """Loss per rollout grows evenly: the cycle ends near sqrt(2 cost / slope), the cheapest one."""
    rollouts = falling(30, drafts=10**6)  # hardly any noise to wait for
    waited = [until_refresh(rollouts, cost=cost) for cost in (0.3, 1.0, 3.0, 9.0)]
    assert None not in waited
    assert waited == sorted(waited)
    slope = 10 * 0.5 * (0.02 + 0.02 * (0.8 + 0.7)) / (1 + 0.8 + 0.56)  # seconds a rollout, and rollout
    for cost, count in zip((1.0, 3.0, 9.0), waited[1:], strict=True):
        assert count == pytest.approx(math.sqrt(2 * cost / slope), rel=0.45)


def test_the_gain_is_in_seconds_of_rollout() -> None:
    fast = [RolloutSeen(r.seconds / 10, r.speculating_seconds / 10, 0.1, r.drafted, r.accepted) for r in falling(10)]
    slow, quick = (Measured(1).decide(view(*each)).gain for each in (falling(10), fast))
    assert slow == pytest.approx(10 * quick)
    assert slow > 0


def test_a_controller_that_gave_a_stale_head_up_is_still_a_loss() -> None:
    stale = [seen((0.8, 0.7), share=0.5)] * 2 + [seen((0.3, 0.2), drafts=150, share=0.0)] * 8
    assert until_refresh(stale, cost=3.0) is not None


def test_few_tokens_and_failures_make_it_wait() -> None:
    rollouts = falling(12)
    once = Measured(1000)
    assert once.decide(view(*rollouts, cost=1.0, tokens=1000)).refresh
    held = once.decide(view(*rollouts, cost=1.0, tokens=999))
    assert (held.refresh, held.code) == (False, "tokens")
    assert "999 of 1000 tokens" in held.reason
    gain = once.decide(view(*rollouts, cost=1.0)).gain
    assert not once.decide(view(*rollouts, cost=gain / 5, failures=3)).refresh
    assert once.decide(view(*rollouts, cost=gain / 5, failures=2)).refresh


def test_a_share_of_the_time_goes_to_refreshes_that_nothing_calls_for() -> None:
    policy, steady = Measured(1000, trial_share=0.1), view(*[seen((0.8, 0.7))] * 5, cost=5.0)
    assert policy.decide(replace(steady, elapsed=49.0)).code == "fresh"
    decision = policy.decide(replace(steady, elapsed=50.0))
    assert (decision.refresh, decision.code) == (True, "trial")
    assert "at most 10% of 50 s" in decision.reason
    assert policy.decide(replace(steady, elapsed=50.0, tokens=999)).code == "tokens"
    assert not policy.decide(replace(steady, elapsed=199.0, failures=2)).refresh
    assert policy.decide(replace(steady, elapsed=200.0, failures=2)).refresh
    assert not Measured(1).decide(replace(steady, elapsed=1e9)).refresh


def test_without_drafts_it_says_that_nothing_was_measured() -> None:
    idle = RolloutSeen(10, 0, 1, (0, 0), (0, 0))
    for rollouts in ((), (idle,) * 5, (seen((0.8,)),)):
        decision = Measured(1).decide(view(*rollouts))
        assert (decision.refresh, decision.code) == (False, "unmeasured")
        assert math.isnan(decision.acceptance)


def test_every_counts_updates() -> None:
    policy = Every(3)
    assert [policy.decide(RefreshView((), n, 0, 1.0)).refresh for n in range(5)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("live", "tokens", "code"),
    [(0, 100, "no_tail"), (1, 100, "tail"), (4, 100, "tail"), (5, 100, "no_tail"), (2, 9, "tokens")],
)
def test_drain_waits_for_the_tail(live: int, tokens: int, code: str) -> None:
    decision = Drain(0.25, 10).decide(RefreshView((), 0, tokens, 1.0, live=live, room=16))
    assert (decision.code, decision.refresh) == (code, code == "tail")


def test_names_make_policies() -> None:
    assert isinstance(make_refresh_policy(RefreshConfig()), Measured)
    assert make_refresh_policy(RefreshConfig(policy="every", every=7)) == Every(7)
    assert make_refresh_policy(RefreshConfig(policy="drain", drain_share=0.5, min_tokens=9)) == Drain(0.5, 9)
    assert not make_refresh_policy(RefreshConfig(policy="never")).decide(view(*falling(30), cost=0.0)).refresh
    assert isinstance(make_refresh_policy(RefreshConfig(policy="never")), Never)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "often"}, "'measured', 'every', 'drain' or 'never'"),
        ({"seconds": 600}, "timeout 600 must be above seconds 600"),
        ({"min_tokens": 10, "buffer_tokens": 9}, "no refresh would begin"),
    ],
)
def test_options_are_checked(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config({"refresh": options})


def paid(policy: RefreshPolicy, drift: Callable[[int], float], cost: float, rollouts: int = 240) -> float:
    """Seconds lost to stale heads and to refreshes. `drift`: the share of its rate that a draft of a head so many
    updates old has lost."""
    rng, lost, age = random.Random(4), 0.0, 0
    history: list[RolloutSeen] = []
    for _ in range(rollouts):
        rates = (0.75 * (1 - drift(age)), 0.65 * (1 - drift(age)))
        drafts, survival, accepted = 1500, 1.0, []
        for rate in rates:
            survival *= rate
            accepted.append(sum(rng.random() < survival for _ in range(drafts)))
        history.append(RolloutSeen(20, 12, 5, (drafts,) * 2, tuple(accepted)))
        best = 1 + 0.75 + 0.75 * 0.65
        lost += 12 * (1 - (1 + rates[0] + rates[0] * rates[1]) / best)
        age += 1
        if policy.decide(RefreshView(tuple(history), age, 10**6, cost)).refresh:
            lost, age, history = lost + cost, 0, []
    return lost


@pytest.mark.parametrize("cost", [2.0, 8.0])
@pytest.mark.parametrize("per_update", [0.0, 0.004, 0.03], ids=["none", "slow", "fast"])
def test_it_costs_hardly_more_than_the_best_interval_in_hindsight(per_update: float, cost: float) -> None:
    def drift(age: int) -> float:
        return min(per_update * age, 0.6)

    best = min(paid(policy, drift, cost) for policy in (Never(), *(Every(n) for n in (1, 2, 3, 5, 8, 12, 20, 30, 50))))
    assert paid(Measured(1), drift, cost) <= 1.35 * best


def test_a_blow_is_noticed_by_the_first_rollout_that_takes_it() -> None:
    """Whoever refreshes just before each blow pays less, but has to know when they come."""

    def blow(age: int) -> float:
        return 0.5 * (age > 12)

    once = paid(Never(), blow, 2.0, rollouts=14)
    blows = 240 // 14
    assert paid(Measured(1), blow, 2.0) == pytest.approx(blows * (once + 2.0), rel=0.05)
