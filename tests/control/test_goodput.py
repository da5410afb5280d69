"""The controller on simulated engines: near the oracle, never harmful, quick to notice, cheap to ask."""

import ast
from pathlib import Path

import numpy as np
import pytest

import rollout_spec.control
from rollout_spec.control.acceptance import Acceptance
from rollout_spec.control.budget import Budget
from rollout_spec.control.cost import StepTime
from rollout_spec.control.fixed import Fixed
from rollout_spec.control.goodput import Goodput
from rollout_spec.control.policy import StepResult, StepView
from rollout_spec.control.step_times import StepTimes
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.simulate.fleet import Fleet, Oracle, simulate
from rollout_spec.simulate.step_model import Analytic, steady
from rollout_spec.simulate.worlds import collapsing_world, hopeless_world, random_world

CONTROL = Path(rollout_spec.control.__file__).parent


@pytest.mark.parametrize("index", range(6))
def test_total_time_is_near_the_oracles(index):
    world = random_world(index)
    best = simulate(world.fleet, Oracle(), 1).seconds
    assert simulate(world.fleet, lambda: ours(world), 1).seconds < 1.05 * best


@pytest.mark.parametrize("index", range(6))
def test_costs_at_most_one_per_cent_where_no_draft_helps(index):
    world = hopeless_world(index)
    off = simulate(world.fleet, lambda: Fixed(0), 1).seconds
    assert simulate(world.fleet, lambda: ours(world), 1).seconds < 1.01 * off


@pytest.mark.parametrize("index", range(4))
def test_stops_within_50_steps_when_acceptance_collapses(index):
    world = collapsing_world(index, step=192)
    chosen = []

    class Watched(Goodput):
        def decide(self, view):
            decision = super().decide(view)
            chosen.append(decision.k)
            return decision

    simulate(world.fleet, lambda: Watched(world.fleet.k_max, world.prior), 1)
    assert max(chosen[150:192]) > 0
    assert 0 in chosen[192:242]
    assert np.mean([k > 0 for k in chosen[242:]]) < 0.1


def test_a_choice_stands_in_a_full_batch_and_a_jump_of_acceptance_ends_it():
    """A choice costs hundreds of times what keeping the last one does."""
    choices = []

    class Watched(Goodput):
        def _choose(self, view):
            choices.append(True)
            return super()._choose(view)

    policy = Watched(4)
    feed(policy, steps=600, seconds=steady_seconds, rate=0.8, decode=256)
    choices.clear()
    assert set(feed(policy, steps=320, seconds=steady_seconds, rate=0.8, decode=256)) == {4}
    assert len(choices) <= 320 / 64 + 1
    assert 0 in feed(policy, steps=50, seconds=steady_seconds, rate=0.0, decode=256)


def test_finds_a_best_k_that_is_low_high_low_in_batch():
    model = Analytic(
        fixed=2e-3, weights=2e-3, token=2e-5, expert_weights=30e-3, experts=64, experts_a_token=2, draft_pass=2e-4
    )
    curve = AcceptanceCurve.geometric(0.6, 6)
    batches = np.array([1.0, 24.0, 512.0])
    gain = curve.mean_length(np.ones(1), np.ones(1)) / steady(model, batches, batches * 0, 6)
    best = gain.argmax(axis=1)
    assert best[0] < best[1] > best[2]
    for batch, row in zip(batches.astype(int).tolist(), gain, strict=True):
        # A batch that stays as it is: all responses of one length.
        fleet = Fleet(model, curve, (np.full(batch, 1500),), batch, noise=0.02)
        steps = sum(simulate(fleet, lambda: Goodput(6), seed).steps.sum(axis=0) for seed in range(3))
        mean_gain = float((steps / steps.sum() * row).sum() / row.max())
        assert mean_gain > 0.96, batch


