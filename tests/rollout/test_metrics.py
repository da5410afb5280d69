from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.engine.control_loop import ControlLoop
from rollout_spec.rollout.metrics import fleet_metrics, worker_metrics


def counter(name: str, value: int, **labels: str) -> Counter:
    return Counter(name=f"vllm:{name}", labels=labels, value=value)


SPECULATION = [
    counter("spec_decode_num_drafts", 40),
    counter("spec_decode_num_draft_tokens", 100),
    counter("spec_decode_num_accepted_tokens", 60),
    Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", labels={}, values=[30, 20, 10]),
]


def test_vllms_counters_keep_their_names() -> None:
    found = worker_metrics([*SPECULATION, Gauge(name="vllm:num_requests_running", labels={}, value=3.0)], None)
    assert found["vllm:spec_decode_num_drafts"] == 40
    assert found["vllm:num_requests_running"] == 3
    assert [found[f"vllm:spec_decode_num_accepted_tokens_per_pos/{j}"] for j in range(3)] == [30, 20, 10]


def test_verls_rates() -> None:
    found = worker_metrics(SPECULATION, None)
    assert found["rollout/spec_accept_rate"] == pytest.approx(0.6)
    assert found["rollout/spec_accept_length"] == pytest.approx(2.5)


def test_without_drafts_there_are_no_rates() -> None:
    found = worker_metrics([counter("spec_decode_num_drafts", 0), counter("generation_tokens", 5)], None)
    assert found == {"vllm:spec_decode_num_drafts": 0, "vllm:generation_tokens": 5}


def test_a_name_with_several_labels_is_added_up() -> None:
    metrics = [
        counter("request_success", 2, finished_reason="stop"),
        counter("request_success", 3, finished_reason="length"),
    ]
    assert worker_metrics(metrics, None) == {"vllm:request_success": 5}


def test_histograms_are_left_out() -> None:
    histogram = Histogram(name="vllm:ttft", labels={}, count=1, sum=2.0, buckets={"1.0": 1})
    assert worker_metrics([histogram], None) == {}


class Two:
    def decide(self, view: StepView) -> Decision:
        return Decision(2)

    def observe(self, result: StepResult) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {"expected_speedup": 1.5}


def result(decode: int, k: int, seconds: float) -> StepResult:
    zeros: Any = [0, 0, 0]
    return StepResult(
        seconds=seconds,
        decode=decode,
        prefill_tokens=0,
        k=k,
        k_next=k,
        drafted=zeros,
        accepted=zeros,
        speculated=0,
    )


def test_the_controllers_status_by_live_batch() -> None:
    """From the loop that writes it to the metrics that read it."""
    loop = ControlLoop(Two(), 3)
    loop.decide(StepView(decode=1))
    for decode, k, seconds in [(1, 3, 0.25), (1, 1, 0.5), (3, 2, 0.5), (4, 1, 0.5), (700, 0, 2.0)]:
        loop.observe(result(decode, k, seconds))
    found = worker_metrics([], loop.status())
    assert found["rollout_spec/k"] == 2
    assert found["rollout_spec/controller_failed"] == 0
    assert found["rollout_spec/expected_speedup"] == 1.5
    by_batch = {name: value for name, value in found.items() if "live_from" in name}
    assert by_batch == {
        "rollout_spec/mean_k/live_from_1": 2.0,
        "rollout_spec/seconds/live_from_1": 0.75,
        "rollout_spec/mean_k/live_from_3": 1.5,
        "rollout_spec/seconds/live_from_3": 1.0,
        "rollout_spec/mean_k/live_from_513": 0.0,
        "rollout_spec/seconds/live_from_513": 2.0,
    }


def reading(engine: ControlLoop) -> dict[str, Any]:
    """The status as another process reads it."""
    status: dict[str, Any] = json.loads(json.dumps(engine.status()))
    return status


