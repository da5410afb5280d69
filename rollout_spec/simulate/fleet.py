"""Rollouts on a fleet of replicas in simulated time: the engine's loop, with arithmetic in place of the model.

All replicas advance together, one step each, in arrays [replica, slot]; each has its own clock. As in vLLM, K chosen
at a step is drafted at its end and verified in the next; a request that arrives is prefilled in one step, gives its
first token there, and decodes from the next on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollout_spec.control.policy import LENGTH_SD, Decision, Policy, StepResult, StepView
from rollout_spec.control.tail import tail_seconds
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.simulate.step_model import StepModel, Work, steady

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Upper ends of the batch buckets of `Outcome.steps`: 1, 2, 4, ...
BUCKETS = 12
# Of the timeline at most this many points are kept.
POINTS = 400


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated. The same world and seed give the same rollout, whatever the policy does."""

    model: StepModel
    acceptance: AcceptanceCurve
    lengths: tuple[Ints, ...]
    """Response lengths in tokens, an array a rollout; submitted in this order."""
    max_num_seqs: int
    replicas: int = 1
    queue: Literal["static", "shared"] = "static"
    """Who serves a request: fixed beforehand, round robin, or whichever replica has room first."""
    arrivals: tuple[Floats, ...] | None = None
    """Seconds from the start of its rollout at which each request comes, ascending, an array a rollout; None: all at
    once."""
    prompt_tokens: int = 0
    noise: float = 0.0
    """Deviation of the logarithm of a step time."""
    hiccup_every: int = 0
    """A step in so many takes `hiccup_factor` times as long; 0: none."""
    hiccup_factor: float = 5.0
    speed_bias: Callable[[int, int], float] | None = None
    """(rollout, step) -> factor on all step times: a machine that throttles."""
    lengths_known: bool = False
    """Policies are told how much each request has still to generate, as if earlier epochs told exactly."""
    trainer_seconds: float = 0.0
    """After each rollout."""
    refresh_every: int = 0
    """Rollouts between refreshes of the drafter; 0: none. `acceptance.by_round` says what they achieve."""
    refresh_seconds: float = 0.0

    @property
    def k_max(self) -> int:
        return len(self.acceptance.survival)


@dataclass(slots=True)
class Outcome:
    """What came of it; seconds are simulated."""

    seconds: float = 0.0
    rollout_seconds: list[float] = field(default_factory=list)
    tail_seconds: list[float] = field(default_factory=list)
    """Of each rollout, as `control.tail` has it."""
    tokens: int = 0
    steps: Ints = field(default_factory=lambda: np.zeros((BUCKETS, 1), dtype=np.int64))
    """[batch bucket, K]: engine steps by what they drafted."""
    replica_steps: int = 0
    timeline: list[tuple[float, int, int]] = field(default_factory=list)
    """Of replica 0 in the last rollout: seconds, sequences that decode, K."""
    first_zero: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Oracle:
    """Knows the truth: the K with the most expected tokens a second at every step, free of doubt and of noise."""


def simulate(fleet: Fleet, policy: Callable[[], Policy] | Oracle, seed: int) -> Outcome:
    """Run all rollouts of `fleet`; `policy` makes one policy a replica, which it keeps over the rollouts."""
    policies = None if isinstance(policy, Oracle) else [policy() for _ in range(fleet.replicas)]
    outcome = Outcome(steps=np.zeros((BUCKETS, fleet.k_max + 1), dtype=np.int64))
    for number, lengths in enumerate(fleet.lengths):
        if number and policies is not None:
            refreshed = fleet.refresh_every and number % fleet.refresh_every == 0
            for each in policies:
                getattr(each, "draft_refreshed" if refreshed else "policy_updated", lambda: None)()
        rollout = _Rollout(fleet, policies, lengths, number, np.random.default_rng([seed, number]), outcome)
        makespan = rollout.run()
        outcome.rollout_seconds.append(makespan)
        outcome.tail_seconds.append(tail_seconds(np.concatenate(rollout.ends)) if rollout.ends else 0.0)
        outcome.seconds += makespan + fleet.trainer_seconds
        if fleet.refresh_every and (number + 1) % fleet.refresh_every == 0:
            outcome.seconds += fleet.refresh_seconds
    if policies is not None:
        outcome.metrics = dict(policies[0].metrics())
    return outcome


