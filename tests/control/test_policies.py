"""The other policies, and what they are built of."""

import pytest

from rollout_spec.config import ConfigError
from rollout_spec.control.acceptance import Acceptance
from rollout_spec.control.aimd import Aimd
from rollout_spec.control.makespan import Lengths, longest_first
from rollout_spec.control.policy import StepResult, StepView
from rollout_spec.control.registry import POLICIES, make_policy
from rollout_spec.control.requests import RequestRates
from rollout_spec.control.step_times import StepTimes


def test_every_policy_decides_before_it_has_seen_anything():
    for name in POLICIES:
        policy = make_policy({"name": name, "table": [(1, 8, 2)], "k": 2}, 4)
        assert 0 <= policy.decide(StepView(decode=3)).k <= 4
        assert isinstance(policy.metrics(), dict)


def test_acceptance_pools_steps_of_different_k():
    acceptance = Acceptance(4)
    for _ in range(100):
        acceptance.observe(2, 50, [50, 50, 0, 0], [35, 21, 0, 0])
        acceptance.observe(1, 50, [50, 0, 0, 0], [35, 0, 0, 0])
    mean, sd = acceptance.length()
    assert mean[1] == pytest.approx(1.7, abs=0.01)
    assert mean[2] == pytest.approx(1.7 + 0.42, abs=0.02)
    # Never drafted: the last rate goes on, held loosely.
    assert mean[3] == pytest.approx(1.7 + 0.42 + 0.42 * 0.6, abs=0.05)
    assert sd[4] > 3 * sd[2]


def test_aimd_follows_its_source():
    policy = Aimd(4, 2)
    views = StepView(decode=2, requests=("a", "b"))
    for _ in range(3):
        policy.observe(result({"a": (2, 2), "b": (2, 0)}))
    limits = policy.decide(views).per_request
    assert limits == {"a": 3, "b": 1}


def test_request_rates_part_and_forget_the_finished():
    rates = RequestRates()
    for i in range(40):
        rates.observe({"copy": (4, 4), "free": (4, 0), f"gone-{i}": (4, 2)})
    copy, free, new = rates.rates(["copy", "free", "new"], 0.5)
    assert copy > 0.9
    assert free < 0.15
    assert new == pytest.approx(0.5)


def test_step_times_interpolate_and_refuse_nonsense(tmp_path):
    times = StepTimes((1, 4), (0, 2), (((1.0,), (2.0,)), ((4.0,), (8.0,))))
    assert times.by_k(1, 3) == [1.0, 1.5, 2.0, 2.5]
    assert times.by_k(2.5, 2) == [2.5, 3.75, 5.0]
    assert StepTimes.from_mapping({"step_times": times.to_mapping()}) == times
    with pytest.raises(ValueError, match="must start at 0"):
        StepTimes((1,), (1,), (((1.0,),),))
    bad = tmp_path / "profile.json"
    bad.write_text('{"batch": [1]}')
    with pytest.raises(ConfigError, match="k, seconds missing"):
        make_policy({"name": "goodput", "profile": str(bad)}, 4)


def test_longest_expected_come_first():
    lengths = Lengths(cap=1000)
    for tokens in (100, 120, 110):
        lengths.finished("short", tokens)
        lengths.finished("long", 8 * tokens)
    assert longest_first(["short", "new", "long"], lengths) == [2, 1, 0]
    assert lengths.remaining("long", 500) > 200
    assert lengths.remaining("long", 990) <= 10


def result(requests):
    zeros = [0] * 4
    return StepResult(0.01, len(requests), 0, 2, 2, zeros, zeros, len(requests), 0, requests)
