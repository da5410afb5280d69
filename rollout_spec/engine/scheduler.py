"""Scheduler plug-in for stock vLLM: a controller sets K for every step.

    LLM(..., scheduler_cls="rollout_spec.engine.scheduler.dynamic_scheduler",
        additional_config={"rollout_spec": {"policy": {"name": "goodput"}}})

vLLM's scheduler decides what runs; this one only says how many draft tokens each step makes, and measures. The
synchronous and the asynchronous variant differ in nothing but their parent.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from rollout_spec.control.policy import StepResult, StepView
from rollout_spec.engine.control_loop import ControlLoop
from rollout_spec.engine.running import Running

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Scheduled(NamedTuple):
    """A step between `schedule` and `update_from_output`. Set by `_before_step`, read by `_after_step`."""

    output: SchedulerOutput
    started: float  # seconds, perf_counter
    decode: int  # sequences that decode in the step
    context_tokens: int  # theirs, all together
    sampled: int  # sequences that a token is sampled for: those, and prompts computed to their end
    prefill_tokens: int
    prefills: int  # sequences that these are of
    k: int  # K its drafts were made with
    k_next: int  # K of the drafts it makes
    greedy: bool  # those that decode are at temperature 0


class _Counts(NamedTuple):
    """Sequences that had a draft token at each position, and those that had it accepted; both [k_max]."""

    drafted: list[int]
    accepted: list[int]


class _DynamicK(Scheduler):
    """What both schedulers add to their parent."""

    dynamic_sd_lookup: list[int] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop = ControlLoop.from_vllm(self.vllm_config)
        self._pending: deque[_Scheduled] = deque()
        self._running = Running(self.max_model_len)
        self._chunked: set[str] = set()  # requests whose prompt is not yet computed to its end
        self._k = 0  # K of the drafts that wait to be verified
        self._last_end: float | None = None  # end of the step before; None after an idle engine
        self._per_request: dict[str, int] = {}
        self._vllm_counts = self.log_stats and "num_draft_tokens_per_pos" in SpecDecodingStats.__annotations__
        if self._loop is not None and self.dynamic_sd_lookup is None:
            # Set, it keeps vLLM from padding requests to 1 + num_speculative_tokens, as its own table does.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._loop is not None and scheduler_output.finished_req_ids:
            ended = self._running.finished(scheduler_output.finished_req_ids, learn=self._loop.learns_lengths)
            self._loop.responded(ended)
        if self._loop is None or not scheduler_output.num_scheduled_tokens:
            super()._update_after_schedule(scheduler_output)
            return
        scheduler_output.num_spec_tokens_to_schedule = self._before_step(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        measured = bool(self._pending and scheduler_output.num_scheduled_tokens)
        arrived = time.perf_counter()
        counts = requests = None
        if measured and self._loop is not None and self._loop.wants_requests:
            requests = self._by_request(scheduler_output, model_runner_output)
        if measured and not self._vllm_counts:  # now, because vLLM cuts off what lies beyond a request's end
            counts = self._count(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if measured:
            self._after_step(scheduler_output, arrived, counts or _counts_of(outputs), requests)
        if not self.requests and self._loop is not None:
            self._last_end = None
            self._loop.idle()
        return outputs

    def add_request(self, request: Any) -> None:
        """An engine that was emptied by aborts has idled since: that is no step time."""
        if not self.requests:
            self._last_end = None
        super().add_request(request)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM and trainers call this after a weight update: old acceptance counts for less."""
        if self._loop is not None:
            self._loop.policy_updated()
        return super().reset_prefix_cache(*args, **kwargs)

    def _before_step(self, output: SchedulerOutput) -> int:
        assert self._loop is not None
        scheduled = output.num_scheduled_tokens
        prefills: list[str] = []
        if output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids or self._chunked:
            prefills = self._prefills(output)
        if output.preempted_req_ids:
            self._loop.preempted(len(output.preempted_req_ids))
        decode = len(scheduled) - len(prefills)
        self._running.settle(scheduled, decode)
        context_tokens, greedy = self._running.context, self._running.greedy
        unfinished, prefill_tokens = self._begin(prefills, scheduled) if prefills or self._chunked else (0, 0)
        requests: tuple[str, ...] = ()
        remaining: tuple[float, ...] = ()
        remaining_sd = 0.0
        if self._loop.wants_requests:
            requests = tuple(rid for rid in scheduled if rid not in self._chunked)
            remaining, remaining_sd = self._running.remaining(requests)
        decision = self._loop.decide(
            StepView(
                decode=len(scheduled) - unfinished,
                waiting=len(self.waiting),
                prefill_tokens=prefill_tokens,
                sampling=self._loop.must_check_sampling and self._any_sampling(),
                greedy=self._running.greedy,
                context_tokens=self._running.context,
                requests=requests,
                remaining=remaining,
                remaining_sd=remaining_sd,
            )
        )
        self._per_request = dict(decision.per_request) if decision.per_request else {}
        step = _Scheduled(
            output=output,
            started=time.perf_counter(),
            decode=decode,
            context_tokens=context_tokens,
            sampled=len(scheduled) - unfinished,
            prefill_tokens=prefill_tokens,
            prefills=len(prefills),
            k=self._k,
            k_next=decision.k,
            greedy=greedy,
        )
        self._pending.append(step)
        self._k = decision.k
        return decision.k

    def _prefills(self, output: SchedulerOutput) -> list[str]:
        """Requests whose prompt is computed in the step, or a part of it."""
        scheduled = output.num_scheduled_tokens
        prefills = [request.req_id for request in output.scheduled_new_reqs]
        for rid in output.scheduled_cached_reqs.resumed_req_ids:
            self._running.preempted(rid)
            if rid in scheduled:
                prefills.append(rid)
        return prefills + [rid for rid in self._chunked if rid in scheduled and rid not in prefills]

    def _begin(self, prefills: list[str], scheduled: dict[str, int]) -> tuple[int, int]:
        """How many of the prompts the step leaves unfinished, and tokens of all in it; the others decode from now."""
        tokens = unfinished = 0
        # A prompt that got no tokens in this step is still not computed.
        self._chunked = {rid for rid in self._chunked if rid not in scheduled and rid in self.requests}
        for rid in prefills:
            request = self.requests[rid]
            tokens += scheduled[rid]
            if request.num_computed_tokens + scheduled[rid] < request.num_tokens:
                unfinished += 1
                self._chunked.add(rid)
            else:
                self._running.join(rid, request)
        return unfinished, tokens

    def _after_step(
        self,
        output: SchedulerOutput,
        arrived: float,
        counts: _Counts | None,
        requests: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        """`arrived`: when the model's output came (perf_counter)."""
        assert self._loop is not None
        step = self._pending.popleft()
        while step.output is not output and self._pending:
            step = self._pending.popleft()  # its step was dropped by the engine
        if step.output is not output:
            return
        now = time.perf_counter()
        self._running.context += step.sampled + (sum(counts.accepted) if counts else 0)
        started = step.started if self._last_end is None else self._last_end
        self._last_end = now
        self._loop.observe(
            StepResult(
                seconds=now - started,
                decode=step.decode,
                prefill_tokens=step.prefill_tokens,
                k=step.k,
                k_next=step.k_next,
                drafted=counts.drafted if counts else self._loop.zeros,
                accepted=counts.accepted if counts else self._loop.zeros,
                speculated=step.decode if step.k else 0,
                context_tokens=step.context_tokens,
                requests=requests,
                model_seconds=arrived - step.started,
                greedy=step.greedy,
                prefills=step.prefills,
            )
        )

    def _count(self, output: SchedulerOutput, result: ModelRunnerOutput) -> _Counts | None:
        """What `_counts_of` reads, counted here: for vLLM before 0.31, and for an engine without statistics."""
        spec = output.scheduled_spec_decode_tokens
        if not spec:
            return None
        index, sampled = result.req_id_to_index, result.sampled_token_ids
        lengths, hits = [0] * (self.num_spec_tokens + 1), [0] * (self.num_spec_tokens + 1)
        for rid, drafts in spec.items():
            tokens = len(sampled[index[rid]])
            # Like vLLM, leave out what was not verified, and what an asynchronous engine ran beyond a request's end.
            if tokens and rid in self.requests:
                lengths[len(drafts)] += 1
                hits[tokens - 1] += 1
        return _Counts(_at_least(lengths), _at_least(hits))

    def _by_request(self, output: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, tuple[int, int]]:
        """Draft tokens and accepted ones of each request that was to have drafts; (0, 0) where none were found."""
        if not self._pending[0].k:
            return {}
        index, sampled = result.req_id_to_index, result.sampled_token_ids
        drafts, new = output.scheduled_spec_decode_tokens, {request.req_id for request in output.scheduled_new_reqs}
        counts = {}
        for rid in output.num_scheduled_tokens:
            tokens = len(sampled[index[rid]])
            if tokens and rid in self.requests and rid not in new:
                counts[rid] = (len(drafts.get(rid, ())), tokens - 1)
        return counts

    def _any_sampling(self) -> bool:
        return any(r.sampling_params is not None and r.sampling_params.temperature > 0 for r in self.running)


class DynamicScheduler(_DynamicK):
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


def _counts_of(outputs: dict[int, Any]) -> _Counts | None:
    """What vLLM counted in the step; one of its outputs has the statistics. None without drafts."""
    for output in outputs.values():
        if output.scheduler_stats is not None:
            stats = output.scheduler_stats.spec_decoding_stats
            return stats and _Counts(stats.num_draft_tokens_per_pos, stats.num_accepted_tokens_per_pos)
    return None


def _at_least(histogram: list[int]) -> list[int]:
    """From how often 0, 1, .. k_max came to how often at least 1, .. k_max: [5, 2, 3] -> [5, 3]."""
    return list(accumulate(reversed(histogram)))[-2::-1]
