"""Drafters with K changing at every step, on a real engine: nothing dies, nothing is lost, K=0 stays cheap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fresh import engine, run_fresh, scheduler_of
from policies import Cycle

# Prompts that repeat, so that n-gram and suffix find drafts.
PROMPTS = [[5, 6, 7, 8] * 6, [9, 10, 11] * 7, [12, 13] * 9]


def cycling(model: Path, method: str) -> dict[str, Any]:
    options: dict[str, Any] = {"drafter__method": method}
    if method == "draft_model":
        options["drafter__model"] = str(model)
    with engine(model, **options) as worker:
        policy = Cycle()
        scheduler_of(worker)._loop.policy = policy
        rollouts = worker.generate(PROMPTS, n=3, output_tokens=[[40, 60, 25]] * 3)
        greedy = [
            r.token_ids
            for r in worker.generate(
                PROMPTS, sampling=worker.config.sampling.model_copy(update={"temperature": 0.0, "max_tokens": 48})
            )
        ]
        failed = scheduler_of(worker)._loop._failed
        metrics = worker.metrics()
    return {
        "lengths": [len(r.token_ids) for r in rollouts],
        "results": policy.results,
        "failed": failed,
        "greedy": greedy,
        "metrics": metrics,
    }


def without_drafts(model: Path) -> list[list[int]]:
    with engine(model, policy__name="off") as worker:
        sampling = worker.config.sampling.model_copy(update={"temperature": 0.0, "max_tokens": 48})
        return [r.token_ids for r in worker.generate(PROMPTS, sampling=sampling)]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> list[list[int]]:
    return run_fresh(without_drafts, tiny_model)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_k_may_change_at_every_step(method: str, tiny_model: Path, reference: list[list[int]]) -> None:
    out = run_fresh(cycling, tiny_model, method)
    assert out["lengths"] == [40, 60, 25] * 3
    assert not out["failed"]
    assert out["greedy"] == reference
    results = out["results"]
    assert {result.k for result in results} == set(Cycle.ORDER)
    drafting = [result for result in results if result.draft_tokens]
    assert drafting
    for result in results:
        drafted, accepted = list(result.drafted), list(result.accepted)
        assert all(count == 0 for count in drafted[result.k :])
        assert drafted == sorted(drafted, reverse=True)
        assert all(a <= d <= result.decode for a, d in zip(accepted, drafted, strict=True))
        assert result.seconds > 0
    # The engine's own counters agree with what the policy was told.
    assert out["metrics"]["vllm:spec_decode_num_draft_tokens"] == sum(r.draft_tokens for r in results)
    assert out["metrics"]["vllm:spec_decode_num_accepted_tokens"] == sum(sum(r.accepted) for r in results)
    if method == "draft_model":
        # The target drafts for itself: greedy drafts of the greedy half are all accepted.
        assert max(sum(result.accepted) / result.draft_tokens for result in drafting) == 1.0


def history(model: Path) -> dict[str, Any]:
    options = {"drafter__method": "suffix", "policy__name": "fixed", "policy__k": 4}
    prompt = [3, 17, 4, 25, 9, 30, 11, 2, 28]  # nothing repeats in it
    with engine(model, **options) as worker:
        greedy = worker.config.sampling.model_copy(update={"temperature": 0.0, "max_tokens": 40})
        runs = [worker.generate([prompt], sampling=greedy)[0] for _ in range(2)]
        worker.forget_drafts()
        runs.append(worker.generate([prompt], sampling=greedy)[0])
    return {
        "tokens": [run.token_ids for run in runs],
        "accepted": [run.speculation.accepted_tokens if run.speculation else 0 for run in runs],
    }


def test_suffix_drafts_from_earlier_calls_until_told_to_forget(tiny_model: Path) -> None:
    out = run_fresh(history, tiny_model)
    first, second, forgotten = out["accepted"]
    assert out["tokens"][0] == out["tokens"][1] == out["tokens"][2]
    assert second > first
    assert forgotten == first


def by_request(model: Path, name: str) -> dict[str, Any]:
    with engine(model, policy__name=name) as worker:
        worker.generate(PROMPTS, n=4, output_tokens=[[50, 60, 40, 30]] * 3)
        sampling = worker.config.sampling.model_copy(update={"temperature": 0.0, "max_tokens": 48})
        greedy = [r.token_ids for r in worker.generate(PROMPTS, sampling=sampling)]
        return {"greedy": greedy, "metrics": worker.metrics()}


@pytest.mark.parametrize("name", ["budget", "aimd"])
def test_policies_that_decide_by_request_run(name: str, tiny_model: Path, reference: list[list[int]]) -> None:
    out = run_fresh(by_request, tiny_model, name)
    assert out["greedy"] == reference
    assert out["metrics"]["rollout_spec/controller_failed"] == 0
    if name == "aimd":  # `budget` may find that no draft pays here, which is its business
        assert out["metrics"]["vllm:spec_decode_num_draft_tokens"] > 0
