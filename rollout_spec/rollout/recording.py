"""Responses recorded for a draft head, and what a head is worth in the engine. Each in a process of its own: vLLM binds
threads to cores and keeps memory, and a process can hold one engine in a lifetime."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from rollout_spec.config import Config, DrafterConfig, PolicyConfig
from rollout_spec.draft.samples import Sample, append_sample

if TYPE_CHECKING:
    from rollout_spec.rollout.worker import Prompt

Result = TypeVar("Result")

# Seconds between looks at a process that works.
LOOK = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """One response to record."""

    prompt_id: str
    prompt: Prompt
    """Text, a chat, or token ids."""
    temperature: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Counted by vLLM at one temperature, K drafts a verification."""

    k: int
    temperature: float
    drafts: int
    accepted: tuple[int, ...]
    """By draft position."""
    tokens: int

    @property
    def acceptance_length(self) -> float:
        """Bonus token included; NaN without a draft."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else float("nan")


def in_process(
    function: Callable[..., Result], *arguments: Any, on_look: Callable[[], object] = lambda: None
) -> Result:
    """The function's result, from a spawned process; its exceptions are raised here."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent) as pool:
        future: Future[Result] = pool.submit(function, *arguments)
        while True:
            try:
                return future.result(LOOK)
            except NotYet:
                if future.done():  # the function's own
                    raise
                on_look()


def _end_with_parent() -> None:
    """An engine whose caller was killed would go on and hold its cores and memory."""

    def watch(parent: Any) -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, args=(multiprocessing.parent_process(),), daemon=True).start()


def record(config: Config, jobs: Sequence[Job], path: Path, seconds: float, title: str) -> int:
    """Append the responses to the file `path` as they finish; returns how many. No speculation.

    None is begun after `seconds`; those that run then are finished, so that long ones are not missing.
    """
    from rollout_spec.engine.launch import engine_arguments
    from rollout_spec.rollout.worker import RolloutWorker

    started = time.monotonic()
    arguments = engine_arguments(config, drafter=None, policy=None)
    waiting = list(reversed(jobs))
    running: dict[str, Job] = {}
    count = 0
    with (
        RolloutWorker(config, arguments=arguments) as worker,
        path.open("a", encoding="utf-8") as file,
        tqdm(total=len(jobs), desc=title, unit="response", mininterval=5) as bar,
    ):
        sampling = config.sampling.model_copy(update={"max_tokens": config.draft.max_tokens, "logprobs": False})
        tokens = 0
        while waiting or running:
            if time.monotonic() - started > seconds:
                waiting.clear()
            while waiting and len(running) < config.engine.max_num_seqs:
                job = waiting.pop()
                at = sampling.model_copy(update={"temperature": job.temperature})
                running[worker.submit([job.prompt], 1, at)[0]] = job
            worker.step()
            for request_id in list(running):
                rollout = worker.take(request_id)
                if rollout is None:
                    continue
                job = running.pop(request_id)
                if rollout.finish_reason in ("stop", "length"):
                    append_sample(file, _sample(job, rollout))
                    count, tokens = count + 1, tokens + len(rollout.token_ids)
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update()
    return count


def measure(config: Config, head: Path, k: int, jobs: Sequence[Job]) -> tuple[list[Measured], list[Sample]]:
    """What vLLM accepts of the head's drafts at a fixed K, by temperature; and the responses."""
    from rollout_spec.rollout.worker import RolloutWorker

    drafter = DrafterConfig(method="eagle3", model=str(head), k_max=k)
    fixed = config.model_copy(update={"drafter": drafter, "policy": PolicyConfig(name="fixed", k=k)})
    sampling = config.sampling.model_copy(update={"max_tokens": config.draft.max_tokens, "logprobs": False})
    measured, samples = [], []
    with RolloutWorker(fixed) as worker:
        for temperature in sorted({job.temperature for job in jobs}):
            chosen = [job for job in jobs if job.temperature == temperature]
            before = worker.metrics()
            at = sampling.model_copy(update={"temperature": temperature})
            rollouts = worker.generate([job.prompt for job in chosen], sampling=at)
            after = worker.metrics()
            count = {name: int(value - before.get(name, 0)) for name, value in after.items() if "spec_decode" in name}
            accepted = [count[f"vllm:spec_decode_num_accepted_tokens_per_pos/{j}"] for j in range(k)]
            drafts, tokens = count["vllm:spec_decode_num_drafts"], sum(len(each.token_ids) for each in rollouts)
            measured.append(Measured(k, temperature, drafts, tuple(accepted), tokens))
            samples += [_sample(job, rollout) for job, rollout in zip(chosen, rollouts, strict=True)]
    return measured, samples


def _sample(job: Job, rollout: Any) -> Sample:
    ended = rollout.finish_reason == "stop"
    return Sample(job.prompt_id, rollout.prompt_token_ids, rollout.token_ids, job.temperature, ended)
