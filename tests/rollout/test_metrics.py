from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.engine.control_loop import ControlLoop
from rollout_spec.rollout.metrics import worker_metrics


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
