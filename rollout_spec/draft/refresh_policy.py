"""Whether to train the draft head anew: from what rollouts measured, in seconds of rollout.

Acceptance is compared at the depth that every rollout since the last refresh has drafted, since K moves. What a rollout
loses to a stale head is the time it speculates (as much of it as the best rollout since the refresh did: a controller
that gave a stale head up must not look like one that needs none) times the share of acceptance length that is gone.
A refreshed head is expected to lose as much again over as many rollouts, half of it on average: so a refresh gains
rollouts since the last one x loss / 2. That is compared with what it costs. If the loss grows evenly, this is the
interval with the least loss and cost together; if it comes at one blow, no more than twice of either is paid.

What no rollout shows is how much better a newer head would be: a policy that learns also gets easier to predict, so
that a stale head may lose nothing and yet be several per cent behind (`experiments/drift`). So a share of the time
goes to refreshes that nothing called for; one that brings no better head makes the next wait twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout_spec.config import RefreshConfig

# Verifications with a draft at a position, below which its rate is not used.
MIN_DRAFTS = 50
# Verifications of one response are alike: so many say as much as one independent one.
ALIKE = 2.0
# Standard errors taken off the best and added to the latest acceptance: the best of many is the best by chance, too.
DOUBT = 2.0


@dataclass(frozen=True, slots=True)
class RolloutSeen:
    """One rollout. By draft position: verifications that had a draft there, and that accepted it and all before."""

    seconds: float
    speculating_seconds: float
    """In steps with drafts."""
    tail_seconds: float
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RefreshView:
    rollouts: tuple[RolloutSeen, ...]
    """Since the head in the engine came there, in order."""
    updates: int
    """Of the policy since the last refresh began, failed ones too."""
    tokens: int
    """Gathered since then."""
    cost: float
    """Seconds of rollout that the last refresh cost; its limit where there was none."""
    failures: int = 0
    """Refreshes in a row that brought no better head."""
    elapsed: float = 0.0
    """Seconds since the last refresh ended, or since the start."""
    live: int = 0
    """Requests in the engine now, of `room`."""
    room: int = 1


@dataclass(frozen=True, slots=True)
class RefreshDecision:
    refresh: bool
    code: str
    """The reason in a word, to count."""
    reason: str
    gain: float = 0.0
    """Expected seconds of rollout until the next refresh, the cost not taken off."""
    acceptance: float = math.nan
    best: float = math.nan
    """Acceptance lengths of the latest and the best rollout, at the same depth; NaN: not measured."""


class RefreshPolicy(Protocol):
    def decide(self, view: RefreshView) -> RefreshDecision: ...


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance length at some depth, bonus token included, and its standard error."""

    length: float
    error: float


def depth_of(rollouts: Sequence[RolloutSeen]) -> int:
    """Draft positions that each of the rollouts tried often enough; 0 if one has not even the first."""
    return min((_depth(rollout) for rollout in rollouts), default=0)


def acceptance(rollout: RolloutSeen, depth: int) -> Acceptance:
    """Of its first `depth` positions, each drafted at least once.

    Verifications that draft deeper are among those that draft less deep, so the rates of positions i <= j have the
    covariance (S_j - S_i S_j) / n_i.
    """
    counts = rollout.drafted[:depth]
    survival = [accepted / drafted for accepted, drafted in zip(rollout.accepted, counts, strict=False)]
    variance = 0.0
    for j, deeper in enumerate(survival):
        for i, rate in enumerate(survival[: j + 1]):
            covariance = max(deeper - rate * deeper, 0.0) / max(counts[i], counts[j])
            variance += covariance if i == j else 2 * covariance
    return Acceptance(1 + sum(survival), math.sqrt(ALIKE * variance))


@dataclass(frozen=True, slots=True)
class Measured:
    """When the loss that rollouts show outweighs the cost, or when the cost is at most `trial_share` of the time since
    the last one; it is doubled for each refresh in a row that failed."""

    min_tokens: int
    trial_share: float = 0.0

    def decide(self, view: RefreshView) -> RefreshDecision:
        seen = [rollout for rollout in view.rollouts if _depth(rollout)]
        if len(seen) < 2:
            return RefreshDecision(False, "unmeasured", f"{len(seen)} rollouts with drafts since the last refresh")
        depth = depth_of(seen)
        lengths = [acceptance(rollout, depth) for rollout in seen]
        best = max(lengths, key=lambda each: each.length - DOUBT * each.error)
        now = lengths[-1]
        lost = (best.length - DOUBT * best.error) - (now.length + DOUBT * now.error)
        used = max(rollout.speculating_seconds / max(rollout.seconds, 1e-9) for rollout in seen)
        per_rollout = used * seen[-1].seconds * max(lost, 0.0) / best.length
        gain = len(view.rollouts) * per_rollout / 2
        cost = view.cost * 2**view.failures
        said = (
            f"acceptance length {now.length:.2f} (best {best.length:.2f}, K={depth}) loses {per_rollout:.2f} s a "
            f"rollout; a refresh gains {gain:.1f} s and costs {cost:.1f} s"
        )
        code = "pays" if gain > cost else "fresh" if lost <= 0 else "cheap"
        if code != "pays" and self.trial_share and cost <= self.trial_share * view.elapsed:
            code, said = "trial", f"{said}, at most {self.trial_share:.0%} of {view.elapsed:.0f} s since the last one"
        refresh = code in ("pays", "trial")
        if refresh and view.tokens < self.min_tokens:
            refresh, code, said = False, "tokens", f"{said}; {_few(view.tokens, self.min_tokens)}"
        return RefreshDecision(refresh, code, said, gain, now.length, best.length)


@dataclass(frozen=True, slots=True)
class Every:
    """After each n updates."""

    n: int

    def decide(self, view: RefreshView) -> RefreshDecision:
        due = view.updates >= self.n
        return RefreshDecision(due, "due" if due else "not_due", f"{view.updates} of {self.n} updates")


@dataclass(frozen=True, slots=True)
class Drain:
    """In the tail of a rollout, when few requests leave cores idle."""

    share: float
    min_tokens: int

    def decide(self, view: RefreshView) -> RefreshDecision:
        said = f"{view.live} of {view.room} sequences run"
        if not 0 < view.live <= self.share * view.room:
            return RefreshDecision(False, "no_tail", said)
        if view.tokens < self.min_tokens:
            return RefreshDecision(False, "tokens", f"{said}; {_few(view.tokens, self.min_tokens)}")
        return RefreshDecision(True, "tail", said)


@dataclass(frozen=True, slots=True)
class Never:
    def decide(self, view: RefreshView) -> RefreshDecision:
        return RefreshDecision(False, "never", "refresh.policy is never")


def make_refresh_policy(options: RefreshConfig) -> RefreshPolicy:
    match options.policy:
        case "measured":
            return Measured(options.min_tokens, options.trial_share)
        case "every":
            return Every(options.every)
        case "drain":
            return Drain(options.drain_share, options.min_tokens)
        case "never":
            return Never()


def _depth(rollout: RolloutSeen) -> int:
    for position, count in enumerate(rollout.drafted):
        if count < MIN_DRAFTS:
            return position
    return len(rollout.drafted)


def _few(tokens: int, wanted: int) -> str:
    return f"only {tokens} of {wanted} tokens are gathered"
