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
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from rollout_spec.config import Config, ConfigError, SamplingConfig
from rollout_spec.engine import requests as vllm_requests
from rollout_spec.engine.control_loop import SETTINGS_KEY
from rollout_spec.engine.guarded import collective_rpc
from rollout_spec.engine.launch import engine_arguments, make_engine
from rollout_spec.rollout.ledger import Ledger, Request
from rollout_spec.rollout.metrics import worker_metrics
from rollout_spec.rollout.resident import Mode, Resident
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.update import LOAD_TIMEOUT, WeightSync
from rollout_spec.rollout.weights import Weights

logger = logging.getLogger("vllm.rollout_spec")

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class RolloutWorker:
    """Owns an engine. Streams may be interleaved; calls come from one thread or one event loop at a time."""

    def __init__(
        self, config: Config, *, arguments: dict[str, Any] | None = None, stat_loggers: list[Any] | None = None
    ) -> None:
        """Start the engine that `config` describes. `arguments` replaces the engine arguments made from it.

        Raises ConfigError before anything is loaded when vLLM refuses the configuration.
        """
        self.config = config
        self._folder = tempfile.TemporaryDirectory(prefix="rollout_spec_")
        self._status = Path(self._folder.name) / "status.json"
        draft_file = Path(self._folder.name) / "draft_version.json"
        if arguments is None:
            arguments = engine_arguments(config, drafter=config.drafter, policy=config.policy)
        settings = arguments.get("additional_config", {}).get(SETTINGS_KEY)
        if settings is not None:
            settings["status_file"] = str(self._status)
            settings["draft_file"] = str(draft_file)
        self._engine = make_engine(config, arguments, stat_loggers)
        self._ledger = Ledger()
        sync = WeightSync(self._rpc, arguments, Path(self._folder.name))
        self._resident = Resident(self._engine, self._ledger, sync, draft_file, config.engine.in_process)
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
                yield from self._ledger.collect(pending)
                if pending:
                    self.step()
        finally:
            self.abort(pending)
            self._ledger.drop(pending)

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
                for rollout in self._ledger.collect(pending):
                    yield rollout
                if pending:
                    await asyncio.to_thread(self.step)
        finally:
            self.abort(pending)
            self._ledger.drop(pending)

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
        self._resident.require()
        with self._lock:
            order: Sequence[int] = range(len(prompts))
            if longest:
                order = self._ledger.order(tokenised, n, room=self.config.engine.max_num_seqs)
            first, self._next_id = self._next_id, self._next_id + n * len(prompts)
            ids = [f"rollout-{first + number}" for number in range(n * len(prompts))]
            for index in order:
                # A prompt's samples one after the other, so that they share its prefix.
                for sample in range(n):
                    length = output_tokens[index][sample] if output_tokens is not None else None
                    self._submit(ids[index * n + sample], index, sample, tokenised[index], sampling, length)
        return ids

    def step(self) -> None:
        """One engine step; finished rollouts wait for `take`. Does nothing when no request runs."""
        with self._lock:
            if not self._engine.has_unfinished_requests():
                return
            for output in self._engine.step():
                if output.finished:
                    self._ledger.finish(output)

    def take(self, request_id: str) -> Rollout | None:
        """The finished rollout of a request id, once; None while it runs."""
        return self._ledger.finished.pop(request_id, None)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[Rollout]:
        """Stop requests (None: all that run). They finish with reason "abort" and the tokens they have."""
        with self._lock:
            return self._ledger.abort(self._engine, list(self._ledger.running) if request_ids is None else request_ids)

    def resume(
        self,
        rollouts: Sequence[Rollout],
        sampling: SamplingConfig | None = None,
        output_tokens: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue what is missing of rollouts that were aborted, here or in another worker; returns request ids.

        The tokens so far are read again like a prompt, under the weights of now. The rollout that `take` gives is
        whole: all tokens, each with the log-probability and the span it was made with (without log-probabilities if a
        part has none). sampling.max_tokens and output_tokens [len(rollouts)] are of the whole response. Raises
        ConfigError for one that has ended already; nothing is queued then.
        """
        sampling = sampling or self.config.sampling
        if output_tokens is not None and len(output_tokens) != len(rollouts):
            raise ConfigError(f"output_tokens: must hold a length for each of the {len(rollouts)} rollouts")
        lengths: list[int | None] = [None] * len(rollouts) if output_tokens is None else list(output_tokens)
        for rollout, length in zip(rollouts, lengths, strict=True):
            most = length or sampling.max_tokens
            if rollout.finish_reason != "abort" or len(rollout.token_ids) >= most:
                raise ConfigError(
                    f"resume: a rollout of {len(rollout.token_ids)} tokens that ended with "
                    f"{rollout.finish_reason!r}: must be aborted, with fewer than {most} tokens"
                )
        self._resident.require()
        with self._lock:
            first, self._next_id = self._next_id, self._next_id + len(rollouts)
            ids = [f"rollout-{first + number}" for number in range(len(rollouts))]
            for request_id, rollout, length in zip(ids, rollouts, lengths, strict=True):
                at, prompt = (rollout.prompt_index, rollout.sample_index), rollout.prompt_token_ids
                self._submit(request_id, *at, prompt, sampling, length, rollout if rollout.token_ids else None)
        return ids

    def tokens_so_far(self) -> dict[str, int]:
        """Length of each response that runs or waits, by request id."""
        with self._lock:
            return self._ledger.tokens_so_far(self._engine)

    @property
    def num_unfinished(self) -> int:
        """Requests that run or wait."""
        return len(self._ledger.running)

    # -- weights

    @property
    def takes_in_flight(self) -> bool:
        """Weights can change while requests run."""
        return self._resident.takes_in_flight

    @property
    def policy_version(self) -> int:
        """Of the target's weights in the engine; 0 at the start."""
        return self._resident.versions.policy

    @property
    def draft_version(self) -> int:
        """Of the draft's weights in the engine; 0 at the start."""
        return self._resident.versions.draft

    def update_weights(
        self,
        weights: Weights | None = None,
        policy_version: int | None = None,
        *,
        draft: Weights | None = None,
        draft_version: int | None = None,
        mode: Mode = "drained",
    ) -> None:
        """Put new weights into the running engine: of the target, of the draft head or draft model, or of both at once.

        Each as named tensors, or as a folder (or file) of safetensors, complete and under the checkpoint's own names;
        a head without the layers that it shares with the target. All of it is in force afterwards or nothing is.
        Prefix caches are dropped with a new target. What happens to requests that run:

        - drained: none may run, RuntimeError otherwise.
        - abort_resume: vLLM preempts them: they keep their tokens, lose their cache, and go on as if prompt and
          tokens so far had been the prompt of the new policy.
        - in_flight: they go on at once; keys and values of their tokens so far stay those of the old policy.

        The last two need the engine in this process, with synchronous scheduling; `Rollout.spans` then says which
        version made which tokens. Raises ConfigError on weights that do not fit and UpdateFailed if a worker could
        not load them: versions and weights are then the old ones.
        """
        with self._lock:
            self._resident.update(weights, policy_version, draft, draft_version, mode)

    def refresh_draft(self, weights: Weights, draft_version: int) -> None:
        """Put a new draft head, or the weights of a draft model, into the engine; requests that run go on.

        What is sampled does not change, only how much of it is drafted rightly: keys and values that the old head
        left in the cache cost acceptance until the requests have ended. Otherwise as `update_weights`.
        """
        self.update_weights(draft=weights, draft_version=draft_version, mode="in_flight")

    def sleep(self, level: int = 1) -> None:
        """Free the engine's memory: level 1 keeps the weights in host memory, level 2 discards them.

        Raises RuntimeError where vLLM has no sleep mode (CPU), where it is off, or while requests run.
        """
        with self._lock:
            self._resident.sleep(level)

    def wake(self) -> None:
        """Wake the engine and `mend_weights`."""
        self._engine.wake_up()
        self.mend_weights()

    def mend_weights(self) -> bool:
        """Compare the weights in the workers with those loaded last; load the draft again if it is not that.

        vLLM leaves a draft unloaded after a level 2 sleep, without an error: acceptance falls to nothing. True if
        the draft was loaded again. Where the target's weights are gone, which level 2 means, generating raises
        RuntimeError until `update_weights` brings new ones.
        """
        with self._lock:
            return self._resident.mend()

    def forget_drafts(self) -> None:
        """Drop what a history drafter (suffix) remembers of earlier responses."""
        self._rpc("rollout_spec_forget_drafts")

    def remember_drafts(self, prompt_token_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Let a history drafter (suffix) draft from responses (token ids) to a prompt that were made elsewhere."""
        self._rpc("rollout_spec_remember_drafts", list(prompt_token_ids), [list(response) for response in responses])

    # -- the rest

    def controller_status(self) -> dict[str, Any] | None:
        """The controller's raw counters since start (`ControlLoop.status`), at most a second old while requests run.

        None without the plug-in.
        """
        status: dict[str, Any] | None = json.loads(self._status.read_text()) if self._status.exists() else None
        return status

    def metrics(self) -> dict[str, float]:
        """Counters since start under vLLM's and verl's names, and the controller's own (`rollout_spec/...`)."""
        return worker_metrics(self._engine.get_metrics(), self.controller_status()) | {
            "rollout/policy_version": float(self.policy_version),
            "rollout/draft_version": float(self.draft_version),
            "rollout/weight_update_seconds": self._resident.update_seconds,
        }

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
        begun: Rollout | None = None,
    ) -> None:
        versions = self._resident.versions
        spans = versions.resumed(begun.spans, len(begun.token_ids)) if begun else (versions.span(0),)
        running = Request(index, sample, token_ids, request_id, None, spans, begun)
        try:
            params = vllm_requests.sampling_params(sampling, length, running.num_begun)
            running = replace(running, params=params)
            self._ledger.running[request_id] = running.queued(self._engine, request_id, versions)
        except vllm_requests.refusals() as error:  # the others must not suffer
            self._ledger.finished[request_id] = running.rollout([], None, "error", str(error))

    def _rpc(self, method: Any, *args: Any) -> list[Any]:
        return collective_rpc(self._engine, method, args, LOAD_TIMEOUT)

    def _check_sampler(self, arguments: dict[str, Any]) -> None:
        """The plug-in mended the CPU sampler where that is needed; a worker in which it did not must not speculate."""
        if "speculative_config" in arguments and not all(self._rpc("rollout_spec_sampler_ok")):
            self.close()
            raise ConfigError(
                "drafter: vLLM's rejection sampler on this CPU gives wrong samples with drafts at temperature > 0, and "
                "our plug-in's right kernel is not in force in the worker. Is VLLM_PLUGINS set without 'rollout_spec'?"
            )
