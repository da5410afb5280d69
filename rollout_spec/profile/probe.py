"""What runs in the engine's process: steady batches of chosen size and context, and a held-out rollout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout_spec.bench.engine_process import generate
from rollout_spec.control.policy import StepResult
from rollout_spec.workload import Group

if TYPE_CHECKING:
    from rollout_spec.engine.step_log import StepLog
    from rollout_spec.rollout.worker import RolloutWorker

# The prompts repeat so many random tokens: a drafter that copies finds drafts, and no two share a prefix.
TILE = 48
# Steps between looks at the trace.
LOOK = 6
# A batch that gave nothing for so many steps never will: it does not fit, or the prompts never end.
PATIENCE = 400


def describe(worker: RolloutWorker, log: StepLog) -> dict[str, Any]:
    """Identity of the engine, and how many tokens of context it holds."""
    from rollout_spec.engine.identity import identity

    config = worker.vllm_config
    cache = config.cache_config
    return {"engine": identity(config), "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size}


def sweep(
    worker: RolloutWorker, log: StepLog, trace: Path, batch: int, context: int, steps: int, seed: int
) -> tuple[list[StepResult], list[StepResult]]:
    """At least `steps` decode steps of `batch` sequences that start at `context` tokens, and the prefill steps before.

    Fewer if the sequences reach the engine's limit first.
    """
    from rollout_spec.engine.step_trace import read_steps

    offset = trace.stat().st_size
    ids = _submit(worker, batch, context, seed)
    decodes: list[StepResult] = []
    prefills: list[StepResult] = []
    taken = 0
    while worker.num_unfinished == batch and len(decodes) < steps and taken < PATIENCE + steps:
        for _ in range(LOOK):
            worker.step()
        taken += LOOK
        fresh, offset = read_steps(trace, offset)
        decodes += [step for step in fresh if step.decode == batch and not step.prefill_tokens]
        prefills += [step for step in fresh if step.prefill_tokens]
    _drop(worker, ids)
    return decodes, prefills


def plain(worker: RolloutWorker, log: StepLog, batch: int, context: int, steps: int, seed: int) -> list[float]:
    """Seconds of decode steps of an engine without a drafter."""
    log.take()
    ids = _submit(worker, batch, context, seed)
    times: list[float] = []
    taken = 0
    while worker.num_unfinished == batch and len(times) < steps and taken < PATIENCE + steps:
        for _ in range(LOOK):
            worker.step()
        taken += LOOK
        pairs = pairwise(log.take())
        times += [b.ended - a.ended for a, b in pairs if a.output_tokens == b.output_tokens == batch]
    _drop(worker, ids)
    return times


def rollout(worker: RolloutWorker, log: StepLog, trace: Path, groups: list[Group]) -> list[StepResult]:
    """Generate `groups` as the benchmark does; the steps."""
    from rollout_spec.engine.step_trace import read_steps

    offset = trace.stat().st_size
    generate(worker, groups)
    worker.forget_drafts()
    return read_steps(trace, offset)[0]


def plain_rollout(worker: RolloutWorker, log: StepLog, groups: list[Group]) -> list[StepResult]:
    """Generate `groups` on an engine without our scheduler; the steps from the second on, prompt tokens not counted."""
    from rollout_spec.engine.requests import prompt_token_ids

    prompts = [
        len(prompt_token_ids(lambda: worker.tokenizer, group.prompt)) for group in groups for _ in range(group.n)
    ]
    log.take()
    generate(worker, groups)
    steps = log.take()
    lengths = np.array([tokens for group in groups for tokens in group.output_tokens or ()], dtype=np.float64)
    # Those that run began together, or others have taken their place: then each is somewhere on its way.
    on_the_way = None
    if len(prompts) > worker.config.engine.max_num_seqs and lengths.size:
        on_the_way = float((lengths**2).sum() / (2.0 * lengths.sum()))
    mean, found = sum(prompts) / len(prompts), []
    for number, (before, step) in enumerate(pairwise(steps), start=1):
        if live := step.output_tokens:
            each = mean + (number if on_the_way is None else on_the_way)
            found.append(StepResult(step.ended - before.ended, live, 0, 0, 0, (), (), 0, round(live * each)))
    return found


def _submit(worker: RolloutWorker, batch: int, context: int, seed: int) -> list[str]:
    longest = worker.config.engine.max_model_len - context - worker.config.drafter.k_max - 1
    prompts = [_prompt(worker, context, Random(seed * 100_003 + i)) for i in range(batch)]
    return worker.submit(prompts, 1, worker.config.sampling, [[longest]] * batch)


def _prompt(worker: RolloutWorker, tokens: int, rng: Random) -> list[int]:
    model = worker.vllm_config.model_config
    ends = model.hf_text_config.eos_token_id
    # An end of sequence in a draft that is accepted by chance would end the sequence.
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    tile: list[int] = []
    while len(tile) < TILE:
        token = rng.randrange(model.get_vocab_size())
        if token not in ends:
            tile.append(token)
    return (tile * (tokens // TILE + 1))[:tokens]


def _drop(worker: RolloutWorker, ids: list[str]) -> None:
    worker.abort(ids)
    for request_id in ids:
        worker.take(request_id)
