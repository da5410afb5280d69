"""RolloutWorker on a real engine: order, streams, aborts, faults of single requests, metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fresh import engine, run_fresh, scheduler_of

from rollout_spec.config import ConfigError

PROMPTS = [[5, 6, 7, 8] * 5, [9, 10] * 8, [3, 4, 5, 6, 7] * 4, [20] * 12]
LENGTHS = [[4, 30], [25, 3], [10, 12], [1, 2]]


def scenario(model: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    # A policy that always speculates: whether there are drafts must not depend on step times.
    with engine(model, policy__name="fixed", policy__k=3) as worker:
        ordered = worker.generate(PROMPTS, n=2, output_tokens=LENGTHS)
        out["order"] = [(r.prompt_index, r.sample_index, len(r.token_ids)) for r in ordered]
        out["logprobs"] = [(r.logprobs is not None and len(r.logprobs), len(r.token_ids)) for r in ordered]
        out["reasons"] = {r.finish_reason for r in ordered}
        out["prompts"] = [r.prompt_token_ids for r in ordered[::2]]
        out["drafts"] = sum(r.speculation.draft_tokens for r in ordered if r.speculation)

        arrived = [len(r.token_ids) for r in worker.stream(PROMPTS, n=2, output_tokens=LENGTHS)]
        out["arrival"] = arrived

        async def both() -> tuple[list[int], list[int]]:
            async def one(lengths: list[list[int]]) -> list[int]:
                return [len(r.token_ids) async for r in worker.astream(PROMPTS[:2], output_tokens=lengths)]

            first, second = await asyncio.gather(one([[20], [5]]), one([[7], [9]]))
            return first, second

        out["async"] = asyncio.run(both())

        ids = worker.submit(PROMPTS, output_tokens=[[200]] * 4)
        for _ in range(6):
            worker.step()
        aborted = worker.abort([ids[1]])
        out["aborted"] = [(r.finish_reason, len(r.token_ids), len(r.logprobs or [])) for r in aborted]
        out["left"] = worker.num_unfinished
        try:
            worker.update_weights({}, policy_version=1)
        except RuntimeError as error:
            out["busy"] = str(error)
        worker.abort()
        out["after_abort"] = (worker.num_unfinished, len(scheduler_of(worker).requests))

        greedy = worker.config.sampling.model_copy(update={"temperature": 0.0})
        whole = worker.generate(PROMPTS, sampling=greedy, output_tokens=[[40]] * 4)
        ids = worker.submit(PROMPTS, sampling=greedy, output_tokens=[[40]] * 4)
        for _ in range(6):
            worker.step()
        so_far = worker.tokens_so_far()
        parts = worker.abort(ids)
        ids = worker.resume(parts, sampling=greedy, output_tokens=[40] * 4)
        worker.step()
        twice = worker.resume(worker.abort(ids[:1]), sampling=greedy, output_tokens=[40])
        while worker.num_unfinished:
            worker.step()
        resumed = [worker.take(name) for name in [*twice, *ids[1:]]]
        out["resumed"] = [
            (new.token_ids == old.token_ids, new.logprobs, old.logprobs, new.spans == old.spans, new.prompt_token_ids)
            for new, old in zip(resumed, whole, strict=True)
        ]
        out["parts"] = [(len(part.token_ids), part.prompt_index) for part in parts]
        out["so_far"] = sorted(so_far.values())
        for wrong in (whole[0], parts[0]):
            try:
                worker.resume([wrong], output_tokens=[len(wrong.token_ids)])
            except ConfigError as error:
                out.setdefault("ended", []).append(str(error))

        # A prompt beyond the context is vLLM's to refuse; its neighbours must not notice.
        mixed = worker.generate([PROMPTS[0], [5] * 600, PROMPTS[1]], output_tokens=[[5], [5], [5]])
        out["mixed"] = [(r.finish_reason, len(r.token_ids), r.error) for r in mixed]

        early = worker.stream(PROMPTS, output_tokens=[[2], [300], [300], [300]])
        next(early)
        early.close()
        out["left_after_close"] = worker.num_unfinished

        for bad in ({"n": 0}, {"n": 2, "output_tokens": [[3]] * 4}):
            try:
                worker.generate(PROMPTS, **bad)
                out[f"accepted {bad}"] = True
            except ConfigError as error:
                out.setdefault("refused", []).append(str(error))
        out["metrics"] = worker.metrics()
    return out


@pytest.fixture(scope="module")
def result(tiny_model: Path) -> dict[str, Any]:
    return run_fresh(scenario, tiny_model)


def test_rollouts_come_in_input_order_with_imposed_lengths(result: dict[str, Any]) -> None:
    assert result["order"] == [(p, s, LENGTHS[p][s]) for p in range(4) for s in range(2)]
    assert result["reasons"] == {"length"}
    assert result["prompts"] == PROMPTS


def test_every_token_has_a_log_probability(result: dict[str, Any]) -> None:
    assert all(logprobs == tokens for logprobs, tokens in result["logprobs"])


def test_the_stream_yields_as_sequences_finish(result: dict[str, Any]) -> None:
    assert sorted(result["arrival"]) == sorted(length for row in LENGTHS for length in row)
    assert result["arrival"].index(1) < result["arrival"].index(30)


def test_async_streams_share_the_engine(result: dict[str, Any]) -> None:
    assert result["async"] == ([5, 20], [7, 9])


def test_abort_keeps_what_was_generated(result: dict[str, Any]) -> None:
    ((reason, tokens, logprobs),) = result["aborted"]
    assert (reason, result["left"]) == ("abort", 3)
    assert tokens == logprobs
    assert tokens >= 5
    assert result["after_abort"] == (0, 0)


def test_an_aborted_rollout_goes_on_as_if_it_had_not_been(result: dict[str, Any]) -> None:
    for (same, new, old, spans, prompt), expected in zip(result["resumed"], PROMPTS, strict=True):
        assert same
        assert spans
        assert prompt == expected
        assert new == pytest.approx(old, abs=1e-4)
    assert all(0 < tokens < 40 for tokens, _ in result["parts"])
    assert result["so_far"] == sorted(tokens for tokens, _ in result["parts"])
    assert ["ended with 'length'" in result["ended"][0], "fewer than" in result["ended"][1]] == [True, True]


def test_weights_are_not_changed_under_running_requests(result: dict[str, Any]) -> None:
    assert "3 requests still run" in result["busy"]


def test_a_refused_request_leaves_the_others_alone(result: dict[str, Any]) -> None:
    first, refused, last = result["mixed"]
    assert first[:2] == last[:2] == ("length", 5)
    assert refused[:2] == ("error", 0)
    assert "512" in refused[2]


def test_leaving_a_stream_aborts_the_rest(result: dict[str, Any]) -> None:
    assert result["left_after_close"] == 0


def test_bad_arguments_are_refused(result: dict[str, Any]) -> None:
    assert len(result["refused"]) == 2


def test_metrics_use_vllm_and_verl_names(result: dict[str, Any]) -> None:
    metrics = result["metrics"]
    drafts, accepted = metrics["vllm:spec_decode_num_drafts"], metrics["vllm:spec_decode_num_accepted_tokens"]
    assert metrics["vllm:spec_decode_num_draft_tokens"] >= result["drafts"] > 0
    assert metrics["rollout/spec_accept_length"] == pytest.approx(1 + accepted / drafts)
    assert metrics["rollout_spec/controller_failed"] == 0
    assert any(name.startswith("rollout_spec/mean_k/") for name in metrics)
