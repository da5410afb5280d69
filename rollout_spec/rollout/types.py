"""What a rollout is."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_spec.engine.requests import SpeculationStats

# vLLM's own words, and "error" for a request that vLLM refused or lost.
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens from `start` up to the next span's start, made under these versions."""

    start: int
    """Index into the rollout's token_ids."""
    policy_version: int
    draft_version: int
    """Of the drafts made in these steps; the first step after a refresh verifies drafts that the old head made."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response."""

    prompt_index: int
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    """Of each token, under the policy that sampled it (after temperature, top-p and top-k)."""
    finish_reason: str
    policy_version: int
    """Of the last token; the only one unless weights changed while the request ran (see `spans`)."""
    speculation: SpeculationStats | None
    error: str | None = None
    """Why, if finish_reason is "error"."""
    spans: tuple[Span, ...] = ()
    """Which versions made which tokens, by start; more than one where weights changed while the request ran."""

    @property
    def policy_versions(self) -> list[int]:
        """The policy version of each token."""
        starts = [span.start for span in self.spans] + [len(self.token_ids)]
        return [
            span.policy_version
            for span, start, end in zip(self.spans, starts, starts[1:], strict=False)
            for _ in range(start, end)
        ]
