"""How long a simulated engine step takes. Arguments broadcast: one call serves all replicas, or all K at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout_spec.control.step_times import StepTimes

Floats = NDArray[np.float64]


class Work(NamedTuple):
    """What one step does, a replica each; arrays of one shape or scalars."""

    decode: Any
    """Sequences that decode."""
    draft_tokens: Any
    """Draft tokens verified, all sequences together."""
    context: Any
    """Context tokens of those sequences, all together."""
    k_next: Any
    """Draft tokens made for each of `drafting` sequences."""
    drafting: Any
    """Sequences that get drafts at the end of the step."""
    prefill: Any = 0.0
    """Prompt tokens."""


class StepModel(Protocol):
    def seconds(self, work: Work) -> Floats: ...


def steady(model: StepModel, decode: Floats, context: Floats, k_max: int, found: Floats | None = None) -> Floats:
    """Seconds of steps that ask for and verify K each, [..., k_max + 1], for arrays of batches and contexts.

    found [..., k_max + 1]: the draft tokens a sequence that come of asking for K; None: K.
    """
    ks = np.arange(k_max + 1.0)
    b, c = np.asarray(decode)[..., None], np.asarray(context)[..., None]
    return model.seconds(Work(b, b * (ks if found is None else found), c, ks, b))


@dataclass(frozen=True)
class Tabulated:
    """Step times of a table or profile, linear between its points (see `StepTimes`)."""

    times: StepTimes
    k_max: int
    prefill_token_seconds: float = 0.0

    def __post_init__(self) -> None:
        batches: Floats = np.unique(np.geomspace(1, 2 * max(self.times.batch), 200).round()).astype(np.float64)
        contexts = [float(c) for c in self.times.context]
        rows = [[self.times.by_k(b, self.k_max, c) for c in contexts] for b in batches]
        object.__setattr__(self, "_batches", batches)
        object.__setattr__(self, "_contexts", np.array(contexts))
        object.__setattr__(self, "_grid", np.array(rows))  # [batch, context, k]

    def seconds(self, work: Work) -> Floats:
        b = np.asarray(work.decode, dtype=float)
        drawn = np.broadcast_arrays(b, work.draft_tokens, work.context, work.k_next, work.drafting, work.prefill)
        b, draft_tokens, context, k_next, drafting, prefill = (np.asarray(a, dtype=float) for a in drawn)
        each = np.divide(draft_tokens, b, out=np.zeros_like(b), where=b > 0)
        mean_context = np.divide(context, b, out=np.zeros_like(b), where=b > 0)
        base = self._at(np.maximum(b, 1), mean_context, np.zeros_like(b))
        verified = self._at(np.maximum(b, 1), mean_context, each)
        drafted = self._at(np.maximum(drafting, 1), mean_context, k_next)
        share = self.times.draft_share
        base_next = self._at(np.maximum(drafting, 1), mean_context, np.zeros_like(b))
        total = base + (1 - share) * (verified - base) + share * (drafted - base_next)
        return total * self.times.hiccups + prefill * self.prefill_token_seconds

    def _at(self, b: Floats, context: Floats, k: Floats) -> Floats:
        grid: Floats = self._grid  # type: ignore[attr-defined]
        i, u = _locate(self._batches, b)  # type: ignore[attr-defined]
        j, v = _locate(self._contexts, context)  # type: ignore[attr-defined]
        m, w = _locate(np.arange(self.k_max + 1, dtype=np.float64), k)
        out = np.zeros(np.shape(b))
        for di, pi in ((0, 1 - u), (1, u)):
            for dj, pj in ((0, 1 - v), (1, v)):
                for dm, pm in ((0, 1 - w), (1, w)):
                    point = grid[
                        np.minimum(i + di, grid.shape[0] - 1),
                        np.minimum(j + dj, grid.shape[1] - 1),
                        np.minimum(m + dm, grid.shape[2] - 1),
                    ]
                    out = out + pi * pj * pm * point
        return out


def _locate(axis: Floats, value: Floats) -> tuple[NDArray[np.int64], Floats]:
    if len(axis) == 1:
        return np.zeros(np.shape(value), dtype=np.int64), np.zeros(np.shape(value))
    low = np.clip(np.searchsorted(axis, value, side="right") - 1, 0, len(axis) - 2)
    share = (value - axis[low]) / (axis[low + 1] - axis[low])
    return low, np.clip(share, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Analytic:
    """A step as a sum of what it waits for. Times in seconds; the roofline of a device and model gives the figures.

    The linear layers take the larger of reading weights and computing tokens, rounded off where the two meet.
    """

    fixed: float
    """Host and launches of a step."""
    weights: float
    """Reading the weights that every token uses."""
    token: float
    """Computing one token."""
    kv_token: float = 0.0
    """Reading one token of context."""
    expert_weights: float = 0.0
    """Reading all experts."""
    experts: int = 1
    experts_a_token: int = 1
    draft_pass: float = 0.0
    """One pass of the drafter: its weights and launches."""
    draft_token: float = 0.0
    """Drafting one token of one sequence, beyond that."""
    draft_kv_token: float = 0.0
    """The drafter reading one token of context, a pass."""
    verify_fixed: float = 0.0
    """The rejection sampler, a step with drafts."""
    sample_token: float = 0.0
    """Logits and sampling, a token."""
    drafter_tax: float = 0.0
    """What a loaded drafter adds to each step, drafts or not."""
    tile: int = 1
    """Tokens are computed in multiples of this (tiles, captured graphs)."""
    sharpness: float = 4.0
    """Of the corner between reading and computing: (r^p + c^p)^(1/p)."""

    def seconds(self, work: Work) -> Floats:
        decode, draft_tokens = np.asarray(work.decode, dtype=float), np.asarray(work.draft_tokens, dtype=float)
        n = decode + draft_tokens + work.prefill
        padded = np.ceil(n / self.tile) * self.tile if self.tile > 1 else n
        touched = 1.0 - (1.0 - self.experts_a_token / self.experts) ** n
        reading = self.weights + self.expert_weights * touched
        p = self.sharpness
        linear = (reading**p + (self.token * padded) ** p) ** (1.0 / p)
        k_next, drafting = np.asarray(work.k_next, dtype=float), np.asarray(work.drafting, dtype=float)
        draft = k_next * (self.draft_pass + self.draft_token * drafting + self.draft_kv_token * work.context)
        sampling = self.verify_fixed * (draft_tokens > 0) + self.sample_token * (decode + draft_tokens)
        return self.fixed + self.drafter_tax + linear + self.kv_token * work.context + draft + sampling


def tabulate(
    model: StepModel, batches: list[int], k_max: int, contexts: list[int], spread: float, draft_share: float = 0.1
) -> StepTimes:
    """The model as a table: what a profiler would have measured without noise, or a roofline prior."""
    planes = [[steady(model, np.array(float(b)), np.array(float(b * c)), k_max) for c in contexts] for b in batches]
    seconds = tuple(
        tuple(tuple(float(planes[i][j][k]) for j in range(len(contexts))) for k in range(k_max + 1))
        for i in range(len(batches))
    )
    return StepTimes(tuple(batches), tuple(range(k_max + 1)), seconds, tuple(contexts), draft_share, spread=spread)