def test_hiccup_in_the_reference_does_not_keep_speculation_on():
    policy = Goodput(4)
    feed(policy, steps=400, seconds=lambda k, t: (0.01 + 0.009 * k) * (6.0 if t % 97 == 3 else 1.0), rate=0.3)
    assert policy.metrics()["effective_speedup"] > 0.95
    assert feed(policy, steps=40, seconds=lambda k, t: 0.01 + 0.009 * k, rate=0.3).count(0) > 30


def test_a_profile_that_is_wrong_about_k_0_is_found_out():
    """It was right at the full batch, where K=0 is best, so that nothing is in doubt when the batch has drained."""

    def seconds(k, t, at_0=0.010):
        full = 0.05 if k == 0 else 0.2
        return full if t < 20 else at_0 if k == 0 else 0.014 + 0.003 * k

    def expected(batch, k):
        return seconds(k, 0) if batch == 64 else seconds(k, 20, at_0=0.016)

    policy = Goodput(4, profile(expected, acceptance=(0.5, 0.25, 0.125, 0.06), spread=0.03))
    views = [StepView(decode=64)] * 20 + [StepView(decode=16)] * 80
    chosen = feed(policy, len(views), seconds, rate=0.5, views=views)
    assert max(chosen[20:40]) > 0
    assert np.mean(np.array(chosen[60:]) > 0) < 0.1


def test_effective_speedup_is_that_of_the_engine():
    policy = Goodput(4)
    feed(policy, steps=1500, seconds=steady_seconds, rate=0.7)
    speedup = policy.metrics()["effective_speedup"]
    assert speedup == pytest.approx((1 + 0.7 + 0.49 + 0.343 + 0.24) / 1.4, rel=0.08)


def test_new_versions_widen_the_uncertainty_refreshes_more():
    sd = {}
    for event in ("nothing", "policy_updated", "draft_refreshed"):
        policy = Goodput(4)
        feed(policy, steps=300, seconds=steady_seconds, rate=0.7)
        getattr(policy, event, lambda: None)()
        sd[event] = policy.acceptance.length()[1][2]
    assert sd["nothing"] < sd["policy_updated"] < sd["draft_refreshed"]


@pytest.mark.parametrize("kind", [Goodput, Budget])
def test_validation_does_not_change_what_is_known_of_training(kind):
    """At temperature 0 everything is accepted, above it hardly anything; each is chosen by what is known of it."""
    policy = kind(4)

    def generate(greedy, rate, steps):
        views = [StepView(decode=4, greedy=greedy)] * steps
        return feed(policy, steps, lambda k, t: 0.01 * (1 + 0.15 * k), rate, views)

    generate(False, 0.02, 300)
    length = policy.acceptance.length()[0][4]
    assert length < 1.1
    assert np.mean(generate(True, 0.95, 100)[20:]) > 2
    assert policy.acceptance.length()[0][4] > 3
    chosen = generate(False, 0.02, 40)
    assert np.mean([k > 0 for k in chosen[2:]]) < 0.2
    assert policy.acceptance.length()[0][4] == pytest.approx(length, abs=0.1)


def test_profile_of_another_machine_is_put_aside_one_of_a_slower_day_is_not():
    times = {}
    for factor in (1.5, 30.0):
        cost = StepTime(4, profile(lambda b, k: 0.01 * (1 + 0.02 * k)))
        for _ in range(3):
            cost.observe(StepResult(0.01 * factor, 32, 0, 0, 0, [0] * 4, [0] * 4, 0), 0)
        times[factor] = np.array(cost.seconds(32, [0, 1, 2, 3, 4]))
        assert times[factor][0] == pytest.approx(0.01 * factor, rel=0.05)
    assert times[1.5][4] / times[1.5][0] == pytest.approx(1.08, abs=0.05)
    assert times[30.0][4] / times[30.0][0] > 2


