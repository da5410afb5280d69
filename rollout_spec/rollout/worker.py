"""RolloutWorker: one vLLM engine with dynamic speculation, for a trainer's generate and weight-sync loop.

worker = RolloutWorker(load_config("configs/worker.yaml"))
rollouts = worker.generate(prompts, n=8)
worker.update_weights(model.state_dict(), policy_version=1)
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rollout_spec.config import Config, ConfigError, SamplingConfig
from rollout_spec.control.makespan import Lengths, longest_first, prompt_key
from rollout_spec.engine import requests as vllm_requests
from rollout_spec.engine.control_loop import SETTINGS_KEY
from rollout_spec.engine.launch import engine_arguments, make_engine
from rollout_spec.rollout.metrics import worker_metrics
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.weights import as_files, check_shapes, safetensors_files, shapes_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.rollout_spec")

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class _Request:
    """A sample that runs. Set by `_submit`, read when its output or its abort arrives."""

    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    internal_id: str  # vLLM's
    policy_version: int


class RolloutWorker:
    """Owns an engine. Streams may be interleaved; calls come from one thread or one event loop at a time."""

    def __init__(
        self, config: Config, *, arguments: dict[str, Any] | None = None, stat_loggers: list[Any] | None = None
    ) -> None:
        """Start the engine that `config` describes. `arguments` replaces the engine arguments made from it.

        Raises ConfigError before anything is loaded when vLLM refuses the configuration.
        """
        self.config = config
        self.policy_version = 0
        self._folder = tempfile.TemporaryDirectory(prefix="rollout_spec_")
        self._status = Path(self._folder.name) / "status.json"
        if arguments is None:
            arguments = engine_arguments(config, drafter=config.drafter, policy=config.policy)
        settings = arguments.get("additional_config", {}).get(SETTINGS_KEY)
        if settings is not None:
            settings["status_file"] = str(self._status)
        self._model = str(arguments["model"])
        self._engine = make_engine(config, arguments, stat_loggers)
        self._requests: dict[str, _Request] = {}
        self._finished: dict[str, Rollout] = {}
        self._lengths = Lengths()
        self._next_id = 0
        self._lock = threading.Lock()
        self._check_sampler(arguments)
        if arguments.get("speculative_config", {}).get("rejection_sample_method") == "synthetic":
            logger.warning("drafter.synthetic_acceptance is set: drafts are accepted by chance, the text is noise")

    @property
    def tokenizer(self) -> Any:
        """vLLM's tokenizer of the model. Prompts given as token ids do without."""
        return self._engine.get_tokenizer()

    @property
    def vllm_config(self) -> Any:
        """vLLM's own configuration of the engine."""
        return self._engine.vllm_config

    # -- generation

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[Rollout]:
        """`n` samples of each prompt, in input order: all samples of the first prompt, then of the second, ...

        output_tokens [len(prompts)][n]: imposed lengths in tokens; end-of-sequence is masked until they are
        reached. A request that fails is returned with finish_reason "error"; the others are unaffected.
        """
        order = self.config.rollout.order
        ids = self._queue(prompts, n, sampling, output_tokens, longest=order != "submitted")
        rollouts = list(self._stream(ids))
        return sorted(rollouts, key=lambda rollout: (rollout.prompt_index, rollout.sample_index))

    def stream(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[Rollout]:
        """As `generate`, each rollout as soon as it has finished. Leaving the iterator aborts the rest."""
        yield from self._stream(self.submit(prompts, n, sampling, output_tokens))

    def _stream(self, ids: list[str]) -> Iterator[Rollout]:
        pending = dict.fromkeys(ids)
        try:
            while pending:
                yield from self._collect(pending)
                if pending:
                    self.step()
        finally:
            self.abort(pending)
            for request_id in pending:
                self._finished.pop(request_id, None)

    async def astream(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
    ) -> AsyncIterator[Rollout]:
        """As `stream`, with engine steps in a thread; several may run at once and share the batch."""
        pending = dict.fromkeys(await asyncio.to_thread(self.submit, prompts, n, sampling, output_tokens))
        try:
            while pending:
                for rollout in self._collect(pending):
                    yield rollout
                if pending:
                    await asyncio.to_thread(self.step)
        finally:
            self.abort(pending)
            for request_id in pending:
                self._finished.pop(request_id, None)

    def submit(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        output_tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[str]:
        """Queue samples; returns their request ids. `step` moves them, `take` gives what has finished.

        Raises ConfigError if n or output_tokens do not fit the prompts; nothing is queued then.
        """
        longest = self.config.rollout.order == "longest_first"
        return self._queue(prompts, n, sampling, output_tokens, longest)

    def _queue(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingConfig | None,
        output_tokens: Sequence[Sequence[int]] | None,
        longest: bool,
    ) -> list[str]:
        """As `submit`. longest: if they don't fit in the batch, prompts with the longest responses so far go first."""
        if n < 1:
            raise ConfigError(f"n: value {n}: must be at least 1")
        if output_tokens is not None and [len(lengths) for lengths in output_tokens] != [n] * len(prompts):
            raise ConfigError(f"output_tokens: must hold n={n} lengths for each of the {len(prompts)} prompts")
        sampling = sampling or self.config.sampling
        # All of them before the first is queued: a prompt that cannot be tokenised must not leave others running.
        tokenised = [vllm_requests.prompt_token_ids(lambda: self.tokenizer, prompt) for prompt in prompts]
        with self._lock:
            order = self._order(tokenised, n) if longest else range(len(prompts))
            first, self._next_id = self._next_id, self._next_id + n * len(prompts)
            ids = [f"rollout-{first + number}" for number in range(n * len(prompts))]
            for index in order:
                # A prompt's samples one after the other, so that they share its prefix.
                for sample in range(n):
                    length = output_tokens[index][sample] if output_tokens is not None else None
                    self._submit(ids[index * n + sample], index, sample, tokenised[index], sampling, length)
        return ids

    def _order(self, prompts: list[list[int]], n: int) -> Sequence[int]:
        """Indices of `prompts` in the order to queue them; as they came if all fit in the batch."""
        if n * len(prompts) + len(self._requests) <= self.config.engine.max_num_seqs:
            return range(len(prompts))
        return longest_first([prompt_key(prompt) for prompt in prompts], self._lengths)

    def step(self) -> None:
        """One engine step; finished rollouts wait for `take`. Does nothing when no request runs."""
        with self._lock:
            if not self._engine.has_unfinished_requests():
                return
            for output in self._engine.step():
                if output.finished:
                    self._finish(output)

    def take(self, request_id: str) -> Rollout | None:
        """The finished rollout of a request id, once; None while it runs."""
        return self._finished.pop(request_id, None)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Rollout]:
        """Stop requests (None: all that run). They finish with reason "abort" and the tokens they have."""
        with self._lock:
            ids = [rid for rid in (self._requests if request_ids is None else request_ids) if rid in self._requests]
            aborted = []
            for request_id in ids:
                request = self._requests.pop(request_id)
                tokens, logprobs = vllm_requests.partial_output(self._engine, request.internal_id)
                rollout = self._rollout(request, tokens, logprobs, "abort")
                self._finished[request_id] = rollout
                aborted.append(rollout)
            if ids:
                self._engine.abort_request(ids)
        return aborted

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    # -- weights

    def update_weights(self, weights: Mapping[str, torch.Tensor] | str | Path, policy_version: int) -> None:
        """Put new target weights into the running engine: named tensors, or a folder of safetensors.

        Names and shapes are the checkpoint's own and are checked first; prefix caches are dropped. Raises
        ConfigError on unfit weights (the old ones stay) and RuntimeError while requests run.
        """
        if self._requests:
            raise RuntimeError(
                f"update_weights: {len(self._requests)} requests still run on policy version "
                f"{self.policy_version}; let them finish or abort them first"
            )
        with as_files(weights) as files:
            check_shapes(shapes_of(files), self._model_shapes())
            self._rpc("rollout_spec_load_weights", [str(file) for file in files])
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("update_weights: vLLM did not drop its prefix cache; stale keys and values remain")
        self.policy_version = policy_version

    def forget_drafts(self) -> None:
        """Drop what a history drafter (suffix) remembers of earlier responses."""
        self._rpc("rollout_spec_forget_drafts")

    # -- the rest

    def metrics(self) -> dict[str, float]:
        """Counters since start under vLLM's and verl's names, and the controller's own (`rollout_spec/...`)."""
        status = json.loads(self._status.read_text()) if self._status.exists() else None
        return worker_metrics(self._engine.get_metrics(), status)

    def close(self) -> None:
        """Stop the engine and free its memory. Idempotent."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(
        self,
        request_id: str,
        index: int,
        sample: int,
        token_ids: list[int],
        sampling: SamplingConfig,
        length: int | None,
    ) -> None:
        request = _Request(index, sample, token_ids, request_id, self.policy_version)
        try:
            params = vllm_requests.sampling_params(sampling, length)
            internal = self._engine.add_request(request_id, vllm_requests.engine_input(token_ids), params)
        except vllm_requests.refusals() as error:  # the others must not suffer
            self._finished[request_id] = self._rollout(request, [], None, "error", str(error))
            return
        # Older vLLM returns nothing here and keeps our id.
        self._requests[request_id] = replace(request, internal_id=internal or request_id)

    def _finish(self, output: Any) -> None:
        request = self._requests.pop(output.request_id, None)
        if request is None:  # aborted while its last step ran
            return
        completion = output.outputs[0]
        reason = completion.finish_reason or "error"
        if reason in ("stop", "length"):
            self._lengths.finished(prompt_key(request.prompt_token_ids), len(completion.token_ids))
        self._finished[output.request_id] = self._rollout(
            request,
            list(completion.token_ids),
            vllm_requests.sampled_logprobs(completion.logprobs),
            reason,
            error="vLLM reported an error for this request; see its log" if reason == "error" else None,
            speculation=vllm_requests.speculation_stats(completion),
        )

    @staticmethod
    def _rollout(
        request: _Request,
        token_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        error: str | None = None,
        speculation: vllm_requests.SpeculationStats | None = None,
    ) -> Rollout:
        return Rollout(
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            policy_version=request.policy_version,
            speculation=speculation,
            error=error,
        )

    def _collect(self, pending: dict[str, None]) -> list[Rollout]:
        done = [request_id for request_id in pending if request_id in self._finished]
        for request_id in done:
            del pending[request_id]
        return [self._finished.pop(request_id) for request_id in done]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        results: list[Any] = self._engine.collective_rpc(method, args=args)
        return results

    def _check_sampler(self, arguments: dict[str, Any]) -> None:
        """The plug-in mended the CPU sampler where that is needed; a worker in which it did not must not speculate."""
        if "speculative_config" in arguments and not all(self._rpc("rollout_spec_sampler_ok")):
            self.close()
            raise ConfigError(
                "drafter: vLLM's rejection sampler on this CPU gives wrong samples with drafts at temperature > 0, and "
                "our plug-in's right kernel is not in force in the worker. Is VLLM_PLUGINS set without 'rollout_spec'?"
            )

    def _model_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of(safetensors_files(Path(self._model)))