class _Rollout:
    """One rollout. Arrays are [row] or [row, slot]; a row is a replica that is not finished."""

    def __init__(
        self,
        fleet: Fleet,
        policies: list[Policy] | None,
        lengths: Ints,
        number: int,
        rng: np.random.Generator,
        outcome: Outcome,
    ) -> None:
        self.fleet, self.policies, self.number, self.outcome = fleet, policies, number, outcome
        # Lengths and powers belong to the request, other draws to the step: kept apart, so that every policy
        # meets the same requests.
        self.lengths = np.asarray(lengths)
        self.powers = fleet.acceptance.request_powers(len(lengths), rng)
        self.rng = rng
        rows, slots = fleet.replicas, min(fleet.max_num_seqs, max(1, len(lengths)))
        if fleet.queue == "static":
            slots = min(slots, -(-len(lengths) // rows))
        self.replica = np.arange(rows)
        self.clock = np.zeros(rows)
        self.last = np.zeros(rows)
        self.step = np.zeros(rows, dtype=np.int64)
        self.k = np.zeros(rows, dtype=np.int64)
        self.ident = np.full((rows, slots), -1, dtype=np.int64)
        self.remaining = np.zeros((rows, slots), dtype=np.int64)
        self.context = np.zeros((rows, slots), dtype=np.int64)
        self.power = np.ones((rows, slots))
        self.own_k = np.zeros((rows, slots), dtype=np.int64)
        order = list(range(len(lengths)))
        self.queues = [order[r::rows] for r in range(rows)] if fleet.queue == "static" else [order]
        for queue in self.queues:
            queue.reverse()
        self.waiting = len(order)
        self.arrival: Floats = np.zeros(len(order)) if fleet.arrivals is None else np.asarray(fleet.arrivals[number])
        self.zeros = (0,) * fleet.k_max
        self.ends: list[Floats] = []  # seconds at which requests ended

    def run(self) -> float:
        while True:
            live: Mask = self.ident >= 0
            if not self.waiting:
                busy: Mask = np.any(live, axis=1)
                if not busy.any():
                    return float(max(map(np.max, self.ends), default=0.0))
                width = int(live.sum(1).max())
                if busy.mean() < 0.7 or width <= 0.7 * live.shape[1]:
                    self._compact(busy, width)
                    live = self.ident >= 0
            if self.waiting and self.fleet.arrivals is not None:
                self._wait(live)
            rows = self._due(live)
            fresh = None
            if self.waiting:
                fresh = self._admit(rows)
                rows = rows[np.any(self.ident[rows] >= 0, axis=1)]
            if len(rows):
                self._advance(rows, fresh)

    def _wait(self, live: Mask) -> None:
        """Idle replicas sleep until their next request comes."""
        for row in np.flatnonzero(~live.any(1)).tolist():
            queue = self._queue(row)
            if queue:
                self.clock[row] = max(self.clock[row], self.arrival[queue[-1]])

    def _queue(self, row: int) -> list[int]:
        """Requests that this row may serve, the next one last."""
        return self.queues[0 if self.fleet.queue == "shared" else int(self.replica[row])]

    def _arrived(self, row: int) -> int:
        """How many of them have come and wait."""
        queue, now = self._queue(row), self.clock[row]
        if self.fleet.arrivals is None or not queue or self.arrival[queue[0]] <= now:
            return len(queue)
        return sum(self.arrival[request] <= now for request in queue)

    def _due(self, live: Mask) -> Ints:
        """Rows that step now: all, or while a shared queue holds requests those that start before others can end."""
        busy = live.any(1)
        if self.fleet.queue == "shared" and self.waiting:
            horizon = (self.clock + np.maximum(self.last, 1e-9)).min()
            return np.flatnonzero(self.clock <= horizon)
        if self.waiting:
            has_queue = np.array([bool(self.queues[r]) for r in self.replica.tolist()])
            return np.flatnonzero(busy | has_queue)
        return np.flatnonzero(busy)

    def _admit(self, rows: Ints) -> Mask:
        """Fill free slots from the queues, in order of the clocks; the mask of sequences that are new."""
        fresh = np.zeros(self.ident.shape, dtype=bool)
        for row in rows[np.argsort(self.clock[rows], kind="stable")].tolist():
            queue = self._queue(row)
            if not queue:
                continue
            for slot in np.flatnonzero(self.ident[row] < 0).tolist():
                if not queue or self.arrival[queue[-1]] > self.clock[row]:
                    break
                request = queue.pop()
                self.waiting -= 1
                self.ident[row, slot] = request
                self.remaining[row, slot] = self.lengths[request]
                self.context[row, slot] = self.fleet.prompt_tokens
                self.power[row, slot] = self.powers[request]
                self.own_k[row, slot] = 0
                fresh[row, slot] = True
        return fresh

    def _advance(self, rows: Ints, fresh: Mask | None) -> None:
        fleet = self.fleet
        everything = len(rows) == len(self.replica)
        take: Any = slice(None) if everything else rows
        live = self.ident[take] >= 0
        decodes = live if fresh is None else live & ~fresh[take]
        decode, scheduled = decodes.sum(1), live.sum(1)
        k, step = self.k[take].copy(), self.step[take]
        context = (self.context[take] * decodes).sum(1)
        asked = np.where(decodes, self.own_k[take], 0)
        prefill = (scheduled - decode) * fleet.prompt_tokens
        moment = fleet.acceptance.power(self.number, step)
        power = self.power[take] * moment[:, None]
        if len(fleet.acceptance.by_position) > 1:
            power = power * fleet.acceptance.at_position(self.context[take] - fleet.prompt_tokens)
        uniform = self.rng.random(live.shape)
        drafts = np.minimum(fleet.acceptance.found(uniform, power), asked)
        views: list[StepView] | None = None
        if self.policies is None:
            k_next = self._oracle(scheduled, (self.context[take] * live).sum(1), power, live)
            own_next = np.broadcast_to(k_next[:, None], live.shape)
        else:
            views = self._views(take, live, scheduled, prefill)
            decisions = [self.policies[r].decide(v) for r, v in zip(self.replica[take].tolist(), views, strict=True)]
            k_next = np.array([d.k for d in decisions], dtype=np.int64)
            own_next = self._own(take, k_next, decisions)
        work = Work(decode, drafts.sum(1), context, k_next, scheduled, prefill)
        seconds = fleet.model.seconds(work) * self._disturbance(step)
        accepted = np.minimum(fleet.acceptance.accepted(uniform, power), drafts)
        produced = np.where(live, np.minimum(1 + accepted, self.remaining[take]), 0)
        self.remaining[take] -= produced
        self.context[take] += produced
        self.outcome.tokens += int(produced.sum())
        self._count(scheduled, k_next)
        self.own_k[take] = own_next
        self.k[take] = k_next
        self.step[take] += 1
        self.clock[take] += seconds
        self.last[take] = seconds
        if self.replica[take][0] == 0:
            self._point(float(self.clock[take][0]), int(scheduled[0]), int(k_next[0]))
        if views is not None:
            self._observe(take, seconds, decode, prefill, k, k_next, drafts, accepted, context, decodes)
        done = live & (self.remaining[take] <= 0)
        if done.any():
            ident = self.ident[take]
            ident[done] = -1
            self.ident[take] = ident
            self.ends.append(np.repeat(self.clock[take], done.sum(1)))

    def _views(self, take: Any, live: Mask, scheduled: Ints, prefill: Ints) -> list[StepView]:
        context = (self.context[take] * live).sum(1).tolist()
        rows_taken = np.arange(len(self.replica))[take].tolist()
        waiting = [self._arrived(row) for row in rows_taken] if self.waiting else [0] * len(context)
        names: list[tuple[str, ...]] = [()] * len(context)
        remaining: list[tuple[float, ...]] = [()] * len(context)
        for row, replica in enumerate(self.replica[take].tolist()):
            if self._wants_requests(replica):
                on = live[row]
                names[row] = tuple(map(str, self.ident[take][row][on].tolist()))
                if self.fleet.lengths_known:
                    remaining[row] = tuple(self.remaining[take][row][on].tolist())
        rows = zip(scheduled.tolist(), waiting, prefill.tolist(), context, names, remaining, strict=True)
        return [
            StepView(b, w, p, context_tokens=c, requests=n, remaining=left, remaining_sd=0.0 if left else LENGTH_SD)
            for b, w, p, c, n, left in rows
        ]

    def _wants_requests(self, replica: int) -> bool:
        assert self.policies is not None
        return bool(getattr(self.policies[replica], "wants_requests", False))

    def _own(self, take: Any, k_next: Ints, decisions: list[Decision]) -> Ints:
        own = np.broadcast_to(k_next[:, None], self.ident[take].shape)
        if not any(decision.per_request for decision in decisions):
            return own
        own = own.copy()
        for row, (idents, decision) in enumerate(zip(self.ident[take].tolist(), decisions, strict=True)):
            if decision.per_request:
                limits = decision.per_request
                own[row] = [min(decision.k, limits.get(str(i), decision.k)) for i in idents]
        return own

    def _oracle(self, scheduled: Ints, context: Ints, power: Floats, live: Mask) -> Ints:
        weight, curve = live.astype(float), self.fleet.acceptance
        length = curve.mean_length(power, weight)
        found = None if curve.drafted is None else curve.mean_found(power, weight)
        seconds = steady(self.fleet.model, scheduled.astype(float), context.astype(float), self.fleet.k_max, found)
        return np.argmax(length / seconds, axis=1)

    def _disturbance(self, step: Ints) -> Floats:
        fleet = self.fleet
        factor = np.exp(fleet.noise * self.rng.standard_normal(len(step))) if fleet.noise else np.ones(len(step))
        if fleet.hiccup_every:
            factor = np.where(self.rng.random(len(step)) < 1.0 / fleet.hiccup_every, fleet.hiccup_factor, factor)
        if fleet.speed_bias is not None:
            factor = factor * np.array([fleet.speed_bias(self.number, s) for s in step.tolist()])
        return factor

    def _observe(
        self,
        take: Any,
        seconds: Floats,
        decode: Ints,
        prefill: Ints,
        k: Ints,
        k_next: Ints,
        drafts: Ints,
        accepted: Ints,
        context: Ints,
        decodes: Mask,
    ) -> None:
        assert self.policies is not None
        k_max = self.fleet.k_max
        rows = zip(
            self.replica[take].tolist(),
            seconds.tolist(),
            decode.tolist(),
            prefill.tolist(),
            k.tolist(),
            k_next.tolist(),
            context.tolist(),
            strict=True,
        )
        for row, (replica, time, b, p, had, made, c) in enumerate(rows):
            drafted, hits, requests = self.zeros, self.zeros, None
            if had and b:
                hits = at_least(accepted[row][decodes[row]], k_max).tolist()
                drafted = at_least(drafts[row][decodes[row]], k_max).tolist()
                if self._wants_requests(replica):
                    on = decodes[row]
                    idents = map(str, self.ident[take][row][on].tolist())
                    pairs = zip(drafts[row][on].tolist(), accepted[row][on].tolist(), strict=True)
                    requests = dict(zip(idents, pairs, strict=True))
            self.policies[replica].observe(
                StepResult(time, b, p, had, made, drafted, hits, b if had else 0, c, requests)
            )

    def _count(self, scheduled: Ints, k_next: Ints) -> None:
        self.outcome.replica_steps += len(scheduled)
        rows = np.minimum(np.ceil(np.log2(np.maximum(scheduled, 1))).astype(int), BUCKETS - 1)
        np.add.at(self.outcome.steps, (rows, k_next), 1)

    def _point(self, clock: float, decode: int, k: int) -> None:
        line = self.outcome.timeline
        if self.step[0] <= 1:
            line.clear()
        line.append((clock, decode, k))
        if len(line) > 4 * POINTS:
            del line[::2]

    def _compact(self, busy: Mask, width: int) -> None:
        """Drop finished replicas and empty slots."""
        order = np.argsort(self.ident[busy] < 0, axis=1, kind="stable")[:, :width]
        for name in ("ident", "remaining", "context", "power", "own_k"):
            setattr(self, name, np.take_along_axis(getattr(self, name)[busy], order, axis=1).copy())
        for name in ("replica", "clock", "last", "step", "k"):
            setattr(self, name, getattr(self, name)[busy])


def at_least(counts: Ints, k_max: int) -> Ints:
    """How many of `counts` are at least 1, 2, .. k_max."""
    return np.bincount(counts, minlength=k_max + 1)[::-1].cumsum()[-2::-1][:k_max]
