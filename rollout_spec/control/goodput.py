"""Goodput: the K with the most expected tokens a second, from live acceptance and step times.

    goodput(B, K, c) = B * AL(K) / T(B, K, c)

TurboSpec (arXiv 2406.14066) introduced the measure for speculation; the form AL / ITL and the remark that best K
need not fall with B are from seed 002 (hardware-aware dynamic speculative decoding, Cohere). Ours adds what an
on-line choice needs: both factors carry their uncertainty, a change must pay beyond the noise of step times, a K
that may be better is tried when that is worth its price, and speculation that measurably loses is vetoed. When nothing
waits, tokens count by what they are worth for the end of the rollout (`worth`).
"""

from __future__ import annotations

from rollout_spec.control.acceptance import Acceptance
from rollout_spec.control.cells import ROWS, bucket
from rollout_spec.control.cost import StepTime
from rollout_spec.control.guard import Guard
from rollout_spec.control.policy import Decision, StepResult, StepView
from rollout_spec.control.step_times import StepTimes
from rollout_spec.control.trials import Trials
from rollout_spec.control.worth import Worth

# A change of K must promise this share of the noise of a step time, within these bounds: no flapping at a
# threshold, and below the lower one model error decides and not the gain.
HYSTERESIS_NOISE = 0.2
HYSTERESIS_RANGE = (0.003, 0.03)
# With little changed in the batch a decision stands for this many steps: choosing costs more than keeping. In a wide
# batch for more, and for most where the choice before came to the same K and no other is near; a jump of acceptance or
# of step times ends it.
KEEP_STEPS, KEEP_STEPS_WIDE, KEEP_STEPS_SETTLED = 4, 16, 64
# From this batch on like steps are learned from together, so many at once, and decisions stand for longer: steps
# are long there and tell much, and both cost as much as for one step.
HOLD_BATCH, HOLD_STEPS = 48, 8
# There, what single requests had accepted is asked for at one step in this many, for it costs as much as a choice; and
# after a refill, with requests that nothing is known of, at each of so many steps, with a choice as often as in a small
# batch.
ASK_EVERY, ASK_FIRST = 8, 24
# There, what tokens are worth is reckoned anew at one choice in this many, and the tilt towards some K kept between.
TILT_EVERY = 4
# Trials are thought about at every so many choices, and at the first ones: it costs several times a choice.
TRIAL_EVERY = 4
# A trial ends early when the batch moved by more than one part in this many: what was to be learned is gone.
TRIAL_MOVE = 4
# More than this many times as many sequences, and as many on top: a new rollout began.
REFILL = 2
# Slow start: where no longer draft than K was measured at about this batch, none longer than this times K, plus 1,
# is tried: one step of a long draft in a full batch can cost ten.
SLOW_START = 2
# After new weights a request's own record keeps this share; after a jump of acceptance, none.
FADE = 0.3
# Above this K only every fourth or so is considered: their acceptance hardly differs.
DENSE_K = 8


