"""How many drafts are accepted: per draft position, with uncertainty, forgetting as the policy moves.

Two chains over the positions, of the sequences in steps that asked for K >= j: a share of those that have a
draft token at j-1 also has one at j (an n-gram drafter may find none, or a short one), and a share of those whose
drafts up to j-1 were accepted has a token at j that is accepted. Being conditional on the position before, the
shares of steps with different K can be pooled; their running products give

    AL(K) = 1 + sum_{j<=K} P(first j accepted)        drafts(K) = sum_{j<=K} P(a token is drafted at j)

Positions never reached take the rate of the position before (geometric tail), held loosely. Old evidence fades; a
Page test on accepted tokens drops it at once when acceptance jumps (a stale or broken drafter, other requests).
"""

from __future__ import annotations

from collections.abc import Sequence

# Before any evidence a draft token is as likely accepted as not, worth this many observations.
PRIOR_RATE = 0.5
PRIOR_WEIGHT = 4.0
# What a profile measured is worth this many for the mean and none for the certainty: other prompts and weights may have
# been behind it, so it says where to begin and must not keep anybody from looking.
PROFILE_WEIGHT = 12.0
# Evidence fades over this many speculating steps: requests change as the batch drains ...
MEMORY_STEPS = 200.0
# ... and over this many sequence-steps: 1/sqrt(2000) is a 2 % error of a rate, and more memory only makes it slow.
MEMORY = 2000.0
# Without speculation old evidence fades over this many steps: what is not looked at grows uncertain.
MEMORY_IDLE = 500.0
# What fades does not fade to the prior but to the long run, which forgets over this many sequence-steps and counts
# for at most PRIOR_WEIGHT observations beside fresh ones.
LONG_RUN = 20_000.0
# What the evidence is worth at most, in sequence-steps, after new weights (6 % error of a rate), after a new
# draft head (17 %), and after a jump.
KEEP_POLICY = 60.0
# ... and after a refill: the long tail that was last looked at is easier to draft than a response's beginning.
KEEP_REFILL = 16.0
KEEP_DRAFT = 8.0
KEEP_JUMP = 8.0
# Page's test: drift and threshold in deviations. A false alarm comes about every 10^4 steps, a collapse at batch
# 1 is seen in about ten, at batch 100 in one or two.
JUMP_DRIFT = 0.5
JUMP_THRESHOLD = 8.0
# One step's surprise counts for at most this much, so that no single step raises the alarm.
JUMP_MOST = 4.0