def step(decode: int, accepted: int, seconds: float = 0.5) -> StepResult:
    return StepResult(seconds, decode, 0, 2, 2, [decode, decode], [accepted, 0], speculated=decode)


def test_a_fleets_counters_are_added_up() -> None:
    engines = {"a": ControlLoop(Two(), 2), "b": ControlLoop(Two(), 2)}
    engines["a"].observe(step(4, accepted=4))
    engines["b"].observe(step(4, accepted=2))
    found = fleet_metrics({name: reading(engine) for name, engine in engines.items()}, {})
    assert found["rollout_spec/engines"] == 2
    assert found["rollout_spec/seconds/live_from_3"] == 1.0
    assert found["rollout/spec_accept_rate"] == pytest.approx(6 / 16)
    assert found["rollout/spec_accept_length"] == pytest.approx(1 + 6 / 8)


def test_a_fleets_metrics_are_of_what_came_since_the_last_reading() -> None:
    old, new = ControlLoop(Two(), 2), ControlLoop(Two(), 2)
    old.observe(step(4, accepted=4))
    before = {"old": reading(old)}
    old.observe(step(4, accepted=0))
    new.observe(step(8, accepted=8))
    found = fleet_metrics({"old": reading(old), "new": reading(new)}, before)
    assert found["rollout/spec_accept_rate"] == pytest.approx(8 / 24)
    assert found["rollout_spec/seconds/live_from_3"] == 0.5
    again = {"old": reading(old), "new": reading(new)}
    assert not any(name.startswith(("rollout/", "rollout_spec/mean_k")) for name in fleet_metrics(again, again))


def test_validation_is_told_apart_from_training() -> None:
    engine = ControlLoop(Two(), 2)
    engine.observe(step(4, accepted=1))
    engine.observe(replace(step(2, accepted=2), greedy=True))
    found = fleet_metrics({"a": reading(engine)}, {})
    assert found["rollout/spec_accept_rate"] == pytest.approx(1 / 8)
    assert found["rollout/spec_accept_length"] == pytest.approx(1.25)
    assert found["rollout_spec/greedy_accept_rate"] == pytest.approx(2 / 4)
    assert found["rollout_spec/greedy_accept_length"] == pytest.approx(2.0)
    before = {"a": reading(engine)}
    engine.observe(replace(step(2, accepted=2), greedy=True))
    only = fleet_metrics({"a": reading(engine)}, before)
    assert "rollout/spec_accept_rate" not in only
    assert only["rollout_spec/greedy_accept_length"] == pytest.approx(2.0)


def test_a_fleets_tail_is_the_longest_one() -> None:
    loops = {}
    for name, steps in (("short", 1), ("long", 3)):
        loops[name] = ControlLoop(Two(), 2)
        loops[name].decide(StepView(decode=40))
        loops[name].observe(step(40, accepted=0))
        loops[name].decide(StepView(decode=2))
        for _ in range(steps):
            loops[name].observe(step(2, accepted=0))
    found = fleet_metrics({name: reading(loop) for name, loop in loops.items()}, {})
    assert found["rollout_spec/tail_seconds"] == 1.5


def test_what_controllers_estimate_is_averaged() -> None:
    class Sure(Two):
        def metrics(self) -> dict[str, float]:
            return {"effective_speedup": self.speedup, "effective_speedup_sd": 0.3}

        def __init__(self, speedup: float) -> None:
            self.speedup = speedup

    now = {name: reading(ControlLoop(Sure(speedup), 2)) for name, speedup in (("a", 1.0), ("b", 2.0))}
    found = fleet_metrics(now, {})
    assert found["rollout_spec/effective_speedup"] == 1.5
    assert found["rollout_spec/effective_speedup_sd"] == pytest.approx(0.3 / 2**0.5)


def test_a_fleet_without_engines_says_so() -> None:
    assert fleet_metrics({}, {}) == {"rollout_spec/engines": 0.0}
