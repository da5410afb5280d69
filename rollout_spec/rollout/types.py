"""What a rollout is."""

from __future__ import annotations

from dataclasses import dataclass

# vLLM's own words, and "error" for a request that vLLM refused or lost.
FINISH_REASONS = ("stop", "length", "abort", "error")


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
    speculation: SpeculationStats | None
    error: str | None = None
    """Why, if finish_reason is "error"."""
