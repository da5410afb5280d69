"""What a policy sees, what it answers, and the protocol that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Deviation of the logarithm of what requests have still to go, as far as it decides who finishes last. Lengths scatter
# by about twice this; but to favour slow requests costs little where length decides, and not to, much where they do.
LENGTH_SD = 0.4


@dataclass(frozen=True, slots=True)
class StepView:
    """The engine just before K is chosen. Drafts made now are verified in the next step."""

    decode: int
    """Sequences that will decode in the next step; prefills are not among them."""
    waiting: int = 0
    """Requests queued behind them."""
    prefill_tokens: int = 0
    """Prompt tokens computed in this step."""
    sampling: bool = False
    """Some sequence samples (temperature > 0) on a sampler that is known to be wrong with drafts."""
    greedy: bool = False
    """All of those `decode` sequences are at temperature 0, where other drafts are accepted than above it."""
    context_tokens: int = 0
    """Context of those `decode` sequences, all together; 0 where the engine does not say."""
    requests: Sequence[str] = ()
    """Their ids; filled in only where the policy `wants_requests`."""
    remaining: Sequence[float] = ()
    """Tokens each of those is expected to generate still (`makespan.Lengths`); empty where nobody says."""
    remaining_sd: float = LENGTH_SD
    """Deviation of the logarithm of `remaining`, over the requests; 0 where the lengths are known exactly."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One finished engine step, in raw measurements."""

    seconds: float
    """Wall time from the end of the step before (from its own start after an idle engine)."""
    decode: int
    """Sequences that decoded in it."""
    prefill_tokens: int
    k: int
    """K that was asked for when the drafts verified in this step were made."""
    k_next: int
    """K of the drafts made in this step."""
    drafted: Sequence[int]
    """[k_max]: sequences that had a draft token at each position."""
    accepted: Sequence[int]
    """[k_max]: sequences whose draft token at each position was accepted."""
    speculated: int
    """Sequences that could have had drafts: those that were decoding when K was asked."""
    context_tokens: int = 0
    """Context of the sequences that decoded, all together; 0 where the engine does not say."""
    requests: Mapping[str, tuple[int, int]] | None = None
    """Draft tokens and accepted ones of each sequence that could have had drafts (0 and 0 if none were found); only
    where the policy `wants_requests`."""
    model_seconds: float = 0.0
    """Of `seconds`, from the schedule to the model's output (forward, sampling, drafting); the rest is host."""
    greedy: bool = False
    """All sequences that decoded in it are at temperature 0."""
    prefills: int = 0
    """Sequences whose prompt, or a part of it, was computed in it; they are not among `decode`."""

    @property
    def draft_tokens(self) -> int:
        return sum(self.drafted)


@dataclass(frozen=True, slots=True)
class Decision:
    """K for the batch; `per_request` lowers it for single requests (by vLLM request id)."""

    k: int
    reason: str = ""
    per_request: Mapping[str, int] | None = None


class Policy(Protocol):
    """Chooses K before each step and learns from each finished one. Holds no engine and no clock.

    A policy may have more, all found with `getattr`: `wants_requests` (fill in the request fields; may change
    from step to step), `policy_updated()` (new target weights), `draft_refreshed()` (a new draft head).
    """

    def decide(self, view: StepView) -> Decision: ...

    def observe(self, result: StepResult) -> None: ...

    def metrics(self) -> dict[str, float]: ...
