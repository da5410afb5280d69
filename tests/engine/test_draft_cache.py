"""A head that skipped the steps with K=0 drafts as if it had seen them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from fresh import engine, run_fresh, scheduler_of
from look_up import SUCCESSOR, Pair, look_up_pair, random_pair
from policies import Cycle, SwitchOn

from rollout_spec.config import SamplingConfig

GREEDY = SamplingConfig(temperature=0, logprobs=False)
K = 3
STEPS_OFF = 40


def options(pair: Pair, buffer: int) -> dict[str, Any]:
    return {
        "drafter__method": "eagle3",
        "drafter__model": str(pair.head),
        "drafter__draft_buffer_mib": buffer,
    }


def switched_on_each(pair: Pair, prompts: list[list[int]], length: int) -> dict[str, dict[str, Any]]:
    """By engine. All in one process: starting one takes longer than what it has to do here."""
    from rollout_spec.engine.draft_cache import DeferringEagleProposer

    runs = {"stock": switched_on(pair, prompts, length, 0), "ours": switched_on(pair, prompts, length, 256)}
    DeferringEagleProposer._catch_up = lambda *args: None
    return runs | {"stale": switched_on(pair, prompts, length, 256)}


def switched_on(pair: Pair, prompts: list[list[int]], length: int, buffer: int) -> dict[str, Any]:
    """Tokens, and how many drafts were tried and accepted by position [2, K_max], K going from 0 to 3 once."""
    with engine(pair.target, **options(pair, buffer)) as worker:
        policy = SwitchOn(after=STEPS_OFF, k=K)
        scheduler_of(worker)._loop.policy = policy
        rollouts = worker.generate(prompts, sampling=GREEDY, output_tokens=[[length]] * len(prompts))
    tried = [(result.drafted, result.accepted) for result in policy.results]
    return {"tokens": [rollout.token_ids for rollout in rollouts], "counts": np.array(tried).sum(0), "steps": tried}


def test_acceptance_after_the_switch_is_that_of_a_head_that_ran_all_along(tmp_path: Path) -> None:
    pair = look_up_pair(tmp_path)
    prompts = []
    for token in (2, 7, 13, 20, 25, 31):
        prompt = [token]
        while len(prompt) < 21 + token:
            prompt.append(SUCCESSOR[prompt[-1]])
        prompts.append(prompt)
    length = STEPS_OFF + 8
    runs = run_fresh(switched_on_each, pair, prompts, length)
    for run in runs.values():
        for prompt, tokens in zip(prompts, run["tokens"], strict=True):
            before = [prompt[-1], *tokens[:-1]]
            assert tokens == [SUCCESSOR[token] for token in before]
    drafted, accepted = runs["ours"]["counts"]
    assert drafted[K - 1] >= len(prompts)
    assert accepted[K - 1] > 0.9 * drafted[K - 1]
    assert runs["ours"]["steps"] == runs["stock"]["steps"]
    # The same with a hole in the cache would be seen here.
    assert runs["stale"]["counts"][1].sum() < 0.5 * accepted.sum()


def draft_caches(pair: Pair, prefix_caching: bool) -> dict[str, dict[str, torch.Tensor]]:
    """By engine and request, the head's keys and values [positions, width] after K changed at every step."""
    from rollout_spec.engine import draft_cache as module

    caches = {"stock": draft_cache(pair, 0, prefix_caching), "roomy": draft_cache(pair, 256, prefix_caching)}
    row = len(tiny.FEATURES) * tiny.HIDDEN * 4  # bytes of hidden states a token
    module.buffer_bytes = lambda config: 200 * row
    return caches | {"full every few steps": draft_cache(pair, 256, prefix_caching)}


def draft_cache(pair: Pair, buffer: int, prefix_caching: bool) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    # More than a block each, so that siblings share some; and more than fits into one step.
    prompts = [rng.integers(2, 32, size).tolist() for size in (300, 140, 30)]
    arguments = options(pair, buffer) | {
        "engine__enable_prefix_caching": prefix_caching,
        "engine__max_num_batched_tokens": 160,
    }
    with engine(pair.target, **arguments) as worker:
        policy = Cycle()
        scheduler_of(worker)._loop.policy = policy
        runner = worker._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        written = record_writes(runner)
        worker.submit(prompts, 3, GREEDY, [[12, 60, 50], [60, 25, 60], [60, 60, 8]])
        for _ in range(38):
            worker.step()
        while policy.ORDER[policy._next % len(policy.ORDER)] == 0:
            worker.step()
        live = {rid.rpartition("-")[0]: request for rid, request in scheduler_of(worker).requests.items()}
        size = runner.drafter.block_size
        caches = {}
        for name, request in live.items():
            positions = torch.arange(request.num_computed_tokens)
            blocks = torch.tensor(runner.requests[request.request_id].block_ids[0])
            caches[name] = written[blocks[positions // size] * size + positions % size]
        return caches


def record_writes(runner: Any) -> torch.Tensor:
    """What was last written to each slot of the head's cache [slots, width], as the engine goes on; NaN: nothing.

    The cache itself is packed in a way that differs between machines.
    """
    (name,) = runner.drafter._draft_attn_layer_names
    attention = runner.compilation_config.static_forward_context[name]
    slots = runner.kv_cache_config.num_blocks * runner.drafter.block_size
    written = torch.full((slots, 2 * attention.num_kv_heads * attention.head_size), torch.nan)
    write = attention.impl.do_kv_cache_update

    def recording(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slot_mapping: torch.Tensor) -> None:
        write(layer, key, value, cache, slot_mapping)
        written[slot_mapping] = torch.cat([key, value], -1)[: len(slot_mapping)].flatten(1)

    attention.impl.do_kv_cache_update = recording
    return written


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["alone", "shared"])
def test_the_cache_is_the_same_whatever_was_deferred(tmp_path: Path, prefix_caching: bool) -> None:
    caches = run_fresh(draft_caches, random_pair(tmp_path), prefix_caching)
    expected = caches.pop("stock")
    assert len(expected) > 3
    for name, cache in caches.items():
        assert cache.keys() == expected.keys()
        for request, values in expected.items():
            assert not values.isnan().any()
            torch.testing.assert_close(cache[request], values, atol=1e-3, rtol=1e-3, msg=f"{name}, {request}")