class Goodput:
    """argmax over K of expected tokens a second. One engine's state; not thread-safe."""

    def __init__(self, k_max: int, prior: StepTimes | None = None) -> None:
        self.k_max = k_max
        # Above temperature 0 and at it: validation must not be taken for a change of what training has accepted.
        self._laws = tuple(Acceptance(k_max, prior.acceptance if prior is not None else ()) for _ in range(2))
        self._greedy = False
        self.acceptance = self._laws[False]
        self.cost = StepTime(k_max, prior)
        self.guard = Guard()
        self.trials = Trials()
        self.worth = Worth()
        self.candidates = considered(k_max)
        self._limit = [1] * ROWS
        self._current = Decision(0, "nothing measured")
        self._by_k = [Decision(k, "goodput") for k in range(k_max + 1)]
        self._decode = -1
        self._age = 0
        self._clear = False  # the last choice
        self._choices = 0
        self._trial: list[Decision] = []
        self._held: list[StepResult] = []
        self._reference = 0.0
        self._expected_gain = 1.0
        self._tilt = [1.0] * (k_max + 1)
        self._steps = 0
        self._fresh = float(ASK_FIRST)

    @property
    def wants_requests(self) -> bool:
        if self._decode < HOLD_BATCH or self._fresh > 0 or self._steps % ASK_EVERY == 0:
            return True
        return self._age >= self._keep and self._tilts  # the next step is one to choose at

    @property
    def _keep(self) -> int:
        """For how many steps a choice stands."""
        if self._decode < HOLD_BATCH or self._fresh > 0:
            return KEEP_STEPS
        return KEEP_STEPS_SETTLED if self._clear else KEEP_STEPS_WIDE

    @property
    def _tilts(self) -> bool:
        return self._decode < HOLD_BATCH or self._fresh > 0 or self._choices % TILT_EVERY == 0

    def decide(self, view: StepView) -> Decision:
        self._steps += 1
        if view.greedy != self._greedy and view.decode:
            self._switch(view.greedy)
        moved = abs(view.decode - self._decode)
        if self._trial and not self.cost.news and moved * TRIAL_MOVE <= self._decode:
            return self._trial.pop()
        if not view.decode or not self.cost.known:
            return self._current
        if self._decode and view.decode >= REFILL * self._decode + REFILL:
            self.acceptance.refilled()
            self._fresh = float(ASK_FIRST)
        self._age += 1
        if self._age <= self._keep and moved * 32 <= self._decode and not self.cost.news:
            return self._current
        self._release()
        self._decode, self._age, self.cost.news = view.decode, 0, False
        self._trial.clear()
        return self._choose(view)

    def observe(self, result: StepResult) -> None:
        self._fresh -= 1.0 if result.requests else 0.25
        if result.requests:
            self.worth.rates.observe(result.requests)
        if result.decode >= HOLD_BATCH and self._settled(result):
            self._hold(result)
        else:
            self._release()
            self._learn(result, 1)

    def _settled(self, result: StepResult) -> bool:
        """Only what is known can wait: a trial or a new K must be learned from before the next step is made."""
        k = result.k
        if k != result.k_next or k != self._current.k or self._trial:
            return False
        return self.cost.cells.seen[bucket(result.decode)][k] >= HOLD_STEPS

    def _hold(self, result: StepResult) -> None:
        """Gather like steps and learn from them at once."""
        held = self._held
        if held and (
            result.k != held[0].k
            or result.k_next != held[0].k_next
            or result.decode != held[0].decode
            or result.greedy != held[0].greedy
            or result.prefill_tokens
            or result.requests is not None
        ):
            self._release()
        held.append(result)
        if len(held) >= HOLD_STEPS or result.prefill_tokens or result.requests is not None:
            self._release()

    def _release(self) -> None:
        held = self._held
        if not held:
            return
        first, count = held[0], len(held)
        if count > 1:
            first = StepResult(
                seconds=sum(one.seconds for one in held) / count,
                decode=first.decode,
                prefill_tokens=first.prefill_tokens,
                k=first.k,
                k_next=first.k_next,
                drafted=[sum(at) for at in zip(*(one.drafted for one in held), strict=True)],
                accepted=[sum(at) for at in zip(*(one.accepted for one in held), strict=True)],
                speculated=first.speculated * count,
                context_tokens=first.context_tokens,
                requests=first.requests,
                greedy=first.greedy,
            )
        held.clear()
        self._learn(first, count)

    def _learn(self, result: StepResult, count: int) -> None:
        """From `count` like steps: `seconds` is their mean, drafts and acceptances are their sums."""
        self._count(self._laws[result.greedy], result)
        self.cost.observe(result, round(sum(result.drafted) / count))
        if not result.decode or result.prefill_tokens:
            return
        gained, row = 0.0, bucket(result.decode)
        if self._reference:
            tokens = 1.0 + sum(result.accepted) / (result.decode * count)
            self.guard.observe(row, result.k, result.k_next, result.seconds, tokens, self._reference)
            if result.k or result.k_next:
                gained = tokens * self._reference - result.seconds
        self.trials.observe(result.seconds, result.k, gained, count)

    def _count(self, acceptance: Acceptance, result: StepResult) -> None:
        jumps = acceptance.jumps
        acceptance.observe(result.k, result.speculated, result.drafted, result.accepted)
        if acceptance.jumps > jumps:
            self._forget(0.0)

    def _forget(self, keep: float) -> None:
        """Of each request's own record only the share `keep` still holds: choose at once, and often for a while."""
        self.worth.rates.fade(keep)
        self._fresh, self._age = float(ASK_FIRST), KEEP_STEPS_SETTLED

    def _switch(self, greedy: bool) -> None:
        """Other sampling, other acceptance: choose by what is known of it."""
        self._greedy, self.acceptance = greedy, self._laws[greedy]
        self._age = KEEP_STEPS_SETTLED
        self._trial.clear()

    def policy_updated(self) -> None:
        """New weights: what was accepted under the old ones counts for less."""
        for law in self._laws:
            law.policy_updated()
        self._forget(FADE)

    def draft_refreshed(self) -> None:
        """A new draft head: what the old one achieved counts for little."""
        for law in self._laws:
            law.draft_refreshed()
        self._forget(0.0)

    def metrics(self) -> dict[str, float]:
        lengths, sd = self.acceptance.length()
        speedup, spread = self.guard.speedup()
        k = self._current.k
        return {
            "expected_acceptance_length": lengths[k],
            "expected_acceptance_length_sd": sd[k],
            "expected_speedup": self._expected_gain,
            "effective_speedup": speedup,
            "effective_speedup_sd": spread,
            "vetoes": float(self.guard.vetoes),
            "acceptance_jumps": float(sum(law.jumps for law in self._laws)),
            "policy_version": float(self.acceptance.version),
            "step_time_noise": self.cost.noise,
            "trial_seconds": self.trials.spent,
        }

    def _choose(self, view: StepView) -> Decision:
        decode = view.decode
        length, length_sd = self.acceptance.length()
        drafts = self.acceptance.drafts()
        seconds = self.cost.seconds(decode, drafts, view.context_tokens)
        goodput = [tokens / time for tokens, time in zip(length, seconds, strict=True)]
        if view.requests and self._tilts:
            ahead = max(1, max(self.candidates, key=goodput.__getitem__))
            worth = self.worth.of(view, ahead, self.acceptance, self.cost).length()
            self._tilt = [w / n for w, n in zip(worth.tolist(), length, strict=True)]
        goodput = [plain * tilt for plain, tilt in zip(goodput, self._tilt, strict=True)]
        self._reference = seconds[0]
        now = self._current.k
        candidates = self._allowed(decode)
        best = max(candidates, key=goodput.__getitem__)
        low, high = HYSTERESIS_RANGE
        margin = 1.0 + min(max(HYSTERESIS_NOISE * self.cost.noise, low), high)
        if best and goodput[best] < goodput[0] * margin:
            best = 0
        elif best and now and goodput[best] < goodput[now] * margin:
            best = now
        vetoed = best > 0 and self.guard.vetoed(bucket(decode))
        if vetoed:
            best = 0
        self._expected_gain = goodput[best] / goodput[0]
        near = goodput[best] / (1.0 + high)
        self._clear = best == now and not any(goodput[k] > near for k in candidates if k != best)
        self._current = Decision(0, "vetoed") if vetoed else self._by_k[best]
        self._choices += 1
        # Of a step that computes prompts nothing is learned.
        if vetoed or view.prefill_tokens or (self._choices > TRIAL_EVERY and self._choices % TRIAL_EVERY):
            return self._current
        gain = [value / goodput[best] - 1.0 for value in goodput]
        doubt = self.cost.deviation(decode, drafts, view.context_tokens, best)
        own = length_sd[best] / length[best]
        sd = [
            (t * t + (s / n - own) ** 2) ** 0.5 * n_t
            for t, s, n, n_t in zip(doubt, length_sd, length, (1.0 + g for g in gain), strict=True)
        ]
        seen = self.cost.cells.seen[bucket(decode)]
        trial = self.trials.propose(decode, view.waiting > 0, best, candidates, gain, sd, seconds, seen)
        if trial is None:
            return self._current
        decision = Decision(trial.k, trial.reason)
        self._trial = [decision] * (trial.steps - 1)
        return decision

    def _allowed(self, decode: int) -> list[int]:
        """The K to choose from: slow start, and with the allowance spent only what was measured before."""
        row, cells = bucket(decode), self.cost.cells
        if self.trials.exhausted:
            return [k for k in self.candidates if k == 0 or cells.measured(row, k)]
        if self._limit[row] < self.k_max:
            self._limit[row] = max(self._limit[row], SLOW_START * cells.longest_measured(row) + 1)
            return [k for k in self.candidates if k <= self._limit[row]]
        return self.candidates


def considered(k_max: int) -> list[int]:
    """The K that are considered: all of a short range, and of a long one ever fewer."""
    ks = list(range(min(k_max, DENSE_K) + 1))
    while ks[-1] < k_max:
        ks.append(min(k_max, ks[-1] + max(1, ks[-1] // 4)))
    return ks
