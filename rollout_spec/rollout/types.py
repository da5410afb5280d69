"""What a rollout is."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_spec.engine.requests import SpeculationStats

# vLLM's own words, and "error" for a request that vLLM refused or lost.
FINISH_REASONS = ("stop", "length", "abort", "error")


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
