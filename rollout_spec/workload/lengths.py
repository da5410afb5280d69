"""Distributions of response length, in tokens, from published figures (`published.json`, each with its source).

A sample is stratified: the unit interval is cut into as many slices as there are responses and each slice gives
one, so that even a batch of 16 has the shape of its distribution, tail included, every time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_spec.config import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PROFILES = ("heavy_tail", "clipped_math", "drain_curve")

# Keeps the quantile function finite; a slice this thin would take 10^12 responses to matter.
EDGE = 1e-12
# No response is longer; a scale or a file that asks for more has a slip in it.
MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths in tokens whose logarithm is normal, cut at `cap`."""

    median: float
    sigma: float
    cap: float
    source: str

    def quantile(self, u: Floats) -> Floats:
        """Length in tokens below which a share `u` (0 < u < 1) of the responses stays."""
        normal = NormalDist()
        z = np.array([normal.inv_cdf(p) for p in u.tolist()], dtype=np.float64)
        return np.minimum(self.median * np.exp(self.sigma * z), self.cap)


@dataclass(frozen=True, slots=True)
class DrainCurve:
    """A recorded rollout: `finished[i]` sessions were done after `seconds[i]`; straight lines between.

    The record starts with many sessions done already. The first segment's slope is continued back to none done:
    the steady rate at which sessions finish in the bulk, and far from a jump at the first recorded second.
    """

    finished: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str
    cap: None = None

    def quantile(self, u: Floats) -> Floats:
        """Seconds after which a share `u` (0 <= u <= 1) of the sessions is done."""
        slope = (self.seconds[1] - self.seconds[0]) / (self.finished[1] - self.finished[0])
        start = max(0.0, self.seconds[0] - slope * self.finished[0])
        return np.interp(u * self.finished[-1], (0.0, *self.finished), (start, *self.seconds))


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Lengths in tokens; `share_clipped` is the share at the cap, None where there is no cap."""

    median: float
    mean: float
    p90: float
    max: int
    share_clipped: float | None


@cache
def length_profile(name: str) -> LogNormal | DrainCurve:
    """The published distribution called `name`; raises ConfigError for a name not in PROFILES."""
    if name not in PROFILES:
        raise ConfigError(f"length profile {name!r}: no such profile; choose one of {', '.join(PROFILES)}")
    published: dict[str, Any] = json.loads(files(__package__).joinpath("published.json").read_text("utf-8"))
    if name == "drain_curve":
        curve = published["drain_curve_agentic"]
        return DrainCurve(tuple(curve["finished"]), tuple(curve["seconds"]), curve["source"])
    return LogNormal(**published["length_profiles"][name], source=published["length_profiles"]["source"])


def sample_lengths(profile: str, count: int, scale: float, rng: np.random.Generator, min_tokens: int = 1) -> Ints:
    """`count` lengths in tokens, in random order: quantiles of `profile` (capped, then times `scale`), rounded.

    A length is at least `min_tokens`. Raises ConfigError for an unknown profile or a length beyond MAX_TOKENS.
    """
    u = np.clip((rng.permutation(count) + rng.random(count)) / count, EDGE, 1 - EDGE)
    lengths = length_profile(profile).quantile(u) * scale
    if not np.all(lengths <= MAX_TOKENS):
        raise ConfigError(f"workload.scale {scale}: gives lengths beyond {MAX_TOKENS} tokens; must be smaller")
    return np.maximum(np.rint(lengths).astype(np.int64), min_tokens)


def scaled_cap(profile: str, scale: float) -> int | None:
    """The length in tokens of a clipped response, None for a profile without a cap."""
    cap = length_profile(profile).cap
    return None if cap is None else round(cap * scale)


def describe(lengths: npt.ArrayLike, cap: int | None = None) -> LengthSummary:
    """Summary of lengths in tokens; `cap` is the length of a clipped response. Raises ValueError on none."""
    values = np.asarray(lengths)
    if values.size == 0:
        raise ValueError("there are no lengths to describe")
    return LengthSummary(
        median=float(np.median(values)),
        mean=float(values.mean()),
        p90=float(np.quantile(values, 0.9)),
        max=int(values.max()),
        share_clipped=None if cap is None else float((values >= cap).mean()),
    )
