"""Real vLLM schedulers, driven step by step without a model: the tests say what it samples and drafts."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.engine.scheduler import dynamic_scheduler

BLOCK = 16
HEAD = 32


def make_config(
    folder: Path, *, k_max: int = 4, method: str = "ngram", settings: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """vLLM's own configuration of a tiny Llama with a drafter (k_max=0: without); `settings` are our part of it."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2 * HEAD,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 16384,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(model))
    speculative: dict[str, Any] | None = {"method": method, "num_speculative_tokens": k_max} if k_max else None
    if speculative and method == "ngram":
        speculative["prompt_lookup_max"] = 3
    defaults = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "enforce_eager": True}
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        speculative_config=speculative,
        additional_config={} if settings is None else {"rollout_spec": settings},
        **(defaults | arguments),
    ).create_engine_config()


def make_scheduler(config: Any, *, asynchronous: bool = False, blocks: int = 400, log_stats: bool = True) -> Any:
    """What `scheduler_cls` would construct.

    vLLM turns asynchronous scheduling off on a CPU and with the n-gram drafter, so it is set here, behind its checks:
    the class itself is the one that runs on a GPU.
    """
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)
    return dynamic_scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=log_stats,
    )


EOS = 1


def request(name: str, prompt: int = 5, output: int = 20, temperature: float = 0.0, **params: Any) -> Request:
    """Prompt 1, 2, .. `prompt`. It goes on to `output` tokens unless `params` (ignore_eos=False) say otherwise."""
    options = {"ignore_eos": True, "temperature": temperature} | params
    sampling = SamplingParams(max_tokens=output, **options)
    sampling.update_from_generation_config({}, EOS)
    return Request(name, list(range(1, prompt + 1)), sampling, None)


@dataclass
class Recorder:
    """A policy that asks for what `choose` says and keeps what it is told."""

    choose: Callable[[StepView], int | Decision]
    views: list[StepView] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    updates: int = 0

    def decide(self, view: StepView) -> Decision:
        self.views.append(view)
        choice = self.choose(view)
        decision = choice if isinstance(choice, Decision) else Decision(choice)
        self.decided.append(decision.k)
        return decision

    def observe(self, result: StepResult) -> None:
        self.results.append(result)

    def metrics(self) -> dict[str, float]:
        return {"decisions": float(len(self.decided))}

    def policy_updated(self) -> None:
        self.updates += 1


class Counted(NamedTuple):
    """A step as the driver counts it, from nothing but what vLLM scheduled."""

    k: int  # of the drafts it makes
    decode: int
    prefill_tokens: int
    drafted: list[int]
    accepted: list[int]
    drafts: dict[str, int]  # draft tokens scheduled, by request
    preempted: int
    context: int  # prompt and generated tokens of the sequences that decode, before the step
    context_next: int  # those of the sequences that will


class Driver:
    """The engine core's loop around a scheduler, with a made-up model.

    `accept(name, drafts)` says how many of a request's drafts are right, `length(name, k)` how many it gets and
    `token(name)` what is sampled. With an asynchronous scheduler a step is scheduled before the one before it has
    ended, as vLLM's batch queue does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        accept: Callable[[str, int], int] = lambda name, drafts: 0,
        length: Callable[[str, int], int] = lambda name, k: k,
        count: bool = True,
        token: Callable[[str], int] = lambda name: 7,
    ) -> None:
        self.scheduler = scheduler
        self.accept = accept
        self.length = length
        self.token = token
        self.count = count  # the steps one by one
        self.depth = 2 if scheduler.scheduler_config.async_scheduling else 1
        self.steps: list[Counted] = []
        self.generated: dict[str, int] = {}
        self._flying: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._decoding: set[str] = set()

    def step(self) -> None:
        self._flying.append(self._schedule())
        if len(self._flying) == self.depth or not self._flying[-1][0].num_scheduled_tokens:
            self._finish()

    def run(self, limit: int = 500) -> None:
        """Until every request has ended; a scheduler that stalls fails the test."""
        for _ in range(limit):
            if not self.scheduler.requests:
                break
            self.step()
        else:
            raise AssertionError(f"requests still run after {limit} steps: {list(self.scheduler.requests)}")
        while self._flying:
            self._finish()

    def _schedule(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        output = self.scheduler.schedule()
        self._decoding -= output.preempted_req_ids or set()
        scheduled, spec = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        decoding = self._decoding & scheduled.keys()
        sampled: list[list[int]] = []
        sizes = {name: self.scheduler.requests[name].num_tokens for name in scheduled}
        for name in scheduled:
            hits = self.accept(name, len(spec.get(name, ())))
            sampled.append([] if self.scheduler.requests[name].is_prefill_chunk else [self.token(name)] * (1 + hits))
            if sampled[-1]:
                self._decoding.add(name)
        if scheduled and self.count:
            self.steps.append(
                Counted(
                    k=output.num_spec_tokens_to_schedule,
                    decode=len(decoding),
                    prefill_tokens=sum(scheduled[name] for name in scheduled.keys() - decoding),
                    drafted=[],
                    accepted=[],
                    drafts={name: len(tokens) for name, tokens in spec.items()},
                    preempted=len(output.preempted_req_ids or ()),
                    context=sum(sizes[name] for name in decoding),
                    context_next=sum(sizes[name] for name, tokens in zip(sizes, sampled, strict=True) if tokens),
                )
            )
        names = list(scheduled)
        return output, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)

    def _finish(self) -> None:
        output, result = self._flying.popleft()
        # vLLM trims sampled tokens past the end in place.
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        if sampled and self.count:
            counted = next(step for step in self.steps if not step.drafted)
            # What an asynchronous engine ran beyond a request's end counts for nothing.
            live = {name: spec for name, spec in counted.drafts.items() if name in self.scheduler.requests}
            for j in range(1, self.scheduler.num_spec_tokens + 1):
                counted.drafted.append(sum(length >= j for length in live.values()))
                counted.accepted.append(sum(len(sampled[name]) > j for name in live))
        self.scheduler.update_from_output(output, result)
        for name, tokens in sampled.items():
            self.generated[name] = self.generated.get(name, 0) + len(tokens)
        if self.depth == 1:
            k = output.num_spec_tokens_to_schedule
            names = [name for name, tokens in sampled.items() if tokens]
            drafts = [[9] * min(k, self.length(name, k)) for name in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
