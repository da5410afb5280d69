"""Requests in and results out of vLLM: sampling parameters, finished outputs, and what an aborted one had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_spec.config import SamplingConfig

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """One request's drafts, as vLLM counted them."""

    draft_steps: int
    """Verification steps that had at least one draft token."""
    draft_tokens: int
    accepted_tokens: int

    @property
    def acceptance_length(self) -> float | None:
        """vLLM's: 1 + accepted tokens / steps with a draft; None without drafts."""
        return 1 + self.accepted_tokens / self.draft_steps if self.draft_steps else None

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            self.draft_steps + other.draft_steps,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )


def sampling_params(sampling: SamplingConfig, output_tokens: int | None, begun: int = 0) -> SamplingParams:
    """vLLM's parameters for one sample; `output_tokens` imposes a length by masking end-of-sequence until then.

    begun: tokens of the response that are there already, as a part of vLLM's prompt.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=(output_tokens or sampling.max_tokens) - begun,
        min_tokens=output_tokens - begun if output_tokens else 0,
        logprobs=0 if sampling.logprobs else None,
        flat_logprobs=sampling.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def engine_input(token_ids: list[int], cache_salt: str) -> Any:
    """A prompt of token ids as the engine takes it; before vLLM had `tokens_input` a plain mapping did.

    Requests share cached prefixes with those of the same `cache_salt` only.
    """
    import vllm.inputs

    make = getattr(vllm.inputs, "tokens_input", dict)
    return make(prompt_token_ids=token_ids, cache_salt=cache_salt)


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it will not take: ValueError, and since 0.31 a class of its own."""
    import vllm.exceptions

    client_error = getattr(vllm.exceptions, "VLLMClientError", None)
    return (ValueError,) if client_error is None else (ValueError, client_error)


def sampled_logprobs(logprobs: Any) -> list[float] | None:
    """The sampled token's log-probability at each position; it is the first of each position's entries."""
    if logprobs is None:
        return None
    return [logprobs.logprobs[start] for start in logprobs.start_indices]


def speculation_stats(completion: Any) -> SpeculationStats | None:
    """From vLLM's per-request metrics, which are there since 0.31; None elsewhere or without a drafter."""
    metrics = getattr(completion, "spec_decode_metrics", None)
    if metrics is None:
        return None
    accepted = sum(j * count for j, count in enumerate(metrics.histogram))
    return SpeculationStats(sum(metrics.histogram), metrics.num_draft_tokens, accepted)


def partial_output(engine: LLMEngine, internal_id: str) -> tuple[list[int], list[float] | None]:
    """Tokens and log-probabilities of a running request. vLLM drops them when it aborts; we don't.

    There is no public call for it; the attributes are checked by the test of abort.
    """
    state = engine.output_processor.request_states.get(internal_id)
    if state is None or state.detokenizer is None:
        return [], None
    tokens = list(state.detokenizer.output_token_ids)
    logprobs = sampled_logprobs(state.logprobs_processor.logprobs) if state.logprobs_processor else None
    return tokens, logprobs


def num_tokens_so_far(engine: LLMEngine, internal_id: str) -> int:
    """Of a running request's response; see `partial_output`."""
    state = engine.output_processor.request_states.get(internal_id)
    return 0 if state is None or state.detokenizer is None else len(state.detokenizer.output_token_ids)


def prompt_token_ids(tokenizer: Callable[[], Any], prompt: str | Sequence[Any]) -> list[int]:
    """Token ids of a prompt given as text, as chat messages (the model's template is applied) or as token ids.

    `tokenizer` is called only for the first two: an engine may run without one.
    """
    if isinstance(prompt, str):
        return list(tokenizer().encode(prompt))
    if not prompt or isinstance(prompt[0], int):
        return list(prompt)
    messages: list[Any] = list(prompt)
    return list(
        tokenizer().apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
