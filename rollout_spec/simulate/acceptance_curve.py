"""The truth about acceptance in a simulated rollout: a curve over positions, spread over requests, drifting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_spec.control.step_times import StepTimes

Floats = NDArray[np.float64]
# Response tokens that share a power, by default.
POSITION_BLOCK = 32
# Power of a request for which hardly any draft is accepted: of a rate of 0.9 it leaves 0.01.
HOPELESS = 40.0


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    """P(first j drafts accepted) of a sequence is `survival[j-1] ** power`; a power above 1 is worse.

    The power of one sequence at one step is its own (log-normal over requests) times that of the moment: `by_round`
    as the policy moves away from its drafter, `by_step` within a rollout (both the same for all replicas), and
    `by_position` as its response grows: a model that repeats itself is easy to draft for.
    """

    survival: tuple[float, ...]
    """P(first j drafts accepted), j = 1 .. k_max, falling."""
    request_sigma: float = 0.0
    """Deviation of the logarithm of a request's power."""
    hopeless_share: float = 0.0
    """Of the requests, those for which hardly any draft is accepted: free text to a drafter that copies."""
    by_round: tuple[float, ...] = (1.0,)
    """Power in rollout 0, 1, ...; the last holds on."""
    by_step: tuple[float, ...] = field(default=(1.0,))
    """Power at the steps of a rollout, each entry for `step_block` steps; the last holds on."""
    step_block: int = 32
    by_position: tuple[float, ...] = field(default=(1.0,))
    """Power at the tokens of a response, each entry for `position_block` tokens; the last holds on."""
    position_block: int = POSITION_BLOCK
    drafted: tuple[float, ...] | None = None
    """P(at least j tokens drafted), j = 1 .. k_max, for drafters that may find none; None: always all."""

    def __post_init__(self) -> None:
        if self.drafted is not None and (
            len(self.drafted) != len(self.survival)
            or any(d < s - 1e-9 for d, s in zip(self.drafted, self.survival, strict=True))
        ):
            raise ValueError("acceptance curve: `drafted` must be as long as `survival`, and nowhere below it")

    @classmethod
    def geometric(cls, rate: float, k_max: int, decay: float = 1.0, **more: object) -> AcceptanceCurve:
        """Each draft is accepted with `rate` after those before it, times `decay` a position further on."""
        rates = rate * decay ** np.arange(k_max)
        return cls(survival=tuple(np.cumprod(rates).tolist()), **more)  # type: ignore[arg-type]

    @classmethod
    def from_positions(cls, survival: Sequence[float], k_max: int, **more: object) -> AcceptanceCurve:
        """From measured P(first j accepted); positions beyond go on with the last conditional rate."""
        values = list(survival[:k_max])
        last = values[-1] / values[-2] if len(values) > 1 and values[-2] > 0 else values[-1]
        while len(values) < k_max:
            values.append(values[-1] * last)
        return cls(survival=tuple(values), **more)  # type: ignore[arg-type]

    @classmethod
    def measured(cls, times: StepTimes, k_max: int, **more: object) -> AcceptanceCurve:
        """That of a profile; raises ValueError if it has none."""
        if not times.acceptance:
            raise ValueError("these step times come without a measured acceptance")
        known = {"by_position": times.by_position, **more}
        if not times.drafted:
            return cls.from_positions(times.acceptance, k_max, **known)
        accepted = cls.from_positions(times.acceptance, k_max).survival
        found = [*times.drafted[:k_max], *[times.drafted[-1]] * (k_max - len(times.drafted))]
        drafted = tuple(max(d, s) for d, s in zip(found, accepted, strict=True))
        return cls.from_positions(times.acceptance, k_max, drafted=drafted, **known)

    def power(self, round_: int, step: int | NDArray[np.int64]) -> Floats:
        """The moment's power, of the shape of `step`."""
        blocks = np.minimum(np.asarray(step) // self.step_block, len(self.by_step) - 1)
        return np.asarray(self.by_step)[blocks] * self.by_round[min(round_, len(self.by_round) - 1)]

    def at_position(self, position: NDArray[np.int64]) -> Floats:
        """The power that goes with so many tokens generated; of the shape of `position`."""
        blocks = np.clip(position // self.position_block, 0, len(self.by_position) - 1)
        return np.asarray(self.by_position)[blocks]

    def request_powers(self, count: int, rng: np.random.Generator) -> Floats:
        """One for each request; without hopeless ones the mean of the logarithm is 0."""
        powers: Floats = np.exp(self.request_sigma * rng.standard_normal(count))
        if self.hopeless_share:
            powers[rng.random(count) < self.hopeless_share] *= HOPELESS
        return powers

    def accepted(self, uniform: Floats, power: Floats) -> NDArray[np.int64]:
        """Drafts in a row that would be accepted, given one uniform number a sequence; any shape."""
        # u < s_j ** p  <=>  u ** (1/p) < s_j, and s falls: count the positions above.
        return _count(self.survival, uniform, power)

    def found(self, uniform: Floats, power: Floats) -> NDArray[np.int64] | int:
        """Draft tokens that the drafter finds; with the same uniform numbers never fewer than are accepted."""
        return len(self.survival) if self.drafted is None else _count(self.drafted, uniform, power)

    def mean_length(self, power: Floats, weight: Floats) -> Floats:
        """AL(K), K = 0 .. k_max, of rows of sequences: [..., S] powers and 0/1 weights give [..., k_max + 1]."""
        return 1.0 + _mean_sums(self.survival, power, weight)

    def mean_found(self, power: Floats, weight: Floats) -> Floats:
        """Expected draft tokens a sequence for K = 0 .. k_max, likewise."""
        return _mean_sums(self.drafted or (1.0,) * len(self.survival), power, weight)


def _count(falling: Sequence[float], uniform: Floats, power: Floats) -> NDArray[np.int64]:
    return np.searchsorted(-np.asarray(falling), -(uniform ** (1.0 / power)), side="left")


def _mean_sums(falling: Sequence[float], power: Floats, weight: Floats) -> Floats:
    survive = np.asarray(falling) ** power[..., None]
    mean = (survive * weight[..., None]).sum(-2) / np.maximum(weight.sum(-1), 1.0)[..., None]
    return np.concatenate([np.zeros((*mean.shape[:-1], 1)), mean.cumsum(-1)], axis=-1)
