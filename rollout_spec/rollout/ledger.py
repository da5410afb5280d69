"""The requests a worker has in its engine, and the rollouts that wait to be taken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_spec.control.makespan import Lengths, longest_first, prompt_key
from rollout_spec.engine import requests as vllm_requests
from rollout_spec.rollout.types import Rollout, Span
from rollout_spec.rollout.versions import Versions, extend


@dataclass(frozen=True, slots=True)
class Request:
    """One sample, while it runs. Its spans grow when weights change meanwhile."""

    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    internal_id: str  # vLLM's
    params: Any  # vLLM's SamplingParams
    spans: tuple[Span, ...]
    begun: Rollout | None = None
    """What was there of it when it was queued; its tokens are then a part of vLLM's prompt."""

    @property
    def num_begun(self) -> int:
        """Tokens."""
        return len(self.begun.token_ids) if self.begun else 0

    def queued(self, engine: Any, request_id: str, versions: Versions) -> Request:
        """Itself, in vLLM's queue. Raises what vLLM raises for a request that it will not take."""
        token_ids = self.prompt_token_ids + (self.begun.token_ids if self.begun else [])
        prompt = vllm_requests.engine_input(token_ids, versions.cache_salt)
        # Older vLLM returns nothing here and keeps our id.
        return replace(self, internal_id=engine.add_request(request_id, prompt, self.params) or request_id)

    def rollout(
        self,
        token_ids: list[int],
        logprobs: list[float] | None,
        finish_reason: str,
        error: str | None = None,
        speculation: vllm_requests.SpeculationStats | None = None,
    ) -> Rollout:
        """It as it ends; `token_ids` and the rest are of what was made since it was queued."""
        if self.begun is not None:
            both = self.begun.logprobs is not None and logprobs is not None
            logprobs = [*(self.begun.logprobs or []), *(logprobs or [])] if both else None
            token_ids = self.begun.token_ids + token_ids
            parts = [part for part in (self.begun.speculation, speculation) if part is not None]
            speculation = sum(parts[1:], parts[0]) if parts else None
        # A change after the last token made none of them.
        spans = tuple(span for span in self.spans if span.start < len(token_ids)) or self.spans[:1]
        return Rollout(
            prompt_index=self.prompt_index,
            sample_index=self.sample_index,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            policy_version=spans[-1].policy_version,
            speculation=speculation,
            error=error,
            spans=spans,
        )


class Ledger:
    """By request id. Whoever changes it holds the worker's lock."""

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.finished: dict[str, Rollout] = {}
        self._lengths = Lengths()

    def order(self, prompts: list[list[int]], n: int, room: int) -> Sequence[int]:
        """Indices of `prompts` in the order to queue them; as they came if all fit in `room` sequences."""
        if n * len(prompts) + len(self.running) <= room:
            return range(len(prompts))
        return longest_first([prompt_key(prompt) for prompt in prompts], self._lengths)

    def finish(self, output: Any) -> None:
        """vLLM's output of a request that has ended."""
        request = self.running.pop(output.request_id, None)
        if request is None:  # aborted while its last step ran
            return
        completion = output.outputs[0]
        reason = completion.finish_reason or "error"
        if reason in ("stop", "length"):
            length = request.num_begun + len(completion.token_ids)
            self._lengths.finished(prompt_key(request.prompt_token_ids), length)
        self.finished[output.request_id] = request.rollout(
            list(completion.token_ids),
            vllm_requests.sampled_logprobs(completion.logprobs),
            reason,
            error="vLLM reported an error for this request; see its log" if reason == "error" else None,
            speculation=vllm_requests.speculation_stats(completion),
        )

    def abort(self, engine: Any, request_ids: Iterable[str]) -> list[Rollout]:
        """End requests in the engine; they keep the tokens they have."""
        ids = [request_id for request_id in request_ids if request_id in self.running]
        aborted = []
        for request_id in ids:
            request = self.running.pop(request_id)
            tokens, logprobs = vllm_requests.partial_output(engine, request.internal_id)
            self.finished[request_id] = request.rollout(tokens, logprobs, "abort")
            aborted.append(self.finished[request_id])
        if ids:
            engine.abort_request(ids)
        return aborted

    def changed(self, engine: Any, versions: Versions) -> None:
        """Other weights are in the engine: tokens from here on are theirs."""
        for request_id, request in self.running.items():
            made = request.num_begun + vllm_requests.num_tokens_so_far(engine, request.internal_id)
            spans = extend(request.spans, versions.span(made))
            self.running[request_id] = replace(request, spans=spans)

    def restart_unbegun(self, engine: Any, versions: Versions) -> None:
        """Queue anew what has no token yet: all of it is to be the new policy's, the cache of its prompt too."""
        for request_id, request in self.running.items():
            if request.spans[-1] == versions.span(request.num_begun):
                engine.abort_request([request_id])
                self.running[request_id] = request.queued(engine, request_id, versions)

    def tokens_so_far(self, engine: Any) -> dict[str, int]:
        """Length of each response that runs, by request id."""
        return {
            request_id: request.num_begun + vllm_requests.num_tokens_so_far(engine, request.internal_id)
            for request_id, request in self.running.items()
        }

    def collect(self, pending: dict[str, None]) -> list[Rollout]:
        """What of `pending` has finished; both forget it."""
        done = [request_id for request_id in pending if request_id in self.finished]
        for request_id in done:
            del pending[request_id]
        return [self.finished.pop(request_id) for request_id in done]

    def drop(self, pending: Iterable[str]) -> None:
        for request_id in pending:
            self.finished.pop(request_id, None)