class Acceptance:
    """Decayed counts per draft position and what follows from them. Lists are [k_max] unless stated."""

    def __init__(self, k_max: int, profile: Sequence[float] = ()) -> None:
        """`profile`: P(first j accepted), j = 1 .., measured at another time; may be shorter than k_max, or empty."""
        self.k_max = k_max
        self.version = 0
        self.jumps = 0
        self._scale = 1.0  # all counts are stored divided by it, so that fading is one multiplication
        self._asked = [0.0] * k_max  # had drafts up to j-1 and were asked for j
        self._reached = [0.0] * k_max  # had drafts up to j-1 accepted and were asked for j
        self._drafted = [0.0] * k_max
        self._accepted = [0.0] * k_max
        self._long = [[0.0, 0.0] for _ in range(k_max)]  # long run: accepted, reached
        self._up = self._down = 0.0
        self._before: list[float] = []
        self._fresh = False
        self._told = [0.0] * k_max  # the profile's share of `_reached`
        before = 1.0
        for j, survival in enumerate(profile[:k_max]):
            rate = min(max(survival / before, 0.0), 1.0) if before > 0 else 0.0
            self._told[j] = self._reached[j] = PROFILE_WEIGHT
            self._accepted[j] = PROFILE_WEIGHT * rate
            before = survival
        self._update()

    def observe(
        self,
        k: int,
        speculated: int,
        drafted: Sequence[int],
        accepted: Sequence[int],
        asked: Sequence[int] | None = None,
        reached: Sequence[int] | None = None,
    ) -> None:
        """Count one step; a step that asked for no drafts only lets old evidence fade.

        With uneven budgets, `asked` and `reached` say how many sequences were asked for position j, and how many of
        those had all drafts before it accepted; by default all were asked for K.
        """
        if not k or not speculated:
            self._decay(1.0 - 1.0 / MEMORY_IDLE)
            return
        if asked is None or reached is None:
            self._test(k, speculated, sum(accepted[:k]))
            asked = [speculated, *drafted[: k - 1]]
            reached = [speculated, *accepted[: k - 1]]
        self._decay(1.0 - max(1.0 / MEMORY_STEPS, min(0.9, speculated / MEMORY)))
        unit = 1.0 / self._scale
        for j in range(k):
            self._asked[j] += asked[j] * unit
            self._reached[j] += reached[j] * unit
            self._drafted[j] += drafted[j] * unit
            self._accepted[j] += accepted[j] * unit
            long = self._long[j]
            long[0] += accepted[j]
            long[1] += reached[j]
            if long[1] > LONG_RUN:
                long[0] *= 0.5
                long[1] *= 0.5
        self._fresh = False

    def policy_updated(self) -> None:
        """New weights: what was accepted under the old ones is a hint."""
        self._new_version(KEEP_POLICY)

    def draft_refreshed(self) -> None:
        """A new draft head: what the old one achieved is hardly a hint."""
        self._new_version(KEEP_DRAFT)

    def refilled(self) -> None:
        """Other requests: recent evidence is a hint, the long run stays."""
        self._fade(KEEP_REFILL)

    def length(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of AL(K), each [k_max + 1], for K = 0 .. k_max (tokens a step)."""
        self._update()
        return self._mean, self._sd

    def drafts(self) -> list[float]:
        """Expected draft tokens a sequence for K = 0 .. k_max, [k_max + 1]."""
        self._update()
        return self._tokens

    def rates(self) -> list[float]:
        """P(first j accepted) for j = 1 .. k_max."""
        self._update()
        return [after - before for before, after in zip(self._mean, self._mean[1:], strict=False)]

    def per_token(self) -> float:
        """P(one more token accepted | those before it were), pooled over positions; no draft counts as none."""
        hits, tries = sum(self._accepted) * self._scale, sum(self._reached) * self._scale
        return (hits + PRIOR_WEIGHT * PRIOR_RATE) / (tries + PRIOR_WEIGHT)

    def evidence(self) -> float:
        """Decayed number of sequence-steps behind the first position."""
        return (self._reached[0] - self._told[0]) * self._scale

    def previous(self) -> list[float]:
        """AL(K) for K = 0 .. k_max as it stood when the weights last changed; empty before that."""
        return self._before

    def _new_version(self, keep: float) -> None:
        self.version += 1
        self._before = list(self.length()[0])
        self._limit(keep)

    def _limit(self, most: float) -> None:
        """Keep no more than `most` sequence-steps of evidence, recent or of the long run, at any position."""
        for long in self._long:
            keep = min(1.0, most / max(long[1], 1e-9))
            long[0] *= keep
            long[1] *= keep
        self._fade(most)

    def _fade(self, most: float) -> None:
        """Keep no more than `most` sequence-steps of recent evidence, at any position."""
        for j in range(self.k_max):
            for counts, total in ((self._drafted, self._asked), (self._accepted, self._reached)):
                keep = min(1.0, most / max(total[j] * self._scale, 1e-9))
                counts[j] *= keep
                total[j] *= keep
            self._told[j] *= keep
        self._up = self._down = 0.0
        self._fresh = False

    def _decay(self, keep: float) -> None:
        self._scale *= keep
        self._fresh = False
        if self._scale < 1e-9:
            for counts in (self._asked, self._reached, self._drafted, self._accepted, self._told):
                counts[:] = [count * self._scale for count in counts]
            self._scale = 1.0

    def _test(self, k: int, speculated: int, accepted: int) -> None:
        """Page's two-sided test of accepted tokens a sequence against what was expected (as of the last update)."""
        expected = self._mean[k] - 1.0
        spread = max(self._spread[k], 0.02) * (1.0 / speculated + 1.0 / (self.evidence() + PRIOR_WEIGHT))
        z = (accepted / speculated - expected) / spread**0.5
        z = min(max(z, -JUMP_MOST), JUMP_MOST)
        self._up = max(0.0, self._up + z - JUMP_DRIFT)
        self._down = max(0.0, self._down - z - JUMP_DRIFT)
        if self._up > JUMP_THRESHOLD or self._down > JUMP_THRESHOLD:
            self.jumps += 1
            self._limit(KEEP_JUMP)

    def _update(self) -> None:
        if self._fresh:
            return
        scale = self._scale
        mean, sd, tokens, spread = [1.0], [0.0], [0.0], [0.0]
        prior_accept, prior_draft = PRIOR_RATE, 1.0
        present, survive, relative, deviation, square = 1.0, 1.0, 0.0, 0.0, 0.0
        length, drafts = 1.0, 0.0
        for j in range(self.k_max):
            draft = (self._drafted[j] * scale + PRIOR_WEIGHT * prior_draft) / (self._asked[j] * scale + PRIOR_WEIGHT)
            weight = self._reached[j] * scale + PRIOR_WEIGHT
            hits, tries = self._long[j]
            prior_accept = (hits + PRIOR_WEIGHT * prior_accept) / (tries + PRIOR_WEIGHT)
            # An engine whose counts disagree must not make it more than certain.
            accept = min((self._accepted[j] * scale + PRIOR_WEIGHT * prior_accept) / weight, 1.0)
            present *= draft
            drafts += present
            tokens.append(drafts)
            survive *= accept
            length += survive
            mean.append(length)
            # Delta method: relative variances of the factors of a product add up; neighbouring positions share
            # their factors, so their errors are nearly one and deviations add.
            relative += (1.0 - accept) / (max(accept, 1e-3) * (weight - self._told[j] * scale))
            deviation += survive * relative**0.5
            sd.append(deviation)
            # Variance of accepted tokens of one sequence: E[a^2] = sum (2j - 1) P(first j accepted).
            square += (2 * j + 1) * survive
            spread.append(square - (length - 1.0) ** 2)
            prior_accept, prior_draft = accept, draft
        self._mean, self._sd, self._tokens, self._spread = mean, sd, tokens, spread
        self._fresh = True
