"""Scheduler plug-in for stock vLLM: a controller sets K for every step.

    LLM(..., scheduler_cls="rollout_spec.engine.scheduler.dynamic_scheduler",
        additional_config={"rollout_spec": {"policy": {"name": "goodput"}}})

vLLM's scheduler decides what runs; this one only says how many draft tokens each step makes, and measures. The
synchronous and the asynchronous variant differ in nothing but their parent.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from rollout_spec.control.policy import StepResult, StepView
from rollout_spec.engine.control_loop import ControlLoop

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    _Base = Scheduler
else:
    _Base = object


class _Scheduled(NamedTuple):
    """A step between `schedule` and `update_from_output`. Set by `_before_step`, read by `_after_step`."""

    output: SchedulerOutput
    started: float  # seconds, perf_counter
    decode: int  # sequences that decode in the step
    prefill_tokens: int
    k: int  # K its drafts were made with
    k_next: int  # K of the drafts it makes


class _DynamicK(_Base):
    """What both schedulers add to their parent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = ControlLoop.from_vllm(self.vllm_config)
        self._pending: deque[_Scheduled] = deque()
        self._chunked: set[str] = set()  # requests whose prompt is not yet computed to its end
        self._k = 0  # K of the drafts that wait to be verified
        self._last_end: float | None = None  # end of the step before; None after an idle engine
        self._per_request: dict[str, int] = {}
        if self._loop is not None and self.dynamic_sd_lookup is None:
            # Set, it keeps vLLM from padding requests to 1 + num_speculative_tokens, as its own table does.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._loop is None or not scheduler_output.num_scheduled_tokens:
            super()._update_after_schedule(scheduler_output)
            return
        scheduler_output.num_spec_tokens_to_schedule = self._before_step(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        if self._pending:
            self._after_step(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self.requests and self._loop is not None:
            self._last_end = None
            self._loop.idle()
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM and trainers call this after a weight update: old acceptance counts for less."""
        if self._loop is not None:
            self._loop.policy_updated()
        return super().reset_prefix_cache(*args, **kwargs)

    def _before_step(self, output: SchedulerOutput) -> int:
        scheduled = output.num_scheduled_tokens
        before = self._chunked
        prefills = [request.req_id for request in output.scheduled_new_reqs]
        prefills += [rid for rid in output.scheduled_cached_reqs.resumed_req_ids if rid in scheduled]
        prefills += [rid for rid in before if rid in scheduled and rid not in prefills]
        prefill_tokens = 0
        after: set[str] = set()
        for rid in prefills:
            request = self.requests[rid]
            prefill_tokens += scheduled[rid]
            if request.num_computed_tokens + scheduled[rid] < request.num_tokens:
                after.add(rid)
        self._chunked = after
        decode = len(scheduled) - len(prefills)
        decision = self._loop.decide(
            StepView(
                decode=len(scheduled) - len(after),
                waiting=len(self.waiting),
                prefill_tokens=prefill_tokens,
                sampling=self._loop.must_check_sampling and self._any_sampling(),
            )
        )
        self._per_request = dict(decision.per_request or {})
        step = _Scheduled(output, time.perf_counter(), decode, prefill_tokens, self._k, decision.k)
        self._pending.append(step)
        self._k = decision.k
        return decision.k

    def _after_step(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        step = self._pending.popleft()
        while step.output is not output and self._pending:
            step = self._pending.popleft()  # its step was dropped by the engine
        if step.output is not output:
            return
        now = time.perf_counter()
        started = step.started if self._last_end is None else self._last_end
        self._last_end = now
        drafted, accepted = self._loop.zeros, self._loop.zeros
        spec = output.scheduled_spec_decode_tokens
        if spec:
            index, sampled = result.req_id_to_index, result.sampled_token_ids
            count = len(spec)
            lengths = np.fromiter(map(len, spec.values()), np.int64, count)
            hits = np.fromiter([len(sampled[index[rid]]) for rid in spec], np.int64, count) - 1
            drafted = _at_least(lengths, self.num_spec_tokens)
            accepted = _at_least(np.clip(hits, 0, lengths), self.num_spec_tokens)
        self._loop.observe(
            StepResult(
                seconds=now - started,
                decode=step.decode,
                prefill_tokens=step.prefill_tokens,
                k=step.k,
                k_next=step.k_next,
                drafted=drafted,
                accepted=accepted,
                speculated=step.decode if step.k else 0,
            )
        )

    def _any_sampling(self) -> bool:
        return any(r.sampling_params is not None and r.sampling_params.temperature > 0 for r in self.running)


class DynamicScheduler(_DynamicK, Scheduler):
    """vLLM's synchronous scheduler with K from a controller."""

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for rid, k in self._per_request.items():
            request = self.requests.get(rid)
            if request is not None and len(request.spec_token_ids) > k:
                request.spec_token_ids = request.spec_token_ids[:k]


class DynamicAsyncScheduler(_DynamicK, AsyncScheduler):
    """vLLM's asynchronous scheduler with K from a controller."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for rid, k in self._per_request.items():
            request = self.requests.get(rid)
            if request is not None and len(request.spec_token_ids) > k:
                request.spec_token_ids = request.spec_token_ids[:k]  # placeholders here, one per draft


def dynamic_scheduler(*args: Any, vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """The variant that fits the engine: name this as `scheduler_cls`, vLLM calls it like a class."""
    chosen = DynamicAsyncScheduler if vllm_config.scheduler_config.async_scheduling else DynamicScheduler
    return chosen(*args, vllm_config=vllm_config, **kwargs)


def _at_least(counts: np.ndarray, k_max: int) -> np.ndarray:
    """How many of `counts` are at least 1, 2, .. k_max."""
    histogram = np.bincount(counts, minlength=k_max + 1)
    return histogram[::-1].cumsum()[-2::-1][:k_max]