def test_profile_is_read_at_the_drafts_that_there_are():
    told = profile(lambda b, k: 0.01 * (1 + 0.2 * k), draft_share=0.25)
    few = StepTime(4, told).seconds(32, [0.0, 0.5, 0.5, 0.5, 0.5])
    assert few[4] == pytest.approx(0.01 * (1 + 0.2 * (0.75 * 0.5 + 0.25 * 4)))
    assert StepTime(4, told).seconds(32, [0, 1, 2, 3, 4])[4] == pytest.approx(0.018)


def test_profiled_acceptance_is_believed_at_first_and_not_for_long():
    acceptance = Goodput(4, profile(lambda b, k: 0.01, acceptance=(0.9, 0.81))).acceptance
    assert acceptance.length()[0][2] == pytest.approx(2.5, abs=0.1)
    # The positions beyond go on like the last, as without a profile.
    assert acceptance.length()[0][4] > 3.5
    for _ in range(4):
        acceptance.observe(2, 64, [64, 64, 0, 0], [13, 3, 0, 0])
    assert acceptance.length()[0][2] == pytest.approx(1.25, abs=0.1)


def test_profile_that_says_no_draft_is_accepted_keeps_nobody_from_trying():
    policy = Goodput(4, profile(lambda b, k: 0.01 * (1 + 0.2 * k), acceptance=(0.05, 0.01, 0.0, 0.0)))
    chosen = feed(policy, steps=60, seconds=lambda k, t: 0.01 * (1 + 0.2 * k), rate=0.8)
    assert min(chosen[30:]) > 0


def test_counts_that_disagree_do_not_break_the_choice():
    acceptance = Acceptance(2)
    for _ in range(50):
        acceptance.observe(2, 8, [8, 8], [8, 8], [8, 8], [8, 2])
    mean, sd = acceptance.length()
    assert mean[2] <= 3.0
    assert all(value >= 0 for value in sd)


def test_budgets_beat_the_same_k_for_all_on_a_mixed_workload():
    class Half(AcceptanceCurve):
        def request_powers(self, count, rng):
            return np.where(rng.random(count) < 0.5, 0.3, 6.0)

    model = Analytic(fixed=2e-3, weights=10e-3, token=10e-3 / 128, draft_pass=5e-5)
    lengths = np.random.default_rng(0).integers(200, 500, 192)
    fleet = Fleet(model, Half.geometric(0.7, 8), (lengths,), 64)
    uniform = simulate(fleet, lambda: Goodput(8), 1).seconds
    assert simulate(fleet, lambda: Budget(8), 1).seconds < 0.98 * uniform


def test_room_is_pure_and_its_modules_short():
    for path in CONTROL.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path.name
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"vllm", "torch", "ray"}, path.name


def ours(world):
    return Goodput(world.fleet.k_max, world.prior)


def steady_seconds(k, t):
    return 0.01 + 0.001 * k


def profile(seconds, k_max=4, **more):
    batches, ks = (1, 16, 64), tuple(range(k_max + 1))
    return StepTimes(batches, ks, tuple(tuple((seconds(b, k),) for k in ks) for b in batches), **more)


def feed(policy, steps, seconds, rate, views=None, decode=32):
    """An engine of one batch: accepts each draft with `rate`; the K chosen."""
    k_max, k, chosen = policy.k_max, 0, []
    survival = rate ** np.arange(1, k_max + 1)
    for t in range(steps):
        view = views[t] if views else StepView(decode=decode)
        decision = policy.decide(view)
        on = np.arange(k_max) < k
        drafted = np.where(on, view.decode, 0).tolist()
        accepted = np.where(on, np.rint(view.decode * survival), 0).astype(int).tolist()
        policy.observe(
            StepResult(
                seconds(k, t),
                view.decode,
                0,
                k,
                decision.k,
                drafted,
                accepted,
                view.decode if k else 0,
                greedy=view.greedy,
            )
        )
        k = decision.k
        chosen.append(k)
    return chosen
